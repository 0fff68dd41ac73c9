import numpy as np
import pytest

from cgdnn.kernels import activation, norm
from tests.kernels.agree import assert_agrees

RNG = np.random.default_rng(3)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])
SHAPES = pytest.mark.parametrize("shape", [(5, 3, 11), (5, 3, 1), (5, 1, 16)])


def empty(*shape):
    return np.full(shape, 9.0)


def merge(x, pieces):
    """Return mean and biased variance of the channels of `x`, taken in pieces of samples."""
    channels = x.shape[1]
    partial = np.zeros((len(pieces), 3, channels))
    for piece, (begin, end) in enumerate(pieces):
        norm.bn_moments(x, partial, piece, begin, end)
    mean, inverse, mean_sum, variance_sum = np.zeros((4, channels))
    norm.bn_merge(partial, mean, inverse, mean_sum, variance_sum, np.zeros(1), 0.9, 0.0)
    return mean, inverse**-2.0, variance_sum


def test_statistics_of_known_values():
    x = np.array([1.0, 2.0, 3.0, 6.0]).reshape(2, 1, 2)
    mean, variance, unbiased = merge(x, [(0, 2)])
    assert mean[0] == 3.0
    assert variance[0] == pytest.approx(3.5)
    assert unbiased[0] == pytest.approx(14 / 3)


def test_one_value_a_channel_is_not_corrected():
    assert merge(np.full((1, 1, 1), 5.0), [(0, 1)])[2].tolist() == [0.0]


def test_pieces_merge_to_the_statistics_of_the_whole():
    x = RNG.normal(1e4, 1.0, size=(7, 3, 13))
    mean, variance, _ = merge(x, [(0, 1), (1, 4), (4, 7)])
    np.testing.assert_allclose(mean, x.mean((0, 2)), rtol=1e-14)
    np.testing.assert_allclose(variance, x.var((0, 2)), rtol=1e-9)


def test_a_large_offset_does_not_drown_a_float32_variance():
    x = (1000 + RNG.normal(size=(16, 1, 256))).astype(np.float32)
    partial = np.zeros((1, 3, 1), np.float32)
    norm.bn_moments(x, partial, 0, 0, 16)
    assert partial[0, 2, 0] / x.size == pytest.approx(x.astype(float).var(), rel=1e-5)


def test_a_first_value_far_from_the_rest_does_not_drown_the_variance():
    x = 1000 + RNG.normal(size=(2, 1, 4096))
    x[0, 0, 0] = 0
    _, variance, _ = merge(x, [(0, 2)])
    np.testing.assert_allclose(variance, x.var(), rtol=1e-9)


def test_global_statistics_are_0_without_any_update():
    mean, inverse = np.empty((2, 1))
    norm.bn_global(np.full(1, 3.0), np.full(1, 4.0), np.zeros(1), mean, inverse, 0.25)
    assert (mean[0], inverse[0]) == (0.0, 2.0)


def test_nan_reaches_its_channel_only():
    x = RNG.normal(size=(2, 2, 9))
    x[1, 0, 3] = np.nan
    mean, variance, _ = merge(x, [(0, 1), (1, 2)])
    assert np.isnan([mean[0], variance[0]]).all()
    assert np.isfinite([mean[1], variance[1]]).all()


@DTYPES
@SHAPES
def test_batch_norm_kernels_agree(dtype, shape):
    n, c, _ = shape
    x, dy = RNG.normal(size=(2, *shape))
    span = 1, n - 1
    assert_agrees(norm.bn_moments, x, empty(2, 3, c), 1, *span, dtype=dtype)
    assert_agrees(norm.bn_normalize, x, empty(*shape), x[0, :, 0], x[1, :, 0], *span, dtype=dtype)
    assert_agrees(
        norm.bn_normalize_keep,
        *(x, empty(*shape), empty(*shape), x[0, :, 0], x[1, :, 0], *span),
        dtype=dtype,
    )
    assert_agrees(norm.bn_backward_sums, x, dy, empty(2, 2 * c), 1, *span, dtype=dtype)
    sums = RNG.normal(size=2 * c)
    assert_agrees(
        norm.bn_backward, x, dy, empty(*shape), sums, x[0, :, 0], 0.125, *span, dtype=dtype
    )


@DTYPES
def test_bn_merge_agrees(dtype):
    partial = np.abs(RNG.normal(size=(3, 3, 4)))
    partial[:, 0] = [[2.0], [3.0], [5.0]]
    running = np.abs(RNG.normal(size=(2, 4)))
    arrays = empty(4), empty(4), *running, np.array([2.5])
    assert_agrees(norm.bn_merge, partial, *arrays, 0.75, 1e-3, dtype=dtype)


@DTYPES
@pytest.mark.parametrize("factor", [0.0, 4.0])
def test_bn_global_agrees(dtype, factor):
    running = np.abs(RNG.normal(size=(2, 4)))
    assert_agrees(
        norm.bn_global, *running, np.array([factor]), empty(4), empty(4), 1e-3, dtype=dtype
    )


