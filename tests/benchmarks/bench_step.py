"""Time whole training steps against PyTorch, A B A B in one run.

usage: python tests/benchmarks/bench_step.py [--nets lenet vgg16 ...] [--threads 1 2]
           [--rounds N] [--steps N] [--data DIR] [--peer-python PATH] [--peers WAY ...]

Each contender is a process of its own that waits while another one runs. For each net and number of
threads, PyTorch is timed first in each of its ways, alone: as it is, with channels last, compiled,
and each of these with an allocator that keeps its memory. The best of them then takes turns with
cgdnn and with cgdnn --exact: a round asks every contender for some steps. Milliseconds are medians
of the rounds' medians, ratios the median over the rounds of peer / cgdnn.

"of peak" is the rate of a step, in the multiply-adds of the passes by their definition times two,
over the peak of the cores, measured in the same process. "zeros" is their share in the gradients
of the convolutions' tops, weighted by multiply-adds. MB is the peak of resident memory.

cgdnn chooses its kernels by the tuning table of `cgdnn tune` where there is one. With --data DIR
(the databases of `cgdnn fetch`), LeNet and the CIFAR-10 nets have been trained for 600 iterations
before; other data is random, in the shapes of the real one. PyTorch always has random data. Needs
the extra ``peer`` (PyTorch), in this environment or in the one of --peer-python.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.contender import Contender, Facts, FailedError, alternate, ratio, serve

if TYPE_CHECKING:
    from cgdnn import Solver

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Contest:
    """A net as it is timed.

    Attributes
    ----------
    path : str
        Its description.
    shape : tuple of int
        Of a batch of images.
    classes : int
    base_lr, weight_decay : float
    rounds, steps : int
        By default; large nets get few.
    """

    path: str
    shape: tuple[int, ...]
    classes: int = 1000
    base_lr: float = 0.001
    weight_decay: float = 0.0005
    rounds: int = 3
    steps: int = 1

    @property
    def warm(self) -> int:
        """Steps before any is timed: past the first count of zeros where steps are short."""
        return 21 if self.steps > 1 else 1

    @property
    def has_data(self) -> bool:
        """Whether the description names a database."""
        return self.path.startswith("datasets/")


CONTESTS = {
    "lenet": Contest(
        "datasets/mnist/lenet_train_test.prototxt", (64, 1, 28, 28), 10, 0.01, 0.0005, 7, 30
    ),
    "cifar10_quick": Contest(
        "datasets/cifar10/cifar10_quick_train_test.prototxt",
        *((100, 3, 32, 32), 10, 0.001, 0.004, 7, 10),
    ),
    "cifar10_full": Contest(
        "datasets/cifar10/cifar10_full_train_test.prototxt",
        *((100, 3, 32, 32), 10, 0.001, 0.004, 7, 10),
    ),
    "alexnet": Contest("tests/nets/alexnet.prototxt", (32, 3, 227, 227)),
    "vgg16": Contest("tests/nets/vgg16.prototxt", (8, 3, 224, 224)),
    "googlenet": Contest("tests/nets/googlenet.prototxt", (16, 3, 224, 224)),
    "resnet50": Contest("tests/nets/resnet50.prototxt", (8, 3, 224, 224)),
}
WARM_WITH_DATA = 600
WAYS = ("default", "channels_last", "compile")
KEEP = "+keep"
"""Ending of a way of PyTorch's in which the allocator maps no memory and gives none back."""
KEEPS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_MAX_": "0",  # older versions of glibc ignore a threshold above 32 MB
}


