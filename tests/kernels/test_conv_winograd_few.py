import numpy as np
import pytest

from cgdnn.kernels import conv_winograd
from cgdnn.kernels import conv_winograd_few as kernels
from cgdnn.kernels.winograd_points import OUTPUTS
from tests.kernels.test_conv_winograd import Case, near

# channels, filters, image, taps, pad, images, group
SHAPES = {
    "one_tile": (3, 2, (4, 4), 3, (1, 1), 1, 1),
    "lenet1": (1, 20, (13, 11), 5, (0, 0), 3, 1),
    "quick1": (3, 32, (32, 32), 5, (2, 2), 2, 1),
    "uneven": (4, 70, (13, 10), 3, (0, 2), 3, 1),
    "uneven5": (4, 17, (9, 6), 5, (1, 0), 2, 1),
    "two_channels": (2, 48, (30, 75), 3, (1, 1), 1, 1),
    "pad_beyond": (3, 4, (3, 4), 3, (5, 4), 1, 1),
    "small_image": (2, 16, (2, 1), 5, (4, 4), 3, 1),
}


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def forward(case, bias=0, band=None, pieces=1, in_lanes=False):
    """Return y, in N, C, H, W order, as the kernels give it in so many pieces."""
    u = case.room(*kernels.filters_shape(case.taps, case.channels, case.filters))
    plane = case.room(kernels.filters_scratch(case.taps, case.channels))
    for piece in range(pieces):
        units = (len(u) * piece // pieces, len(u) * (piece + 1) // pieces)
        kernels.winograd_few_filters(case.w, u, plane, *units)
    lanes = conv_winograd.padded(1)
    images, filters, height, width = case.dy.shape
    grid = conv_winograd.grid_of(OUTPUTS, height, width)
    band = band or kernels.band_of(case.taps, case.channels, grid)
    sizes = kernels.scratch_of(case.taps, case.channels, band, grid[1], case.x.shape[3])
    kernel = kernels.conv_forward_winograd_few
    y = case.room(*case.dy.shape)
    if in_lanes:
        kernel = kernels.conv_forward_winograd_few_lanes
        y = case.room(images, filters // lanes, height, width, lanes)
    else:
        sizes += (kernels.plane_scratch(width),)
    for piece in range(pieces):
        kernel(
            *(case.x, u, case.b, bias, y, *case.pad, band, *map(case.room, sizes)),
            *(images * piece // pieces, images * (piece + 1) // pieces),
        )
    return np.moveaxis(y, 4, 2).reshape(case.dy.shape) if in_lanes else y


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_forward(name, dtype, bias):
    case = Case(name, dtype, SHAPES)
    near(forward(case, bias), case.reference_product(conv_winograd.FORWARD, bias))


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape[1] % 16 == 0])
def test_lanes_hold_the_bits_of_the_planes(name, dtype):
    case = Case(name, dtype, SHAPES)
    np.testing.assert_array_equal(forward(case, 1, in_lanes=True, pieces=2), forward(case, 1))


@pytest.mark.parametrize("band", [1, 2, 4])
def test_bands_and_pieces_give_the_bits_of_the_whole(dtype, band):
    case = Case("uneven", dtype, SHAPES)
    np.testing.assert_array_equal(forward(case, band=band, pieces=3), forward(case))


def test_what_is_not_finite_reaches_all_that_depends_on_it(dtype):
    case = Case("uneven", dtype, SHAPES)
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