@DTYPES
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("inner", [1, 21])
def test_scale_kernels_agree(dtype, rows, inner):
    shape = (4, 2, 3, inner)
    x, dy = RNG.normal(size=(2, *shape))
    w, b = RNG.normal(size=(2, rows, 3))
    span = 1, 3
    assert_agrees(norm.scale_multiply, x, w, empty(*shape), *span, dtype=dtype)
    assert_agrees(norm.scale_multiply_add, x, w, b, empty(*shape), *span, dtype=dtype)
    kept = empty(*shape)
    assert_agrees(norm.scale_multiply_add_keep, x, w, b, kept, empty(*shape), *span, dtype=dtype)
    assert_agrees(norm.scale_backward_factor, x, dy, empty(2, 3), 1, *span, dtype=dtype)
    assert_agrees(norm.scale_backward_bias, dy, empty(2, 3), 1, *span, dtype=dtype)
    partials = empty(2, 3), empty(2, 3)
    assert_agrees(norm.scale_backward_both, x, dy, *partials, 1, *span, dtype=dtype)


@DTYPES
@pytest.mark.parametrize("accumulate", [0.0, 1.0])
def test_scale_row_gradients_agree(dtype, accumulate):
    x, dy = RNG.normal(size=(2, 4, 1, 3, 9))
    for kernel, arrays in (
        (norm.scale_backward_factor_rows, (x, dy)),
        (norm.scale_backward_bias_rows, (dy,)),
    ):
        assert_agrees(kernel, *arrays, empty(4, 3), accumulate, 1, 3, dtype=dtype)


def test_overwriting_does_not_read_what_was_there():
    x = np.ones((1, 1, 1, 4))
    dw = np.full((1, 1), np.nan)
    norm.scale_backward_factor_rows(x, x, dw, 0.0, 0, 1)
    assert dw[0, 0] == 4.0


@DTYPES
@SHAPES
@pytest.mark.parametrize("slope", [None, 0.0, 0.25])
def test_chain_gives_what_its_parts_give(dtype, shape, slope):
    n, channels, inner = shape
    rng = np.random.default_rng(5)
    x, dy = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    mean, inverse, w, b = (rng.normal(size=channels).astype(dtype) for _ in range(4))
    rectifier = (int(slope is not None), slope or 0.0)
    x[0, 0, 0] = mean[0]
    b[0], x[-1, -1, -1] = 0.0, np.nan

    kept, normal = np.empty_like(x), np.empty_like(x)
    norm.bn_normalize_keep(x, normal, kept, mean, inverse, 0, n)
    view, row = (n, 1, channels, inner), (1, channels)
    y = np.empty_like(x)
    norm.scale_multiply_add(
        kept.reshape(view), w.reshape(row), b.reshape(row), y.reshape(view), 0, n
    )
    if slope is not None:
        activation.relu_forward(y.reshape(n, -1), y.reshape(n, -1), slope, 0, n)
    mine, mine_kept = np.empty_like(x), np.empty_like(x)
    norm.bn_scale_forward(x, mine, mine_kept, mean, inverse, w, b, *rectifier, 0, n)
    np.testing.assert_array_equal(mine, y)
    np.testing.assert_array_equal(mine_kept, kept)

    kept[-1, -1, -1] = y[-1, -1, -1] = 0.5
    below = dy.copy()
    if slope is not None:
        flat = (y.reshape(n, -1), dy.reshape(n, -1), below.reshape(n, -1))
        activation.relu_backward(*flat, slope, 0, n)
    factor, bias = np.empty((2, 2, channels), dtype)
    norm.scale_backward_both(kept.reshape(view), below.reshape(view), factor, bias, 1, 1, n)
    my_factor, my_bias = np.empty_like(factor), np.empty_like(bias)
    output = kept if slope is None else y
    norm.bn_scale_backward_sums(output, kept, dy, my_factor, my_bias, *rectifier, 1, 1, n)
    np.testing.assert_array_equal(my_factor[1], factor[1])
    np.testing.assert_array_equal(my_bias[1], bias[1])

    scaled, dx = np.empty_like(x), np.empty_like(x)
    norm.scale_multiply(below.reshape(view), w.reshape(row), scaled.reshape(view), 0, n)
    sums = np.empty((1, 2 * channels), dtype)
    norm.bn_backward_sums(kept, scaled, sums, 0, 0, n)
    norm.bn_backward(kept, scaled, dx, sums[0], inverse, 0.1, 0, n)
    norm.scale_backward_both(kept.reshape(view), below.reshape(view), factor, bias, 0, 0, n)
    totals = (factor[0], bias[0], inverse, 0.1)
    norm.bn_scale_backward(output, kept, dy, dy, w, *totals, *rectifier, 0, n)
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(dy, dx, rtol=0, atol=tolerance * np.abs(dx).max())
