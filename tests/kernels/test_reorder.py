import numpy as np
import pytest

from cgdnn import machine
from cgdnn.kernels.reorder import reorder_from_lanes, reorder_to_lanes

RNG = np.random.default_rng(29)
LANES = machine.vector_bytes() // 4
# C, P: fewer than the lanes and more, that fill squares and do not
SHAPES = [
    (1, 1),
    (3, LANES),
    (LANES, 2 * LANES),
    (LANES, 3),
    (LANES + 1, 2 * LANES + 3),
    (2 * LANES, LANES + 1),
    (3 * LANES - 1, LANES - 1),
    (LANES // 2, LANES // 2 + 1),
]


def in_lanes(x):
    """Return (N, ceil(C/L), P, L) of x (N, C, P)."""
    n, c, p = x.shape
    blocks = -(-c // LANES)
    padded = np.zeros((n, blocks * LANES, p), x.dtype)
    padded[:, :c] = x
    return padded.reshape(n, blocks, LANES, p).transpose(0, 1, 3, 2).copy()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lanes_hold_rows_and_zeros_and_give_them_back(shape, dtype):
    x = RNG.normal(size=(4, *shape)).astype(dtype)
    expected = in_lanes(x)
    # Samples outside the range keep what they hold.
    y, back = np.full_like(expected, 7), np.full_like(x, 7)
    reorder_to_lanes(x, y, 1, 3)
    np.testing.assert_array_equal(y[1:3], expected[1:3])
    assert (y[::3] == 7).all()
    reorder_from_lanes(expected, back, 1, 3)
    np.testing.assert_array_equal(back[1:3], x[1:3])
    assert (back[::3] == 7).all()
