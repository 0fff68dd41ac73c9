from __future__ import annotations

from pathlib import Path

import pytest

from cgdnn.netdef.read import read_solver
from cgdnn.solvers._base import Solver
from cgdnn.solvers.default import default_solver
from tests.solvers.training import RECORDS, write_run

DUMMY = """
layer { name: "in" type: "DummyData" top: "x" top: "y"
  dummy_data_param { shape { dim: 2 dim: 3 } shape { dim: 2 } data_filler { value: 1 } } }
layer { name: "fc" type: "InnerProduct" bottom: "x" top: "s" inner_product_param { num_output: 2 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "s" bottom: "y" top: "loss" }
"""


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_ten_epochs_and_a_test_of_one(tmp_path: Path) -> None:
    write_run(tmp_path, batch=9)
    param = default_solver("net.prototxt")
    # 40 pictures in batches of 9 are the longer source (there are 26 rows).
    assert param.max_iter == -(-10 * RECORDS // 9)
    assert list(param.test_iter) == [-(-RECORDS // 7)]
    assert param.test_interval == param.max_iter
    assert (param.net, param.snapshot_prefix) == ("net.prototxt", "net")
    shown = (param.base_lr, param.momentum, param.weight_decay, param.gamma, param.power)
    assert shown == pytest.approx((0.01, 0.9, 0.0005, 0.0001, 0.75))
    assert (param.lr_policy, param.type) == ("inv", "SGD")
    read_solver(param)


def test_no_test_without_layers_of_the_test_phase() -> None:
    Path("net.prototxt").write_text(DUMMY)
    param = default_solver(Path("net.prototxt"))
    assert param.max_iter == 1000
    assert not param.test_iter


@pytest.mark.parametrize(
    "rule", ["include { phase: TEST }", "exclude { phase: TRAIN }", "include { phase: TRAIN }"]
)
def test_a_rule_of_phase_makes_a_test(rule: str) -> None:
    layer = f'layer {{ name: "end" type: "Silence" bottom: "s" {rule} }}\n'
    Path("net.prototxt").write_text(DUMMY + layer)
    found = default_solver("net.prototxt")
    # A layer for training alone leaves nothing that is there for a test.
    assert list(found.test_iter) == ([] if "include { phase: TRAIN" in rule else [10])


def test_it_trains(tmp_path: Path) -> None:
    write_run(tmp_path)
    solver = Solver(
        default_solver("net.prototxt"), overrides={"max_iter": "2", "test_interval": "2"}, threads=1
    )
    assert solver.solve()
    solver.close()
    assert Path("net_iter_2.solverstate").exists()
