"""Softmax over one axis: arrays are viewed as (n, r, c, i) and the sums run over c."""

from __future__ import annotations

import numpy as np

from cgdnn.kernels._jit import INT, array, device, kernel


@device
def softmax_column(x, y, n, r, i):  # type: ignore[no-untyped-def]
    """Write softmax of ``x[n, r, :, i]`` to ``y[n, r, :, i]``; any NaN makes all of it NaN."""
    top = x[n, r, 0, i]
    for c in range(1, x.shape[2]):
        if x[n, r, c, i] > top:
            top = x[n, r, c, i]
    total = x.dtype.type(0)
    for c in range(x.shape[2]):
        value = np.exp(x[n, r, c, i] - top)
        y[n, r, c, i] = value
        total += value
    for c in range(x.shape[2]):
        y[n, r, c, i] /= total


@kernel(array(4), array(4), INT, INT)
def softmax_forward(x, y, begin, end):  # type: ignore[no-untyped-def]
    """Write softmax of `x` over axis 2 to `y` for samples ``begin:end``; `y` may be `x`."""
    for n in range(begin, end):
        for r in range(x.shape[1]):
            for i in range(x.shape[3]):
                softmax_column(x, y, n, r, i)


@kernel(array(4), array(4), array(4), INT, INT)
def softmax_backward(y, dy, dx, begin, end):  # type: ignore[no-untyped-def]
    """Write ``dx = y * (dy - sum_c(y * dy))``; `dx` may be `dy`."""
    for n in range(begin, end):
        for r in range(y.shape[1]):
            for i in range(y.shape[3]):
                total = y.dtype.type(0)
                for c in range(y.shape[2]):
                    total += y[n, r, c, i] * dy[n, r, c, i]
                for c in range(y.shape[2]):
                    dx[n, r, c, i] = y[n, r, c, i] * (dy[n, r, c, i] - total)
