import numpy as np
import pytest

from cgdnn.kernels import conv_images as kernels
from cgdnn.kernels.pool_lanes import max_forward
from cgdnn.kernels.reorder import PLACE
from cgdnn.kernels.stencil import Side, Window
from tests.reference import conv as reference

LANES = PLACE

# channels, filters, groups of images, (size, kernel, pad) of both axes
SHAPES = {
    "point": (1, 1, 1, (1, 1, 0), (1, 1, 0)),
    "pointwise": (5, 13, 1, (3, 1, 0), (7, 1, 0)),
    "plain": (3, 5, 2, (7, 3, 0), (9, 3, 0)),
    "lenet1": (1, 20, 1, (28, 5, 0), (28, 5, 0)),
    "lenet2": (20, 50, 1, (12, 5, 0), (12, 5, 0)),
    "pad": (4, 33, 1, (6, 3, 1), (6, 3, 1)),
    "even": (2, 7, 2, (5, 2, 1), (11, 4, 2)),
    "wide": (2, 3, 1, (4, 2, 1), (13, 11, 5)),
    "pad_most": (2, 3, 1, (5, 3, 2), (6, 5, 4)),
    "kernel_beyond": (2, 3, 1, (2, 3, 2), (3, 5, 4)),
    "full_window": (3, 6, 1, (7, 7, 0), (6, 6, 0)),
    "column": (2, 9, 1, (9, 5, 2), (1, 1, 0)),
    "bands": (70, 5, 1, (8, 3, 1), (40, 3, 1)),
    "panels": (2, 131, 1, (4, 3, 0), (5, 3, 1)),
}
TOLERANCE = {"float32": 1e-4, "float64": 1e-11}


def to_groups(x):
    """Return images (N, ...) in groups (N / L, ..., L)."""
    grouped = x.reshape(-1, LANES, *x.shape[1:])
    return np.ascontiguousarray(np.moveaxis(grouped, 1, -1))


def to_images(x):
    """Undo `to_groups`."""
    return np.moveaxis(x, -1, 1).reshape(-1, *x.shape[1:-1])


class Case:
    def __init__(self, name, dtype):
        channels, filters, self.groups, rows, columns = SHAPES[name]
        sides = [Side(size, kernel, 1, pad, 1) for size, kernel, pad in (rows, columns)]
        self.window = Window(1, channels, filters, *sides)
        self.dtype = dtype
        self.tables, _ = reference.row_tables([(rows[0], rows[1], 1, rows[2], 1)])
        self.last = (1, columns[2], 1)
        self.rng = np.random.default_rng(len(name))
        images = self.groups * LANES
        self.x = self.random(images, channels, rows[0], columns[0])
        self.w = self.random(filters, channels, rows[1], columns[1])
        self.b = self.random(filters)
        self.dy = self.random(images, filters, sides[0].output, sides[1].output)

    def random(self, *shape):
        return self.rng.standard_normal(shape).astype(self.dtype)

    def empty(self, like):
        return np.full_like(to_groups(like), np.nan)

    def forward(self, begin, end, has_bias=1):
        y = self.empty(self.dy)
        kernel = kernels.forward(self.window)
        kernel(to_groups(self.x), self.w, self.b, has_bias, y, begin, end)
        return to_images(y)

    def backward_data(self, begin, end):
        dx = self.empty(self.x)
        kernels.backward_data(self.window)(to_groups(self.dy), self.w, dx, begin, end)
        return to_images(dx)

    def gradients(self, kernel, *inputs, scratch=(), pieces=1, has_bias=1):
        """Return dw and db of each piece of the groups; NaN where nothing was written."""
        dw = np.full((pieces, self.w.size), np.nan, self.dtype)
        db = np.full((pieces, len(self.b)), np.nan, self.dtype)
        for piece in range(pieces):
            part = self.groups * piece // pieces, self.groups * (piece + 1) // pieces
            kernel(to_groups(self.x), *inputs, dw, db, *scratch, has_bias, piece, *part)
        return dw.reshape(pieces, *self.w.shape), db

    def backward_weights(self, **options):
        kernel = kernels.backward_weights(self.window)
        return self.gradients(kernel, to_groups(self.dy), **options)

    def routed(self, dy, places, **options):
        kernel = kernels.backward_weights_routed(self.window)
        masks = np.empty(kernels.masks_scratch(self.window, self.groups), np.uint8)
        inputs = to_groups(dy), to_groups(places)
        return self.gradients(kernel, *inputs, scratch=[masks], **options)

    def backward_data_routed(self, dy, places, begin, end):
        dx = self.empty(self.x)
        kernel = kernels.backward_data_routed(self.window)
        kernel(to_groups(dy), to_groups(places), self.w, dx, begin, end)
        return to_images(dx)

    def dense(self, pooled, places):
        """Return gradients of all outputs, those of `maxima` and zeros."""
        dy = np.zeros((*self.dy.shape[:2], self.dy[0, 0].size), self.dtype)
        flat = (*pooled.shape[:2], -1)
        np.put_along_axis(dy, places.reshape(flat), pooled.reshape(flat), axis=2)
        return dy.reshape(self.dy.shape)

    def maxima(self):
        """Return gradients of windows of 2 x 2 outputs, with places chosen in each."""
        rows, columns = self.dy.shape[2:]
        shape = (*self.dy.shape[:2], -(-rows // 2), -(-columns // 2))
        i, j = (
            np.minimum(2 * at + self.rng.integers(0, 2, shape), size - 1)
            for at, size in zip(np.indices(shape[2:]), (rows, columns), strict=True)
        )
        return self.random(*shape), (i * columns + j).astype(np.int32)

    def near_gradients(self, got, dy):
        want_w, want_b = np.zeros(self.w.shape), np.zeros(len(self.b))
        reference.backward_weights(self.x, dy, want_w, want_b, self.tables, *self.last)
        self.near(got[0].sum(axis=0), want_w)
        self.near(got[1].sum(axis=0), want_b)

    def near(self, got, want):
        atol = TOLERANCE[self.dtype] * max(1, np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES)
def case(request, dtype):
    return Case(request.param, dtype)


@pytest.mark.parametrize("has_bias", [0, 1])
def test_forward(case, has_bias):
    want = np.empty(case.dy.shape)
    bias = case.b if has_bias else None
    reference.forward(case.x, case.w, bias, want, case.tables, *case.last)
    case.near(case.forward(0, case.groups, has_bias), want)


@pytest.mark.parametrize("name", ["lenet1", "lenet2", "pad", "bands"])
def test_forward_pooled(dtype, name):
    """It gives the bits of a pooling behind `forward`, NaN included."""
    case = Case(name, dtype)
    assert kernels.pools(case.window)
    case.x[2, 0, 3, 3] = np.nan
    dense = to_groups(case.forward(0, case.groups))
    shape = (*dense.shape[:2], dense.shape[2] // 2, dense.shape[3] // 2, LANES)
    want, y = (np.full(shape, np.nan, dtype) for _ in range(2))
    want_places, places = (np.full(shape, -1, np.int32) for _ in range(2))
    planes = [array.reshape(-1, *array.shape[2:]) for array in (dense, want, want_places)]
    max_forward((2, 2))(*planes, 2, 2, 0, 0, 2, 2, 0, len(planes[0]))
    kernel = kernels.forward_pooled(case.window)
    kernel(to_groups(case.x), case.w, case.b, 1, y, places, 0, case.groups)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(places, want_places)


def test_only_whole_windows_of_rows_that_stay_near_are_pooled_at_once():
    assert kernels.pools(Case("even", "float32").window)
    assert not kernels.pools(Case("plain", "float32").window)
    wide = Side(100, 3, 1, 1, 1)
    assert not kernels.pools(Window(1, 1, 1, wide, wide))


def test_backward_data(case):
    want = np.empty(case.x.shape)
    reference.backward_data(case.dy, case.w, want, case.tables, *case.last)
    case.near(case.backward_data(0, case.groups), want)


def test_backward_weights(case):
    case.near_gradients(case.backward_weights(pieces=case.groups), case.dy)


def test_backward_weights_routed(case):
    pooled, places = case.maxima()
    got = case.routed(pooled, places, pieces=case.groups)
    case.near_gradients(got, case.dense(pooled, places))


def test_backward_data_routed(case):
    pooled, places = case.maxima()
    want = np.empty(case.x.shape)
    reference.backward_data(case.dense(pooled, places), case.w, want, case.tables, *case.last)
    case.near(case.backward_data_routed(pooled, places, 0, case.groups), want)


def test_a_piece_of_the_routed_data_gradient_writes_its_groups_only(dtype):
    case = Case("plain", dtype)
    maxima = case.maxima()
    part = case.backward_data_routed(*maxima, 1, 2)
    assert np.isnan(part[:LANES]).all()
    np.testing.assert_array_equal(part[LANES:], case.backward_data_routed(*maxima, 0, 2)[LANES:])


@pytest.mark.parametrize("name", ["forward", "backward_data"])
def test_a_piece_writes_its_groups_only(dtype, name):
    compute = getattr(Case("plain", dtype), name)
    part = compute(1, 2)
    assert np.isnan(part[:LANES]).all()
    np.testing.assert_array_equal(part[LANES:], compute(0, 2)[LANES:])


@pytest.mark.parametrize("name", ["plain", "pad"])
def test_a_piece_of_the_gradient_is_that_of_its_groups_alone(dtype, name):
    case = Case(name, dtype)
    pieces = case.backward_weights(pieces=case.groups)
    for group in range(case.groups):
        alone = Case(name, dtype)
        alone.groups = 1
        alone.x, alone.dy = (
            a[group * LANES : (group + 1) * LANES].copy() for a in (case.x, case.dy)
        )
        for whole, part in zip(pieces, alone.backward_weights(), strict=True):
            np.testing.assert_array_equal(whole[group], part[0])


def test_gradients_of_biases_that_are_not_wanted_stay(dtype):
    case = Case("plain", dtype)
    assert np.isnan(case.backward_weights(has_bias=0)[1]).all()
    assert np.isnan(case.routed(*case.maxima(), has_bias=0)[1]).all()


def test_nan_reaches_exactly_the_outputs_that_depend_on_it(dtype):
    case = Case("pad", dtype)
    case.x[1, 2, 0, 0] = case.dy[1, 2, 5, 5] = np.nan
    y, dx = np.isnan(case.forward(0, 1)), np.isnan(case.backward_data(0, 1))
    hit = np.zeros((6, 6), bool)
    hit[:2, :2] = True
    assert y.sum() == y[1].sum()
    assert dx.sum() == dx[1].sum()
    np.testing.assert_array_equal(y[1], np.broadcast_to(hit, y[1].shape))
    np.testing.assert_array_equal(dx[1], np.broadcast_to(hit[::-1, ::-1], dx[1].shape))


def test_nan_reaches_exactly_the_gradients_that_depend_on_it(dtype):
    case = Case("pad", dtype)
    case.dy[1, 4, 0, 3] = np.nan
    dw, db = case.backward_weights()
    want = np.zeros(dw.shape, bool)
    want[0, 4, :, 1:] = True  # the first row of taps meets padding there
    np.testing.assert_array_equal(np.isnan(dw), want)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(db)), [4])


def test_only_what_maxima_meet_reaches_routed_gradients(dtype):
    case = Case("pad", dtype)
    pooled, places = case.maxima()
    i, j = np.indices(places.shape[2:])
    places[...] = 2 * i * 6 + 2 * j  # even rows and columns of the output
    case.x[1, 2, 3, 4] = np.nan  # met by even outputs through the outer taps of the middle column
    want = np.zeros(case.w.shape, bool)
    want[:, 2, [0, 2], 1] = True
    np.testing.assert_array_equal(np.isnan(case.routed(pooled, places)[0][0]), want)


@pytest.mark.parametrize("down", [0, 1])
@pytest.mark.parametrize("right", [0, 1])
def test_routed_nan_reaches_exactly_the_inputs_that_its_place_meets(dtype, down, right):
    case = Case("pad", dtype)
    pooled, places = case.maxima()
    pooled[1, 2, 1, 2] = np.nan
    places[1, 2, 1, 2] = (2 + down) * 6 + 4 + right
    dx = np.isnan(case.backward_data_routed(pooled, places, 0, 1))
    want = np.zeros(dx.shape, bool)
    want[1, :, 1 + down : 4 + down, 3 + right : 6 + right] = True
    np.testing.assert_array_equal(dx, want)


def test_costs_count_what_meets_the_input():
    point = Window(1, 1, 1, Side(1, 1, 1, 0, 1), Side(1, 1, 1, 0, 1))
    padded = Window(1, 4, 33, Side(6, 3, 1, 1, 1), Side(6, 3, 1, 1, 1))
    for cost in kernels.outputs_cost, kernels.routed_weights_cost:
        assert cost(padded) == pytest.approx(4 * 33 * 16 * 16 * cost(point))
