import numpy as np
import pytest

from cgdnn.kernels import softmax
from tests.kernels.agree import assert_agrees

RNG = np.random.default_rng(1)
SHAPE = (3, 2, 5, 4)


def column(*values):
    return np.array(values, np.float64).reshape(1, 1, -1, 1)


def test_known_values():
    y = np.empty((1, 1, 3, 1))
    softmax.softmax_forward(column(0.0, np.log(2.0), np.log(5.0)), y, 0, 1)
    np.testing.assert_allclose(y.ravel(), [0.125, 0.25, 0.625], rtol=1e-15)


def test_large_scores_do_not_overflow():
    y = np.empty((1, 1, 2, 1))
    softmax.softmax_forward(column(1e4, 1e4), y, 0, 1)
    assert y.ravel().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_spreads_over_its_distribution_only(place):
    x = np.zeros((2, 1, 3, 1))
    x[0, 0, place, 0] = np.nan
    y = np.empty_like(x)
    softmax.softmax_forward(x, y, 0, 2)
    assert np.isnan(y[0]).all()
    np.testing.assert_allclose(y[1], 1 / 3)


def test_in_place_equals_apart():
    x = RNG.normal(size=SHAPE)
    y = np.empty_like(x)
    softmax.softmax_forward(x, y, 0, 3)
    softmax.softmax_forward(x, x, 0, 3)
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("span", [(0, 3), (1, 2)])
def test_forward_agrees(dtype, span):
    x = 3 * RNG.normal(size=SHAPE)
    assert_agrees(softmax.softmax_forward, x, np.full(SHAPE, 9.0), *span, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("span", [(0, 3), (1, 2)])
def test_backward_agrees(dtype, span):
    y = RNG.dirichlet(np.ones(5), size=(3, 2, 4)).transpose(0, 1, 3, 2)
    dy = RNG.normal(size=SHAPE)
    assert_agrees(softmax.softmax_backward, y, dy, np.full(SHAPE, 9.0), *span, dtype=dtype)
