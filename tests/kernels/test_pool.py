from math import ceil

import numpy as np
import pytest

from cgdnn.kernels import pool as kernels
from tests.kernels.agree import assert_agrees

RNG = np.random.default_rng(5)
NAN, INF = np.nan, np.inf


def pool_max(x, kernel, pad, stride, pooled):
    """Pool one plane with square windows; return the values and their positions."""
    x = np.array(x, np.float64)
    y, argmax = np.empty((1, 1, *pooled)), np.empty((1, 1, *pooled), np.int32)
    window = [kernel] * 2 + [pad] * 2 + [stride] * 2
    run = kernels.max_forward((kernel, kernel), (stride, stride))
    run(x.reshape(1, 1, *x.shape), y, argmax, *window, 0, 1)
    return y[0, 0].tolist(), argmax[0, 0].tolist()


def pool_average(x, kernel, pad, stride, pooled):
    x, y = np.array(x, np.float64), np.empty((1, 1, *pooled))
    window = [kernel] * 2 + [pad] * 2 + [stride] * 2
    memory = scratch(x.shape[1], window, pooled)
    kernels.pool_average_forward(x.reshape(1, 1, *x.shape), y, *window, *memory, 0, 1)
    return y[0, 0].tolist()


def scratch(width, window, pooled):
    """Return the last arguments of the averaging kernels but the range."""
    kernel_h, stride_h = window[0], window[4]
    sizes = (
        kernels.band_scratch(width, kernel_h),
        kernels.pooled_scratch(width, pooled, kernel_h, stride_h),
    )
    return [kernels.band_rows(width), *(np.full(size, NAN) for size in sizes)]


def test_max_of_known_values():
    x = [[1, 5, 2, 0], [3, 4, 8, 7]]
    assert pool_max(x, 2, 0, 2, (1, 2)) == ([[5, 8]], [[1, 6]])


def test_max_gives_a_tie_to_the_first_position():
    assert pool_max([[1, 2, 2], [2, 2, 2], [0, 0, 0]], 3, 0, 1, (1, 1)) == ([[2]], [[1]])
    assert pool_max(np.zeros((4, 4)), 2, 0, 2, (2, 2)) == ([[0, 0], [0, 0]], [[0, 2], [8, 10]])


def test_padding_is_never_the_maximum():
    values, places = pool_max([[-3, -1], [-4, -2]], 3, 1, 1, (2, 2))
    assert (values, places) == ([[-1, -1], [-1, -1]], [[1, 1], [1, 1]])


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_max_keeps_nan_and_infinities(stride):
    x = np.zeros((2, 40))
    x[1, 6], x[1, 9], x[:, 20:30] = NAN, INF, -INF
    values, places = pool_max(x, 2, 0, stride, (1, 38 // stride + 1))
    for value, place, left in zip(values[0], places[0], range(0, 39, stride), strict=True):
        np.testing.assert_array_equal(value, x[:, left : left + 2].max())
        np.testing.assert_array_equal(value, x.ravel()[place])


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (5, 2)])
def test_a_nan_is_found_by_every_window_that_it_lies_in(size, stride):
    windows = (6 - size) // stride + 1, (37 - size) // stride + 1
    for w in range(37):
        h = w % 6
        x = RNG.normal(size=(6, 37))
        x[h, w] = NAN
        values, places = map(np.array, pool_max(x, size, 0, stride, windows))
        ph, pw = np.indices(windows) * stride
        holds = (ph <= h) & (h < ph + size) & (pw <= w) & (w < pw + size)
        np.testing.assert_array_equal(np.isnan(values), holds)
        np.testing.assert_array_equal(values, x.ravel()[places])
        assert (places[holds] == h * 37 + w).all()


@pytest.mark.parametrize("stride", [2, 3])
def test_windows_outside_give_zero_and_no_position(stride):
    x = -np.ones((stride + 1, stride + 1))
    values, places = pool_max(x, 1, 0, stride, (3, 3))
    last = stride * (stride + 1) + stride
    assert values == [[-1, -1, 0], [-1, -1, 0], [0, 0, 0]]
    assert places == [[0, stride, -1], [last - stride, last, -1], [-1, -1, -1]]
    assert pool_average(x, 1, 0, stride, (3, 3)) == values


