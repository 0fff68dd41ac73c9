"""Labels of losses and scores: how their shape must match the scores, and what is wrong in one."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from cgdnn.errors import CgdnnError, DataError
from cgdnn.layers._base import Layer, Shape


def check_label_shape(layer: Layer, bottoms: list[Shape], axis: int) -> None:
    """Check that there is one label for each position of the scores.

    Raises
    ------
    DescriptionError
        The counts differ.
    """
    scores, labels = bottoms
    expected = tuple(1 if i == axis else size for i, size in enumerate(scores))
    if prod(labels) != prod(expected):
        names = layer.node.bottom_names
        raise layer.error(
            f'labels "{names[1]}" do not match scores "{names[0]}" of shape {scores}; got shape '
            f"{labels} ({prod(labels)} labels), expected {expected} ({prod(expected)} labels: "
            f"one for each position, classes along axis {axis}). Give every position a label, or "
            "set the axis.",
            "bottom",
        )


def explain_label(layer: Layer, view: tuple[int, int, int, int]) -> Callable[[int], CgdnnError]:
    """Return what makes the error for a label that is no class.

    Parameters
    ----------
    layer : Layer
        Its bottoms are scores and labels.
    view : tuple of int
        The scores as (n, r, c, i).
    """

    def explain(status: int) -> CgdnnError:
        index = (status >> 32) - 1
        value = float(np.array([status & 0xFFFFFFFF], np.uint32).view(np.float32)[0])
        sample, position = divmod(index, view[1] * view[3])
        place = f"sample {sample}" + (f", position {position}" if view[1] * view[3] > 1 else "")
        scores, labels = layer.node.bottom_names[:2]
        text = f"{value:.0f}" if value.is_integer() else f"{value:g}"
        wrong = f"is outside 0..{view[2] - 1}" if value.is_integer() else "is not a whole number"
        return DataError(
            f'{layer.node.at()}: {layer.node.label}: "{labels}", {place} of the batch: label '
            f"{text} {wrong}; got {text}, expected a whole number in 0..{view[2] - 1}, the range "
            f'of "{scores}" ({view[2]} classes). Correct the labels, give "{scores}" more '
            f"outputs, or set ignore_label{f': {text}' if value.is_integer() else ''}."
        )

    return explain
