"""Copy a blob between layouts.

``nchw`` is what users see. In the lane layouts a place of memory holds L numbers, the lanes of a
vector of float32 (in float64 of two vectors): ``nchwc`` ("channel-lane") keeps L channels of one
pixel together, [N][ceil(C/L)][H][W][L], the lanes beyond the last channel are zero; ``nchwn``
("image-lane") keeps L images together, [N/L][C][H][W][L].

Both are matrices of rows whose elements become lanes: rows of channels, or rows that are whole
images. Squares of a vector each way are transposed in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cgdnn import machine
from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.kernels.vector import Emitter, emitted

PLACE = machine.vector_bytes() // 4
"""L, the numbers of one place."""


def _squares(e: Emitter, columns: Any) -> Iterator[tuple[int, Any, Any]]:
    """Yield, inside loops over squares: (first lane, first column, columns from there on).

    The last square ends with the last column, where there are enough for a whole one.
    """
    build, size = e.builder, e.integer(e.lanes)
    last = e.larger(build.sub(columns, size), e.integer(0))
    count = build.sdiv(build.add(columns, e.integer(e.lanes - 1)), size)
    with e.loop(count) as square:
        column = e.smaller(build.mul(square.index, size), last)
        for lane in range(0, PLACE, e.lanes):
            yield lane, column, build.sub(columns, column)


def _masks(e: Emitter, rows: Any, columns: Any) -> list[Any]:
    """Return the mask of the first columns for each row of a square, none beyond the last row."""
    build = e.builder
    exists = [build.icmp_signed("<", e.integer(i), rows) for i in range(e.lanes)]
    return [e.first_lanes(build.select(it, columns, e.integer(0))) for it in exists]


@emitted
def rows_to_places(e, x, x_start, row, rows, y, y_start, columns):  # type: ignore[no-untyped-def]
    """Set lane i of place j of y to ``x.flat[x_start + i * row + j]``, or 0 for i >= `rows`."""
    build = e.builder
    x, y = e.at(x, x_start), e.at(y, y_start)
    for lane, column, left in _squares(e, columns):
        here = build.sub(rows, e.integer(lane))
        sources = e.stepping(e.at(x, build.mul(row, e.integer(lane)), column), row, e.lanes)
        target = e.at(y, build.mul(column, e.integer(PLACE)), e.integer(lane))
        whole = build.icmp_signed(">=", e.smaller(left, here), e.integer(e.lanes))
        slots = [e.variable(e.zero()) for _ in sources]
        with build.if_else(whole) as (yes, no):
            with yes:
                for source, slot in zip(sources, slots, strict=True):
                    build.store(e.load(source), slot)
            with no:
                masks = _masks(e, here, left)
                for source, slot, mask in zip(sources, slots, masks, strict=True):
                    build.store(e.load(source, mask), slot)
        for i, vector in enumerate(e.transposed([build.load(slot) for slot in slots])):
            with build.if_then(build.icmp_signed("<", e.integer(i), left)):
                e.store(vector, e.at(target, e.integer(i * PLACE)))


@emitted
def places_to_rows(e, x, x_start, y, y_start, row, rows, columns):  # type: ignore[no-untyped-def]
    """Set ``y.flat[y_start + i * row + j]``, i < `rows`, to lane i of place j of x."""
    build = e.builder
    x, y = e.at(x, x_start), e.at(y, y_start)
    for lane, column, left in _squares(e, columns):
        here = build.sub(rows, e.integer(lane))
        source = e.at(x, build.mul(column, e.integer(PLACE)), e.integer(lane))
        targets = e.stepping(e.at(y, build.mul(row, e.integer(lane)), column), row, e.lanes)
        # Where there are fewer columns, the last one stands for those beyond it.
        last = build.sub(left, e.integer(1))
        places = [e.smaller(e.integer(i), last) for i in range(e.lanes)]
        vectors = e.transposed(
            [e.load(e.at(source, build.mul(place, e.integer(PLACE)))) for place in places]
        )
        whole = build.icmp_signed(">=", e.smaller(left, here), e.integer(e.lanes))
        with build.if_else(whole) as (yes, no):
            with yes:
                for vector, target in zip(vectors, targets, strict=True):
                    e.store(vector, target)
            with no:
                masks = _masks(e, here, left)
                for vector, target, mask in zip(vectors, targets, masks, strict=True):
                    e.store(vector, target, mask)


@kernel(array(3), array(4), INT, INT)
def reorder_to_lanes(x, y, begin, end):  # type: ignore[no-untyped-def]
    """Write y (N, ceil(C/L), P, L) from x (N, C, P), for [begin, end) of the first axis.

    For image-lane blobs of N L images: x (N, L, C P) and y (N, 1, C P, L).
    """
    rows, columns = x.shape[1:]
    for n in range(begin, end):
        for block in range(y.shape[1]):
            first = block * PLACE
            start = (n * rows + first) * columns
            out = (n * y.shape[1] + block) * columns * PLACE
            rows_to_places(x, start, columns, rows - first, y, out, columns)


@kernel(array(4), array(3), INT, INT)
def reorder_from_lanes(x, y, begin, end):  # type: ignore[no-untyped-def]
    """Write y (N, C, P) from x (N, ceil(C/L), P, L), for [begin, end) of the first axis.

    The shapes of image-lane blobs are those of `reorder_to_lanes`.
    """
    rows, columns = y.shape[1:]
    for n in range(begin, end):
        for block in range(x.shape[1]):
            first = block * PLACE
            start = (n * x.shape[1] + block) * columns * PLACE
            out = (n * rows + first) * columns
            places_to_rows(x, start, y, out, columns, rows - first, columns)
