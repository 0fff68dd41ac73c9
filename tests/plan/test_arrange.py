"""Which layouts layers work in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from cgdnn.layers._base import Candidate, Pair
from cgdnn.layers._layout import lanes
from cgdnn.plan.arrange import PLAIN, Arrangement
from cgdnn.plan.layout import copy_time
from cgdnn.plan.lower import Lowering
from cgdnn.plan.shapes import Assembly
from tests.plan.planning import assembled

LANES: Pair = ("nchwn", "nchwn")
SHAPE = (2 * lanes(), 3, 4, 4)
COPY = copy_time("nchwn", SHAPE)

# data (with a gradient) -> a -> b -> c
NET = f"""
force_backward: true
layer {{ name: "data" type: "Input" top: "data"
  input_param {{ shape {{ {" ".join(f"dim: {size}" for size in SHAPE)} }} }} }}
layer {{ name: "a" type: "ReLU" bottom: "data" top: "a" }}
layer {{ name: "b" type: "ReLU" bottom: "a" top: "b" }}
layer {{ name: "c" type: "ReLU" bottom: "b" top: "c" }}
"""


class Costs:
    """Makes arrangements of the net in which a pass of a layer takes a given time in each pair."""

    def __init__(self, assembly: Assembly, lane_times: dict[str, float]):
        self.assembly = assembly
        self.lane_times = lane_times

    def offers(self) -> list[list[Pair]]:
        names = [planned.node.name for planned in self.assembly.layers]
        return [[PLAIN, LANES] if name in self.lane_times else [PLAIN] for name in names]

    def candidate(self, index: int, which: str, pairs: Sequence[Pair]) -> Candidate:
        return Candidate("one", lambda layer, operands: [], layouts=(pairs[index],))

    def time(self, index: int, which: str, candidate: Candidate) -> float:
        name = self.assembly.layers[index].node.name
        return 10 * COPY if candidate.layouts[0] == PLAIN else self.lane_times[name]

    def best(self) -> list[str]:
        """Return the names of the layers that are to work in lanes."""
        arrangement = Arrangement(self.assembly, self.offers(), self.candidate, self.time)
        pairs = arrangement.best()
        return [
            planned.node.name
            for planned, pair in zip(self.assembly.layers, pairs, strict=True)
            if pair == LANES
        ]


@pytest.mark.parametrize(
    ("lane_times", "expected"),
    [
        # a pass forward and one backward: 20 copies' time without lanes
        ({"b": 9 * COPY}, []),  # saves 2, costs 4 copies: its bottom and top, data and diff
        ({"b": 7 * COPY}, ["b"]),
        # each alone would not pay
        ({"a": 9 * COPY, "b": 9 * COPY, "c": 9 * COPY}, ["a", "b", "c"]),
        ({"a": 9.5 * COPY, "b": 9.5 * COPY}, []),
        # one in the middle that loses less than the copies around it would cost
        ({"a": 5 * COPY, "b": 11 * COPY, "c": 5 * COPY}, ["a", "b", "c"]),
        ({"a": 5 * COPY, "b": 13 * COPY, "c": 5 * COPY}, ["a", "c"]),
    ],
)
def test_lanes_where_they_save_more_than_the_copies_cost(lane_times, expected):
    assert Costs(assembled(NET), lane_times).best() == expected


def test_nothing_is_faster_than_what_is_found():
    assembly = assembled(NET)
    for times in product([2.0, 8.5, 9.8, 12.0], repeat=3):
        lane_times = dict(zip("abc", (time * COPY for time in times), strict=True))
        costs = Costs(assembly, lane_times)
        arrangement = Arrangement(assembly, costs.offers(), costs.candidate, costs.time)
        everything = range(len(assembly.layers)), range(len(assembly.blobs))
        found = arrangement._total(arrangement.best(), *everything)
        least = min(arrangement._total(pairs, *everything) for pairs in product(*costs.offers()))
        assert found == pytest.approx(least), times


def test_copies_that_are_reckoned_with_are_those_of_the_program():
    names = "abc"
    for chosen in product([PLAIN, LANES], repeat=3):
        assembly = assembled(NET)
        costs = Costs(assembly, dict.fromkeys(names, 0.0))
        lowering = Lowering(assembly, "float32", 1)
        pairs_of = [PLAIN, *chosen]
        lowering.choices = [
            {which: replace(candidate, layouts=(pair,)) for which, candidate in choices.items()}
            for choices, pair in zip(lowering.choices, pairs_of, strict=True)
        ]
        program = lowering.program(("forward", "backward"), 0, len(assembly.layers))
        copies = {task.name.partition("[")[0] for task in program.tasks if ".to_" in task.name}
        arrangement = Arrangement(assembly, costs.offers(), costs.candidate, costs.time)
        blobs = range(len(assembly.blobs))
        assert arrangement._total(pairs_of, [], blobs) == pytest.approx(len(copies) * COPY)
