"""Lower an assembly to programs: choose candidates, insert reorders, cut steps into tasks.

A program is made for a list of parts ("forward", "backward", "update") over a range of layers,
so the whole iteration and a partial `Net.forward(start=, end=)` come out of the same code.

A program can be lent blobs' data or diffs: those it makes itself, and that nobody looks at
afterwards, reuse each other's memory. Their content is lost with the run. A gradient of parameters
that is lent need not exist where one step can compute and apply it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from cgdnn.errors import InternalError
from cgdnn.kernels._jit import Kernel
from cgdnn.kernels.random import key_of
from cgdnn.layers._base import (
    Argument,
    Buffer,
    Candidate,
    Operands,
    Pair,
    Step,
    Use,
    read_all,
    state_of,
    write_all,
)
from cgdnn.layers._layout import NCHW, stored_shape
from cgdnn.plan.arrange import PASSES, PLAIN, Arrangement
from cgdnn.plan.buffers import first_uses, place, root
from cgdnn.plan.chain import Chain, chains
from cgdnn.plan.depend import connect
from cgdnn.plan.layout import reorder_step
from cgdnn.plan.order import furthest, urgency
from cgdnn.plan.partition import cut, partial_limit
from cgdnn.plan.shapes import Assembly, PlannedLayer
from cgdnn.plan.tasks import Access, Program, Task
from cgdnn.plan.tune import TuningTable, choose, measured

ARENA = 0  # the space number of the shared arena
_CACHED_BYTES = 64 << 20
"""Values of a net that exceed caches: twice what last ones hold."""
_NONZEROS = "plan.nonzeros"
"""Name of a layer's count of non-zeros among its states."""

Fresh = dict[tuple[int, str], frozenset[str]]


@dataclass(frozen=True, eq=False)
class Work:
    """A step in its place: which layer and pass it belongs to."""

    label: str
    layer: int
    step: Step
    gate: bool = False


