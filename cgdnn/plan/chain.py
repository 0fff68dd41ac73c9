"""Chains: steps that hand a blob on which no other step needs, piece by piece.

Where a blob is larger than a near cache, writing it as a whole and reading it again takes time,
often more than the step that reads it. If nobody needs it afterwards, each worker has room for a
piece of it only: it computes the piece, and what follows from it, before it goes on to the next.
Where a step can be merged with the one that reads the blob, there are not even pieces of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import gcd

from cgdnn.kernels._jit import Kernel
from cgdnn.layers._base import Buffer, Step, Use
from cgdnn.plan.buffers import root

_PIECE_BYTES, _MOST_BYTES = 256 << 10, 768 << 10
"""Of a blob, about as much is handed on at a time: with what else the steps use it stays in a
second cache. One that is smaller as a whole is not worth it, nor one that cannot be cut so far.
"""


@dataclass(frozen=True)
class Chain:
    """Steps that follow each other, and the blob between them.

    Attributes
    ----------
    first, last : int
        Numbers of the steps.
    carried : Buffer
    units, pieces : int
        Equal parts that all the steps can be cut into, and how many pieces these make.
    piece_bytes : int
        Of the largest piece of the blob.
    merged : Step, optional
        The one that does what the steps do, without the blob.
    """

    first: int
    last: int
    carried: Buffer
    units: int
    pieces: int
    piece_bytes: int
    merged: Step | None = None

    def range_of(self, piece: int, extent: int) -> tuple[int, int]:
        """Return the part of a step of this extent that belongs to a piece."""
        begin, end = (self.units * at // self.pieces for at in (piece, piece + 1))
        return begin * extent // self.units, end * extent // self.units


def chains(
    steps: Sequence[Step], carriable: Collection[Buffer], size_of: Callable[[Buffer], int]
) -> dict[int, Chain]:
    """Return the chains among these steps, by the number of each step in them.

    Parameters
    ----------
    steps : sequence of Step
        In program order.
    carriable : collection of Buffer
        Memory that nobody looks at afterwards.
    size_of : callable
        Buffer -> bytes.
    """
    users: dict[Buffer, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        for buffer in {root(use.buffer) for use in step.arguments if isinstance(use, Use)}:
            if buffer in carriable:
                users[buffer].append(number)
    found: dict[int, Chain] = {}
    for buffer, numbers in users.items():
        first, last = numbers[0], numbers[-1]
        between = steps[first : last + 1]
        if numbers != list(range(first, last + 1)) or found.keys() & set(numbers):
            continue
        if last == first or not _hands_on(between, buffer):
            continue
        units, size = gcd(*(step.extent for step in between)), size_of(buffer)
        merge = between[0].merge if len(between) == 2 else None
        both = merge(between[1]) if merge else None
        if both is not None:
            found |= dict.fromkeys(numbers, Chain(first, last, buffer, units, 1, 0, both))
        elif size > _PIECE_BYTES and size <= _MOST_BYTES * units:
            pieces = -(-units // max(1, _PIECE_BYTES * units // size))
            chain = Chain(first, last, buffer, units, pieces, -(-units // pieces) * size // units)
            found |= dict.fromkeys(numbers, chain)
    return found


def _hands_on(steps: Sequence[Step], buffer: Buffer) -> bool:
    """Tell whether the first step makes a blob, and each touches its own part of it alone."""
    if not all(isinstance(step.kernel, Kernel) and step.explain is None for step in steps):
        return False
    uses = [
        [use for use in step.arguments if isinstance(use, Use) and root(use.buffer) is buffer]
        for step in steps
    ]
    rows = any(isinstance(use, Use) and use.part == "row" for s in steps for use in s.arguments)
    made = all(use.mode == "write" for use in uses[0])
    return made and not rows and all(use.part == "cut" for each in uses for use in each)
