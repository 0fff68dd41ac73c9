"""The memory of a net, and programs bound to it.

Binding turns a program's symbolic tasks into what executors read: an entry address and a slot
array a task, wait counts and successors. Numbers that change from run to run (learning rates, the
counter of random numbers) are patched into their slots by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from cgdnn.kernels._jit import INT, REAL, Kernel, real_bits
from cgdnn.kernels._jit import Argument as Declared
from cgdnn.layers._base import Argument, Buffer, Slot, Use
from cgdnn.plan.buffers import ALIGNMENT, aligned, root
from cgdnn.plan.tasks import Program, Task
from cgdnn.runtime.chained import chain_entry, chain_slots
from cgdnn.runtime.python_task import PythonTasks

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


def allocate(size: int) -> npt.NDArray[np.uint8]:
    """Return `size` zeroed bytes that begin at a multiple of 64."""
    block = np.zeros(size + ALIGNMENT, np.uint8)
    offset = -block.ctypes.data % ALIGNMENT
    return block[offset : offset + size]


class State:
    """The arrays behind the buffers of one net.

    Parameters
    ----------
    dtype : str
        "float32" or "float64": the type of every "real" buffer.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self._arrays: dict[Buffer, Array] = {}
        self._shared = {"arena": allocate(0), "scratch": allocate(0)}

    def numpy_type(self, buffer: Buffer) -> np.dtype[Any]:
        """Return the element type of `buffer`."""
        return np.dtype(self.dtype if buffer.dtype == "real" else buffer.dtype)

    def array(self, buffer: Buffer) -> Array:
        """Return the array of a long-lived buffer, zeroed on first use."""
        if buffer not in self._arrays:
            if buffer.alias is not None:
                self._arrays[buffer] = self.array(buffer.alias).reshape(buffer.shape)
            else:
                dtype = self.numpy_type(buffer)
                memory = allocate(buffer.size * dtype.itemsize)
                self._arrays[buffer] = memory.view(dtype).reshape(buffer.shape)
                if buffer.values is not None:
                    self._arrays[buffer][...] = buffer.values
        return self._arrays[buffer]

    def adopt(self, buffer: Buffer, array: Array) -> None:
        """Let `buffer` be this array, which belongs to another net (shared weights)."""
        self._arrays[buffer] = array

    def fits(self, program: Program) -> bool:
        """Return whether `program` needs no larger arena than there is."""
        return program.arena_bytes <= self._shared["arena"].size

    def shared(self, name: str, size: int) -> npt.NDArray[np.uint8]:
        """Return the memory "arena" or "scratch", grown to at least `size` bytes.

        All programs of a net use the same, since they never run at the same time.
        """
        if self._shared[name].size < size:
            self._shared[name] = allocate(size)
        return self._shared[name]


@dataclass(eq=False)
class BoundProgram:
    """A program with addresses: what executors run.

    Attributes
    ----------
    entries, slots : array of int64
        Address of each task's compiled entry and of its slot array (0 for a join).
    waits : array of int64
    successor_starts, successors : array of int64
        Successors of task t are ``successors[successor_starts[t]:successor_starts[t + 1]]``.
    scratch_stride : int
        Bytes from one worker's scratch block to the next.
    python : PythonTasks
        The tasks that run Python functions, and what they raised.
    """

    program: Program
    entries: Ints
    slots: Ints
    waits: Ints
    successor_starts: Ints
    successors: Ints
    python: PythonTasks
    _memory: Ints
    _patches: dict[str, Ints]
    _keep: list[Any]

    @property
    def tasks(self) -> list[Task]:
        """The tasks by number."""
        return self.program.tasks

    def patch(self, name: str, value: float) -> None:
        """Set the number `name` in every slot that asks for it (nothing where none does)."""
        if self.python.numbers.get(name) == value:
            return
        self.python.numbers[name] = int(value) if name == "counter" else value
        places = self._patches.get(name)
        if places is None:
            return
        if name == "counter":
            self._memory[places] = int(value)
        else:
            self._memory.view(np.float64)[places] = value