class Lowering:
    """Makes the programs of one net.

    Parameters
    ----------
    assembly : Assembly
    dtype : str
        "float32" or "float64".
    seed : int
        Decides every random number of the net.
    table : TuningTable, optional
        Measurements to choose candidates by; without one the shapes decide.
    """

    def __init__(
        self, assembly: Assembly, dtype: str, seed: int, table: TuningTable | None = None
    ) -> None:
        self.assembly = assembly
        self.dtype = dtype
        self.seed = seed
        self.table = table or TuningTable()
        self._absorbable = {other for planned in assembly.layers for other in planned.absorbed}
        self.choices: list[dict[str, Candidate]] = []
        """For each layer, pass -> the candidate that runs it."""
        self.choose({})

    def choose(self, forced: Mapping[str, str]) -> bool:
        """Choose the candidate of every pass; return whether any choice changed.

        Parameters
        ----------
        forced : mapping
            ``<layer>.<pass>`` -> candidate, such as a snapshot holds; it goes before all else.
        """
        before = self.choices
        choosing = _Choosing(self, forced)
        arranged = Arrangement(self.assembly, choosing.offers, choosing.candidate, choosing.time)
        pairs = arranged.best()
        self.choices = [
            {which: choosing.candidate(index, which, pairs) for which in PASSES}
            for index in range(len(pairs))
        ]
        return [_signs(choices) for choices in self.choices] != [*map(_signs, before)]

    def chosen_names(self) -> dict[str, str]:
        """Return ``<layer>.<pass>`` -> candidate, for the passes that have a choice."""
        return {
            f"{planned.node.name}.{which}": candidate.name
            for planned, chosen in zip(self.assembly.layers, self.choices, strict=False)
            for which, candidate in chosen.items()
            if len(planned.layer.candidates(which)) > 1
        }

    def estimate(self, index: int, which: str, candidate: Candidate) -> float:
        """Return the nanoseconds of a pass of a layer by a candidate, on one core."""
        planned = self.assembly.layers[index]
        below, above = candidate.layouts[0]

        def blobs(numbers: Sequence[int], layout: str) -> list[Buffer]:
            shapes = [self.assembly.blobs[number].shape for number in numbers]
            return [Buffer("", stored_shape(layout, shape)) for shape in shapes]

        bottoms, tops = blobs(planned.node.bottoms, below), blobs(planned.node.tops, above)
        routed = None
        if candidate.routed:
            assert planned.reader is not None
            routed = (Buffer("", ()), Buffer("", (), "int32"))
        trial = replace(planned, states=dict(planned.states))
        operands = self._operands(trial, (bottoms, tops, bottoms, tops), routed)
        return sum(step.cost * step.extent for step in candidate.steps(planned.layer, operands))

    def size_of(self, buffer: Buffer) -> int:
        """Return the bytes of `buffer`, all rows of a partial included."""
        dtype = self.dtype if buffer.dtype == "real" else buffer.dtype
        rows = buffer.rows if buffer.kind == "partial" else 1
        return rows * buffer.size * np.dtype(dtype).itemsize

    def program(
        self,
        parts: Sequence[str],
        first: int,
        last: int,
        *,
        update: Sequence[Work] = (),
        fresh: Mapping[tuple[int, str], frozenset[str]] | None = None,
        lent: Collection[tuple[int, str]] = (),
        carried: Collection[tuple[int, str]] = (),
        counting: bool = False,
    ) -> Program:
        """Return the program of these parts over the layers [first, last).

        Parameters
        ----------
        parts : sequence of str
            Any of "forward", "backward", "update", in the order in which they run; "again" is a
            forward pass without the layers that have no bottoms, such as those that read data.
        update : sequence of Work
            The steps of the part "update" (see `cgdnn.plan.update`).
        fresh : mapping, optional
            Which layouts of which blobs are up to date before the run; N, C, H, W where absent.
        lent : collection of (int, str)
            The blobs and kinds ("data", "diff"), and the parameters with kind "param_diff", whose
            content nobody needs after the run.
        carried : collection of (int, str)
            Those that may exist piece by piece only, where one step hands them on to the next.
        counting : bool
            Count the non-zeros of what each backward pass over weights gets (see `nonzeros`).
        """
        homes = _Homes(self.assembly, dict(fresh or {}))
        works: list[Work] = []
        spared: list[Work] = []
        heads = self._absorbing(first, last)
        absorbed = {other for index in heads for other in self.assembly.layers[index].absorbed}

        def add(index: int, which: str) -> None:
            if index in absorbed:  # what does not run brings nothing up to date
                elsewhere = _Homes(self.assembly, dict(homes.fresh))
                spared.extend(self._pass(index, which, elsewhere))
            else:
                works.extend(self._pass(index, which, homes, with_followers=index in heads))

        for part in parts:
            if part in ("forward", "again"):
                for index in range(first, last):
                    if part == "again" and not self.assembly.layers[index].node.bottoms:
                        continue
                    add(index, "forward")
            elif part == "backward":
                for index in reversed(range(first, last)):
                    if self.assembly.layers[index].needs_backward:
                        if counting:
                            works += self._count(index, homes)
                        add(index, "backward_weights")
                        add(index, "backward_data")
            else:
                works += update
        works, applied = self._apply(self._overwriting(works, lent), lent)
        needed, unmade = self._needed(works, lent)
        program = self._finish(needed, homes.fresh, lent, carried)
        program.unmade = unmade | applied
        kept = {buffer for work in spared for buffer in _written(work)}
        program.spared = {buffer for buffer in kept if buffer.kind == "state"}
        return program

    def _absorbing(self, first: int, last: int) -> set[int]:
        """Return the layers of [first, last) that absorb others which all lie there too."""
        layers = self.assembly.layers
        return {
            i for i in range(first, last) if layers[i].absorbed and layers[i].absorbed[-1] < last
        }

    def _overwriting(self, works: list[Work], lent: Collection[tuple[int, str]]) -> list[Work]:
        """Let the first step that could add to a lent gradient only write it: nothing is there."""
        gradients = self._gradients(lent)
        found = []
        for work in works:
            uses = [use for use in work.step.arguments if isinstance(use, Use)]
            first = gradients & {root(use.buffer) for use in uses}
            gradients -= first
            if first:
                arguments = [_written_at_first(each, first) for each in work.step.arguments]
                work = replace(work, step=replace(work.step, arguments=arguments))
            found.append(work)
        return found

    def _apply(
        self, works: list[Work], lent: Collection[tuple[int, str]]
    ) -> tuple[list[Work], set[Buffer]]:
        """Merge updates with the steps that only compute the gradients for them.

        Returns
        -------
        tuple of (list of Work, set of Buffer)
            The works, and the gradients that none writes.
        """
        users: dict[Buffer, list[int]] = {gradient: [] for gradient in self._gradients(lent)}
        for number, work in enumerate(works):
            for argument in work.step.arguments:
                if isinstance(argument, Use) and root(argument.buffer) in users:
                    users[root(argument.buffer)].append(number)
        merged: dict[int, Work | None] = {}
        applied = set()
        for gradient, numbers in users.items():
            if len(numbers) == 2:
                first, behind = (works[number] for number in numbers)
                step = first.step.merge(behind.step) if first.step.merge else None
                if step is not None:
                    merged |= {numbers[0]: None, numbers[1]: replace(behind, step=step)}
                    applied.add(gradient)
        found = (merged.get(number, work) for number, work in enumerate(works))
        return [work for work in found if work is not None], applied

    def _needed(
        self, works: list[Work], lent: Collection[tuple[int, str]]
    ) -> tuple[list[Work], set[Buffer]]:
        """Leave out the works that only fill lent memory which no other one reads.

        Returns
        -------
        tuple of (list of Work, set of Buffer)
            The others, and the memory that is not filled.
        """
        read = {
            root(argument.buffer)
            for work in works
            for argument in work.step.arguments
            if isinstance(argument, Use) and argument.mode != "write"
        }
        unread = self._roots(lent) - read if lent else set()
        written = [_written(work) for work in works]
        idle = [bool(each) and each <= unread for each in written]
        needed = [work for work, spare in zip(works, idle, strict=True) if not spare]
        unmade = {b for each, spare in zip(written, idle, strict=True) if spare for b in each}
        return needed, unmade

    def nonzeros(self) -> dict[str, tuple[Buffer, int]]:
        """Return, for each layer that multiplies and learns, where it counts and of how many.

        Not for one that another layer can absorb, whose top may have no diff of its own. The
        buffer holds the count of non-zeros in the diff of top 0, as the last run found it that was
        made with `counting`; the number is the size of that diff.
        """
        return {
            planned.node.name: (
                _nonzeros(planned),
                prod(self.assembly.blobs[planned.node.tops[0]].shape),
            )
            for index, planned in enumerate(self.assembly.layers)
            if self._is_counted(index)
        }

    def _is_counted(self, index: int) -> bool:
        """Tell whether a layer multiplies, learns, and always has a diff of its top to count in."""
        planned = self.assembly.layers[index]
        learns = planned.needs_backward and planned.learns
        return learns and index not in self._absorbable and planned.layer.multiply_adds() > 0

    def single_pass(self, layer: int, which: str) -> Program:
        """Return the program of one pass of one layer, for measuring, without copies of blobs."""
        node = self.assembly.layers[layer].node
        below, above = self.choices[layer][which].layouts[0]
        blobs = [(b, below) for b in node.bottoms] + [(t, above) for t in node.tops]
        fresh = {(b, kind): frozenset({at}) for b, at in blobs for kind in ("data", "diff")}
        homes = _Homes(self.assembly, fresh)
        return self._finish(list(self._pass(layer, which, homes)), homes.fresh)

    def export(
        self, blob: int, kind: str, fresh: Mapping[tuple[int, str], frozenset[str]]
    ) -> Program:
        """Return the program that brings a blob up to date in N, C, H, W order."""
        homes = _Homes(self.assembly, dict(fresh))
        _, steps = homes.want(blob, kind, NCHW)
        name = f"{self.assembly.blobs[blob].name}.{kind}.to_{NCHW}"
        return self._finish([Work(name, -1, step) for step in steps], homes.fresh)

    def _count(self, index: int, homes: _Homes) -> Iterator[Work]:
        planned = self.assembly.layers[index]
        if self._is_counted(index):
            diff, steps = homes.want(planned.node.tops[0], "diff", NCHW)
            steps.append(Step(count_nonzero, [read_all(diff), write_all(_nonzeros(planned))]))
            for step in steps:
                yield Work(f"{planned.node.name}.nonzeros", index, step)

    def _pass(
        self, index: int, which: str, homes: _Homes, with_followers: bool = False
    ) -> Iterator[Work]:
        planned = self.assembly.layers[index]
        node = planned.node
        candidate = self.choices[index][which]
        forward = which == "forward"
        if which == "backward_data" and not any(planned.propagate):
            return
        if which == "backward_weights" and not planned.learns:
            return
        reorders: list[Work] = []

        def want(blob: int, kind: str, layout: str) -> Buffer:
            buffer, steps = homes.want(blob, kind, layout)
            name = self.assembly.blobs[blob].name
            reorders.extend(Work(f"{name}.{kind}.to_{layout}", index, step) for step in steps)
            return buffer

        below, above = candidate.layouts[0]
        routed = None
        bottom = [want(b, "data", below) for b in node.bottoms]
        if forward:
            top = [homes.give(t, "data", above) for t in node.tops]
            top_diff, bottom_diff = [], []
        else:
            top = [want(t, "data", above) for t in node.tops]
            if candidate.routed:
                top_diff = [homes.home(t, "diff", above) for t in node.tops]
                routed = self._routed(planned, above, want)
            else:
                top_diff = [want(t, "diff", above) for t in node.tops]
            writes = which == "backward_data"
            bottom_diff = [
                homes.give(b, "diff", below)
                if writes and planned.propagate[i]
                else homes.home(b, "diff", below)
                for i, b in enumerate(node.bottoms)
            ]
        blobs = (bottom, top, bottom_diff, top_diff)
        operands = self._operands(planned, blobs, routed, with_followers)
        steps = candidate.steps(planned.layer, operands)
        yield from reorders
        for step in steps:
            yield Work(f"{node.name}.{which}", index, step)

    def _operands(
        self,
        planned: PlannedLayer,
        blobs: tuple[list[Buffer], list[Buffer], list[Buffer], list[Buffer]],
        routed: tuple[Buffer, Buffer] | None = None,
        with_followers: bool = False,
    ) -> Operands:
        params = [self.assembly.params[i] for i in planned.params]
        forced = self.assembly.graph.force_backward
        followers = [self.assembly.layers[i] for i in planned.absorbed if with_followers]
        return Operands(
            *blobs,
            [data for data, _ in planned.views],
            [diff for _, diff in planned.views],
            planned.propagate,
            [self.assembly.blobs[t].wants_diff for t in planned.node.tops],
            [p.declared.learned and (p.lr_mult != 0 or forced) for p in params],
            key_of(self.seed, planned.node.name),
            routed,
            [self._operands(follower, ([], [], [], [])) for follower in followers],
            _states=planned.states,
            _prefix=planned.node.name,
        )

    def _routed(
        self, planned: PlannedLayer, layout: str, want: Callable[[int, str, str], Buffer]
    ) -> tuple[Buffer, Buffer]:
        """Return the diff of the top of the layer's reader, and the reader's route."""
        assert planned.reader is not None, "a routed candidate serves only with a reader"
        reader = self.assembly.layers[planned.reader]
        name = reader.layer.route(layout)
        assert name is not None, "a routed candidate serves only with a route"
        shape = stored_shape(layout, reader.layer.top_shapes[0])
        route = state_of(reader.states, reader.node.name, name, shape, "int32")
        return want(reader.node.tops[0], "diff", layout), route

    def _finish(
        self,
        works: list[Work],
        fresh: Fresh,
        lent: Collection[tuple[int, str]] = (),
        carried: Collection[tuple[int, str]] = (),
    ) -> Program:
        written = {buffer for work in works for buffer in _written(work)}
        temporary = {buffer for buffer in written if buffer.kind == "temporary"}
        handed = chains([w.step for w in works], self._homes(carried) | temporary, self.size_of)
        tasks: list[Task] = []
        pieces: dict[Buffer, int] = {}
        for index, work in enumerate(works):
            if index not in handed:
                tasks += _cut(work, self)
            elif handed[index].first == index:
                chain = handed[index]
                pieces[chain.carried] = chain.piece_bytes
                if chain.merged is None:
                    tasks += _cut_chain(chain, works)
                else:
                    tasks += _cut(replace(work, step=chain.merged), self)
        found, made = first_uses(tasks)
        free = (self._roots(lent) | self._gradients(lent)) - found if lent else set()
        placement = place(tasks, self.size_of, free, pieces)
        spaces = _Spaces()
        for task in tasks:
            for part in task.parts:
                task.accesses += [
                    access
                    for access in self._accesses(part, placement.places, pieces, spaces)
                    if access.writes or not _is_made(access, task.accesses)
                ]
        ordered, successors, waits = connect(tasks)
        return Program(
            ordered,
            successors,
            waits,
            furthest(ordered) if self._exceeds_caches else urgency(ordered, successors),
            placement.places,
            placement.arena_bytes,
            placement.scratch_bytes,
            fresh,
            found,
            made,
            carried=pieces,
        )

    @property
    def lends_values(self) -> bool:
        """Whether a run over all layers may be lent values, and what layers keep beside them.

        In TEST, and where they are larger than caches. In a small net that trains it would save
        little, and make tasks wait for each other.
        """
        return self.assembly.graph.phase == "TEST" or self._exceeds_caches

    @property
    def _exceeds_caches(self) -> bool:
        """Whether the values of all blobs are larger than caches."""
        homes = {root(blob.data) for blob in self.assembly.blobs}
        return sum(map(self.size_of, homes)) > _CACHED_BYTES

    def _roots(self, lent: Collection[tuple[int, str]]) -> set[Buffer]:
        """Return the memory that is lent, which no other blob may have a part in.

        What layers keep from forward to backward is lent with the values of blobs, without which
        no backward pass can follow.
        """
        roots = self._homes(lent)
        if any(kind == "data" for _, kind in lent):
            for planned in self.assembly.layers:
                roots |= {s for name, s in planned.states.items() if name != _NONZEROS}
        return roots

    def _gradients(self, lent: Collection[tuple[int, str]]) -> set[Buffer]:
        """Return the gradients of parameters that are lent."""
        return {root(self.assembly.params[i].diff) for i, kind in lent if kind == "param_diff"}

    def _homes(self, entries: Collection[tuple[int, str]]) -> set[Buffer]:
        """Return the memory of these blobs and kinds, which no other blob has a part in."""
        roots: dict[bool, set[Buffer]] = {True: set(), False: set()}
        for index, blob in enumerate(self.assembly.blobs):
            for (kind, _), home in blob.homes.items():
                roots[(index, kind) in entries].add(root(home))
        return roots[True] - roots[False]

    def _accesses(
        self,
        task: Task,
        places: Mapping[Buffer, int],
        carried: Container[Buffer],
        spaces: _Spaces,
    ) -> Iterator[Access]:
        assert task.step is not None
        for argument in task.step.arguments:
            if not isinstance(argument, Use):
                continue
            buffer = root(argument.buffer)
            if buffer.kind == "scratch" or buffer in carried:
                continue
            space, base = ARENA, 0
            if buffer in places:
                base = places[buffer]
            else:
                space = spaces.number(buffer)
            for start, stop in self._ranges(task, argument):
                yield Access(
                    space,
                    base + start,
                    base + stop,
                    argument.mode != "read",
                    argument.mode != "write",
                    argument.buffer,
                )

    def _ranges(self, task: Task, use: Use) -> list[tuple[int, int]]:
        """Return the bytes of a buffer that a task touches."""
        assert task.step is not None
        buffer, extent = root(use.buffer), task.step.extent
        size = self.size_of(buffer)
        if use.part == "whole":
            return [(0, size)]
        if use.part == "row":
            size //= buffer.rows
            return [(size * task.piece, size * (task.piece + 1))]
        blocks = (use.shape or use.buffer.shape)[0] if use.part == "across" else 1
        if buffer.size % (blocks * extent):
            raise InternalError(
                f"{task.name}: {use.buffer.name} of shape {use.buffer.shape} "
                f"cannot be cut into {extent} equal parts"
            )
        unit = size // (blocks * extent)
        starts = [unit * extent * block for block in range(blocks)]
        return [(start + unit * task.begin, start + unit * task.end) for start in starts]


