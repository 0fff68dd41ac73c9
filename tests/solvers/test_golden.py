"""Caffe's own values: weights, losses and histories of SGD, and its snapshots."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cgdnn.netdef.state import read_state
from cgdnn.netdef.weights import read_weights
from cgdnn.proto.cgdnn_pb2 import NetParameter, SolverState
from cgdnn.solvers._base import RULES, Solver

GOLDEN = Path(__file__).parents[1] / "golden"
WEIGHTS_AT = (1, 2, 3, 10, 20)

Array = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def _in_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)


def type_of(path: Path) -> str:
    with np.load(path) as values:
        return str(json.loads(str(values["meta"]))["type"])


CASES = sorted(
    path.stem
    for path in (GOLDEN / "solvers").glob("*.npz")
    if type_of(path) in {f"{name}Solver" for name in RULES}
)


def load(name: str) -> dict[str, Array]:
    with np.load(f"{name}.npz") as values:
        return dict(values)


def section(values: dict[str, Array], prefix: str) -> dict[str, Array]:
    return {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}


def assert_close(got: Array, want: Array, what: str) -> None:
    assert got.shape == want.shape, what
    tolerance = 1e-4 * max(1e-3, float(np.abs(want).max()))
    worst = float(np.abs(got.astype(np.float64) - want).max())
    assert worst <= tolerance, f"{what}: differs by {worst:.3g}, tolerance {tolerance:.3g}"


def assert_weights(solver: Solver, values: dict[str, Array], prefix: str) -> None:
    wanted = section(values, prefix)
    assert wanted
    for key, want in wanted.items():
        layer, index = key.split("/")
        assert_close(solver.net.params[layer][int(index)].data, want, f"{prefix}{key}")


def start(name: str, folder: Path, values: dict[str, Array]) -> Solver:
    overrides = {"snapshot_prefix": str(folder / "snap")}
    solver = Solver(f"{name}.prototxt", overrides=overrides, threads=2)
    for key, value in section(values, "init/").items():
        layer, index = key.split("/")
        solver.net.params[layer][int(index)].data[...] = value
    return solver


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, tmp_path: Path) -> None:
    values = load(f"solvers/{name}")
    solver = start(f"solvers/{name}", tmp_path, values)
    losses = []
    for iteration in range(1, 21):
        solver.step(1)
        losses.append(solver.net.loss)
        if iteration in WEIGHTS_AT:
            assert_weights(solver, values, f"iter{iteration}/")
    assert_close(np.array(losses), values["loss_last_batch"], "losses")
    _, path = solver.snapshot()
    history = read_state(path).history
    for number, want in section(values, "history20/").items():
        assert_close(history[int(number)], want, f"history20/{number}")
    solver.close()


# Snapshots. The golden run reads 4 rows an iteration of 40, so after 10 iterations it is at row 0
# again, where a state without a position starts.


def test_restored_snapshot_of_caffe_holds_its_weights_and_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = load("snap/sgd")
    solver = start("snap/solver_sgd", tmp_path, values)
    solver.restore("snap/sgd_iter_10.solverstate")
    assert "holds no data position" in caplog.text
    assert solver.iter == 10
    assert_weights(solver, values, "iter10/")
    state = read_state("snap/sgd_iter_10.solverstate")
    assert state.current_step == values["current_step10"]
    for number, want in section(values, "history10/").items():
        np.testing.assert_array_equal(state.history[int(number)], want)
    solver.close()


def test_run_resumed_from_a_snapshot_of_caffe_ends_as_its_own(tmp_path: Path) -> None:
    values = load("snap/sgd")
    solver = start("snap/solver_sgd", tmp_path, values)
    solver.step(3)  # the restored data position is 0 wherever the solver was before
    solver.restore("snap/sgd_iter_10.solverstate")
    solver.step(10)
    assert_weights(solver, values, "resumed20/")
    solver.close()


def test_own_snapshot_equals_that_of_caffe(tmp_path: Path) -> None:
    solver = start("snap/solver_sgd", tmp_path, load("snap/sgd"))
    solver.step(10)
    model, path = solver.snapshot()
    solver.close()
    theirs, ours = SolverState(), SolverState()
    theirs.ParseFromString(Path("snap/sgd_iter_10.solverstate").read_bytes())
    ours.ParseFromString(Path(path).read_bytes())
    assert (ours.iter, ours.current_step) == (theirs.iter, theirs.current_step)
    assert ours.learned_net == model
    assert [list(blob.shape.dim) for blob in ours.history] == [
        list(blob.shape.dim) for blob in theirs.history
    ]
    for got, want in zip(ours.history, theirs.history, strict=True):
        assert_close(np.array(got.data), np.array(want.data), "history")

    theirs, ours = NetParameter(), NetParameter()
    theirs.ParseFromString(Path("snap/sgd_iter_10.caffemodel").read_bytes())
    ours.ParseFromString(Path(model).read_bytes())
    assert ours.name == theirs.name
    assert [(layer.name, layer.type) for layer in ours.layer] == [
        (layer.name, layer.type) for layer in theirs.layer
    ]
    for mine, caffes in zip(ours.layer, theirs.layer, strict=True):
        assert [list(blob.shape.dim) for blob in mine.blobs] == [
            list(blob.shape.dim) for blob in caffes.blobs
        ]
    for layer, blobs in read_weights("snap/sgd_iter_10.caffemodel").items():
        for got, want in zip(read_weights(model)[layer], blobs, strict=True):
            assert_close(got, want, layer)
