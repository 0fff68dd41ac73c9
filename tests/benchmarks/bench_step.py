"""Time whole training steps against PyTorch, A B A B in one run.

usage: python tests/benchmarks/bench_step.py [--nets lenet cifar10_quick] [--threads 1 2]
           [--rounds 7] [--steps 30] [--peer-python PATH]

Each contender is a process of its own that waits while another one runs. A round asks every
contender for some steps; the table shows medians over all steps, and the median over the rounds of
the ratio to the best peer. Needs the extra ``peer`` (PyTorch), in this environment or in the one
of ``--peer-python``. The data is generated, in the shapes of MNIST and CIFAR-10.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cgdnn import Solver

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
FILES = {
    "lenet": ("datasets/mnist/lenet_train_test.prototxt", (64, 1, 28, 28)),
    "cifar10_quick": ("datasets/cifar10/cifar10_quick_train_test.prototxt", (100, 3, 32, 32)),
    "cifar10_full": ("datasets/cifar10/cifar10_full_train_test.prototxt", (100, 3, 32, 32)),
}


def make_solver(name: str, threads: int) -> Solver:
    """Return a solver of a net whose data is generated."""
    import numpy as np

    from cgdnn import Solver
    from cgdnn.netdef.read import read_net
    from cgdnn.proto.cgdnn_pb2 import SolverParameter

    path, shape = FILES[name]
    net = read_net(ROOT / path).message
    data = next(layer for layer in net.layer if layer.type == "Data")
    data.type = "Input"
    for dims in (shape, shape[:1]):
        data.input_param.shape.add(dim=dims)
    solver = Solver(
        SolverParameter(
            net_param=net,
            base_lr=0.001,
            lr_policy="fixed",
            momentum=0.9,
            weight_decay=0.0005,
            max_iter=1,
            snapshot_after_train=False,
        ),
        threads=threads,
    )

    generator = np.random.default_rng(0)
    solver.net.blobs["data"].data[...] = generator.random(shape)
    solver.net.blobs["label"].data[...] = generator.integers(0, 10, shape[:1])
    return solver


def make_step(name: str, threads: int) -> Callable[[], float]:
    """Return a function that runs one training step of cgdnn and gives its seconds."""
    solver = make_solver(name, threads)

    def step() -> float:
        start = time.perf_counter()
        solver.step(1)
        return time.perf_counter() - start

    return step


def serve(kind: str, name: str, threads: int) -> None:
    """Run as a contender: for each number on stdin, run so many steps and print their seconds."""
    if kind == "cgdnn":
        step = make_step(name, threads)
    else:
        sys.path.insert(0, str(HERE.parent))
        import peer

        step = peer.make_step(name, threads, channels_last=kind == "torch_channels_last")
    for line in sys.stdin:
        print(json.dumps([step() for _ in range(int(line))]), flush=True)


class Contender:
    """A process that runs steps when asked."""

    def __init__(self, python: str, kind: str, name: str, threads: int) -> None:
        self.kind = kind
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
        }
        self.process = subprocess.Popen(
            [python, str(HERE), "--serve", kind, name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.rounds: list[list[float]] = []

    def run(self, steps: int) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return [1e3 * seconds for seconds in json.loads(self.process.stdout.readline())]

    def close(self) -> None:
        self.process.communicate()


def compare(name: str, threads: int, args: argparse.Namespace) -> None:
    """Print one row of the table."""
    kinds = ["cgdnn"] + ([] if args.no_peer else ["torch", "torch_channels_last"])
    contenders = [
        Contender(sys.executable if kind == "cgdnn" else args.peer_python, kind, name, threads)
        for kind in kinds
    ]
    for contender in contenders:
        contender.run(10)
    for _ in range(args.rounds):
        for contender in contenders:
            contender.rounds.append(contender.run(args.steps))
    for contender in contenders:
        contender.close()
    medians = {c.kind: [statistics.median(r) for r in c.rounds] for c in contenders}
    own = statistics.median(medians["cgdnn"])
    row = f"{name:15} threads {threads}  cgdnn {own:8.2f} ms"
    if not args.no_peer:
        best = min(kinds[1:], key=lambda kind: statistics.median(medians[kind]))
        ratios = [b / a for a, b in zip(medians["cgdnn"], medians[best], strict=True)]
        row += (
            f"  peer {statistics.median(medians[best]):8.2f} ms ({best})"
            f"  ratio {statistics.median(ratios):5.2f}"
        )
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", default=["lenet", "cifar10_quick"], choices=FILES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--serve", nargs=3, metavar=("KIND", "NET", "THREADS"))
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], args.serve[1], int(args.serve[2]))
        return
    for name in args.nets:
        for threads in args.threads:
            compare(name, threads, args)
        speedup(name, args)


def speedup(name: str, args: argparse.Namespace) -> None:
    """Print how much faster two threads are than one, as the median of paired rounds."""
    one, two = (Contender(sys.executable, "cgdnn", name, threads) for threads in (1, 2))
    for contender in (one, two):
        contender.run(10)
    ratios = []
    for _ in range(args.rounds):
        pair = [statistics.median(contender.run(args.steps)) for contender in (one, two)]
        ratios.append(pair[0] / pair[1])
    one.close()
    two.close()
    print(f"{name:15} two threads are {statistics.median(ratios):.2f} times one", flush=True)


if __name__ == "__main__":
    main()
