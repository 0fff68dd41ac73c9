import numpy as np
import pytest

from cgdnn.kernels import conv_winograd as kernels
from cgdnn.kernels.winograd_points import OUTPUTS, VARIANTS
from tests.reference import conv as reference

# channels, filters, image, taps, pad, images, group
LANES = kernels.padded(1)
SHAPES = {
    "one_tile": (3, 2, (4, 4), 3, (1, 1), 1, 1),
    "lenet2": (20, 50, (12, 12), 5, (0, 0), 6, 1),
    "quick2": (32, 32, (16, 16), 5, (2, 2), 2, 1),
    "uneven": (5, 7, (13, 10), 3, (0, 2), 3, 1),
    "group": (12, 15, (6, 9), 5, (1, 0), 2, 3),
    "depthwise": (4, 4, (7, 7), 3, (1, 1), 2, 4),
    "pad_beyond": (3, 4, (3, 4), 3, (5, 4), 1, 1),
    "small_image": (17, 16, (2, 1), 5, (4, 4), 3, 1),
    "bands": (3, 70, (34, 75), 3, (1, 1), 1, 1),
    "deep": (300, 40, (5, 6), 3, (1, 1), 2, 1),
    "wide": (20, 150, (6, 5), 5, (2, 2), 4, 1),
    "in_lanes": (2 * LANES, LANES, (9, 14), 5, (2, 1), 4, 1),
    "group_in_lanes": (2 * LANES, 4 * LANES, (6, 5), 3, (1, 1), 3, 2),
    "whole_in_lanes": (LANES, 2 * LANES, (20, 8), 3, (1, 1), 2, 1),
    "four_taps": (7, 18, (13, 8), 4, (1, 2), 3, 1),
    "images_together": (6, 10, (9, 8), 3, (1, 1), 4, 1),
}
FEW_TILES = ("uneven", "group", "small_image", "deep", "wide")
VARIANT_OF_SHAPE = [
    (name, outputs)
    for name, shape in SHAPES.items()
    for outputs, taps in VARIANTS
    if taps == shape[3]
]
DTYPES = ("float32", "float64")
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
LARGE_TILES = 4
"""What tolerances are multiplied by for tiles of more than 5 x 5 outputs."""


