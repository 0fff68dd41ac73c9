"""Every description that Caffe aborts on is refused by an error that names a place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cgdnn.errors import CgdnnError, DataError, DescriptionError
from cgdnn.layers._registry import layer_types
from cgdnn.runtime.net import Net
from cgdnn.solvers._base import Solver

GOLDEN = Path(__file__).parents[1] / "golden"
ABORTS: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in json.loads((GOLDEN / "aborts.json").read_text())
}
ACCEPTED = {
    "flatten_axes": "Caffe accepts it too",
    "bn_1d": "one axis is one channel",
    "force_backward_accuracy": "what has no gradient is left out",
    "softmaxloss_two_tops": "the second top has the probabilities",
    "softmaxloss_two_tops_weights": "the second top has the probabilities",
    "solver_snapshot_dir": "the folder is made, with a warning",
    "solver_type_both": "both say the same, so it is a warning",
}
IN_DATA = {"data_missing_db", "hdf5_missing_dataset"}
# The message, where it is not the layer's place alone that matters.
SAID = {
    "unknown_type": r':3:3: layer "l": unknown layer type "Nope"',
    "unknown_bottom": r':5:3: layer "l" \(ReLU\) has the unknown bottom "z"',
    "duplicate_top": r':12:3: layer "b" \(TanH\) produces "y", which layer "a"',
    "too_many_bottoms": r":3:1: .*got 2 bottom blob\(s\), expected 1",
    "too_few_bottoms": r":2:1: .*got 1 bottom blob\(s\), expected at least 2",
    "conv_kernel_too_big": r":7:37: .*kernel 9x9 does not fit input 6x6 \(\+pad 0\)",
    "conv_group_out": r":7:52: .*num_output 3 is not divisible by group 2",
    "pool_global_kernel": r":7:40: .*kernel_size 2 with global_pooling, expected none",
    "lrn_even": r":7:15: .*got local_size 4, expected an odd number",
    "eltwise_coeff_count": r":9:19: .*got 1 coeff values, expected 2",
    "accuracy_topk": r":9:20: .*got top_k 5, expected 1 to 4",
    "axis_out_of_range": r":7:19: .*axis 2 does not exist .*expected -2 to 1",
    "share_shape": r':14:3: .*shared with layer "a"; got shape \(4, 3\), expected \(3, 3\)',
    "share_lr_mismatch": r':14:3: .*"w" has lr_mult 2, but 1 in layer "a"',
    "bilinear_filler_2d": r':7:55: .*"bilinear" .*got shape \(2, 3\)',
    "unknown_filler": r':7:55: .*got "magic", expected one of bilinear, constant',
    "data_crop_too_big": r":6:21: .*crop_size 9 is larger .*got 8 x 9",
    "data_missing_db": r":6:16: .*/nowhere: database does not exist",
    "dummy_fillers_count": r":7:22: .*data_filler is given 2 time\(s\), expected once",
    "solver_step_no_stepsize": r":6:1: .*needs gamma and stepsize, but stepsize is missing",
    "solver_rms_decay": r":8:1: rms_decay got 1, expected at least 0 and below 1",
}


def known(entry: dict[str, Any]) -> bool:
    types = re.findall(r'^ *type: "(\w+)"', entry["prototxt"], re.MULTILINE)
    return entry["kind"] == "solver" or set(types) <= {*layer_types(), "Nope"}


NAMES = [name for name, entry in ABORTS.items() if known(entry)]


def run(entry: dict[str, Any], folder: Path) -> Net:
    """Do what Caffe refuses to do; return the net that ran, a solver's training net."""
    path = folder / "description.prototxt"
    path.write_text(entry["prototxt"])
    if entry["kind"] == "solver":
        solver = Solver(path, threads=1)
        solver.close()
        return solver.net
    net = Net(path, entry["phase"], threads=1)
    if entry["kind"] in ("forward", "backward"):
        net.forward()
    if entry["kind"] == "backward":
        net.backward()
    net.close()
    return net


@pytest.fixture(autouse=True)
def _in_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ACCEPTED])
def test_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CgdnnError) as caught:
        run(ABORTS[name], tmp_path)
    assert isinstance(caught.value, DataError if name in IN_DATA else DescriptionError)
    message = str(caught.value)
    # What is missing in a solver has no line.
    line = "" if name in ("solver_no_net", "solver_no_policy") else r":\d+:\d+"
    assert re.match(rf"{re.escape(str(tmp_path))}/description\.prototxt{line}: ", message)
    assert re.search(SAID.get(name, ""), message), message
    assert message.rstrip().endswith((".", "?"))


@pytest.mark.parametrize("name", [name for name in NAMES if name in ACCEPTED])
def test_accepted(name: str, tmp_path: Path) -> None:
    entry = dict(ABORTS[name])
    entry["prototxt"] = entry["prototxt"].replace("/nonexistent_dir", f"{tmp_path}/nonexistent")
    net = run(entry, tmp_path)
    assert net.first_non_finite() is None
