import csv
import json
import os
import pty
import re
import subprocess
import sys

import pytest

import cgdnn
from cgdnn.netdef.state import read_state
from tests.cli.caffe_logs import LOGS, parse_log

SOLVER = "logs/solver.prototxt"


def skeleton(text):
    """Return the lines from "Solving" on, without prefixes, with # for every number."""
    lines = [line.partition("] ")[2] for line in text.splitlines() if "] " in line]
    begin = next(i for i, line in enumerate(lines) if line.startswith("Solving"))
    numbers = re.compile(r"(?<![#\w])-?\d+(\.\d+)?(e[+-]\d+)?")
    return [numbers.sub("#", line).replace("#s/", "#s/") for line in lines[begin:]]


def test_parse_log_reads_what_caffes_own_reader_read():
    tables = parse_log((LOGS / "train.log").read_text())
    for kind, rows in tables.items():
        with (LOGS / "parsed" / f"train.log.{kind.lower()}").open() as file:
            wanted = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        assert rows == wanted


def test_the_log_has_caffes_lines(cgdnn):
    code, out, err = cgdnn("train", SOLVER)
    assert code == 0
    assert out == ""
    only_caffes = ("Waiting for data", "Restarting data prefetching", "MultiStep Status")
    golden = [
        line
        for line in skeleton((LOGS / "train.log").read_text())
        if not line.startswith(only_caffes)
    ]
    # Caffe says "Optimization Done." twice; here the second line sums the run up.
    assert skeleton(err)[:-1] == golden[:-1]
    assert re.search(r"\] 12 iterations in \S+ s, \d+ images/s; last test \(net #0\): acc", err)


def test_the_log_is_read_by_log_tools(cgdnn):
    _, _, err = cgdnn("train", SOLVER)
    tables, golden = parse_log(err), parse_log((LOGS / "train.log").read_text())
    for kind, rows in tables.items():
        assert [row.keys() for row in rows] == [row.keys() for row in golden[kind]]
        for name in ("NumIters", "LearningRate"):
            assert [row[name] for row in rows] == [row[name] for row in golden[kind]]
    assert tables["Test"][-1]["accuracy"] > 0.8


def test_every_line_has_a_prefix_of_glog(cgdnn):
    _, _, err = cgdnn("train", SOLVER, "--gpu", "0")
    prefix = re.compile(r"[IW]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ \w+\.py:\d+\] (    )?\S")
    assert [line for line in err.splitlines() if not prefix.match(line)] == []
    assert len(re.findall(r"^W.*--gpu", err, re.MULTILINE)) == 1


def test_snapshots_are_those_of_the_solver(cgdnn, folder):
    cgdnn("train", SOLVER)
    assert sorted(os.listdir(folder / "logs" / "snap")) == [
        f"tiny_iter_{n}.{kind}" for n in (12, 6) for kind in ("caffemodel", "solverstate")
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["--max-iter", "3", SOLVER, "base_lr=0.25"],
        ["base_lr=0.25", "max_iter=3", SOLVER, "--threads", "1"],
        [SOLVER, "--threads=1", "max_iter=7", "base_lr=0.25", "--max-iter=3"],
    ],
)
def test_fields_are_replaced_wherever_they_stand(cgdnn, words):
    code, _, err = cgdnn("train", *words)
    assert code == 0
    assert "Iteration 0, lr = 0.25\n" in err
    assert "Iteration 3, loss = " in err


@pytest.mark.parametrize("dashes", ["-", "--"])
def test_caffes_spelling_resumes(cgdnn, folder, dashes):
    cgdnn("train", SOLVER)
    state = "logs/snap/tiny_iter_6.solverstate"
    whole = cgdnn_weights(folder / "logs/snap/tiny_iter_12.caffemodel")
    code, _, err = cgdnn("train", f"{dashes}solver={SOLVER}", f"{dashes}snapshot", state)
    assert code == 0
    assert f"Resuming from {state}\n" in err
    assert "] 6 iterations in " in err
    resumed = cgdnn_weights(folder / "logs/snap/tiny_iter_12.caffemodel")
    assert resumed == whole


def cgdnn_weights(path):
    net = cgdnn.Net("logs/train_val.prototxt", weights=path)
    try:
        return {name: [blob.data.tobytes() for blob in blobs] for name, blobs in net.params.items()}
    finally:
        net.close()


def test_weights_start_a_run(cgdnn, folder):
    cgdnn("train", SOLVER)
    weights = "logs/snap/tiny_iter_12.caffemodel"
    code, _, err = cgdnn("train", "--solver", SOLVER, "--weights", weights, "--max-iter=1")
    assert code == 0
    assert f"Finetuning from {weights}\n" in err
    assert parse_log(err)["Test"][0]["accuracy"] > 0.8


