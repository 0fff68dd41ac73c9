from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cgdnn.cli.main import main
from cgdnn.errors import NonFiniteError
from cgdnn.layers._base import COUNTER, Buffer, Operands, Step, update_all
from cgdnn.layers.inner_product import InnerProduct
from cgdnn.layers.structure import Flatten
from cgdnn.solvers._base import Event, Iterated, Solver
from tests.solvers.training import bits

NET = """
layer { name: "rows" type: "HDF5Data" top: "x" top: "y" include { phase: TRAIN }
  hdf5_data_param { source: "train.txt" batch_size: 4 } }
layer { name: "rows" type: "HDF5Data" top: "x" top: "y" include { phase: TEST }
  hdf5_data_param { source: "test.txt" batch_size: 4 } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool"
  pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "flat" type: "Flatten" bottom: "pool" top: "flat" }
layer { name: "fc1" type: "InnerProduct" bottom: "flat" top: "fc1"
  inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "fc2" type: "InnerProduct" bottom: "fc1" top: "fc2"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc2" bottom: "y" top: "loss" }
"""
SOLVER = """
net: "net.prototxt" base_lr: 0.01 momentum: 0.9 lr_policy: "fixed" max_iter: 6 snapshot: 2
snapshot_prefix: "snap" test_iter: 2 test_interval: 4 test_initialization: false
"""
FIRST_BAD = 3


def write_rows(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    with h5py.File(f"{name}.h5", "w") as rows:
        rows["x"] = random.normal(size=(40, 2, 6, 6)).astype(np.float32)
        rows["y"] = random.integers(0, 3, 40).astype(np.float32)
    Path(f"{name}.txt").write_text(f"{name}.h5\n")


def spoil_rows(name: str, row: int, value: float) -> None:
    with h5py.File(f"{name}.h5", "r+") as rows:
        rows["x"][row, 1, 2, 3] = value


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows("train", 1)
    write_rows("test", 2)
    Path("net.prototxt").write_text(NET)
    Path("solver.prototxt").write_text(SOLVER)


def fail(before: Callable[[Solver], None] | None = None) -> str:
    """Train until it fails; check what must hold after any failure; return the message."""
    solver = Solver("solver.prototxt", threads=2)
    try:
        if before is not None:
            before(solver)
        files: dict[str, bytes] = {}

        def note(event: Event) -> None:
            if isinstance(event, Iterated) and event.iteration == FIRST_BAD:
                files.update({path.name: path.read_bytes() for path in Path().glob("snap*")})

        solver.callbacks.append(note)
        with pytest.raises(NonFiniteError) as caught:
            solver.solve()
        assert caught.value.exit_code == 4
        assert set(files) == {"snap_iter_2.caffemodel", "snap_iter_2.solverstate"}
        assert {path.name: path.read_bytes() for path in Path().glob("snap*")} == files
        assert not list(Path().glob(".*.tmp"))
        return str(caught.value)
    finally:
        solver.close()


def after(iteration: int, action: Callable[[Solver], None]) -> Callable[[Solver], None]:
    def install(solver: Solver) -> None:
        def act(event: Event) -> None:
            if isinstance(event, Iterated) and event.iteration == iteration:
                action(solver)

        solver.callbacks.append(act)

    return install


def poison(
    monkeypatch: pytest.MonkeyPatch,
    layer: Any,
    which: str,
    target: Callable[[Operands], Buffer],
    name: str,
) -> None:
    """Let pass `which` of the layer `name` write one NaN in iteration FIRST_BAD."""
    plain = getattr(layer, which)

    def write(array: np.ndarray, counter: int) -> None:
        if counter == FIRST_BAD:
            array.flat[array.size // 2] = np.nan

    def poisoned(self: Any, operands: Operands) -> list[Step]:
        steps: list[Step] = plain(self, operands)
        if self.node.name == name:
            steps.append(Step(write, [update_all(target(operands)), COUNTER]))
        return steps

    monkeypatch.setattr(layer, which, poisoned)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_data(value: float) -> None:
    spoil_rows("train", 4 * FIRST_BAD + 1, value)
    message = fail()
    assert message.startswith(f'iteration {FIRST_BAD}: the loss "loss" is not finite')
    assert re.search(r'first non-finite array is of layer "rows" \(HDF5Data\), blob "x"', message)


@pytest.mark.parametrize("name", ["conv", "fc2"])
def test_weights(name: str) -> None:
    def spoil(solver: Solver) -> None:
        solver.net.params[name][0].data.flat[1] = np.nan

    message = fail(after(FIRST_BAD, spoil))
    assert message.startswith(f'iteration {FIRST_BAD}: the loss "loss" is not finite')
    assert re.search(rf'of layer "{name}" \(\w+\), weights {name}\[0\]', message)


@pytest.mark.parametrize(("layer", "name"), [(InnerProduct, "fc1"), (Flatten, "flat")])
def test_activation(monkeypatch: pytest.MonkeyPatch, layer: Any, name: str) -> None:
    poison(monkeypatch, layer, "forward", lambda operands: operands.top[0], name)
    message = fail()
    assert message.startswith(f'iteration {FIRST_BAD}: the loss "loss" is not finite')
    # Flatten shares its memory with the layer below, so this is where the NaN lies first.
    first = {"fc1": '"fc1" (InnerProduct), blob "fc1"', "flat": '"pool" (Pooling), blob "pool"'}
    assert f"first non-finite array is of layer {first[name]}" in message


def test_gradient_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, InnerProduct, "backward_weights", lambda o: o.param_diff[0], "fc1")
    message = fail()
    assert message.startswith(f"iteration {FIRST_BAD}: the gradient of fc1[0]")
    assert 'first non-finite array is of layer "fc1" (InnerProduct), gradient of fc1[0]' in message


def test_gradient_of_a_blob_names_the_layer_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, InnerProduct, "backward_data", lambda o: o.bottom_diff[0], "fc2")
    message = fail()
    assert re.match(rf"iteration {FIRST_BAD}: the gradient of (conv|fc1)\[\d\]", message)
    assert (
        'first non-finite array is of layer "fc1" (InnerProduct), gradient of blob "fc1"' in message
    )