def _signs(choices: Mapping[str, Candidate]) -> list[tuple[str, tuple[Pair, ...]]]:
    """Return what tells the choices for a layer from others."""
    return [(candidate.name, candidate.layouts) for candidate in choices.values()]


class _Choosing:
    """What the passes of a lowering's layers can be run by, and how long that takes."""

    def __init__(self, lowering: Lowering, forced: Mapping[str, str]) -> None:
        self._lowering = lowering
        self._layers = lowering.assembly.layers
        self._forced = forced
        self._serving: dict[tuple[int, str], list[Candidate]] = {}
        self._candidates: dict[tuple[int, str, Pair, Pair | None], Candidate] = {}
        self._times: dict[tuple[int, str, str, Pair], float] = {}
        self.offers = [self._offer(index) for index in range(len(self._layers))]

    def _serve(self, index: int, which: str) -> list[Candidate]:
        """Return the candidates that a layer can use for a pass."""
        if (index, which) not in self._serving:
            layer = self._layers[index].layer
            found = [each for each in layer.candidates(which) if each.serves(layer)]
            self._serving[index, which] = found
        return self._serving[index, which]

    def _serve_in(
        self, index: int, which: str, pair: Pair, reading: Pair | None
    ) -> list[Candidate]:
        """Return those that serve a pair, where the layer's reader works in the pair `reading`."""
        return [
            candidate
            for candidate in self._serve(index, which)
            if pair in candidate.layouts
            if not candidate.routed or (reading is not None and reading[0] == pair[1])
        ]

    def _offer(self, index: int) -> list[Pair]:
        """Return the pairs that a layer can work in; those that what is forced needs, if any."""
        offer, needed = [PLAIN], []
        for which in PASSES:
            wanted = self._forced.get(f"{self._layers[index].node.name}.{which}")
            for candidate in self._serve(index, which):
                offer += [pair for pair in candidate.layouts if pair not in offer]
                if candidate.name == wanted:
                    needed.append(candidate.layouts)
        return [pair for pair in offer if all(pair in pairs for pairs in needed)] or offer

    def candidate(self, index: int, which: str, pairs: Sequence[Pair]) -> Candidate:
        """Return what runs a pass of a layer where the layers work in these pairs."""
        planned, pair = self._layers[index], pairs[index]
        reading = None if planned.reader is None else pairs[planned.reader]
        key = (index, which, pair, reading)
        if key not in self._candidates:
            there = self._serve_in(index, which, pair, reading)
            if not there:  # the layer has nothing for this pass in these layouts
                pair = PLAIN
                there = self._serve_in(index, which, pair, reading)
            lowering = self._lowering
            chosen = choose(planned, which, lowering.dtype, lowering.table, self._forced, there)
            self._candidates[key] = replace(chosen, layouts=(pair,))
        return self._candidates[key]

    def time(self, index: int, which: str, candidate: Candidate) -> float:
        """Return the nanoseconds of a pass of a layer: measured, or else estimated."""
        key = (index, which, candidate.name, candidate.layouts[0])
        if key not in self._times:
            found = measured(self._layers[index], which, self._lowering.dtype, self._lowering.table)
            self._times[key] = (
                1e6 * found[candidate.name]
                if candidate.name in found
                else self._lowering.estimate(index, which, candidate)
            )
        return self._times[key]


