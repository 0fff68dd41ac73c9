"""Log lines on standard error, where Caffe writes them: with glog's prefix, bare on a terminal."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from cgdnn.solvers._base import Displayed, Event, Output, Saved, Solver, Tested, Testing

log = logging.getLogger("cgdnn")


class GlogFormatter(logging.Formatter):
    """Lines as glog writes them, which Caffe's log tools read.

    The prefix is ``I1130 hh:mm:ss.uuuuuu pid file:line] ``; its letter is I, W or E.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        moment = datetime.fromtimestamp(record.created)
        prefix = f"{record.levelname[0]}{moment:%m%d %H:%M:%S.%f} {record.process:>5}"
        return f"{prefix} {record.filename}:{record.lineno}] {record.getMessage()}"


class TerminalFormatter(logging.Formatter):
    """Messages without a prefix; a warning says that it is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        warns = record.levelno >= logging.WARNING
        return (
            f"{record.levelname.lower()}: {record.getMessage()}" if warns else record.getMessage()
        )


class LogHandler(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at the moment: rich puts lines above a progress bar.

    Parameters
    ----------
    drops : bool
        Drop all lines once the reader of the log has gone away, and set `closed`. Otherwise
        logging raises BrokenPipeError then.
    """

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.closed = False
        self._drops = drops
        self.setFormatter(TerminalFormatter() if sys.stderr.isatty() else GlogFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        if self.closed:
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except BrokenPipeError:
            if not self._drops:
                raise
            self.closed = True
        except OSError:
            pass  # the terminal hung up (SIGHUP tells) or the disk is full: go on without a log


@contextlib.contextmanager
def log_on_stderr(*, drops: bool = False) -> Iterator[LogHandler]:
    """Send the library's messages, warnings included, to standard error (see `LogHandler`)."""
    handler = LogHandler(drops)
    before = log.handlers[:], log.level, log.propagate
    log.handlers[:], log.propagate = [handler], False
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.handlers[:], level, log.propagate = before
        log.setLevel(level)


def warn_of_gpu(args: argparse.Namespace) -> None:
    """Warn where Caffe's option ``-gpu`` was given."""
    if args.gpu is not None:
        log.warning("--gpu: cgdnn computes on the CPU; the option has no effect")


def weighted(output: Output) -> str:
    """Return an output as Caffe logs it: ``loss = 0.7 (* 1 = 0.7 loss)``."""
    text = f"{output.name} = {output.value:g}"
    if output.weight:
        text += f" (* {output.weight:g} = {output.weight * output.value:g} loss)"
    return text


class LogLines:
    """Logs a training run line by line, as Caffe's log tools expect (Caffe, solver.cpp)."""

    def __init__(self, solver: Solver) -> None:
        self._display = solver.param.display
        self._iteration = solver.iter
        self._then = time.monotonic()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Do nothing: lines need no frame."""
        yield

    def refresh(self) -> None:
        """Do nothing: lines come with the events."""

    def __call__(self, event: Event) -> None:
        """Log an event; called on the thread that trains."""
        match event:
            case Displayed(iteration, loss, _, None):
                log.info("Iteration %d, loss = %g", iteration, loss)
            case Displayed(iteration, loss, outputs, rate):
                now = time.monotonic()
                seconds, done = now - self._then, iteration - self._iteration
                self._then, self._iteration = now, iteration
                speed = done / seconds if seconds else 0.0
                lapse = f"{speed:g} iter/s, {seconds:g}s/{self._display} iters"
                log.info("Iteration %d (%s), loss = %g", iteration, lapse, loss)
                self._log_outputs("Train", outputs)
                log.info("Iteration %d, lr = %g", iteration, rate)
            case Testing(iteration, net):
                log.info("Iteration %d, Testing net (#%d)", iteration, net)
            case Tested(_, _, loss, outputs):
                if loss is not None:
                    log.info("Test loss: %g", loss)
                self._log_outputs("Test", outputs)
            case Saved(_, model, state):
                log.info("Snapshotting to binary proto file %s", model)
                log.info("Snapshotting solver state to binary proto file %s", state)

    @staticmethod
    def _log_outputs(kind: str, outputs: Sequence[Output]) -> None:
        for number, output in enumerate(outputs):
            log.info("    %s net output #%d: %s", kind, number, weighted(output))
