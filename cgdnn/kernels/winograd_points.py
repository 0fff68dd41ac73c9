"""Matrices of Winograd's minimal filtering F(m, r), by the Cook-Toom construction.

m outputs of a correlation with r taps come from n products, at least m + r - 1::

    y = A^T [(G g) * (B^T d)]        d: m + r - 1 inputs, g: r taps, y: m outputs

and, one matrix on each side of a tile, m x m outputs from n x n products. The construction
evaluates polynomials at m + r - 2 points and at infinity. Which points decides the rounding error:
the ones here had the smallest of all sets {+-p, +-q, ...}, with 0 where their number is to be odd,
with p, q, ... up to 3 that were tried (rms error of a float32 tile over the largest output, 32
channels: F(4, 3): 1.6e-7 against 3.3e-7 for the usual 0, +-1, +-2; F(4, 5): 5.8e-7; F(5, 3):
2.5e-7 against 4.1e-7 for 0, +-1, +-2, 1/2; F(7, 3): 1.3e-6 against 1.8e-6 for +-1/4, +-5/8, +-1,
+-2; F(5, 4): 5.2e-7).

Far from 0 and 1 a real point costs digits, and from 11 of them on too many (F(8, 5): 1.8e-5). There
the pair +-i takes the place of two: what it evaluates is a polynomial modulo x^2 + 1, whose two
coefficients are multiplied by three products, so that n is one more (F(7, 5): 4.1e-7; F(8, 5):
1.0e-6).

See Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016; Barabasz et al.,
"Error analysis and improving the accuracy of Winograd convolution", TOMS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from operator import mul

Matrix = list[list[Fraction]]
_Row = tuple[list[Fraction], list[Fraction], Fraction]
"""What x^0, x^1, ... are at a point; a polynomial that vanishes at all others; what it is here."""

_POSITIVE_POINTS = {
    (4, 3): ("3/4", "3/2"),
    (4, 5): ("1", "2", "1/2"),
    (8, 5): ("4/9", "5/6", "6/5", "9/4", "i"),
    (7, 3): ("1/4", "11/16", "9/8", "17/8"),
    (5, 3): ("5/16", "7/8", "7/4"),
    (5, 4): ("1/2", "1", "2"),
    (7, 5): ("1/4", "11/16", "9/8", "2", "i"),
}
_UNIT = "i"
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
    input : Matrix (n, m + r - 1)
        B^T.
    """

    output: Matrix
    filter: Matrix
    input: Matrix


VARIANTS = tuple(_POSITIVE_POINTS)
"""Pairs of outputs and taps on an axis that have a set of points, those in most kernels first."""
SIZES = tuple(m + r - 1 + (_UNIT in points) for (m, r), points in _POSITIVE_POINTS.items())
"""Products on an axis, of each of them."""
OUTPUTS = 4
"""Outputs of the tiles that all kernel sizes have."""
TAPS = tuple(taps for outputs, taps in VARIANTS if outputs == OUTPUTS)
"""Kernel sizes that have a set of points for `OUTPUTS`. These are the first variants."""


def transposed(matrix: Matrix) -> Matrix:
    """Return the transpose."""
    return [list(column) for column in zip(*matrix, strict=True)]


def matrices(outputs: int, taps: int) -> Matrices:
    """Return the matrices of F(outputs, taps)."""
    texts = _POSITIVE_POINTS[outputs, taps]
    points = [Fraction(0)] * (outputs + taps & 1)
    for text in texts:
        points += [Fraction(text), -Fraction(text)] if text != _UNIT else []
    modulus = (1, 0, 1) if _UNIT in texts else (1,)
    rows: list[_Row] = []
    for p in points:
        powers = [p**i for i in range(outputs + taps)]
        rest = _polynomial([q for q in points if q != p], modulus)
        rows.append((powers, rest, sum(map(mul, rest, powers))))
    if _UNIT in texts:
        rows += _rows_of_unit(points, outputs + taps)
    output = [[powers[i] for powers, _, _ in rows] for i in range(outputs)]
    weights = [[power / scale for power in powers[:taps]] for powers, _, scale in rows]
    inputs = [[*polynomial, Fraction(0)] for _, polynomial, _ in rows]
    for i, line in enumerate(output):
        line.append(Fraction(i == outputs - 1))
    weights.append([Fraction(j == taps - 1) for j in range(taps)])
    inputs.append(_polynomial(points, modulus))
    for line, factors in zip(inputs, weights, strict=True):
        _balance(line, factors)
    return Matrices(output, weights, inputs)


def _rows_of_unit(points: list[Fraction], count: int) -> list[_Row]:
    """Return the rows of +-i: of a + b x, which is left modulo x^2 + 1, those of a, b and a + b.

    (a + b x)(c + d x) is (ac - bd) + ((a + b)(c + d) - ac - bd) x.
    """
    rest = _polynomial(points)
    odd = len(points) & 1
    scale = sum(((-1) ** (k // 2) * value for k, value in enumerate(rest)), Fraction(0))
    # The multiples of `rest` that are 1 and x modulo x^2 + 1, times `scale`.
    whole, shifted = [*rest, Fraction(0)], [Fraction(0), *rest]
    one, x = ([-value for value in shifted], whole) if odd else (whole, shifted)
    first = [Fraction((1, 0, -1, 0)[i % 4]) for i in range(count)]
    second = [Fraction((0, 1, 0, -1)[i % 4]) for i in range(count)]
    return [
        (first, [a - b for a, b in zip(one, x, strict=True)], scale),
        (second, [-a - b for a, b in zip(one, x, strict=True)], scale),
        ([a + b for a, b in zip(first, second, strict=True)], x, scale),
    ]


def _polynomial(roots: list[Fraction], factor: tuple[int, ...] = (1,)) -> list[Fraction]:
    """Return the coefficients of the monic polynomial with these roots, times a factor.

    The lowest power comes first.
    """
    coefficients = [Fraction(value) for value in factor]
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
