"""`cgdnn time`: measure the forward and backward pass of every layer of a net."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cgdnn.cli import _scored
from cgdnn.cli._log import log
from cgdnn.runtime.net import Net, TaskTime

PASSES = ("forward", "backward")
NANOSECONDS = 1e-6  # in milliseconds


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "time",
        help="measure the passes of every layer",
        description=f"{__doc__} The tasks of an iteration overlap, so a layer's time is that of "
        "its tasks, added up over all workers; the totals are what passed on the clock.",
        allow_abbrev=False,
    )
    _scored.add_options(parser)
    parser.add_argument("--phase", "-phase", choices=("TRAIN", "TEST"), default="TRAIN")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Log the average time of every layer and of the passes (Caffe, caffe.cpp, ``time``)."""
    with _scored.net_of(args, args.phase) as net:
        _measure(net, args.iterations)
    return 0


def _measure(net: Net, iterations: int) -> None:
    log.info("Performing Forward")
    log.info("Performing Backward")
    net.run(PASSES, trace=True)  # compiles, plans, reads the first batches
    log.info("Initial loss: %g", net.loss)
    log.info("*** Benchmark begins ***")
    log.info("Testing for %d iterations.", iterations)
    layers: defaultdict[tuple[int, str], float] = defaultdict(float)
    clock = dict.fromkeys(PASSES, 0.0)
    total = 0.0
    for iteration in range(iterations):
        begin = time.perf_counter()
        tasks = net.run(PASSES, trace=True)
        milliseconds = 1e3 * (time.perf_counter() - begin)
        total += milliseconds
        log.info("Iteration: %d forward-backward time: %g ms.", iteration + 1, milliseconds)
        by_pass = _split(tasks)
        for which, those in by_pass.items():
            clock[which] += NANOSECONDS * _span(those)
            for task in those:
                layers[task.layer, which] += NANOSECONDS * (task.end - task.begin)
    log.info("Average time per layer: ")
    for index, planned in enumerate(net.assembly.layers):
        for which in PASSES:
            average = layers[index, which] / iterations
            log.info("%10s\t%s: %g ms.", planned.node.name, which, average)
    log.info("Average Forward pass: %g ms.", clock["forward"] / iterations)
    log.info("Average Backward pass: %g ms.", clock["backward"] / iterations)
    log.info("Average Forward-Backward: %g ms.", total / iterations)
    log.info("Total Time: %g ms.", total)
    log.info("*** Benchmark ends ***")


def _split(tasks: Sequence[TaskTime]) -> dict[str, list[TaskTime]]:
    """Sort tasks such as ``conv1.backward_weights[0:10]`` by their pass."""
    split: dict[str, list[TaskTime]] = {which: [] for which in PASSES}
    for task in tasks:
        which = task.name.rpartition(".")[2]
        split["backward" if which.startswith("backward") else "forward"].append(task)
    return split


def _span(tasks: Sequence[TaskTime]) -> int:
    """Return the nanoseconds from the begin of the first task to the end of the last one."""
    return max((t.end for t in tasks), default=0) - min((t.begin for t in tasks), default=0)
