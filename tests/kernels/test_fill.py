import numpy as np
import pytest

from cgdnn.kernels import fill
from tests.kernels.agree import assert_agrees

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])
KEY, COUNTER = -(2**62) - 5, 7


def empty(*shape):
    return np.full(shape, 9.0)


@DTYPES
def test_fillers_agree(dtype):
    stream = KEY, COUNTER, 5
    assert_agrees(fill.fill_uniform, empty(30), -2.0, 3.0, *stream, 4, 29, dtype=dtype)
    assert_agrees(fill.fill_gaussian, empty(30), 1.0, 0.5, 1.0, *stream, 4, 29, dtype=dtype)
    assert_agrees(fill.fill_gaussian, empty(30), 1.0, 0.5, 0.25, *stream, 4, 29, dtype=dtype)
    assert_agrees(fill.fill_unitball, empty(4, 9), *stream, 1, 3, dtype=dtype)
    for size in (1, 3, 4, 5):
        assert_agrees(fill.fill_bilinear, empty(3, size, size), 1, 3, dtype=dtype)


def test_pieces_give_the_values_of_the_whole():
    whole, parts = empty(1000), empty(1000)
    fill.fill_gaussian(whole, 0.0, 1.0, 0.5, KEY, COUNTER, 0, 0, 1000)
    fill.fill_gaussian(parts, 0.0, 1.0, 0.5, KEY, COUNTER, 0, 700, 1000)
    fill.fill_gaussian(parts[:300], 0.0, 1.0, 0.5, KEY, COUNTER, 0, 0, 300)
    fill.fill_gaussian(parts[300:700], 0.0, 1.0, 0.5, KEY, COUNTER, 300, 0, 400)
    np.testing.assert_array_equal(whole, parts)


def test_key_and_counter_choose_the_stream():
    drawn = []
    for key, counter in ((1, 0), (2, 0), (1, 1)):
        x = empty(100)
        fill.fill_uniform(x, 0.0, 1.0, key, counter, 0, 0, 100)
        drawn.append(x)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(drawn[first], drawn[second])[0, 1]) < 0.4


def test_uniform_numbers_are_spread_evenly():
    x = empty(40000)
    fill.fill_uniform(x, 0.0, 1.0, KEY, COUNTER, 0, 0, x.size)
    counts = np.histogram(x, 40, (0.0, 1.0))[0]
    chi_squared = ((counts - 1000.0) ** 2 / 1000.0).sum()
    assert chi_squared < 80  # 39 degrees of freedom: 1 in 10,000


def test_normal_numbers_have_normal_quantiles():
    x = empty(40000)
    fill.fill_gaussian(x, 0.0, 1.0, 1.0, KEY, COUNTER, 0, 0, x.size)
    for quantile, value in ((0.0228, -2.0), (0.1587, -1.0), (0.5, 0.0), (0.9772, 2.0)):
        assert np.quantile(x, quantile) == pytest.approx(value, abs=0.05)


def test_bilinear_weights_of_known_sizes():
    for size, row in ((3, [0.5, 1, 0.5]), (4, [0.25, 0.75, 0.75, 0.25])):
        x = empty(1, size, size)
        fill.fill_bilinear(x, 0, 1)
        np.testing.assert_allclose(x[0], np.outer(row, row))
