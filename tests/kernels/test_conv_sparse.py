import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cgdnn.kernels import conv_sparse as kernels
from cgdnn.kernels.reorder import PLACE
from tests.reference import conv as reference

# images, channels, filters, size, kernel, stride, pad, groups where there are some
SHAPES = {
    "blocks": (3, 32, 7, (9, 10), (5, 5), (1, 1), (2, 2)),
    "spread": (2, 3, 5, (12, 7), (5, 5), (1, 1), (0, 1)),
    "spread_wide": (4, 3, 32, (7, 22), (3, 5), (2, 1), (1, 2)),
    "runs": (2, 3, 5, (12, 9), (5, 7), (1, 1), (0, 1)),
    "ragged": (2, 17, 35, (6, 21), (3, 3), (1, 1), (1, 1)),
    "even": (1, 16, 70, (7, 7), (3, 3), (1, 1), (1, 1)),
    "stride": (2, 5, 6, (11, 12), (3, 2), (2, 3), (1, 0)),
    "kernel_below_stride": (2, 16, 3, (10, 11), (2, 2), (4, 3), (0, 0)),
    "unreached": (1, 16, 3, (8, 8), (2, 2), (3, 3), (0, 0)),
    "pad_beyond": (1, 16, 4, (2, 3), (2, 2), (1, 1), (4, 5)),
    "lanes": (2, 16, 32, (9, 10), (3, 3), (1, 1), (1, 1)),
    "point": (2, 18, 5, (6, 5), (1, 1), (1, 1), (0, 0)),
    "groups": (2, 36, 70, (6, 8), (3, 3), (1, 1), (1, 1), 2),
    "groups_spread": (4, 6, 64, (9, 20), (3, 5), (1, 1), (1, 2), 2),
    "groups_strided": (2, 64, 64, (9, 10), (3, 3), (2, 2), (1, 1), 2),
    "depthwise": (1, 3, 6, (5, 6), (3, 3), (1, 1), (1, 1), 3),
    "one": (1, 1, 1, (1, 1), (1, 1), (1, 1), (0, 0)),
}
DTYPES = ("float32", "float64")
by_lists = pytest.mark.parametrize("by_filter", [False, True])


