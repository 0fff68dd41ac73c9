"""`cgdnn train`: train a net, from a solver or, with a default solver, from the net alone."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import Any

from cgdnn.cli._log import LogHandler, LogLines, log, log_on_stderr, warn_of_gpu, weighted
from cgdnn.cli._tuning import add_exact_option, add_tune_option, tuning_of
from cgdnn.errors import RunError, UsageError
from cgdnn.netdef.read import find_file, is_solver_text
from cgdnn.runtime.events import write_trace
from cgdnn.runtime.net import Net
from cgdnn.solvers._base import Event, Iterated, Saved, Solver, Tested
from cgdnn.solvers.default import default_solver

TRACED = 20
"""Iterations that `--trace` shows."""
STDERR = 2
SHOW_CURSOR = b"\x1b[?25h\n"


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="train a net",
        usage="cgdnn train FILE [FIELD=VALUE ...] [options]",
        description=f"{__doc__} Ctrl-C finishes the iteration, writes a snapshot and ends; a "
        "second Ctrl-C ends at once. SIGHUP writes a snapshot; SIGTERM writes one and ends.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        metavar="FILE or FIELD=VALUE",
        nargs="*",
        help="a solver or a net; solver fields to replace, such as base_lr=0.005",
    )
    parser.add_argument("--solver", "-solver", metavar="FILE", help="the same as FILE")
    parser.add_argument(
        "--weights", "-weights", metavar="FILE[,FILE]", help="start from these .caffemodel files"
    )
    parser.add_argument(
        "--snapshot", "-snapshot", metavar="FILE", help="go on from this .solverstate"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="workers; all cores by default")
    parser.add_argument("--max-iter", type=int, metavar="N", help="the same as max_iter=N")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help=f"write when each task of the first {TRACED} iterations ran, for ui.perfetto.dev",
    )
    add_tune_option(parser)
    add_exact_option(parser)
    parser.add_argument("--gpu", "-gpu", metavar="IDS", help="accepted and ignored")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train; return 0, or 128 + the number of the signal that stopped it."""
    path, overrides = _split_words(args)
    # A closed log must not end an iteration half-way, so its lines are dropped.
    with log_on_stderr(drops=True) as handler:
        warn_of_gpu(args)
        with contextlib.closing(_make_solver(path, overrides, args)) as solver:
            if args.trace is not None:
                solver.callbacks.append(_Trace(solver, args.trace))
            return _train(solver, handler)


