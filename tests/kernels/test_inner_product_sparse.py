from itertools import pairwise

import numpy as np
import pytest

from cgdnn.kernels import inner_product, inner_product_sparse

ROWS = inner_product_sparse.ROWS


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
        values = self._new(blocks, inner_product_sparse.room(images))
        places = np.full(values.shape, 1 << 20, np.int32)
        starts = np.full((blocks, images + 1), -1, np.int64)
        positions = np.zeros(ROWS, np.int32)
        for b in range(blocks):
            inner_product_sparse.list_outputs(
                self.dy, values, places, starts, positions, b, b + 1
            )  # fmt: skip
        dx, columns = self._new(images, inputs), inner_product_sparse.most_columns()
        block, sums = self._new(ROWS * columns), self._new(images * columns)
        unit = unit or inputs
        for begin, end in pairwise(cuts or [0, inputs // unit]):
            inner_product_sparse.product_listed(
                self.w, values, places, starts, dx, unit, block, sums, begin, end
            )
        return dx

    def dense(self):
        dx = self._new(1, len(self.dy), self.w.shape[1])
        inner_product.product_nn(self.dy, self.w, self.w[0], 0, dx, 0, 1, 0, len(self.dy))
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
