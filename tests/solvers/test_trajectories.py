"""The first iterations of Caffe's own training runs, on the real data in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cgdnn.solvers._base import Event, Iterated, Solver
from tests.solvers.conftest import REAL, ROOT

GOLDEN = ROOT / "tests" / "golden" / "trajectories"

pytestmark = [
    pytest.mark.datasets,
    pytest.mark.slow,
    pytest.mark.skipif(not REAL.is_dir(), reason="needs ../shared/datasets"),
]


def train(solver: Solver, golden: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of every iteration, and the rows of `test_it_acc_loss`."""
    losses: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, Iterated):
            losses.append(event.loss)

    solver.callbacks.append(note)
    rows = []
    for iteration in golden["test_it_acc_loss"][:, 0].astype(int):
        solver.step(iteration - solver.iter)
        for layer in solver.test_nets[0].data_layers.values():
            layer.seek(0)  # Caffe's scores are of the first 20 batches each time
        (tested,) = solver.test_all()
        rows.append([iteration, *(output.value for output in tested.outputs)])
    solver.step(len(golden["loss"]) - solver.iter)
    solver.close()
    return np.array(losses), np.array(rows)


def start(
    name: str, net: str, folder: Path, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> Solver:
    monkeypatch.chdir(folder)
    overrides = {
        "test_iter": "20",
        "test_interval": "100000",
        "test_initialization": "false",
        "snapshot_prefix": str(folder / "snap"),
    }
    return Solver(
        ROOT / "datasets" / name / f"{net}_solver.prototxt",
        overrides=overrides,
        weights=GOLDEN / f"{net}_init.caffemodel",
        exact=exact,
    )


def assert_alike(losses: np.ndarray, rows: np.ndarray, golden: Any) -> None:
    """Compare what rounding has made differ: runs in float64 leave Caffe's as far behind."""
    np.testing.assert_allclose(losses[:50], golden["loss"][:50], rtol=0.03)
    np.testing.assert_allclose(losses[-20:].mean(), golden["loss"][-20:].mean(), rtol=0.1)
    np.testing.assert_allclose(rows[:, 1], golden["test_it_acc_loss"][:, 1], atol=0.05)
    np.testing.assert_allclose(rows[:, 2], golden["test_it_acc_loss"][:, 2], rtol=0.3)


# Without `exact`, Winograd's algorithm rounds in its own way from the first iteration on.
ROUNDING = 1e-4


@pytest.mark.parametrize(("exact", "rtol"), [(True, 2e-6), (False, ROUNDING)])
def test_lenet(exact: bool, rtol: float, mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with np.load(GOLDEN / "lenet.npz") as golden:
        losses, rows = train(start("mnist", "lenet", mnist, monkeypatch, exact), golden)
        np.testing.assert_allclose(losses[:10], golden["loss"][:10], rtol=rtol)
        np.testing.assert_allclose(rows[0], golden["test_it_acc_loss"][0], rtol=rtol)
        assert_alike(losses, rows, golden)


@pytest.mark.parametrize(("exact", "rtol"), [(True, 2e-4), (False, ROUNDING)])
def test_cifar10_quick(
    exact: bool, rtol: float, cifar10: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with np.load(GOLDEN / "cifar10_quick.npz") as golden:
        losses, rows = train(start("cifar10", "cifar10_quick", cifar10, monkeypatch, exact), golden)
        np.testing.assert_allclose(losses[:10], golden["loss"][:10], rtol=rtol)
        np.testing.assert_allclose(rows[0], golden["test_it_acc_loss"][0], rtol=2e-5)
        assert_alike(losses, rows, golden)
