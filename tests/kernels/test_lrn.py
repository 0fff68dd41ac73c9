import numpy as np
import pytest

from cgdnn.kernels import lrn as kernels
from tests.kernels.agree import TOLERANCE
from tests.reference import lrn

RNG = np.random.default_rng(6)
ACROSS, WITHIN = (3, 6, 11), (3, 13, 5, 7)  # planes to fill a vector, and more


def test_across_of_known_values():
    x = np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    y, s = np.empty_like(x), np.empty_like(x)
    kernels.lrn_across_forward(x, y, s, 3, 3.0, 1.0, 2.0, 0, 1)
    np.testing.assert_allclose(s.ravel(), [7, 16, 15])
    np.testing.assert_allclose(y.ravel(), [1 / 7, 2 / 16, 3 / 15])


def test_within_of_known_values():
    x = np.array([[1.0, 2.0], [3.0, 0.0]]).reshape(1, 1, 2, 2)
    y, s = np.empty_like(x), np.empty_like(x)
    work = np.empty((2, kernels.within_scratch(2, 2)))
    kernels.lrn_within_forward(x, y, s, work, 3, 9.0, 0.5, 0, 1)
    np.testing.assert_allclose(s, np.full((1, 1, 2, 2), 15.0))  # every window holds all four
    np.testing.assert_allclose(y, x / 15**0.5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1e-30, 1e-18, 1e-3, 1.0, 7.0, 1e18, 1e30])
def test_three_quarters_of_any_size(k, dtype):
    x, dy = (RNG.normal(size=(1, 1, 37)).astype(dtype) for _ in range(2))
    y, s, dx = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    kernels.lrn_across_forward(x, y, s, 1, 0.0, 0.75, k, 0, 1)
    kernels.lrn_across_backward(x, y, s, dy, dx, np.empty((1, 37), dtype), 1, 0.0, 0.75, 0, 1)
    tolerance = 1e-6 if dtype == "float32" else 4e-15
    np.testing.assert_allclose(y, x * k**-0.75, tolerance)
    np.testing.assert_allclose(dx, dy * k**-0.75, tolerance)


def test_infinity_gives_zero_around_it():
    x = np.ones((1, 7, 1))
    x[0, 3] = np.inf
    y, s = np.empty_like(x), np.empty_like(x)
    kernels.lrn_across_forward(x, y, s, 3, 1.0, 0.75, 1.0, 0, 1)
    assert y[0, [2, 4], 0].tolist() == [0, 0]
    assert np.isnan(y[0, 3, 0])


@pytest.mark.parametrize("beta", [0.75, 0.5])
def test_a_nan_spreads_over_its_window_only(beta):
    x = np.ones((1, 7, 1))
    x[0, 3] = np.nan
    y, s = np.empty_like(x), np.empty_like(x)
    kernels.lrn_across_forward(x, y, s, 3, 1.0, beta, 1.0, 0, 1)
    assert np.isnan(y.ravel()).tolist() == [False, False, True, True, True, False, False]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("beta", [0.75, 0.6])
@pytest.mark.parametrize("size", [1, 3, 5, 9])
@pytest.mark.parametrize("region", ["across", "within"])
def test_agrees_with_reference(region, size, beta, dtype):
    shape, constant = (ACROSS, [1.5]) if region == "across" else (WITHIN, [])
    x, dy = (RNG.normal(size=shape).astype(dtype) for _ in range(2))
    y, s, dx, y_expected, s_expected, dx_expected = (np.zeros(shape, dtype) for _ in range(6))
    within = region == "within"
    work = np.empty((3, kernels.within_scratch(*shape[2:])) if within else shape[1:], dtype)
    squares = [work] if within else []
    numbers = [size, 0.7, beta]
    forward, backward = (f"lrn_{region}_{p}" for p in ("forward", "backward"))

    getattr(kernels, forward)(x, y, s, *squares, *numbers, *constant, 1, 3)
    getattr(lrn, forward)(x, y_expected, s_expected, *squares, *numbers, *constant, 1, 3)
    getattr(kernels, backward)(x, y, s, dy, dx, work, *numbers, 1, 3)
    getattr(lrn, backward)(x, y, s, dy, dx_expected, work, *numbers, 1, 3)
    for got, expected in ((y, y_expected), (s, s_expected), (dx, dx_expected)):
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[dtype])
