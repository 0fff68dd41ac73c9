"""Which layouts layers work in: those with which an iteration takes the least time.

A layer works in one pair of layouts, of its bottoms and of its tops, or has candidates for several.
Where neighbours differ, a blob is copied. An iteration takes the time of its passes and of these
copies. From several starts (all in N, C, H, W; each other layout wherever it can be had) one layer
after the other takes the pair with which the whole takes the least, until none changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cgdnn.layers._base import Candidate, Pair
from cgdnn.layers._layout import NCHW
from cgdnn.plan.layout import copy_time
from cgdnn.plan.shapes import Assembly

PASSES = ("forward", "backward_weights", "backward_data")
PLAIN: Pair = (NCHW, NCHW)


@dataclass(frozen=True)
class _Touch:
    """What a pass of a layer does with a blob's data or diff."""

    layer: int
    which: str
    kind: str
    side: int  # 0: in the layout of the layer's bottoms, 1: of its tops
    gives: bool  # else it reads
    routed: bool | None = None  # only where the candidate is, or is not, routed


def runs(assembly: Assembly, index: int, which: str) -> bool:
    """Tell whether an iteration has this pass of a layer."""
    planned = assembly.layers[index]
    if which == "forward":
        return True
    if assembly.graph.phase != "TRAIN" or not planned.needs_backward:
        return False
    return any(planned.propagate) if which == "backward_data" else planned.learns


def _touches(assembly: Assembly) -> Iterator[tuple[int, _Touch]]:
    """Yield, in the order of an iteration, each blob that a pass reads or gives."""
    layers = assembly.layers
    for index, planned in enumerate(layers):
        yield from ((b, _Touch(index, "forward", "data", 0, False)) for b in planned.node.bottoms)
        yield from ((t, _Touch(index, "forward", "data", 1, True)) for t in planned.node.tops)
    for index in reversed(range(len(layers))):
        planned = layers[index]
        for which in PASSES[1:]:
            if not runs(assembly, index, which):
                continue
            for bottom in planned.node.bottoms:
                yield bottom, _Touch(index, which, "data", 0, False)
            for top in planned.node.tops:
                yield top, _Touch(index, which, "data", 1, False)
                yield top, _Touch(index, which, "diff", 1, False, routed=False)
            if planned.reader is not None and layers[planned.reader].node.tops:
                pooled = layers[planned.reader].node.tops[0]
                yield pooled, _Touch(index, which, "diff", 1, False, routed=True)
            if which == "backward_data":
                wanted = zip(planned.node.bottoms, planned.propagate, strict=True)
                for bottom in (b for b, wants in wanted if wants):
                    yield bottom, _Touch(index, which, "diff", 0, True)


class Arrangement:
    """Finds the pair of layouts of every layer of a net.

    Parameters
    ----------
    assembly : Assembly
    offers : sequence of sequence of Pair
        For each layer the pairs that it can work in, N, C, H, W first.
    candidate : callable(layer, which, pairs of all layers) -> Candidate
        What runs a pass; of the pairs it may look at the layer's and its reader's.
    time : callable(layer, which, Candidate) -> float
        Its nanoseconds.
    """

    def __init__(
        self,
        assembly: Assembly,
        offers: Sequence[Sequence[Pair]],
        candidate: Callable[[int, str, Sequence[Pair]], Candidate],
        time: Callable[[int, str, Candidate], float],
    ) -> None:
        self._assembly = assembly
        self._offers = offers
        self._candidate = candidate
        self._time = time
        self._touches: dict[int, list[_Touch]] = defaultdict(list)
        """Blob -> what an iteration does with it, in order."""
        touched = defaultdict(set)
        for blob, touch in _touches(assembly):
            self._touches[blob].append(touch)
            touched[touch.layer].add(blob)
        self._near: dict[int, tuple[list[int], list[int]]] = {}
        """Layer -> the layers, and the blobs, whose time can change with its pair."""
        for index in range(len(offers)):
            layers = [i for i, p in enumerate(assembly.layers) if p.reader == index or i == index]
            blobs = {blob for layer in layers for blob in touched[layer]}
            self._near[index] = layers, sorted(blobs)

    def best(self) -> list[Pair]:
        """Return the pair of each layer."""
        layouts = sorted({above for offer in self._offers for _, above in offer[1:]})
        starts = [
            [_nearest(layout, offer) for offer in self._offers] for layout in [NCHW, *layouts]
        ]
        if not layouts:
            return starts[0]
        for pairs in starts:
            self._descend(pairs)
        everything = range(len(self._offers)), list(self._touches)
        return min(starts, key=lambda pairs: self._total(pairs, *everything))

    def _descend(self, pairs: list[Pair]) -> None:
        """Change one layer's pair after the other while that saves time."""
        changed = True
        while changed:
            changed = False
            for index, offer in enumerate(self._offers):
                if len(offer) < 2:
                    continue
                before, near = pairs[index], self._near[index]
                times = {}
                for pair in [before, *offer]:
                    pairs[index] = pair
                    times[pair] = self._total(pairs, *near)
                pairs[index] = min(times, key=lambda pair: times[pair])
                changed |= pairs[index] != before

    def _total(self, pairs: Sequence[Pair], layers: Sequence[int], blobs: Sequence[int]) -> float:
        """Return the nanoseconds of all passes of some layers and of all copies of some blobs."""
        passes = [
            self._time(index, which, self._candidate(index, which, pairs))
            for index in layers
            if len(self._offers[index]) > 1
            for which in PASSES
            if runs(self._assembly, index, which)
        ]
        return sum(passes) + sum(self._copies(blob, pairs) for blob in blobs)

    def _copies(self, blob: int, pairs: Sequence[Pair]) -> float:
        """Return the nanoseconds that an iteration spends on copying a blob between layouts."""
        fresh = {"data": {NCHW}, "diff": {NCHW}}
        shape = self._assembly.blobs[blob].shape
        total = 0.0
        for touch in self._touches[blob]:
            candidate = self._candidate(touch.layer, touch.which, pairs)
            if touch.routed not in (None, candidate.routed):
                continue
            layout = candidate.layouts[0][touch.side]
            there = fresh[touch.kind]
            if touch.gives:
                there.clear()
            elif layout not in there:
                if NCHW not in there:
                    total += copy_time(next(iter(there)), shape)
                if layout != NCHW:
                    total += copy_time(layout, shape)
                there.add(NCHW)
            there.add(layout)
        return total


def _nearest(layout: str, offer: Sequence[Pair]) -> Pair:
    """Return the pair, of those on offer, that keeps to a layout most."""
    return max(offer, key=lambda pair: (pair[1] == layout, pair[0] == layout, pair == PLAIN))
