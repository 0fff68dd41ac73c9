import numpy as np
import pytest

from cgdnn import machine
from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.kernels.relay import to_pixels


@kernel(array(1), INT, INT, array(1), *(INT,) * 5)
def _to_pixels(x, x_row, channels, y, y_start, pitch, columns, rows, y_row):  # type: ignore[no-untyped-def]
    to_pixels(x, 0, x_row, channels, y, y_start, pitch, columns, rows, y_row)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 16), (2, 17), (5, 13), (7, 7)])
def test_rows_of_channels_become_pixels_and_nothing_else_is_written(dtype, more, rows, columns):
    lanes = machine.vector_bytes() // np.dtype(dtype).itemsize
    rng = np.random.default_rng(rows)
    for channels in {1, 2, 3, 4, lanes - 1, lanes} & set(range(lanes + 1)):
        pitch, gap = channels + more, 2
        x = rng.standard_normal((channels, rows, columns)).astype(dtype)
        y = np.full((rows, columns + gap, pitch), np.nan, dtype)
        want = y.copy()
        want[:, 1 : columns + 1, :channels] = x.transpose(1, 2, 0)
        _to_pixels(
            *(x.ravel(), rows * columns, channels, y.ravel(), pitch, pitch, columns, rows),
            (columns + gap) * pitch,
        )
        np.testing.assert_array_equal(y, want)
