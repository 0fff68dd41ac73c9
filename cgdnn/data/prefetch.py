"""Prepare the next batches on a background thread while the current one is being used."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from cgdnn.data.cursor import BatchSource

Batch = tuple[npt.NDArray[Any], ...]


def _never_preempt() -> None:
    """Let this thread run only where a core is idle or another thread's turn is over.

    It is woken amid the task that all others wait for, and must not take that task's core.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


class _Pipeline:
    """One background thread and its buffers, from a start position until stopped.

    `ready` holds filled batches in order, and last what has ended the thread, if anything has;
    `free` holds empty ones. The queues' own waiting costs the consumer's task, which all others
    wait for, less than a condition's.
    """

    def __init__(self, source: BatchSource, batches: list[Batch], position: int) -> None:
        self.pid = os.getpid()
        self.ready: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self.free: SimpleQueue[Batch] = SimpleQueue()
        for batch in batches:
            self.free.put(batch)
        self._stopping = False
        self._source = source
        self._position = position
        self._step = source.shapes[0][0]
        self.thread = threading.Thread(target=self._run, name="cgdnn-prefetch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _never_preempt()
        while True:
            batch = self.free.get()
            if self._stopping:
                return
            try:
                self._source.read_batch(self._position, batch)
            except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
                self.ready.put(error)
                return
            self.ready.put(batch)
            self._position += self._step

    def take(self) -> Batch:
        """Return the next filled batch; raise what ended the thread once all are taken."""
        batch = self.ready.get()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def stop(self) -> None:
        """End the thread and wait for it; in a forked child, where there is none, do nothing."""
        if self.pid != os.getpid():
            return
        self._stopping = True
        self.free.put(())  # wakes the thread
        if self.thread is not threading.current_thread():  # the collector may run this anywhere
            self.thread.join()


class Prefetcher:
    """Deliver the batches of a source in order, reading ahead on a background thread.

    The thread starts with the first `next` and sleeps while `depth` batches wait. It ends on
    `close`, on `seek`, when the prefetcher is collected, and before the interpreter exits. After a
    fork the child reads on by a thread of its own from the same position.

    Parameters
    ----------
    source : BatchSource
        Read by the background thread alone, until `close` closes it.
    dtype : numpy dtype
        float32 or float64: the type of the delivered arrays.
    depth : int
        Most batches to hold ready.

    Attributes
    ----------
    shapes : list of tuple of int
        Shapes of the arrays of a batch.
    batch_size : int
        Records in a batch.
    position : int
        Records delivered so far; what was merely read ahead does not count.
    warnings : list of str
        Those of the source.
    waited : float
        Seconds that `next` has waited so far.
    """

    def __init__(self, source: BatchSource, dtype: npt.DTypeLike, depth: int = 3) -> None:
        self._source = source
        self._dtype = np.dtype(dtype)
        self._depth = depth
        self._pipeline: _Pipeline | None = None
        self._finalizer: weakref.finalize[[], Prefetcher] | None = None
        self._lent: Batch | None = None
        self.shapes = source.shapes
        self.batch_size = source.shapes[0][0]
        self.warnings = source.warnings
        self.waited = 0.0
        self.position = 0

    def next(self) -> Batch:
        """Return the next batch: arrays of `shapes`, valid until `release` or the following call.

        Raises
        ------
        DataError
            A record of this batch cannot be read. Calling again tries the same batch again.
        """
        pipeline = self._pipeline
        if pipeline is None or pipeline.pid != os.getpid():
            pipeline = self._start()
        self.release()
        begin = time.perf_counter()
        try:
            self._lent = pipeline.take()
        except Exception:
            self._stop()
            raise
        self.waited += time.perf_counter() - begin
        self.position += self.batch_size
        return self._lent

    def release(self) -> None:
        """Let the thread fill the arrays of the last batch again.

        It takes the GIL for that, so a consumer that needs the GIL releases late.
        """
        if self._pipeline is not None and self._lent is not None:
            self._pipeline.free.put(self._lent)
        self._lent = None

    def seek(self, position: int) -> None:
        """Continue with the batch that begins at record `position` (records delivered so far)."""
        self._stop()
        self.position = position

    def close(self) -> None:
        """End the thread and close the source; closing twice is fine."""
        self._stop()
        self._source.close()

    def _start(self) -> _Pipeline:
        self._stop()
        batches = [
            tuple(np.zeros(shape, self._dtype) for shape in self.shapes)
            for _ in range(self._depth + 1)  # one is in the consumer's hands
        ]
        pipeline = _Pipeline(self._source, batches, self.position)
        self._pipeline = pipeline
        self._finalizer = weakref.finalize(self, pipeline.stop)
        return pipeline

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer = None
        self._pipeline = None
        self._lent = None
