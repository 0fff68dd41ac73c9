"""Inputs that went wrong in public bug reports of engines like this one, and how they must end.

A failing input must end before the first iteration, or name the record where data shows it only
then. Each row holds the exit code and what the message (or, with code 0, the warnings) must say:
the place, the layer with its type, what it got and expected, and one remedy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cgdnn.netdef.weights import read_weights
from tests.cases.running import Ended, check, run

HERE = Path(__file__).parent
Enter = Callable[[str], Path]
COMMANDS: dict[str, list[str]] = json.loads((HERE / "cases.json").read_text())

OK = (0, [])
REFUSED: dict[str, tuple[int, list[str]]] = {
    # Text
    "typo_field": (
        2,
        [r"^net\.prototxt:4:84: inner_product_param has no field 'num_ouput'", "'num_output'"],
    ),
    "mixed_layer_layers": (
        2,
        [r"^net\.prototxt:4:1: `layers` \(V1\)", r"`layer`, first at net\.prototxt:1:1", "Upgrade"],
    ),
    "slash_comment": (2, [r"^net\.prototxt:1:1: '//'", "use #"]),
    "dup_scalar": (
        2,
        [r"^net\.prototxt:4:98: num_output given twice \(first at 4:84\)", r'"fc" \(InnerProduct'],
    ),
    "quoted_enum": (
        2,
        [
            r'^net\.prototxt:6:72: pool got "AVG"',
            r"expected an enum without quotes: AVE \(one of MAX, AVE, STOCHASTIC\)",
            r'"p" \(Pooling\)',
        ],
    ),
    "blobs_lr_in_layer": (
        2,
        [r"^net\.prototxt:4:62: layer has no field 'blobs_lr'", r"now `param \{ lr_mult: \.\. \}`"],
    ),
    "include_exclude": (
        2,
        [
            r'^net\.prototxt:4:62: layer "fc" \(InnerProduct\) has include rules',
            r"at net\.prototxt:4:87, exclude rules\. Keep one kind",
        ],
    ),
    # Solver
    "lr_policy_missing": (
        2,
        [r"^solver\.prototxt: lr_policy is missing", "fixed, step, exp, inv, multistep, poly, sig"],
    ),
    "lr_policy_unknown": (
        2,
        [r'^solver\.prototxt:3:1: lr_policy got "steps", expected one of fixed, step,', "'step'"],
    ),
    "step_no_stepsize": (
        2,
        [r'^solver\.prototxt:3:1: lr_policy "step" needs gamma and stepsize', "missing"],
    ),
    "iter_size_zero": (2, [r"^solver\.prototxt:10:1: iter_size got 0, expected at least 1"]),
    "solver_type_typo": (
        2,
        [r'^solver\.prototxt:10:1: type got "ADAM", expected one of SGD,', "did you mean 'Adam'"],
    ),
    "solver_type_both": (0, [r"^solver\.prototxt:11:1: solver_type says the same as type \"SGD\""]),
    "adagrad_momentum": (
        2,
        [r"^solver\.prototxt:4:1: AdaGrad takes no momentum, got 0\.9\. Remove it"],
    ),
    "snapshot_dir_missing": (0, [r"made the missing folder .*/no/such/dir"]),
    "snapshot_dir_missing_final_only": (0, [r"made the missing folder .*/no/such/dir"]),
    # Graph
    "unknown_bottom": (
        2,
        [
            r'^net\.prototxt:5:46: layer "loss" \(SoftmaxWithLoss\) has the unknown bottom "sc"',
            "did you mean 's'",
        ],
    ),
    "order": (
        2,
        [
            r'^net\.prototxt:1:41: layer "fc" \(InnerProduct\) has the unknown bottom "x"',
            r'produced later, line 4, by layer "in" \(DummyData\)\. Move',
        ],
    ),
    "phase_missing_test": (
        2,
        [
            r'^net\.prototxt:4:41: layer "fc" \(InnerProduct\) has the unknown bottom "x"',
            "in phase TEST: it is produced only in phase TRAIN",
        ],
    ),
    "loss_one_bottom": (
        2,
        [
            r'^net\.prototxt:5:1: layer "loss" \(SoftmaxWithLoss\): got 1 bottom',
            r"expected 2.*needs scores, labels",
        ],
    ),
    "dup_layer_name": (
        2,
        [
            r'^net\.prototxt:6:9: layer "fc" \(InnerProduct\) has the name of the layer',
            r"at net\.prototxt:4:1",
            "Rename one",
        ],
    ),
    **{
        name: (
            2,
            [
                rf'^net\.prototxt:4:1: layer "{layer}" \({kind}\): cannot run in place on "x"',
                "Give the top another name",
            ],
        )
        for name, layer, kind in (
            ("inplace_conv", "c", "Convolution"),
            ("inplace_ip", "fc", "InnerProduct"),
            ("inplace_pool", "p", "Pooling"),
        )
    },
    # Shapes and fields of layers
    "pool_pad_ge_kernel": (
        2,
        [
            r'^net\.prototxt:4:107: layer "p" \(Pooling\): got pad 2x2 with kernel 2x2',
            "expected pad < kernel.*Use pad 1 or less",
        ],
    ),
    "conv_kernel_gt_input": (
        2,
        [
            r'^net\.prototxt:4:94: layer "c" \(Convolution\): kernel 5x5 does not fit input',
            r"input 3x3 \(\+pad 0\)",
            "smaller kernel",
        ],
    ),
    "pool_kernel_gt_input": (
        2,
        [
            r'^net\.prototxt:4:82: layer "p" \(Pooling\): kernel 5x5 does not fit input',
            r"input 3x3 \(\+pad 0",
            "smaller kernel",
        ],
    ),
    "conv_group_bad": (
        2,
        [
            r'^net\.prototxt:4:109: layer "c" \(Convolution\): 3 input channels are not divisible',
            "by group 2",
        ],
    ),
    "conv_no_kernel": (
        2,
        [
            r'^net\.prototxt:4:60: layer "c" \(Convolution\): got kernel_size 0 times, expected',
            "Give kernel_size",
        ],
    ),
    "dropout_one": (
        2,
        [r'^net\.prototxt:4:72: layer "d" \(Dropout\): got dropout_ratio 1, expected 0 <= .* < 1'],
    ),
    "dropout_neg": (
        2,
        [r'^net\.prototxt:4:72: layer "d" \(Dropout\): got dropout_ratio -0\.5, expected 0 <= '],
    ),
    "softmax_count": (
        2,
        [
            r'^net\.prototxt:5:46: layer "loss" \(SoftmaxWithLoss\)',
            r"got shape \(4,\).*expected \(4, 1, 6, 6\)",
        ],
    ),
    "bn_untrained_test": (
        0,
        [r'^iteration 0, test net #0: net\.prototxt:4:1: layer "bn" \(BatchNorm\): .* empty'],
    ),
    # Labels
    "label_negative": (
        3,
        [
            r'^net\.prototxt:5:1: layer "loss" \(SoftmaxWithLoss\): "y", sample 0 of the batch',
            r"got -1, expected a whole number in 0\.\.4.*ignore_label: -1",
        ],
    ),
    "label_float": (
        3,
        [
            r'^net\.prototxt:5:1: layer "loss" \(SoftmaxWithLoss\): "y", sample 0 of the batch',
            r"got 1\.7, expected a whole number in 0\.\.4.*Correct the labels",
        ],
    ),
    # HDF5
    "h5_missing_key": (
        3,
        [
            r'^net\.prototxt:1:73: layer "in" \(HDF5Data\): a\.h5: has no dataset "y"',
            'got "label", "x"',
            "Name the tops",
        ],
    ),
    "h5_rows_mismatch": (
        3,
        [r'layer "in" \(HDF5Data\): a\.h5: datasets differ.* got "x" 8, "y" 7, expected one'],
    ),
    "h5_empty_file": (
        3,
        [r'layer "in" \(HDF5Data\): a\.h5: dataset "x" is empty; got 0 rows, expected at least 1'],
    ),
    "h5_list_missing_file": (
        3,
        [r'layer "in" \(HDF5Data\): list\.txt: file 2 of 2, "nope\.h5", does not exist; looked'],
    ),
    "h5_transform": (
        2,
        [r'^net\.prototxt:1:55: layer "in" \(HDF5Data\): .*got transform_param, expected none'],
    ),
    "h5_not_hdf5": (
        3,
        [r'layer "in" \(HDF5Data\): a\.h5: is not an HDF5 file', "Write it with h5py"],
    ),
    # LMDB
    "db_missing": (
        3,
        [
            r'^net\.prototxt:1:64: layer "in" \(Data\): /.*/db: database does not exist',
            "expected the folder of an LMDB.*Check `source`",
        ],
    ),
    "db_default_backend": (
        0,
        [r"/db: is an LMDB, but backend is LEVELDB.*Write `backend: LMDB`"],
    ),
    # Weights and states
    "snap_resume_caffemodel": (
        2,
        [r"^snap_iter_2\.caffemodel: is weights, expected a solver state; give it as --weights"],
    ),
    "weights_is_prototxt": (2, [r"^net\.prototxt: is a text file, expected weights; name it"]),
    "snap_empty_model": (3, [r"^t\.caffemodel: is empty, expected weights"]),
    "snap_truncated": (3, [r"^t\.solverstate: .*cut short \(300 bytes\)"]),
    "snap_truncated_model": (3, [r"^t\.caffemodel: .*cut short \(1500 bytes\)"]),
    "snap_resume_past_max": (0, [r"iteration 4 is past max_iter 3: nothing to train"]),
}
SOUND = {
    "base",
    "bn_batch_one",
    "bn_iter_size",
    "db_is_file_path",
    "db_ok",
    "db_two_layers",
    "h5_ok",
    "snap_resume_moved",
    "snap_resume_ok",
    "v1_only",
}
APART = {"db_readonly_dir"}  # has a test of its own, since it must not run as root
WAITING = {
    "h5_one_class": "`cgdnn check` is to tell; it trains meanwhile",
    "snap_h5_dup_names": "snapshot_format HDF5; its net is refused as dup_layer_name is",
    **{name: "ImageData" for name in COMMANDS if name.startswith("img_")},
}


def test_every_case_is_covered_or_waits() -> None:
    folders = {path.name for path in (HERE / "run").iterdir()}
    assert folders == set(COMMANDS)
    parts = [set(REFUSED), SOUND, APART, set(WAITING)]
    assert set().union(*parts) == folders
    assert sum(map(len, parts)) == len(folders)


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Return a function that makes a copy of a case's folder the working directory."""

    def copy(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(HERE / "run" / name, folder)
        monkeypatch.chdir(folder)
        return folder

    return copy


@pytest.mark.parametrize("name", [*REFUSED, *sorted(SOUND)])
def test_case(name: str, enter: Enter, capfd: pytest.CaptureFixture[str]) -> None:
    enter(name)
    *earlier, last = COMMANDS[name]
    for line in earlier:
        check(run(line, capfd), *OK)
    ended = run(last, capfd)
    check(ended, *REFUSED.get(name, OK))
    if name in SOUND:
        assert ended.warnings == []
        assert "Optimization Done." in ended.text


@pytest.mark.parametrize("name", ["typo_field", "label_negative", "weights_is_prototxt", "base"])
def test_case_as_a_process(name: str, enter: Enter) -> None:
    enter(name)
    words = COMMANDS[name][0].replace("{caffe}", "").split()
    process = subprocess.run(
        [sys.executable, "-m", "cgdnn", *words],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout == ""
    check(Ended(process.returncode, process.stderr), *REFUSED.get(name, OK))


def losses(text: str) -> dict[int, str]:
    return {
        int(match[1]): match[2] for match in re.finditer(r"Iteration (\d+).*, loss = (\S+)", text)
    }


@pytest.mark.parametrize("name", ["snap_resume_ok", "snap_resume_moved"])
def test_resume_repeats_the_straight_run(
    name: str, enter: Enter, capfd: pytest.CaptureFixture[str]
) -> None:
    enter(name)
    straight, resumed = (losses(run(line, capfd).text) for line in COMMANDS[name])
    assert set(straight) == {0, 1, 2, 3, 4}
    assert resumed == {iteration: straight[iteration] for iteration in (2, 3, 4)}


def test_v1_net_trains_as_its_v2_twin(enter: Enter, capfd: pytest.CaptureFixture[str]) -> None:
    folder = enter("v1_only")
    check(run(COMMANDS["v1_only"][0], capfd), *OK)
    v1 = read_weights("snap_iter_4.caffemodel")
    twin = (HERE / "run" / "base" / "net.prototxt").read_text()
    specs = "param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }"
    twin = twin.replace("inner_product_param", f"{specs} inner_product_param")
    (folder / "net.prototxt").write_text(twin)
    check(run(COMMANDS["v1_only"][0], capfd), *OK)
    v2 = read_weights("snap_iter_4.caffemodel")
    for ours, theirs in zip(v1["fc"], v2["fc"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


AS_NOBODY = """
import os, sys
from cgdnn.cli.main import main

train = ["train", "--solver=solver.prototxt"]
if os.getuid() == 0:
    # The first run imports and compiles all, for which nobody may have no right.
    assert main([*train, "snapshot_after_train=false"]) == 0
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(main(train))
"""


def test_read_only_database_is_read_by_another_user() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        shutil.copytree(HERE / "run" / "db_readonly_dir", folder)
        (folder / "db" / "lock.mdb").unlink()  # a reader that locks would have to make it
        (folder / "db" / "data.mdb").chmod(0o444)
        (folder / "db").chmod(0o555)
        Path(name).chmod(0o755)
        folder.chmod(0o777)  # for the snapshot
        process = subprocess.run(
            [sys.executable, "-c", AS_NOBODY],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        assert (folder / "snap_iter_4.solverstate").stat().st_uid != 0
        assert [path.name for path in (folder / "db").iterdir()] == ["data.mdb"]
