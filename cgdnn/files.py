"""Write files so that a reader never sees half of one.

A file is written beside its final place, flushed to disk and renamed over it. A process that is
killed leaves either the old file or the new one, plus at most one temporary, which the next
write to the same path removes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def remove_stale_temporaries(path: str | os.PathLike[str]) -> None:
    """Delete temporaries that killed processes left beside `path` (any file of its folder).

    A temporary is named ``.<final name>.<pid>.tmp``; one whose process still lives is kept.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        return
    for entry in folder.glob(".*.tmp"):
        match = re.fullmatch(r"\..+\.(\d+)\.tmp", entry.name)
        if match and not _process_lives(int(match.group(1))):
            with contextlib.suppress(FileNotFoundError):
                entry.unlink()


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends without an exception.

    The file is flushed to disk before the rename and its folder after it, so that a power cut
    cannot leave an empty file under the final name.

    Raises
    ------
    OSError
        The folder is missing or not writable, or the disk is full. The old file stays.
    """
    final = Path(path)
    remove_stale_temporaries(final)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(final)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` so that no reader ever sees a part of it (see `atomic_path`)."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8 to `path` (see `atomic_path`)."""
    atomic_write_bytes(path, text.encode())
