import numpy as np
import pytest

from cgdnn.kernels import conv_unfold as kernels
from tests.reference import conv as reference

# channels, images, outputs, group, leading axes (size, kernel, stride, pad, dilation), last axis
SHAPES = {
    "point": (3, 2, 4, 1, [], (1, 1, 1, 0, 1)),
    "line": (2, 1, 3, 1, [], (37, 4, 1, 2, 1)),
    "lenet1": (1, 3, 20, 1, [(28, 5, 1, 0, 1)], (28, 5, 1, 0, 1)),
    "lenet2": (20, 5, 50, 1, [(12, 5, 1, 0, 1)], (12, 5, 1, 0, 1)),
    "one_output": (4, 2, 1, 1, [(5, 3, 1, 1, 1)], (5, 3, 1, 1, 1)),
    "wide": (3, 1, 7, 1, [(9, 3, 1, 1, 1)], (75, 3, 1, 1, 1)),
    "stride": (3, 2, 5, 1, [(15, 3, 2, 1, 1)], (17, 5, 3, 2, 1)),
    "unreached": (1, 1, 1, 1, [(8, 1, 3, 0, 1)], (8, 1, 3, 0, 1)),
    "dilation": (4, 2, 6, 1, [(12, 3, 1, 2, 2)], (11, 3, 1, 3, 3)),
    "stride_dilation": (2, 2, 3, 1, [(13, 3, 2, 2, 2)], (14, 2, 2, 3, 3)),
    "group": (6, 2, 9, 3, [(6, 3, 1, 1, 1)], (6, 3, 1, 1, 1)),
    "depthwise": (5, 2, 5, 5, [(6, 3, 1, 1, 1)], (6, 3, 1, 1, 1)),
    "pad_beyond": (2, 1, 3, 1, [(2, 3, 1, 4, 1)], (3, 3, 1, 5, 1)),
    "full_window": (3, 4, 6, 1, [(7, 7, 1, 0, 1)], (6, 6, 1, 0, 1)),
    "volume": (2, 2, 3, 1, [(4, 2, 1, 1, 1), (5, 3, 2, 1, 1)], (6, 3, 1, 1, 1)),
    "big_image": (2, 1, 3, 1, [(31, 3, 1, 1, 1)], (35, 3, 1, 1, 1)),
}


class Case:
    def __init__(self, name, dtype):
        channels, images, outputs, group, leading, last = SHAPES[name]
        rng = np.random.default_rng(len(name))
        self.rows, self.outputs = reference.row_tables(leading)
        size, kw, stride, pad, dilation = last
        ow = (size + 2 * pad - dilation * (kw - 1) - 1) // stride + 1
        self.group = group
        self.last = (stride, pad, dilation)
        height = self.outputs.shape[1]

        def random(*shape):
            return rng.standard_normal(shape).astype(dtype)

        self.x = random(images, channels, height, size)
        self.w = random(outputs, channels // group, self.rows.shape[0], kw)
        self.b = random(outputs)
        self.dy = random(images, outputs, self.rows.shape[1], ow)
        taps = self.rows.shape[0] * kw
        pixels = self.rows.shape[1] * ow
        inputs = channels // group
        self.u = np.full(kernels.forward_scratch(inputs, taps), np.nan, dtype)
        size, places = kernels.backward_weights_scratch(
            inputs, taps, kw, self.dy.shape[2:], self.x.shape[3] + 2 * pad
        )
        self.uw = (np.full(size, np.nan, dtype), np.empty(places, np.int64))
        self.du = np.full(kernels.backward_data_scratch(inputs, taps, pixels), np.nan, dtype)
        self.tolerance = 1e-4 if dtype == "float32" else 1e-11


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES)
def case(request, dtype):
    return Case(request.param, dtype)


def near(case, got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=case.tolerance * np.abs(want).max())