def test_a_bare_net_trains_with_the_default_solver(cgdnn, folder):
    code, _, err = cgdnn("train", "logs/train_val.prototxt", "--max-iter", "5", "display=2")
    assert code == 0
    assert "logs/train_val.prototxt is a net, so it is trained with the default solver: " in err
    assert "max_iter: 5, " in err
    assert "random_seed 1 (none is given)\n" in err
    assert "Iteration 0, lr = 0.01\n" in err
    assert [row["NumIters"] for row in parse_log(err)["Test"]] == [5]
    assert (folder / "logs" / "train_val_iter_5.solverstate").exists()


def test_the_data_is_named_where_a_note_lies_beside_it(cgdnn, folder):
    (folder / "data").unlink()
    (folder / "data").mkdir()
    for name in ("log_train_lmdb", "log_test_lmdb"):
        (folder / "data" / name).symlink_to(LOGS.parent / "data" / name)
    (folder / "data" / "SOURCE.txt").write_text("two kinds of stripes,\ndrawn\n")
    _, _, err = cgdnn("train", SOLVER, "--max-iter", "1")
    assert "Data of data/log_train_lmdb: two kinds of stripes, drawn\n" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "error: train: got 0 files (none)"),
        ([SOLVER, "--solver", SOLVER], 2, "error: train: got 2 files"),
        ([SOLVER, "--weights=a.caffemodel", "--snapshot=b.solverstate"], 2, "Leave one out."),
        (["missing.prototxt"], 2, "error: missing.prototxt: no such file"),
        (["logs/bad_syntax.prototxt"], 2, "error: logs/bad_syntax.prototxt:"),
        ([SOLVER, "base_lt=0.1"], 2, "base_lt=0.1: "),
        ([SOLVER, "--threads", "0"], 2, "got 0 threads"),
        ([SOLVER, "--snapshot", "logs/solver.prototxt"], 2, "error: logs/solver.prototxt"),
        ([SOLVER, "--weights", "missing.caffemodel"], 3, "missing.caffemodel: cannot be read"),
        ([SOLVER, "base_lr=1e38", "test_initialization=false"], 4, "error: iteration "),
    ],
)
def test_failures_are_one_message_and_a_code(cgdnn, folder, words, code, said):
    got, _, err = cgdnn("train", *words)
    assert got == code
    assert said in err
    assert len(re.findall("^error: ", err, re.MULTILINE)) == 1
    assert "Traceback" not in err
    assert os.listdir(folder / "logs" / "snap") == []


def test_missing_data_ends_with_3(cgdnn, folder):
    (folder / "data").unlink()
    code, _, err = cgdnn("train", SOLVER)
    assert code == 3
    assert "log_train_lmdb" in err


def test_a_terminal_gets_a_bar(folder):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cgdnn", "train", SOLVER],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120", "PYTHONPATH": str(LOGS.parents[2])},
    )
    os.close(slave)
    drawn = b""
    while chunk := _read(master):
        drawn += chunk
    os.close(master)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode())
    assert "12/12" in text
    assert re.search(r"loss 0\.\d+ +accuracy \d\.\d+ +[\d,]+ images/s", text)
    assert "Iteration 6, snapshot: logs/snap/tiny_iter_6.caffemodel" in text
    assert "Train net output" not in text
    assert drawn.rindex(b"\x1b[?25h") > drawn.rindex(b"\x1b[?25l")  # the cursor is shown again


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other side is closed
        return b""


def test_the_last_snapshot_of_a_run_is_its_last_iteration(cgdnn, folder):
    cgdnn("train", SOLVER, "--max-iter", "4")
    assert read_state(folder / "logs" / "snap" / "tiny_iter_4.solverstate").iter == 4


def test_a_trace_shows_the_tasks_of_the_first_iterations(cgdnn, folder):
    code, _, err = cgdnn("train", SOLVER, "--max-iter=2", "--trace=trace.json")
    assert code == 0
    assert "Trace of the first iterations: trace.json" in err
    tasks = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [task["name"] for task in tasks if task["ph"] == "X"]
    assert names.count("data.forward") == 2
    assert any(name.startswith("conv1.backward_weights") for name in names)


def test_a_trace_that_cannot_be_written_ends_with_1(cgdnn):
    code, _, err = cgdnn("train", SOLVER, "--max-iter=1", "--trace=missing/trace.json")
    assert code == 1
    assert "error: --trace missing/trace.json: cannot be written" in err


def test_the_tuning_table_can_be_left_aside(cgdnn, folder, monkeypatch):
    (folder / "tuning.json").write_text("no table")
    monkeypatch.setenv("CGDNN_TUNING", "tuning.json")
    code, _, err = cgdnn("train", SOLVER, "--max-iter=1")
    assert code == 3
    assert "error: tuning.json: is no tuning table" in err
    assert cgdnn("train", SOLVER, "--max-iter=1", "--tune=off")[0] == 0
