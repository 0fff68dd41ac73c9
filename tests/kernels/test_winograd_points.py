from fractions import Fraction

import pytest

from cgdnn.kernels.winograd_points import VARIANTS, matrices, transposed


def times(matrix, column):
    return [sum(a * b for a, b in zip(row, column, strict=True)) for row in matrix]


def test_matrices_of_three_taps():
    m = matrices(4, 3)
    assert m.output[1] == [0, Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2), 0]
    assert m.output[3][-1] == 1
    assert m.filter[-1] == [0, 0, 1]
    assert m.filter[0] == [Fraction(64, 81), 0, 0]
    assert m.input[0] == [Fraction(81, 64), 0, Fraction(-45, 16), 0, 1, 0]


@pytest.mark.parametrize(("outputs", "taps"), VARIANTS)
def test_outputs_are_a_correlation(outputs, taps):
    m = matrices(outputs, taps)
    inputs = [Fraction(3 * i * i - 7, 4) for i in range(outputs + taps - 1)]
    weights = [Fraction(5 - 2 * i, 3) for i in range(taps)]
    products = [
        a * b for a, b in zip(times(m.filter, weights), times(m.input, inputs), strict=True)
    ]
    want = [sum(w * inputs[i + j] for j, w in enumerate(weights)) for i in range(outputs)]
    assert times(m.output, products) == want


def test_the_transpose_swaps_rows_and_columns():
    assert transposed([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]
