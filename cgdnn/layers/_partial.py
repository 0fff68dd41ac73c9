"""The steps that add partial gradients to a layer's parameter diffs."""

from __future__ import annotations

from collections.abc import Sequence

from cgdnn.kernels.reduce import reduce_rows
from cgdnn.layers._base import BEGIN, END, Argument, Buffer, Operands, Step, rows

_COST = 2.0
"""Nanoseconds of a sum."""


def add_partials(operands: Operands, sums: Sequence[Buffer]) -> list[Step]:
    """Return the step that adds up the rows of a partial buffer for each parameter that learns."""
    steps = []
    for index, diff in enumerate(operands.param_diff):
        if operands.learn[index]:
            target = operands.gradient(index, (diff.size,))
            arguments: list[Argument] = [rows(sums[index]), target, operands.accumulate(index)]
            arguments += [BEGIN, END]
            steps.append(Step(reduce_rows, arguments, diff.size, _COST))
    return steps
