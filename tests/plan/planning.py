"""Programs for tests: of files, of text, and drawn by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from google.protobuf import text_format

from cgdnn.kernels.update import sgd_update
from cgdnn.layers._base import Buffer
from cgdnn.netdef.graph import build_graph
from cgdnn.netdef.read import read_net
from cgdnn.plan.lower import ARENA, Lowering
from cgdnn.plan.shapes import Assembly, assemble
from cgdnn.plan.tasks import Access, Program, Task
from cgdnn.plan.update import UpdateRule, plan_update
from cgdnn.proto.cgdnn_pb2 import NetParameter

ROOT = Path(__file__).resolve().parents[2]
LENET = ROOT / "datasets" / "mnist" / "lenet_train_test.prototxt"
ITERATION = ("forward", "backward", "update")


def assembled(source: str | Path, phase: str = "TRAIN") -> Assembly:
    """Assemble a file, or a description given as text, without data (LeNet's are 1x28x28)."""
    if isinstance(source, str):
        source = text_format.Parse(source, NetParameter())
    graph = build_graph(read_net(source), phase)
    return assemble(graph, shape_hints={"data": (1, 28, 28)}, without_data=True)


def iteration(source: str | Path) -> Program:
    """Return the program of a whole SGD iteration."""
    assembly = assembled(source)
    lowering = Lowering(assembly, "float32", seed=1)
    update = plan_update(assembly, UpdateRule(sgd_update, 1, ("momentum",)), clip=35.0)
    return lowering.program(ITERATION, 0, len(assembly.layers), update=update.works)


def drawn(accesses: Sequence[Sequence[Access]], edges: Sequence[tuple[int, int]] = ()) -> Program:
    """Return a program of tasks named t0, t1, ... that touch this and have these edges."""
    tasks = [
        Task(f"t{number}", -1, None, accesses=list(touched))
        for number, touched in enumerate(accesses)
    ]
    successors: list[list[int]] = [[] for _ in tasks]
    waits = [0] * len(tasks)
    for before, after in edges:
        successors[before].append(after)
        waits[after] += 1
    placed = {a.buffer: 0 for touched in accesses for a in touched if a.space == ARENA}
    return Program(tasks, successors, waits, [], placed, 0, 0, {})


def reads(buffer: Buffer, start: int, stop: int, space: int = 1) -> Access:
    return Access(space, start, stop, writes=False, reads=True, buffer=buffer)


def writes(buffer: Buffer, start: int, stop: int, space: int = 1) -> Access:
    return Access(space, start, stop, writes=True, reads=False, buffer=buffer)


def updates(buffer: Buffer, start: int, stop: int, space: int = 1) -> Access:
    return Access(space, start, stop, writes=True, reads=True, buffer=buffer)
