"""The net that users hold."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from cgdnn import machine
from cgdnn.errors import CgdnnError, RunError, UsageError
from cgdnn.kernels.random import key_of
from cgdnn.layers._base import Buffer, DataLayer, Shape
from cgdnn.layers._fillers import fill
from cgdnn.netdef.graph import build_graph
from cgdnn.netdef.read import read_net
from cgdnn.netdef.weights import read_weights, write_weights
from cgdnn.plan.buffers import root
from cgdnn.plan.lower import Fresh, Lowering, Work
from cgdnn.plan.shapes import Assembly, PlannedLayer, PlannedParam, assemble
from cgdnn.plan.tune import TuningTable
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.blob import Array, Blob
from cgdnn.runtime.python_task import FAILED
from cgdnn.runtime.serial import run_serial
from cgdnn.runtime.state import State, bind
from cgdnn.runtime.threaded import ThreadedRun, check_threads

log = logging.getLogger("cgdnn")

DEFAULT_SEED = 1
_NCHW = frozenset({"nchw"})


@dataclass(frozen=True)
class LayerView:
    """A layer as users see it."""

    name: str
    type: str
    blobs: list[Blob]


@dataclass(frozen=True)
class TaskTime:
    """One task of a traced run: begin and end in nanoseconds of the monotonic clock."""

    name: str
    layer: int
    begin: int
    end: int
    worker: int


class Net:
    """A network: its blobs, its parameters, and the passes over it.

    Parameters
    ----------
    source : path or NetParameter
        A network description, text or binary.
    phase : str
        "TRAIN" or "TEST".
    level : int
    stages : sequence of str
        With `phase`, what ``include`` and ``exclude`` rules are compared with.
    weights : path, optional
        A .caffemodel to start from.
    threads : int, optional
        Workers, the calling thread included; by default ``CGDNN_NUM_THREADS`` or the cores allowed.
        Results are the same bits for any number.
    dtype : str
        "float32" or "float64".
    seed : int, optional
        Decides fillers, dropout, crops and shuffles; 1 by default.
    share : Net, optional
        Layers of the same name use this net's parameters.
    serial : bool
        Run with the serial executor (for debugging).
    tuning : TuningTable, optional
        Measurements to choose kernels by (see `cgdnn.plan.tune`); without one the shapes decide.
    exact : bool
        Forbid Winograd's algorithm, which is faster but rounds worse: an rms error of up to 5.5e-6
        of a result's largest magnitude in float32, where sums of products have 1.5e-7.

    Raises
    ------
    DescriptionError
        The description is wrong.
    DataError
        A data layer's source cannot be read.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | NetParameter,
        phase: str = "TRAIN",
        level: int = 0,
        stages: Sequence[str] = (),
        weights: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        *,
        dtype: str = "float32",
        seed: int | None = None,
        share: Net | None = None,
        serial: bool = False,
        tuning: TuningTable | None = None,
        exact: bool = False,
    ) -> None:
        if phase not in ("TRAIN", "TEST"):
            raise UsageError(f'phase: got {phase!r}, expected "TRAIN" or "TEST". Use one of them.')
        if dtype not in ("float32", "float64"):
            raise UsageError(
                f'dtype: got {dtype!r}, expected "float32" or "float64". Use one of them.'
            )
        self._located = read_net(source)
        self.graph = build_graph(self._located, phase, level, stages)
        self.name = self.graph.name
        self.phase = phase
        self.dtype = dtype
        self.seed = DEFAULT_SEED if seed is None else seed
        self.threads = machine.default_threads() if threads is None else threads
        check_threads(self.threads)
        self.counter = 0
        """Forward passes so far: what random numbers are drawn for."""
        self._serial = serial
        self._tuning = tuning
        self._running = threading.Lock()
        self._watching = False
        self._state = State(dtype)
        self.blobs: OrderedDict[str, Blob] = OrderedDict()
        self._exact = exact
        self._plan(assemble(self.graph, exact=exact))
        for warning in (*self._located.warnings, *self.assembly.warnings):
            log.warning("%s", warning)
        self._start_parameters(share)
        if weights is not None:
            self.copy_from(weights)

    def _plan(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.lowering = Lowering(assembly, self.dtype, self.seed, self._tuning)
        self._fresh: Fresh = {}
        self._pinned: set[tuple[int, str]] = set()
        self._forgotten = False
        """Whether kernels were chosen anew since the last forward pass."""
        self._lost: set[Buffer] = set()
        """What the last run was lent, and so left without content."""
        self._spared: set[Buffer] = set()
        """What absorbed layers would have kept, had they run on their own."""
        lendable = assembly.lendable()
        self._lendable = {
            "data": {entry for entry in lendable if entry[1] == "data"},
            "diff": {entry for entry in lendable if entry[1] != "data"},
        }
        self._counted = False
        self._programs: dict[tuple[Any, ...], ThreadedRun] = {}
        for index, blob in enumerate(assembly.blobs):
            if blob.name in self.blobs:  # what users hold stays the same object
                self.blobs[blob.name].reshape(*blob.shape)
            else:
                self.blobs[blob.name] = self._blob(index)
        self._losses: list[int] = []
        """The blobs that have a loss weight."""
        for planned in assembly.layers:
            for top, weight in zip(planned.node.tops, planned.loss_weights, strict=True):
                if weight:
                    self._losses.append(top)
                    self._state.array(assembly.blobs[top].diff)[...] = weight
        self._readers = list(self.data_layers.values())
        self._unlearned = [p.data for p in assembly.params if not p.declared.learned]

    def _blob(self, index: int) -> Blob:
        planned = self.assembly.blobs[index]
        return Blob(planned.name, planned.shape, lambda kind: self._fetch(index, kind), index)

    def _fetch(self, index: int, kind: str) -> Array:
        """Return a blob's array in N, C, H, W order for the user, and pin it.

        A pinned array stays live: every run ends with bringing it up to date, and later runs take
        it as it is, since the user may have written into it. It has memory of its own from now on;
        where the last run has reused that of values, the net computes them again.

        Raises
        ------
        UsageError
            The last run has reused the memory of this diff.
        """
        if (index, kind) not in self._pinned:
            if self._lost and self._is_lost(index, kind):
                if kind == "diff":
                    name = self.assembly.blobs[index].name
                    raise UsageError(
                        f'blob "{name}": its diff was not kept, since gradients of a whole '
                        f'iteration reuse memory. Read net.blobs["{name}"].diff once before the '
                        "iteration; from then on it is kept."
                    )
                self._compute_again()
            self._pinned.add((index, kind))
            self._lendable[kind].discard((index, kind))
            self._bring_home(index, kind)
        return self._state.array(self.assembly.blobs[index].homes[kind, "nchw"])

    def _is_lost(self, index: int, kind: str) -> bool:
        homes = self.assembly.blobs[index].homes
        return any(root(home) in self._lost for (which, _), home in homes.items() if which == kind)

    def _compute_again(self) -> None:
        """Compute the values that the last forward pass has not kept; keep all from now on.

        They follow from the inputs and the parameters as these are now.
        """
        self._lendable["data"].clear()
        undo = self.remember()
        self.counter -= 1  # the same pass once more
        try:
            self.run(("again",))
        finally:
            undo()

    def _bring_home(self, index: int, kind: str) -> None:
        """Bring the array in N, C, H, W order up to date; from now on trust no other."""
        if "nchw" not in self._fresh.get((index, kind), _NCHW):
            program = self.lowering.export(index, kind, self._fresh)
            self._run(ThreadedRun(bind(program, self._state, 1), 1), trace=False)
        self._fresh[index, kind] = _NCHW

    def _start_parameters(self, share: Net | None) -> None:
        self.params: OrderedDict[str, list[Blob]] = OrderedDict()
        theirs: dict[str, PlannedParam] = {}
        if share is not None:
            for planned in share.assembly.layers:
                # Under every layer that uses it: in this net it may belong to another of them.
                for position, index in enumerate(planned.params):
                    theirs[f"{planned.node.name}[{position}]"] = share.assembly.params[index]
        for param in self.assembly.params:
            other = theirs.get(param.label)
            if other is not None and share is not None:
                if other.declared.shape != param.declared.shape:
                    raise RunError(
                        f"{param.label}: shape {param.declared.shape} cannot be shared with shape "
                        f"{other.declared.shape} of the training net. Give the layer another name."
                    )
                self._state.adopt(param.data, share._state.array(other.data))
            elif param.declared.filler is not None:
                key = key_of(self.seed, param.label)
                fill(param.declared.filler, self._state.array(param.data), key)
        for layer, planned in enumerate(self.assembly.layers):
            if planned.params:
                self.params[planned.node.name] = [
                    self._param(layer, index) for index in range(len(planned.params))
                ]

    def _param(self, layer: int, index: int) -> Blob:
        def fetch(kind: str) -> Array:
            planned = self.assembly.layers[layer]
            data, diff = planned.views[index]
            if kind == "data":
                return self._state.array(data)
            self._lendable["diff"].discard((planned.params[index], "param_diff"))
            if root(diff) in self._lost:
                raise UsageError(
                    f"{self.assembly.params[planned.params[index]].label}: its diff was not kept, "
                    "since a whole iteration reuses its memory; from now on it is. "
                    "Run an iteration first."
                )
            return self._state.array(diff)

        planned = self.assembly.layers[layer]
        return Blob(f"{planned.node.name}[{index}]", planned.views[index][0].shape, fetch, -1)

    @property
    def inputs(self) -> list[str]:
        """Names of the blobs that the user fills."""
        return [self.assembly.blobs[i].name for i in self.graph.inputs]

    @property
    def outputs(self) -> list[str]:
        """Names of the blobs that no layer reads, in alphabetical order as in Caffe."""
        return [self.assembly.blobs[i].name for i in self.graph.outputs]

    @property
    def layers(self) -> list[LayerView]:
        """The layers in order, automatic Splits included."""
        return [
            LayerView(p.node.name, p.node.type, self.params.get(p.node.name, []))
            for p in self.assembly.layers
        ]

    @property
    def data_layers(self) -> dict[str, DataLayer]:
        """The layers that read records, by name."""
        return {
            planned.node.name: planned.layer
            for planned in self.assembly.layers
            if isinstance(planned.layer, DataLayer)
        }

    @property
    def loss(self) -> float:
        """The weighted sum of the losses of the last forward pass."""
        pairs = ((self._fetch(index, "data"), self._fetch(index, "diff")) for index in self._losses)
        return sum((float(np.vdot(data, diff)) for data, diff in pairs), 0.0)

    # Passes

    def forward(
        self, start: str | None = None, end: str | None = None, **inputs: npt.ArrayLike
    ) -> dict[str, Array]:
        """Compute the layers from `start` to `end` (both included, by name; all by default).

        Parameters
        ----------
        start, end : str, optional
            Layer names.
        **inputs
            Values for input blobs; the shapes must be those of the blobs.

        Returns
        -------
        dict
            Copies of the net's outputs, or of the tops of layer `end` when it is given.

        Raises
        ------
        UsageError
            An unknown layer or blob name, or a wrong shape.
        CgdnnError
            A task failed; the net can be used again.
        """
        self.reshape()
        self._set("data", inputs)
        first, last = self._range(start, end)
        self.run(("forward",), first, last)
        if end is None:
            names = self.outputs
        else:
            tops = self.assembly.layers[last - 1].node.tops
            names = [self.assembly.blobs[top].name for top in tops]
        return {name: self.blobs[name].data.copy() for name in names}

    def backward(
        self, start: str | None = None, end: str | None = None, **diffs: npt.ArrayLike
    ) -> dict[str, Array]:
        """Compute the gradients from layer `start` down to layer `end` (both included).

        Parameter diffs are added to; clear them with `clear_param_diffs`.

        Parameters
        ----------
        start, end : str, optional
            Layer names; by default from the last layer to the first.
        **diffs
            Gradients of output blobs that are no loss.

        Returns
        -------
        dict
            Copies of the diffs of the net's inputs, or of the bottoms of layer `end`.
        """
        self._set("diff", diffs)
        first, last = self._range(end, start)
        self.run(("backward",), first, last, accumulate=True)
        if end is None:
            names = self.inputs
        else:
            bottoms = self.assembly.layers[first].node.bottoms
            names = [self.assembly.blobs[bottom].name for bottom in bottoms]
        return {name: self.blobs[name].diff.copy() for name in names}

    def clear_param_diffs(self) -> None:
        """Set the diffs of all parameters to zero."""
        for param in self.assembly.params:
            self._state.array(param.diff)[...] = 0
            self._lost.discard(param.diff)

    def run(
        self,
        parts: Sequence[str],
        first: int = 0,
        last: int | None = None,
        *,
        update: Sequence[Work] = (),
        numbers: Mapping[str, float] | None = None,
        accumulate: bool = False,
        lend: bool = False,
        trace: bool = False,
    ) -> list[TaskTime]:
        """Run parts of an iteration over the layers [first, last) as one program.

        Parameters
        ----------
        parts : sequence of str
            "forward", "backward", "update".
        update : sequence of Work
            The steps of the part "update"; always the same for one net.
        numbers : mapping, optional
            Numbers to patch into the slots of that name.
        accumulate : bool
            Add to the parameter diffs instead of overwriting them.
        lend : bool
            Let values and diffs that nobody has touched yet reuse each other's memory, where the
            run goes over all layers and is in the phase TEST or has a backward pass (in TRAIN one
            can follow): diffs, those of parameters included where the run applies them; in TEST,
            and where all values are larger than caches, values and what layers keep beside them.
            Values that no step needs but the one behind may exist piece by piece only. Asked for,
            values are computed again from the parameters as these are then.
        trace : bool
            Return when each task ran.
        """
        count = len(self.assembly.layers)
        last = count if last is None else last
        whole = first == 0 and parts[0] == "forward"
        forgotten = self._forgotten and parts[0] == "backward"
        incomplete = not whole and any(b.kind in ("data", "state") for b in self._lost)
        if parts[0] != "again" and (forgotten or incomplete):
            self._compute_again()
        counting = self._watching and "backward" in parts
        fresh = {} if whole else {k: v for k, v in self._fresh.items() if v != _NCHW}
        lendable, carried = set(), set()
        if lend and whole and last == count and ("backward" in parts or self.phase == "TEST"):
            lendable, carried = self._lendable["diff"], self._lendable["data"]
            if self.lowering.lends_values:
                lendable = lendable | carried
            if "update" not in parts or accumulate:  # the gradients are added to, or read later
                lendable = {entry for entry in lendable if entry[1] != "param_diff"}
        key = (
            *(tuple(parts), first, last, counting, len(lendable), len(carried)),
            tuple(sorted(fresh.items(), key=str)),
        )
        with self._running:
            run = self._programs.get(key)
            if run is None:
                program = self.lowering.program(
                    *(parts, first, last),
                    update=update,
                    fresh=fresh,
                    lent=lendable,
                    carried=carried,
                    counting=counting,
                )
                if not self._state.fits(program):
                    self._programs.clear()  # they hold the smaller arena
                run = ThreadedRun(bind(program, self._state, self.threads), self.threads)
                self._programs[key] = run
            for name, value in (numbers or {}).items():
                run.program.patch(name, value)
            run.program.patch("accumulate", 1.0 if accumulate else 0.0)
            run.program.patch("counter", self.counter)
            program = run.program.program
            undo = self.remember()
            missing = program.found & (self._lost | self._spared)
            if missing and "backward" in parts and not accumulate:  # gradients are computed anew
                missing -= {param.diff for param in self.assembly.params}
            for buffer in sorted(missing, key=lambda buffer: buffer.name):
                if buffer.kind == "param_diff":
                    raise UsageError(
                        f"{buffer.name} was not kept, since a whole iteration reuses its memory. "
                        "Call clear_param_diffs before gradients are added up."
                    )
                raise UsageError(
                    f"{buffer.name} was not kept, since gradients of a whole iteration reuse "
                    "memory. Run the backward pass from the last layer on."
                )
            lost = self._lost - program.made
            self._lost |= program.lost
            self._spared |= program.spared
            try:
                self._run(run, trace)
            except BaseException:  # the pass did not happen: it can be tried again
                undo()
                raise
            self._lost = lost | program.lost
            self._spared -= program.made
            if counting:
                self._watching, self._counted = False, True
            self._fresh.update(program.fresh)
            for index, kind in self._pinned:
                self._bring_home(index, kind)
            if "forward" in parts:
                self.counter += 1
            if parts[0] != "backward" and (first, last) == (0, count):
                self._forgotten = False
        return self._times(run) if trace else []

    def remember(self) -> Callable[[], None]:
        """Return a function that takes back what forward passes change besides blobs.

        That is: data positions, the count of passes, and running sums such as BatchNorm's.
        """
        counter = self.counter
        positions = [(layer, layer.position) for layer in self._readers]
        arrays = [self._state.array(data) for data in self._unlearned]
        sums = [(array, array.copy()) for array in arrays]

        def undo() -> None:
            self.counter = counter
            for layer, position in positions:
                layer.seek(position)
            for array, values in sums:
                array[...] = values

        return undo

    def array(self, buffer: Buffer) -> Array:
        """Return the array of a buffer of this net's plan, such as a solver's history."""
        return self._state.array(buffer)

    def _run(self, run: ThreadedRun, trace: bool) -> None:
        failed = run_serial(run.program) if self._serial else run.run(trace)
        if failed is None:
            return
        number, status = failed
        task = run.program.tasks[number]
        raised = run.program.python.raised.pop(number, None)
        run.program.python.raised.clear()
        if status == FAILED and raised is not None:
            if isinstance(raised, CgdnnError) or not isinstance(raised, Exception):
                raise raised
            raise RunError(f"{task.name}: {type(raised).__name__}: {raised}") from raised
        if task.step is not None and task.step.explain is not None:
            raise task.step.explain(status)
        raise RunError(f"{task.name}: the task failed with status {status}.")

    def _times(self, run: ThreadedRun) -> list[TaskTime]:
        found = []
        for task, (begin, end, worker) in zip(run.program.tasks, run.trace, strict=True):
            if task.step is None:
                continue
            # The time of a chain is shared out by what its parts were estimated to take.
            costs = [part.step.cost * (part.end - part.begin) for part in task.parts if part.step]
            total = sum(costs) or 1.0
            ends = [int(begin + (end - begin) * done / total) for done in accumulate(costs)]
            begins = [int(begin), *ends]
            for part, first, last in zip(task.parts, begins, [*ends[:-1], int(end)], strict=False):
                found.append(TaskTime(part.name, part.layer, first, last, int(worker)))
        return found

    def _range(self, start: str | None, end: str | None) -> tuple[int, int]:
        names = [planned.node.name for planned in self.assembly.layers]

        def number(name: str) -> int:
            if name not in names:
                raise UsageError(
                    f'net "{self.name}" has no layer "{name}". Its layers: {", ".join(names)}.'
                )
            return names.index(name)

        first = 0 if start is None else number(start)
        last = len(names) if end is None else number(end) + 1
        if first >= last:
            raise UsageError(
                f'layer "{names[first]}" comes after layer "{names[last - 1]}", so nothing lies '
                "between. Exchange start and end."
            )
        return first, last

    def _set(self, kind: str, values: Mapping[str, npt.ArrayLike]) -> None:
        for name, value in values.items():
            if name not in self.blobs:
                raise UsageError(
                    f'net "{self.name}" has no blob "{name}". Its blobs: {", ".join(self.blobs)}.'
                )
            self.blobs[name].assign(kind, value)

    # Choices

    def count_zeros(self) -> dict[str, float]:
        """Return, for each layer that multiplies and learns, the share of zeros in its top diff.

        An exact count over the last backward pass that `watch_zeros` has asked for; nothing where
        there was none.
        """
        if not self._counted:
            return {}
        return {
            name: 1 - int(self._state.array(buffer)[0]) / max(1, size)
            for name, (buffer, size) in self.lowering.nonzeros().items()
        }

    def watch_zeros(self) -> None:
        """Let the next backward pass count the zeros in the gradients (see `count_zeros`)."""
        self._watching = True

    def choose_kernels(
        self, zeros: Mapping[str, float], forced: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Choose the kernels anew; return ``<layer>.<pass>`` -> candidate.

        Parameters
        ----------
        zeros : mapping
            Layer -> share of zeros in its top diff; layers left out keep what they had.
        forced : mapping, optional
            Choices that go before all else, such as those of a snapshot.
        """
        for planned in self.assembly.layers:
            planned.layer.zeros = zeros.get(planned.node.name, planned.layer.zeros)
        if self.lowering.choose(forced or {}):
            self._programs.clear()
            # What layers keep for the backward pass may now lie elsewhere.
            self._forgotten = True
        return self.lowering.chosen_names()

    # Shapes, weights, files

    def reshape(self) -> None:
        """Give the blobs the shapes that were asked for with `Blob.reshape`.

        Only input blobs can be given a shape; the others follow. Does nothing where no shape
        changed. Parameters keep their values.

        Raises
        ------
        UsageError
            A blob that is no input was given another shape.
        DescriptionError
            A layer refuses the shape; the net keeps the old ones.
        """
        wanted: dict[str, Shape] = {}
        for index, (name, blob) in enumerate(self.blobs.items()):
            if blob.shape != self.assembly.blobs[index].shape:
                if index not in self.graph.inputs:
                    blob.reshape(*self.assembly.blobs[index].shape)
                    raise UsageError(
                        f'blob "{name}" is no input, so its shape follows from others. '
                        f"Reshape one of: {', '.join(self.inputs)}."
                    )
                wanted[name] = blob.shape
        if not wanted:
            return
        shapes = {name: self.blobs[name].shape for name in self.inputs}
        try:
            assembly = assemble(self.graph, input_shapes=shapes, exact=self._exact)
            for old, new in zip(self.assembly.params, assembly.params, strict=True):
                if old.declared.shape != new.declared.shape:
                    raise UsageError(
                        f"{old.label}: the new shape of {', '.join(wanted)} needs parameters of "
                        f"shape {new.declared.shape}, but they have {old.declared.shape}. "
                        "Use an input size that keeps it."
                    )
        except CgdnnError:
            for index in self.graph.inputs:
                planned = self.assembly.blobs[index]
                self.blobs[planned.name].reshape(*planned.shape)
            raise
        state = State(self.dtype)
        lost = set()
        for old, new in zip(self.assembly.params, assembly.params, strict=True):
            state.adopt(new.data, self._state.array(old.data))
            if old.diff in self._lost:
                lost.add(new.diff)
            else:
                state.adopt(new.diff, self._state.array(old.diff))
        for old_layer, new_layer in zip(self.assembly.layers, assembly.layers, strict=True):
            if isinstance(new_layer.layer, DataLayer):
                new_layer.layer.close()
                new_layer.layer = old_layer.layer
        self._state = state
        self._plan(assembly)
        self._lost = lost

    def copy_from(self, path: str | os.PathLike[str]) -> list[str]:
        """Copy weights from a .caffemodel into the layers of the same name.

        Returns
        -------
        list of str
            Names of the layers that got weights.

        Raises
        ------
        DataError
            The file is no caffemodel, or is torn.
        RunError
            A shape does not fit, or no layer matches; no weight has changed.
        """
        stored = read_weights(path)
        copied = [name for name in self.params if name in stored]
        for name in copied:
            blobs = self.params[name]
            if len(stored[name]) != len(blobs):
                raise RunError(
                    f'{path}: layer "{name}" has {len(stored[name])} blobs, expected {len(blobs)}. '
                    "Use weights of the same net, or rename the layer to start it afresh."
                )
            for blob, value in zip(blobs, stored[name], strict=True):
                if not _same_shape(value.shape, blob.shape):
                    raise RunError(
                        f"{path}: {blob.name} has shape {value.shape}, expected {blob.shape}. "
                        "Use weights of the same net, or rename the layer to start it afresh."
                    )
        if not copied:
            raise RunError(
                f"{path}: no layer of the file ({', '.join(stored) or 'none'}) is in the net "
                f"({', '.join(self.params) or 'no parameters'}). Use weights of this net."
            )
        for name in copied:  # only now that everything fits
            for blob, value in zip(self.params[name], stored[name], strict=True):
                blob.data[...] = value.reshape(blob.shape)
        return copied

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights to a .caffemodel that Caffe can read; never leaves half a file."""
        blobs = {name: [blob.data for blob in own] for name, own in self.params.items()}
        write_weights(path, self.graph.message(), blobs)

    def close(self) -> None:
        """Stop the data layers' background readers."""
        for layer in self.data_layers.values():
            layer.close()

    def doubts(self) -> list[str]:
        """Return why scores of this net are worth nothing now; usually there is no reason."""
        reasons = []
        for planned in self.assembly.layers:
            values = [blob.data for blob in self.params.get(planned.node.name, ())]
            reason = planned.layer.doubt(values)
            if reason is not None:
                reasons.append(f"{planned.node.at()}: {planned.node.label}: {reason}")
        return reasons

    def first_non_finite(self) -> str | None:
        """Name the first array with a NaN or an infinity, in the order in which one spreads.

        Blobs from the first layer on (or, where the layer's weights are the cause, those), then
        gradients from the last layer on, then weights: an update may have spoilt these already.
        Gradients whose memory was reused are passed over, and so are values where an update may
        have spoilt the weights to compute them again from.
        """

        def bad(buffer: Buffer) -> bool:
            return not np.isfinite(self._state.array(buffer)).all()

        sound = not any(bad(param.data) for param in self.assembly.params)
        if sound and any(buffer.kind == "data" for buffer in self._lost):
            self._compute_again()

        def bad_blob(planned: PlannedLayer, kind: str) -> str | None:
            # Every layout is looked at: after a run that failed, none is known to be the newest.
            for top in planned.node.tops:
                blob = self.assembly.blobs[top]
                homes = [home for (which, _), home in blob.homes.items() if which == kind]
                if any(root(home) not in self._lost and bad(home) for home in homes):
                    return blob.name
            return None

        def params(planned: PlannedLayer) -> list[PlannedParam]:
            return [self.assembly.params[index] for index in planned.params]

        cause = None  # weights whose layer's values were not kept: the next bad blob tells
        for planned in self.assembly.layers:
            name = bad_blob(planned, "data")
            spoilt = next((p.label for p in params(planned) if bad(p.data)), None)
            if spoilt is not None and cause is None:
                lost = any(self._is_lost(top, "data") for top in planned.node.tops)
                if lost or name is not None:
                    cause = f"{planned.node.label}, weights {spoilt}"
            if name is not None:
                return cause or f'{planned.node.label}, blob "{name}"'
        for planned in reversed(self.assembly.layers):
            name = bad_blob(planned, "diff")
            if name is not None:
                return f'{planned.node.label}, gradient of blob "{name}"'
            for param in params(planned):
                if param.learns and param.diff not in self._lost and bad(param.diff):
                    return f"{planned.node.label}, gradient of {param.label}"
        for planned in self.assembly.layers:
            for param in params(planned):
                if bad(param.data):
                    return f"{planned.node.label}, weights {param.label}"
        return None


def _same_shape(stored: Shape, wanted: Shape) -> bool:
    """Compare shapes as Caffe does: a legacy 4-D shape may begin with ones."""
    if stored == wanted:
        return True
    return (
        len(stored) == 4
        and prod(stored) == prod(wanted)
        and stored == (1,) * (4 - len(wanted)) + wanted
    )
