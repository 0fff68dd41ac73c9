"""Measure: the machine's peak, and how fast each candidate runs a layer's pass.

Everything here is timing and therefore only asked for: `cgdnn tune`, `cgdnn time`, `cgdnn bench`
and the benchmarks. What is measured runs on memory of its own, on one core unless more are asked
for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

import numpy as np
from threadpoolctl import threadpool_limits

from cgdnn import machine
from cgdnn.kernels.peak import ACCUMULATORS, peak_multiply_adds
from cgdnn.layers._base import Candidate, state_of
from cgdnn.layers._layout import NCHW
from cgdnn.plan.arrange import PASSES
from cgdnn.plan.lower import Lowering
from cgdnn.plan.shapes import Assembly, PlannedLayer
from cgdnn.plan.tune import TuningTable, problem
from cgdnn.runtime.state import State, bind
from cgdnn.runtime.threaded import ThreadedRun

PEAK_ROUNDS = 200_000
ROUNDS = 5
TURN_SECONDS = 0.004
"""A candidate's turn in a round lasts so long, and one run at least."""


@lru_cache(maxsize=2)
def peak_flops(dtype: str = "float32") -> float:
    """Return the floating-point operations a second of one core, at best."""
    lanes = machine.vector_bytes() // np.dtype(dtype).itemsize
    x = np.full(2 * ACCUMULATORS * lanes, 0.5, dtype)
    peak_multiply_adds(x, 1)

    def once() -> float:
        x[:] = 0.5
        begin = time.perf_counter()
        peak_multiply_adds(x, PEAK_ROUNDS)
        return time.perf_counter() - begin

    return 2 * lanes * ACCUMULATORS * PEAK_ROUNDS / min(once() for _ in range(ROUNDS))


def tune(assembly: Assembly, dtype: str, table: TuningTable, report: Callable[[str], None]) -> None:
    """Measure every pass of every layer that has a choice and is not in the table yet.

    Parameters
    ----------
    assembly : Assembly
    dtype : str
    table : TuningTable
        Gets the new entries.
    report : callable
        Called with a line for each measured pass.
    """
    for index, planned in enumerate(assembly.layers):
        for which in PASSES:
            if len(serving_candidates(planned, which)) < 2 or (
                which != "forward" and not planned.needs_backward
            ):
                continue
            key = problem(planned, which, dtype)
            if key not in table.times:
                table.times[key] = {
                    candidate.name: 1e3 * seconds
                    for candidate, seconds in measure(assembly, index, which, dtype)
                }
            times = table.times[key]
            ranked = ", ".join(f"{n} {t:.3f} ms" for n, t in sorted(times.items(), key=_time))
            report(f"{planned.node.name}.{which}: {ranked}")


def _time(entry: tuple[str, float]) -> float:
    return entry[1]


def serving_candidates(planned: PlannedLayer, which: str) -> list[Candidate]:
    """Return the candidates of a pass that the layer can use, the slow ones too."""
    candidates = planned.layer.candidates(which)
    return [candidate for candidate in candidates if candidate.serves(planned.layer)]


def measure(
    assembly: Assembly,
    index: int,
    which: str,
    dtype: str,
    *,
    candidates: Sequence[Candidate] | None = None,
    zeros: float | None = None,
    threads: int = 1,
    rounds: int = ROUNDS,
) -> list[tuple[Candidate, float]]:
    """Return each candidate of a layer's pass with its median seconds.

    The layer's bottoms and the diff of its tops are random. All candidates work on the same
    memory, and take turns, so that what else the machine does meets all of them.

    Parameters
    ----------
    assembly : Assembly
    index : int
        Of the layer.
    which : str
        The pass.
    dtype : str
    candidates : sequence of Candidate, optional
        By default those that the layer can use.
    zeros : float, optional
        Share of exact zeros in the diffs of the tops; by default the layer's.
    threads : int
        Workers, of BLAS too where a candidate uses it.
    rounds : int
        Times that each candidate has its turn.
    """
    planned = assembly.layers[index]
    candidates = serving_candidates(planned, which) if candidates is None else candidates
    state = State(dtype)
    _fill(planned, assembly, state, planned.layer.zeros if zeros is None else zeros)
    lowering = Lowering(assembly, dtype, seed=1)
    if which != "forward":  # what the forward pass leaves for the backward one
        forward = lowering.program(("forward",), index, index + 1)
        ThreadedRun(bind(forward, state, threads), threads).run()
    with threadpool_limits(threads, user_api="blas"):
        turns = []
        for candidate in candidates:
            lowering.choices[index] = {**lowering.choices[index], which: candidate}
            program = lowering.single_pass(index, which)
            run = ThreadedRun(bind(program, state, threads), threads)
            run.run()
            turns.append((run, max(1, round(TURN_SECONDS / _seconds(run, 1)))))
        times = [[_seconds(run, count) for run, count in turns] for _ in range(rounds)]
    medians = map(statistics.median, zip(*times, strict=True))
    return list(zip(candidates, medians, strict=True))


def _seconds(run: ThreadedRun, count: int) -> float:
    """Run so many times; return the mean seconds of one."""
    begin = time.perf_counter()
    for _ in range(count):
        failed = run.run()
        assert failed is None, f"{run.program.tasks[failed[0]].name} failed"
    return (time.perf_counter() - begin) / count


def _fill(planned: PlannedLayer, assembly: Assembly, state: State, zeros: float) -> None:
    """Fill what a pass of the layer reads with random numbers."""
    generator = np.random.default_rng(0)
    for bottom in planned.node.bottoms:
        array = state.array(assembly.blobs[bottom].data)
        array[...] = generator.standard_normal(array.shape)
    for top in planned.node.tops:
        array = state.array(assembly.blobs[top].diff)
        array[...] = generator.standard_normal(array.shape)
        array[generator.random(array.shape) < zeros] = 0
    if planned.reader is not None and assembly.layers[planned.reader].layer.route(NCHW):
        _fill_routed(planned, assembly, state, zeros)
    for data, _ in planned.views:
        array = state.array(data)
        array[...] = 0.1 * generator.standard_normal(array.shape)


def _fill_routed(planned: PlannedLayer, assembly: Assembly, state: State, zeros: float) -> None:
    """Fill what the layer's reader routes with as many non-zeros, at random places."""
    assert planned.reader is not None
    reader = assembly.layers[planned.reader]
    name, shape = reader.layer.route(NCHW), reader.layer.top_shapes[0]
    assert name is not None
    generator = np.random.default_rng(0)
    diff = state.array(assembly.blobs[reader.node.tops[0]].diff)
    top = planned.layer.top_shapes[0]
    diff[...] = generator.standard_normal(shape)
    diff[generator.random(shape) >= (1 - zeros) * prod(top) / prod(shape)] = 0
    route = state.array(state_of(reader.states, reader.node.name, name, shape, "int32"))
    route[...] = generator.integers(0, prod(top[2:]), shape)
