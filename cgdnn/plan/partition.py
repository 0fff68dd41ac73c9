"""Decide how a step is cut: from its extent and cost alone, never from the thread count.

A piece should take long enough that handing it out costs little (about 0.1 us), and there
should be enough of them that cores share the work evenly; both are functions of shapes, so that
results are the same bits on any number of threads.
"""

from __future__ import annotations

PIECE_NANOSECONDS = 10_000.0
"""A piece shorter than this is not worth cutting off."""
MAX_PIECES = 32
MAX_PARTIALS = 16
"""Most rows that a reduction adds up."""
MAX_PARTIAL_BYTES = 64 << 20
"""Most memory that the rows of one reduction take."""


def cut(extent: int, cost: float, most: int = MAX_PIECES) -> list[tuple[int, int]]:
    """Return half-open ranges that cover [0, extent), their sizes differing by at most one.

    Parameters
    ----------
    extent : int
        Units on the axis.
    cost : float
        Estimated nanoseconds a unit.
    most : int
        Upper limit of pieces.
    """
    pieces = max(1, min(extent, most, int(extent * cost / PIECE_NANOSECONDS)))
    return [(extent * i // pieces, extent * (i + 1) // pieces) for i in range(pieces)]


def partial_limit(row_bytes: int) -> int:
    """Return how many rows a reduction over rows of `row_bytes` may have."""
    return max(1, min(MAX_PARTIALS, MAX_PARTIAL_BYTES // max(1, row_bytes)))
