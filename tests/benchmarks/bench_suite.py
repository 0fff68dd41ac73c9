"""Time the forward pass of spg-CNN's layers against oneDNN through PyTorch, A B A B in one run.

usage: python tests/benchmarks/bench_suite.py [--layers NAME ...] [--batch 16] [--threads 1]
           [--rounds 7] [--peer-python PATH]

Inputs are dense. PyTorch runs without gradients, in both memory formats; the better one counts.
"of peak" is the rate of cgdnn's pass, in multiply-adds by its definition times two, over the peak
of the cores in the same run. `cgdnn bench convs` compares cgdnn's own kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.contender import Contender, Facts, alternate, ratio, serve

WAYS = ("default", "channels_last")
HEAD = ("layer", "kernel", "cgdnn ms", "peer ms", "ratio", "of peak", "peer")


def contend(
    kind: str, sizes: list[int], threads: int
) -> tuple[Callable[[], float], Callable[[], Facts]]:
    """Return the forward pass of a contender, and what it tells at the end.

    Parameters
    ----------
    kind : str
        "cgdnn" or one of `WAYS`.
    sizes : list of int
        Batch, input size, filters, channels, kernel and stride.
    threads : int
    """
    if kind != "cgdnn":
        from tests.benchmarks import peer

        return peer.make_forward(sizes, threads, kind), dict
    import numpy as np

    from cgdnn import Net
    from cgdnn.cli.bench import CONVOLUTION, SuiteLayer
    from cgdnn.plan.tune import TuningTable, default_path
    from cgdnn.runtime.measure import peak_flops

    batch, *layer = sizes
    message = SuiteLayer("suite", *layer).describe(batch)
    net = Net(message, threads=threads, tuning=TuningTable.read(default_path()))
    shape = net.blobs["data"].shape
    net.blobs["data"].data[...] = np.random.default_rng(0).standard_normal(shape)
    flops = 2 * net.assembly.layers[CONVOLUTION].layer.multiply_adds()

    def step() -> float:
        start = time.perf_counter()
        net.run(("forward",))
        return time.perf_counter() - start

    def facts() -> Facts:
        kernel = net.lowering.chosen_names()["suite.forward"]
        return {"flops": flops, "peak": peak_flops() * threads, "kernel": kernel}

    return step, facts


def compare(name: str, sizes: list[int], args: argparse.Namespace) -> tuple[str, ...]:
    """Return one row of the table."""
    numbers = [*map(str, sizes), str(args.threads)]

    def contender(kind: str) -> Contender:
        python = sys.executable if kind == "cgdnn" else args.peer_python
        return Contender([python, str(Path(__file__).resolve()), "--serve", kind, *numbers], 5)

    with contender("cgdnn") as own, contender(WAYS[0]) as plain, contender(WAYS[1]) as last:
        contenders = (own, plain, last)
        for one in contenders:
            one.run(2)
        alternate(contenders, args.rounds)
        facts = own.end()
    best = min((plain, last), key=lambda peer: peer.milliseconds)
    rate = facts["flops"] / (1e-3 * own.milliseconds)
    return (
        *(name, facts["kernel"], f"{own.milliseconds:.3f}", f"{best.milliseconds:.3f}"),
        *(f"{ratio(best, own):.2f}", f"{rate / facts['peak']:.2f}"),
        WAYS[best is last],
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", metavar="NAME")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--serve", nargs=8, metavar="WORD")
    args = parser.parse_args()
    if args.serve:
        kind, *numbers = args.serve
        *sizes, threads = map(int, numbers)
        serve(lambda: contend(kind, sizes, threads))
        return
    from cgdnn.cli.bench import SUITE

    form = "{:15} {:12} {:>9} {:>9} {:>6} {:>8}  {}"
    print(form.format(*HEAD))
    for layer in SUITE:
        if layer.name in (args.layers or layer.name):
            sizes = [layer.size, layer.filters, layer.channels, layer.kernel, layer.stride]
            print(form.format(*compare(layer.name, [args.batch, *sizes], args)), flush=True)


if __name__ == "__main__":
    main()
