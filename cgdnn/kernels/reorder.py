"""Copy a blob between layouts.

``nchw`` is what users see. ``nchwc`` ("channel-lane") keeps L channels of one pixel together,
[N][ceil(C/L)][H][W][L]; the lanes beyond the last channel are zero.
"""

from __future__ import annotations

from cgdnn.kernels._jit import INT, array, kernel


@kernel(array(3), array(4), INT, INT)
def reorder_nchw_to_nchwc(x, y, begin, end):  # type: ignore[no-untyped-def]
    """Write y (N, ceil(C/L), P, L) from x (N, C, P) for the samples [begin, end)."""
    channels = x.shape[1]
    lanes = y.shape[3]
    for n in range(begin, end):
        for block in range(y.shape[1]):
            for p in range(x.shape[2]):
                for lane in range(lanes):
                    c = block * lanes + lane
                    y[n, block, p, lane] = x[n, c, p] if c < channels else 0


@kernel(array(4), array(3), INT, INT)
def reorder_nchwc_to_nchw(x, y, begin, end):  # type: ignore[no-untyped-def]
    """Write y (N, C, P) from x (N, ceil(C/L), P, L) for the samples [begin, end)."""
    lanes = x.shape[3]
    for n in range(begin, end):
        for c in range(y.shape[1]):
            for p in range(y.shape[2]):
                y[n, c, p] = x[n, c // lanes, p, c % lanes]
