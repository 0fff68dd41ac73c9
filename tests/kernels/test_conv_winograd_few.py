import numpy as np
import pytest

from cgdnn.kernels import conv_winograd
from cgdnn.kernels import conv_winograd_few as kernels
from tests.kernels.test_conv_winograd import SHAPES, Case, near

ONE_GROUP = [name for name, shape in SHAPES.items() if shape[-1] == 1]


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def forward(case, bias=0, band=None, pieces=1):
    """Return y as the kernels give it in so many pieces."""
    size, planes = case.taps + 3, case.filters * case.channels
    u = case.room(planes, 1, size, size)
    for piece in range(pieces):
        kernels.winograd_few_filters(
            *(case.w.reshape(planes, 1, case.taps, case.taps), u),
            *map(case.room, kernels.filters_scratch(case.taps)),
            *(planes * piece // pieces, planes * (piece + 1) // pieces),
        )
    y = case.room(*case.dy.shape)
    grid = conv_winograd.grid_of(*y.shape[2:])
    band = band or kernels.band_of(case.taps, case.channels, grid)
    for piece in range(pieces):
        kernels.conv_forward_winograd_few(
            *(case.x, u.reshape(case.filters, case.channels, size, size), case.b, bias, y),
            *(*case.pad, band),
            *map(case.room, kernels.scratch_of(case.taps, case.channels, band * grid[1])),
            *(case.images * piece // pieces, case.images * (piece + 1) // pieces),
        )
    return y


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("name", ONE_GROUP)
def test_forward(name, dtype, bias):
    case = Case(name, dtype)
    near(forward(case, bias), case.reference_product(conv_winograd.FORWARD, bias))


@pytest.mark.parametrize("band", [1, 2, 4])
def test_bands_and_pieces_give_the_bits_of_the_whole(dtype, band):
    case = Case("uneven", dtype)
    np.testing.assert_array_equal(forward(case, band=band, pieces=3), forward(case))


def test_what_is_not_finite_reaches_all_that_depends_on_it(dtype):
    case = Case("uneven", dtype)
    case.x[1, 3, 7, 5] = np.nan
    case.w[4, 2, 0, 1] = np.inf
    y = forward(case)
    assert not np.isfinite(y[1, :, 5:8, 5:8]).any()
    assert not np.isfinite(y[:, 4]).any()
    assert np.isfinite(np.delete(y[0], 4, axis=0)).all()


def test_a_band_stays_near():
    assert kernels.band_of(5, 3, (8, 8)) == 8
    assert kernels.band_of(3, 3, (56, 56)) < 56
    assert kernels.band_of(5, 4, (300, 1000)) == 1
