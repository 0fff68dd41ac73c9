"""Read and write solver states: Caffe's .solverstate files, with cgdnn's own part."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from cgdnn.files import atomic_write_bytes
from cgdnn.netdef.weights import load, read_blob, write_blob
from cgdnn.proto import cgdnn_pb2 as pb

_RESUME: Any = pb.cgdnn_resume


@dataclass
class ResumePoint:
    """What makes a resumed run equal to an uninterrupted one, and Caffe does not keep.

    Attributes
    ----------
    seed
        The run's seed.
    random_counter
        Where the sequence of random numbers stands.
    cursors
        Net (``"train"``, ``"test 0"``, ..) -> data layer -> records consumed.
    kernels
        Task -> name of the kernel chosen for it.
    """

    seed: int
    random_counter: int = 0
    cursors: dict[str, dict[str, int]] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)


@dataclass
class SolverSnapshot:
    """A solver state.

    Attributes
    ----------
    iter
        Iterations done.
    learned_net
        The file of the weights, as written in the state.
    current_step
        Steps that the multistep policy has taken.
    history
        The update rule's arrays, those of all learnable parameters kind by kind.
    extra
        cgdnn's own part; None in a state that Caffe wrote.
    """

    iter: int
    learned_net: str
    current_step: int
    history: list[npt.NDArray[Any]]
    extra: ResumePoint | None = None


def read_state(path: str | os.PathLike[str]) -> SolverSnapshot:
    """Read a .solverstate file.

    Raises
    ------
    UsageError
        The file is of another kind, such as weights.
    DataError
        The file is missing, empty, cut short or contradicts itself.
    """
    state = load(path, "a solver state")
    extra = None
    if state.HasExtension(_RESUME):
        own = state.Extensions[_RESUME]
        extra = ResumePoint(
            seed=own.seed,
            random_counter=own.random_counter,
            cursors={net: dict(cursor.records) for net, cursor in own.cursors.items()},
            kernels=dict(own.kernels),
        )
    return SolverSnapshot(
        iter=state.iter,
        learned_net=state.learned_net,
        current_step=state.current_step,
        history=[
            read_blob(blob, f"{os.fspath(path)}, history {i}")
            for i, blob in enumerate(state.history)
        ],
        extra=extra,
    )


def write_state(path: str | os.PathLike[str], snapshot: SolverSnapshot) -> None:
    """Write a .solverstate file that Caffe reads too; the file is never torn."""
    state = pb.SolverState(
        iter=snapshot.iter,
        learned_net=snapshot.learned_net,
        current_step=snapshot.current_step,
        history=[write_blob(array) for array in snapshot.history],
    )
    if snapshot.extra is not None:
        own = state.Extensions[_RESUME]
        own.seed = snapshot.extra.seed
        own.random_counter = snapshot.extra.random_counter
        own.kernels.update(snapshot.extra.kernels)
        for net, records in snapshot.extra.cursors.items():
            own.cursors[net].records.update(records)
    # Equal states give equal bytes, whatever the order of the maps.
    atomic_write_bytes(path, state.SerializeToString(deterministic=True))
