"""Tasks: the pieces that steps are cut into, with the memory that each one touches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from cgdnn.layers._base import Buffer, Step


@dataclass(frozen=True)
class Access:
    """A half-open byte range of one space that a task reads or writes.

    A space is a buffer's own memory, or the arena that short-lived buffers share.
    """

    space: int
    start: int
    stop: int
    writes: bool
    reads: bool
    buffer: Buffer


@dataclass(eq=False)
class Task:
    """One piece of a step; `step` is None for a join, which only bundles edges.

    Attributes
    ----------
    name : str
        Such as ``conv1.backward_weights[16:32]``, the same in errors, traces and dumps.
    layer : int
        Index of the layer, -1 where the task belongs to no layer.
    """

    name: str
    layer: int
    step: Step | None
    begin: int = 0
    end: int = 1
    piece: int = 0
    gate: bool = False
    """Whether it waits for everything before it, and everything after it waits for it."""
    chain: list[Task] = field(default_factory=list)
    """What the same worker runs right behind it, on what it hands over (see `Program.carried`)."""
    accesses: list[Access] = field(default_factory=list)
    """Of the chain, too."""

    @property
    def parts(self) -> list[Task]:
        """The task, and what is chained to it."""
        return [self, *self.chain]


@dataclass(eq=False)
class Program:
    """Tasks in program order with their edges; what an executor runs in one call.

    Attributes
    ----------
    tasks : list of Task
    successors : list of list of int
        For each task, the tasks that wait for it.
    waits : list of int
        For each task, how many tasks it waits for.
    order : list of int
        All tasks, those that go first where several are ready (see `cgdnn.plan.order`).
    places : dict
        Short-lived or lent buffer -> byte offset in the arena; scratch, and what is carried ->
        offset in a worker's block.
    arena_bytes, scratch_bytes : int
        Size of the arena, and of one worker's scratch block.
    fresh : dict
        (blob, kind) -> the layouts that are up to date after a run.
    found, made : set of Buffer
        What it reads before writing it, and what it writes.
    unmade : set of Buffer
        The lent blobs and diffs that no task makes, since no other one reads them.
    spared : set of Buffer
        What absorbed layers would keep for a backward pass of their own.
    carried : dict
        Blob or temporary that only exists piece by piece, between the parts of a chain -> bytes of
        the largest piece; 0 where these were merged, so that it does not exist at all.
    """

    tasks: list[Task]
    successors: list[list[int]]
    waits: list[int]
    order: list[int]
    places: dict[Buffer, int]
    arena_bytes: int
    scratch_bytes: int
    fresh: dict[tuple[int, str], frozenset[str]]
    found: set[Buffer] = field(default_factory=set)
    made: set[Buffer] = field(default_factory=set)
    unmade: set[Buffer] = field(default_factory=set)
    spared: set[Buffer] = field(default_factory=set)
    carried: dict[Buffer, int] = field(default_factory=dict)

    @cached_property
    def lost(self) -> set[Buffer]:
        """The blobs, diffs and states that the program is lent: they hold nothing after a run."""
        lent = self.places.keys() | self.carried.keys()
        kinds = ("data", "diff", "param_diff", "state")
        return self.unmade | {buffer for buffer in lent if buffer.kind in kinds}
