"""The weight gradient of an inner product over the non-zero dy: kept, or applied at once.

Behind ReLU or dropout most of dy is zero. Each row of the gradient is a sum of rows of x, one for
each sample whose dy is not zero there: ``dw[k] = sum over n of dy[n, k] x[n]``. Some rows of
weights at a time have a list each of their non-zeros, and of where the samples of these begin in a
tile of x: a few vectors of every sample, copied so that they stay in the first cache wherever x
lies. A row of dw stays in registers while its list is gone through.

`sgd_over_nonzeros` moves the weights by that row while it is there, and writes no gradient: a large
layer is bound by memory, and the gradient would be written and read again.

A value is listed unless it equals 0, samples in ascending order: the sums are those of
`cgdnn.kernels.inner_product.product_tn`, bit by bit, where x is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from cgdnn.kernels._jit import INT, REAL, Kernel, array, device, kernel, scratch
from cgdnn.kernels.conv_sparse import list_planes
from cgdnn.kernels.update import sgd_mover, sgd_update
from cgdnn.kernels.vector import Emitter, emitted, lanes_of, sums, transpose_block

_VECTORS = 8
"""Vectors of each sample in a tile of x."""
_ROWS = 64
"""Rows of weights that meet a tile of x before the next one is copied."""

_I64 = ir.IntType(64)


def scratch_shapes(samples: int, lanes: int) -> list[tuple[tuple[int, ...], str]]:
    """Return shapes and types of what a worker needs: the scratch arguments of the kernels.

    Parameters
    ----------
    samples : int
        Rows of x and dy.
    lanes : int
        Floats in a vector.
    """
    room = (-(-samples // lanes) + 1) * lanes  # a list is written a vector at a time
    return [
        ((samples * _VECTORS * lanes,), "real"),
        ((_ROWS, room), "real"),
        ((_ROWS, room), "real"),
        ((_ROWS, room), "int32"),
        ((_ROWS,), "int64"),
        ((samples,), "int32"),
    ]


_SCRATCH = (
    scratch(1),
    scratch(2),
    scratch(2),
    scratch(2, "int32"),
    scratch(1, "int64"),
    scratch(1, "int32"),
)


@device
def _list_rows(turned, values, places, ends, positions, dy, top, rows):  # type: ignore[no-untyped-def]
    """List the non-zeros of rows [top, top + rows) of dy^T; that of row r begins at [r, 0].

    The place of sample n is where it begins in a tile.
    """
    samples, outputs = dy.shape
    room, lanes = turned.shape[1], lanes_of(dy)
    for n in range(samples):
        positions[n] = n * _VECTORS * lanes
    for r in range(0, rows, lanes):
        for n in range(0, samples, lanes):
            transpose_block(
                turned, r * room + n, room, dy, n * outputs + top + r, outputs,
                min(lanes, samples - n), min(lanes, rows - r), 0,
            )  # fmt: skip
    list_planes(values, places, room, ends, turned, 0, room, rows, 0, 1, positions, 0, samples)


def _whole_or_tail(e: Emitter, length: Any, body: Callable[[int, Any], None]) -> None:
    """Emit ``body(vectors, mask)`` for a whole tile, or for what is left: at most a vector."""
    build = e.builder
    whole = build.icmp_signed("==", length, e.integer(_VECTORS * e.lanes))
    with build.if_else(whole) as (all_vectors, one):
        with all_vectors:
            body(_VECTORS, None)
        with one:
            body(1, e.first_lanes(length))


@emitted
def _copy_tile(e, tile, x, x_start, x_row, samples, length):  # type: ignore[no-untyped-def]
    """Copy `length` elements of each sample: a whole tile, or at most a vector."""
    tile_row = e.integer(_VECTORS * e.lanes)

    def copy(vectors: int, mask: Any) -> None:
        with e.sweep(samples, (e.at(x, x_start), x_row), (tile, tile_row)) as (source, target):
            for v in range(vectors):
                step = e.integer(v * e.lanes)
                e.store(e.load(e.at(source, step), mask), e.at(target, step))

    _whole_or_tail(e, length, copy)


def _emit_rows(  # type: ignore[no-untyped-def]
    e: Emitter, tile, values, places, room, ends, rows, length, row,
    targets: Sequence[Any],
    begin: Callable[[Sequence[Any], Any], Any],
    finish: Callable[[Any, Sequence[Any], Any], None],
) -> None:  # fmt: skip
    """Emit the sums of the lists of `rows` rows over a tile.

    Parameters
    ----------
    targets : sequence of pointers
        Where the tile's columns begin in the first row of the gradient, or of the weights and their
        history; the next row is `row` elements behind.
    begin : callable
        Given pointers to a vector of the targets, and its mask, returns what its sum begins with.
    finish : callable
        Given the sum, too, emits what becomes of it.
    """
    build, one = e.builder, e.integer(1)

    def add(vectors: int, mask: Any) -> None:
        steps = [e.integer(v * e.lanes) for v in range(vectors)]
        masks = [None] * (vectors - 1) + [mask]
        with e.loop(rows) as r:
            start, offset = build.mul(r.index, room), build.mul(r.index, row)
            count = build.sub(build.load(e.at(ends, r.index)), start)
            there = [[e.at(target, offset, step) for target in targets] for step in steps]
            for pointers in there:
                for pointer in pointers:
                    e.prefetch(e.at(pointer, e.integer(_VECTORS * e.lanes)))
            totals = [
                e.variable(begin(pointers, mask))
                for pointers, mask in zip(there, masks, strict=True)
            ]
            lists = [(e.at(each, start), one) for each in (values, places)]
            with e.sweep(count, *lists) as (value, place):
                left = e.splat(e.scalar(value))
                source = e.at(tile, build.sext(build.load(place), _I64))
                for total, step, mask in zip(totals, steps, masks, strict=True):
                    right = e.load(e.at(source, step), mask)
                    build.store(e.multiply_add(left, right, build.load(total)), total)
            for total, pointers, mask in zip(totals, there, masks, strict=True):
                finish(build.load(total), pointers, mask)

    _whole_or_tail(e, length, add)


@emitted
def _keep_rows(  # type: ignore[no-untyped-def]
    e, dw, start, row, tile, values, places, room, ends, rows, length, accumulate
):
    """Set rows of dw, in the columns of a tile, to their sums, or add these."""
    build = e.builder

    def begin(pointers, mask):  # type: ignore[no-untyped-def]
        first = e.variable(e.zero())
        with build.if_then(build.icmp_signed("!=", accumulate, e.integer(0))):
            build.store(e.load(pointers[0], mask), first)
        return build.load(first)

    def finish(total, pointers, mask):  # type: ignore[no-untyped-def]
        e.store(total, pointers[0], mask)

    targets = [e.at(dw, start)]
    _emit_rows(e, tile, values, places, room, ends, rows, length, row, targets, begin, finish)


@sums(1)
def _move_rows(  # type: ignore[no-untyped-def]
    e, w, history, start, row, tile, values, places, room, ends, rows, length,
    scale, rate, momentum, decay_l2, decay_l1,
):  # fmt: skip
    """Move rows of w in the columns of a tile; returns NaN where one is not finite, else 0."""
    move, total = sgd_mover(e, scale, rate, momentum, decay_l2, decay_l1)

    def begin(pointers, mask):  # type: ignore[no-untyped-def]
        return e.zero()

    def finish(gradient, pointers, mask):  # type: ignore[no-untyped-def]
        weights, moments = pointers
        move(gradient, weights, moments, mask)

    targets = [e.at(w, start), e.at(history, start)]
    _emit_rows(e, tile, values, places, room, ends, rows, length, row, targets, begin, finish)
    return (total(),)


@device
def _width(left, columns, x):  # type: ignore[no-untyped-def]
    """Return the columns of the tile that begins at `left`: whole, or at most a vector."""
    whole = _VECTORS * lanes_of(x)
    return whole if columns - left >= whole else min(columns - left, lanes_of(x))


@kernel(array(2), array(2), *_SCRATCH, array(2), REAL, INT, INT, INT)
def gradient_over_nonzeros(  # type: ignore[no-untyped-def]
    dy, x, tile, turned, values, places, ends, positions, dw, accumulate, unit, begin, end
):
    """Set rows [begin, end) * unit of dw to dy^T x, or add it where `accumulate` is not 0.

    Parameters
    ----------
    dy : array (N, M)
    x : array (N, columns)
    tile, turned, values, places, ends, positions
        Scratch (see `scratch_shapes`).
    dw : array (M, columns)
    """
    columns = dw.shape[1]
    for top in range(begin * unit, end * unit, _ROWS):
        rows = min(_ROWS, end * unit - top)
        _list_rows(turned, values, places, ends, positions, dy, top, rows)
        left = 0
        while left < columns:
            length = _width(left, columns, x)
            _copy_tile(tile, x, left, columns, x.shape[0], length)
            _keep_rows(
                dw, top * columns + left, columns, tile, values, places, values.shape[1], ends,
                rows, length, int(accumulate != 0),
            )  # fmt: skip
            left += length


@kernel(
    *(array(2), array(2), *_SCRATCH, array(2), array(2), array(1), array(2)),
    *(REAL, REAL, REAL, REAL, INT, INT, INT, INT),
)
def sgd_over_nonzeros(  # type: ignore[no-untyped-def]
    dy, x, tile, turned, values, places, ends, positions, w, history, factor, bad,
    rate, momentum, decay_l2, decay_l1, unit, piece, begin, end,
):  # fmt: skip
    """Move rows [begin, end) * unit of w as `sgd_update` does by the gradient dy^T x.

    Parameters
    ----------
    dy, x, tile, turned, values, places, ends, positions
        As in `gradient_over_nonzeros`.
    w, history : array (M, columns)
    factor, bad, rate, momentum, decay_l2, decay_l1
        As in `sgd_update`.
    """
    columns = w.shape[1]
    total = 0.0
    for top in range(begin * unit, end * unit, _ROWS):
        rows = min(_ROWS, end * unit - top)
        _list_rows(turned, values, places, ends, positions, dy, top, rows)
        left = 0
        while left < columns:
            length = _width(left, columns, x)
            _copy_tile(tile, x, left, columns, x.shape[0], length)
            (part,) = _move_rows(
                w, history, top * columns + left, columns, tile, values, places, values.shape[1],
                ends, rows, length, factor[0], rate, momentum, decay_l2, decay_l1,
            )  # fmt: skip
            total += part
            left += length
    bad[piece, 0] = 0 if total == 0 else 1


APPLIED: dict[Kernel, Kernel] = {sgd_update: sgd_over_nonzeros}
"""Kernel of an update -> the one that does it with a gradient that is never written."""
