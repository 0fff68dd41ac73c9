"""Snapshots: where they are written, and what is restored from them.

A snapshot is two files, ``<prefix>_iter_<N>.caffemodel`` and ``.solverstate``, both readable by
Caffe. The state comes last, so a state never lacks its weights.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from cgdnn.errors import DataError, RunError
from cgdnn.files import remove_stale_temporaries
from cgdnn.netdef.state import SolverSnapshot, read_state, write_state

log = logging.getLogger("cgdnn")


def prepare_folder(prefix: str) -> None:
    """Make the folder of the snapshots now, so that a long run cannot fail for want of it.

    Raises
    ------
    RunError
        The folder cannot be made or written to.
    """
    folder = Path(prefix).parent
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            log.warning("snapshot_prefix: made the missing folder %s", folder.resolve())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(
            f"snapshot_prefix: cannot write to {folder.resolve()}: {error.strerror}. "
            "Give a folder that can be written to."
        ) from error
    remove_stale_temporaries(prefix)


def save(
    prefix: str,
    snapshot: SolverSnapshot,
    save_weights: Callable[[str], None],
) -> tuple[str, str]:
    """Write both files of a snapshot; return their paths.

    Where the folder fails (a full disk, a vanished mount), the snapshot goes to a temporary
    folder instead, with a warning, so that the training is not lost.

    Raises
    ------
    RunError
        Neither place could be written.
    """
    name = f"{prefix}_iter_{snapshot.iter}"
    try:
        return _save_at(name, snapshot, save_weights)
    except OSError as error:
        fallback = os.path.join(tempfile.gettempdir(), Path(name).name)
        log.warning("%s: cannot be written (%s); saving to %s instead", name, error, fallback)
        try:
            return _save_at(fallback, snapshot, save_weights)
        except OSError as second:
            raise RunError(
                f"{name}: cannot be written: {error.strerror}; nor could {fallback}: "
                f"{second.strerror}. Free some space."
            ) from second


def _save_at(
    name: str, snapshot: SolverSnapshot, save_weights: Callable[[str], None]
) -> tuple[str, str]:
    model, state = f"{name}.caffemodel", f"{name}.solverstate"
    save_weights(model)
    snapshot.learned_net = model
    write_state(state, snapshot)
    return model, state


def load(path: str | os.PathLike[str]) -> tuple[SolverSnapshot, Path]:
    """Read a .solverstate and find its weights: where it says, else beside it.

    Raises
    ------
    DataError, UsageError
        The file is torn or of another kind, or its weights are missing.
    """
    remove_stale_temporaries(path)
    snapshot = read_state(path)
    for model in (Path(snapshot.learned_net), Path(path).parent / Path(snapshot.learned_net).name):
        if model.is_file():
            return snapshot, model
    raise DataError(
        f"{path}: its weights {snapshot.learned_net!r} are neither there nor beside it. "
        "Put the .caffemodel of the same iteration into the same folder."
    )
