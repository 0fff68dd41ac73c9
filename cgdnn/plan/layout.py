"""The layouts that a blob can have, and the steps that copy it from one to another.

A layout is a property of a blob's home in the plan. Candidates say in which layout they want
their bottoms and give their tops; lowering inserts a reorder where the wanted home is stale.
"""

from __future__ import annotations

from math import prod

from cgdnn import machine
from cgdnn.errors import InternalError
from cgdnn.kernels.reorder import reorder_from_lanes, reorder_to_lanes
from cgdnn.layers._base import BEGIN, END, Buffer, Shape, Step, read, write

NCHW = "nchw"
CHANNEL_LANE = "nchwc"
IMAGE_LANE = "nchwn"


def lanes() -> int:
    """Return how many channels or images a lane layout keeps together: floats of a vector."""
    return machine.vector_bytes() // 4


def stored_shape(layout: str, shape: Shape) -> Shape:
    """Return the shape of the memory that holds a blob of `shape` in `layout`.

    Raises
    ------
    InternalError
        The layout is unknown, the blob has no channel axis, or its images do not fill the lanes.
    """
    if layout == NCHW:
        return shape
    if layout == CHANNEL_LANE and len(shape) >= 2:
        blocks = -(-shape[1] // lanes())
        return (shape[0], blocks, prod(shape[2:]), lanes())
    if layout == IMAGE_LANE and len(shape) >= 2 and shape[0] % lanes() == 0:
        return (shape[0] // lanes(), shape[1], prod(shape[2:]), lanes())
    raise InternalError(f"no layout {layout!r} for a blob of shape {shape}")


def reorder_step(
    source: Buffer, source_layout: str, target: Buffer, target_layout: str, shape: Shape
) -> Step:
    """Return the step that fills `target` from `source`; one of the two is in N, C, H, W."""
    gathers = source_layout == NCHW
    other = stored_shape(target_layout if gathers else source_layout, shape)
    plain: Shape = (shape[0], shape[1], prod(shape[2:]))
    if IMAGE_LANE in (source_layout, target_layout):  # whole images are the rows of a matrix
        row = prod(shape[1:])
        plain, other = (other[0], lanes(), row), (other[0], 1, row, lanes())
    kernel = reorder_to_lanes if gathers else reorder_from_lanes
    return Step(
        kernel,
        [
            read(source, plain if gathers else other),
            write(target, other if gathers else plain),
            BEGIN,
            END,
        ],
        extent=other[0],
        cost=0.1 * prod(other[1:]),
    )
