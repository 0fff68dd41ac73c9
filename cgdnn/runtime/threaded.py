"""The executor: a compiled, dependency-driven loop on persistent worker threads.

State of the whole module: one `_Pool` a process, which owns a block of int64 (`control`) that is
never freed while it lives. The block holds one record for each helper thread (a futex word) and
one record for each job. A job is one run of one bound program by one calling thread.

A job's ready tasks are bits, the most urgent first. A worker takes the lowest bit, runs the task,
counts down the tasks that waited for it and sets the bits of those that are ready. The caller
works on its own job only; helper number k works on any job whose thread limit admits it. A worker
without work spins for at most some 50 us (not at all where more workers than cores could be
awake), then sleeps until somebody wakes it.

Why it cannot miss a wake-up: a sleeper first announces itself, then looks for work once more; who
sets a bit looks for announced sleepers afterwards, or takes a task itself, after which it looks for
sleepers if more are ready; all accesses are sequentially consistent.
Why memory is safe: a helper counts itself into a job before it looks whether the job is active,
and the caller leaves only after it has cleared `active` and the count is zero.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import threading
from collections.abc import Callable
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
    trailing_zeros,
    wake_one,
)
from cgdnn.runtime.state import BoundProgram, Ints

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
_READY = 2 * _LINE  # ready tasks that no worker has taken; may be off for an instant
_LEFT = 3 * _LINE  # tasks not finished yet
_WAITING = 4 * _LINE  # the caller's futex word: 1 while it sleeps
_FAILED = 5 * _LINE  # task + 1 of the failed task that comes first
_FIXED = 6 * _LINE  # below: written by the caller before the job becomes active
(
    _ENTRIES,
    _SLOTS,
    _COUNTS,
    _STARTS,
    _SUCCESSORS,
    _BITS,  # one for each task, by its place in the order of urgency
    _ORDER,
    _RANKS,  # place of each task in that order
    _STATUS,
    _TRACE,
    _WORDS,  # of _BITS
    _LIMIT,
    _SPINS,
) = (_FIXED + 8 * i for i in range(13))
_RECORD = _FIXED + 2 * _LINE
_CONTROL_BYTES = _JOBS + MAX_JOBS * _RECORD


@device
def _word(base, index):  # type: ignore[no-untyped-def]
    return load(base + 8 * index)


@device
def _pop(job):  # type: ignore[no-untyped-def]
    """Take the most urgent ready task; -1 if there is none."""
    bits = load(job + _BITS)
    for word in range(load(job + _WORDS)):
        while True:
            ready = _word(bits, word)
            if ready == 0:
                break
            lowest = ready & -ready
            if fetch_and(bits + 8 * word, ~lowest) & lowest:
                fetch_add(job + _READY, -1)
                return _word(load(job + _ORDER), 64 * word + trailing_zeros(lowest))
    return -1


@device
def _push(job, task):  # type: ignore[no-untyped-def]
    rank = _word(load(job + _RANKS), task)
    fetch_or(load(job + _BITS) + 8 * (rank >> 6), 1 << (rank & 63))
    fetch_add(job + _READY, 1)


@device
def _none_ready(job):  # type: ignore[no-untyped-def]
    return load(job + _READY) <= 0


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
        helper = trailing_zeros(asleep)
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
def _wake(control, job):  # type: ignore[no-untyped-def]
    """Wake the caller if it sleeps, else a helper."""
    limit = load(job + _LIMIT)
    if not _wake_caller(job) and limit > 1:
        _wake_helper(control, limit)


@device
def _work(control, job, worker):  # type: ignore[no-untyped-def]
    """Run ready tasks of the job until none is ready or the job is done."""
    entries, slots, counts = load(job + _ENTRIES), load(job + _SLOTS), load(job + _COUNTS)
    starts, successors = load(job + _STARTS), load(job + _SUCCESSORS)
    trace = load(job + _TRACE)
    while load(job + _FAILED) == 0:
        task = _pop(job)
        if task < 0:
            return
        if not _none_ready(job):
            _wake(control, job)
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
        pushed = 0
        for edge in range(_word(starts, task), _word(starts, task + 1)):
            successor = _word(successors, edge)
            if fetch_add(counts + 8 * successor, -1) == 1:
                _push(job, successor)
                if pushed > 0:  # one of them is for this worker itself
                    _wake(control, job)
                pushed += 1
        if fetch_add(job + _LEFT, -1) == 1:
            _wake_caller(job)
            return


@device
def _visit(control, job, helper):  # type: ignore[no-untyped-def]
    """Work on a job if it is active, admits this helper and has a ready task; 1 if so."""
    if load(job + _ACTIVE) == 0 or _none_ready(job):
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
    """Publish a job and run it to its end on the calling thread (a C function)."""
    store(job + _ACTIVE, 1)
    while not _done(job):
        _work(control, job, 0)
        spins = load(job + _SPINS)
        while spins > 0 and _none_ready(job) and not _done(job):
            pause()
            spins -= 1
        if _none_ready(job) and not _done(job):
            store(job + _WAITING, 1)
            while load(job + _WAITING) == 1 and _none_ready(job) and not _done(job):
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
        block = np.zeros((_CONTROL_BYTES + _LINE) // 8, np.int64)
        first = -block.ctypes.data % _LINE // 8
        self.words = block[first : first + _CONTROL_BYTES // 8]
        self.control = self.words.ctypes.data
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Numbers of the jobs that nobody uses."""
        for number in range(MAX_JOBS):
            self.free.put(number)
        self.cores = machine.cores_allowed()

    def crowded(self, helpers: int) -> bool:
        """Have at least so many helpers; tell whether more threads than cores may be awake."""
        if len(self.threads) < helpers:
            self._grow(helpers)
        callers = MAX_JOBS - self.free.qsize()
        crowded = callers + len(self.threads) > self.cores
        self.words[_POOL_SPINS // 8] = 0 if crowded else SPINS // 2
        return crowded

    def _grow(self, helpers: int) -> None:
        with self.lock:
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

    def shut_down(self) -> None:
        """End the helper threads; they finish the task that they are in."""
        self.words[_SHUTDOWN // 8] = 1
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


def check_threads(threads: int) -> None:
    """Check a count of workers.

    Raises
    ------
    UsageError
        It is below 1, or larger than the pool can be.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise UsageError(
            f"got {threads} threads, expected 1 to {MAX_THREADS}. "
            f"Use {machine.cores_allowed()} for every core."
        )


class ThreadedRun:
    """Runs one bound program again and again on up to `threads` workers.

    Parameters
    ----------
    program : BoundProgram
    threads : int
        Workers, the calling thread included; those beyond the cores allowed stay asleep.
    """

    def __init__(self, program: BoundProgram, threads: int) -> None:
        check_threads(threads)
        self.program = program
        self.threads = threads
        count = len(program.tasks)
        self._status = np.zeros(count, np.int64)
        self._trace = np.zeros((count, 3), np.int64)
        order = np.array(program.program.order, np.int64)
        ranks = np.argsort(order)
        ready = np.zeros(-(-count // 64) * 64, bool)
        ready[ranks[program.waits == 0]] = True
        # What a run counts down and takes from: wait counts, then the bits of the ready tasks.
        self._first = np.concatenate(
            [program.waits, np.packbits(ready, bitorder="little").view(np.int64)]
        )
        self._live = self._first.copy()
        self._keep = (order, ranks)
        self._record = np.zeros((_RECORD - _READY) // 8, np.int64)
        """What a run writes into its job's record, from `_READY` on."""
        for offset, value in (
            (_READY, int(ready.sum())),
            (_LEFT, count),
            (_ENTRIES, program.entries.ctypes.data),
            (_SLOTS, program.slots.ctypes.data),
            (_COUNTS, self._live.ctypes.data),
            (_STARTS, program.successor_starts.ctypes.data),
            (_SUCCESSORS, program.successors.ctypes.data),
            (_BITS, self._live.ctypes.data + 8 * count),
            (_ORDER, order.ctypes.data),
            (_RANKS, ranks.ctypes.data),
            (_STATUS, self._status.ctypes.data),
            (_WORDS, len(ready) // 64),
        ):
            self._set(offset, value)

    def _set(self, offset: int, value: int) -> None:
        self._record[(offset - _READY) // 8] = value

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
        if not self.program.tasks:
            return None
        pool = _the_pool()
        workers = min(self.threads, pool.cores)
        np.copyto(self._live, self._first)
        self._set(_LIMIT, workers)
        self._set(_TRACE, self._trace.ctypes.data if trace else 0)
        number = pool.free.get()
        try:
            self._set(_SPINS, 0 if pool.crowded(workers - 1) else SPINS)
            job = _JOBS + number * _RECORD
            pool.words[(job + _READY) // 8 : (job + _RECORD) // 8] = self._record
            _loops()[1](pool.control, pool.control + job)
            failed = int(pool.words[(job + _FAILED) // 8])
        finally:
            pool.free.put(number)
        if failed:
            return failed - 1, int(self._status[failed - 1])
        return None

    @property
    def trace(self) -> Ints:
        """Begin and end (nanoseconds) and worker of every task of the last traced run."""
        return self._trace
