from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cgdnn.errors import DataError, RunError
from cgdnn.files import atomic_write_bytes
from cgdnn.netdef.state import ResumePoint, SolverSnapshot, read_state
from cgdnn.solvers import snapshot


def state(iteration: int = 3) -> SolverSnapshot:
    resume = ResumePoint(7, 11, {"train": {"data": 64, "": 11}})
    return SolverSnapshot(iteration, "", 1, [np.arange(3, dtype=np.float32)], resume)


def save_weights(path: str) -> None:
    atomic_write_bytes(path, b"weights")


def test_prepare_makes_the_folder_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot.prepare_folder(str(tmp_path / "a" / "b" / "snap"))
    assert (tmp_path / "a" / "b").is_dir()
    assert f"made the missing folder {tmp_path / 'a' / 'b'}" in caplog.text
    caplog.clear()
    snapshot.prepare_folder(str(tmp_path / "a" / "b" / "snap"))
    assert caplog.text == ""
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_prepare_refuses_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"snapshot_prefix: cannot write to .*/file: "):
        snapshot.prepare_folder(str(tmp_path / "file" / "snap"))


def test_prepare_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".snap_iter_2.caffemodel.{dead.pid}.tmp").write_bytes(b"half")
    snapshot.prepare_folder(str(tmp_path / "snap"))
    assert list(tmp_path.iterdir()) == []


def test_saved_state_is_read_again(tmp_path: Path) -> None:
    model, path = snapshot.save(str(tmp_path / "snap"), state(), save_weights)
    assert (model, path) == (
        str(tmp_path / "snap_iter_3.caffemodel"),
        str(tmp_path / "snap_iter_3.solverstate"),
    )
    found, weights = snapshot.load(path)
    assert weights == Path(model)
    assert (found.iter, found.current_step, found.extra) == (3, 1, state().extra)
    np.testing.assert_array_equal(found.history[0], [0, 1, 2])


def test_weights_are_written_before_the_state(tmp_path: Path) -> None:
    def fail(path: str) -> None:
        save_weights(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        snapshot.save(str(tmp_path / "snap"), state(), fail)
    assert [path.name for path in tmp_path.iterdir()] == ["snap_iter_3.caffemodel"]


def test_a_folder_that_fails_later_does_not_lose_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "spare"))
    model, path = snapshot.save(str(tmp_path / "gone" / "snap"), state(), save_weights)
    assert Path(model) == tmp_path / "spare" / "snap_iter_3.caffemodel"
    assert read_state(path).learned_net == model
    assert f"saving to {tmp_path / 'spare'}" in caplog.text
    assert snapshot.load(path)[1] == Path(model)


def test_no_place_to_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "none"))
    with pytest.raises(RunError, match="cannot be written: No such file or directory; nor could"):
        snapshot.save(str(tmp_path / "gone" / "snap"), state(), save_weights)


def test_weights_are_looked_for_where_the_state_says_and_then_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    snapshot.save("run/snap", state(), save_weights)
    assert snapshot.load("run/snap_iter_3.solverstate")[1] == Path("run/snap_iter_3.caffemodel")
    os.rename("run", "moved")
    found = snapshot.load("moved/snap_iter_3.solverstate")[1]
    assert found == Path("moved/snap_iter_3.caffemodel")
    found.unlink()
    with pytest.raises(DataError, match=r"its weights 'run/snap_iter_3\.caffemodel' are neither"):
        snapshot.load("moved/snap_iter_3.solverstate")
