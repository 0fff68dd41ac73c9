"""Backward passes over the non-zeros: as the dense kernels have them, bit by bit."""

from itertools import pairwise

import numpy as np
import pytest

from cgdnn.kernels import inner_product_sparse as kernels
from cgdnn.kernels.inner_product import product_nn, product_tn
from cgdnn.kernels.reorder import PLACE
from cgdnn.kernels.update import sgd_update
from tests.reference.gemm import multiply

ROWS = kernels.ROWS


class Case:
    def __init__(self, dtype, images, outputs, inputs, zeros):
        rng = np.random.default_rng(5)
        self.w = rng.standard_normal((outputs, inputs)).astype(dtype)
        self.dy = rng.standard_normal((images, outputs)).astype(dtype)
        self.dy[rng.random(self.dy.shape) < zeros] = 0

    def _new(self, *shape):
        return np.full(shape, np.nan, self.w.dtype)

    def run(self, unit=None, cuts=None):
        """Return dx, piece by piece: those of the units between two cuts."""
        images, inputs = len(self.dy), self.w.shape[1]
        blocks = -(-self.w.shape[0] // ROWS)
        values = self._new(blocks, kernels.room(images))
        places = np.full(values.shape, 1 << 20, np.int32)
        starts = np.full((blocks, images + 1), -1, np.int64)
        positions = np.zeros(ROWS, np.int32)
        for b in range(blocks):
            kernels.list_outputs(
                self.dy, values, places, starts, positions, b, b + 1
            )  # fmt: skip
        dx, columns = self._new(images, inputs), kernels.most_columns()
        block, sums = self._new(ROWS * columns), self._new(images * columns)
        unit = unit or inputs
        for begin, end in pairwise(cuts or [0, inputs // unit]):
            kernels.product_listed(
                self.w, values, places, starts, dx, unit, block, sums, begin, end
            )
        return dx

    def dense(self):
        dx = self._new(1, len(self.dy), self.w.shape[1])
        product_nn(self.dy, self.w, self.w[0], 0, dx, 0, 1, 0, len(self.dy))
        return dx[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("zeros", [0, 0.5, 1])
@pytest.mark.parametrize(
    ("images", "outputs", "inputs"),
    [(1, 1, 1), (3, ROWS + 6, 37), (5, ROWS, 300), (70, 2 * ROWS + 1, 129), (2, 3, 1024)],
)
def test_has_the_bits_of_the_dense_product(dtype, zeros, images, outputs, inputs):
    case = Case(dtype, images, outputs, inputs, zeros)
    np.testing.assert_array_equal(case.run(), case.dense())


def test_pieces_set_their_own_columns():
    case = Case("float32", 3, 100, 210, 0.5)
    whole = case.run()
    np.testing.assert_array_equal(case.run(unit=7, cuts=[0, 1, 5, 29, 30]), whole)
    part = case.run(unit=7, cuts=[2, 20])
    np.testing.assert_array_equal(part[:, 14:140], whole[:, 14:140])
    assert np.isnan(part[:, :14]).all()
    assert np.isnan(part[:, 140:]).all()


def test_only_exact_zeros_are_skipped():
    case = Case("float32", 3, ROWS + 2, 20, 0.5)
    case.dy[:, 1] = 0
    case.w[1] = np.inf
    assert np.isfinite(case.run()).all()
    case.dy[1, ROWS] = np.nan
    dx = case.run()
    assert np.isnan(dx[1]).all()
    assert np.isfinite(dx[[0, 2]]).all()


SHAPES = pytest.mark.parametrize(
    ("samples", "outputs", "columns"),
    [
        (1, 1, 1),
        (3, 5, PLACE + 1),
        (7, 70, 8 * PLACE),
        (2 * PLACE + 1, 130, 17 * PLACE - 1),
    ],
)


@pytest.fixture(params=["float32", "float64"])
def made(request):
    """Return dy, of which a share is zero, and x, as in dy^T x."""
    generator = np.random.default_rng(5)

    def make(samples, outputs, columns, zeros):
        dy = generator.standard_normal((samples, outputs))
        dy[generator.random(dy.shape) < zeros] = 0
        x = generator.standard_normal((samples, columns))
        return dy.astype(request.param), x.astype(request.param)

    return make


def scratch(dy):
    """Return what a worker has, with nothing in it that a kernel may use."""
    for shape, dtype in kernels.weights_scratch(len(dy), PLACE):
        if dtype == "real":
            yield np.full(shape, np.nan, dy.dtype)
        else:
            yield np.full(shape, -1, dtype)


def gradient(dy, x, dw, accumulate=0.0, unit=1, part=slice(None)):
    begin, end, _ = part.indices(dw.shape[0] // unit)
    own = scratch(dy)
    kernels.gradient_over_nonzeros(dy, x, *own, dw, accumulate, unit, begin, end)
    return dw


@SHAPES
@pytest.mark.parametrize("zeros", [0, 0.5, 1])
def test_gradient(made, samples, outputs, columns, zeros):
    dy, x = made(samples, outputs, columns, zeros)
    got = gradient(dy, x, np.full((outputs, columns), np.nan, x.dtype))
    want = np.array(multiply(dy.T, x))
    scale = {"float32": 1e-6, "float64": 1e-14}[str(x.dtype)] * samples
    np.testing.assert_allclose(got, want, rtol=0, atol=scale * np.abs(x).max())
    dense = np.zeros_like(got)
    product_tn(dy, x, dense, 0.0, 0, outputs)
    np.testing.assert_array_equal(got, dense)
    product_tn(dy, x, dense, 1.0, 0, outputs)
    np.testing.assert_array_equal(gradient(dy, x, got, 1.0), dense)


def test_a_range_of_units_of_rows(made):
    dy, x = made(5, 12, 20, 0.5)
    whole = gradient(dy, x, np.zeros((12, 20), x.dtype))
    got = gradient(dy, x, np.full((12, 20), 7, x.dtype), unit=3, part=slice(1, 3))
    np.testing.assert_array_equal(got[3:9], whole[3:9])
    assert (got[[0, 1, 2, 9, 10, 11]] == 7).all()


@SHAPES
@pytest.mark.parametrize("zeros", [0, 0.5, 1])
def test_an_update_has_the_bits_of_a_gradient_and_an_update(made, samples, outputs, columns, zeros):
    dy, x = made(samples, outputs, columns, zeros)
    w, history = made(outputs, columns, columns, 0)
    history = np.resize(history, w.shape).astype(w.dtype)
    numbers = (0.1, 0.9, 0.01, 0.02)
    factor, bad = np.array([0.5], x.dtype), np.full((2, 1), 9, x.dtype)
    want = w.copy(), history.copy()
    dw = gradient(dy, x, np.zeros_like(w))
    sgd_update(*(a.ravel() for a in (want[0], dw, want[1])), factor, bad, *numbers, 0, 0, w.size)
    kernels.sgd_over_nonzeros(
        dy, x, *scratch(dy), w, history, factor, bad, *numbers, 1, 1, 0, outputs
    )
    np.testing.assert_array_equal(w, want[0])
    np.testing.assert_array_equal(history, want[1])
    np.testing.assert_array_equal(bad, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_reported_where_it_counts(made, value):
    dy, x = made(3, 4, 20, 0)
    factor, bad = np.ones(1, x.dtype), np.full((2, 1), 9, x.dtype)

    def move(piece, dy, x):
        w, history = np.zeros((2, 4, 20), x.dtype)
        numbers = (0.1, 0.9, 0.0, 0.0)
        kernels.sgd_over_nonzeros(
            dy, x, *scratch(dy), w, history, factor, bad, *numbers, 1, piece, 0, 4
        )
        return w

    x[1, 17] = value
    assert not np.isfinite(move(0, dy, x)[:, 17]).any()
    assert bad[0, 0] == 1
    dy[1] = 0  # what meets only zeros is not looked at
    assert np.isfinite(move(1, dy, x)).all()
    assert bad[1, 0] == 0
    dy[2, 3] = value
    assert not np.isfinite(move(0, dy, x)[3]).any()
    assert bad[0, 0] == 1
