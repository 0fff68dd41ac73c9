import numpy as np
import pytest

from cgdnn import machine
from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.kernels.vector import lanes_of
from cgdnn.kernels.winograd_tiles import multiply_blocks, panel_vectors

TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


@kernel(array(3), array(3), array(3), INT, INT, INT)
def products(a, b, c, rows, depth, keep):
    """C (+)= A B for a (blocks of k, rows, L), b (depth, vectors, L) and c (rows, vectors, L)."""
    lanes = lanes_of(a)
    multiply_blocks(
        *(a, 0, lanes, lanes * lanes, 1, a.shape[1] * lanes, rows, depth),
        *(b, 0, b.shape[1] * lanes, lanes, b.shape[1]),
        *(c, 0, c.shape[1] * lanes, c.shape[1] * lanes * lanes, lanes, keep, 0, a, 0, 0, 0),
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("depth", [1, 3, 16, 37])
@pytest.mark.parametrize("vectors", range(1, panel_vectors() + 1))
def test_products_of_one_panel(dtype, keep, depth, vectors):
    lanes = machine.vector_bytes() // np.dtype(dtype).itemsize
    rng = np.random.default_rng(depth)
    rows, room = 11, 16  # a product computes up to a multiple of 8 rows
    blocks = -(-depth // lanes)
    a = rng.standard_normal((blocks, room, lanes)).astype(dtype)
    b = rng.standard_normal((depth, vectors, lanes)).astype(dtype)
    c = np.full((room, vectors, lanes), 0.5 if keep else np.nan, dtype)
    products(a, b, c, rows, depth, keep)
    left = a.transpose(1, 0, 2).reshape(room, -1)[:rows, :depth]
    want = keep / 2 + np.einsum("ik,kvl->ivl", left, b)
    np.testing.assert_allclose(c[:rows], want, rtol=0, atol=depth * TOLERANCE[dtype])