def bind(program: Program, state: State, workers: int) -> BoundProgram:
    """Give every task of `program` its entry and its slots.

    Parameters
    ----------
    program : Program
    state : State
        Holds the memory; short-lived and lent buffers lie in its arena.
    workers : int
        How many workers may run the program; each has a scratch block.
    """
    stride = aligned(program.scratch_bytes)
    scratch = state.shared("scratch", stride * workers)
    arena = state.shared("arena", program.arena_bytes)
    memory: list[int] = []
    starts: list[int] = []
    entries: list[int] = []
    patches: dict[str, list[int]] = {}
    python = PythonTasks()
    first_writers: dict[Buffer, Any] = {}

    def place_of(buffer: Buffer) -> int:
        base = root(buffer)
        if base.kind == "scratch":
            return int(scratch.ctypes.data) + program.places[base]
        if base in program.places:
            return int(arena.ctypes.data) + program.places[base]
        return int(state.array(base).ctypes.data)

    def shape_of(use: Use) -> tuple[int, ...]:
        if use.shape is not None:
            return use.shape
        buffer = use.buffer
        return (buffer.rows, *buffer.shape) if buffer.kind == "partial" else buffer.shape

    def array_of(use: Use) -> Array:
        base = root(use.buffer)
        assert base.kind != "scratch", f"{base.name}: a Python step can make arrays of its own"
        if base not in program.places:
            return state.array(base).reshape(shape_of(use))
        start, dtype = program.places[base], state.numpy_type(base)
        stop = start + prod(shape_of(use)) * dtype.itemsize
        return arena[start:stop].view(dtype).reshape(shape_of(use))

    def number(task: Task, argument: Argument, declared: Declared) -> int:
        if isinstance(argument, Slot):
            if argument.name in ("begin", "end", "piece"):
                return int(getattr(task, argument.name))
            if argument.of is not None:
                owner = first_writers.setdefault(root(argument.of), task.step)
                if owner is not task.step:
                    return real_bits(1.0)
            patches.setdefault(argument.name, []).append(len(memory))
            return 0
        assert not isinstance(argument, Use)
        return real_bits(argument) if declared == REAL else int(argument)

    def add_slots(task: Task) -> list[tuple[int, int]]:
        """Add the slots of a compiled task; return its pointers into what is carried.

        Each is its place, and how far behind the worker's block the whole blob would begin.
        """
        step, carried = task.step, list[tuple[int, int]]()
        assert step is not None
        assert isinstance(step.kernel, Kernel)
        for argument, declared in zip(step.arguments, step.kernel.arguments, strict=True):
            if not isinstance(argument, Use):
                assert declared in (INT, REAL), (task.name, declared)
                memory.append(number(task, argument, declared))
                continue
            shape = shape_of(argument)
            assert len(shape) == declared.ndim, (task.name, argument.buffer.name, shape)
            base = root(argument.buffer)
            if base in program.carried:
                size = base.size * state.numpy_type(base).itemsize
                offset = program.places[base] - size * task.begin // step.extent
                carried.append((len(memory), offset))
                memory.append(0)
            else:
                memory.append(place_of(argument.buffer))
            if declared.kind == "scratch":
                memory.append(stride)
            memory.extend(shape)
        return carried

    for index, task in enumerate(program.tasks):
        step = task.step
        if task.chain:
            pointers: list[tuple[int, int]] = []
            kernels: list[tuple[int, int]] = []
            for part in task.parts:
                assert part.step is not None
                assert isinstance(part.step.kernel, Kernel)
                kernels.append((part.step.kernel.entry(state.dtype), len(memory)))
                pointers += add_slots(part)
            starts.append(len(memory))
            entries.append(chain_entry())
            block = int(scratch.ctypes.data)
            memory += chain_slots(block, stride, pointers, kernels, len(memory))
            continue
        starts.append(len(memory))
        if step is None:
            entries.append(0)
        elif isinstance(step.kernel, Kernel):
            entries.append(step.kernel.entry(state.dtype))
            add_slots(task)
        else:
            arguments = [array_of(a) if isinstance(a, Use) else a for a in step.arguments]
            entries.append(python.add(index, step.kernel, arguments))
            memory.append(index)
    slots = np.array(memory, np.int64)
    address = int(slots.ctypes.data)
    counts = np.array([0, *(len(s) for s in program.successors)], np.int64)
    return BoundProgram(
        program,
        np.array(entries, np.int64),
        np.array([address + 8 * start for start in starts], np.int64),
        np.array(program.waits, np.int64),
        np.cumsum(counts),
        np.array([s for many in program.successors for s in many], np.int64),
        python,
        slots,
        {name: np.array(places, np.int64) for name, places in patches.items()},
        [scratch, arena, state],
    )
