"""Place what lives only for a part of a program: partials, temporaries, lent blobs and scratch.

Parameters have memory of their own for as long as the net lives, and so have the blobs, diffs and
states that somebody may look at afterwards; the others are lent to the program (see
`cgdnn.plan.lower`). Partials, temporaries and what is lent share one arena: each is placed at the
lowest offset that is free between its first and its last use in program order. Two that share
bytes make their tasks wait for each other, so small ones keep theirs to the end. Scratch lies in a
block of each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from cgdnn.layers._base import Buffer, Use
from cgdnn.plan.tasks import Task

ALIGNMENT = 64
SMALL_BYTES = 256 << 10
"""A short-lived buffer up to this size shares its bytes with no other."""
SHORT_LIVED = ("partial", "temporary")


def aligned(size: int) -> int:
    """Round `size` bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class Placement:
    """Offsets of the short-lived buffers, and how much memory they need."""

    places: dict[Buffer, int]
    arena_bytes: int
    scratch_bytes: int


def root(buffer: Buffer) -> Buffer:
    """Return the buffer whose memory `buffer` is."""
    while buffer.alias is not None:
        buffer = buffer.alias
    return buffer


def uses(task: Task) -> Iterable[Use]:
    """Yield the array arguments of a task and of what is chained to it."""
    return chain.from_iterable(map(_own_uses, task.parts))


def _own_uses(part: Task) -> list[Use]:
    arguments = part.step.arguments if part.step is not None else ()
    return [argument for argument in arguments if isinstance(argument, Use)]


def first_uses(tasks: Iterable[Task]) -> tuple[set[Buffer], set[Buffer]]:
    """Return what `tasks`, in program order, read before they write it, and what they write."""
    found: set[Buffer] = set()
    made: set[Buffer] = set()
    for part in (part for task in tasks for part in task.parts):
        modes = [(root(use.buffer), use.mode) for use in _own_uses(part)]
        found.update(buffer for buffer, mode in modes if mode != "write" and buffer not in made)
        made.update(buffer for buffer, mode in modes if mode != "read")
    return found, made


def place(
    tasks: list[Task],
    size_of: Callable[[Buffer], int],
    lent: Container[Buffer] = (),
    carried: Mapping[Buffer, int] | None = None,
) -> Placement:
    """Place every short-lived, lent, carried and scratch buffer of `tasks`.

    Parameters
    ----------
    tasks : list of Task
        In program order.
    size_of : callable
        Buffer -> bytes of all of it.
    lent : container of Buffer
        Blobs, diffs and states whose content is not needed after the last use, nor before the
        first one.
    carried : mapping, optional
        Buffer -> bytes that it takes in a worker's block.
    """
    carried = carried or {}

    def scratch_size(buffer: Buffer) -> int:
        return aligned(carried[buffer] if buffer in carried else size_of(buffer))

    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    places: dict[Buffer, int] = {}
    scratch_bytes = 0
    for index, task in enumerate(tasks):
        scratch = []
        for use in uses(task):
            buffer = root(use.buffer)
            if buffer.kind == "scratch" or buffer in carried:
                scratch.append(buffer)
            elif buffer.kind in SHORT_LIVED or buffer in lent:
                first.setdefault(buffer, index)
                last[buffer] = index
        # What an earlier task has placed stays there; the others come behind.
        ends = (places[buffer] + scratch_size(buffer) for buffer in scratch if buffer in places)
        offset = max(ends, default=0)
        for buffer in scratch:
            if buffer not in places:
                places[buffer] = offset
                offset += scratch_size(buffer)
        scratch_bytes = max(scratch_bytes, offset)
    living: list[tuple[int, int, int]] = []  # last use, start, stop
    arena_bytes = 0
    for buffer, begin in first.items():  # in order of first use
        living = sorted((entry for entry in living if entry[0] >= begin), key=lambda e: e[1])
        size = aligned(size_of(buffer))
        start = 0
        for _, taken_start, taken_stop in living:
            if start + size <= taken_start:
                break
            start = max(start, taken_stop)
        places[buffer] = start
        end = last[buffer] if size > SMALL_BYTES else len(tasks)
        living.append((end, start, start + size))
        arena_bytes = max(arena_bytes, start + size)
    return Placement(places, arena_bytes, scratch_bytes)
