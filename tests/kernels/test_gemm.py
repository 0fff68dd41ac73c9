import numpy as np
import pytest

from cgdnn import machine
from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.kernels.gemm import BIAS, KEEP, ZERO, multiply_nn, multiply_nt, multiply_scattered
from tests.reference.gemm import multiply

TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
# Every count of rows and vectors that a tile can have, and their tails.
SHAPES = [(1, 1, 1), (2, 5, 3), (3, 17, 1), (4, 16, 8), (5, 33, 7), (6, 64, 4), (7, 40, 5)]
SHAPES += [(8, 3, 20), (11, 66, 3), (13, 130, 2), (20, 12, 31)]


@kernel(array(2), array(2), array(1), array(2), INT)
def nn(a, b, bias, c, start):
    multiply_nn(
        *(a, 0, a.shape[1], 1, b, 0, b.shape[1], c, 0, c.shape[1]),
        *(a.shape[0], b.shape[1], a.shape[1], start, bias, 0, 0),
    )


@kernel(array(2), array(2), array(2), INT)
def nn_of_a_corner(a, b, c, depth):
    """C[1:3, 2:5] = A[2, 1:] and A[3, 1:], transposed in memory, times B[1:, 3:6]."""
    multiply_nn(
        *(a, a.shape[1] + 2, 1, a.shape[1], b, b.shape[1] + 3, b.shape[1]),
        *(c, c.shape[1] + 2, c.shape[1], 2, 3, depth, 0, c, 0, 0),
    )


@kernel(array(2), array(2), array(2))
def nt(a, b, c):
    multiply_nt(
        *(a, 0, a.shape[1], b, 0, b.shape[1], c, 0, c.shape[1]),
        *(a.shape[0], b.shape[0], a.shape[1], 0),
    )


@kernel(array(1), array(1, "int64"), array(2), array(2), INT, INT, INT, INT)
def scattered(a, places, b, c, a_segment, a_k, depth, segments):
    multiply_scattered(
        *(a, places, a_segment, a_k, b, 0, b.shape[1], c, 0, c.shape[1]),
        *(c.shape[0], c.shape[1], depth, segments),
    )


@pytest.fixture(params=["float32", "float64"])
def random(request):
    generator = np.random.default_rng(7)
    return lambda *shape: generator.standard_normal(shape).astype(request.param)


def near(got, want):
    scale = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[str(got.dtype)] * scale)


def test_nn_by_hand():
    a, b = np.array([[1.0, 2.0]]), np.array([[3.0], [4.0]])
    c = np.array([[100.0]])
    for start, want in ((ZERO, 11.0), (KEEP, 111.0), (BIAS, 61.0)):
        got = c.copy()
        nn(a, b, np.array([50.0]), got, start)
        assert got == want


@pytest.mark.parametrize("shape", SHAPES)
def test_nn(random, shape):
    m, n, depth = shape
    a, b, bias, c = random(m, depth), random(depth, n), random(m), random(m, n)
    product = np.array(multiply(a, b))
    for start, begin in ((ZERO, 0), (KEEP, c.copy()), (BIAS, bias[:, None])):
        got = c.copy()
        nn(a, b, bias, got, start)
        near(got, begin + product)


def test_nn_that_starts_from_nothing_does_not_read_what_was_there(random):
    c = np.full((5, 7), np.nan, random(1).dtype)
    nn(random(5, 3), random(3, 7), random(5), c, ZERO)
    assert not np.isnan(c).any()


def test_nn_by_strides_writes_its_part_only(random):
    a, b, c = random(4, 6), random(5, 9), random(6, 8)
    want = c.copy().astype(np.float64)
    want[1:3, 2:5] = a[1:4, 2:4].T.astype(np.float64) @ b[1:4, 3:6]
    nn_of_a_corner(a, b, c, 3)
    near(c, want)


@pytest.mark.parametrize("shape", SHAPES)
def test_nt_adds(random, shape):
    m, n, depth = shape
    a, b, c = random(m, depth), random(n, depth), random(m, n)
    want = c + np.array(multiply(a, b.T))
    nt(a, b, c)
    near(c, want)


@pytest.mark.parametrize("depth", [1, 15, 16, 17, 100])
def test_nt_over_any_length(random, depth):
    a, b, c = random(5, depth), random(6, depth), np.zeros((5, 6), random(1).dtype)
    nt(a, b, c)
    near(c, np.array(multiply(a, b.T)))


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 9, 13])
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("vectors", [1, 2])
def test_scattered_rows_of_segments(random, rows, vectors, missing):
    columns = vectors * machine.vector_bytes() // random(1).itemsize - missing
    depth, segments, a_k, a_segment = 3, 4, 2, 9
    a, b, c = random(200), random(depth * segments, columns), random(rows, columns)
    places = np.random.default_rng(1).permutation(100)[:rows]
    unrolled = np.array(
        [
            [a[p + s * a_segment + k * a_k] for s in range(segments) for k in range(depth)]
            for p in places
        ]
    )
    want = c + np.array(multiply(unrolled, b))
    scattered(a, places, b, c, a_segment, a_k, depth, segments)
    near(c, want)


def test_nan_stays_in_its_row_and_column(random):
    a, b, c = random(7, 5), random(5, 20), random(7, 20)
    a[3, 2] = np.nan
    nn(a, b, random(7), c, ZERO)
    np.testing.assert_array_equal(np.isnan(c).any(axis=1), np.arange(7) == 3)
    b[1, 18] = np.inf
    a[3, 2] = 0
    nn(a, b, random(7), c, ZERO)
    np.testing.assert_array_equal(np.isinf(c).any(axis=0), np.arange(20) == 18)