def _written_at_first(argument: Argument, gradients: Collection[Buffer]) -> Argument:
    """Return the argument; one that is to be added to one of these gradients only writes it."""
    if isinstance(argument, Use) and root(argument.buffer) in gradients:
        return replace(argument, mode="write") if argument.mode == "update" else argument
    return argument


def _written(work: Work) -> set[Buffer]:
    """Return the memory that a work writes, besides scratch."""
    return {
        root(argument.buffer)
        for argument in work.step.arguments
        if isinstance(argument, Use) and argument.mode != "read"
        if argument.buffer.kind != "scratch"
    }


def count_nonzero(array: npt.NDArray[Any], count: npt.NDArray[Any]) -> None:
    """Write the number of non-zeros of `array` to ``count[0]``."""
    count[0] = np.count_nonzero(array)


def _nonzeros(planned: PlannedLayer) -> Buffer:
    name = f"{planned.node.name}.nonzeros"
    return planned.states.setdefault(_NONZEROS, Buffer(name, (1,), "int64", "state"))


class _Spaces:
    """Numbers the memories of a program."""

    def __init__(self) -> None:
        self._numbers: dict[Buffer, int] = {}

    def number(self, buffer: Buffer) -> int:
        return self._numbers.setdefault(buffer, ARENA + 1 + len(self._numbers))


