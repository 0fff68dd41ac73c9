"""Add up partial results in a fixed order."""

from __future__ import annotations

from cgdnn.kernels._jit import INT, REAL, array, kernel

_BLOCK = 2048
"""Results that stay in the nearest cache while the rows pass by."""


@kernel(array(2), array(1), REAL, INT, INT)
def reduce_rows(partial, out, accumulate, begin, end):  # type: ignore[no-untyped-def]
    """Set out[j] = accumulate * out[j] + sum over rows of partial[., j], rows in order.

    Parameters
    ----------
    partial : array (rows, size)
    out : array (size,)
        Not read where `accumulate` is 0.
    accumulate : real
    begin, end : int
        Range of j.
    """
    for start in range(begin, end, _BLOCK):
        stop = min(start + _BLOCK, end)
        # Views from 0 on: LLVM makes vectors of what cannot be a negative index.
        total, first = out[start:stop], partial[0, start:stop]
        if accumulate == 0:
            for j in range(len(total)):
                total[j] = first[j]
        else:
            for j in range(len(total)):
                total[j] = accumulate * total[j] + first[j]
        for i in range(1, partial.shape[0]):
            row = partial[i, start:stop]
            for j in range(len(total)):
                total[j] += row[j]
