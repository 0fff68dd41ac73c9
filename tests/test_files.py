from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cgdnn.files import (
    atomic_path,
    atomic_write_bytes,
    atomic_write_text,
    remove_stale_temporaries,
)


def dead_process() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_bytes_and_text_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old and longer")
    atomic_write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    atomic_write_text(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    assert names(tmp_path) == ["file"]


def test_nothing_is_seen_before_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
        assert temporary.parent == tmp_path  # a rename from elsewhere might be a copy
    assert path.read_bytes() == b"new"


def test_an_exception_keeps_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half() -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_block_that_writes_nothing_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(FileNotFoundError), atomic_path(path):
        pass
    assert path.read_bytes() == b"old"


def test_missing_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic_write_bytes(tmp_path / "no" / "file", b"data")


def test_data_is_on_disk_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    flushed = []

    def fsync(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    atomic_write_bytes(path, b"data")
    (first, renamed_before), (second, renamed_after) = flushed
    assert first.startswith(str(tmp_path / ".file."))
    assert (second, renamed_before, renamed_after) == (str(tmp_path), False, True)


def test_temporaries_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    dead = dead_process()
    kept = [f".file.{os.getpid()}.tmp", f".file.{os.getppid()}.tmp", ".own.tmp", f"file.{dead}.tmp"]
    for name in (*kept, f".file.{dead}.tmp", f".a.b.{dead}.tmp"):
        (tmp_path / name).write_bytes(b"")
    remove_stale_temporaries(tmp_path / "anything")
    assert names(tmp_path) == sorted(kept)


def test_the_next_write_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / f".file.{dead_process()}.tmp").write_bytes(b"half")
    atomic_write_bytes(tmp_path / "file", b"whole")
    assert names(tmp_path) == ["file"]


def test_removing_where_no_folder_is_does_nothing(tmp_path: Path) -> None:
    remove_stale_temporaries(tmp_path / "no" / "file")
    assert names(tmp_path) == []


def test_written_file_has_the_permissions_that_any_new_file_gets(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    atomic_write_bytes(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode
