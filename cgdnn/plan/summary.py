"""Count what a net consists of: shapes, parameters, multiply-adds, memory. Nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cgdnn.layers._base import Shape
from cgdnn.plan.buffers import aligned, root, uses
from cgdnn.plan.lower import Lowering
from cgdnn.plan.shapes import Assembly
from cgdnn.plan.tasks import Program

REAL_BYTES = 4
"""Bytes of a number in the float32 that nets run in by default."""


@dataclass(frozen=True)
class LayerSummary:
    """What one layer adds to a net.

    Attributes
    ----------
    name, type : str
    shapes : list of tuple of int
        Of its tops.
    parameters : int
        Numbers that can be learned; 0 for those of a layer that shares an earlier one's.
    statistics : int
        Numbers that are kept with the parameters but not learned, such as BatchNorm's.
    multiply_adds : int
        Of one forward pass over the whole batch.
    activation_bytes : int
        Memory of its tops' values; nothing where it works in place or shares its bottom's.
    gradient_bytes : int
        Memory of its tops' diffs, where a backward pass needs them.
    """

    name: str
    type: str
    shapes: list[Shape]
    parameters: int
    statistics: int
    multiply_adds: int
    activation_bytes: int
    gradient_bytes: int


def summarize(assembly: Assembly) -> list[LayerSummary]:
    """Return the summary of every layer, the automatic Splits included."""
    found = []
    counted: set[int] = set()
    for planned in assembly.layers:
        own = [assembly.params[i] for i in planned.params if i not in counted]
        counted.update(planned.params)
        new = [assembly.blobs[top] for top in planned.node.tops if top not in planned.node.bottoms]
        found.append(
            LayerSummary(
                planned.node.name,
                planned.node.type,
                [assembly.blobs[top].shape for top in planned.node.tops],
                sum(prod(p.declared.shape) for p in own if p.declared.learned),
                sum(prod(p.declared.shape) for p in own if not p.declared.learned),
                planned.layer.multiply_adds(),
                REAL_BYTES * sum(b.data.size for b in new if root(b.data) is b.data),
                REAL_BYTES
                * sum(b.diff.size for b in new if root(b.diff) is b.diff and b.wants_diff),
            )
        )
    return found


_KINDS = {
    "param": "parameters",
    "param_diff": "gradients of parameters",
    "history": "solver history",
    "data": "blobs",
    "diff": "gradients of blobs",
    "state": "states",
}
"""What the long-lived kinds of `Buffer` are called in a summary."""


def memory(lowering: Lowering, program: Program, threads: int) -> dict[str, int]:
    """Return the bytes that a net needs to run `program`, by what they are for.

    Only what the program touches is counted: the rest is never given pages.
    """
    roots = {root(use.buffer) for task in program.tasks for use in uses(task)}
    found = dict.fromkeys(_KINDS.values(), 0)
    for buffer in roots - program.places.keys():
        found[_KINDS[buffer.kind]] += aligned(lowering.size_of(buffer))
    found["arena"] = program.arena_bytes
    found["scratch of all workers"] = threads * aligned(program.scratch_bytes)
    return found
