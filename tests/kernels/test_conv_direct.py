import numpy as np
import pytest

from cgdnn.kernels import conv_direct as kernels
from cgdnn.kernels import stencil
from tests.reference import conv as reference

# group, channels and filters of a group, images, (size, kernel, stride, pad, dilation) of both axes
SHAPES = {
    "point": (1, 3, 4, 2, (1, 1, 1, 0, 1), (1, 1, 1, 0, 1)),
    "plain": (1, 3, 5, 2, (7, 3, 1, 0, 1), (9, 3, 1, 0, 1)),
    "lenet1": (1, 1, 20, 3, (28, 5, 1, 0, 1), (28, 5, 1, 0, 1)),
    "lenet2": (1, 20, 50, 3, (12, 5, 1, 0, 1), (12, 5, 1, 0, 1)),
    "pad": (1, 4, 33, 2, (6, 3, 1, 1, 1), (6, 3, 1, 1, 1)),
    "stride2": (1, 18, 34, 2, (14, 3, 2, 1, 1), (14, 3, 2, 1, 1)),
    "stride3": (1, 3, 17, 2, (15, 3, 2, 1, 1), (17, 5, 3, 2, 1)),
    "stride4": (1, 3, 20, 1, (27, 11, 4, 0, 1), (31, 11, 4, 2, 1)),
    "unread_border": (1, 1, 2, 1, (1, 1, 3, 1, 1), (4, 1, 3, 1, 1)),
    "stride_beyond": (2, 3, 2, 1, (2, 3, 4, 1, 1), (3, 2, 5, 1, 1)),
    "unreached": (1, 1, 1, 1, (8, 1, 3, 0, 1), (8, 1, 3, 0, 1)),
    "dilation": (1, 4, 6, 2, (12, 3, 1, 2, 2), (11, 3, 1, 3, 3)),
    "stride_dilation": (1, 2, 3, 2, (13, 3, 2, 2, 2), (14, 2, 2, 3, 3)),
    "group": (3, 2, 3, 2, (6, 3, 1, 1, 1), (6, 3, 1, 1, 1)),
    "wide_group": (2, 17, 40, 2, (9, 5, 1, 2, 1), (9, 5, 1, 2, 1)),
    "depthwise": (5, 1, 1, 2, (6, 3, 1, 1, 1), (19, 3, 1, 1, 1)),
    "pad_beyond": (1, 2, 3, 1, (2, 3, 1, 4, 1), (3, 3, 1, 5, 1)),
    "full_window": (1, 3, 6, 4, (7, 7, 1, 0, 1), (6, 6, 1, 0, 1)),
    "bands": (1, 40, 5, 1, (40, 3, 1, 1, 1), (75, 3, 1, 1, 1)),
    "channel_blocks": (1, 300, 40, 1, (5, 3, 1, 1, 1), (5, 3, 1, 1, 1)),
    "flat": (1, 70, 40, 9, (7, 1, 1, 0, 1), (7, 1, 1, 0, 1)),
    "full_units": (2, 9, 32, 3, (8, 1, 1, 0, 1), (5, 1, 1, 0, 1)),
    "point_stride": (1, 20, 40, 2, (9, 1, 2, 0, 1), (9, 1, 2, 0, 1)),
}
TOLERANCE = {"float32": 1e-4, "float64": 1e-11}


