import numpy as np
import pytest

from cgdnn.kernels import elementwise as kernels
from tests.kernels.agree import assert_agrees

RNG = np.random.default_rng(4)
SHAPE = (4, 37)
A, B, C = (RNG.integers(-3, 4, SHAPE) / 2 for _ in range(3))  # with ties
MASK = RNG.integers(0, 3, SHAPE).astype(np.int32)
KEPT = RNG.integers(0, 2, SHAPE).astype(np.uint8)
NAN = np.nan


def row(*values):
    return np.array([values], np.float64)


def test_max_gives_a_tie_to_the_second_and_to_no_later_one():
    y, mask = row(0, 0, 0), np.zeros((1, 3), np.int32)
    kernels.max_of_two(row(1, 2, 2), row(2, 1, 2), y, mask, 0, 1)
    assert (y.tolist(), mask.tolist()) == ([[2, 2, 2]], [[1, 0, 1]])
    kernels.max_with_next(row(2, 3, 2), 2, y, mask, 0, 1)
    assert (y.tolist(), mask.tolist()) == ([[2, 3, 2]], [[1, 2, 1]])


def test_max_keeps_a_nan_of_any_input():
    y, mask = row(0, 0, 0), np.zeros((1, 3), np.int32)
    kernels.max_of_two(row(NAN, 1, 1), row(1, NAN, 2), y, mask, 0, 1)
    kernels.max_with_next(row(5, 5, NAN), 2, y, mask, 0, 1)
    assert np.isnan(y).all()
    assert mask.tolist() == [[0, 1, 2]]


def test_division_by_zero_is_ieee():
    y = row(0, 0)
    kernels.divide_multiply(row(1, 0), row(0, 0), row(2, 2), y, 0, 1)
    np.testing.assert_array_equal(y, row(np.inf, NAN))


def test_copy_leaves_other_columns_alone():
    y = np.full((2, 5), 9.0)
    kernels.copy_columns(np.arange(6.0).reshape(2, 3), 1, y, 2, 2, 0, 2)
    assert y.tolist() == [[9, 9, 1, 2, 9], [9, 9, 4, 5, 9]]


def test_dropout_keeps_all_at_threshold_zero_and_a_share_else():
    x, y = np.ones((50, 400)), np.empty((50, 400))
    mask = np.empty(x.shape, np.uint8)
    kernels.dropout_forward(x, y, mask, 0, 1.0, 7, 0, 0, 50)
    assert (y == 1).all()
    assert mask.all()
    kernels.dropout_forward(x, y, mask, int(0.3 * 2**32), 2.0, 7, 0, 0, 50)
    np.testing.assert_array_equal(y, 2.0 * mask)
    # 20,000 draws: the share has a standard deviation of 0.0032.
    assert abs(mask.mean() - 0.7) < 0.016


def test_dropout_shows_a_nan_that_it_drops():
    x, y, mask = np.full((1, 64), NAN), np.empty((1, 64)), np.empty((1, 64), np.uint8)
    kernels.dropout_forward(x, y, mask, 2**31, 2.0, 7, 0, 0, 1)
    assert 0 < mask.sum() < 64
    assert np.isnan(y).all()


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [(kernels.add_scaled, [A, 2.0, B, -0.5]), (kernels.multiply, [A, B])],
    ids=lambda value: getattr(value, "name", ""),
)
def test_in_place_gives_the_same_bits(kernel, arguments, place):
    inputs = [value.copy() if isinstance(value, np.ndarray) else value for value in arguments]
    apart = np.zeros(SHAPE)
    kernel(*inputs, apart, 1, 3)
    arrays = [value for value in inputs if isinstance(value, np.ndarray)]
    kernel(*inputs, arrays[place], 1, 3)
    np.testing.assert_array_equal(arrays[place][1:3], apart[1:3])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (kernels.fill, (A, -1.5)),
        (kernels.copy_columns, (A, 3, B, 20, 11)),
        (kernels.scale, (A, -0.25, B)),
        (kernels.add_scaled, (A, 2.0, B, -0.5, C)),
        (kernels.multiply, (A, B, C)),
        (kernels.divide_multiply, (A, B + 4, C, A)),
        (kernels.max_of_two, (A, B, C, MASK)),
        (kernels.max_with_next, (A, 5, B, MASK)),
        (kernels.select, (A, MASK, 1, B)),
        (kernels.dropout_forward, (A, B, KEPT, 2**30, 4 / 3, -5, 9)),
        (kernels.dropout_backward, (A, KEPT, 2.0, B)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_agrees_with_reference(kernel, arguments, dtype):
    assert_agrees(kernel, *arguments, 1, 3, dtype=dtype)