def test_sub_iteration() -> None:
    Path("solver.prototxt").write_text(SOLVER + "iter_size: 2\n")
    spoil_rows("train", (2 * FIRST_BAD + 1) * 4, np.nan)  # in the second half of iteration 3
    solvers: list[Solver] = []
    message = fail(solvers.append)
    assert message.startswith(f"iteration {FIRST_BAD}: the loss is not finite")
    assert 'layer "rows" (HDF5Data), blob "x"' in message
    # Both halves come again when the iteration is tried again.
    assert solvers[0].net.data_layers["rows"].position == 2 * FIRST_BAD * 4
    assert solvers[0].net.counter == 2 * FIRST_BAD


def test_rate_that_is_too_high() -> None:
    Path("solver.prototxt").write_text(SOLVER.replace("base_lr: 0.01", "base_lr: 1e30"))
    solver = Solver("solver.prototxt", threads=1)
    with pytest.raises(NonFiniteError, match=r"iteration \d: .*Lower base_lr"):
        solver.solve()
    solver.close()
    assert not list(Path().glob("snap*"))


def test_weights_stay_as_they_were_where_the_loss_is_not_finite() -> None:
    spoil_rows("train", 4 * FIRST_BAD, np.nan)
    solver = Solver("solver.prototxt", threads=2)
    solver.step(FIRST_BAD)
    before = bits(solver)
    with pytest.raises(NonFiniteError):
        solver.step(1)
    assert (solver.iter, bits(solver)) == (FIRST_BAD, before)
    with pytest.raises(NonFiniteError):  # the batch is still the same one
        solver.step(1)
    solver.close()


@pytest.mark.parametrize("iter_size", [1, 2])
def test_running_sums_stay_as_they_were_where_the_iteration_fails(iter_size: int) -> None:
    norm = 'layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" }\n'
    relu = 'layer { name: "relu"'
    Path("net.prototxt").write_text(NET.replace(relu, norm + relu))
    Path("solver.prototxt").write_text(SOLVER + f"iter_size: {iter_size}\n")
    spoil_rows("train", (iter_size * (FIRST_BAD + 1) - 1) * 4, np.nan)
    solver = Solver("solver.prototxt", threads=2)
    solver.step(FIRST_BAD)
    before = bits(solver)
    with pytest.raises(NonFiniteError):
        solver.step(1)
    assert bits(solver) == before
    solver.close()


def test_test_net() -> None:
    spoil_rows("test", 5, np.nan)
    solver = Solver("solver.prototxt", threads=2)
    with pytest.raises(NonFiniteError) as caught:
        solver.solve()
    solver.close()
    assert str(caught.value).startswith('iteration 4: output "loss" of test net #0 is not finite')
    assert 'layer "rows" (HDF5Data), blob "x"' in str(caught.value)


def test_snapshot_of_weights_that_are_not_finite_is_refused() -> None:
    solver = Solver("solver.prototxt", threads=1)
    solver.step(2)
    files = {path.name: path.read_bytes() for path in Path().glob("snap*")}
    solver.net.params["fc1"][1].data[0] = np.inf
    with pytest.raises(NonFiniteError, match='iteration 2: weights of layer "fc1"'):
        solver.snapshot()
    solver.close()
    assert {path.name: path.read_bytes() for path in Path().glob("snap*")} == files


def test_command_line_ends_with_4(capfd: pytest.CaptureFixture[str]) -> None:
    spoil_rows("train", 4 * FIRST_BAD, np.nan)
    assert main(["train", "solver.prototxt"]) == 4
    assert re.search(r'error: iteration 3: .*layer "rows" \(HDF5Data\)', capfd.readouterr().err)
