"""Prove that a program gives the same result in every order that its edges allow.

The check shares no code with the planner. It asks of the finished program: can it run at all
(no cycle), are two tasks that touch the same bytes always ordered where one of them writes, and
does every read of the arena find what was written for it? Each fault has a name:

==========================  ====================================================================
``cycle``                   tasks wait for each other
``wrong wait count``        a task waits for more or fewer tasks than have it as a successor
``backward edge``           an edge against program order
``missing edge``            a write and a read of the same bytes are not ordered
``overlapping writes``      two writes of the same bytes are not ordered
``unordered reduction``     two tasks that add to the same bytes are not ordered
``buffer reused early``     two buffers share bytes of the arena while both are in use
``read before its write``   memory of the arena is read that nothing wrote
==========================  ====================================================================
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from cgdnn.errors import InternalError
from cgdnn.layers._base import Buffer
from cgdnn.plan.buffers import root
from cgdnn.plan.tasks import Access, Program

_SHOWN = 5
"""Faults that a message shows."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a program: the fault's name, and the tasks that show it."""

    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


class PlanError(InternalError):
    """A program that could give wrong results."""

    def __init__(self, faults: list[Fault]) -> None:
        more = f"\n... and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        super().__init__("the plan is wrong: " + "\n".join(map(str, faults[:_SHOWN])) + more)
        self.faults = faults


def check(program: Program) -> None:
    """Raise where `program` breaks a rule.

    Raises
    ------
    PlanError
        With every fault that was found.
    """
    faults = find_faults(program)
    if faults:
        raise PlanError(faults)


def find_faults(program: Program) -> list[Fault]:
    """Return every fault of `program`; only those of the graph where it is not one at all."""
    faults = list(_graph_faults(program))
    if faults:
        return faults
    accesses = _by_space(program)
    unordered = _unordered(program)
    for touches in accesses.values():
        faults += _conflicts(program, touches, unordered)
    for touches in accesses.values():
        faults += _wrong_reads(program, touches)
    return faults


def _graph_faults(program: Program) -> Iterator[Fault]:
    """Find cycles, edges against the program's order and wait counts that do not fit."""
    names = [task.name for task in program.tasks]
    waits = [0] * len(names)
    for successors in program.successors:
        for successor in successors:
            waits[successor] += 1
    for index, (found, given) in enumerate(zip(waits, program.waits, strict=True)):
        if found != given:
            yield Fault("wrong wait count", f"{names[index]} waits for {given}, has {found} edges")
    ready = [index for index, count in enumerate(waits) if count == 0]
    for index in ready:  # grows while it is read
        for successor in program.successors[index]:
            waits[successor] -= 1
            if waits[successor] == 0:
                ready.append(successor)
    if len(ready) < len(names):
        stuck = [name for name, count in zip(names, waits, strict=True) if count > 0]
        yield Fault("cycle", " -> ".join(stuck[:_SHOWN]))
        return
    for index, successors in enumerate(program.successors):
        for successor in successors:
            if successor < index:
                yield Fault("backward edge", f"{names[index]} -> {names[successor]}")


def _unordered(program: Program) -> list[int]:
    """Return for each task the set (as bits) of tasks that may run before or after it."""
    count = len(program.tasks)
    before = [0] * count
    after = [0] * count
    for index, successors in enumerate(program.successors):
        with_itself = before[index] | 1 << index
        for successor in successors:
            before[successor] |= with_itself
    for index in reversed(range(count)):
        for successor in program.successors[index]:
            after[index] |= after[successor] | 1 << successor
    everything = (1 << count) - 1
    return [everything & ~(before[i] | after[i] | 1 << i) for i in range(count)]


def _by_space(program: Program) -> dict[int, list[tuple[int, Access]]]:
    """Return the accesses of each space in program order, each with its task."""
    spaces: dict[int, list[tuple[int, Access]]] = defaultdict(list)
    for index, task in enumerate(program.tasks):
        for access in task.accesses:
            if access.start < access.stop:
                spaces[access.space].append((index, access))
    return spaces


def _pieces(touches: list[tuple[int, Access]]) -> list[int]:
    """Return the sorted ends of all ranges: no access ends between two neighbours of them."""
    return sorted({end for _, access in touches for end in (access.start, access.stop)})


def _conflicts(
    program: Program, touches: list[tuple[int, Access]], unordered: list[int]
) -> Iterator[Fault]:
    """Find unordered pairs of tasks that touch the same bytes of one space, one of them writing."""
    ends = _pieces(touches)
    touching = [0] * len(ends)
    for task, access in touches:
        bit = 1 << task
        for piece in range(bisect_left(ends, access.start), bisect_left(ends, access.stop)):
            touching[piece] |= bit
    for task, access in touches:
        if not access.writes:
            continue
        pieces = range(bisect_left(ends, access.start), bisect_left(ends, access.stop))
        others = 0
        for piece in pieces:
            others |= touching[piece] & unordered[task]
        for other_task, other in touches if others else ():
            overlaps = access.start < other.stop and other.start < access.stop
            if not (others >> other_task & 1 and overlaps):
                continue
            if other.writes and other_task < task:
                continue  # found from the other side
            yield _conflict(program, (task, access), (other_task, other))


def _conflict(program: Program, one: tuple[int, Access], two: tuple[int, Access]) -> Fault:
    """Name what is wrong about two unordered accesses of the same bytes, the first a write."""
    (task, access), (other_task, other) = one, two
    mine, theirs = root(access.buffer), root(other.buffer)
    pair = " and ".join(program.tasks[i].name for i in sorted((task, other_task)))
    if mine is not theirs:
        return Fault("buffer reused early", f"{pair}, for {mine.name} and {theirs.name}")
    if access.reads and other.reads and other.writes:
        name = "unordered reduction"
    elif other.writes:
        name = "overlapping writes"
    else:
        name = "missing edge"
    return Fault(name, f"{pair}, on {mine.name}")


def _wrong_reads(program: Program, touches: list[tuple[int, Access]]) -> Iterator[Fault]:
    """Run the program in order and find reads of the arena that nobody wrote for them."""
    if not any(root(access.buffer) in program.places for _, access in touches):
        return
    ends = _pieces(touches)
    owner: list[Buffer | None] = [None] * len(ends)
    ever: list[set[Buffer]] = [set() for _ in ends]
    by_task: dict[int, list[Access]] = defaultdict(list)
    for task, access in touches:
        by_task[task].append(access)
    for task, accesses in by_task.items():
        for access in accesses:
            buffer = root(access.buffer)
            pieces = range(bisect_left(ends, access.start), bisect_left(ends, access.stop))
            foreign = [piece for piece in pieces if owner[piece] is not buffer]
            if access.reads and foreign:
                reused = all(buffer in ever[piece] for piece in foreign)
                name = "buffer reused early" if reused else "read before its write"
                yield Fault(name, f"{program.tasks[task].name}, of {buffer.name}")
        for access in accesses:
            if access.writes:
                buffer = root(access.buffer)
                for piece in range(bisect_left(ends, access.start), bisect_left(ends, access.stop)):
                    owner[piece] = buffer
                    ever[piece].add(buffer)
