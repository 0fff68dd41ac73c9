"""`cgdnn bench`: measure every way to run convolutions, over spg-CNN's layers.

The layers are those of four nets (Rajbhandari et al., ASPLOS 2017). First all passes are measured
with dense gradients, beside the fine-grain baseline (parallel_gemm); then the backward passes with
ever more zeros in the gradient. Rates are those of one core in multiply-adds by the definition of a
pass, times two, zeros included.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from cgdnn import machine
from cgdnn.cli._table import print_table
from cgdnn.errors import UsageError
from cgdnn.layers import _parallel_gemm
from cgdnn.layers._base import Candidate
from cgdnn.netdef.graph import build_graph
from cgdnn.netdef.read import read_net
from cgdnn.plan.arrange import PASSES
from cgdnn.plan.shapes import Assembly, assemble
from cgdnn.plan.show import Table
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.measure import ROUNDS, measure, peak_flops, serving_candidates

ZEROS = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99)
QUICK_ZEROS = (0.0, 0.5, 0.75, 0.9, 0.99)
QUICK_ROUNDS = 2
DTYPE = "float32"
CONVOLUTION = 1
"""Place of the convolution among the layers of a net of the suite."""


@dataclass(frozen=True)
class SuiteLayer:
    """A convolution of square images and kernels, without padding."""

    name: str
    size: int
    filters: int
    channels: int
    kernel: int
    stride: int

    @property
    def small(self) -> bool:
        """Whether the zeros are swept over it unless all layers are asked for."""
        return self.name.startswith(("cifar10", "mnist"))

    def describe(self, batch: int) -> NetParameter:
        """Return a net of an Input layer and this convolution."""
        message = NetParameter(name=self.name, force_backward=True)
        data = message.layer.add(name="data", type="Input", top=["data"])
        data.input_param.shape.add(dim=(batch, self.channels, self.size, self.size))
        layer = message.layer.add(name=self.name, type="Convolution", bottom=["data"], top=["conv"])
        layer.convolution_param.num_output = self.filters
        layer.convolution_param.kernel_size.append(self.kernel)
        layer.convolution_param.stride.append(self.stride)
        return message

    def assemble(self, batch: int) -> Assembly:
        """Return the same with shapes, and with all passes."""
        return assemble(build_graph(read_net(self.describe(batch)), "TRAIN"))

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.channels} x {self.size} x {self.size} to {self.filters} filters "
            f"of {self.kernel} x {self.kernel}, stride {self.stride}"
        )


SUITE = (
    SuiteLayer("imagenet22k.1", 262, 120, 3, 7, 2),
    SuiteLayer("imagenet22k.2", 64, 250, 120, 5, 2),
    SuiteLayer("imagenet22k.3", 15, 400, 250, 3, 1),
    SuiteLayer("imagenet22k.4", 13, 400, 400, 3, 1),
    SuiteLayer("imagenet22k.5", 11, 600, 400, 3, 1),
    SuiteLayer("imagenet1k.1", 224, 96, 3, 11, 4),
    SuiteLayer("imagenet1k.2", 55, 256, 96, 5, 1),
    SuiteLayer("imagenet1k.3", 27, 384, 256, 3, 1),
    SuiteLayer("imagenet1k.4", 13, 256, 192, 3, 1),
    SuiteLayer("cifar10.1", 36, 64, 3, 5, 1),
    SuiteLayer("cifar10.2", 8, 64, 64, 5, 1),
    SuiteLayer("mnist.1", 28, 20, 1, 5, 1),
)
"""spg-CNN's benchmark layers: ImageNet-22K, ImageNet-1K, CIFAR-10, MNIST."""


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure every way to run convolutions",
        description=__doc__,
        allow_abbrev=False,
    )
    names = [layer.name for layer in SUITE]
    parser.add_argument("what", choices=("convs",), help="what to measure")
    parser.add_argument("--layers", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--batch", type=int, default=16, help="images (default: 16)")
    parser.add_argument("--threads", type=int, default=1, help="workers (default: 1)")
    parser.add_argument(
        "--sweep-all", action="store_true", help="sweep the zeros over the large layers too"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shares of zeros")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a table for each layer, then the sweeps and where the choice flips."""
    if args.batch < 1:
        raise UsageError(f"--batch: got {args.batch}, expected at least 1. Give a larger number.")
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    layers = [layer for layer in SUITE if layer.name in args.layers]
    peak = peak_flops(DTYPE)
    workers = f"{args.threads} core{'s' if args.threads > 1 else ''}"
    print(
        f"{machine.description()}: {1e-9 * peak:.0f} GF/s at best on a core; "
        f"{args.batch} images, {workers}\n"
    )
    for layer in layers:
        assembly = layer.assemble(args.batch)
        rows = list(_dense(assembly, args.threads, rounds, peak))
        columns = ("pass", "kernel", "#ms", "#GF/s of a core", "#of peak")
        print_table(Table(str(layer), columns, rows))
    flips = []
    for layer in layers:
        if layer.small or args.sweep_all:
            assembly = layer.assemble(args.batch)
            for which in PASSES[1:]:
                title = f"{layer.name} {which}"
                times = _sweep(
                    assembly, which, QUICK_ZEROS if args.quick else ZEROS, args.threads, rounds
                )
                print_table(_sweep_table(f"{title}: ms by the share of zeros", times))
                flips.append(f"{title}: {_flips(times)}")
    print("\n".join(flips))
    return 0


def runnable(assembly: Assembly, which: str) -> list[Candidate]:
    """Return what can run a pass, the baseline last."""
    planned = assembly.layers[CONVOLUTION]
    every = planned.layer.candidates(which)
    baseline = [candidate for candidate in every if candidate.name == _parallel_gemm.NAME]
    return serving_candidates(planned, which) + baseline


def _dense(assembly: Assembly, threads: int, rounds: int, peak: float) -> Iterator[tuple[str, ...]]:
    flops = 2 * assembly.layers[CONVOLUTION].layer.multiply_adds()
    for which in PASSES:
        times = measure(
            *(assembly, CONVOLUTION, which, DTYPE),
            candidates=runnable(assembly, which),
            threads=threads,
            rounds=rounds,
        )
        for candidate, seconds in times:
            rate = flops / seconds / threads
            yield (
                which if candidate is times[0][0] else "",
                candidate.name,
                f"{1e3 * seconds:.3f}",
                f"{1e-9 * rate:.1f}",
                f"{rate / peak:.2f}",
            )


Sweep = dict[float, dict[str, float]]
"""Share of zeros -> candidate -> seconds."""


def _sweep(
    assembly: Assembly, which: str, shares: Sequence[float], threads: int, rounds: int
) -> Sweep:
    candidates = serving_candidates(assembly.layers[CONVOLUTION], which)
    return {
        zeros: {
            candidate.name: seconds
            for candidate, seconds in measure(
                *(assembly, CONVOLUTION, which, DTYPE),
                candidates=candidates,
                zeros=zeros,
                threads=threads,
                rounds=rounds,
            )
        }
        for zeros in shares
    }


def _sweep_table(title: str, sweep: Sweep) -> Table:
    names = list(next(iter(sweep.values())))
    rows = [
        (f"{zeros:.2f}", *(f"{1e3 * times[name]:.3f}" for name in names), _fastest(times))
        for zeros, times in sweep.items()
    ]
    return Table(title, ("#zeros", *(f"#{name}" for name in names), "fastest"), rows)


def _fastest(times: dict[str, float]) -> str:
    return min(times, key=lambda name: times[name])


def _flips(sweep: Sweep) -> str:
    """Say which candidate is fastest from which share of zeros on."""
    runs = groupby(sweep, key=lambda zeros: _fastest(sweep[zeros]))
    firsts = [(name, next(shares)) for name, shares in runs]
    words = [firsts[0][0]]
    words += [f"{name} from {zeros:.2f}" for _, (name, zeros) in pairwise(firsts)]
    return ", ".join(words)
