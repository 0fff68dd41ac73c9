"""Prepare the next batches on a background thread while the current one is being used."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from cgdnn.data.cursor import BatchSource

Batch = tuple[npt.NDArray[Any], ...]


class _Pipeline:
    """One background thread and its buffers, from a start position until stopped.

    State: `ready` holds filled batches in order, `free` empty ones; `failure` is set when the
    thread has ended by an exception; `stopping` asks it to end. All are guarded by `changed`.
    """

    def __init__(self, source: BatchSource, batches: list[Batch], position: int) -> None:
        self.pid = os.getpid()
        self.changed = threading.Condition()
        self.ready: deque[Batch] = deque()
        self.free = deque(batches)
        self.failure: BaseException | None = None
        self.stopping = False
        self._source = source
        self._position = position
        self._step = source.shapes[0][0]
        self.thread = threading.Thread(target=self._run, name="cgdnn-prefetch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self.free and not self.stopping:
                    self.changed.wait()
                if self.stopping:
                    return
                batch = self.free.popleft()
            failure: BaseException | None = None
            try:
                self._source.read_batch(self._position, batch)
            except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
                failure = error
            with self.changed:
                if failure is None:
                    self.ready.append(batch)
                else:
                    self.failure = failure
                self.changed.notify_all()
                if failure is not None:
                    return
            self._position += self._step

    def take(self) -> Batch:
        """Return the next filled batch; raise what ended the thread once all are taken."""
        with self.changed:
            while not self.ready and self.failure is None:
                self.changed.wait()
            if self.ready:
                return self.ready.popleft()
            assert self.failure is not None
            raise self.failure

    def give(self, batch: Batch) -> None:
        """Let the thread fill `batch` again."""
        with self.changed:
            self.free.append(batch)
            self.changed.notify_all()

    def stop(self) -> None:
        """End the thread and wait for it; in a forked child, where there is none, do nothing."""
        if self.pid != os.getpid():
            return
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
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
        self.position = 0

    def next(self) -> Batch:
        """Return the next batch: arrays of `shapes`, valid until the following call.

        Raises
        ------
        DataError
            A record of this batch cannot be read. Calling again tries the same batch again.
        """
        pipeline = self._pipeline
        if pipeline is None or pipeline.pid != os.getpid():
            pipeline = self._start()
        elif self._lent is not None:
            pipeline.give(self._lent)
            self._lent = None
        try:
            self._lent = pipeline.take()
        except Exception:
            self._stop()
            raise
        self.position += self.batch_size
        return self._lent

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
