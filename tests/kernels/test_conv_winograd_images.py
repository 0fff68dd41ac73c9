import numpy as np
import pytest

from cgdnn.kernels import conv_winograd
from cgdnn.kernels import conv_winograd_images as kernels
from cgdnn.kernels.reorder import PLACE
from cgdnn.kernels.winograd_points import OUTPUTS, TAPS, matrices
from tests.kernels.test_conv_winograd import SHAPES, Case

GROUPS = 3
LANES = PLACE
NAMES = [
    name for name, shape in SHAPES.items() if shape[3] in TAPS and shape[-1] == 1 and name != "deep"
]
FORWARD, TRANSPOSED = conv_winograd.FORWARD, conv_winograd.TRANSPOSED
TOLERANCE = {"float32": 4e-5, "float64": 1e-12}  # a weight's gradient sums over 768 tiles


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def batch_case(name, dtype):
    """Return a case with three groups of images, or one of large images."""
    case = Case(name, dtype)
    rng = np.random.default_rng(1)
    case.images = (1 if name == "bands" else GROUPS) * LANES
    for array in ("x", "dy"):
        shape = (case.images, *getattr(case, array).shape[1:])
        setattr(case, array, rng.standard_normal(shape).astype(dtype))
    return case


def near(got, want):
    limit = TOLERANCE[str(got.dtype)] * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=limit)


def to_lanes(blob):
    groups = blob.reshape(-1, LANES, *blob.shape[1:])
    return np.ascontiguousarray(np.moveaxis(groups, 1, -1))


def from_lanes(blob):
    return np.moveaxis(blob, -1, 1).reshape(-1, *blob.shape[1:4])