class _Homes:
    """Follows in program order which layouts of which blobs are up to date."""

    def __init__(self, assembly: Assembly, fresh: Fresh) -> None:
        self.assembly = assembly
        self.fresh = fresh

    def home(self, blob: int, kind: str, layout: str) -> Buffer:
        """Return the buffer of a blob in a layout, made on first use."""
        planned = self.assembly.blobs[blob]
        if (kind, layout) not in planned.homes:
            shape = stored_shape(layout, planned.shape)
            name = f"{planned.name}.{kind}.{layout}"
            planned.homes[kind, layout] = Buffer(name, shape, kind=kind)
        return planned.homes[kind, layout]

    def want(self, blob: int, kind: str, layout: str) -> tuple[Buffer, list[Step]]:
        """Return the buffer to read, and the steps that bring it up to date."""
        buffer = self.home(blob, kind, layout)
        fresh = self.fresh.get((blob, kind), frozenset({NCHW}))
        if layout in fresh:
            return buffer, []
        shape = self.assembly.blobs[blob].shape
        steps = []
        if NCHW not in fresh:
            source = next(iter(sorted(fresh)))
            plain = self.home(blob, kind, NCHW)
            up_to_date = self.home(blob, kind, source)
            steps.append(reorder_step(up_to_date, source, plain, NCHW, shape))
        if layout != NCHW:
            plain = self.home(blob, kind, NCHW)
            steps.append(reorder_step(plain, NCHW, buffer, layout, shape))
        self.fresh[blob, kind] = fresh | {layout, NCHW}
        return buffer, steps

    def give(self, blob: int, kind: str, layout: str) -> Buffer:
        """Return the buffer to write; every other layout of the blob becomes stale."""
        self.fresh[blob, kind] = frozenset({layout})
        return self.home(blob, kind, layout)


