"""`cgdnn time`: measure the forward and backward pass of every layer of a net.

Caffe's lines go to standard error. A table follows on standard output, with a row for each pass of
each layer that multiplies: rates are those of one core, in multiply-adds by the pass's definition
times two, zeros included ("dense") or, in backward passes, not ("goodput"). A line for each layer
that reads records follows: its stages run on a thread of their own, "wait" is what the iteration
waits for it.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cgdnn import machine
from cgdnn.cli import _scored
from cgdnn.cli._log import log
from cgdnn.cli._table import print_table
from cgdnn.layers.convolution import Convolution
from cgdnn.plan.arrange import PASSES as LAYER_PASSES
from cgdnn.plan.intensity import ConvolutionShape
from cgdnn.plan.shapes import PlannedLayer
from cgdnn.plan.show import Table
from cgdnn.runtime.measure import peak_flops
from cgdnn.runtime.net import Net, TaskTime

PASSES = ("forward", "backward")
NANOSECONDS = 1e-6  # in milliseconds


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "time",
        help="measure the passes of every layer",
        description=f"{__doc__} The tasks of an iteration overlap, so a layer's time is that of "
        "its tasks, added up over all workers; the totals are what passed on the clock. "
        "The regions 0 to 5 are those of spg-CNN.",
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
    net.watch_zeros()
    net.run(PASSES, lend=True, trace=True)  # compiles, plans, reads the first batches
    log.info("Initial loss: %g", net.loss)
    net.choose_kernels(net.count_zeros())  # as training does
    net.run(PASSES, lend=True, trace=True)
    log.info("*** Benchmark begins ***")
    log.info("Testing for %d iterations.", iterations)
    layers: defaultdict[tuple[int, str], float] = defaultdict(float)
    passes: defaultdict[tuple[int, str], float] = defaultdict(float)
    clock = dict.fromkeys(PASSES, 0.0)
    total = 0.0
    before = {name: layer.seconds for name, layer in net.data_layers.items()}
    for iteration in range(iterations):
        begin = time.perf_counter()
        tasks = net.run(PASSES, lend=True, trace=True)
        milliseconds = 1e3 * (time.perf_counter() - begin)
        total += milliseconds
        log.info("Iteration: %d forward-backward time: %g ms.", iteration + 1, milliseconds)
        by_pass = _split(tasks)
        for which, those in by_pass.items():
            clock[which] += NANOSECONDS * _span(those)
            for task in those:
                took = NANOSECONDS * (task.end - task.begin)
                layers[task.layer, which] += took
                passes[task.layer, _pass_of(task)] += took
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
    data = [
        _data_line(name, seconds, net.data_layers[name].seconds, iterations, total)
        for name, seconds in before.items()
    ]
    net.watch_zeros()
    net.run(PASSES, lend=True)
    print_table(_rates(net, {key: taken / iterations for key, taken in passes.items()}))
    for line in data:
        print(line)


def _data_line(
    name: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    iterations: int,
    total: float,
) -> str:
    """Return what reading costs, from the seconds of each stage and the milliseconds of all."""
    batch = {stage: 1e3 * (after[stage] - before[stage]) / iterations for stage in before}
    parts = ", ".join(f"{stage} {milliseconds:.3f} ms" for stage, milliseconds in batch.items())
    share = batch["wait"] * iterations / total
    return f"{name}: a batch takes {parts} ({share:.1%} of an iteration)"


def _rates(net: Net, milliseconds: Mapping[tuple[int, str], float]) -> Table:
    """Return the table of what each pass of each layer that multiplies achieves.

    Parameters
    ----------
    net : Net
        It has counted the zeros in its last backward pass.
    milliseconds : mapping
        (layer, pass) -> time of one iteration, added up over all workers.
    """
    peak = peak_flops(net.dtype)
    zeros = net.count_zeros()
    columns = ("layer", "pass", "kernel", "#ms", "#dense", "#goodput", "#of peak", "#zeros")
    return Table(
        f"GF/s of a core, peak {1e-9 * peak:.0f} ({machine.description()})",
        (*columns, "#intrinsic", "#unfolded", "#region"),
        list(_rate_rows(net, milliseconds, zeros, peak)),
    )


def _rate_rows(
    net: Net,
    milliseconds: Mapping[tuple[int, str], float],
    zeros: Mapping[str, float],
    peak: float,
) -> Iterator[tuple[str, ...]]:
    for index, planned in enumerate(net.assembly.layers):
        flops = 2 * planned.layer.multiply_adds()
        ran = [which for which in LAYER_PASSES if (index, which) in milliseconds]
        if flops == 0 or not ran:
            continue
        share = zeros.get(planned.node.name, 0.0)
        for which in ran:
            seconds = 1e-3 * milliseconds[index, which]
            useful = 1.0 if which == "forward" else 1.0 - share
            yield (
                planned.node.name if which == ran[0] else "",
                which,
                net.lowering.choices[index][which].name,
                f"{1e3 * seconds:.3f}",
                f"{1e-9 * flops / seconds:.1f}",
                f"{1e-9 * useful * flops / seconds:.1f}",
                f"{flops / seconds / peak:.2f}",
                "" if which == "forward" else f"{share:.3f}",
                *_intensities(planned, 1.0 - useful),
            )


def _intensities(planned: PlannedLayer, zeros: float) -> tuple[str, str, str]:
    """Return the arithmetic intensities and the region of a convolution, else nothing."""
    if not isinstance(planned.layer, Convolution):
        return "", "", ""
    shape = ConvolutionShape.of(planned.layer)
    intensities = (shape.intrinsic_intensity, shape.unfold_intensity)
    return f"{intensities[0]:.0f}", f"{intensities[1]:.0f}", str(shape.region(zeros))


def _split(tasks: Sequence[TaskTime]) -> dict[str, list[TaskTime]]:
    """Sort tasks such as ``conv1.backward_weights[0:10]`` by their pass."""
    split: dict[str, list[TaskTime]] = {which: [] for which in PASSES}
    for task in tasks:
        backward = _pass_of(task).startswith("backward")
        split["backward" if backward else "forward"].append(task)
    return split


def _pass_of(task: TaskTime) -> str:
    """Return the pass in a task's name, such as ``backward_weights``."""
    return task.name.rpartition(".")[2].partition("[")[0]


def _span(tasks: Sequence[TaskTime]) -> int:
    """Return the nanoseconds from the begin of the first task to the end of the last one."""
    return max((t.end for t in tasks), default=0) - min((t.begin for t in tasks), default=0)
