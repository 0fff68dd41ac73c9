"""The layouts that a blob can have, and the steps that copy it from one to another.

A layout is a property of a blob's home in the plan. Candidates say in which layout they want
their bottoms and give their tops; lowering inserts a reorder where the wanted home is stale.
"""

from __future__ import annotations

from math import prod

from cgdnn import machine
from cgdnn.errors import InternalError
from cgdnn.kernels.reorder import reorder_nchw_to_nchwc, reorder_nchwc_to_nchw
from cgdnn.layers._base import BEGIN, END, Buffer, Shape, Step, read, write

NCHW = "nchw"
CHANNEL_LANE = "nchwc"


def lanes() -> int:
    """Return how many channels the channel-lane layout keeps together: floats of a vector."""
    return machine.vector_bytes() // 4


def stored_shape(layout: str, shape: Shape) -> Shape:
    """Return the shape of the memory that holds a blob of `shape` in `layout`.

    Raises
    ------
    InternalError
        The layout is unknown, or the blob has no channel axis.
    """
    if layout == NCHW:
        return shape
    if layout == CHANNEL_LANE and len(shape) >= 2:
        blocks = -(-shape[1] // lanes())
        return (shape[0], blocks, prod(shape[2:]), lanes())
    raise InternalError(f"no layout {layout!r} for a blob of shape {shape}")


def reorder_step(source: Buffer, source_layout: str, target: Buffer, shape: Shape) -> Step:
    """Return the step that fills `target` from `source`; one of the two is in N, C, H, W."""
    plain = (shape[0], shape[1], prod(shape[2:]))
    kernel = reorder_nchw_to_nchwc if source_layout == NCHW else reorder_nchwc_to_nchw
    from_view = plain if source_layout == NCHW else None
    to_view = None if source_layout == NCHW else plain
    return Step(
        kernel,
        [read(source, from_view), write(target, to_view), BEGIN, END],
        extent=shape[0],
        cost=0.5 * prod(shape[1:]),
    )
