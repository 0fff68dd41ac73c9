"""Add up partial results in a fixed order, so that sums do not depend on who computed them."""

from __future__ import annotations

from cgdnn.kernels._jit import INT, REAL, array, kernel


@kernel(array(2), array(1), REAL, INT, INT)
def reduce_rows(partial, out, accumulate, begin, end):  # type: ignore[no-untyped-def]
    """Add the rows of `partial` in order into ``out[begin:end]``.

    ``out = accumulate * out + sum of rows``; where `accumulate` is 0, `out` is not read.
    """
    if accumulate == 0:
        for j in range(begin, end):
            out[j] = partial[0, j]
    else:
        for j in range(begin, end):
            out[j] = accumulate * out[j] + partial[0, j]
    for p in range(1, partial.shape[0]):
        for j in range(begin, end):
            out[j] += partial[p, j]
