"""Vector code of Winograd convolution with images in the lanes: tile transforms, products.

A *place* is one position of one channel for L images, a vector; blobs are planes of places (see
`cgdnn.plan.layout`). Scratch holds vectors frequency by frequency: [n * n][channel][tile][L].

All numbers are int64, all offsets and strides are in elements.
"""

from __future__ import annotations

from typing import Any

from cgdnn import machine
from cgdnn.kernels.vector import Emitter, emitted
from cgdnn.kernels.winograd_points import transposed
from cgdnn.kernels.winograd_tiles import INPUT_MATRICES, OUTPUT_MATRICES, matrix_product

_TILES = {4: 6, 2: 10, 1: 10} if machine.vector_bytes() == 64 else {2: 6, 1: 6}
"""Shapes of a product's tile that fit into the registers: most rows for each count of vectors."""


@emitted
def tiles_from_places(  # type: ignore[no-untyped-def]
    e, x, start, row, column, top, bottom, left, right, v, v_start, v_frequency, kind
):
    """Transform a patch of places for the products.

    Place (i, j) of the patch is at ``start + i * row + j * column`` for i in [top, bottom) and j in
    [left, right), and zero elsewhere. `kind` is 0 for B^T x B of F(4, 3), 1 of F(4, 5); 2 and 3 for
    A y A^T of the same. Element f of the result goes to ``v_start + f * v_frequency``.
    """
    build = e.builder
    x, v = e.at(x, start, build.mul(left, column)), e.at(v, v_start)
    columns = build.sub(right, left)
    kinds = [*INPUT_MATRICES, *map(transposed, OUTPUT_MATRICES)]
    with e.cases(kind, len(kinds)) as each:
        for case in each:
            matrix = kinds[case]
            height, width = len(matrix), len(matrix[0])
            between = e.vectors(height * width)
            with build.if_then(build.icmp_signed("<", columns, e.integer(width))):
                for i in range(height * width):
                    build.store(e.zero(), build.gep(between, [e.integer(i)]))
            lines = _inside(e, e.stepping(x, row, width), column, top, bottom)
            moving = [*lines, (build.gep(between, [left]), e.integer(1))]
            with e.sweep(columns, *moving) as (*places, slot):
                for i, vector in enumerate(matrix_product(e, matrix, list(map(e.load, places)))):
                    build.store(vector, build.gep(slot, [e.integer(i * width)]))
            line = build.mul(v_frequency, e.integer(height))
            moving = [(v, line), (between, e.integer(width))]
            with e.sweep(e.integer(height), *moving) as (place, slot):
                vectors = [build.load(build.gep(slot, [e.integer(j)])) for j in range(width)]
                places = e.stepping(place, v_frequency, height)
                for place, vector in zip(places, matrix_product(e, matrix, vectors), strict=True):
                    e.store(vector, place)


def _inside(
    e: Emitter, starts: list[Any], step: Any, begin: Any, end: Any
) -> list[tuple[Any, Any]]:
    """Return the starts of lines of places and their step.

    Lines outside [begin, end) stay at a place on the stack that holds zeros at first.
    """
    build = e.builder
    room = e.vectors(1)
    build.store(e.zero(), room)
    outside = (build.bitcast(room, starts[0].type), e.integer(0))
    count = build.sub(end, begin)
    lines = []
    for i, start in enumerate(starts):
        exists = build.icmp_unsigned("<", build.sub(e.integer(i), begin), count)
        both = zip((start, step), outside, strict=True)
        lines.append(tuple(build.select(exists, *pair) for pair in both))
    return lines


