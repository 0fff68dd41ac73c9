"""Other inputs of the kinds that `test_cases` has one sample of each.

Each row changes the sound net or solver below by replacements, and tells the exit code and what
the message (with code 0: the warnings) must say.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from cgdnn.data.dataset import write_mean
from cgdnn.data.datum import encode_datum
from cgdnn.data.lmdb import write_lmdb
from cgdnn.proto.cgdnn_pb2 import NetParameter
from tests.cases.running import check, run

NET = """\
layer { name: "in" type: "DummyData" top: "x" top: "y"
  dummy_data_param { shape { dim: 4 dim: 3 dim: 8 dim: 8 } shape { dim: 4 }
    data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool"
  pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "pool" top: "s"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "s" bottom: "y" top: "loss" }
"""
SOLVER = """\
net: "net.prototxt"
base_lr: 0.01
lr_policy: "fixed"
momentum: 0.9
max_iter: 2
snapshot_prefix: "snap"
"""
TRAIN = "{caffe} train --solver=solver.prototxt"

GOLDEN = Path(__file__).parents[1] / "golden"

Edits = list[tuple[str, str]]
Row = tuple[Edits, int, list[str]]

IN_NET: dict[str, Row] = {
    "sound": ([], 0, []),
    # Text
    "layer field misspelt": (
        [('bottom: "x"', 'botom: "x"')],
        2,
        [r"^net\.prototxt:4:42: layer has no field 'botom' - did you mean 'bottom'", '"conv"'],
    ),
    "field of another layer": (
        [("kernel_size: 2 stride", "pad_size: 1 stride")],
        2,
        [r"^net\.prototxt:7:29: pooling_param has no field 'pad_size'", r'"pool" \(Pooling\)'],
    ),
    "top-level field misspelt": (
        [('layer { name: "loss"', 'layr { name: "loss"')],
        2,
        [r"^net\.prototxt:10:1: .*no field 'layr' - did you mean 'layer'"],
    ),
    "brace missing": (
        [('"loss" }', '"loss"')],
        2,
        [r"^net\.prototxt:10:1: layer { is not closed", '"loss"'],
    ),
    "brace too many": (
        [('"loss" }', '"loss" } }')],
        2,
        [r"^net\.prototxt:10:84: '}' closes nothing"],
    ),
    "quote missing": ([('top: "loss"', 'top: "loss')], 2, [r"^net\.prototxt:10:\d+: "]),
    "text for a number": (
        [("num_output: 5", 'num_output: "five"')],
        2,
        [r"^net\.prototxt:9:25: num_output got .*five"],
    ),
    "fraction for a whole number": (
        [("num_output: 5", "num_output: 5.5")],
        2,
        [r"^net\.prototxt:9:25: num_output got 5\.5"],
    ),
    "negative for an unsigned number": (
        [("num_output: 5", "num_output: -5")],
        2,
        [r"^net\.prototxt:9:25: num_output got -5"],
    ),
    "number beyond its type": (
        [("num_output: 5", "num_output: 4294967296")],
        2,
        [r"^net\.prototxt:9:25: num_output got 4294967296"],
    ),
    "enum misspelt": (
        [("pool: MAX", "pool: MAXX")],
        2,
        [r"^net\.prototxt:7:19: pool has no value MAXX", "MAX, AVE, STOCHASTIC", "did you mean"],
    ),
    "block comment": (
        [('layer { name: "loss"', '/* loss */ layer { name: "loss"')],
        2,
        [r"^net\.prototxt:10:1: ", "#"],
    ),
    "doubled message": (
        [("stride: 2 } }", "stride: 2 } pooling_param { pool: AVE } }")],
        2,
        [r"^net\.prototxt:7:56: pooling_param given twice \(first at 7:3\)"],
    ),
    "V1 type in a V2 layer": (
        [('type: "Pooling"', "type: POOLING")],
        2,
        [r"^net\.prototxt:6:22: type got 'POOLING', expected a string in quotes"],
    ),
    "V1 multipliers in a V2 layer": (
        [('name: "fc"', 'name: "fc" weight_decay: 1')],
        2,
        [r"^net\.prototxt:8:20: layer has no field 'weight_decay'", "decay_mult"],
    ),
    "type misspelt": (
        [('"Convolution"', '"Convolutoin"')],
        2,
        [r'^net\.prototxt:4:22: layer "conv": unknown layer type "Convolutoin"', '"Convolution"'],
    ),
    "type missing": (
        [(' type: "Pooling"', "")],
        2,
        [r'^net\.prototxt:6:1: layer "pool".*type'],
    ),
    # Graph
    "top misspelt": (
        [('top: "pool"', 'top: "pol"')],
        2,
        [
            r'^net\.prototxt:8:41: layer "fc" \(InnerProduct\) has the unknown bottom "pool"',
            "'pol'",
        ],
    ),
    "two producers": (
        [('bottom: "pool" top: "s"', 'bottom: "pool" top: "conv"')],
        2,
        [r'^net\.prototxt:8:56: layer "fc" \(InnerProduct\) produces "conv", which layer "conv"'],
    ),
    "label not given": (
        [
            (' top: "y"', ""),
            (" shape { dim: 4 }", ""),
            (' data_filler { type: "constant" value: 1 }', ""),
        ],
        2,
        [r'^net\.prototxt:10:58: layer "loss" .* unknown bottom "y"'],
    ),
    "three bottoms for a loss": (
        [('bottom: "s" bottom: "y" top', 'bottom: "s" bottom: "y" bottom: "x" top')],
        2,
        [r'layer "loss" \(SoftmaxWithLoss\): got 3 bottom blob\(s\), expected 2'],
    ),
    "LRN in place": (
        [
            ('"Pooling" bottom: "conv" top: "pool"', '"LRN" bottom: "conv" top: "conv"'),
            ("pooling_param { pool: MAX kernel_size: 2 stride: 2 }", ""),
            ('bottom: "pool"', 'bottom: "conv"'),
        ],
        2,
        [r'^net\.prototxt:6:1: layer "pool" \(LRN\): cannot run in place on "conv"'],
    ),
    "loss in place": (
        [('bottom: "y" top: "loss"', 'bottom: "y" top: "s"')],
        2,
        [r'^net\.prototxt:10:1: layer "loss" \(SoftmaxWithLoss\): cannot run in place on "s"'],
    ),
    "no loss": (
        [
            (
                NET[NET.index('layer { name: "loss"') :],
                "",
            )
        ],
        2,
        [r"^net\.prototxt: the net has no loss", "SoftmaxWithLoss"],
    ),
    "empty net": ([(NET, "# nothing\n")], 2, [r"^net\.prototxt: "]),
    "no rule leaves a layer": (
        [(" }\nlayer", " include { phase: TEST } }\nlayer")],
        2,
        [r'unknown bottom "x".*produced only in phase TEST'],
    ),
    "weights without a name": (
        [('name: "fc" ', "")],
        2,
        [r'^net\.prototxt:8:1: layer "" \(InnerProduct\): has no name.*Give it one'],
    ),
    # Shapes and fields
    "pad as large as an uneven kernel": (
        [("kernel_size: 2 stride: 2", "kernel_h: 3 kernel_w: 1 pad_h: 1 pad_w: 1")],
        2,
        [r'^net\.prototxt:7:\d+: layer "pool" \(Pooling\): got pad 1x1 with kernel 3x1'],
    ),
    "dilated kernel beyond the input": (
        [("kernel_size: 3", "kernel_size: 3 dilation: 4")],
        2,
        [r'layer "conv" \(Convolution\): .*3x3.* 9x9.* does not fit input 8x8'],
    ),
    "kernel beyond a padded input": (
        [("kernel_size: 3", "kernel_size: 13 pad: 2")],
        2,
        [
            r'^net\.prototxt:5:37: layer "conv" \(Convolution\): kernel 13x13 does not fit',
            r"fit input 8x8 \(\+pad 2",
        ],
    ),
    "outputs not divisible by the group": (
        [("num_output: 4 kernel_size: 3", "num_output: 4 kernel_size: 3 group: 3")],
        2,
        [r'layer "conv" \(Convolution\): num_output 4 is not divisible by group 3.* 3 or 6'],
    ),
    "group 0": (
        [("kernel_size: 3", "kernel_size: 3 group: 0")],
        2,
        [r'^net\.prototxt:5:52: layer "conv" \(Convolution\): .*group 0\. Use group 1 or more'],
    ),
    "stride 0": (
        [("stride: 2", "stride: 0")],
        2,
        [r'^net\.prototxt:7:44: layer "pool" \(Pooling\): got stride 0'],
    ),
    "pooling without kernel": (
        [("kernel_size: 2 stride: 2", "")],
        2,
        [r'layer "pool" \(Pooling\): got no kernel, expected kernel_size'],
    ),
    "one kernel side only": (
        [("kernel_size: 2 stride: 2", "kernel_h: 2")],
        2,
        [r'layer "pool" \(Pooling\): .*kernel'],
    ),
    "too many kernel sizes": (
        [("kernel_size: 3", "kernel_size: 3 kernel_size: 3 kernel_size: 3")],
        2,
        [r'^net\.prototxt:5:37: layer "conv" \(Convolution\): got kernel_size 3 times, expected'],
    ),
    "labels of another batch size": (
        [("shape { dim: 4 }", "shape { dim: 3 }")],
        2,
        [r'^net\.prototxt:10:46: layer "loss" .*got shape \(3,\).*expected \(4, 1\)'],
    ),
    "num_output missing": (
        [("num_output: 5 ", "")],
        2,
        [r'layer "fc" \(InnerProduct\): got num_output 0, expected 1 or more'],
    ),
    "axis beyond the bottom": (
        [("num_output: 5", "num_output: 5 axis: 4")],
        2,
        [r'^net\.prototxt:9:39: layer "fc" \(InnerProduct\): axis 4 does not exist'],
    ),
    "filler misspelt": (
        [
            (
                'num_output: 5 weight_filler { type: "xavier"',
                'num_output: 5 weight_filler { type: "xaver"',
            )
        ],
        2,
        [
            r'^net\.prototxt:9:55: layer "fc" \(InnerProduct\): unknown filler type; got "xaver"',
            '"xavier"',
        ],
    ),
    "dropout over 1": (
        [
            ('type: "Pooling"', 'type: "Dropout" dropout_param { dropout_ratio: 1.5 }'),
            ("pooling_param { pool: MAX kernel_size: 2 stride: 2 }", ""),
        ],
        2,
        [r'^net\.prototxt:6:\d+: layer "pool" \(Dropout\): got dropout_ratio 1\.5, expected 0 <='],
    ),
    "more than fits in memory": (
        [("num_output: 5", "num_output: 4294967295")],
        1,
        ["out of memory"],
    ),
    # Labels
    "label too large": (
        [("value: 1", "value: 5")],
        3,
        [r'layer "loss" .*"y", sample 0 of the batch: label 5 is outside 0\.\.4; got 5'],
    ),
    "label too large for a score": (
        [
            ("value: 1", "value: 5"),
            (
                NET[NET.index('layer { name: "loss"') :],
                NET[NET.index('layer { name: "loss"') :]
                + 'layer { name: "score" type: "Accuracy" bottom: "s" bottom: "y" top: "a" }',
            ),
        ],
        3,
        [r'layer "loss" .*"y", sample 0 of the batch: label 5 .* range of "s" \(5 classes'],
    ),
    "label not a number": (
        [("value: 1", "value: nan")],
        3,
        [r'layer "loss" .*"y", sample 0 of the batch: label nan is not a whole number; got nan'],
    ),
    "label -1 ignored": (
        [
            ("value: 1", "value: -1"),
            ('top: "loss" }', 'top: "loss" loss_param { ignore_label: -1 } }'),
        ],
        0,
        [],
    ),
    "fractions as targets": (
        [
            ("value: 1", "value: 1.7"),
            ("shape { dim: 4 }", "shape { dim: 4 dim: 5 }"),
            ("SoftmaxWithLoss", "EuclideanLoss"),
        ],
        0,
        [],
    ),
}

IN_SOLVER: dict[str, Row] = {
    "field misspelt": (
        [("momentum", "momentun")],
        2,
        [r"^solver\.prototxt:4:1: .*no field 'momentun' - did you mean 'momentum'"],
    ),
    "base_lr missing": ([("base_lr: 0.01\n", "")], 2, [r"^solver\.prototxt: base_lr is missing"]),
    "max_iter missing": ([("max_iter: 2\n", "")], 2, [r"^solver\.prototxt: max_iter is missing"]),
    "max_iter negative": (
        [("max_iter: 2", "max_iter: -2")],
        2,
        [r"^solver\.prototxt:5:1: max_iter got -2, expected at least 0"],
    ),
    "momentum 1": (
        [("momentum: 0.9", "momentum: 1")],
        2,
        [r"^solver\.prototxt:4:1: momentum got 1, expected at least 0 and below 1"],
    ),
    "rate not a number": (
        [("base_lr: 0.01", "base_lr: nan")],
        2,
        [r"^solver\.prototxt:2:1: base_lr got nan, expected a finite number"],
    ),
    "step size 0": (
        [('"fixed"', '"step" gamma: 0.1 stepsize: 0')],
        2,
        [r"^solver\.prototxt:3:30: stepsize got 0, expected at least 1"],
    ),
    "multistep without steps": (
        [('"fixed"', '"multistep" gamma: 0.1')],
        2,
        [r'^solver\.prototxt:3:1: lr_policy "multistep" needs .*stepvalue'],
    ),
    "inv without power": (
        [('"fixed"', '"inv" gamma: 0.1')],
        2,
        [r'^solver\.prototxt:3:1: lr_policy "inv" needs .*power'],
    ),
    "policy in capitals": (
        [('"fixed"', '"Fixed"')],
        2,
        [r'^solver\.prototxt:3:1: lr_policy got "Fixed"', "did you mean 'fixed'"],
    ),
    "negative iter_size": (
        [("max_iter", "iter_size: -1 max_iter")],
        2,
        [r"^solver\.prototxt:5:1: iter_size got -1, expected at least 1"],
    ),
    "average_loss 0": (
        [("max_iter", "average_loss: 0 max_iter")],
        2,
        [r"^solver\.prototxt:5:1: average_loss got 0, expected at least 1"],
    ),
    "solver_type and type differ": (
        [("max_iter", 'type: "Adam" solver_type: SGD max_iter')],
        2,
        [r"^solver\.prototxt:5:14: .*solver_type", "Adam"],
    ),
    "RMSProp with momentum": (
        [("max_iter", 'type: "RMSProp" max_iter')],
        2,
        [r"^solver\.prototxt:4:1: RMSProp takes no momentum, got 0\.9"],
    ),
    "no net": (
        [('net: "net.prototxt"\n', "")],
        2,
        [r"^solver\.prototxt: the training net is given"],
    ),
    "two nets": (
        [("max_iter", 'train_net: "net.prototxt" max_iter')],
        2,
        [r"^solver\.prototxt:5:1: the training net is given by net and train_net"],
    ),
    "net of another name": (
        [('"net.prototxt"', '"nets.prototxt"')],
        2,
        [r'^solver\.prototxt:1:1: net "nets\.prototxt" does not exist; looked in /', "Correct"],
    ),
    "test net of another name": (
        [("max_iter", 'test_net: "test.prototxt" test_iter: 1 test_interval: 1 max_iter')],
        2,
        [r'^solver\.prototxt:5:1: test_net "test\.prototxt" does not exist'],
    ),
    "net is a folder": (
        [('"net.prototxt"', '"."')],
        2,
        [r'^solver\.prototxt:1:1: net "\." does not exist|^\.: cannot be read: Is a directory'],
    ),
    "test_iter without interval": (
        [("max_iter", "test_iter: 1 max_iter")],
        2,
        [r"^solver\.prototxt:5:1: test_iter without test_interval"],
    ),
    "a net as solver": ([(SOLVER, NET)], 0, []),
    "empty solver": ([(SOLVER, "")], 2, [r"^solver\.prototxt: is empty"]),
    "prefix below a file": (
        [('"snap"', '"net.prototxt/snap"')],
        1,
        [r"^snapshot_prefix: cannot write to .*/net\.prototxt: "],
    ),
}


def edited(text: str, edits: Edits) -> str:
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    return tmp_path


@pytest.mark.parametrize("name", IN_NET)
def test_net(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edits, code, patterns = IN_NET[name]
    (folder / "net.prototxt").write_text(edited(NET, edits))
    check(run(TRAIN, capfd), code, patterns)


@pytest.mark.parametrize("name", IN_SOLVER)
def test_solver(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edits, code, patterns = IN_SOLVER[name]
    (folder / "solver.prototxt").write_text(edited(SOLVER, edits))
    check(run(TRAIN, capfd), code, patterns)


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b""])
def test_byte_order_mark_and_crlf_are_read_over(
    mark: bytes, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path, text in ((folder / "net.prototxt", NET), (folder / "solver.prototxt", SOLVER)):
        path.write_bytes(mark + text.replace("\n", "\r\n").encode())
    check(run(TRAIN, capfd), 0, [])
    broken = NET.replace("num_output: 5", "num_ouput: 5").replace("\n", "\r\n")
    (folder / "net.prototxt").write_bytes(mark + broken.encode())
    check(run(TRAIN, capfd), 2, [r"^net\.prototxt:9:25: "])


# Data

HDF5 = 'type: "HDF5Data" top: "x" top: "y" hdf5_data_param { source: "list.txt" batch_size: 4 } }\n'
DATA = 'type: "Data" top: "x" top: "y" data_param { source: "db" batch_size: 4 backend: LMDB } }\n'


def with_data(layer: str) -> str:
    return 'layer { name: "in" ' + layer + NET[NET.index('layer { name: "conv"') :]


def write_h5(name: str, **datasets: np.ndarray) -> None:
    with h5py.File(name, "w") as file:
        for key, array in datasets.items():
            file[key] = array


def pictures(count: int, size: int = 8) -> np.ndarray:
    return np.zeros((count, 3, size, size), np.float32)


@pytest.fixture
def h5(folder: Path) -> Path:
    (folder / "net.prototxt").write_text(with_data(HDF5))
    write_h5("a.h5", x=pictures(6), y=np.zeros(6, np.float32))
    write_h5("b.h5", x=pictures(6), y=np.zeros(6, np.float32))
    (folder / "list.txt").write_text("a.h5\nb.h5\n")
    return folder


def test_sound_hdf5(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(run(TRAIN, capfd), 0, [])


def test_blank_lines_in_the_list(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (h5 / "list.txt").write_bytes(b"a.h5\r\n\r\nb.h5\r\n\n")
    check(run(TRAIN, capfd), 0, [])


def test_list_missing(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (h5 / "list.txt").unlink()
    check(run(TRAIN, capfd), 3, [r'layer "in" \(HDF5Data\): /.*/list\.txt: list .* does not exist'])


def test_list_empty(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (h5 / "list.txt").write_text("\n")
    check(run(TRAIN, capfd), 3, [r"list\.txt: lists no files; got 0 names, expected at least 1"])


def test_hdf5_file_instead_of_a_list(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(h5 / "a.h5", h5 / "list.txt")
    check(run(TRAIN, capfd), 3, [r"list\.txt: is not a readable text file"])


def test_second_file_has_other_shapes(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_h5("b.h5", x=pictures(6, 9), y=np.zeros(6, np.float32))
    check(run(TRAIN, capfd), 3, [r"b\.h5: .*\(3, 9, 9\).*\(3, 8, 8\)"])


def test_second_file_lacks_a_dataset(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_h5("b.h5", x=pictures(6), Y=np.zeros(6, np.float32))
    check(run(TRAIN, capfd), 3, [r'b\.h5: has no dataset "y"; got "Y", "x"'])


def test_file_is_torn(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = (h5 / "b.h5").read_bytes()
    (h5 / "b.h5").write_bytes(whole[: len(whole) // 2])
    check(run(TRAIN, capfd), 3, [r"b\.h5: "])


def test_text_in_a_dataset(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_h5("a.h5", x=pictures(6), y=np.array([b"a"] * 6))
    check(run(TRAIN, capfd), 3, [r'a\.h5: dataset "y" cannot be a blob; got 1 axes of type \|S1'])


def test_label_of_one_row_is_named(h5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_h5("b.h5", x=pictures(6), y=np.array([0, 0, 0, 7, 0, 0], np.float32))
    ended = run(f"{TRAIN} --max-iter=4", capfd)
    check(ended, 3, [r'"y", sample 1 of the batch: label 7 is outside 0\.\.4'])


@pytest.fixture
def db(folder: Path) -> Path:
    (folder / "net.prototxt").write_text(with_data(DATA))
    write_lmdb("db", (encode_datum(np.zeros((3, 8, 8), np.uint8), 1) for _ in range(9)))
    return folder


def transform(folder: Path, text: str) -> None:
    net = folder / "net.prototxt"
    net.write_text(
        net.read_text().replace("data_param", f"transform_param {{ {text} }} data_param", 1)
    )


def test_sound_lmdb(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(run(TRAIN, capfd), 0, [])


def test_folder_without_a_database(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(db / "db")
    (db / "db").mkdir()
    check(run(TRAIN, capfd), 3, [r'layer "in" \(Data\): /.*/db: '])


def test_text_file_as_database(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(db / "db")
    (db / "db").write_text("no database")
    check(run(TRAIN, capfd), 3, [r'layer "in" \(Data\): /.*/db: '])


def test_garbage_as_database(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (db / "db" / "data.mdb").write_bytes(b"no database" * 1000)
    check(run(TRAIN, capfd), 3, [r'layer "in" \(Data\): /.*/db'])


def test_torn_database(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = db / "db" / "data.mdb"
    data.write_bytes(data.read_bytes()[:5000])
    check(run(TRAIN, capfd), 3, [r'layer "in" \(Data\): /.*/db'])


def test_empty_database(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(db / "db")
    write_lmdb("db", ())
    check(run(TRAIN, capfd), 3, [r'layer "in" \(Data\): /.*/db: .*(empty|no records)'])


def test_path_with_a_slash_at_the_end(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    net = db / "net.prototxt"
    net.write_text(net.read_text().replace('"db"', '"db/"'))
    check(run(TRAIN, capfd), 0, [])


def test_path_of_the_lock_file(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (db / "db" / "lock.mdb").write_bytes(b"")
    net = db / "net.prototxt"
    net.write_text(net.read_text().replace('"db"', '"db/lock.mdb"'))
    check(run(TRAIN, capfd), 3, [r'layer "in" \(Data\): /.*/db/lock\.mdb: '])


def test_database_of_leveldb(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(db / "db")
    shutil.copytree(GOLDEN / "data" / "images_leveldb", db / "db")
    check(run(TRAIN, capfd), 3, [r'layer "in" \(Data\): /.*/db: .*LevelDB'])


def test_mean_of_another_size(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_mean("mean.binaryproto", np.zeros((1, 3, 4, 4), np.uint8))
    transform(db, 'mean_file: "mean.binaryproto"')
    check(
        run(TRAIN, capfd),
        3,
        [r"mean\.binaryproto does not fit .*got 3 x 4 x 4, expected 3 x 8 x 8"],
    )


def test_record_that_is_no_datum(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(db / "db")
    good = encode_datum(np.zeros((3, 8, 8), np.uint8), 1)
    write_lmdb("db", [good] * 5 + [b"\xff\xff\xff"] + [good] * 3)
    check(run(TRAIN, capfd), 3, [r'db, record 5 \("00000005"\)'])


def test_record_of_another_size(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(db / "db")
    records = [np.zeros((3, 8, 8), np.uint8)] * 5 + [np.zeros((3, 7, 8), np.uint8)]
    write_lmdb("db", (encode_datum(picture, 1) for picture in records))
    check(run(TRAIN, capfd), 3, [r'db, record 5 \("00000005"\).*3 x 7 x 8.*3 x 8 x 8'])


def test_windows_path(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    net = db / "net.prototxt"
    text = net.read_text()
    for path in (r"c:\new\train_db", r"c:\data\db"):
        net.write_text(text.replace('"db"', f'"{path}"'))
        check(run(TRAIN, capfd), 2, [r"^net\.prototxt:1:64: ", r"/ or \\\\"])


@pytest.mark.parametrize(
    ("fields", "code", "pattern"),
    [
        (
            "mean_value: 1 mean_value: 2",
            2,
            r"mean_value is given 2 times .* 3 channels; expected 1 or 3",
        ),
        ('mean_file: "none.binaryproto"', 3, r"none\.binaryproto"),
        ('mean_file: "net.prototxt"', 2, r"net\.prototxt: is a text file, expected a mean image"),
        ("crop_size: 9", 2, r"crop_size 9 is larger than the picture; got 8 x 8"),
        ("mean_value: 1 mean_value: 2 mean_value: 3", 0, ""),
    ],
)
def test_transform(
    fields: str, code: int, pattern: str, db: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    transform(db, fields)
    check(run(TRAIN, capfd), code, [pattern] if code else [])


def test_data_without_a_name(db: Path, capfd: pytest.CaptureFixture[str]) -> None:
    net = db / "net.prototxt"
    net.write_text(net.read_text().replace('name: "in" ', ""))
    check(run(TRAIN, capfd), 2, [r'^net\.prototxt:1:1: layer "" \(Data\): has no name'])


# Weights and states


def test_weights_that_match_no_layer(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(run(TRAIN, capfd), 0, [])
    other = NET.replace('name: "conv"', 'name: "conv2"').replace('name: "fc"', 'name: "fc2"')
    (folder / "net.prototxt").write_text(other)
    ended = run(f"{TRAIN} --weights=snap_iter_2.caffemodel", capfd)
    check(ended, 1, [r"^snap_iter_2\.caffemodel: no layer of the file \(conv, fc\) is in the net"])


def test_weights_with_the_name_of_two_layers_in_a_test(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(run(TRAIN, capfd), 0, [])
    twice = NET.replace(
        'layer { name: "loss"',
        'layer { name: "fc" type: "ReLU" bottom: "s" top: "s" }\nlayer { name: "loss"',
    )
    (folder / "net.prototxt").write_text(twice)
    check(run(TRAIN, capfd), 2, [r'^net\.prototxt:10:9: layer "fc" \(ReLU\) has the name of'])
    ended = run("{caffe} test --model=net.prototxt --weights=snap_iter_2.caffemodel", capfd)
    check(ended, 0, [r'^net\.prototxt:10:9: layer "fc" \(ReLU\) has the name of'])


@pytest.mark.parametrize(("shape", "code"), [((1, 1, 5, 36), 0), ((5, 36, 1, 1), 1)])
def test_weights_of_old_files_have_four_axes(
    shape: tuple[int, ...], code: int, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(run(TRAIN, capfd), 0, [])
    model = NetParameter.FromString(Path("snap_iter_2.caffemodel").read_bytes())
    (blob,) = (layer.blobs[0] for layer in model.layer if layer.name == "fc")
    blob.ClearField("shape")
    blob.num, blob.channels, blob.height, blob.width = shape
    Path("old.caffemodel").write_bytes(model.SerializeToString())
    ended = run(f"{TRAIN} --weights=old.caffemodel", capfd)
    text = re.escape(f"fc[0] has shape {shape}, expected (5, 36)")
    check(ended, code, [text] if code else [])


def test_weights_of_another_shape(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(run(TRAIN, capfd), 0, [])
    (folder / "net.prototxt").write_text(NET.replace("num_output: 5", "num_output: 6"))
    ended = run(f"{TRAIN} --weights=snap_iter_2.caffemodel", capfd)
    check(ended, 1, [r"^snap_iter_2\.caffemodel: fc\[0\] has shape \(5, 36\), expected \(6, 36\)"])


@pytest.mark.parametrize(
    ("option", "code", "pattern"),
    [
        ("--weights=h5.caffemodel", 2, r"h5\.caffemodel: is an HDF5 file, expected weights"),
        ("--weights=none.caffemodel", 3, r"/none\.caffemodel: cannot be read: No such file"),
        ("--snapshot=none.solverstate", 3, r"/none\.solverstate: cannot be read: No such file"),
        ("--snapshot=solver.prototxt", 2, r"solver\.prototxt: is a text file, expected a solver"),
        ("--weights=snap_iter_2.solverstate", 2, r"is a solver state, expected weights; .*--snap"),
        ("--snapshot=.", 3, "cannot be read: Is a directory"),
    ],
)
def test_wrong_kind_of_file(
    option: str, code: int, pattern: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(run(TRAIN, capfd), 0, [])
    write_h5("h5.caffemodel")
    check(run(f"{TRAIN} {option}", capfd), code, [pattern])


def test_solver_missing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(run("{caffe} train --solver=none.prototxt", capfd), 2, [r"none\.prototxt: no such file"])


def test_override_of_a_field_that_is_none(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(run(f"{TRAIN} base_rl=0.1", capfd), 2, ["base_rl", "did you mean 'base_lr'"])
