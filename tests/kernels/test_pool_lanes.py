"""Pooling over planes of vectors gives the bits of pooling over planes."""

import numpy as np
import pytest

from cgdnn import machine
from cgdnn.kernels import pool, pool_lanes
from tests.kernels.test_pool import pooled_size, scratch

RNG = np.random.default_rng(31)
LANES = machine.vector_bytes() // 4
PLANES = 3
# height, width, kernel, pad, stride; each pair is (h, w).
WINDOWS = [
    ((24, 24), (2, 2), (0, 0), (2, 2)),
    ((5, 9), (2, 2), (1, 0), (2, 2)),
    ((32, 32), (3, 3), (0, 0), (2, 2)),
    ((4, 4), (3, 3), (0, 0), (2, 2)),
    ((7, 10), (3, 3), (1, 1), (2, 2)),
    ((14, 14), (3, 3), (1, 1), (1, 1)),
    ((2, 1), (3, 3), (2, 2), (1, 1)),
    ((13, 12), (3, 3), (2, 2), (2, 1)),
    ((5, 8), (1, 1), (0, 0), (3, 2)),  # gaps between windows, and one outside
    ((9, 5), (3, 5), (2, 4), (2, 1)),
    ((11, 14), (4, 3), (1, 2), (3, 4)),
    ((9, 9), (9, 9), (0, 0), (1, 1)),
]


def in_lanes(x):
    """Return planes (N, L, H, W) as places (N, H, W, L)."""
    return np.ascontiguousarray(np.moveaxis(x, 1, 3))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
class TestSameBits:
    def arrays(self, window, dtype):
        """Return x and dy (N, L, ., .) and the numbers of the windows."""
        size, kernel, pad, stride = window
        pooled = tuple(map(pooled_size, size, kernel, pad, stride))
        x = RNG.integers(-4, 5, (PLANES, LANES, *size)) / 4  # with ties
        x[RNG.random(x.shape) < 0.1] = -0.0
        x[RNG.random(x.shape) < 0.02] = np.nan
        x[RNG.random(x.shape) < 0.02] = -np.inf
        x[1, 1] = -np.inf
        dy = RNG.normal(size=(PLANES, LANES, *pooled))
        dy[RNG.random(dy.shape) < 0.1] = -0.0
        dy[RNG.random(dy.shape) < 0.02] = np.inf
        return x.astype(dtype), dy.astype(dtype), [*kernel, *pad, *stride]

    def test_max(self, window, dtype):
        _, kernel, _, stride = window
        x, dy, numbers = self.arrays(window, dtype)
        y, argmax, dx = np.full_like(dy, 9), np.full(dy.shape, 99, np.int32), np.full_like(x, 9)
        pool.pool_max_forward(x, y, argmax, *numbers, 0, PLANES)
        flat = [a.reshape(*a.shape[:2], -1) for a in (dy, argmax, dx)]
        pool.pool_max_backward(*flat, 0, PLANES)

        got, places = np.full_like(in_lanes(dy), 9), np.full_like(in_lanes(argmax), 99)
        run_in_two(pool_lanes.max_forward(kernel), in_lanes(x), got, places, *numbers)
        assert_same(got, in_lanes(y))
        np.testing.assert_array_equal(places, in_lanes(argmax))
        got = np.full_like(in_lanes(dx), 9)
        backward = pool_lanes.max_backward(kernel, stride)
        run_in_two(backward, in_lanes(dy), places, got, *numbers)
        assert_same(got, in_lanes(dx))

    def test_average(self, window, dtype):
        size, kernel, _, stride = window
        x, dy, numbers = self.arrays(window, dtype)
        y, dx = np.full_like(dy, 9), np.full_like(x, 9)
        memory = [
            a.astype(dtype) if isinstance(a, np.ndarray) else a
            for a in scratch(size[1], numbers, y.shape[2:])
        ]
        pool.pool_average_forward(x, y, *numbers, *memory, 0, PLANES)
        pool.pool_average_backward(dy, dx, *numbers, *memory, 0, PLANES)

        got = np.full_like(in_lanes(dy), 9)
        run_in_two(pool_lanes.average_forward(kernel), in_lanes(x), got, *numbers)
        assert_same(got, in_lanes(y))
        got, values = np.full_like(in_lanes(dx), 9), np.full(dy[0].size, np.nan, dtype)
        backward = pool_lanes.average_backward(kernel, stride)
        run_in_two(backward, in_lanes(dy), got, *numbers, values)
        assert_same(got, in_lanes(dx))


def run_in_two(kernel, *arguments):
    """Run a kernel on all planes, the last ones first."""
    kernel(*arguments, 1, PLANES)
    kernel(*arguments, 0, 1)


def assert_same(got, expected):
    """Compare bits; a NaN may be any."""
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got)[got == got], np.signbit(expected)[got == got])
