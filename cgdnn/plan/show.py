"""Describe a program in tables: kernels by layer, tasks, buffers, and the sums over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cgdnn.kernels._jit import Kernel
from cgdnn.layers._base import Buffer, Candidate, Layer, Step, Use
from cgdnn.plan.arrange import PASSES
from cgdnn.plan.buffers import root, uses
from cgdnn.plan.lower import Lowering
from cgdnn.plan.tasks import Program, Task


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; a column whose name begins with ``#`` holds numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def describe(lowering: Lowering, program: Program, *, every_task: bool = False) -> list[Table]:
    """Return the tables that `cgdnn plan` prints.

    Parameters
    ----------
    lowering : Lowering
    program : Program
        Made by `lowering`.
    every_task : bool
        Whether to list each task with what it waits for, besides the steps.
    """
    tables = [
        Table(
            "Kernels",
            ("layer", "type", "pass", "candidate", "layouts", "refused"),
            list(_chosen(lowering, program)),
        ),
        Table(
            "Steps", ("step", "kernel", "#extent", "#pieces", "touches"), list(_step_rows(program))
        ),
        Table(
            "Buffers", ("buffer", "kind", "shape", "#bytes", "place"), _buffers(lowering, program)
        ),
    ]
    if every_task:
        tables.insert(
            2, Table("Tasks", ("#number", "task", "#waits for", "then"), list(_tasks(program)))
        )
    return tables


def edges(program: Program) -> int:
    """Return how many edges the program has."""
    return sum(len(successors) for successors in program.successors)


def bytes_text(size: int) -> str:
    """Write a number of bytes in the unit that leaves one to four digits before the point."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{size} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Write a shape as ``64x20x24x24``; a scalar's as ``1``."""
    return "x".join(map(str, shape)) or "1"


def _step_name(task: Task) -> str:
    """Return a task's name without the range of its piece."""
    return task.name.removesuffix(f"[{task.begin}:{task.end}]")


def _chosen(lowering: Lowering, program: Program) -> Iterator[tuple[str, ...]]:
    """Say for every pass that runs anything which candidate runs it."""
    steps = {_step_name(part) for task in program.tasks for part in task.parts}
    for planned, choices in zip(lowering.assembly.layers, lowering.choices, strict=True):
        runs = [which for which in PASSES if f"{planned.node.name}.{which}" in steps]
        for which in runs:
            chosen = choices[which]
            refused = [
                f"{candidate.name}: {reason}"
                for candidate in planned.layer.candidates(which)
                if (reason := _refusal(planned.layer, candidate, chosen)) is not None
            ]
            first = which == runs[0]
            yield (
                planned.node.name if first else "",
                planned.node.type if first else "",
                which,
                chosen.name,
                " to ".join(chosen.layouts[0]),
                "; ".join(refused),
            )


def _refusal(layer: Layer, candidate: Candidate, chosen: Candidate) -> str | None:
    """Return why a candidate was passed over, or None where nothing spoke against it."""
    reason = candidate.refuse(layer)
    if reason is None and chosen.layouts[0] not in candidate.layouts:
        return "needs other layouts, with which the iteration would take longer"
    return reason


def _step_rows(program: Program) -> Iterator[tuple[str, ...]]:
    pieces: dict[Step, list[Task]] = defaultdict(list)
    for task in program.tasks:
        for part in task.parts:
            if part.step is not None:
                pieces[part.step].append(part)
    for step, parts in pieces.items():
        name = _step_name(parts[0])
        yield name, kernel_name(step), str(step.extent), str(len(parts)), ", ".join(_touches(step))


def kernel_name(step: Step) -> str:
    """Return the name of a step's kernel; that of a Python function is marked as such."""
    if isinstance(step.kernel, Kernel):
        return step.kernel.name
    return f"{step.kernel.__name__} (Python)"


def _touches(step: Step) -> Iterator[str]:
    """Say what a step reads (name), writes (>name) and changes (<>name)."""
    signs = {"read": "", "write": ">", "update": "<>"}
    for use in step.arguments:
        if isinstance(use, Use):
            yield signs[use.mode] + use.buffer.name


def _tasks(program: Program) -> Iterator[tuple[str, ...]]:
    for number, task in enumerate(program.tasks):
        then = ", ".join(map(str, program.successors[number]))
        yield str(number), task.name, str(program.waits[number]), then


def _buffers(lowering: Lowering, program: Program) -> list[tuple[str, ...]]:
    seen: dict[Buffer, Use] = {}
    for task in program.tasks:
        for use in uses(task):
            seen.setdefault(use.buffer, use)
    rows: list[tuple[str, ...]] = []
    for buffer in seen:
        size = lowering.size_of(buffer)
        if buffer.alias is not None:
            place = f"is {root(buffer).name}"
        elif buffer not in program.places:
            place = "its own"
        else:
            private = buffer.kind == "scratch" or buffer in program.carried
            where = "worker's block" if private else "arena"
            place = f"{where} + {program.places[buffer]}"
        shape = (buffer.rows, *buffer.shape) if buffer.kind == "partial" else buffer.shape
        rows.append((buffer.name, buffer.kind, shape_text(shape), f"{size:,}", place))
    return rows
