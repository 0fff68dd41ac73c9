from __future__ import annotations

import json
from pathlib import Path

import pytest

from cgdnn import machine
from cgdnn.errors import DataError
from cgdnn.layers._base import Candidate, Slower
from cgdnn.layers.activation import ReLU
from cgdnn.plan.lower import Lowering
from cgdnn.plan.tune import TuningTable, problem
from tests.plan.planning import assembled

NET = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 6 } } }
layer { name: "r" type: "ReLU" bottom: "x" top: "y" relu_param { negative_slope: 0.5 } }
"""


@pytest.fixture
def _two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ReLU.candidates

    def candidates(self: ReLU, which: str) -> list[Candidate]:
        (usual,) = plain(self, which)
        skips = Candidate(
            "skips_zeros",
            usual.steps,
            lambda layer: None if which != "forward" and layer.zeros > 0.8 else "too few zeros",
        )
        return [skips, Candidate("first", usual.steps), Candidate("second", usual.steps)]

    monkeypatch.setattr(ReLU, "candidates", candidates)


@pytest.mark.usefixtures("_two_kernels")
def test_the_shapes_decide_without_a_table() -> None:
    lowering = Lowering(assembled(NET), "float32", 1)
    assert lowering.chosen_names() == {
        "r.forward": "first",
        "r.backward_weights": "first",
        "r.backward_data": "first",
    }


@pytest.mark.usefixtures("_two_kernels")
def test_the_fastest_measured_one_is_chosen_if_all_are_measured() -> None:
    assembly = assembled(NET)
    key = problem(assembly.layers[1], "forward", "float32")
    assert key == "ReLU 4x6 negative_slope=0.5 forward float32"
    table = TuningTable({key: {"first": 2.0, "second": 1.0}})
    assert Lowering(assembly, "float32", 1, table).chosen_names()["r.forward"] == "second"
    partly = TuningTable({key: {"second": 1.0}})
    assert Lowering(assembly, "float32", 1, partly).chosen_names()["r.forward"] == "first"
    assert Lowering(assembly, "float64", 1, table).chosen_names()["r.forward"] == "first"


@pytest.mark.usefixtures("_two_kernels")
def test_the_share_of_zeros_is_part_of_a_backward_problem() -> None:
    assembly = assembled(NET)
    lowering = Lowering(assembly, "float32", 1)
    assembly.layers[1].layer.zeros = 0.86
    assert problem(assembly.layers[1], "backward_data", "float32").endswith("zeros 0.85")
    assert lowering.choose({})
    assert lowering.chosen_names()["r.backward_data"] == "skips_zeros"
    assert lowering.chosen_names()["r.forward"] == "first"
    assert not lowering.choose({}), "the same counts change nothing"


@pytest.mark.usefixtures("_two_kernels")
def test_a_resumed_run_keeps_its_choices() -> None:
    lowering = Lowering(assembled(NET), "float32", 1)
    lowering.choose({"r.forward": "second", "r.backward_data": "skips_zeros", "gone": "first"})
    names = lowering.chosen_names()
    assert names["r.forward"] == "second"
    assert names["r.backward_data"] == "first", "a refused candidate cannot be forced"


def test_a_measurement_goes_before_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ReLU.candidates

    def candidates(self: ReLU, which: str) -> list[Candidate]:
        (usual,) = plain(self, which)
        doubted = Candidate("doubted", usual.steps, lambda layer: Slower("looks slow"))
        return [doubted, Candidate("first", usual.steps)]

    monkeypatch.setattr(ReLU, "candidates", candidates)
    assembly = assembled(NET)
    key = problem(assembly.layers[1], "forward", "float32")

    def chosen(times: dict[str, float]) -> str:
        table = TuningTable({key: times})
        return Lowering(assembly, "float32", 1, table).chosen_names()["r.forward"]

    assert chosen({}) == "first"
    assert chosen({"doubted": 1.0, "first": 2.0}) == "doubted"
    assert chosen({"doubted": 3.0, "first": 2.0}) == "first"
    assert chosen({"doubted": 1.0}) == "first"
    assert chosen({"first": 2.0}) == "first"
    lowering = Lowering(assembly, "float32", 1)
    lowering.choose({"r.forward": "doubted"})
    assert lowering.chosen_names()["r.forward"] == "doubted"


def test_a_table_keeps_other_machines(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tuning.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"another": {"p": {"c": 1.0}}}))
    TuningTable({"q": {"d": 2.5}}).write(path)
    assert TuningTable.read(path).times == {"q": {"d": 2.5}}
    assert json.loads(path.read_text()) == {
        "another": {"p": {"c": 1.0}},
        machine.description(): {"q": {"d": 2.5}},
    }
    assert TuningTable.read(tmp_path / "none.json").times == {}


@pytest.mark.parametrize("text", ["", "[1]", '{"m": {"p": {"c": "fast"}}}', '{"m": 3}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"tuning.json: is no tuning table"):
        TuningTable.read(path)


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read: .*CGDNN_TUNING"):
        TuningTable.read(tmp_path)
