from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cgdnn.errors import DataError, RunError, UsageError
from cgdnn.solvers._base import Solver
from tests.solvers.training import bits, note_tests, write_run

TESTED = """
test_iter: 2
test_interval: 5
test_initialization: true
snapshot: 7
iter_size: 2
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, made the working directory, with a run and its snapshot at 7 of 13."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, TESTED)
    return tmp_path


def test_resumed_run_ends_with_the_bits_and_scores_of_an_uninterrupted_one(run: Path) -> None:
    straight = Solver("solver.prototxt", threads=2)
    scores = note_tests(straight)
    assert straight.solve()
    straight.close()

    resumed = Solver("solver.prototxt", threads=1)
    resumed_scores = note_tests(resumed)
    resumed.restore("snap_iter_7.solverstate")
    assert resumed.iter == 7
    assert resumed.solve()
    resumed.close()
    assert bits(resumed) == bits(straight)
    assert resumed_scores == [score for score in scores if score.iteration > 7]
    assert resumed_scores
    assert resumed._rate.current_step == straight._rate.current_step == 2


def test_restore_goes_back_in_the_same_solver(run: Path) -> None:
    solver = Solver("solver.prototxt", threads=2)
    solver.step(13)
    end = bits(solver)
    solver.restore("snap_iter_7.solverstate")
    solver.step(6)
    solver.close()
    assert bits(solver) == end


def test_last_snapshot_restores_too(run: Path) -> None:
    solver = Solver("solver.prototxt", threads=2)
    solver.solve()
    solver.close()
    again = Solver("solver.prototxt", threads=2)
    again.restore("snap_iter_13.solverstate")
    again.close()
    assert bits(again) == bits(solver)


@pytest.fixture
def trained(run: Path) -> Path:
    solver = Solver("solver.prototxt", threads=1)
    solver.step(7)
    solver.close()
    return run


def restore(path: str, **fields: str) -> Solver:
    solver = Solver("solver.prototxt", threads=1, overrides=fields)
    try:
        solver.restore(path)
    finally:
        solver.close()
    return solver


def test_weights_are_found_beside_a_state_that_was_moved(trained: Path) -> None:
    moved = trained / "moved"
    moved.mkdir()
    for name in ("snap_iter_7.caffemodel", "snap_iter_7.solverstate"):
        shutil.move(name, moved / name)
    assert restore("moved/snap_iter_7.solverstate").iter == 7


def test_missing_weights_are_named(trained: Path) -> None:
    Path("snap_iter_7.caffemodel").unlink()
    with pytest.raises(DataError, match=r"snap_iter_7\.solverstate: .*'snap_iter_7\.caffemodel'"):
        restore("snap_iter_7.solverstate")


def test_weights_given_as_state_are_refused(trained: Path) -> None:
    with pytest.raises(UsageError, match=r"is weights, expected a solver state.*--weights"):
        restore("snap_iter_7.caffemodel")


def test_state_given_as_weights_is_refused(trained: Path) -> None:
    with pytest.raises(UsageError, match=r"is a solver state, expected weights.*--snapshot"):
        Solver("solver.prototxt", threads=1, weights="snap_iter_7.solverstate")


def test_prototxt_given_as_weights_or_state_is_refused(trained: Path) -> None:
    with pytest.raises(UsageError, match="is a text file, expected weights"):
        Solver("solver.prototxt", threads=1, weights="net.prototxt")
    with pytest.raises(UsageError, match="is a text file, expected a solver state"):
        restore("solver.prototxt")


@pytest.mark.parametrize("name", ["snap_iter_7.solverstate", "snap_iter_7.caffemodel"])
def test_a_file_cut_anywhere_is_refused(name: str, trained: Path) -> None:
    whole = Path(name).read_bytes()
    for size in sorted({0, 60, len(whole) // 2, len(whole) - 1}):
        Path(name).write_bytes(whole[:size])
        with pytest.raises((DataError, RunError), match=r"snap_iter_7\."):
            restore("snap_iter_7.solverstate")


def test_state_of_another_net_is_refused(trained: Path) -> None:
    net = Path("net.prototxt")
    net.write_text(net.read_text().replace("num_output: 6", "num_output: 5"))
    with pytest.raises(RunError, match=r"snap_iter_7\.solverstate: holds 11 history arrays"):
        restore("snap_iter_7.solverstate")


def test_weights_that_lack_a_layer_do_not_resume(trained: Path) -> None:
    text = Path("net.prototxt").read_text()
    Path("net.prototxt").write_text(text.replace('name: "fc"', 'name: "fc_new"'))
    with pytest.raises(RunError, match=r"snap_iter_7\.caffemodel: holds no weights of fc_new"):
        restore("snap_iter_7.solverstate")


def test_another_seed_is_warned_of(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    restore("snap_iter_7.solverstate", random_seed="6")
    assert "was written with random_seed 5, this run has 6" in caplog.text


def test_a_state_past_max_iter_trains_and_writes_nothing(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    solver = Solver("solver.prototxt", threads=1, overrides={"max_iter": "6"})
    solver.restore("snap_iter_7.solverstate")
    before = bits(solver)
    files = {path.name: path.stat().st_mtime_ns for path in trained.glob("snap*")}
    assert solver.solve()
    solver.close()
    assert "iteration 7 is past max_iter 6" in caplog.text
    assert (solver.iter, bits(solver)) == (7, before)
    assert {path.name: path.stat().st_mtime_ns for path in trained.glob("snap*")} == files
