"""The steps that copy a blob from one layout to another.

A layout is a property of a blob's home in the plan. Candidates say in which layout they want
their bottoms and give their tops; lowering inserts a reorder where the wanted home is stale.
"""

from __future__ import annotations

from math import prod

from cgdnn.kernels.reorder import reorder_from_lanes, reorder_to_lanes
from cgdnn.layers._base import BEGIN, END, Buffer, Shape, Step, read, write
from cgdnn.layers._layout import IMAGE_LANE, NCHW, lanes, stored_shape


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
        cost=0.15 * prod(other[1:]),
    )


def copy_time(layout: str, shape: Shape) -> float:
    """Return the estimated nanoseconds of a copy between N, C, H, W and another layout."""
    target = Buffer("", stored_shape(layout, shape))
    step = reorder_step(Buffer("", shape), NCHW, target, layout, shape)
    return step.cost * step.extent
