import numpy as np
import pytest

from cgdnn.kernels import conv_winograd
from cgdnn.kernels import conv_winograd_images as kernels
from cgdnn.kernels.reorder import PLACE
from cgdnn.kernels.winograd_images_tiles import SERVED
from cgdnn.kernels.winograd_points import OUTPUTS, matrices
from tests.kernels.test_conv_winograd import LARGE_TILES, SHAPES, Case

GROUPS = 3
LANES = PLACE
VARIANT_OF_SHAPE = [
    (name, outputs)
    for name, shape in SHAPES.items()
    for outputs, taps in SERVED
    if taps == shape[3] and shape[-1] == 1 and name != "deep"
]
FORWARD, TRANSPOSED = conv_winograd.FORWARD, conv_winograd.TRANSPOSED
TOLERANCE = {"float32": 4e-5, "float64": 1e-12}  # a weight's gradient sums over 768 tiles


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def batch_case(name, dtype, outputs=OUTPUTS, groups=GROUPS):
    """Return a case with so many groups of images, or with one of large images."""
    case = Case(name, dtype, outputs=outputs)
    rng = np.random.default_rng(1)
    case.images = (1 if name == "bands" else groups) * LANES
    for array in ("x", "dy"):
        shape = (case.images, *getattr(case, array).shape[1:])
        setattr(case, array, rng.standard_normal(shape).astype(dtype))
    return case


def near(got, want, outputs=OUTPUTS):
    limit = TOLERANCE[str(got.dtype)] * np.abs(want).max()
    limit *= LARGE_TILES if outputs > 5 else 1
    np.testing.assert_allclose(got, want, rtol=0, atol=limit)


def to_lanes(blob):
    groups = blob.reshape(-1, LANES, *blob.shape[1:])
    return np.ascontiguousarray(np.moveaxis(groups, 1, -1))


def from_lanes(blob):
    return np.moveaxis(blob, -1, 1).reshape(-1, *blob.shape[1:4])


