"""The layouts that a blob can have in memory.

"nchw" is N, C, H, W order, which users see. The others keep L values together, the floats of a
vector: of L channels of one pixel ("nchwc", [N][C / L][H W][L]; the lanes beyond the last channel
are zero) or of L images at one place ("nchwn", [N / L][C][H W][L], where L divides N).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from cgdnn import machine
from cgdnn.errors import InternalError
from cgdnn.layers._base import Candidate, Layer, Operands, Pair, Shape, Step

NCHW = "nchw"
CHANNEL_LANE = "nchwc"
IMAGE_LANE = "nchwn"
LEAST_GROUPS = 4
"""Vectors of images below which a layer with weights has too little to cut, or to fill a tile."""


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


def full_layouts(shape: Shape) -> tuple[Pair, ...]:
    """Return the layouts in which a blob of this shape fills its memory, each for both sides."""
    axes = {CHANNEL_LANE: 1, IMAGE_LANE: 0} if len(shape) >= 2 else {}
    filled = [layout for layout, axis in axes.items() if shape[axis] % lanes() == 0]
    return tuple((layout, layout) for layout in [NCHW, *filled])


def refuse_few_images(samples: int, least: int = LEAST_GROUPS) -> str | None:
    """Return why a batch is not worth kernels with images in the lanes, if so."""
    groups, rest = divmod(samples, lanes())
    if rest or groups < least:
        return f"serves batches of a multiple of {lanes()} images, {least} or more times"
    return None


def lane_candidates(
    step: Callable[[Any, Operands, str], Step], refuse: Callable[[Any, str], str | None]
) -> list[Candidate]:
    """Return a candidate for each lane layout of a layer that works on planes of vectors.

    Parameters
    ----------
    step : callable(layer, Operands, layout) -> Step
    refuse : callable(layer, layout) -> str or None
        Why the layer cannot work in a layout, besides images that do not fill the lanes.
    """

    def candidate(name: str, layout: str) -> Candidate:
        return Candidate(
            name,
            lambda layer, operands: [step(layer, operands, layout)],
            lambda layer: refuse(layer, layout) or _refuse_unfilled(layer, layout),
            ((layout, layout),),
        )

    return [candidate("image_lanes", IMAGE_LANE), candidate("channel_lanes", CHANNEL_LANE)]


def _refuse_unfilled(layer: Layer, layout: str) -> str | None:
    num = layer.bottom_shapes[0][0]
    if layout == IMAGE_LANE and num % lanes() != 0:
        return f"{num} images do not fill lanes of {lanes()}"
    return None
