"""Measure: the machine's peak, and how fast each candidate runs a layer's pass.

Everything here is timing and therefore only asked for: `cgdnn tune`, `cgdnn time` and the
benchmarks. What is measured runs on one core, on memory of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from cgdnn import machine
from cgdnn.kernels.peak import ACCUMULATORS, peak_multiply_adds
from cgdnn.layers._base import Candidate
from cgdnn.plan.lower import PASSES, Lowering
from cgdnn.plan.shapes import Assembly, PlannedLayer
from cgdnn.plan.tune import TuningTable, problem
from cgdnn.runtime.state import State, bind
from cgdnn.runtime.threaded import ThreadedRun

PEAK_ROUNDS = 200_000
REPEATS = 5
LEAST_SECONDS = 0.02
"""A candidate is run again until it has taken so long in all, and at least `REPEATS` times."""


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

    return 2 * lanes * ACCUMULATORS * PEAK_ROUNDS / min(once() for _ in range(REPEATS))


def tune(
    assembly: Assembly, dtype: str, table: TuningTable, report: Callable[[str], None]
) -> None:
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
            able = able_candidates(planned, which)
            if len(able) < 2 or (which != "forward" and not planned.needs_backward):
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


def able_candidates(planned: PlannedLayer, which: str) -> list[Candidate]:
    """Return the candidates of a pass that do not refuse the layer."""
    candidates = planned.layer.candidates(which)
    return [candidate for candidate in candidates if candidate.refuse(planned.layer) is None]


def measure(
    assembly: Assembly, index: int, which: str, dtype: str
) -> Iterator[tuple[Candidate, float]]:
    """Yield each candidate of a layer's pass with its median seconds on one core.

    The layer's bottoms and the diff of its tops are random; the diff has the layer's share of
    exact zeros.
    """
    planned = assembly.layers[index]
    for candidate in able_candidates(planned, which):
        lowering = Lowering(assembly, dtype, seed=1)
        lowering.choices[index] = {**lowering.choices[index], which: candidate}
        state = State(dtype)
        _fill(planned, assembly, state)
        if which != "forward":  # what the forward pass leaves for the backward one
            forward = lowering.program(("forward",), index, index + 1)
            ThreadedRun(bind(forward, state, 1), 1).run()
        program = lowering.single_pass(index, which)
        run = ThreadedRun(bind(program, state, 1), 1)
        run.run()
        times: list[float] = []
        while len(times) < REPEATS or sum(times) < LEAST_SECONDS:
            begin = time.perf_counter()
            run.run()
            times.append(time.perf_counter() - begin)
        yield candidate, statistics.median(times)


def _fill(planned: PlannedLayer, assembly: Assembly, state: State) -> None:
    """Fill what a pass of the layer reads with random numbers."""
    generator = np.random.default_rng(0)
    for bottom in planned.node.bottoms:
        array = state.array(assembly.blobs[bottom].data)
        array[...] = generator.standard_normal(array.shape)
    for top in planned.node.tops:
        array = state.array(assembly.blobs[top].diff)
        array[...] = generator.standard_normal(array.shape)
        array[generator.random(array.shape) < planned.layer.zeros] = 0
    for data, _ in planned.views:
        array = state.array(data)
        array[...] = 0.1 * generator.standard_normal(array.shape)
