from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from cgdnn import machine
from cgdnn.kernels.peak import ACCUMULATORS
from cgdnn.layers._base import Candidate, Operands, Step, read_all, write_all
from cgdnn.layers.activation import ReLU
from cgdnn.plan.tune import TuningTable, problem
from cgdnn.runtime import measure as measuring
from cgdnn.runtime.measure import measure, peak_flops, tune
from tests.plan.planning import assembled

NET = """
force_backward: true
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 500 } } }
layer { name: "r" type: "ReLU" bottom: "x" top: "y" }
"""
SECONDS = {"slow": 3.0, "fast": 1.0}


class Trial:
    """Two ways to run ReLU's backward pass, on a clock that only they move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []
        self.zeros: set[float] = set()
        self.blas_threads: set[int] = set()

    def candidates(self, which: str) -> list[Candidate]:
        return [self._candidate(name) for name in SECONDS] if which == "backward_data" else []

    def _candidate(self, name: str) -> Candidate:
        def run(dy: np.ndarray[Any, Any], dx: np.ndarray[Any, Any]) -> None:
            self.now += SECONDS[name]
            self.ran.append(name)
            self.zeros.add(float(np.mean(dy == 0)))
            pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
            self.blas_threads.update(pool["num_threads"] for pool in pools)

        def steps(layer: ReLU, operands: Operands) -> list[Step]:
            (dy,), (dx,) = operands.top_diff, operands.bottom_diff
            return [Step(run, [read_all(dy), write_all(dx)])]

        return Candidate(name, steps)


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Trial:
    made = Trial()
    plain: Callable[[ReLU, str], list[Candidate]] = ReLU.candidates
    monkeypatch.setattr(
        ReLU, "candidates", lambda layer, which: made.candidates(which) or plain(layer, which)
    )
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def names(times: list[tuple[Candidate, float]]) -> list[tuple[str, float]]:
    return [(candidate.name, seconds) for candidate, seconds in times]


def test_each_candidate_gets_the_seconds_of_one_run(trial: Trial) -> None:
    times = measure(assembled(NET), 1, "backward_data", "float32")
    assert names(times) == [("slow", 3.0), ("fast", 1.0)]


def test_candidates_take_turns_after_they_have_warmed_up(trial: Trial) -> None:
    measure(assembled(NET), 1, "backward_data", "float32", rounds=4)
    assert [name for name, _ in groupby(trial.ran)] == ["slow", "fast"] * 5


def test_a_short_candidate_runs_often_in_its_turn(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "TURN_SECONDS", 6.0)
    times = measure(assembled(NET), 1, "backward_data", "float32", rounds=1)
    assert trial.ran[4:] == ["slow"] * 2 + ["fast"] * 6
    assert names(times) == [("slow", 3.0), ("fast", 1.0)]


def test_only_the_given_candidates_run(trial: Trial) -> None:
    given = trial.candidates("backward_data")[1:]
    times = measure(assembled(NET), 1, "backward_data", "float32", candidates=given)
    assert names(times) == [("fast", 1.0)]


def test_the_gradient_has_the_zeros_asked_for(trial: Trial) -> None:
    assembly = assembled(NET)
    measure(assembly, 1, "backward_data", "float32")
    assert trial.zeros == {0.0}
    assembly.layers[1].layer.zeros = 0.4
    measure(assembly, 1, "backward_data", "float32")
    measure(assembly, 1, "backward_data", "float32", zeros=0.9)
    assert sorted(trial.zeros) == pytest.approx([0.0, 0.4, 0.9], abs=0.03)  # of 2,000 values


@pytest.mark.parametrize("threads", [1, 2])
def test_blas_has_the_threads_of_the_run(trial: Trial, threads: int) -> None:
    measure(assembled(NET), 1, "backward_data", "float32", threads=threads)
    assert trial.blas_threads <= {threads}


def test_what_the_table_lacks_is_tuned(trial: Trial) -> None:
    assembly = assembled(NET)
    table, lines = TuningTable(), list[str]()
    tune(assembly, "float32", table, lines.append)
    key = problem(assembly.layers[1], "backward_data", "float32")
    assert table.times == {key: {"slow": 3000.0, "fast": 1000.0}}
    assert lines == ["r.backward_data: fast 1000.000 ms, slow 3000.000 ms"]
    trial.ran.clear()
    tune(assembly, "float32", table, lines.append)
    assert not trial.ran
    assert lines[0] == lines[1]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float64", 8)])
def test_the_peak_counts_every_lane_of_every_multiply_add(
    dtype: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(measuring, "PEAK_ROUNDS", 10)
    lanes = machine.vector_bytes() // size
    assert peak_flops.__wrapped__(dtype) == 2 * lanes * ACCUMULATORS * 10
