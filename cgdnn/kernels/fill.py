"""First values of parameters and dummy data: every element depends on (key, counter, index) only.

Values are drawn in float64 and stored in the array's type. A draw of ``k`` numbers for element
``i`` takes the indices ``k * i`` to ``k * i + k - 1`` of the stream. Where `x` is only a block of
a larger array, `first` is the index that its first element (or row) has there.
"""

from __future__ import annotations

import math

import numpy as np

from cgdnn.kernels._jit import INT, REAL, array, device, kernel
from cgdnn.kernels.random import random_u32

_STEP = 2.0**-32


@device
def draw(key, counter, index):  # type: ignore[no-untyped-def]
    """Return a number above 0 and below 1, in float64, of 32 random bits."""
    return (np.float64(random_u32(key, counter, index)) + 0.5) * _STEP


@kernel(array(1), REAL, REAL, INT, INT, INT, INT, INT)
def fill_uniform(x, low, high, key, counter, first, begin, end):  # type: ignore[no-untyped-def]
    """Write numbers distributed evenly between `low` and `high` to ``x[begin:end]``."""
    width = np.float64(high) - np.float64(low)
    for i in range(begin, end):
        x[i] = np.float64(low) + width * draw(key, counter, first + i)


@kernel(array(1), REAL, REAL, REAL, INT, INT, INT, INT, INT)
def fill_gaussian(  # type: ignore[no-untyped-def]
    x, mean, deviation, keep, key, counter, first, begin, end
):
    """Write normally distributed numbers to ``x[begin:end]``, with chance 1 - `keep` a zero.

    After Box and Muller, "A note on the generation of random normal deviates" (1958).
    """
    for i in range(begin, end):
        index = 3 * (first + i)
        if keep < 1 and draw(key, counter, index + 2) >= keep:
            x[i] = 0
        else:
            radius = math.sqrt(-2.0 * math.log(draw(key, counter, index)))
            turn = math.cos(2.0 * math.pi * draw(key, counter, index + 1))
            x[i] = np.float64(mean) + np.float64(deviation) * radius * turn


@kernel(array(2), INT, INT, INT, INT, INT)
def fill_unitball(x, key, counter, first, begin, end):  # type: ignore[no-untyped-def]
    """Write positive numbers to the rows ``begin:end`` of `x`, each row with the sum 1."""
    for n in range(begin, end):
        index = (first + n) * x.shape[1]
        total = 0.0
        for i in range(x.shape[1]):
            total += draw(key, counter, index + i)
        for i in range(x.shape[1]):
            x[n, i] = draw(key, counter, index + i) / total


@kernel(array(3), INT, INT)
def fill_bilinear(x, begin, end):  # type: ignore[no-untyped-def]
    """Write the weights of bilinear interpolation to the planes ``begin:end`` of `x`, (n, k, k)."""
    size = x.shape[2]
    factor = math.ceil(size / 2.0)
    centre = (size - 1) / (2.0 * factor)
    for n in range(begin, end):
        for row in range(x.shape[1]):
            for column in range(size):
                x[n, row, column] = (1 - abs(row / factor - centre)) * (
                    1 - abs(column / factor - centre)
                )