def test_average_counts_padding_up_to_the_far_border():
    # Ones: the corner sums 4 of 9 places; stride 2 reaches a window cut at height + pad.
    assert pool_average(np.ones((4, 4)), 3, 1, 1, (4, 4))[0] == [4 / 9, 6 / 9, 6 / 9, 4 / 9]
    expected = [[4 / 9, 6 / 9, 2 / 6], [6 / 9, 1, 3 / 6], [2 / 6, 3 / 6, 1 / 4]]
    np.testing.assert_allclose(pool_average(np.ones((4, 4)), 3, 1, 2, (3, 3)), expected)


def test_max_backward_adds_where_windows_overlap_and_skips_missing_positions():
    dx = np.full((1, 1, 4), 9.0)
    argmax = np.array([[[2, 2, -1]]], np.int32)
    kernels.pool_max_backward(np.array([[[1.0, 2.0, 4.0]]]), argmax, dx, 0, 1)
    assert dx.tolist() == [[[0, 0, 3, 0]]]


# height, width, kernel, pad, stride; each pair is (h, w).
WINDOWS = [
    ((24, 24), (2, 2), (0, 0), (2, 2)),
    ((32, 32), (3, 3), (0, 0), (2, 2)),
    ((7, 71), (3, 3), (0, 0), (2, 2)),
    ((8, 8), (2, 2), (0, 0), (2, 2)),
    ((5, 66), (2, 2), (1, 0), (2, 2)),
    ((7, 70), (3, 3), (1, 1), (2, 2)),
    ((14, 14), (3, 3), (1, 1), (1, 1)),
    ((6, 69), (2, 3), (0, 2), (1, 1)),
    ((9, 5), (3, 5), (2, 4), (2, 1)),
    ((5, 4), (5, 4), (0, 0), (1, 1)),
    ((9, 9), (9, 9), (0, 0), (1, 1)),
    ((11, 40), (4, 3), (1, 2), (3, 4)),
    ((5, 40), (1, 1), (0, 0), (3, 2)),
    ((9, 40), (2, 2), (0, 0), (3, 2)),
    ((40, 150), (4, 3), (2, 1), (3, 1)),  # several bands of rows
    ((9, 600), (2, 2), (1, 1), (1, 2)),  # bands of one row
    ((1, 1), (3, 3), (1, 1), (1, 1)),
]


def pooled_size(size, kernel, pad, stride):
    count = ceil((size + 2 * pad - kernel) / stride) + 1
    return count - (pad > 0 and (count - 1) * stride >= size + pad)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
class TestAgainstReference:
    def arrays(self, window, channels):
        size, kernel, pad, stride = window
        pooled = tuple(map(pooled_size, size, kernel, pad, stride))
        x = RNG.integers(-4, 5, (3, channels, *size)) / 4  # with ties
        return x, RNG.normal(size=(3, channels, *pooled)), [*kernel, *pad, *stride]

    def test_max(self, window, dtype):
        x, y, numbers = self.arrays(window, 2)
        argmax = np.full(y.shape, 99, np.int32)
        forward = kernels.max_forward(window[1], window[3])
        arguments = [x, y, argmax, *numbers, 1, 3]
        assert_agrees(forward, *arguments, dtype=dtype, reference="pool_max_forward")
        forward(x, y, argmax, *numbers, 0, 3)
        flat = [a.reshape(3, 2, -1) for a in (RNG.normal(size=y.shape), argmax, x)]
        assert_agrees(kernels.pool_max_backward, *flat, 1, 3, dtype=dtype)
        assert_agrees(
            kernels.pool_max_mask, argmax.reshape(3, -1), y.reshape(3, -1), 1, 3, dtype=dtype
        )

    @pytest.mark.parametrize("channels", [1, 13])  # planes that fill no vector, one and a rest
    def test_average(self, window, dtype, channels):
        x, y, numbers = self.arrays(window, channels)
        memory = scratch(x.shape[3], numbers, y.shape[2:])
        for kernel, blobs in (
            (kernels.pool_average_forward, (x, y)),
            (kernels.pool_average_backward, (y, x)),
        ):
            arguments = [*blobs, *numbers, *memory, 1, 3]
            assert_agrees(kernel, *arguments, dtype=dtype)
