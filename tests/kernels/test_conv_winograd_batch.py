import numpy as np
import pytest

from cgdnn.kernels import conv_winograd
from cgdnn.kernels import conv_winograd_batch as kernels
from tests.kernels.test_conv_winograd import Case, near

FORMS = [conv_winograd.FORWARD, conv_winograd.FLIPPED, conv_winograd.TRANSPOSED]
SMALL = ["one_tile", "lenet2", "uneven", "pad_beyond", "small_image", "wide"]


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def batch_case(name, dtype):
    """Return a case with three units of images."""
    case = Case(name, dtype)
    rng = np.random.default_rng(1)
    case.images = 3 * kernels.images_together()
    for array in ("x", "dy"):
        shape = (case.images, *getattr(case, array).shape[1:])
        setattr(case, array, rng.standard_normal(shape).astype(dtype))
    return case


def product(case, form, bias=0, pieces=1):
    """Return y, or dx, as the kernel gives it in so many pieces."""
    x, y = (case.x, case.dy) if form == conv_winograd.FORWARD else (case.dy, case.x)
    u = case.room(*conv_winograd.filters_shape(case.taps, 1, x.shape[1], y.shape[1]))
    plane = case.room(conv_winograd.filters_scratch(case.taps))
    conv_winograd.winograd_filters(case.w, u, 1, y.shape[1], form, plane, 0, len(u))
    pad = [case.taps - 1 - p if form == conv_winograd.FLIPPED else p for p in case.pad]
    covered = x if form == conv_winograd.TRANSPOSED else y
    result = np.full_like(y, np.nan)
    for piece in range(pieces):
        kernels.conv_winograd_batch(
            *(x, u, case.b, bias, result, case.taps, int(form == conv_winograd.TRANSPOSED), *pad),
            kernels.images_together(),
            *map(case.room, kernels.scratch_of(case.taps, x.shape[1], covered.shape[2:])),
            *(3 * piece // pieces, 3 * (piece + 1) // pieces),
        )
    return result


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SMALL)
def test_products(name, dtype, form):
    case = batch_case(name, dtype)
    near(product(case, form), case.reference_product(form))


def test_bias(dtype):
    case = batch_case("lenet2", dtype)
    want = case.reference_product(conv_winograd.FORWARD, 1)
    near(product(case, conv_winograd.FORWARD, bias=1), want)


@pytest.mark.parametrize("form", FORMS)
def test_pieces_give_the_bits_of_the_whole(dtype, form):
    case = batch_case("lenet2", dtype)
    np.testing.assert_array_equal(product(case, form, pieces=3), product(case, form))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_stays_in_its_image(dtype, form):
    case = batch_case("lenet2", dtype)
    source = case.x if form == conv_winograd.FORWARD else case.dy
    source[2, 3, 5, 5] = np.inf
    result = product(case, form)
    assert not np.isfinite(result[2]).all()
    assert np.isfinite(np.delete(result, 2, axis=0)).all()