@pytest.mark.parametrize("bias", [True, False])
def test_forward(case, bias):
    y, want = np.full_like(case.dy, np.nan), np.empty(case.dy.shape)
    n = len(case.x)
    kernels.conv_forward_unfold(
        case.x, case.w, case.b, bias, y, case.rows, *case.last, case.u, 0, n
    )
    reference.forward(case.x, case.w, case.b if bias else None, want, case.rows, *case.last)
    near(case, y, want)


def test_backward_data(case):
    dx, want = np.full_like(case.x, np.nan), np.empty(case.x.shape)
    kernels.conv_backward_data_unfold(
        case.dy, case.w, dx, case.outputs, case.rows, *case.last, case.du, 0, len(dx)
    )
    reference.backward_data(case.dy, case.w, want, case.rows, *case.last)
    near(case, dx, want)


@pytest.mark.parametrize("accumulate", [0.0, 1.0])
def test_backward_weights(case, accumulate):
    n, outputs = len(case.x), len(case.b)
    dw = np.full((2, case.w.size), 0.5 if accumulate else np.nan, case.x.dtype)
    db = np.full((2, outputs), 0.5 if accumulate else np.nan, case.x.dtype)
    want_w, want_b = np.full(case.w.shape, accumulate / 2), np.full(outputs, accumulate / 2)
    untouched = dw[0].copy(), db[0].copy()
    kernels.conv_backward_weights_unfold(
        *(case.x, case.dy, dw, db, 1, case.group, case.w.shape[3]),
        *(case.rows, *case.last, *case.uw, 1, accumulate, accumulate, outputs, 0, 1, 0, n),
    )
    reference.backward_weights(case.x, case.dy, want_w, want_b, case.rows, *case.last)
    near(case, dw[1].reshape(want_w.shape), want_w)
    near(case, db[1], want_b)
    np.testing.assert_array_equal(dw[0], untouched[0])
    np.testing.assert_array_equal(db[0], untouched[1])


def test_a_piece_writes_its_images_only(dtype):
    case = Case("lenet2", dtype)
    y, dx = np.full_like(case.dy, 7), np.full_like(case.x, 7)
    kernels.conv_forward_unfold(case.x, case.w, case.b, 1, y, case.rows, *case.last, case.u, 1, 3)
    kernels.conv_backward_data_unfold(
        case.dy, case.w, dx, case.outputs, case.rows, *case.last, case.du, 1, 3
    )
    for whole in (y, dx):
        assert (whole[[0, 3, 4]] == 7).all()
        assert not (whole[1:3] == 7).any()


def test_weights_of_a_range_of_filters(dtype):
    case = Case("group", dtype)
    dw, db = np.full((1, case.w.size), 7, dtype), np.full((1, 9), 7, dtype)
    want_w, want_b = np.zeros(case.w.shape), np.zeros(9)
    kernels.conv_backward_weights_unfold(
        *(case.x, case.dy, dw, db, 1, case.group, case.w.shape[3]),
        *(case.rows, *case.last, *case.uw, 0, 0.0, 0.0, 2, 1, 4, 0, 2),
    )
    reference.backward_weights(case.x, case.dy, want_w, want_b, case.rows, *case.last)
    dw = dw.reshape(case.w.shape)
    near(case, dw[2:8], want_w[2:8])
    near(case, db[0, 2:8], want_b[2:8])
    assert (dw[[0, 1, 8]] == 7).all()


def test_nan_reaches_exactly_what_depends_on_it(dtype):
    case = Case("one_output", dtype)
    case.x[1, 2, 0, 0] = np.nan
    y = np.zeros_like(case.dy)
    kernels.conv_forward_unfold(case.x, case.w, case.b, 1, y, case.rows, *case.last, case.u, 0, 2)
    assert not np.isnan(y[0]).any()
    hit = np.zeros((5, 5), bool)
    hit[:2, :2] = True
    np.testing.assert_array_equal(np.isnan(y[1, 0]), hit)
