"""Vector code of Winograd convolution with images in the lanes: tile transforms, products.

A *place* is one position of one channel for L images, a vector; blobs are planes of places.
Scratch holds vectors frequency by frequency: [n * n][channel][tile][L].

All numbers are int64, all offsets and strides are in elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cgdnn import machine
from cgdnn.kernels.vector import Emitter, emitted
from cgdnn.kernels.winograd_points import VARIANTS
from cgdnn.kernels.winograd_tiles import FROM_FREQUENCIES, TO_FREQUENCIES, matrix_product

_FEW_TILES = {2: 6, 1: 6}
_TILES = {4: 6, 2: 10, 1: 10} if machine.vector_bytes() == 64 else _FEW_TILES
"""Shapes of a product's tile that fit into the registers: most rows for each count of vectors."""
SERVED = VARIANTS[:4]
"""Variants of tiles with images in the lanes. Each takes time to compile, so there are not more."""
_KINDS = 2 * len(SERVED)
"""Kinds of transforms of these, the first ones."""


@emitted
def tiles_from_places(  # type: ignore[no-untyped-def]
    e, x, start, row, column, top, bottom, left, right, v, v_start, v_frequency, kind
):
    """Transform a patch of places for the products.

    Place (i, j) of the patch is at ``start + i * row + j * column`` for i in [top, bottom) and j in
    [left, right), and zero elsewhere. `kind` is an index of `TO_FREQUENCIES`, for one of `SERVED`.
    Element f of the result goes to ``v_start + f * v_frequency``.
    """
    build = e.builder
    x, v = e.at(x, start, build.mul(left, column)), e.at(v, v_start)
    columns = build.sub(right, left)
    with e.cases(kind, _KINDS) as each:
        for case in each:
            matrix = TO_FREQUENCIES[case]
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

    Places as in `tiles_from_places`. `kind` is an index of `FROM_FREQUENCIES`, for one of `SERVED`.
    Patches that do not overlap are set to the result plus the bias, others are added to.
    """
    build = e.builder
    m, y = e.at(m, m_start), e.at(y, start, build.mul(top, row))
    added = e.splat(bias)
    with e.cases(kind, _KINDS) as each:
        for case in each:
            matrix = FROM_FREQUENCIES[case]
            overlap = len(matrix) > VARIANTS[case // 2][0]
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
def fetch_places(e, x, start, row, rows, count):  # type: ignore[no-untyped-def]
    """Bring `rows` runs of `count` elements, which are `row` apart, near."""
    lane = e.integer(e.lanes)
    vectors = e.builder.sdiv(count, lane)
    with e.sweep(rows, (e.at(x, start), row)) as (line,):  # noqa: SIM117
        with e.sweep(vectors, (line, lane)) as (place,):
            e.prefetch(place)


@emitted
def multiply_places(  # type: ignore[no-untyped-def]
    e, a, a_start, a_row, a_k, rows, depth, b, b_start, b_row, vectors, c, c_start, c_row, keep
):
    """C (+)= A B, of scalars A and vectors B and C.

    Element (i, k) of A lies at ``i * a_row + k * a_k``, vector v of row k of B at
    ``k * b_row + v * L`` and of row i of C at ``i * c_row + v * L``. `keep` is not 0 where C is
    added to. Each element of C is summed in the order of k.
    """
    _multiply(
        e, _TILES, lambda place: e.splat(e.scalar(place)),
        (e.at(a, a_start), a_row, a_k), rows, depth,
        (e.at(b, b_start), b_row, e.integer(e.lanes)), vectors, (e.at(c, c_start), c_row), keep,
    )  # fmt: skip


@emitted
def multiply_lanes(  # type: ignore[no-untyped-def]
    e, a, a_start, a_row, rows, depth, b, b_start, b_row, vectors, c, c_start, c_row, keep
):
    """C (+)= A B^T, of vectors, lane by lane; C has the sums of the lanes.

    Element (i, k) of A lies at ``i * a_row + k * L``, (j, k) of B at ``j * b_row + k * L`` and
    (i, j) of C at ``i * c_row + j``. `keep` is not 0 where C is added to.
    """
    lane = e.integer(e.lanes)
    _multiply(
        e, _FEW_TILES, e.load, (e.at(a, a_start), a_row, lane), rows, depth,
        (e.at(b, b_start), lane, b_row), vectors, (e.at(c, c_start), c_row), keep, summed=True,
    )  # fmt: skip


def _multiply(
    e: Emitter,
    shapes: dict[int, int],
    factor: Callable[[Any], Any],
    left: tuple[Any, Any, Any],
    rows: Any,
    depth: Any,
    right: tuple[Any, Any, Any],
    vectors: Any,
    result: tuple[Any, Any],
    keep: Any,
    *,
    summed: bool = False,
) -> None:
    """C (+)= A B, tile by tile.

    Parameters
    ----------
    shapes : dict
        Most rows of a tile for each count of vectors.
    factor : callable
        Returns a vector for the place of an element of A.
    left : (pointer, row, k)
        Where A lies, and how far apart its rows and columns are.
    right : (pointer, k, vector)
        Where B lies, and how far apart its rows and vectors are.
    result : (pointer, row)
        Where C lies, and how far apart its rows are.
    summed : bool, optional
        Whether elements of C are the sums of the lanes, not vectors.
    """
    build = e.builder
    (a, a_row, a_k), (b, b_k, b_vector), (c, c_row) = left, right, result
    keeps = build.icmp_signed("!=", keep, e.integer(0))
    for nv, most in shapes.items():
        number = e.integer(nv)
        count = build.sdiv(vectors, number)
        vectors = build.sub(vectors, build.mul(count, number))
        tiles = build.sdiv(build.add(rows, e.integer(most - 1)), e.integer(most))
        least, more = build.sdiv(rows, tiles), build.srem(rows, tiles)
        b_wide, c_wide = build.mul(b_vector, number), e.integer(nv if summed else nv * e.lanes)
        with e.sweep(count, (b, b_wide), (c, c_wide)) as (b_panel, c_panel), e.loop(tiles) as tile:
            larger = build.icmp_signed("<", tile.index, more)
            top = build.add(build.mul(tile.index, least), e.smaller(tile.index, more))
            size = build.add(least, build.zext(larger, least.type))
            a_tile = (e.at(a, build.mul(top, a_row)), a_row, a_k)
            c_tile = (e.at(c_panel, build.mul(top, c_row)), c_row)
            with e.cases(build.sub(size, e.integer(1)), most) as each:
                for case in each:
                    _multiply_tile(
                        e, factor, case + 1, nv, a_tile, depth, (b_panel, b_k, b_vector), c_tile,
                        keeps, summed,
                    )  # fmt: skip
        b, c = e.at(b, build.mul(count, b_wide)), e.at(c, build.mul(count, c_wide))


def _multiply_tile(
    e: Emitter,
    factor: Callable[[Any], Any],
    mr: int,
    nv: int,
    left: tuple[Any, Any, Any],
    depth: Any,
    right: tuple[Any, Any, Any],
    result: tuple[Any, Any],
    keeps: Any,
    summed: bool,
) -> None:
    """Compute a tile of `mr` rows and `nv` vectors."""
    build = e.builder
    (a, a_row, a_k), (b, b_k, b_vector), (c, c_row) = left, right, result
    places = [
        e.at(c, build.mul(c_row, e.integer(i)), e.integer(v if summed else v * e.lanes))
        for i in range(mr)
        for v in range(nv)
    ]
    sums = [e.variable(e.zero()) for _ in places]
    if not summed:
        with build.if_then(keeps):
            for slot, place in zip(sums, places, strict=True):
                build.store(e.load(place), slot)
    a_steps = [build.mul(a_row, e.integer(i)) for i in range(mr)]
    b_steps = [build.mul(b_vector, e.integer(v)) for v in range(nv)]
    with e.sweep(depth, (a, a_k), (b, b_k)) as (column, line):
        vectors = [e.load(e.at(line, step)) for step in b_steps]
        for i, step in enumerate(a_steps):
            x = factor(e.at(column, step))
            for slot, vector in zip(sums[i * nv :], vectors, strict=False):
                build.store(e.multiply_add(x, vector, build.load(slot)), slot)
    for slot, place in zip(sums, places, strict=True):
        if summed:
            total = e.total(build.load(slot))
            added = build.fadd(total, e.scalar(place))
            build.store(build.select(keeps, added, total), place)
        else:
            e.store(build.load(slot), place)
