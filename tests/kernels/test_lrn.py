import numpy as np
import pytest

from cgdnn import machine
from cgdnn.kernels import lrn as kernels
from tests.kernels.agree import TOLERANCE
from tests.reference import lrn

RNG = np.random.default_rng(6)
LANES = machine.vector_bytes() // 4
# Planes that fill a vector and more; rows of one and of several blocks; a part of a row only.
SHAPES = [(3, 13, 5, 7), (2, 11, 3, 1), (2, 3, 20, 33)]


def memory(which, size, row, dtype):
    return np.full((kernels.work_rows(which, size), row), np.nan, dtype)


def run_in_two(kernel, count, *arguments):
    """Run a kernel on all units, the last ones first."""
    kernel(*arguments, 1, count)
    kernel(*arguments, 0, 1)


def across(x, dy, size, alpha, beta, k):
    """Return y and dx for x and dy (N, C, S)."""
    usual, row = beta == kernels.USUAL_BETA, kernels.across_row(x.shape[2])
    y, dx = np.full_like(x, 9), np.full_like(x, 9)
    work = [memory(which, size, row, x.dtype) for which in ("forward", "backward")]
    forward, backward = kernels.across_forward(size, usual), kernels.across_backward(size, usual)
    run_in_two(forward, len(x), x, y, work[0], alpha, beta, k)
    run_in_two(backward, len(x), x, dy, dx, work[1], alpha, beta, k)
    return y, dx


def within(x, dy, size, alpha, beta):
    """Return y and dx for x and dy (N, C, H, W)."""
    usual, row = beta == kernels.USUAL_BETA, kernels.within_row(x.shape[3], size)
    y, dx = np.full_like(x, 9), np.full_like(x, 9)
    planes = np.full((2, kernels.within_plane(*x.shape[2:])), np.nan, x.dtype)
    work = [memory(which, size, row, x.dtype) for which in ("forward", "backward")]
    forward, backward = kernels.within_forward(size, usual), kernels.within_backward(size, usual)
    run_in_two(forward, len(x), x, y, planes, work[0], alpha, beta)
    run_in_two(backward, len(x), x, dy, dx, planes, work[1], alpha, beta)
    return y, dx


def within_lanes(x, dy, size, alpha, beta):
    """Return y and dx for x and dy (planes, H, W, L)."""
    usual, row = beta == kernels.USUAL_BETA, kernels.within_row(x.shape[2], size)
    y, dx = np.full_like(x, 9), np.full_like(x, 9)
    work = [memory(which, size, row, x.dtype) for which in ("forward", "backward")]
    forward = kernels.within_lanes_forward(size, usual)
    backward = kernels.within_lanes_backward(size, usual)
    run_in_two(forward, len(x), x, y, work[0], alpha, beta)
    run_in_two(backward, len(x), x, dy, dx, work[1], alpha, beta)
    return y, dx


def test_across_of_known_values():
    x = np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    y, _ = across(x, x, 3, 3.0, 1.0, 2.0)
    np.testing.assert_allclose(y.ravel(), [1 / 7, 2 / 16, 3 / 15])


def test_within_of_known_values():
    x = np.array([[1.0, 2.0], [3.0, 0.0]]).reshape(1, 1, 2, 2)
    y, _ = within(x, x, 3, 9.0, 0.5)
    np.testing.assert_allclose(y, x / 15**0.5)  # every window holds all four


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1e-30, 1e-18, 1e-3, 1.0, 7.0, 1e18, 1e30])
def test_three_quarters_of_any_size(k, dtype):
    x, dy = (RNG.normal(size=(1, 1, 37)).astype(dtype) for _ in range(2))
    y, dx = across(x, dy, 1, 0.0, 0.75, k)
    tolerance = 1e-6 if dtype == "float32" else 4e-15
    np.testing.assert_allclose(y, x * k**-0.75, tolerance)
    np.testing.assert_allclose(dx, dy * k**-0.75, tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_three_quarters_between_powers_of_two(dtype):
    x = np.linspace(1, 16, 5000).reshape(1, 1, -1).astype(dtype)
    y, _ = across(x, x, 1, 1.0, 0.75, 0.0)
    np.testing.assert_allclose(y, x.astype(np.float64) ** -0.5, 4 * np.finfo(dtype).eps)


def test_infinity_gives_zero_around_it():
    x = np.ones((1, 7, 1))
    x[0, 3] = np.inf
    y, _ = across(x, np.ones_like(x), 3, 1.0, 0.75, 1.0)
    assert y[0, [2, 4], 0].tolist() == [0, 0]
    assert np.isnan(y[0, 3, 0])


@pytest.mark.parametrize("beta", [0.75, 0.5])
def test_a_nan_spreads_over_its_window_only(beta):
    x = np.ones((1, 7, 1))
    x[0, 3] = np.nan
    y, dx = across(x, np.ones_like(x), 3, 1.0, beta, 1.0)
    assert np.isnan(y.ravel()).tolist() == [False, False, True, True, True, False, False]
    assert np.isnan(dx.ravel()).tolist() == [False, True, True, True, True, True, False]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("beta", [0.75, 0.6])
@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize("region", ["across", "within"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_reference(shape, region, size, beta, dtype):
    x, dy = (RNG.normal(size=shape).astype(dtype) for _ in range(2))
    if region == "across":
        y, dx = across(*(a.reshape(*shape[:2], -1) for a in (x, dy)), size, 0.7, beta, 1.5)
    else:
        y, dx = within(x, dy, size, 0.7, beta)
    numbers = [region == "within", size, 0.7, beta]
    y_expected, s = lrn.lrn_forward(x, *numbers, 1.5 if region == "across" else 1.0)
    dx_expected = lrn.lrn_backward(x, s, dy, *numbers)
    for got, expected in ((y, y_expected), (dx, dx_expected)):
        np.testing.assert_allclose(got.reshape(shape), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("beta", [0.75, 0.6])
@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize("plane", [(5, 7), (1, 4), (16, 16)], ids=str)
def test_same_bits_in_lanes(plane, size, beta, dtype):
    x, dy = (RNG.normal(size=(3, LANES, *plane)).astype(dtype) for _ in range(2))
    x[1, 2, 0, 1] = np.nan
    in_lanes = [np.ascontiguousarray(np.moveaxis(a, 1, 3)) for a in (x, dy)]
    numbers = [size, 0.7, beta]
    for got, expected in zip(
        within_lanes(*in_lanes, *numbers), within(x, dy, *numbers), strict=True
    ):
        np.testing.assert_array_equal(np.moveaxis(got, 3, 1), expected)
