"""Kernels chosen anew during a run: at the same iterations in every run, and on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cgdnn.layers._base import Candidate, Operands, Step, update_all
from cgdnn.layers.inner_product import InnerProduct
from cgdnn.plan.tune import TuningTable
from cgdnn.solvers import _base
from cgdnn.solvers._base import Solver
from tests.solvers.training import bits, write_run

PASS = "fc.backward_weights"


class ByZeros(dict[str, dict[str, float]]):
    """Times by which "plain" is faster without zeros, and "other" with some."""

    def get(self, problem: str, _default: Any = None) -> dict[str, float]:
        few = "zeros" not in problem or "zeros 0.00" in problem
        return {"plain": 1.0, "other": 2.0 if few else 0.5}


def add_a_little(dw: np.ndarray) -> None:
    dw += 1e-3


def other(layer: InnerProduct, operands: Operands) -> list[Step]:
    """Return steps whose result tells that it was they that ran."""
    steps = InnerProduct.backward_weights(layer, operands)
    return [*steps, Step(add_a_little, [update_all(operands.param_diff[0])])]


@pytest.fixture(autouse=True)
def _two_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def candidates(self: InnerProduct, which: str) -> list[Candidate]:
        plain = Candidate("plain", lambda layer, operands: getattr(layer, which)(operands))
        return [plain, Candidate("other", other)] if which == "backward_weights" else [plain]

    monkeypatch.setattr(InnerProduct, "candidates", candidates)
    monkeypatch.setattr(_base, "_COUNT_AT", (4, 9))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, "snapshot: 3\n")
    net = Path("net.prototxt")
    # The gradient of "fc" has zeros where the ReLU above it has.
    relu = 'layer { name: "last" type: "ReLU" bottom: "fc" top: "fc" }\n'
    net.write_text(
        net.read_text().replace('layer { name: "fc_row"', f'{relu}layer {{ name: "fc_row"')
    )


def start(threads: int = 1) -> Solver:
    return Solver("solver.prototxt", threads=threads, tuning=TuningTable(ByZeros()))


def choice(solver: Solver) -> str:
    return solver.net.lowering.chosen_names()[PASS]


def test_zeros_are_counted_at_stated_iterations() -> None:
    solver = start()
    solver.step(3)
    assert choice(solver) == "plain"
    solver.step(1)
    assert choice(solver) == "other"
    assert 0 < solver.net.count_zeros()["fc"] < 1
    solver.close()


@pytest.mark.parametrize("snapshot", [3, 6])
def test_a_resumed_run_has_the_choices_and_bits_of_an_uninterrupted_one(snapshot: int) -> None:
    straight = start()
    straight.solve()
    straight.close()
    resumed = start(threads=2)
    resumed.restore(f"snap_iter_{snapshot}.solverstate")
    assert choice(resumed) == ("plain" if snapshot < 4 else "other")
    resumed.solve()
    resumed.close()
    assert bits(resumed) == bits(straight)


def test_restoring_an_earlier_snapshot_takes_its_choices_back() -> None:
    solver = start()
    solver.step(6)
    end = bits(solver)
    solver.restore("snap_iter_3.solverstate")
    assert choice(solver) == "plain"
    solver.step(3)
    solver.close()
    assert bits(solver) == end
