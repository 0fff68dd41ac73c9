"""Axes as descriptions give them: negative ones count from the last."""

from __future__ import annotations

from math import prod

from cgdnn.layers._base import Layer, Shape


def canonical_axis(layer: Layer, axis: int, shape: Shape, *fields: str) -> int:
    """Return `axis` of a bottom of `shape` as a number from 0.

    Raises
    ------
    DescriptionError
        The bottom has no such axis; the message names the place of `fields`.
    """
    if not -len(shape) <= axis < len(shape):
        raise layer.error(
            f"axis {axis} does not exist in a bottom of shape {shape}; expected "
            f"{-len(shape)} to {len(shape) - 1}. Correct the axis.",
            *fields,
        )
    return axis % len(shape)


def view_by_axis(shape: Shape, axis: int) -> tuple[int, int, int, int]:
    """Return `shape` as (n, r, c, i): samples, axes up to `axis`, that axis, and those after it.

    With `axis` 0 the samples are coupled, and n is 1.
    """
    if axis == 0:
        return (1, 1, shape[0], prod(shape[1:]))
    return (shape[0], prod(shape[1:axis]), shape[axis], prod(shape[axis + 1 :]))


def by_sample(shape: Shape) -> tuple[int, int]:
    """Return `shape` as (samples, values of one); a blob without axes is one sample."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)
