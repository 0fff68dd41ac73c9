"""The executor: a compiled, dependency-driven loop on persistent worker threads.

State of the whole module: one `_Pool` a process, which owns a block of int64 (`control`) that is
never freed while it lives. The block holds one record for each helper thread (a futex word) and
one record for each job. A job is one run of one bound program by one calling thread.

A worker pops a ready task from the job's stack, runs it, counts down the tasks that waited for
it, keeps the first that became ready for itself and pushes the others. The calling thread
works on its own job only; helper number k works on any job whose thread limit admits it. A worker
without work spins for at most some 50 us (not at all where more workers than cores could be
awake), then sleeps until somebody pushes.

Why it cannot miss a wake-up: a sleeper first announces itself, then looks for work once more; a
pusher first pushes, then looks for announced sleepers; all accesses are sequentially consistent.
Why memory is safe: a helper counts itself into a job before it looks whether the job is active,
and the caller leaves only after it has cleared `active` and the count is zero.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from numba import types

from cgdnn import machine
from cgdnn.errors import UsageError
from cgdnn.kernels._jit import compile_native, device
from cgdnn.kernels.native import (
    call_task,
    compare_swap,
    fetch_add,
    fetch_and,
    fetch_or,
    load,
    now,
    pause,
    sleep_while_equal,
    store,
    wake_one,
)
from cgdnn.runtime.state import BoundProgram

MAX_THREADS = 63
MAX_JOBS = 64
SPINS = 1000
"""Turns of the waiting loop, about 20 ns each, before a worker sleeps."""

# Byte offsets. Words that different threads write lie on cache lines of their own.
_LINE = 64
_SLEEPING = 0 * _LINE  # bit k: helper k sleeps, or is about to
_SHUTDOWN = 1 * _LINE
_POOL_SPINS = 1 * _LINE + 8
_HELPERS = 2 * _LINE  # one line for each helper: its futex word
_JOBS = _HELPERS + MAX_THREADS * _LINE
# Offsets inside a job's record.
_ACTIVE = 0 * _LINE  # 1 while the job runs
_INSIDE = 1 * _LINE  # helpers that hold a reference
_HEAD = 2 * _LINE  # ready stack: (tag << 32) | (task + 1), 0 when empty
_LEFT = 3 * _LINE  # tasks not finished yet
_WAITING = 4 * _LINE  # the caller's futex word: 1 while it sleeps
_FAILED = 5 * _LINE  # task + 1 of the failed task that comes first
_FIXED = 6 * _LINE  # below: written by the caller before the job becomes active
(_ENTRIES, _SLOTS, _COUNTS, _STARTS, _SUCCESSORS, _NEXT, _STATUS, _TRACE, _LIMIT, _SPINS) = (
    _FIXED + 8 * i for i in range(10)
)
_RECORD = _FIXED + 2 * _LINE
_CONTROL_BYTES = _JOBS + MAX_JOBS * _RECORD
_TASK_BITS = 0xFFFFFFFF


@device
def _word(base, index):  # type: ignore[no-untyped-def]
    return load(base + 8 * index)


@device
def _pop(job):  # type: ignore[no-untyped-def]
    """Take a ready task; -1 if there is none."""
    links = load(job + _NEXT)
    while True:
        head = load(job + _HEAD)
        task = (head & _TASK_BITS) - 1
        if task < 0:
            return task
        below = _word(links, task)
        if compare_swap(job + _HEAD, head, (((head >> 32) + 1) << 32) | below):
            return task


@device
def _push(job, task):  # type: ignore[no-untyped-def]
    links = load(job + _NEXT)
    while True:
        head = load(job + _HEAD)
        store(links + 8 * task, head & _TASK_BITS)
        if compare_swap(job + _HEAD, head, (((head >> 32) + 1) << 32) | (task + 1)):
            return


@device
def _done(job):  # type: ignore[no-untyped-def]
    return load(job + _LEFT) == 0 or load(job + _FAILED) != 0


@device
def _wake_caller(job):  # type: ignore[no-untyped-def]
    """Wake the caller if it sleeps; return 1 if it did."""
    if load(job + _WAITING) == 1 and compare_swap(job + _WAITING, 1, 0):
        wake_one(job + _WAITING)
        return 1
    return 0


@device
def _wake_helper(control, limit):  # type: ignore[no-untyped-def]
    """Wake one sleeping helper that the limit admits, if there is one."""
    while True:
        asleep = load(control + _SLEEPING) & ((1 << (limit - 1)) - 1)
        if asleep == 0:
            return
        helper = 0
        while not (asleep >> helper) & 1:
            helper += 1
        bit = 1 << helper
        if fetch_and(control + _SLEEPING, ~bit) & bit:
            word = control + _HELPERS + helper * _LINE
            store(word, 1)
            wake_one(word)
            return


@device
def _fail(job, task):  # type: ignore[no-untyped-def]
    """Record the failed task that comes first in program order."""
    while True:
        failed = load(job + _FAILED)
        if failed != 0 and failed <= task + 1:
            return
        if compare_swap(job + _FAILED, failed, task + 1):
            return


@device
def _work(control, job, worker):  # type: ignore[no-untyped-def]
    """Run ready tasks of the job until none is ready or the job is done."""
    entries, slots, counts = load(job + _ENTRIES), load(job + _SLOTS), load(job + _COUNTS)
    starts, successors = load(job + _STARTS), load(job + _SUCCESSORS)
    trace, limit = load(job + _TRACE), load(job + _LIMIT)
    task = -1
    while True:
        if load(job + _FAILED) != 0:
            return
        if task < 0:
            task = _pop(job)
            if task < 0:
                return
        entry = _word(entries, task)
        if entry != 0:
            if trace != 0:
                store(trace + 24 * task, now())
            status = call_task(entry, _word(slots, task), worker)
            if trace != 0:
                store(trace + 24 * task + 8, now())
                store(trace + 24 * task + 16, worker)
            if status != 0:
                store(load(job + _STATUS) + 8 * task, status)
                _fail(job, task)
                _wake_caller(job)
                return
        kept = -1
        for edge in range(_word(starts, task), _word(starts, task + 1)):
            successor = _word(successors, edge)
            if fetch_add(counts + 8 * successor, -1) == 1:
                if kept < 0:
                    kept = successor
                else:
                    _push(job, successor)
                    if not _wake_caller(job) and limit > 1:
                        _wake_helper(control, limit)
        if fetch_add(job + _LEFT, -1) == 1:
            _wake_caller(job)
            return
        task = kept


@device
def _visit(control, job, helper):  # type: ignore[no-untyped-def]
    """Work on a job if it is active, admits this helper and has a ready task; 1 if so."""
    if load(job + _ACTIVE) == 0 or load(job + _HEAD) & _TASK_BITS == 0:
        return 0
    fetch_add(job + _INSIDE, 1)
    worked = 0
    if load(job + _ACTIVE) == 1 and helper + 1 < load(job + _LIMIT):
        _work(control, job, helper + 1)
        worked = 1
    fetch_add(job + _INSIDE, -1)
    if load(job + _ACTIVE) == 0:  # the caller may be waiting for the last helper to leave
        _wake_caller(job)
    return worked


@device
def _look(control, helper, first):  # type: ignore[no-untyped-def]
    """Visit the jobs, beginning at `first`; return 1 if one had work."""
    for step in range(MAX_JOBS):
        if _visit(control, control + _JOBS + ((first + step) % MAX_JOBS) * _RECORD, helper):
            return 1
    return 0


def _help(control, helper):  # type: ignore[no-untyped-def]
    """Be helper thread number `helper` until the pool shuts down (a C function)."""
    word = control + _HELPERS + helper * _LINE
    bit = 1 << helper
    while load(control + _SHUTDOWN) == 0:
        if _look(control, helper, helper):
            continue
        spins = load(control + _POOL_SPINS)
        found = 0
        while spins > 0 and found == 0:
            pause()
            spins -= 1
            found = _look(control, helper, helper)
        if found:
            continue
        store(word, 0)
        fetch_or(control + _SLEEPING, bit)
        if _look(control, helper, helper) or load(control + _SHUTDOWN) != 0:
            fetch_and(control + _SLEEPING, ~bit)
            continue
        while load(word) == 0 and load(control + _SHUTDOWN) == 0:
            sleep_while_equal(word, 0)
    return 0


def _call(control, job):  # type: ignore[no-untyped-def]
    """Run a published job to its end on the calling thread (a C function)."""
    limit = load(job + _LIMIT)
    if limit > 1 and load(job + _HEAD) & _TASK_BITS != 0:
        _wake_helper(control, limit)
    while not _done(job):
        _work(control, job, 0)
        spins = load(job + _SPINS)
        while spins > 0 and load(job + _HEAD) & _TASK_BITS == 0 and not _done(job):
            pause()
            spins -= 1
        if load(job + _HEAD) & _TASK_BITS == 0 and not _done(job):
            store(job + _WAITING, 1)
            while (
                load(job + _WAITING) == 1 and load(job + _HEAD) & _TASK_BITS == 0 and not _done(job)
            ):
                sleep_while_equal(job + _WAITING, 1)
            store(job + _WAITING, 0)
    store(job + _ACTIVE, 0)
    while load(job + _INSIDE) != 0:
        store(job + _WAITING, 1)
        if load(job + _INSIDE) != 0:
            sleep_while_equal(job + _WAITING, 1)
        store(job + _WAITING, 0)
    return 0


_Loop = Callable[[int, int], int]
_HELP_TYPE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@lru_cache(maxsize=1)
def _loops() -> tuple[_Loop, _Loop]:
    """Return the compiled helper loop and call loop; calling one releases the GIL."""
    signature = types.int64(types.int64, types.int64)
    compiled = [compile_native(function, signature) for function in (_help, _call)]
    loops = [_HELP_TYPE(address) for address in compiled]
    return loops[0], loops[1]


class _Pool:
    """The helper threads of this process and the block that they share with callers."""

    def __init__(self) -> None:
        self.block = np.zeros(_CONTROL_BYTES // 8 + 8, np.int64)
        self.control = self.block.ctypes.data + (-self.block.ctypes.data % _LINE)
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()
        self.free = list(range(MAX_JOBS))
        self.freed = threading.Condition(self.lock)
        self.cores = machine.cores_allowed()

    def grow(self, helpers: int) -> None:
        """Have at least this many helper threads."""
        with self.lock:
            if helpers + 1 > self.cores:
                self._set(_POOL_SPINS, 0)
            elif not self.threads:
                self._set(_POOL_SPINS, SPINS // 2)
            while len(self.threads) < helpers:
                number = len(self.threads)
                thread = threading.Thread(
                    target=_loops()[0],
                    args=(self.control, number),
                    name=f"cgdnn-{number + 1}",
                    daemon=True,
                )
                thread.start()
                self.threads.append(thread)

    @contextlib.contextmanager
    def job(self) -> Iterator[int]:
        """Yield the address of a job record that nobody else uses."""
        with self.freed:
            while not self.free:
                self.freed.wait()
            number = self.free.pop()
        try:
            yield self.control + _JOBS + number * _RECORD
        finally:
            with self.freed:
                self.free.append(number)
                self.freed.notify()

    def _set(self, offset: int, value: int) -> None:
        ctypes.c_int64.from_address(self.control + offset).value = value

    def shut_down(self) -> None:
        """End the helper threads; they finish the task that they are in."""
        self._set(_SHUTDOWN, 1)
        wake = _wake_everyone()
        while any(thread.is_alive() for thread in self.threads):
            wake(self.control, 0)
            for thread in self.threads:
                thread.join(0.01)


def _wake_all(control, _unused):  # type: ignore[no-untyped-def]
    for helper in range(MAX_THREADS):
        word = control + _HELPERS + helper * _LINE
        store(word, 1)
        wake_one(word)
    return 0


@lru_cache(maxsize=1)
def _wake_everyone() -> _Loop:
    signature = types.int64(types.int64, types.int64)
    return _HELP_TYPE(compile_native(_wake_all, signature))


_pool: _Pool | None = None
_pool_lock = threading.Lock()


def _the_pool() -> _Pool:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = _Pool()
        return _pool


def _forget_pool() -> None:
    """After fork: the child has none of the threads, so it starts with a new pool."""
    global _pool, _pool_lock
    _pool = None
    _pool_lock = threading.Lock()


@atexit.register
def _shut_down() -> None:
    if _pool is not None and _pool.threads:
        _pool.shut_down()


os.register_at_fork(after_in_child=_forget_pool)


class ThreadedRun:
    """Runs one bound program again and again on up to `threads` workers.

    Parameters
    ----------
    program : BoundProgram
    threads : int
        Workers, the calling thread included.
    """

    def __init__(self, program: BoundProgram, threads: int) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise UsageError(
                f"got {threads} threads, expected 1 to {MAX_THREADS}. "
                f"Use {machine.cores_allowed()} for every core."
            )
        self.program = program
        self.threads = threads
        count = len(program.tasks)
        self._counts = np.zeros(count, np.int64)
        self._links = np.zeros(count, np.int64)
        self._status = np.zeros(count, np.int64)
        self._trace = np.zeros((count, 3), np.int64)
        roots = np.flatnonzero(program.waits == 0)
        self._first_links = np.zeros(count, np.int64)
        self._first_links[roots[:-1]] = roots[1:] + 1  # the stack holds them in program order
        self._head = int(roots[0]) + 1 if count else 0

    def run(self, trace: bool = False) -> tuple[int, int] | None:
        """Run every task once.

        Parameters
        ----------
        trace : bool
            Note when each task began and ended and on which worker (see `trace`).

        Returns
        -------
        (task, status) of the failed task that comes first in the program, or None.
        """
        count = len(self.program.tasks)
        if count == 0:
            return None
        pool = _the_pool()
        if self.threads > 1:
            pool.grow(self.threads - 1)
        program = self.program
        np.copyto(self._counts, program.waits)
        np.copyto(self._links, self._first_links)
        crowded = self.threads > pool.cores
        with pool.job() as job:
            words = (ctypes.c_int64 * (_RECORD // 8)).from_address(job)
            for offset, value in (
                (_LEFT, count),
                (_WAITING, 0),
                (_FAILED, 0),
                (_ENTRIES, program.entries.ctypes.data),
                (_SLOTS, program.slots.ctypes.data),
                (_COUNTS, self._counts.ctypes.data),
                (_STARTS, program.successor_starts.ctypes.data),
                (_SUCCESSORS, program.successors.ctypes.data),
                (_NEXT, self._links.ctypes.data),
                (_STATUS, self._status.ctypes.data),
                (_TRACE, self._trace.ctypes.data if trace else 0),
                (_LIMIT, self.threads),
                (_SPINS, 0 if crowded else SPINS),
            ):
                words[offset // 8] = value
            # The tag of the ready stack goes on counting, so that a late pop cannot be mistaken.
            words[_HEAD // 8] = (((words[_HEAD // 8] >> 32) + 1) << 32) | self._head
            words[_ACTIVE // 8] = 1
            _loops()[1](pool.control, job)
            failed = words[_FAILED // 8]
        if failed:
            return failed - 1, int(self._status[failed - 1])
        return None

    @property
    def trace(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Begin and end (nanoseconds) and worker of every task of the last traced run."""
        return self._trace
