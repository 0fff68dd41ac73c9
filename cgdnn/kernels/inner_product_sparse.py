"""The product of a mostly zero matrix with weights, over the non-zero elements.

ReLU and Dropout leave up to three quarters of the gradients of a batch zero, and row k of the
weights need meet only the images whose gradient at output k is not. For each block of ROWS outputs
and each image the non-zeros are listed, once for all columns of the weights. Then a block of the
weights, ROWS x a few vectors, is brought to the first cache, and every image adds the rows that it
has listed to its sums, which are in registers meanwhile.

The block is copied, since rows of a multiple of 4 KB would fall into the same few sets of the
cache; the block below is fetched while images meet it. A weight is read once.

A value is listed unless it equals 0, as in `cgdnn.kernels.conv_sparse`. Every sum goes through the
outputs in order, as in `cgdnn.kernels.inner_product.product_nn`.
"""

from __future__ import annotations

from numba.core import cgutils

from cgdnn import machine
from cgdnn.kernels._jit import INT, array, kernel, scratch
from cgdnn.kernels.conv_sparse import each_listed, list_planes
from cgdnn.kernels.relay import fill_zero
from cgdnn.kernels.vector import emitted, lanes_of

ROWS = 64
"""Outputs of a block: 32 KB of weights."""
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
    """Copy rows of x to y."""
    x, y = e.at(x, x_start), e.at(y, y_start)
    with e.sweep(rows, (x, x_row), (y, y_row)) as starts:
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