@emitted
def tiles_to_places(  # type: ignore[no-untyped-def]
    e, m, m_start, m_frequency, y, start, row, column, top, bottom, left, right, bias, kind
):
    """Transform products back to a patch of places, of which those outside are left out.

    Places as in `tiles_from_places`. `kind` is 0 for A^T m A of F(4, 3), 1 of F(4, 5): the patch is
    set to the result plus the bias. It is 2 and 3 for B m B^T of the same, which is added to.
    """
    build = e.builder
    m, y = e.at(m, m_start), e.at(y, start, build.mul(top, row))
    added = e.splat(bias)
    kinds = [*OUTPUT_MATRICES, *map(transposed, INPUT_MATRICES)]
    with e.cases(kind, len(kinds)) as each:
        for case in each:
            matrix, overlap = kinds[case], case >= len(OUTPUT_MATRICES)
            height, width = len(matrix), len(matrix[0])
            between = e.vectors(height * width)
            line = build.mul(m_frequency, e.integer(width))
            moving = [(m, m_frequency), (between, e.integer(1))]
            with e.sweep(e.integer(width), *moving) as (place, slot):
                vectors = [e.load(place) for place in e.stepping(place, line, width)]
                for i, vector in enumerate(matrix_product(e, matrix, vectors)):
                    build.store(vector, build.gep(slot, [e.integer(i * width)]))
            slots = build.gep(between, [build.mul(top, e.integer(width))])
            lines = _inside(e, e.stepping(y, column, height), row, left, right)
            moving = [*lines, (slots, e.integer(width))]
            with e.sweep(build.sub(bottom, top), *moving) as (*places, slot):
                vectors = [build.load(build.gep(slot, [e.integer(j)])) for j in range(width)]
                for place, vector in zip(places, matrix_product(e, matrix, vectors), strict=True):
                    e.store(build.fadd(vector, e.load(place) if overlap else added), place)


@emitted
def multiply_places(  # type: ignore[no-untyped-def]
    e, a, a_start, a_row, a_k, rows, depth, b, b_start, b_row, vectors, c, c_start, c_row, keep
):
    """C (+)= A B, of scalars A and vectors B and C.

    Element (i, k) of A lies at ``i * a_row + k * a_k``, vector v of row k of B at
    ``k * b_row + v * L`` and of row i of C at ``i * c_row + v * L``. `keep` is not 0 where C is
    added to. Each element of C is summed in the order of k.
    """
    build = e.builder
    a, b, c = e.at(a, a_start), e.at(b, b_start), e.at(c, c_start)
    keeps = build.icmp_signed("!=", keep, e.integer(0))
    for nv, most in _TILES.items():
        wide = e.integer(nv * e.lanes)
        count = build.sdiv(vectors, e.integer(nv))
        vectors = build.sub(vectors, build.mul(count, e.integer(nv)))
        tiles = build.sdiv(build.add(rows, e.integer(most - 1)), e.integer(most))
        least, more = build.sdiv(rows, tiles), build.srem(rows, tiles)
        with e.sweep(count, (b, wide), (c, wide)) as (b_panel, c_panel), e.loop(tiles) as tile:
            larger = build.icmp_signed("<", tile.index, more)
            top = build.add(build.mul(tile.index, least), e.smaller(tile.index, more))
            size = build.add(least, build.zext(larger, least.type))
            a_tile = e.at(a, build.mul(top, a_row))
            c_tile = e.at(c_panel, build.mul(top, c_row))
            with e.cases(build.sub(size, e.integer(1)), most) as each:
                for case in each:
                    _multiply_tile(
                        e, case + 1, nv, (a_tile, a_row, a_k), depth, (b_panel, b_row),
                        (c_tile, c_row), keeps,
                    )  # fmt: skip
        done = build.mul(count, wide)
        b, c = e.at(b, done), e.at(c, done)


def _multiply_tile(
    e: Emitter,
    mr: int,
    nv: int,
    left: tuple[Any, Any, Any],
    depth: Any,
    right: tuple[Any, Any],
    result: tuple[Any, Any],
    keeps: Any,
) -> None:
    """Compute a tile of `mr` rows and `nv` vectors."""
    build = e.builder
    a, a_row, a_k = left
    c, c_row = result
    places = [
        e.at(c, build.mul(c_row, e.integer(i)), e.integer(v * e.lanes))
        for i in range(mr)
        for v in range(nv)
    ]
    sums = [e.variable(e.zero()) for _ in places]
    with build.if_then(keeps):
        for slot, place in zip(sums, places, strict=True):
            build.store(e.load(place), slot)
    steps = [build.mul(a_row, e.integer(i)) for i in range(mr)]
    with e.sweep(depth, (a, a_k), right) as (scalars, line):
        vectors = [e.load(e.at(line, e.integer(v * e.lanes))) for v in range(nv)]
        for i, step in enumerate(steps):
            factor = e.splat(e.scalar(e.at(scalars, step)))
            for slot, vector in zip(sums[i * nv :], vectors, strict=False):
                build.store(e.multiply_add(factor, vector, build.load(slot)), slot)
    for slot, place in zip(sums, places, strict=True):
        e.store(build.load(slot), place)