def _is_made(read: Access, before: Sequence[Access]) -> bool:
    """Tell whether earlier parts of the same task write what a part of it reads."""
    return any(
        made.writes and made.space == read.space
        for made in before
        if made.start <= read.start and read.stop <= made.stop
    )


def _cut_chain(chain: Chain, works: Sequence[Work]) -> Iterator[Task]:
    """Cut the steps of a chain into tasks, each of which goes through all of them."""
    for piece in range(chain.pieces):
        parts = []
        for work in works[chain.first : chain.last + 1]:
            begin, end = chain.range_of(piece, work.step.extent)
            name = f"{work.label}[{begin}:{end}]"
            parts.append(Task(name, work.layer, work.step, begin, end, piece))
        parts[0].chain = parts[1:]
        yield parts[0]


def _cut(work: Work, lowering: Lowering) -> Iterator[Task]:
    """Cut a step into tasks, and give the partials that it writes their number of rows."""
    step = work.step
    partials = [
        argument.buffer
        for argument in step.arguments
        if isinstance(argument, Use) and argument.part == "row"
    ]
    if isinstance(step.kernel, Kernel):
        ranges = cut(step.extent, step.cost)
    else:
        ranges = [(0, step.extent)]
    if partials:
        item = np.dtype(lowering.dtype).itemsize
        most = min(partial_limit(prod(buffer.shape) * item) for buffer in partials)
        ranges = cut(step.extent, step.cost, most)
        for buffer in partials:
            buffer.rows = len(ranges)
    for piece, (begin, end) in enumerate(ranges):
        name = work.label if len(ranges) == 1 else f"{work.label}[{begin}:{end}]"
        yield Task(name, work.layer, step, begin, end, piece, work.gate)
