"""Add up partial results in a fixed order."""

from __future__ import annotations

from cgdnn.kernels._jit import INT, REAL, array, kernel


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
    if accumulate == 0:
        for j in range(begin, end):
            out[j] = partial[0, j]
    else:
        for j in range(begin, end):
            out[j] = accumulate * out[j] + partial[0, j]
    for i in range(1, partial.shape[0]):
        for j in range(begin, end):
            out[j] += partial[i, j]
