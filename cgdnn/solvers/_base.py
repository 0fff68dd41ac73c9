"""The solver: runs iterations, decides rates, tests, displays and snapshots."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cgdnn.errors import DescriptionError, NonFiniteError, RunError
from cgdnn.netdef.read import find_file, read_solver
from cgdnn.netdef.state import ResumePoint, SolverSnapshot
from cgdnn.plan.shapes import check_gradients_possible
from cgdnn.plan.tune import TuningTable
from cgdnn.plan.update import UpdateRule, plan_update
from cgdnn.proto.cgdnn_pb2 import NetState, SolverParameter
from cgdnn.runtime.net import Net, TaskTime
from cgdnn.solvers import sgd, snapshot
from cgdnn.solvers.lr_policy import LearningRate

log = logging.getLogger("cgdnn")

_PASSES = ""
"""Key of a net's forward passes among its cursors; no layer has an empty name."""

_ZEROS = ".zeros"
"""Ending of the names under which a snapshot keeps shares of zeros among the kernel choices."""

_COUNT_AT = (20, 200, 600)
_COUNT_EVERY = 2000
"""Iterations after which zeros are counted and kernels chosen anew; they are part of the result."""

RULES: dict[str, UpdateRule] = {"SGD": sgd.RULE}


@dataclass(frozen=True)
class Output:
    """One element of a net's output: its name, value and loss weight (0 where it is no loss)."""

    name: str
    value: float
    weight: float


@dataclass(frozen=True)
class Iterated:
    """An iteration has ended; `loss` is its own, not smoothed."""

    iteration: int
    loss: float


@dataclass(frozen=True)
class Displayed:
    """What Caffe logs every ``display`` iterations; `rate` is None after the last one."""

    iteration: int
    loss: float
    outputs: list[Output]
    rate: float | None


@dataclass(frozen=True)
class Testing:
    """Test net number `net` is about to run."""

    iteration: int
    net: int


@dataclass(frozen=True)
class Tested:
    """Test net number `net` has run; `loss` is None unless ``test_compute_loss`` is set."""

    iteration: int
    net: int
    loss: float | None
    outputs: list[Output]


@dataclass(frozen=True)
class Saved:
    """A snapshot has been written."""

    iteration: int
    model: str
    state: str


def outputs_of(net: Net) -> list[Output]:
    """Return every element of every output of `net`, in Caffe's order."""
    weights = {
        top: weight
        for planned in net.assembly.layers
        for top, weight in zip(planned.node.tops, planned.loss_weights, strict=True)
    }
    return [
        Output(net.assembly.blobs[i].name, float(value), weights.get(i, 0.0))
        for i in net.graph.outputs
        for value in net.blobs[net.assembly.blobs[i].name].data.flat
    ]


Event = Iterated | Displayed | Testing | Tested | Saved
Request = Literal["snapshot", "stop"]


