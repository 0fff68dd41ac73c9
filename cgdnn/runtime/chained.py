"""The compiled entry of a task that runs several kernels on what they hand over to each other.

Its slots hold, after the count of pointers and of kernels, and the address and the stride of the
workers' blocks: for each pointer its place and what is added to the block's address; for each
kernel its entry and the place of its slots. Places count from the first slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from numba import types

from cgdnn.kernels._jit import compile_native
from cgdnn.kernels.native import call_task, load, store

_HEAD = 4


@cache
def chain_entry() -> int:
    """Return the address of the entry."""

    def run_chain(slots, worker):  # type: ignore[no-untyped-def]
        pointers, kernels = load(slots), load(slots + 8)
        block = load(slots + 16) + worker * load(slots + 24)
        record = slots + 8 * _HEAD
        for _ in range(pointers):
            store(slots + 8 * load(record), block + load(record + 8))
            record += 16
        for _ in range(kernels):
            status = call_task(load(record), slots + 8 * load(record + 8), worker)
            if status != 0:
                return status
            record += 16
        return 0

    return compile_native(run_chain, types.int64(types.int64, types.int64))


def chain_slots(
    block: int,
    stride: int,
    pointers: Sequence[tuple[int, int]],
    kernels: Sequence[tuple[int, int]],
    start: int,
) -> list[int]:
    """Return the slots of a chain, which begin at `start`.

    Parameters
    ----------
    block, stride : int
        Address of the first worker's block, and bytes to the next.
    pointers : sequence of (int, int)
        Where a pointer is among all slots, and how far behind the block's address it points.
    kernels : sequence of (int, int)
        Entry of each kernel, and where its slots are among all.
    """
    records = [(place - start, offset) for place, offset in pointers]
    records += [(entry, place - start) for entry, place in kernels]
    return [len(pointers), len(kernels), block, stride, *(n for record in records for n in record)]
