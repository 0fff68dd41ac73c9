"""The physical limit that kernels are compared with: multiply-adds from registers alone."""

from __future__ import annotations

from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.kernels.vector import emitted

ACCUMULATORS = 12
"""Independent sums: enough to hide the latency of two units, few enough for 16 registers."""


@emitted
def _multiply_adds(e, x, count):  # type: ignore[no-untyped-def]
    """Do `count` rounds of one multiply-add for each of the accumulators, which start from x."""
    build = e.builder
    factor = e.load(x)
    sums = [e.variable(e.load(e.at(x, e.integer(i)))) for i in range(ACCUMULATORS)]
    with e.loop(count):
        for slot in sums:
            build.store(e.multiply_add(build.load(slot), factor, factor), slot)
    for i, slot in enumerate(sums):
        e.store(build.load(slot), e.at(x, e.integer(i * e.lanes)))


@kernel(array(1), INT)
def peak_multiply_adds(x, count):  # type: ignore[no-untyped-def]
    """Do `count` rounds of ``ACCUMULATORS`` vector multiply-adds on registers.

    Parameters
    ----------
    x : array of at least 2 * ACCUMULATORS vectors
        Where the sums start and end; values below 1 keep them finite.
    """
    _multiply_adds(x, count)