class Case:
    def __init__(self, name, dtype, shapes=SHAPES, outputs=OUTPUTS):
        self.outputs = outputs
        self.channels, self.filters, image, self.taps, self.pad, self.images, self.group = shapes[
            name
        ]
        rng = np.random.default_rng(len(name))
        taps = self.taps
        out = [size + 2 * pad - taps + 1 for size, pad in zip(image, self.pad, strict=True)]
        self.inner, self.outer = self.channels // self.group, self.filters // self.group
        self.rows = reference.row_tables([(image[0], taps, 1, self.pad[0], 1)])[0]
        self.dtype = dtype

        def random(*shape):
            return rng.standard_normal(shape).astype(dtype)

        self.x = random(self.images, self.channels, *image)
        self.w = random(self.filters, self.inner, taps, taps)
        self.b = random(self.filters)
        self.dy = random(self.images, self.filters, *out)

    def room(self, *shape):
        return np.full(shape, np.nan, self.dtype)

    def blocking(self, form):
        depth, columns = self.inner, self.outer
        if form != kernels.FORWARD:
            depth, columns = columns, depth
        plane = self.x if form == kernels.FLIPPED else self.dy
        grid = kernels.grid_of(self.outputs, *plane.shape[2:])
        return kernels.choose_blocking(self.outputs, self.taps, depth, columns, grid, self.images)

    def product(self, form, bias=0, pieces=1, pitches=(1, 1)):
        """Return y, or dx, as the kernels give it in so many pieces."""
        blocking = self.blocking(form)
        x, y = (self.x, self.dy) if form == kernels.FORWARD else (self.dy, self.x)
        depth, columns, group, taps = blocking.channels, blocking.filters, self.group, self.taps
        outputs = self.outputs
        u = self.room(*kernels.filters_shape(outputs, taps, group, depth, columns))
        for unit in range(len(u)):
            plane = self.room(kernels.filters_scratch(taps))
            kernels.winograd_filters(
                self.w, u, outputs, group, columns, form, plane, unit, unit + 1
            )
        result = np.full_like(y, np.nan)
        pad = [taps - 1 - pad if form == kernels.FLIPPED else pad for pad in self.pad]
        groups = self.images // blocking.images
        for piece in range(pieces):
            kernels.conv_winograd(
                *(stored(x, pitches[0]), pitches[0], u, self.b, bias, result, pitches[1]),
                *(group, outputs, taps, int(form == kernels.TRANSPOSED), *pad),
                *(blocking.images, blocking.down, blocking.across),
                self.room(blocking.plane_scratch()),
                self.room(blocking.tiles_scratch(depth)),
                self.room(blocking.tiles_scratch(columns)),
                *(groups * piece // pieces, groups * (piece + 1) // pieces),
            )
        return restored(result, pitches[1])

    def spread(self, form, bias=0, pitches=(1, 1)):
        """Return the same by the three kernels for few tiles."""
        blocking = self.blocking(form)
        x, y = (self.x, self.dy) if form == kernels.FORWARD else (self.dy, self.x)
        depth, columns, group, taps = blocking.channels, blocking.filters, self.group, self.taps
        pad = [taps - 1 - pad if form == kernels.FLIPPED else pad for pad in self.pad]
        outputs = self.outputs
        geometry = (group, outputs, taps, int(form == kernels.TRANSPOSED), *pad, blocking.images)
        units, _, _, width = kernels.filters_shape(outputs, taps, group, depth, columns)
        groups = self.images // blocking.images
        v = self.room(groups, group, blocking.tiles_scratch(depth))
        m = self.room(units, groups, blocking.tiles_scratch(width))
        plane = self.room(blocking.plane_scratch())
        result = np.full_like(y, np.nan)
        part = self.room(*kernels.part_shape(outputs, taps, depth, columns))
        x = stored(x, pitches[0])
        kernels.winograd_inputs(x, pitches[0], v, *geometry, plane, 0, groups)
        kernels.winograd_products(
            *(v, self.w, m, outputs, group, columns, form, blocking.tiles, plane, part, 0, units)
        )
        arrays = (m, self.b, bias, result, pitches[1])
        kernels.winograd_outputs(*arrays, *geometry, width, plane, 0, groups)
        return restored(result, pitches[1])

    def weights(self, dw, db, piece, keep, together, units, groups, pitches=(1, 1)):
        blocking = self.blocking(kernels.FORWARD)
        x, dy = (stored(*blob) for blob in zip((self.x, self.dy), pitches, strict=True))
        kernels.conv_backward_weights_winograd(
            *(x, pitches[0], dy, pitches[1], dw, db, 1, self.group, self.outputs, self.taps),
            *self.pad,
            *(blocking.images, blocking.down, blocking.across, together),
            self.room(blocking.plane_scratch()),
            self.room(blocking.tiles_scratch(self.inner)),
            self.room(blocking.tiles_scratch(together)),
            self.room(blocking.gradient_scratch(together)),
            self.room(kernels.padded(together)),
            *(piece, keep, keep, *units, 1, *groups),
        )

    def reference_weights(self):
        dw, db = np.zeros(self.w.shape), np.zeros(self.filters)
        x, dy = self.x.astype(np.float64), self.dy.astype(np.float64)
        reference.backward_weights(x, dy, dw, db, self.rows, 1, self.pad[1], 1)
        return dw, db

    def reference_product(self, form, bias=0):
        w = self.w.astype(np.float64)
        if form == kernels.FORWARD:
            want = np.empty(self.dy.shape)
            b = self.b if bias else None
            reference.forward(self.x.astype(np.float64), w, b, want, self.rows, 1, self.pad[1], 1)
        else:
            want = np.empty(self.x.shape)
            dy = self.dy.astype(np.float64)
            reference.backward_data(dy, w, want, self.rows, 1, self.pad[1], 1)
        return want


def stored(x, pitch):
    """Return what holds x where places of a plane are `pitch` apart, in the shape of x."""
    n, c, h, w = x.shape
    lanes = x.reshape(n, c // pitch, pitch, h * w).swapaxes(2, 3)
    return np.ascontiguousarray(lanes).reshape(x.shape)


def restored(x, pitch):
    n, c, h, w = x.shape
    planes = x.reshape(n, c // pitch, h * w, pitch).swapaxes(2, 3)
    return np.ascontiguousarray(planes).reshape(x.shape)


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(params=VARIANT_OF_SHAPE, ids=lambda each: f"{each[0]}-{each[1]}")
def case(request, dtype):
    name, outputs = request.param
    return Case(name, dtype, outputs=outputs)


def near(got, want, outputs=OUTPUTS):
    limit = TOLERANCE[str(got.dtype)] * np.abs(want).max()
    if outputs > 5:
        limit *= LARGE_TILES
    np.testing.assert_allclose(got, want, rtol=0, atol=limit)


@pytest.mark.parametrize("bias", [0, 1])
def test_forward(case, bias):
    near(
        case.product(kernels.FORWARD, bias),
        case.reference_product(kernels.FORWARD, bias),
        case.outputs,
    )


@pytest.mark.parametrize("form", [kernels.FLIPPED, kernels.TRANSPOSED])
def test_backward_data(case, form):
    blocking = case.blocking(form)
    whole = (blocking.down, blocking.across) == kernels.grid_of(case.outputs, *case.dy.shape[2:])
    if form == kernels.TRANSPOSED and not whole:
        pytest.skip("the transposed algorithm takes whole images")
    near(case.product(form), case.reference_product(form), case.outputs)


@pytest.mark.parametrize(
    ("name", "outputs"),
    [each for each in VARIANT_OF_SHAPE if each[0] in FEW_TILES],
)
@pytest.mark.parametrize("form", [kernels.FORWARD, kernels.FLIPPED, kernels.TRANSPOSED])
def test_few_tiles(name, outputs, form, dtype):
    case = Case(name, dtype, outputs=outputs)
    bias = int(form == kernels.FORWARD)
    near(case.spread(form, bias), case.reference_product(form, bias), case.outputs)


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_backward_weights(case, keep):
    start = 0.5 if keep else np.nan
    dw = np.full((2, case.w.size), start, case.dtype)
    db = np.full((2, case.filters), start, case.dtype)
    groups = case.images // case.blocking(kernels.FORWARD).images
    case.weights(dw, db, 1, keep, case.outer, (0, case.group), (0, groups))
    want_w, want_b = case.reference_weights()
    near(dw[1].reshape(want_w.shape), want_w + keep / 2, case.outputs)
    near(db[1], want_b + keep / 2, case.outputs)
    np.testing.assert_array_equal(dw[0], np.full_like(dw[0], start))
    np.testing.assert_array_equal(db[0], np.full_like(db[0], start))


def test_weights_of_a_range_of_filters(dtype):
    case = Case("lenet2", dtype)
    dw, db = np.full((1, case.w.size), 7, dtype), np.full((1, 50), 7, dtype)
    groups = case.images // case.blocking(kernels.FORWARD).images
    case.weights(dw, db, 0, 0.0, 10, (1, 4), (0, groups))
    want_w, want_b = case.reference_weights()
    dw, db = dw.reshape(case.w.shape), db[0]
    near(dw[10:40], want_w[10:40], case.outputs)
    near(db[10:40], want_b[10:40], case.outputs)
    for untouched in (dw[:10], dw[40:], db[:10], db[40:]):
        assert (untouched == 7).all()


@pytest.mark.parametrize(("name", "outputs"), [("lenet2", 4), ("images_together", 5)])
def test_pieces_give_the_bits_of_the_whole(name, outputs, dtype):
    case = Case(name, dtype, outputs=outputs)
    case.x, case.dy = np.tile(case.x, (10, 1, 1, 1)), np.tile(case.dy, (10, 1, 1, 1))
    case.images *= 10
    assert 1 < case.blocking(kernels.FORWARD).images < case.images
    for form in (kernels.FORWARD, kernels.FLIPPED, kernels.TRANSPOSED):
        np.testing.assert_array_equal(case.product(form), case.product(form, pieces=3))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("form", [kernels.FORWARD, kernels.FLIPPED, kernels.TRANSPOSED])
@pytest.mark.parametrize(("name", "outputs"), [("quick2", 4), ("images_together", 5)])
def test_what_is_not_finite_reaches_all_that_depends_on_it(name, outputs, dtype, form, value):
    case = Case(name, dtype, outputs=outputs)
    source = case.x if form == kernels.FORWARD else case.dy
    source[1, 3, 4, 6] = value
    result = case.product(form)
    reach = case.taps // 2
    assert not np.isfinite(result[1, :, 4 - reach : 5 + reach, 6 - reach : 7 + reach]).any()
    assert np.isfinite(result[0]).all()


def test_a_weight_that_is_not_finite_reaches_its_filter():
    case = Case("quick2", "float32")
    case.w[4, 2, 0, 4] = np.inf
    y = case.product(kernels.FORWARD)
    assert not np.isfinite(y[:, 4]).any()
    assert np.isfinite(np.delete(y, 4, axis=1)).all()


def test_what_is_not_finite_reaches_the_weights():
    case = Case("quick2", "float32")
    case.x[0, 3, 7, 9] = np.nan
    case.dy[1, 6, 2, 2] = np.inf
    dw, db = np.empty((1, case.w.size), np.float32), np.empty((1, 32), np.float32)
    groups = case.images // case.blocking(kernels.FORWARD).images
    case.weights(dw, db, 0, 0.0, 32, (0, 1), (0, groups))
    bad = ~np.isfinite(dw.reshape(case.w.shape))
    assert bad[:, 3].all()
    assert bad[6].all()
    assert not np.delete(np.delete(bad, 3, axis=1), 6, axis=0).any()
    assert np.isinf(db[0, 6])
    assert np.isfinite(np.delete(db[0], 6)).all()


@pytest.mark.parametrize(
    ("outputs", "taps", "limit"),
    [(4, 3, 3e-7), (5, 3, 6e-7), (7, 3, 2e-6), (4, 5, 1e-6), (7, 5, 1e-6), (8, 5, 2e-6)],
)
def test_rounding_stays_below_the_documented_bound(outputs, taps, limit):
    case = Case("quick2", "float32", outputs=outputs)
    rng = np.random.default_rng(taps)
    case.taps, case.pad = taps, (taps // 2, taps // 2)
    case.w = rng.standard_normal((32, 32, taps, taps)).astype(np.float32)
    case.rows = reference.row_tables([(16, taps, 1, taps // 2, 1)])[0]
    dw, db = np.empty((1, case.w.size), np.float32), np.empty((1, 32), np.float32)
    groups = case.images // case.blocking(kernels.FORWARD).images
    case.weights(dw, db, 0, 0.0, 32, (0, 1), (0, groups))
    pairs = [(dw.reshape(case.w.shape), case.reference_weights()[0])]
    pairs += [
        (case.product(form), case.reference_product(form))
        for form in (kernels.FORWARD, kernels.FLIPPED, kernels.TRANSPOSED)
    ]
    for got, want in pairs:
        error = np.sqrt(np.mean((got - want) ** 2)) / np.abs(want).max()
        assert error < limit


def test_blocks_fill_what_is_near():
    whole = kernels.choose_blocking(4, 5, 32, 32, (4, 4), 100)
    assert (whole.down, whole.across) == (4, 4)
    assert 100 % whole.images == 0
    bands = kernels.choose_blocking(4, 3, 64, 64, (56, 56), 8)
    assert bands.images == 1
    assert bands.tiles <= 56
    few = kernels.choose_blocking(4, 3, 512, 512, (2, 2), 7)
    assert few.images in (1, 7)


def test_a_sum_over_tiles_takes_fewer_of_them():
    shape = (5, 3, 512, 512, (3, 3), 8)
    assert kernels.choose_blocking(*shape).images == 8
    assert kernels.choose_blocking(*shape, summed=True).images == 4


def test_a_product_has_few_rows_in_vain():
    shape = (4, 5, 64, 32, (2, 2), 100)
    assert kernels.choose_blocking(*shape).images == 4  # 16 rows of tiles rather than 20 of 24
    assert kernels.choose_blocking(*shape, summed=True).images == 5


def test_each_variant_has_a_number():
    assert [kernels.variant_of(*variant) for variant in VARIANTS] == list(range(len(VARIANTS)))


@pytest.mark.parametrize(
    ("name", "outputs"),
    [("in_lanes", 4), ("group_in_lanes", 4), ("group_in_lanes", 5), ("whole_in_lanes", 4)],
)
@pytest.mark.parametrize("pitches", [(LANES, 1), (1, LANES), (LANES, LANES)])
def test_channels_in_lanes_give_the_same_bits(name, outputs, pitches, dtype):
    case = Case(name, dtype, outputs=outputs)
    for form in (kernels.FORWARD, kernels.FLIPPED, kernels.TRANSPOSED):
        for product in (case.product, case.spread):
            np.testing.assert_array_equal(product(form, pitches=pitches), product(form))
    gradients = []
    for each in ((1, 1), pitches):
        dw, db = np.full((1, case.w.size), np.nan, dtype), np.full((1, case.filters), np.nan, dtype)
        groups = case.images // case.blocking(kernels.FORWARD).images
        for g in range(case.group):
            case.weights(dw, db, 0, 0.0, case.outer, (g, g + 1), (0, groups), each)
        gradients.append((dw, db))
    for mine, plain in zip(*gradients, strict=True):
        np.testing.assert_array_equal(mine, plain)
