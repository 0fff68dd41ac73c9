"""Find the edges between tasks from the byte ranges that they touch.

The tasks come in program order; a task waits for the last writers of what it reads, and for the
last writers and later readers of what it writes. Ranges are kept as a sorted list of segments a
space. Where a task would wait for many others, a join is put between, so that P pieces after Q
pieces cost P + Q edges and not P * Q.

A gate waits for all tasks that nothing waits for yet, and so for everything before it; everything
after it waits for the gate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from cgdnn.plan.tasks import Access, Task

MANY = 6
"""A task that would wait for more than this many tasks of one range gets a join."""


@dataclass
class _Segment:
    start: int
    stop: int
    writer: int | None
    readers: set[int] = field(default_factory=set)


def _touching(segments: list[_Segment]) -> bool:
    """Tell whether each segment begins where the one before it stops."""
    return all(a.stop == b.start for a, b in pairwise(segments))


class _Space:
    """The segments of one space, in order, without gaps inside what was touched."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.segments: list[_Segment] = []

    def over(self, start: int, stop: int) -> list[_Segment]:
        """Return the segments that make up [start, stop), splitting and adding where needed."""
        first = max(0, bisect_right(self.starts, start) - 1)
        exact = self.segments[first : bisect_left(self.starts, stop)]
        if exact and exact[0].start == start and exact[-1].stop == stop and _touching(exact):
            return exact  # as most ranges are: nothing to split or to add
        found: list[_Segment] = []
        rebuilt: list[_Segment] = []
        position = start
        last = first
        while last < len(self.segments) and self.segments[last].start < stop:
            segment = self.segments[last]
            last += 1
            if segment.stop <= start:
                rebuilt.append(segment)
                continue
            if segment.start > position:  # a gap: nobody touched it yet
                gap = _Segment(position, segment.start, None)
                rebuilt.append(gap)
                found.append(gap)
            for begin, end in (
                (segment.start, min(start, segment.stop)),
                (max(start, segment.start), min(stop, segment.stop)),
                (max(stop, segment.start), segment.stop),
            ):
                if begin < end:
                    part = _Segment(begin, end, segment.writer, set(segment.readers))
                    rebuilt.append(part)
                    if start <= begin < stop:
                        found.append(part)
            position = max(position, min(stop, segment.stop))
        if position < stop:
            gap = _Segment(position, stop, None)
            rebuilt.append(gap)
            found.append(gap)
        self.segments[first:last] = rebuilt
        self.starts[first:last] = [segment.start for segment in rebuilt]
        return found


def connect(tasks: Iterable[Task]) -> tuple[list[Task], list[list[int]], list[int]]:
    """Return the tasks with joins put between, their successors and their wait counts.

    Parameters
    ----------
    tasks : iterable of Task
        In program order.

    Returns
    -------
    tasks : list of Task
        In an order in which each comes after all that it waits for.
    successors : list of list of int
    waits : list of int
    """
    ordered: list[Task] = []
    before: list[set[int]] = []
    spaces: dict[int, _Space] = {}
    gate: set[int] = set()

    def add(task: Task, waits: set[int]) -> int:
        ordered.append(task)
        before.append(waits)
        return len(ordered) - 1

    def join(waits: set[int], access: Access) -> int:
        return add(Task(f"{access.buffer.name}.join", -1, None), waits)

    for task in tasks:
        if task.gate:
            waited = set().union(*before) if before else set()
            gate = {add(task, {i for i in range(len(ordered)) if i not in waited} | gate)}
            continue
        waits: set[int] = set(gate)
        accesses = [access for access in task.accesses if access.start < access.stop]
        for access in accesses:
            space = spaces.setdefault(access.space, _Space())
            segments = space.over(access.start, access.stop)
            writers = {s.writer for s in segments if s.writer is not None}
            if len(writers) > MANY:
                bundle = join(writers, access)
                for segment in segments:
                    if segment.writer is not None:
                        segment.writer = bundle
                writers = {bundle}
            waits |= writers
            if access.writes:
                for segment in segments:
                    if len(segment.readers) > MANY:
                        many = segment.readers
                        bundle = join(many, access)
                        for other in space.segments:
                            if other.readers == many:
                                other.readers = {bundle}
                    waits |= segment.readers
        number = add(task, waits)
        for access in accesses:  # looked up again: an access of the same task may have split them
            for segment in spaces[access.space].over(access.start, access.stop):
                if access.writes:
                    segment.writer = number
                    segment.readers = set()
                else:
                    segment.readers.add(number)
    successors: list[list[int]] = [[] for _ in ordered]
    for number, earlier in enumerate(before):
        for waited_for in sorted(earlier):
            successors[waited_for].append(number)
    return ordered, successors, [len(earlier) for earlier in before]
