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
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cgdnn import Net, Solver

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
        tuning=TuningTable.read(default_path()),
    )
    if data is None:
        generator = np.random.default_rng(0)
        labels = generator.integers(0, contest.classes, contest.shape[:1])
        solver.net.blobs["data"].data[...] = generator.random(contest.shape, np.float32)
        solver.net.blobs["label"].data[...] = labels
    return solver


Facts = dict[str, Any]


def facts_of(net: Net) -> Facts:
    """Return the flops of a step, the share of zeros, and the peak of a core now."""
    from cgdnn.runtime.measure import peak_flops

    zeros = net.count_zeros()
    flops = weighted = weights = 0.0
    for planned in net.assembly.layers:
        forward = 2.0 * planned.layer.multiply_adds()
        flops += forward * (1 + planned.learns + any(planned.propagate))
        if planned.node.type == "Convolution" and planned.node.name in zeros:
            weighted += forward * zeros[planned.node.name]
            weights += forward
    return {"flops": flops, "zeros": weighted / max(1.0, weights), "peak": peak_flops()}


def serve(kind: str, name: str, threads: int, data: str | None) -> None:
    """Run as a contender: for a number on stdin, run so many steps and print their seconds.

    At the end of stdin, print the facts. What is raised is printed, and ends it.
    """
    try:
        contend(kind, name, threads, data)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)


def contend(kind: str, name: str, threads: int, data: str | None) -> None:
    """Make the steps of a contender and run them (see `serve`)."""
    contest = CONTESTS[name]
    facts: Callable[[], Facts] = dict
    if kind.startswith("cgdnn"):
        folder = data if contest.has_data else None
        solver = make_solver(name, threads, exact=kind == "cgdnn_exact", data=folder)
        solver.step(WARM_WITH_DATA if folder else contest.warm)
        solver.net.choose_kernels(solver.net.count_zeros())  # for long steps it is early else

        def step() -> float:
            start = time.perf_counter()
            solver.step(1)
            return time.perf_counter() - start

        def facts() -> Facts:
            return facts_of(solver.net)

    else:
        sys.path.insert(0, str(HERE.parent))
        import peer  # type: ignore[import-not-found]  # what it imports is not installed here

        way = kind.removesuffix(KEEP)
        step = peer.make_step(name, contest.shape, contest.classes, threads, way)
    for line in sys.stdin:
        print(json.dumps([step() for _ in range(int(line))]), flush=True)
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"megabytes": megabytes, **facts()}), flush=True)


class FailedError(Exception):
    """A contender cannot run; the text is what it raised."""


class Contender:
    """A process that runs steps when asked.

    Attributes
    ----------
    rounds : list of float
        Median milliseconds of a step, by round.
    """

    def __init__(self, kind: str, name: str, threads: int, args: argparse.Namespace) -> None:
        own = kind.startswith("cgdnn")
        self.kind = kind
        self.contest = CONTESTS[name]
        self.rounds: list[float] = []
        self.steps = args.steps or self.contest.steps
        hidden = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        words = [sys.executable if own else args.peer_python, str(HERE)]
        words += [f"--data={args.data}"] * (args.data is not None)
        words += ["--serve", kind, name, str(threads)]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment | (KEEPS if kind.endswith(KEEP) else {}),
        )

    def run(self, steps: int) -> list[float]:
        """Return the milliseconds of so many steps.

        Raises
        ------
        FailedError
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has said why
        answer = json.loads(self.process.stdout.readline() or '"the process died"')
        if isinstance(answer, str):
            raise FailedError(answer)
        return [1e3 * seconds for seconds in answer]

    def warm_up(self) -> None:
        """Run steps that are not counted."""
        self.run(3 if self.contest.steps > 1 else 1)

    def run_round(self) -> None:
        """Run the steps of a round."""
        self.rounds.append(statistics.median(self.run(self.steps)))

    @property
    def milliseconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    def end(self) -> Facts:
        """Let the process end; return its facts."""
        output, _ = self.process.communicate()
        facts: Facts = json.loads(output)
        return facts

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def best_peer(name: str, threads: int, args: argparse.Namespace) -> str | None:
    """Time PyTorch in each of its ways, alone; print them and return the best one's kind."""
    seen: dict[str, float] = {}
    for kind in [way + ending for way in args.peers for ending in ("", KEEP)]:
        try:
            with Contender(kind, name, threads, args) as contender:
                contender.warm_up()
                for _ in range(2):
                    contender.run_round()
                seen[kind] = contender.milliseconds
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
        contenders = [stack.enter_context(Contender(k, name, threads, args)) for k in kinds]
        for contender in contenders:
            contender.warm_up()
        for _ in range(args.rounds or contest.rounds):
            for contender in contenders:
                contender.run_round()
        facts = [contender.end() for contender in contenders]
    own, exact, *others = contenders
    rate = facts[0]["flops"] / (1e-3 * own.milliseconds)
    cells = [name, str(contest.shape[0]), str(threads), f"{own.milliseconds:.2f}"]
    cells += [f"{other.milliseconds:.2f}" for other in others] or ["-"]
    cells += [ratio(others, own), f"{exact.milliseconds:.2f}", ratio(others, exact)]
    cells += [f"{rate / facts[0]['peak'] / threads:.2f}", f"{facts[0]['zeros']:.2f}"]
    cells += [f"{fact['megabytes']:.0f}" for fact in (facts[0], *facts[2:])]
    return [*cells, peer] if peer else [*cells, "-", "-"]


def ratio(over: Sequence[Contender], under: Contender) -> str:
    """Return the median over the rounds of the first one's time over the other's."""
    if not over:
        return "-"
    pairs = zip(over[0].rounds, under.rounds, strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def speedup(name: str, args: argparse.Namespace) -> float:
    """Return how much faster two threads are than one, as the median of paired rounds."""
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(Contender("cgdnn", name, threads, args)) for threads in (1, 2)
        )
        for contender in (one, two):
            contender.warm_up()
        for _ in range(args.rounds or CONTESTS[name].rounds):
            one.run_round()
            two.run_round()
    return statistics.median(a / b for a, b in zip(one.rounds, two.rounds, strict=True))


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
        serve(args.serve[0], args.serve[1], int(args.serve[2]), args.data)
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