def make_solver(name: str, threads: int, *, exact: bool = False, data: str | None = None) -> Solver:
    """Return a solver of a net; its data is random unless there is a folder with the real one."""
    import numpy as np

    from cgdnn import Solver
    from cgdnn.netdef.read import read_net
    from cgdnn.plan.tune import TuningTable, default_path
    from cgdnn.proto.cgdnn_pb2 import SolverParameter

    contest = CONTESTS[name]
    net = read_net(ROOT / contest.path).message
    # The peer has no auxiliary heads (GoogLeNet).
    layers = [layer for layer in net.layer if not layer.name.startswith(("loss1/", "loss2/"))]
    del net.layer[:]
    net.layer.extend(layers)
    if data is None:
        source = next(layer for layer in net.layer if layer.type in ("Data", "DummyData"))
        source.type = "Input"
        for dims in (contest.shape, contest.shape[:1]):
            source.input_param.shape.add(dim=dims)
    else:
        os.chdir(data)  # the description names its databases from here
    solver = Solver(
        SolverParameter(
            net_param=net,
            base_lr=contest.base_lr,
            lr_policy="fixed",
            momentum=0.9,
            weight_decay=contest.weight_decay,
            max_iter=1,
            snapshot_after_train=False,
        ),
        threads=threads,
        exact=exact,
        lend=True,  # as `cgdnn train` does
        tuning=TuningTable.read(default_path()),
    )
    if data is None:
        generator = np.random.default_rng(0)
        labels = generator.integers(0, contest.classes, contest.shape[:1])
        solver.net.blobs["data"].data[...] = generator.random(contest.shape, np.float32)
        solver.net.blobs["label"].data[...] = labels
    return solver


def facts_of(solver: Solver) -> Facts:
    """Return the flops of a step, the share of zeros, and the peak of a core now."""
    from cgdnn.runtime.measure import peak_flops

    net = solver.net
    net.watch_zeros()
    solver.step(1)
    zeros = net.count_zeros()
    flops = weighted = weights = 0.0
    for planned in net.assembly.layers:
        forward = 2.0 * planned.layer.multiply_adds()
        flops += forward * (1 + planned.learns + any(planned.propagate))
        if planned.node.type == "Convolution" and planned.node.name in zeros:
            weighted += forward * zeros[planned.node.name]
            weights += forward
    return {"flops": flops, "zeros": weighted / max(1.0, weights), "peak": peak_flops()}


def megabytes() -> float:
    """Return the peak of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def contend(
    kind: str, name: str, threads: int, data: str | None
) -> tuple[Callable[[], float], Callable[[], Facts]]:
    """Return the step of a contender, and what it tells at the end."""
    contest = CONTESTS[name]
    if not kind.startswith("cgdnn"):
        from tests.benchmarks import peer

        way = kind.removesuffix(KEEP)
        step = peer.make_step(name, contest.shape, contest.classes, threads, way)
        return step, lambda: {"megabytes": megabytes()}
    folder = data if contest.has_data else None
    solver = make_solver(name, threads, exact=kind == "cgdnn_exact", data=folder)
    solver.step(WARM_WITH_DATA if folder else contest.warm)
    solver.net.watch_zeros()
    solver.step(1)
    solver.net.choose_kernels(solver.net.count_zeros())  # few steps would not come to it

    def own_step() -> float:
        start = time.perf_counter()
        solver.step(1)
        return time.perf_counter() - start

    return own_step, lambda: {"megabytes": megabytes(), **facts_of(solver)}


def contender(kind: str, name: str, threads: int, args: argparse.Namespace) -> Contender:
    """Start a contender."""
    command = [sys.executable if kind.startswith("cgdnn") else args.peer_python, str(HERE)]
    command += [f"--data={args.data}"] * (args.data is not None)
    command += ["--serve", kind, name, str(threads)]
    steps = args.steps or CONTESTS[name].steps
    return Contender(command, steps, KEEPS if kind.endswith(KEEP) else {})


def warm_up(those: Sequence[Contender]) -> None:
    """Run steps that are not counted, so that what is compiled or allocated once is."""
    for one in those:
        one.run(3 if one.steps > 1 else 1)


def best_peer(name: str, threads: int, args: argparse.Namespace) -> str | None:
    """Time PyTorch in each of its ways, alone; print them and return the best one's kind."""
    seen: dict[str, float] = {}
    for kind in [way + ending for way in args.peers for ending in ("", KEEP)]:
        try:
            with contender(kind, name, threads, args) as one:
                warm_up([one])
                alternate([one], 2)
                seen[kind] = one.milliseconds
        except FailedError as error:
            print(f"  PyTorch {kind} cannot run: {error}", flush=True)
    times = ", ".join(f"{kind} {milliseconds:.2f} ms" for kind, milliseconds in seen.items())
    print(f"  PyTorch, alone: {times or 'none'}", flush=True)
    return min(seen, key=lambda kind: seen[kind], default=None)


