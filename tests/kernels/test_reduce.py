import numpy as np
import pytest

from cgdnn.kernels.reduce import reduce_rows


def add(partial, out, accumulate, begin, end):
    """Add the rows to `out` one element at a time, as `reduce_rows` promises."""
    for j in range(begin, end):
        total = partial[0, j]
        if accumulate != 0:
            total = out.dtype.type(accumulate) * out[j] + total
        for i in range(1, len(partial)):
            total = total + partial[i, j]
        out[j] = total


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("accumulate", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_rows_are_added_in_order(dtype, accumulate, rows):
    generator = np.random.default_rng(rows)
    partial = generator.standard_normal((rows, 5000)).astype(dtype)
    out = generator.standard_normal(5000).astype(dtype)
    want = out.copy()
    add(partial, want, accumulate, 3, 4990)
    reduce_rows(partial, out, accumulate, 3, 4990)
    if accumulate == 0.5:  # the product may be rounded apart from the sum, or together with it
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(out, want)


def test_what_is_overwritten_is_not_read():
    out = np.full(3, np.nan)
    reduce_rows(np.array([[1.0, 2, 3], [10, 20, 30]]), out, 0.0, 0, 3)
    np.testing.assert_array_equal(out, [11, 22, 33])


def test_nan_of_any_row_shows():
    out = np.zeros(2)
    reduce_rows(np.array([[1.0, 2], [np.nan, 20]]), out, 1.0, 0, 2)
    np.testing.assert_array_equal(np.isnan(out), [True, False])