def _split_words(args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return the solver's or net's path and the fields to replace."""
    overrides: dict[str, str] = {}
    files = [args.solver] if args.solver is not None else []
    for word in args.words:
        if re.match(r"[a-z_0-9]+=", word):
            name, _, value = word.partition("=")
            overrides[name] = value
        else:
            files.append(word)
    if args.max_iter is not None:
        overrides["max_iter"] = str(args.max_iter)
    if len(files) != 1:
        raise UsageError(
            f"train: got {len(files)} files ({', '.join(files) or 'none'}), expected one solver or "
            "net. Write it as: cgdnn train lenet_solver.prototxt"
        )
    if args.weights is not None and args.snapshot is not None:
        raise UsageError(
            "train: got --weights and --snapshot, expected one of them: a snapshot has weights of "
            "its own. Leave one out."
        )
    return files[0], overrides


def _make_solver(path: str, overrides: dict[str, str], args: argparse.Namespace) -> Solver:
    source: Any = path
    bare = not is_solver_text(path)
    if bare:
        source = default_solver(path)
        if "max_iter" in overrides and source.test_iter:
            overrides.setdefault("test_interval", overrides["max_iter"])  # the test is at the end
    solver = Solver(
        source,
        overrides=overrides,
        threads=args.threads,
        weights=args.weights,
        tuning=tuning_of(args),
        lend=True,
        exact=args.exact,
    )
    if bare:
        fields = ", ".join(str(solver.param).splitlines())
        log.info("%s is a net, so it is trained with the default solver: %s", path, fields)
    if args.weights is not None:
        log.info("Finetuning from %s", args.weights)
    if args.snapshot is not None:
        log.info("Resuming from %s", args.snapshot)
        solver.restore(args.snapshot)
    return solver


def _train(solver: Solver, handler: LogHandler) -> int:
    log.info("Use CPU, %d threads.", solver.net.threads)
    if solver.param.random_seed < 0:
        log.info("random_seed %d (none is given)", solver.seed)
    for name, text in _sources(solver.net):
        log.info("Data of %s: %s", name, text)
    images = _images(solver)
    terminal = sys.stderr.isatty()
    if terminal:
        from cgdnn.cli._progress import ProgressBar  # rich takes a while to import

        view: LogLines | ProgressBar = ProgressBar(solver, images)
    else:
        view = LogLines(solver)
    score = _Last()
    solver.callbacks += [view, score]
    log.info("Solving %s", solver.net.name)
    log.info("Learning Rate Policy: %s", solver.param.lr_policy)
    begin, first = time.monotonic(), solver.iter

    def work() -> bool:
        finished = solver.solve()
        if not finished and score.saved != solver.iter:
            solver.snapshot()  # the solver says snapshot_after_train: false; a stop saves anyway
        return finished

    # Signals reach Python on the main thread only, and not while it sits in compiled code. So the
    # iterations run on a thread of their own, and this one waits where it can be interrupted.
    with ThreadPoolExecutor(1, "cgdnn-train") as pool, _Signals(solver, terminal) as signals:
        training = pool.submit(work)
        with view.shown():
            while not wait([training], timeout=0.1).done:
                view.refresh()
                signals.report()
                if handler.closed and not signals.stopped_by:
                    signals.stop(signal.SIGPIPE)
        finished = training.result()
    seconds = time.monotonic() - begin
    log.info("Optimization Done." if finished else "Optimization stopped early.")
    done = solver.iter - first
    rate = f"{done * images / seconds:.0f} images/s"
    log.info("%d iterations in %.1f s, %s%s", done, seconds, rate, score.text)
    return 128 + signals.stopped_by if signals.stopped_by else 0


class _Trace:
    """Writes the trace of the first iterations, or of all where there are fewer."""

    def __init__(self, solver: Solver, path: str) -> None:
        self._solver = solver
        self._path = path
        self._last = min(solver.iter + TRACED, solver.param.max_iter)
        solver.traced = []

    def __call__(self, event: Event) -> None:
        traced = self._solver.traced
        if isinstance(event, Iterated) and event.iteration == self._last and traced is not None:
            self._solver.traced = None
            try:
                write_trace(self._path, traced, [layer.name for layer in self._solver.net.layers])
            except OSError as error:
                raise RunError(
                    f"--trace {self._path}: cannot be written: {error.strerror}. Name another file."
                ) from error
            log.info("Trace of the first iterations: %s", self._path)


class _Last:
    """Remembers the last test and the last snapshot."""

    def __init__(self) -> None:
        self.text = ""
        self.saved = -1

    def __call__(self, event: Event) -> None:
        match event:
            case Tested(_, net, _, outputs):
                scores = ", ".join(map(weighted, outputs))
                self.text = f"; last test (net #{net}): {scores}"
            case Saved(iteration, _, _):
                self.saved = iteration


class _Signals:
    """Turns signals into requests to the solver, while in a ``with`` block.

    The first SIGINT or SIGTERM asks for a stop after the iteration, the second of either ends the
    process at once; SIGHUP asks for a snapshot. A handler does nothing else, since the main
    thread may be interrupted while it holds a lock; `report` logs what came.
    """

    def __init__(self, solver: Solver, terminal: bool) -> None:
        self._solver = solver
        self._terminal = terminal
        self._before: dict[int, Any] = {}
        self._untold: list[int] = []
        self.stopped_by = 0

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP and self.stopped_by:
            if self._terminal:
                os.write(STDERR, SHOW_CURSOR)  # the bar has hidden it
            os._exit(128 + number)
        self._untold.append(number)
        if number == signal.SIGHUP:
            self._solver.request("snapshot")
        else:
            self.stop(number)

    def stop(self, number: int) -> None:
        """Ask for a stop because of this signal."""
        self.stopped_by = number
        self._solver.request("stop")

    def report(self) -> None:
        """Log the signals that came since the last call."""
        while self._untold:
            number = signal.Signals(self._untold.pop(0))
            then = "a snapshot"
            if number != signal.SIGHUP:
                then = "a snapshot, and the end (at once if it comes again)"
            log.info("%s: after this iteration comes %s", number.name, then)


def _images(solver: Solver) -> int:
    """Return how many images an iteration takes, as far as data layers or blobs tell."""
    net = solver.net
    sizes = [layer.batch_size for layer in net.data_layers.values()]
    if not sizes:
        shape = next(iter(net.blobs.values())).shape
        sizes = [shape[0] if shape else 1]
    return max(sizes) * solver.param.iter_size


def _sources(net: Net) -> Iterator[tuple[str, str]]:
    """Yield (source, what it is) for data with a SOURCE.txt beside it, as `cgdnn fetch` leaves."""
    for planned in net.assembly.layers:
        param = planned.node.param
        name = param.data_param.source or param.hdf5_data_param.source
        if planned.node.name in net.data_layers:
            told = find_file(name, planned.node.source.filename).parent / "SOURCE.txt"
            if told.is_file():
                yield name, " ".join(told.read_text().split())
