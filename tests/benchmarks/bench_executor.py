"""Time the executor on LeNet's real plan: dispatch, waiting, wake-ups, more threads than cores.

usage: python tests/benchmarks/bench_executor.py [--steps 200]

* share: the part of a step's worker time (threads times seconds) in which no task runs, by the
  trace of each task. The median over all steps, and over the fastest twentieth of them: other
  processes of the machine take their part of the rest.
* outside: microseconds of a step around the executor's loop, in Python.
* ratio: a step with 3 and 8 threads against one with 2, medians of steps taken in turn.
* wake-up: from the end of a task to the begin of one that it made ready on a sleeping worker.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from cgdnn import machine
from cgdnn.layers._base import BEGIN, END, Buffer, Step, update, update_all
from cgdnn.plan.lower import Work
from cgdnn.runtime.threaded import ThreadedRun
from tests.benchmarks.bench_step import make_solver
from tests.runtime.programs import add_slowly, bound


def share(threads: int, steps: int) -> None:
    """Print which part of LeNet's step goes to dispatch and waiting."""
    solver = make_solver("lenet", threads)
    solver.step(10)
    (run,) = solver.net._programs.values()
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        run.run(trace=True)
        seconds = time.perf_counter() - start
        ran = run.trace[run.trace[:, 1] > 0]
        busy = (ran[:, 1] - ran[:, 0]).sum() / 1e9
        span = (ran[:, 1].max() - ran[:, 0].min()) / 1e9
        found.append((span, 1 - busy / (threads * span), 1e6 * (seconds - span)))
    found.sort()
    for name, some in (("all steps", found), ("fastest", found[: -(-steps // 20)])):
        span, idle, outside = np.median(some, axis=0)
        print(
            f"threads {threads}, {name:9}: step {1e3 * span:6.2f} ms, share {idle:.1%}, "
            f"outside {outside:.0f} us"
        )


def crowd(steps: int) -> None:
    """Print how long a step takes with more threads than cores, against two threads."""
    solvers = {threads: make_solver("lenet", threads) for threads in (2, 3, 8)}
    seconds: dict[int, list[float]] = {threads: [] for threads in solvers}
    for solver in solvers.values():
        solver.step(10)
    for _ in range(steps):
        for threads, solver in solvers.items():
            start = time.perf_counter()
            solver.step(1)
            seconds[threads].append(time.perf_counter() - start)
    for threads in (3, 8):
        pairs = zip(seconds[threads], seconds[2], strict=True)
        ratio = statistics.median(more / two for more, two in pairs)
        print(
            f"threads {threads}: {ratio:.2f} times two threads (on {machine.cores_allowed()} cores)"
        )


def wake_up(steps: int) -> None:
    """Print how long a sleeping worker takes to begin a task that became ready."""
    x = Buffer("x", (2,), kind="state")
    first = Step(add_slowly, [update_all(x), 1000, BEGIN, END])
    then = Step(add_slowly, [update(x), 200_000, BEGIN, END], extent=2, cost=1e5)
    run = ThreadedRun(bound([Work("first", -1, first), Work("then", -1, then)], 2), 2)
    latencies = []
    for _ in range(steps):
        time.sleep(0.002)  # long enough for the worker to fall asleep
        run.run(trace=True)
        begins = [begin for begin, _, worker in run.trace[1:] if worker == 1]
        latencies += [(begin - run.trace[0, 1]) / 1e3 for begin in begins]
    tenth, median, most = np.quantile(latencies, [0.1, 0.5, 0.9]) if latencies else [np.nan] * 3
    print(f"wake-up: median {median:.0f} us (10 %: {tenth:.0f} us, 90 %: {most:.0f} us)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    for threads in (1, 2):
        share(threads, steps)
    crowd(steps)
    wake_up(steps)


if __name__ == "__main__":
    main()
