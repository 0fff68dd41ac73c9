import numpy as np
import pytest

from cgdnn.kernels import inner_product as kernels
from cgdnn.kernels.reorder import PLACE
from tests.reference.gemm import multiply

TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


@pytest.fixture(params=["float32", "float64"])
def random(request):
    generator = np.random.default_rng(3)
    return lambda *shape: generator.standard_normal(shape).astype(request.param)


def near(got, want):
    want = np.array(want)
    tolerance = TOLERANCE[str(got.dtype)] * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["product_nt", "product_nn"])
@pytest.mark.parametrize("has_bias", [0, 1])
@pytest.mark.parametrize(("samples", "depth", "columns"), [(1, 1, 1), (3, 30, 70), (7, 1100, 5)])
def test_product(random, name, has_bias, samples, depth, columns):
    a, w, bias = random(samples, depth), random(depth, columns), random(columns)
    right = np.ascontiguousarray(w.T) if name == "product_nt" else w
    want = np.array(multiply(a, w)) + (bias if has_bias else 0)
    whole = np.full((1, samples, columns), np.nan, a.dtype)
    getattr(kernels, name)(a, right, bias, has_bias, whole, 0, 1, 0, samples)
    near(whole[0], want)


@pytest.mark.parametrize("name", ["product_nt", "product_nn"])
def test_blocks_of_columns(random, name):
    a, w, bias = random(5, 9), random(9, 37), random(37)
    right = np.ascontiguousarray(w.T) if name == "product_nt" else w
    blocks = np.full((3, 5, 16), 7, a.dtype)
    getattr(kernels, name)(a, right, bias, 1, blocks, 1, 3, 0, 5)
    assert (blocks[0] == 7).all()
    y = np.zeros((5, 37), a.dtype)
    kernels.join_blocks(blocks, y, 0, 5)
    want = np.array(multiply(a, w)) + bias
    want[:, :16] = 7
    near(y, want)


@pytest.mark.parametrize("name", ["product_nt", "product_nn"])
def test_a_range_of_samples(random, name):
    a, w, bias = random(6, 9), random(9, 4), random(4)
    right = np.ascontiguousarray(w.T) if name == "product_nt" else w
    c = np.full((1, 6, 4), 7, a.dtype)
    getattr(kernels, name)(a, right, bias, 0, c, 0, 1, 2, 5)
    near(c[0, 2:5], multiply(a[2:5], w))
    assert (c[0, [0, 1, 5]] == 7).all()


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("has_bias", [0, 1])
@pytest.mark.parametrize(
    ("groups", "depth", "rows"), [(1, 1, 1), (4, 30, 6), (5, 9, 14), (4, 70000 // PLACE, 3)]
)
def test_product_of_images_in_lanes(random, transposed, has_bias, groups, depth, rows):
    w, x, bias = random(rows, depth), random(groups, depth, PLACE), random(rows)
    y = np.full((groups, rows, PLACE), np.nan, x.dtype)
    stored = np.ascontiguousarray(w.T) if transposed else w
    kernels.product_images(stored, transposed, x, bias, has_bias, y, 1, 0, rows)
    for got, group in zip(y, x, strict=True):
        near(got, np.array(multiply(w, group)) + (bias[:, None] if has_bias else 0))


def test_a_range_of_units_of_rows(random):
    w, x, bias = random(12, 5), random(2, 5, PLACE), random(12)
    y = np.full((2, 12, PLACE), 7, x.dtype)
    kernels.product_images(w, 0, x, bias, 1, y, 3, 1, 3)
    for got, group in zip(y, x, strict=True):
        near(got[3:9], np.array(multiply(w, group))[3:9] + bias[3:9, None])
        assert (got[:3] == 7).all()
        assert (got[9:] == 7).all()


@pytest.mark.parametrize("accumulate", [0.0, 1.0])
def test_product_of_the_transpose(random, accumulate):
    a, b, c = random(8, 13), random(8, 70), random(13, 70)
    if accumulate == 0:
        c[...] = np.nan
    want = np.array(multiply(a.T, b)) + (c if accumulate else 0)
    untouched = c[[0, 1, 12]].copy()
    kernels.product_tn(a, b, c, accumulate, 2, 12)
    near(c[2:12], want[2:12])
    np.testing.assert_array_equal(c[[0, 1, 12]], untouched)


@pytest.mark.parametrize("columns", [64, 72, 1100])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_gradient_that_is_written_past_the_caches(random, columns, shift):
    rows = 4200 * 1024 // columns  # more elements than any cache is thought to hold
    a, b = random(2, rows), random(2, columns)
    room = np.full(rows * columns + 16, np.nan, a.dtype)
    c = room[shift : shift + rows * columns].reshape(rows, columns)
    kernels.product_tn(a, b, c, 0.0, 0, rows)
    np.testing.assert_allclose(c, a.T @ b, rtol=1e-5, atol=1e-5)
    assert np.isnan(room[:shift]).all()
    assert np.isnan(room[shift + rows * columns :]).all()


def test_join_blocks_of_a_range_of_samples():
    blocks = np.arange(2 * 3 * 4, dtype=np.float64).reshape(2, 3, 4)
    y = np.full((3, 6), -1.0)
    kernels.join_blocks(blocks, y, 1, 3)
    np.testing.assert_array_equal(y, [[-1] * 6, [4, 5, 6, 7, 16, 17], [8, 9, 10, 11, 20, 21]])