class Case:
    def __init__(self, name, dtype):
        group, channels, filters, images, rows, columns = SHAPES[name]
        self.window = stencil.Window(
            group, channels, filters, stencil.Side(*rows), stencil.Side(*columns)
        )
        self.dtype = dtype
        self.rows, _ = reference.row_tables([rows])
        self.last = columns[2:]
        rng = np.random.default_rng(len(name))

        def random(*shape):
            return rng.standard_normal(shape).astype(dtype)

        self.x = random(images, group * channels, rows[0], columns[0])
        self.w = random(group * filters, channels, rows[1], columns[1])
        self.b = random(group * filters)
        self.dy = random(
            images, group * filters, self.window.rows.output, self.window.columns.output
        )

    def scratch(self, size):
        return np.full(size, np.nan, self.dtype)

    def compute(self, plan, transposed, x, shape, pixel_lanes, begin=0, end=None):
        """Return the output of a stencil, with NaN wherever nothing was written."""
        group, taps = self.window.group, self.window.taps
        packed = self.scratch(plan.weights)
        kernels.conv_direct_pack(
            self.w.reshape(len(self.w), -1, taps),
            *(packed, group, transposed, not pixel_lanes, 0, len(packed)),
        )
        y = self.scratch(shape)
        views = [x, y]
        if self.window.pointwise:
            rows, columns = self.window.flat.rows.size, self.window.flat.columns.size
            views = [a.reshape(*a.shape[:2], rows, columns) for a in views]
        arguments = [views[0], packed, self.b, not transposed, views[1], *plan.tables]
        arguments += [*plan.numbers, self.scratch(plan.relaid)]
        end = len(x) if end is None else end
        if pixel_lanes:
            kernels.conv_direct_pixels(*arguments, plan.width, begin, end)
        else:
            scratch = self.scratch(plan.chunk)
            kernels.conv_direct_filters(*arguments, plan.block, plan.most, scratch, begin, end)
        return y

    def forward(self, pixel_lanes, begin=0, end=None):
        plan = stencil.forward(self.window.flat, pixel_lanes=pixel_lanes)
        return self.compute(plan, False, self.x, self.dy.shape, pixel_lanes, begin, end)

    def backward_data(self, pixel_lanes):
        plan = stencil.backward_data(self.window.flat, pixel_lanes=pixel_lanes)
        return self.compute(plan, True, self.dy, self.x.shape, pixel_lanes)

    def weights_arguments(self, plan):
        scratch = (self.scratch(plan.relaid), self.scratch(plan.vectors))
        return (1, plan.firsts, *plan.numbers, *scratch)

    def partial_weights(self, plan, pieces):
        """Return partial gradients of pieces of the images."""
        unit = stencil.unit_filters()
        dw = self.scratch((pieces, plan.units * plan.depth * unit))
        db = self.scratch((pieces, plan.units * unit))
        images = len(self.x)
        for piece in range(pieces):
            kernels.conv_direct_backward_weights(
                *(self.x, self.dy, dw, db, *self.weights_arguments(plan), piece),
                *(images * piece // pieces, images * (piece + 1) // pieces),
            )
        return dw, db

    def weights(self, keep):
        """Return what gradients are added to, and the right ones."""
        start = 0.5 if keep else np.nan
        dw = np.full((len(self.w), self.w.shape[1], self.window.taps), start, self.dtype)
        db = np.full(len(self.b), start, self.dtype)
        want_w, want_b = np.full(self.w.shape, keep / 2), np.full(len(db), keep / 2)
        reference.backward_weights(self.x, self.dy, want_w, want_b, self.rows, *self.last)
        return dw, db, want_w.reshape(dw.shape), want_b

    def near(self, got, want):
        atol = TOLERANCE[self.dtype] * max(1, np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES)
def case(request, dtype):
    return Case(request.param, dtype)


@pytest.mark.parametrize("pixel_lanes", [False, True])
def test_forward(case, pixel_lanes):
    want = np.empty(case.dy.shape)
    reference.forward(case.x, case.w, case.b, want, case.rows, *case.last)
    case.near(case.forward(pixel_lanes), want)


@pytest.mark.parametrize("pixel_lanes", [False, True])
def test_backward_data(case, pixel_lanes):
    if pixel_lanes and (case.window.rows.stride, case.window.columns.stride) != (1, 1):
        with pytest.raises(ValueError, match="stride 1"):
            case.backward_data(pixel_lanes)
        return
    want = np.empty(case.x.shape)
    reference.backward_data(case.dy, case.w, want, case.rows, *case.last)
    case.near(case.backward_data(pixel_lanes), want)


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_backward_weights_in_pieces_of_images(case, keep):
    plan = stencil.backward_weights(case.window)
    partial = case.partial_weights(plan, min(2, len(case.x)))
    dw, db, want_w, want_b = case.weights(keep)
    t = case.scratch(plan.depth * stencil.unit_filters())
    together = 2 - len(dw) % 2
    for o in range(0, len(dw) // together, 3):
        end = min(o + 3, len(dw) // together)
        kernels.conv_direct_unpack(partial[0], dw, case.window.group, keep, t, together, o, end)
    for o in range(0, len(dw), 3):
        end = min(o + 3, len(dw))
        kernels.conv_direct_bias(partial[1], db, case.window.group, keep, o, end)
    case.near(dw, want_w)
    case.near(db, want_b)


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_backward_weights_in_pieces_of_filters(case, keep):
    unit = stencil.unit_filters()
    plan = stencil.backward_weights(case.window)
    # Each unit at a time, or each group where not all of its units are full.
    units = plan.units // case.window.group if case.window.filters % unit else 1
    plan = stencil.backward_weights(case.window, units)
    dw, db, want_w, want_b = case.weights(keep)
    sums = case.scratch(units * unit * (plan.depth + 1))
    pieces = plan.units // units
    for begin, end in [(0, pieces // 2), (pieces // 2, pieces)]:
        kernels.conv_direct_filter_gradients(
            *(case.x, case.dy, dw, db, *case.weights_arguments(plan), sums),
            *(keep, keep, units, begin, end),
        )
    case.near(dw, want_w)
    case.near(db, want_b)


@pytest.mark.parametrize("pixel_lanes", [False, True])
def test_a_piece_writes_its_images_only(dtype, pixel_lanes):
    case = Case("lenet2", dtype)
    y = case.forward(pixel_lanes, 1, 2)
    assert np.isnan(y[[0, 2]]).all()
    np.testing.assert_array_equal(y[1], case.forward(pixel_lanes)[1])


@pytest.mark.parametrize("pixel_lanes", [False, True])
def test_nan_reaches_exactly_what_depends_on_it(dtype, pixel_lanes):
    case = Case("pad", dtype)
    case.x[1, 2, 0, 0] = np.nan
    y = case.forward(pixel_lanes)
    hit = np.zeros((6, 6), bool)
    hit[:2, :2] = True
    assert not np.isnan(y[0]).any()
    np.testing.assert_array_equal(np.isnan(y[1]), np.broadcast_to(hit, y[1].shape))


def test_nan_in_dy_reaches_its_filter_only(dtype):
    case = Case("pad", dtype)
    case.dy[1, 4, 3, 2] = np.nan
    plan = stencil.backward_weights(case.window)
    dw, db = case.partial_weights(plan, 1)
    unit = stencil.unit_filters()
    lanes = unit * 4 // case.x.itemsize
    filters = np.isnan(dw.reshape(-1, plan.depth, lanes)).all(axis=1).ravel()
    np.testing.assert_array_equal(np.flatnonzero(filters), [4])
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(db)), [4])
    assert np.isnan(case.backward_data(False)[1, :, 2:5, 1:4]).all()


@pytest.mark.parametrize(
    ("size", "rows"), [((7, 7), (1, 49)), ((28, 28), (7, 112)), ((56, 56), (28, 112))]
)
def test_images_of_pointwise_windows_are_cut_into_rows_that_fill_vectors(size, rows):
    sides = [stencil.Side(n, 1, 1, 0, 1) for n in size]
    flat = stencil.Window(1, 8, 8, *sides).flat
    assert (flat.rows.size, flat.columns.size) == rows


@pytest.mark.parametrize("side", [stencil.Side(7, 1, 2, 0, 1), stencil.Side(7, 1, 1, 1, 1)])
def test_images_of_other_windows_stay_as_they_are(side):
    window = stencil.Window(1, 8, 8, stencil.Side(7, 1, 1, 0, 1), side)
    assert window.flat is window
