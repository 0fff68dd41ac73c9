import numpy as np
import pytest

from cgdnn.kernels import update
from tests.kernels.agree import assert_agrees

RNG = np.random.default_rng(4)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])


def step(w, dw, history, *, factor=1.0, rate=0.5, momentum=0.0, l2=0.0, l1=0.0):
    w, dw, history = (np.array([v], float) for v in (w, dw, history))
    bad = np.full((1, 1), 9.0)
    update.sgd_update(w, dw, history, np.array([factor]), bad, rate, momentum, l2, l1, 0, 0, 1)
    return float(w[0]), float(history[0]), float(bad[0, 0])


def test_known_steps():
    assert step(3.0, 2.0, 0.0) == (2.0, 1.0, 0.0)
    assert step(3.0, 2.0, 4.0, momentum=0.25) == (1.0, 2.0, 0.0)
    assert step(3.0, 2.0, 0.0, factor=0.5) == (2.5, 0.5, 0.0)
    assert step(4.0, 2.0, 0.0, l2=0.5) == (2.0, 2.0, 0.0)
    assert step(-4.0, 2.0, 0.0, l1=0.5) == (-4.75, 0.75, 0.0)
    assert step(0.0, 2.0, 0.0, l1=0.5) == (-1.0, 1.0, 0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("l1", [0.0, 0.5])
def test_a_gradient_that_is_not_finite_is_reported(value, l1):
    assert step(1.0, value, 0.0, l1=l1)[2] == 1.0
    assert step(1.0, value, 0.0, rate=0.0, l1=l1)[2] == 1.0
    assert step(value, 1.0, 0.0, l1=l1)[2] == 1.0


def test_factor_clips_before_it_averages():
    factor = np.zeros(1)
    sums = np.array([[9.0], [16.0]])
    update.clip_factor(sums, factor, 10.0, 0.5)
    assert factor[0] == 0.5
    update.clip_factor(sums, factor, 2.5, 0.5)
    assert factor[0] == 0.25


@DTYPES
@pytest.mark.parametrize(("l2", "l1"), [(0.0, 0.0), (0.01, 0.0), (0.0, 0.01)])
def test_sgd_update_agrees_inside_its_range_only(dtype, l2, l1):
    arrays = *RNG.normal(size=(3, 50)), np.array([0.5]), np.full((2, 1), 9.0)
    assert_agrees(update.sgd_update, *arrays, 0.1, 0.9, l2, l1, 1, 3, 41, dtype=dtype)


@DTYPES
def test_norm_kernels_agree(dtype):
    dw = RNG.normal(size=100)
    assert_agrees(update.sum_squares, dw, np.full((2, 1), 9.0), 1, 7, 95, dtype=dtype)
    for clip in (0.5, 50.0):
        sums = np.array([[3.0], [1.0], [2.0]])
        assert_agrees(update.clip_factor, sums, np.zeros(1), clip, 0.25, dtype=dtype)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_check_finite_tells_the_first_place(value):
    x = np.zeros(5)
    assert update.check_finite(x) == 0
    x[[2, 4]] = value
    assert update.check_finite(x) == 3


def test_check_zero_tells_the_first_row():
    flags = np.zeros((4, 1))
    assert update.check_zero(flags) == 0
    flags[[1, 3]] = 1
    assert update.check_zero(flags) == 2