class Solver:
    """Trains a net as a solver description says.

    Parameters
    ----------
    source : path or SolverParameter
    overrides : mapping, optional
        Solver fields to replace, as text: ``{"base_lr": "0.005"}``.
    threads : int, optional
        Workers of the training and test nets; see `Net`.
    dtype : str
        "float32" or "float64".
    weights : path, optional
        A .caffemodel to start from (several, divided by commas).
    tuning : TuningTable, optional
        Measurements to choose kernels by; see `Net`.
    lend : bool
        Let blobs and diffs that nobody has looked at before the first iteration reuse memory, the
        diffs of parameters included, as the command line does; see `Net.run`.
    exact : bool
        Forbid Winograd's algorithm; see `Net`.

    Attributes
    ----------
    net : Net
        The training net.
    test_nets : list of Net
        They share the training net's parameters.
    iter : int
        Iterations done.
    callbacks : list of callable
        Each is called with every `Event`, on the thread that runs `step`.
    traced : list of TaskTime or None
        While it is a list, the times of all tasks of the training net are added to it.

    Raises
    ------
    DescriptionError
        The solver or its net is wrong; found before the first iteration.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | SolverParameter,
        *,
        overrides: Mapping[str, str] | None = None,
        threads: int | None = None,
        dtype: str = "float32",
        weights: str | os.PathLike[str] | None = None,
        tuning: TuningTable | None = None,
        lend: bool = False,
        exact: bool = False,
    ) -> None:
        self._tuning = tuning
        self._lend = lend
        self._exact = exact
        self._located = read_solver(source, overrides)
        self.param: SolverParameter = self._located.message
        for warning in self._located.warnings:
            log.warning("%s", warning)
        self._refuse_unavailable()
        self.seed = max(self.param.random_seed, 0) or 1
        base = None if isinstance(source, SolverParameter) else source
        self.net = self._train_net(base, threads, dtype)
        check_gradients_possible(self.net.assembly)
        self.test_nets = list(self._make_test_nets(base, threads, dtype))
        self._update = plan_update(
            self.net.assembly, RULES[self.param.type], self.param.clip_gradients
        )
        self.callbacks: list[Callable[[Event], None]] = []
        self.traced: list[TaskTime] | None = None
        self.iter = 0
        self._rate = LearningRate(self.param)
        self._losses: deque[float] = deque(maxlen=self.param.average_loss)
        self._smoothed = 0.0
        self._requests: list[Request] = []
        self._stopped = False
        if self.param.snapshot or self.param.snapshot_after_train:
            snapshot.prepare_folder(self.param.snapshot_prefix)
        for path in str(weights).split(",") if weights is not None else ():
            self.copy_from(path)

    def _refuse_unavailable(self) -> None:
        param, where = self.param, self._located.where
        if param.type not in RULES:
            raise DescriptionError(
                f'{where("type")}: solver type "{param.type}" is not available yet. '
                f"Use one of: {', '.join(RULES)}."
            )
        if param.snapshot_format == SolverParameter.HDF5:
            raise DescriptionError(
                f"{where('snapshot_format')}: snapshot_format HDF5 is not available yet. "
                "Use BINARYPROTO."
            )
        for name in ("debug_info", "snapshot_diff"):
            if getattr(param, name):
                log.warning("%s: %s is not available yet and has no effect", where(name), name)

    def _source(self, field: str, index: int | None, base: Any) -> Any:
        """Return what a Net is made of: a path, or the message with its places."""
        path: tuple[str | int, ...] = (field,) if index is None else (field, index)
        if field.endswith("_param"):
            return self._located.part(*path)
        name = getattr(self.param, field)
        if index is not None:
            name = name[index]
        found = find_file(name, base)
        if not found.is_file():
            raise DescriptionError(
                f'{self._located.where(*path)}: {field} "{name}" does not exist; looked in '
                f"{Path.cwd()} and beside the solver. Correct its path."
            )
        return found

    def _train_net(self, base: Any, threads: int | None, dtype: str) -> Net:
        fields = ("train_net_param", "train_net", "net_param", "net")
        field = next(f for f in fields if self.param.HasField(f))
        state = self.param.train_state
        return Net(
            self._source(field, None, base),
            "TRAIN",
            state.level,
            list(state.stage),
            threads=threads,
            dtype=dtype,
            seed=self.seed,
            tuning=self._tuning,
            exact=self._exact,
        )

    def _make_test_nets(self, base: Any, threads: int | None, dtype: str) -> Iterator[Net]:
        param = self.param
        sources = [("test_net_param", i) for i in range(len(param.test_net_param))]
        sources += [("test_net", i) for i in range(len(param.test_net))]
        shared = "net_param" if param.HasField("net_param") else "net"
        sources += [(shared, -1)] * (len(param.test_iter) - len(sources))
        for number, (field, index) in enumerate(sources):
            state = param.test_state[number] if param.test_state else NetState()
            yield Net(
                self._source(field, None if index < 0 else index, base),
                "TEST",
                state.level,
                list(state.stage),
                threads=threads,
                dtype=dtype,
                seed=self.seed,
                tuning=self._tuning,
                exact=self._exact,
                share=self.net,
            )

    # Running

    def request(self, action: Request) -> None:
        """Ask for a snapshot or a stop after the running iteration; any thread may call this."""
        self._requests.append(action)

    def _answer_requests(self) -> bool:
        """Write a snapshot if one was asked for; return whether a stop was."""
        asked: set[Request] = set()
        while self._requests:  # one by one: others may be added meanwhile
            asked.add(self._requests.pop())
        if "snapshot" in asked:
            self.snapshot()
        return "stop" in asked

    def solve(self) -> bool:
        """Train to ``max_iter``; return False if a stop was requested before.

        Raises
        ------
        NonFiniteError
            The loss, a gradient or a weight is not finite; nothing was saved since.
        """
        param = self.param
        self._stopped = False
        if self.iter > param.max_iter:
            log.warning(
                "iteration %d is past max_iter %d: nothing to train", self.iter, param.max_iter
            )
            return True
        self.step(param.max_iter - self.iter)
        if param.snapshot_after_train and not (
            param.snapshot and self.iter % param.snapshot == 0 and self.iter > 0
        ):
            self.snapshot()
        if self._stopped:
            return False
        if param.display and self.iter % param.display == 0:
            self.net.run(("forward",))
            self._smooth(self._finite_loss())
            self._emit(Displayed(self.iter, self._smoothed, outputs_of(self.net), None))
        if param.test_interval and self.iter % param.test_interval == 0:
            self.test_all()
        return True

    def step(self, count: int) -> None:
        """Run `count` iterations, with the tests, displays and snapshots that fall on them.

        Raises
        ------
        NonFiniteError
            The loss, a gradient or a weight is not finite.
        """
        param = self.param
        self._losses = deque(maxlen=param.average_loss)
        self._smoothed = 0.0
        self._stopped = False
        for _ in range(count):
            if (
                param.test_interval
                and self.iter % param.test_interval == 0
                and (self.iter > 0 or param.test_initialization)
            ):
                self.test_all()
                if "stop" in self._requests:
                    self._stopped = self._answer_requests()
                    return
            rate = self._rate.at(self.iter)
            due = self.iter + 1 in _COUNT_AT or (self.iter + 1) % _COUNT_EVERY == 0
            if due:
                self.net.watch_zeros()
            loss = self._iterate(rate)
            self._smooth(loss)
            if param.display and self.iter % param.display == 0:
                self._emit(Displayed(self.iter, self._smoothed, outputs_of(self.net), rate))
            self.iter += 1
            if due:
                self.net.choose_kernels(self.net.count_zeros())
            self._emit(Iterated(self.iter, loss))
            if param.snapshot and self.iter % param.snapshot == 0:
                self.request("snapshot")
            self._stopped = self._answer_requests()
            if self._stopped:
                return

    def _iterate(self, rate: float) -> float:
        """Run one iteration; return its loss, averaged over the sub-iterations."""
        net, size = self.net, self.param.iter_size
        numbers = self._numbers(rate)
        undo = net.remember()
        try:
            if size == 1:
                parts = ("forward", "backward", "update")
                self._run(parts, update=self._update.works, numbers=numbers)
                return net.loss
            total = 0.0
            for sub in range(size):
                self._run(("forward", "backward"), accumulate=sub > 0)
                total += self._finite_loss()
            self._run(("update",), update=self._update.works, numbers=numbers)
            return total / size
        except BaseException as error:
            undo()  # the sub-iterations that went well come again too
            if not isinstance(error, NonFiniteError):
                raise
            first = net.first_non_finite()
            raise NonFiniteError(
                f"iteration {self.iter}: {error}; the first non-finite array is of {first}. "
                "Nothing was saved since the last snapshot. Lower base_lr, or look at the data."
            ) from error

    def _run(self, parts: Sequence[str], **options: Any) -> None:
        times = self.net.run(parts, lend=self._lend, trace=self.traced is not None, **options)
        if self.traced is not None:
            self.traced += times

    def _numbers(self, rate: float) -> dict[str, float]:
        param = self.param
        numbers = {"average": 1 / param.iter_size, "momentum": param.momentum}
        numbers |= {slot: rate * factor for slot, factor in self._update.rates.items()}
        for kind, slots in self._update.decays.items():
            decay = param.weight_decay if kind == param.regularization_type else 0.0
            numbers |= {slot: decay * factor for slot, factor in slots.items()}
        return numbers

    def _finite_loss(self) -> float:
        loss = self.net.loss
        if not np.isfinite(loss):
            raise NonFiniteError("the loss is not finite")
        return loss

    def _smooth(self, loss: float) -> None:
        """Average the loss over the last ``average_loss`` iterations of this `step`."""
        self._losses.append(loss)
        self._smoothed = sum(self._losses) / len(self._losses)

    # Testing

    def test_all(self) -> list[Tested]:
        """Run every test net over its ``test_iter`` batches; return the mean outputs."""
        return [self._test(number) for number in range(len(self.test_nets))]

    def _test(self, number: int) -> Tested:
        self._emit(Testing(self.iter, number))
        net = self.test_nets[number]
        for reason in net.doubts():
            log.warning("iteration %d, test net #%d: %s", self.iter, number, reason)
        count = self.param.test_iter[number]
        sums: list[float] = []
        outputs: list[Output] = []
        loss = 0.0
        for _ in range(count):
            net.run(("forward",), lend=self._lend)
            outputs = outputs_of(net)
            loss += net.loss
            values = [output.value for output in outputs]
            sums = [a + b for a, b in zip(sums, values, strict=True)] if sums else values
        means = [
            Output(output.name, total / count, output.weight)
            for output, total in zip(outputs, sums, strict=True)
        ]
        bad = next((o.name for o in means if not np.isfinite(o.value)), None)
        if bad is not None:
            raise NonFiniteError(
                f'iteration {self.iter}: output "{bad}" of test net #{number} is not finite; the '
                f"first non-finite array is of {net.first_non_finite()}. Lower base_lr, or look "
                "at the data."
            )
        computed = loss / count if self.param.test_compute_loss else None
        tested = Tested(self.iter, number, computed, means)
        self._emit(tested)
        return tested

    def _emit(self, event: Event) -> None:
        for callback in self.callbacks:
            callback(event)

    # Snapshots

    def snapshot(self) -> tuple[str, str]:
        """Write ``<snapshot_prefix>_iter_<N>.caffemodel`` and ``.solverstate``.

        Returns
        -------
        (model, state)
            The paths written.

        Raises
        ------
        NonFiniteError
            A weight is not finite; nothing is written.
        """
        for name, blobs in self.net.params.items():
            if not all(np.isfinite(blob.data).all() for blob in blobs):
                raise NonFiniteError(
                    f'iteration {self.iter}: weights of layer "{name}" are not finite, so no '
                    "snapshot was written. Resume from the last one with a lower base_lr."
                )
        state = SolverSnapshot(
            self.iter,
            "",
            self._rate.current_step,
            [self.net.array(buffer) for buffer in self._update.history],
            ResumePoint(self.seed, self.net.counter, self._cursors(), self._kernels()),
        )
        model, path = snapshot.save(self.param.snapshot_prefix, state, self.net.save)
        self._emit(Saved(self.iter, model, path))
        return model, path

    def _kernels(self) -> dict[str, str]:
        """Return the kernel choices, and the shares of zeros that they were made for."""
        layers = [(p.node.name, p.layer.zeros) for p in self.net.assembly.layers]
        zeros = {f"{name}{_ZEROS}": repr(share) for name, share in layers if share}
        return {**self.net.lowering.chosen_names(), **zeros}

    def _named_nets(self) -> dict[str, Net]:
        tests = {f"test {number}": net for number, net in enumerate(self.test_nets)}
        return {"train": self.net, **tests}

    def _cursors(self) -> dict[str, dict[str, int]]:
        cursors = {}
        for name, net in self._named_nets().items():
            positions = {layer: reader.position for layer, reader in net.data_layers.items()}
            cursors[name] = {**positions, _PASSES: net.counter}
        return cursors

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Go back to a snapshot; the run goes on with the same bits as an uninterrupted one.

        A state that Caffe wrote has no data position: data then starts at record 0, with a
        warning.

        Raises
        ------
        DataError, UsageError
            The file is torn or of another kind, or its weights are missing.
        RunError
            The state is of another net or another solver type.
        """
        state, model = snapshot.load(path)
        history = [self.net.array(buffer) for buffer in self._update.history]
        shapes = [array.shape for array in history]
        found = [array.shape for array in state.history]
        if len(shapes) != len(found) or any(
            np.prod(a) != np.prod(b) for a, b in zip(shapes, found, strict=True)
        ):
            raise RunError(
                f"{path}: holds {len(found)} history arrays of shapes {found}, expected "
                f"{len(shapes)} of shapes {shapes}. Use a state of the same net and solver type."
            )
        missing = self.net.params.keys() - self.net.copy_from(model)
        if missing:
            raise RunError(
                f"{model}: holds no weights of {', '.join(sorted(missing))}. "
                "Use a snapshot of the same net."
            )
        for array, stored in zip(history, state.history, strict=True):
            array[...] = stored.reshape(array.shape)
        self.iter = state.iter
        self._rate.current_step = state.current_step
        if state.extra is None:
            log.warning(
                "%s: holds no data position (Caffe wrote it); data starts at record 0", path
            )
            records = dict.fromkeys(self.net.data_layers, 0)
            _seek(self.net, {**records, _PASSES: state.iter * self.param.iter_size})
            return
        if state.extra.seed != self.seed:
            log.warning(
                "%s: was written with random_seed %d, this run has %d, so it draws other random "
                "numbers",
                path,
                state.extra.seed,
                self.seed,
            )
        for name, net in self._named_nets().items():
            _seek(net, state.extra.cursors.get(name, {}))
        kernels = state.extra.kernels
        zeros = {
            name.removesuffix(_ZEROS): float(share)
            for name, share in kernels.items()
            if name.endswith(_ZEROS)
        }
        self.net.choose_kernels(zeros, forced=kernels)

    def copy_from(self, path: str | os.PathLike[str]) -> None:
        """Copy weights from a .caffemodel into the layers of the same name."""
        self.net.copy_from(path)

    def close(self) -> None:
        """Stop the background readers of all nets."""
        for net in (self.net, *self.test_nets):
            net.close()


def _seek(net: Net, cursors: Mapping[str, int]) -> None:
    """Put `net` where `cursors` say; what they do not name stays."""
    for layer, reader in net.data_layers.items():
        if layer in cursors:
            reader.seek(cursors[layer])
    net.counter = cursors.get(_PASSES, net.counter)
