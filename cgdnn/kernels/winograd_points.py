"""Matrices of Winograd's minimal filtering F(m, r), by the Cook-Toom construction.

m outputs of a correlation with r taps come from n = m + r - 1 products::

    y = A^T [(G g) * (B^T d)]        d: n inputs, g: r taps, y: m outputs

and, one matrix on each side of a tile, m x m outputs from n x n products. The construction
evaluates polynomials at n - 1 points and at infinity. Which points decides the rounding error: the
ones here had the smallest of all sets {+-p, +-q, ...}, with 0 where their number is to be odd, with
p, q, ... up to 3 that were tried (rms error of a float32 tile over the largest output, 32 channels:
F(4, 3): 1.6e-7 against 3.3e-7 for the usual 0, +-1, +-2; F(4, 5): 5.8e-7; F(5, 3): 2.5e-7 against
4.1e-7 for 0, +-1, +-2, 1/2; F(7, 3): 1.3e-6 against 1.8e-6 for +-1/4, +-5/8, +-1, +-2; F(5, 4):
5.2e-7).

See Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016; Barabasz et al.,
"Error analysis and improving the accuracy of Winograd convolution", TOMS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import prod

Matrix = list[list[Fraction]]

_POSITIVE_POINTS = {
    (4, 3): ("3/4", "3/2"),
    (4, 5): ("1", "2", "1/2"),
    (5, 3): ("5/16", "7/8", "7/4"),
    (7, 3): ("1/4", "11/16", "9/8", "17/8"),
    (5, 4): ("1/2", "1", "2"),
}
_LARGEST_INPUT_FACTOR = 8


@dataclass(frozen=True)
class Matrices:
    """The three matrices of F(m, r), exact.

    Attributes
    ----------
    output : Matrix (m, n)
        A^T.
    filter : Matrix (n, r)
        G.
    input : Matrix (n, n)
        B^T.
    """

    output: Matrix
    filter: Matrix
    input: Matrix


VARIANTS = tuple(_POSITIVE_POINTS)
"""Pairs of outputs and taps on an axis that have a set of points."""
OUTPUTS = 4
"""Outputs of the tiles that all kernel sizes have."""
TAPS = tuple(taps for outputs, taps in VARIANTS if outputs == OUTPUTS)
"""Kernel sizes that have a set of points for `OUTPUTS`. These are the first variants."""


def transposed(matrix: Matrix) -> Matrix:
    """Return the transpose."""
    return [list(column) for column in zip(*matrix, strict=True)]


def matrices(outputs: int, taps: int) -> Matrices:
    """Return the matrices of F(outputs, taps)."""
    points = [Fraction(0)] * (outputs + taps & 1)
    for text in _POSITIVE_POINTS[outputs, taps]:
        points += [Fraction(text), -Fraction(text)]
    last = outputs - 1
    output = [[p**i for p in points] + [Fraction(i == last)] for i in range(outputs)]
    others = [[q for q in points if q != p] for p in points]
    weights = [
        [p**j / prod(p - q for q in rest) for j in range(taps)]
        for p, rest in zip(points, others, strict=True)
    ]
    weights.append([Fraction(j == taps - 1) for j in range(taps)])
    inputs = [[*_polynomial(rest), Fraction(0)] for rest in others]
    inputs.append(_polynomial(points))
    for row, factors in zip(inputs, weights, strict=True):
        _balance(row, factors)
    return Matrices(output, weights, inputs)


def _polynomial(roots: list[Fraction]) -> list[Fraction]:
    """Return the coefficients of the monic polynomial with these roots, lowest power first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        scaled = [-root * c for c in coefficients] + [Fraction(0)]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return coefficients


def _balance(inputs: list[Fraction], weights: list[Fraction]) -> None:
    """Move a power of two from a row of B^T to the row of G, so that no input factor is large."""
    scale = 1
    while max(abs(value) for value in inputs) > scale * _LARGEST_INPUT_FACTOR:
        scale *= 2
    inputs[:] = [value / scale for value in inputs]
    weights[:] = [value * scale for value in weights]
