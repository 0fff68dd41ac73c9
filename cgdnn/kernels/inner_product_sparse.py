"""Backward passes of an inner product over the non-zero elements of dy, one piece on one core.

ReLU and Dropout leave up to three quarters of the gradients of a batch zero, and row k of the
weights need meet only the samples whose gradient at output k is not.

* backward_data: for each block of ROWS outputs and each sample the non-zeros are listed, once for
  all columns of the weights. A block of the weights, ROWS x a few vectors, is brought to the first
  cache, and every sample adds the rows that it has listed to its sums, which are in registers
  meanwhile. The block below is fetched while samples meet it. A weight is read once.
* backward_weights: each of up to ROWS rows of weights has a list of its non-zeros. A few vectors of
  every sample are brought to the first cache, and each row adds the samples that it has listed to
  its part of the gradient, in registers. `sgd_over_nonzeros` moves the weights by it while it is
  there and writes no gradient: a large layer is bound by memory, and the gradient would be written
  and read again. What comes next of the row is fetched meanwhile.

What is brought to the cache is copied, since rows of a multiple of 4 KB would fall into the same
few sets of it.

A value is listed unless it equals 0, as in `cgdnn.kernels.conv_sparse`. Every sum goes through
outputs, or samples, in order: the bits are those of `product_nn` and `product_tn` of
`cgdnn.kernels.inner_product` where weights and x are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba.core import cgutils

from cgdnn import machine
from cgdnn.kernels._jit import INT, REAL, Kernel, array, device, kernel, scratch
from cgdnn.kernels.conv_sparse import each_listed, list_planes
from cgdnn.kernels.relay import fill_zero
from cgdnn.kernels.update import sgd_mover, sgd_update
from cgdnn.kernels.vector import Emitter, emitted, lanes_of, sums, transpose_block

ROWS = 64
"""Rows of weights that have lists at a time: 32 KB of a block."""
_VECTORS = 8
"""Most vectors in a row of a block: as many multiply-adds as are under way at a time."""


def most_columns() -> int:
    """Return the most columns of a block; scratch for as many float64 elements has room."""
    return _VECTORS * machine.vector_bytes() // 4


def room(images: int) -> int:
    """Return the most elements that the lists of a block take, with the vector beyond their end."""
    return images * ROWS + machine.vector_bytes() // 4


@kernel(array(2), array(2), array(2, "int32"), array(2, "int64"), scratch(1, "int32"), INT, INT)
def list_outputs(dy, values, places, starts, positions, begin, end):  # type: ignore[no-untyped-def]
    """List the non-zeros of each image in the blocks [begin, end) of outputs.

    Parameters
    ----------
    dy : array (N, outputs)
    values : array (blocks, room)
    places : int32 array (blocks, room)
        Where in a block of weights the rows begin that the values meet.
    starts : int64 array (blocks, N + 1)
        List n of block b is [starts[b, n], starts[b, n + 1]) of row b of values and places.
    positions : int32 array (ROWS,)
    """
    images, outputs = dy.shape
    for row in range(ROWS):
        positions[row] = row * _VECTORS * lanes_of(dy)
    for b in range(begin, end):
        last = 0
        for n in range(images):
            starts[b, n] = last
            list_planes(
                values[b, last:], places[b, last:], 0, starts[b, n + 1 :],
                dy, n * outputs + b * ROWS, outputs, 1, 0, 1,
                positions, 0, min(ROWS, outputs - b * ROWS),
            )  # fmt: skip
            last += starts[b, n + 1]
        starts[b, images] = last


@emitted
def _copy_rows(e, y, y_start, y_row, x, x_start, x_row, rows, columns):  # type: ignore[no-untyped-def]
    """Copy rows of x to y: at most _VECTORS of each."""
    build, steps = e.builder, [e.integer(v * e.lanes) for v in range(_VECTORS)]
    pointers = [(e.at(x, x_start), x_row), (e.at(y, y_start), y_row)]
    whole = build.icmp_signed("==", columns, e.integer(_VECTORS * e.lanes))
    with build.if_else(whole) as (all_vectors, some):
        with all_vectors, e.sweep(rows, *pointers) as (source, target):
            for vector, step in [(e.load(e.at(source, step)), step) for step in steps]:
                e.store(vector, e.at(target, step))
        with some, e.sweep(rows, *pointers) as starts:
            for (source, target), mask in e.along(columns, *starts):
                e.store(e.load(source, mask), target, mask)


@emitted
def _add_listed(  # type: ignore[no-untyped-def]
    e, sums, block, vectors, images, values, places, starts, w, start, w_row, rows
):
    """Add, for each image, value * block[place] over its list to the first vectors of its sums.

    Meanwhile as many vectors of `rows` rows of w from `start` on are fetched, evenly, since only so
    many can be under way.
    """
    build, pitch = e.builder, e.integer(_VECTORS * e.lanes)
    w = e.at(w, start)
    fetched = e.variable(e.integer(0))
    with e.cases(build.sub(vectors, e.integer(1)), _VECTORS) as each:
        for case in each:
            steps = [e.integer(v * e.lanes) for v in range(case + 1)]
            with e.loop(images) as n:
                next_image = build.add(n.index, e.integer(1))
                target = e.at(sums, build.mul(n.index, pitch))
                totals = [e.variable(e.load(e.at(target, step))) for step in steps]
                begin, end = (e.scalar(e.at(starts, i)) for i in (n.index, next_image))
                with each_listed(e, values, places, begin, end) as (value, place):
                    row = e.at(block, place)
                    for step, total in zip(steps, totals, strict=True):
                        weights = e.load(e.at(row, step))
                        build.store(e.multiply_add(value, weights, build.load(total)), total)
                for step, total in zip(steps, totals, strict=True):
                    e.store(build.load(total), e.at(target, step))
                last = build.sdiv(build.mul(next_image, rows), images)
                with cgutils.for_range(build, last, start=build.load(fetched)) as r:
                    there = e.at(w, build.mul(r.index, w_row))
                    for step in steps:
                        e.prefetch(e.at(there, step), nearest=False)
                build.store(last, fetched)


@kernel(
    array(2), array(2), array(2, "int32"), array(2, "int64"), array(2), INT, scratch(1),
    scratch(1), INT, INT,
)  # fmt: skip
def product_listed(w, values, places, starts, dx, unit, block, sums, begin, end):  # type: ignore[no-untyped-def]
    """Set the columns [begin, end) * unit of dx to those of dy w.

    Parameters
    ----------
    w : array (outputs, inputs)
    values, places, starts
        The non-zeros of dy, from `list_outputs`.
    dx : array (N, inputs)
    block : array (ROWS * most_columns,)
    sums : array (N * most_columns,)
    """
    images, columns = dx.shape
    lanes, row = lanes_of(dx), _VECTORS * lanes_of(dx)
    vectors = ((end - begin) * unit + lanes - 1) // lanes
    tiles = (vectors + _VECTORS - 1) // _VECTORS
    for tile in range(tiles):
        left = begin * unit + vectors * tile // tiles * lanes
        right = min(begin * unit + vectors * (tile + 1) // tiles * lanes, end * unit)
        some = right - left
        fill_zero(sums, 0, images * _VECTORS)
        for b in range(len(starts)):
            top, below = b * ROWS, (b + 1) * ROWS
            _copy_rows(
                block, 0, row, w, top * columns + left, columns, min(ROWS, len(w) - top), some
            )  # fmt: skip
            _add_listed(
                sums, block, (some + lanes - 1) // lanes, images, values[b], places[b],
                starts[b], w, below * columns + left, columns,
                max(0, min(ROWS, len(w) - below)),
            )  # fmt: skip
        _copy_rows(dx, left, columns, sums, 0, row, images, some)


def weights_scratch(samples: int, lanes: int) -> list[tuple[tuple[int, ...], str]]:
    """Return shapes and types of what a worker needs for weights: the kernels' scratch arguments.

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
        ((ROWS, room), "real"),
        ((ROWS, room), "real"),
        ((ROWS, room), "int32"),
        ((ROWS,), "int64"),
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
    build = e.builder

    def add(vectors: int, mask: Any) -> None:
        steps = [e.integer(v * e.lanes) for v in range(vectors)]
        masks = [None] * (vectors - 1) + [mask]
        with e.loop(rows) as r:
            start, offset = build.mul(r.index, room), build.mul(r.index, row)
            there = [[e.at(target, offset, step) for target in targets] for step in steps]
            for pointers in there:
                for pointer in pointers:
                    e.prefetch(e.at(pointer, e.integer(_VECTORS * e.lanes)))
            totals = [
                e.variable(begin(pointers, mask))
                for pointers, mask in zip(there, masks, strict=True)
            ]
            end = e.scalar(e.at(ends, r.index))
            with each_listed(e, values, places, start, end) as (value, place):
                source = e.at(tile, place)
                for total, step, mask in zip(totals, steps, masks, strict=True):
                    right = e.load(e.at(source, step), mask)
                    build.store(e.multiply_add(value, right, build.load(total)), total)
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
        Scratch (see `weights_scratch`).
    dw : array (M, columns)
    """
    columns = dw.shape[1]
    for top in range(begin * unit, end * unit, ROWS):
        rows = min(ROWS, end * unit - top)
        _list_rows(turned, values, places, ends, positions, dy, top, rows)
        left = 0
        while left < columns:
            length = _width(left, columns, x)
            _copy_rows(tile, 0, _VECTORS * lanes_of(x), x, left, columns, x.shape[0], length)
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
    for top in range(begin * unit, end * unit, ROWS):
        rows = min(ROWS, end * unit - top)
        _list_rows(turned, values, places, ends, positions, dy, top, rows)
        left = 0
        while left < columns:
            length = _width(left, columns, x)
            _copy_rows(tile, 0, _VECTORS * lanes_of(x), x, left, columns, x.shape[0], length)
            (part,) = _move_rows(
                w, history, top * columns + left, columns, tile, values, places, values.shape[1],
                ends, rows, length, factor[0], rate, momentum, decay_l2, decay_l1,
            )  # fmt: skip
            total += part
            left += length
    bad[piece, 0] = 0 if total == 0 else 1


APPLIED: dict[Kernel, Kernel] = {sgd_update: sgd_over_nonzeros}
"""Kernel of an update -> the one that does it with a gradient that is never written."""