def filters(case, pieces=1):
    """Return U, as the kernel gives it in so many pieces."""
    shape = kernels.filters_shape(case.outputs, case.taps, case.filters, case.channels)
    u = case.room(*shape)
    units = -(-case.filters * case.channels // LANES)
    for piece in range(pieces):
        scratch = case.room(kernels.filters_scratch(case.taps))
        bounds = units * piece // pieces, units * (piece + 1) // pieces
        kernels.winograd_images_filters(case.w, u, case.outputs, LANES, scratch, *bounds)
    return u


def product(case, form, bias=0, pieces=1, blocking=None):
    """Return y, or dx, as the kernel gives it in so many pieces."""
    x, y = (case.x, case.dy) if form == FORWARD else (case.dy, case.x)
    result = to_lanes(np.full_like(y, np.nan))
    outputs, taps, depth = case.outputs, case.taps, x.shape[1]
    if blocking is None:
        blocking = kernels.choose_blocking(
            outputs, taps, depth, y.shape[1], tiles_of(case), len(result)
        )
    spans = len(result) // blocking[0]
    for piece in range(pieces):
        kernels.conv_winograd_images(
            *(to_lanes(x), filters(case), case.b, bias, result),
            *(outputs, taps, int(form == TRANSPOSED), *case.pad, *blocking),
            *map(case.room, kernels.scratch_of(outputs, taps, depth, blocking)),
            *(spans * piece // pieces, spans * (piece + 1) // pieces),
        )
    return from_lanes(result)


def tiles_of(case):
    """Return the tiles of an image."""
    return int(np.prod(conv_winograd.grid_of(case.outputs, *case.dy.shape[2:])))


def weights(case, dw, db, piece, bounds, groups=1, blocking=None):
    """Set a row of dw and db from a range of pieces of so many groups."""
    variant = case.outputs, case.taps
    if blocking is None:
        blocking = kernels.choose_weights_blocking(*variant, case.filters, tiles_of(case), groups)
    scratch = kernels.weights_scratch_of(*variant, case.channels, case.filters, blocking)
    kernels.conv_backward_weights_winograd_images(
        *(to_lanes(case.x), to_lanes(case.dy), dw, db, 1, *variant, *case.pad, *blocking),
        *map(case.room, scratch),
        *(piece, groups, *bounds),
    )


@pytest.mark.parametrize("outputs", [outputs for outputs, taps in SERVED if taps == 5])
def test_filters(dtype, outputs):
    case = batch_case("lenet2", dtype, outputs)
    count = case.filters * case.channels
    g = np.array(matrices(outputs, 5).filter, np.float64)
    want = np.einsum("ia,ocab,jb->ijoc", g, case.w, g).reshape(-1, count)
    for pieces in (1, 3):
        near(filters(case, pieces)[:, :count], want)


@pytest.mark.parametrize(("name", "outputs"), VARIANT_OF_SHAPE)
@pytest.mark.parametrize("bias", [0, 1])
def test_forward(name, outputs, dtype, bias):
    case = batch_case(name, dtype, outputs)
    near(product(case, FORWARD, bias), case.reference_product(FORWARD, bias), outputs)


@pytest.mark.parametrize(("name", "outputs"), VARIANT_OF_SHAPE)
def test_backward_data(name, outputs, dtype):
    case = batch_case(name, dtype, outputs)
    near(product(case, TRANSPOSED), case.reference_product(TRANSPOSED), outputs)


@pytest.mark.parametrize("form", [FORWARD, TRANSPOSED])
@pytest.mark.parametrize("outputs", [4, 7])
@pytest.mark.parametrize("blocking", [(1, 1, 1), (1, 3, 6), (3, 7, 5), (1, 9, 7)])
def test_any_blocking_gives_the_same_bits(dtype, form, outputs, blocking):
    case = batch_case("uneven", dtype, outputs)
    np.testing.assert_array_equal(product(case, form, blocking=blocking), product(case, form))


@pytest.mark.parametrize("form", [FORWARD, TRANSPOSED])
@pytest.mark.parametrize("outputs", [4, 8])
def test_pieces_give_the_bits_of_the_whole(dtype, form, outputs):
    case = batch_case("lenet2", dtype, outputs, groups=4)
    np.testing.assert_array_equal(product(case, form, pieces=2), product(case, form))


@pytest.mark.parametrize(("name", "outputs"), VARIANT_OF_SHAPE)
def test_backward_weights(name, outputs, dtype):
    case = batch_case(name, dtype, outputs)
    dw = np.full((2, case.w.size), np.nan, dtype)
    db = np.full((2, case.filters), np.nan, dtype)
    weights(case, dw, db, 1, (0, case.images // LANES))
    want_w, want_b = case.reference_weights()
    near(dw[1].reshape(want_w.shape), want_w, outputs)
    near(db[1], want_b)
    assert np.isnan(dw[0]).all()
    assert np.isnan(db[0]).all()


@pytest.mark.parametrize("outputs", [4, 8])
@pytest.mark.parametrize("blocking", [(1, 1, 1), (3, 3, 4), (1, 5, 3)])
def test_any_blocking_of_the_weights(dtype, outputs, blocking):
    case = batch_case("wide", dtype, outputs)
    dw, db = case.room(1, case.w.size), case.room(1, case.filters)
    weights(case, dw, db, 0, (0, 1), GROUPS, blocking)
    near(dw.reshape(case.w.shape), case.reference_weights()[0], outputs)


@pytest.mark.parametrize("outputs", [4, 8])
def test_weights_of_some_pieces(dtype, outputs):
    case = batch_case("lenet2", dtype, outputs, groups=4)
    dw, db = case.room(2, case.w.size), case.room(2, case.filters)
    for piece in range(2):
        weights(case, dw, db, piece, (piece, piece + 1), groups=2)
    want_w, want_b = case.reference_weights()
    near(dw.sum(0).reshape(want_w.shape), want_w, outputs)
    near(db.sum(0), want_b)


@pytest.mark.parametrize("form", [FORWARD, TRANSPOSED])
@pytest.mark.parametrize(
    ("name", "outputs", "limit"),
    [("lenet2", 4, 1e-6), ("lenet2", 8, 1e-6), ("uneven", 4, 3e-7), ("uneven", 7, 2e-6)],
)
def test_rounding_stays_below_the_documented_bound(form, name, outputs, limit):
    case = batch_case(name, "float32", outputs)
    got, want = product(case, form), case.reference_product(form)
    assert np.sqrt(np.mean((got - want) ** 2)) < limit * np.abs(want).max()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("form", [FORWARD, TRANSPOSED])
@pytest.mark.parametrize("outputs", [4, 8])
def test_what_is_not_finite_reaches_all_that_depends_on_it(dtype, form, outputs, value):
    case = batch_case("quick2", dtype, outputs)
    source = case.x if form == FORWARD else case.dy
    source[2, 3, 7, 9] = value
    result = product(case, form)
    assert not np.isfinite(result[2, :, 5:10, 7:12]).any()
    assert np.isfinite(np.delete(result, 2, axis=0)).all()


@pytest.mark.parametrize(("name", "filter_"), [("quick2", 6), ("lenet2", 6), ("lenet2", 49)])
@pytest.mark.parametrize("outputs", [4, 8])
def test_what_is_not_finite_reaches_the_weights(name, filter_, outputs, dtype):
    case = batch_case(name, dtype, outputs)
    case.x[0, 3, 5, 5] = np.nan
    case.dy[1, filter_, 2, 2] = np.inf
    dw, db = case.room(1, case.w.size), case.room(1, case.filters)
    weights(case, dw, db, 0, (0, 1), GROUPS)
    bad = ~np.isfinite(dw.reshape(case.w.shape))
    assert bad[:, 3].all()
    assert bad[filter_].all()
    assert not np.delete(np.delete(bad, 3, axis=1), filter_, axis=0).any()
    assert np.isinf(db[0, filter_])
    assert np.isfinite(np.delete(db[0], filter_)).all()


def test_a_block_of_small_tiles_fits_into_the_second_cache():
    for taps, depth, columns in ((5, 20, 50), (5, 50, 20), (5, 32, 32), (3, 16, 16), (5, 3, 32)):
        blocking = kernels.choose_blocking(OUTPUTS, taps, depth, columns, 64, 4)
        bytes_of_u = 4 * (taps + 3) ** 2 * depth * columns
        scratch = kernels.scratch_of(OUTPUTS, taps, depth, blocking)
        assert 4 * sum(scratch) + bytes_of_u < 900 << 10
        assert blocking[1] > 1


def test_a_product_has_two_vectors_of_tiles_where_a_batch_has_them():
    for outputs, tiles, groups, together in (
        (8, 1, 4, 2),
        (8, 1, 5, 1),
        (8, 4, 4, 2),
        (4, 1, 4, 2),
    ):
        span, some, _ = kernels.choose_blocking(outputs, 5, 20, 50, tiles, groups)
        assert span * some == together
        assert groups % span == 0


def test_few_filters_do_not_take_a_vector():
    assert kernels.filters_computed(LANES) == LANES
    assert kernels.filters_computed(LANES + 1) == LANES + 1
    assert kernels.filters_computed(2 * LANES - 1) == 2 * LANES