def filters(case, pieces=1):
    """Return U, as the kernel gives it in so many pieces."""
    u = case.room(*kernels.filters_shape(case.taps, case.filters, case.channels))
    units = -(-case.filters * case.channels // LANES)
    for piece in range(pieces):
        scratch = case.room(kernels.filters_scratch(case.taps))
        bounds = units * piece // pieces, units * (piece + 1) // pieces
        kernels.winograd_images_filters(case.w, u, LANES, scratch, *bounds)
    return u


def product(case, form, bias=0, pieces=1, blocking=None):
    """Return y, or dx, as the kernel gives it in so many pieces."""
    x, y = (case.x, case.dy) if form == FORWARD else (case.dy, case.x)
    tiles = np.prod(conv_winograd.grid_of(OUTPUTS, *case.dy.shape[2:]))
    if blocking is None:
        blocking = kernels.choose_blocking(case.taps, x.shape[1], y.shape[1], int(tiles))
    result = to_lanes(np.full_like(y, np.nan))
    groups = len(result)
    for piece in range(pieces):
        kernels.conv_winograd_images(
            *(to_lanes(x), filters(case), case.b, bias, result),
            *(case.taps, int(form == TRANSPOSED), *case.pad, *blocking),
            *map(case.room, kernels.scratch_of(case.taps, x.shape[1], blocking)),
            *(groups * piece // pieces, groups * (piece + 1) // pieces),
        )
    return from_lanes(result)


def weights(case, dw, db, piece, spans, blocking=None):
    """Set a row of dw and db from some of three spans of groups."""
    tiles = int(np.prod(conv_winograd.grid_of(OUTPUTS, *case.dy.shape[2:])))
    blocking = blocking or kernels.choose_weights_blocking(case.taps, case.filters, tiles)
    scratch = kernels.weights_scratch_of(
        case.taps, case.channels, case.filters, case.dy.shape[2:], blocking
    )
    kernels.conv_backward_weights_winograd_images(
        *(to_lanes(case.x), to_lanes(case.dy), dw, db, 1, case.taps, *case.pad, *blocking),
        *map(case.room, scratch),
        *(piece, max(1, case.images // LANES // GROUPS), *spans),
    )


def test_filters(dtype):
    case = batch_case("lenet2", dtype)
    count = case.filters * case.channels
    g = np.array(matrices(OUTPUTS, 5).filter, np.float64)
    want = np.einsum("ia,ocab,jb->ijoc", g, case.w, g).reshape(64, count)
    for pieces in (1, 3):
        near(filters(case, pieces)[:, :count], want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", [0, 1])
def test_forward(name, dtype, bias):
    case = batch_case(name, dtype)
    near(product(case, FORWARD, bias), case.reference_product(FORWARD, bias))


@pytest.mark.parametrize("name", NAMES)
def test_backward_data(name, dtype):
    case = batch_case(name, dtype)
    near(product(case, TRANSPOSED), case.reference_product(TRANSPOSED))


@pytest.mark.parametrize("form", [FORWARD, TRANSPOSED])
@pytest.mark.parametrize("blocking", [(1, 1), (3, 6), (7, 5), (9, 7)])
def test_any_blocking_gives_the_same_bits(dtype, form, blocking):
    case = batch_case("uneven", dtype)
    np.testing.assert_array_equal(product(case, form, blocking=blocking), product(case, form))


@pytest.mark.parametrize("form", [FORWARD, TRANSPOSED])
def test_pieces_give_the_bits_of_the_whole(dtype, form):
    case = batch_case("lenet2", dtype)
    np.testing.assert_array_equal(product(case, form, pieces=3), product(case, form))


@pytest.mark.parametrize("name", NAMES)
def test_backward_weights(name, dtype):
    case = batch_case(name, dtype)
    dw = np.full((2, case.w.size), np.nan, dtype)
    db = np.full((2, case.filters), np.nan, dtype)
    weights(case, dw, db, 1, (0, case.images // LANES))
    want_w, want_b = case.reference_weights()
    near(dw[1].reshape(want_w.shape), want_w)
    near(db[1], want_b)
    assert np.isnan(dw[0]).all()
    assert np.isnan(db[0]).all()


@pytest.mark.parametrize("blocking", [(1, 1), (3, 4), (5, 3)])
def test_any_blocking_of_the_weights(dtype, blocking):
    case = batch_case("wide", dtype)
    dw, db = case.room(1, case.w.size), case.room(1, case.filters)
    weights(case, dw, db, 0, (0, GROUPS), blocking)
    near(dw.reshape(case.w.shape), case.reference_weights()[0])


def test_weights_of_some_spans(dtype):
    case = batch_case("lenet2", dtype)
    dw, db = case.room(GROUPS, case.w.size), case.room(GROUPS, case.filters)
    for piece in range(GROUPS):
        weights(case, dw, db, piece, (piece, piece + 1))
    want_w, want_b = case.reference_weights()
    near(dw.sum(0).reshape(want_w.shape), want_w)
    near(db.sum(0), want_b)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("form", [FORWARD, TRANSPOSED])
def test_what_is_not_finite_reaches_all_that_depends_on_it(dtype, form, value):
    case = batch_case("quick2", dtype)
    source = case.x if form == FORWARD else case.dy
    source[2, 3, 7, 9] = value
    result = product(case, form)
    assert not np.isfinite(result[2, :, 5:10, 7:12]).any()
    assert np.isfinite(np.delete(result, 2, axis=0)).all()


@pytest.mark.parametrize(("name", "filter_"), [("quick2", 6), ("lenet2", 6), ("lenet2", 49)])
def test_what_is_not_finite_reaches_the_weights(name, filter_, dtype):
    case = batch_case(name, dtype)
    case.x[0, 3, 5, 5] = np.nan
    case.dy[1, filter_, 2, 2] = np.inf
    dw, db = case.room(1, case.w.size), case.room(1, case.filters)
    weights(case, dw, db, 0, (0, GROUPS))
    bad = ~np.isfinite(dw.reshape(case.w.shape))
    assert bad[:, 3].all()
    assert bad[filter_].all()
    assert not np.delete(np.delete(bad, 3, axis=1), filter_, axis=0).any()
    assert np.isinf(db[0, filter_])
    assert np.isfinite(np.delete(db[0], filter_)).all()


def test_a_block_fits_into_the_second_cache():
    for taps, depth, columns in ((5, 20, 50), (5, 50, 20), (5, 32, 32), (3, 16, 16), (5, 3, 32)):
        blocking = kernels.choose_blocking(taps, depth, columns, 64)
        bytes_of_u = 4 * (taps + 3) ** 2 * depth * columns
        assert 4 * sum(kernels.scratch_of(taps, depth, blocking)) + bytes_of_u < 900 << 10
        assert blocking[0] > 1


def test_few_filters_do_not_take_a_vector():
    assert kernels.filters_computed(LANES) == LANES
    assert kernels.filters_computed(LANES + 1) == LANES + 1
    assert kernels.filters_computed(2 * LANES - 1) == 2 * LANES