class Case:
    def __init__(self, name, dtype, zeros=0.75):
        images, channels, filters, size, kernel, stride, pad, *groups = SHAPES[name]
        self.groups = groups[0] if groups else 1
        output = tuple(
            (n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, kernel, stride, pad, strict=True)
        )
        self.window = kernels.Window(
            images,
            channels // self.groups,
            filters // self.groups,
            size,
            output,
            kernel,
            stride,
            pad,
            groups=self.groups,
        )
        rng = np.random.default_rng(len(name))

        def random(*shape):
            return rng.standard_normal(shape).astype(dtype)

        self.x = random(images, channels, *size)
        self.w = random(filters, channels // self.groups, *kernel)
        self.dy = random(images, filters, *output)
        self.dy[rng.random(self.dy.shape) < zeros] = 0
        self.tolerance = 1e-5 if dtype == "float32" else 1e-13

    def _scratch(self, sizes):
        dtype = self.x.dtype
        made = [np.zeros(size, dtype if kind == "real" else kind) for size, kind in sizes]
        for array in made:
            array.fill(np.nan if array.dtype.kind == "f" else 1 << 20)
        return made

    def _by_groups(self, array):
        """Return an array of images as one of groups of images."""
        if array is NOWHERE:
            return array
        images, channels, *rest = array.shape
        return array.reshape(images * self.groups, channels // self.groups, *rest)

    def backward_weights(
        self, cuts=None, accumulate=0.0, has_bias=True, unit=None, gradients=None, routed=""
    ):
        """Return dw, db by pieces: those of the images between two cuts."""
        dy, route = gradients or (self.dy, NOWHERE)
        window, (filters, _, rows, columns) = self.window, self.w.shape
        band, images = window.weights_band()
        cuts = cuts or [0, window.images // images]
        partial = np.full((len(cuts) - 1, filters * window.weights_row), np.nan, self.x.dtype)
        db = np.full((len(cuts) - 1, filters), np.nan, self.x.dtype)
        kernel = kernels.conv_backward_weights_sparse(window.form, columns, window.pixel, routed)
        for piece, (begin, end) in enumerate(pairwise(cuts)):
            for o in range(filters // (unit or filters)):
                kernel(
                    *map(self._by_groups, (self.x, dy, route)),
                    *(partial, db, int(has_bias), window.output[1]),
                    *(rows, *window.stride, *window.pad, window.groups, band, images),
                    *(*window.reach, window.room),
                    *self._scratch(window.weights_scratch(min(unit or filters, window.filters))),
                    *(piece, unit or filters, o, o + 1, begin, end),
                )
        dw = np.full_like(self.w, 0.5 if accumulate else np.nan)
        total = np.full(window.total_scratch, np.nan, self.x.dtype)
        kernels.conv_sparse_sum_weights(partial, dw, window.pixel, total, accumulate, 0, filters)
        return dw, db

    def routed(self, pooling, zeros, in_lanes=False, has_bias=True):
        """Return dw, db from pooled gradients, and let dy be what they add up to."""
        down, across = pooling.size
        rng = np.random.default_rng(3)
        images, filters, height, width = self.dy.shape
        pooled = rng.standard_normal((images, filters, down, across)).astype(self.x.dtype)
        pooled[rng.random(pooled.shape) < zeros] = 0
        top = np.arange(down)[:, None] * pooling.stride - pooling.pad
        bottom = np.minimum(top + pooling.kernel, height)
        row = rng.integers(np.maximum(top, 0), bottom, pooled.shape)
        route = row * width + rng.integers(0, width, pooled.shape)  # some of them the same
        self.dy[...] = 0
        for n, o, i, j in np.ndindex(*pooled.shape):
            self.dy[n, o].flat[route[n, o, i, j]] += pooled[n, o, i, j]
        self.window = replace(self.window, pooled=pooling)
        gradients = pooled, route.astype(np.int32)
        if in_lanes:
            blocks = (images, filters // PLACE, PLACE, down, across)
            gradients = tuple(
                np.ascontiguousarray(np.moveaxis(each.reshape(blocks), 2, -1)) for each in gradients
            )
        return self.backward_weights(
            has_bias=has_bias, gradients=gradients, routed="lanes" if in_lanes else "planes"
        )

    def backward_data(self, by_filter, begin=0, end=None):
        window, (filters, _, rows, columns) = self.window, self.w.shape
        packed = np.full((filters, window.data_row), np.nan, self.x.dtype)
        kernels.conv_sparse_pack_weights(self.w, packed, 0, filters)
        dx = np.full_like(self.x, np.nan)
        kernels.conv_backward_data_sparse(columns, by_filter)(
            *(self._by_groups(self.dy), packed, self._by_groups(dx)),
            *(rows, *window.stride, *window.pad, window.groups),
            *(window.data_band(), window.data_room),
            *self._scratch(window.data_scratch()),
            *(begin * window.groups, (len(dx) if end is None else end) * window.groups),
        )
        return dx

    @property
    def _geometry(self):
        size, kernel = self.window.size, self.window.kernel
        (down, across), (top, left) = self.window.stride, self.window.pad
        table, _ = reference.row_tables([(size[0], kernel[0], down, top, 1)])
        return table, across, left, 1

    def expected_weights(self):
        dw, db = np.zeros(self.w.shape), np.zeros(len(self.w))
        x, dy = self.x.astype(np.float64), self.dy.astype(np.float64)
        reference.backward_weights(x, dy, dw, db, *self._geometry)
        return dw, db

    def expected_data(self):
        dx = np.zeros(self.x.shape)
        dy, w = self.dy.astype(np.float64), self.w.astype(np.float64)
        reference.backward_data(dy, w, dx, *self._geometry)
        return dx


NOWHERE = np.zeros((1, 1, 1, 1), np.int32)


def near(case, got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=case.tolerance * max(1, np.abs(want).max()))


@pytest.fixture
def small_caches(monkeypatch):
    """Let every image be cut into bands."""
    monkeypatch.setattr(kernels, "_NEAR_BYTES", 1 << 9)
    monkeypatch.setattr(kernels, "_SPREAD_BYTES", 1 << 9)
    monkeypatch.setattr(kernels, "_BAND_BYTES", 1 << 9)


@pytest.mark.parametrize("zeros", [0, 0.5, 0.9, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_agrees(name, dtype, zeros):
    case = Case(name, dtype, zeros)
    for by_filter in (False, True):
        near(case, case.backward_data(by_filter), case.expected_data())
    dw, db = case.backward_weights()
    want_w, want_b = case.expected_weights()
    near(case, dw, want_w)
    near(case, db[0], want_b)


@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize(
    "name", ["blocks", "spread", "runs", "ragged", "stride", "kernel_below_stride", "groups"]
)
def test_bands_agree(name):
    case = Case(name, "float32")
    assert max(case.window.weights_band()[0], case.window.data_band()) < case.window.output[0]
    for by_filter in (False, True):
        near(case, case.backward_data(by_filter), case.expected_data())
    near(case, case.backward_weights()[0], case.expected_weights()[0])


@by_lists
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_gradient_gives_exactly_none(dtype, by_filter):
    case = Case("blocks", dtype)
    case.dy[...] = np.where(case.dy > 0, 0.0, -0.0)
    case.x[...], case.w[...] = np.inf, np.nan  # which nothing multiplies
    dw, db = case.backward_weights()
    assert not dw.any()
    assert not db.any()
    assert not case.backward_data(by_filter).any()


@by_lists
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite_reaches_exactly_what_depends_on_it(dtype, value, by_filter):
    case = Case("blocks", dtype)
    case.dy[1, 3, 0, 4] = value
    finite = np.isfinite(case.backward_data(by_filter))
    hit = np.zeros(finite.shape, bool)
    hit[1, :, :3, 2:7] = True
    np.testing.assert_array_equal(~finite, hit)
    dw, db = case.backward_weights()
    hit = np.zeros(dw.shape, bool)
    hit[3, :, 2:] = True  # above, the window is in the padding: 0 * inf does not count
    np.testing.assert_array_equal(~np.isfinite(dw)[:, :, 2:], hit[:, :, 2:])
    np.testing.assert_array_equal(~np.isfinite(db[0]), np.arange(7) == 3)


@by_lists
def test_smallest_numbers_are_not_zero(by_filter):
    case = Case("one", "float32")
    case.x[...], case.w[...] = 2.0**100, 2.0**100
    case.dy[...] = np.float32(2.0**-149)
    assert case.backward_weights()[0] == np.float32(2.0**-49)
    assert case.backward_data(by_filter) == np.float32(2.0**-49)


@by_lists
def test_a_piece_writes_its_images_only(by_filter):
    case = Case("blocks", "float32")
    dx = case.backward_data(by_filter, 1, 2)
    assert np.isnan(dx[[0, 2]]).all()
    near(case, dx[1], case.expected_data()[1])


@pytest.mark.usefixtures("small_caches")
def test_pieces_add_up_in_order():
    case = Case("blocks", "float32")
    dw, db = case.backward_weights([0, 1, 3], accumulate=1.0)
    want_w, want_b = case.expected_weights()
    near(case, dw, want_w + 0.5)
    near(case, db.sum(0), want_b)


@pytest.mark.parametrize(("name", "unit"), [("ragged", 7), ("groups", 5), ("groups", 14)])
def test_filters_in_pieces(name, unit):
    case = Case(name, "float32")
    whole, parts = case.backward_weights(), case.backward_weights(unit=unit)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("name", "band"), [("blocks", (9, 3)), ("groups", (6, 2))])
def test_images_that_fit_are_taken_together(name, band, monkeypatch):
    case = Case(name, "float32")
    monkeypatch.setattr(kernels, "_NEAR_BYTES", 1 << 20)
    assert case.window.weights_band() == band
    near(case, case.backward_weights()[0], case.expected_weights()[0])


@pytest.mark.parametrize("zeros", [0.1, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "pooling", "in_lanes"),
    [
        ("spread", kernels.Pooled((4, 3), 3, 2, 1), False),
        ("spread", kernels.Pooled((8, 6), 1, 1, 0), False),
        ("stride", kernels.Pooled((2, 7), 4, 3, 0), False),
        ("even", kernels.Pooled((4, 4), 2, 2, 0), False),
        ("spread_wide", kernels.Pooled((2, 11), 3, 2, 0), True),
        ("lanes", kernels.Pooled((5, 5), 3, 2, 1), True),
        ("groups_strided", kernels.Pooled((3, 3), 2, 2, 0), True),
        ("groups_spread", kernels.Pooled((4, 10), 2, 2, 0), False),
        ("lanes", kernels.Pooled((3, 20), 3, 3, 0), False),
    ],
)
def test_routed_gradients_agree(name, pooling, in_lanes, dtype, zeros):
    case = Case(name, dtype, zeros)
    dw, db = case.routed(pooling, zeros, in_lanes)
    want_w, want_b = case.expected_weights()
    near(case, dw, want_w)
    near(case, db[0], want_b)


@pytest.mark.parametrize("in_lanes", [False, True])
@pytest.mark.parametrize("name", ["spread_wide", "lanes"])
def test_routed_gradients_in_bands_agree(name, in_lanes, monkeypatch):
    monkeypatch.setattr(kernels, "_NEAR_BYTES", 1 << 9)
    monkeypatch.setattr(kernels, "_SPREAD_BYTES", 1 << 9)
    case = Case(name, "float32")
    dw, db = case.routed(kernels.Pooled((4, 7), 2, 1, 1), 0.5, in_lanes)
    assert case.window.weights_band()[0] < 4
    want_w, want_b = case.expected_weights()
    near(case, dw, want_w)
    near(case, db[0], want_b)


def test_without_bias_its_gradient_is_left_alone():
    _, db = Case("even", "float32").backward_weights(has_bias=False)
    assert np.isnan(db).all()
    for in_lanes in (False, True):
        pooling = kernels.Pooled((5, 5), 3, 2, 1)
        _, db = Case("lanes", "float32").routed(pooling, 0.5, in_lanes, has_bias=False)
        assert np.isnan(db).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine",
    [
        {"CGDNN_VECTOR_WIDTH": "8"},
        {"CGDNN_VECTOR_WIDTH": "4"},
        {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
    ],
)
def test_agrees_on_other_machines(machine):
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__, "-k", "float32 or bands"],
        env={**os.environ, **machine},
        check=True,
    )