HEAD = (
    *("net", "batch", "threads", "cgdnn ms", "peer ms", "ratio", "exact ms", "ratio"),
    *("of peak", "zeros", "MB", "peer MB", "peer"),
)


def compare(name: str, threads: int, args: argparse.Namespace) -> list[str]:
    """Return one row of the table."""
    contest = CONTESTS[name]
    peer = best_peer(name, threads, args)
    with ExitStack() as stack:
        kinds = ["cgdnn", "cgdnn_exact", *([peer] if peer else [])]
        those = [stack.enter_context(contender(kind, name, threads, args)) for kind in kinds]
        warm_up(those)
        alternate(those, args.rounds or contest.rounds)
        facts = [one.end() for one in those]
    own, exact, *others = those
    rate = facts[0]["flops"] / (1e-3 * own.milliseconds)
    peers = [f"{other.milliseconds:.2f}" for other in others] or ["-"]
    ratios = [[f"{ratio(other, one):.2f}" for other in others] or ["-"] for one in (own, exact)]
    return [
        *(name, str(contest.shape[0]), str(threads), f"{own.milliseconds:.2f}"),
        *(*peers, *ratios[0], f"{exact.milliseconds:.2f}", *ratios[1]),
        *(f"{rate / facts[0]['peak'] / threads:.2f}", f"{facts[0]['zeros']:.2f}"),
        f"{facts[0]['megabytes']:.0f}",
        *([f"{fact['megabytes']:.0f}" for fact in facts[2:]] or ["-"]),
        peer or "-",
    ]


def speedup(name: str, args: argparse.Namespace) -> float:
    """Return how much faster two threads are than one, as the median of paired rounds."""
    with contender("cgdnn", name, 1, args) as one, contender("cgdnn", name, 2, args) as two:
        warm_up([one, two])
        alternate([one, two], args.rounds or CONTESTS[name].rounds)
    return ratio(one, two)


def lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def main() -> None:
    """Print what is found on the way, and the table at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nets", nargs="+", default=list(CONTESTS), choices=CONTESTS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, help="by default 7, and 3 for large nets")
    parser.add_argument("--steps", type=int, help="of a round; by default 30, 10, or 1")
    parser.add_argument("--data", metavar="DIR", type=os.path.abspath)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peers", nargs="*", default=WAYS, choices=WAYS, metavar="WAY")
    parser.add_argument("--serve", nargs=3, metavar=("KIND", "NET", "THREADS"))
    args = parser.parse_args()
    if args.serve:
        kind, name, threads = args.serve
        serve(lambda: contend(kind, name, int(threads), args.data))
        return
    rows: list[Sequence[str]] = [HEAD]
    speedups = []
    for name in args.nets:
        for threads in args.threads:
            print(f"{name}, threads {threads}", flush=True)
            rows.append(compare(name, threads, args))
            print(f"  {'  '.join(rows[-1])}", flush=True)
        if {1, 2} <= set(args.threads):
            speedups.append(f"{name}: two threads are {speedup(name, args):.2f} times one")
    print("\n" + "\n".join([*lines(rows), *speedups]))


if __name__ == "__main__":
    main()
