"""Weights have the same bits at any number of threads, and in every run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from cgdnn.plan.lower import PASSES
from cgdnn.plan.tune import ZERO_STEPS, TuningTable, problem
from cgdnn.runtime.net import Net
from cgdnn.solvers._base import Solver
from tests.solvers.conftest import ROOT
from tests.solvers.training import bits, write_run

THREADS = (1, 2, 3, 8)


def digests(iterations: int, make: Callable[..., Solver]) -> list[str]:
    """Train at every number of threads, and once more; return the digests of the weights."""
    found = []
    for threads in (*THREADS, THREADS[-1]):
        solver = make(threads=threads)
        solver.step(iterations)
        found.append(bits(solver))
        solver.close()
    return found


def shipped(
    net: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> functools.partial[Solver]:
    name = {"lenet": "mnist", "cifar10_quick": "cifar10"}[net]
    folder = request.getfixturevalue(name)
    monkeypatch.chdir(folder)
    path = ROOT / "datasets" / name / f"{net}_solver.prototxt"
    overrides = {"test_initialization": "false", "snapshot_prefix": str(folder / "snap")}
    return functools.partial(Solver, path, overrides=overrides)


@pytest.mark.slow
@pytest.mark.parametrize(("net", "iterations"), [("lenet", 200), ("cifar10_quick", 50)])
def test_shipped_nets(
    net: str, iterations: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(set(digests(iterations, shipped(net, request, monkeypatch)))) == 1


def each_in_turn(net: Net) -> TuningTable:
    """Return a table by which each candidate of a pass is the fastest at some shares of zeros.

    The second one where there are none, and only there.
    """
    times = {}
    for planned in net.assembly.layers:
        layer = planned.layer
        for which in PASSES:
            serving = [c.name for c in layer.candidates(which) if c.serves(layer)]
            others = max(1, len(serving) - 1)
            for step in range(ZERO_STEPS + 1):
                layer.zeros = step / ZERO_STEPS
                fastest = 1 if step == 0 else 2 + step % others
                times[problem(planned, which, net.dtype)] = {
                    name: float((place - fastest) % len(serving))
                    for place, name in enumerate(serving)
                }
    return TuningTable(times)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("net", ["lenet", "cifar10_quick"])
def test_kernels_of_a_table(
    net: str, exact: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = functools.partial(shipped(net, request, monkeypatch), exact=exact)
    plain = make()
    table = each_in_turn(plain.net)
    plain.close()
    chosen = []

    def tuned(threads: int) -> Solver:
        solver = make(threads=threads, tuning=table)
        chosen.append((solver, solver.net.lowering.chosen_names()))
        return solver

    assert len(set(digests(25, tuned))) == 1
    solver, first = chosen[0]
    assert first != plain.net.lowering.chosen_names()
    assert first != solver.net.lowering.chosen_names()


# Dropout, mirror, random crop, shuffle, BatchNorm and iter_size 2.


@pytest.mark.parametrize("batch", [9, 64])
def test_net_with_all_that_is_random(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_run(tmp_path, "iter_size: 2\nclip_gradients: 1\n", batch)
    assert len(set(digests(12, functools.partial(Solver, path)))) == 1


def test_tests_and_displays_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = Solver(write_run(tmp_path), threads=2)
    plain.step(8)
    plain.close()
    watched = Solver(
        write_run(tmp_path, "test_iter: 3\ntest_interval: 2\ndisplay: 1\nsnapshot: 3\n"), threads=2
    )
    watched.callbacks.append(lambda event: watched.net.first_non_finite())
    watched.step(8)
    watched.close()
    assert bits(watched) == bits(plain)


def test_another_seed_gives_other_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_run(tmp_path)
    found = set()
    for seed in ("1", "2", "-1"):  # an unset seed is 1
        solver = Solver(path, threads=1, overrides={"random_seed": seed})
        solver.step(2)
        found.add(bits(solver))
        solver.close()
    assert len(found) == 2
