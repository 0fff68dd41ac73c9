"""Vector code of Winograd convolution: lanes of channels, tile transforms, products.

Everything here works on scratch whose innermost axis is L channels, the lanes of one vector:

* a *plane* holds one block of L channels of a part of an image: [rows][columns][L];
* *tiles* hold many tiles of many blocks, frequency by frequency: [n * n][block][tile][L];
* a *panel* holds weights, frequency by frequency: [n * n][k][vectors][L].

All numbers are int64, all offsets and strides are in elements.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from cgdnn import machine
from cgdnn.kernels.vector import Emitter, constant, emitted
from cgdnn.kernels.winograd_points import VARIANTS, Matrix, matrices, transposed

_LINES = 16
"""Cache lines that a tile of a product brings near."""
_AHEAD = 4
"""Rows of dU that are brought near before they are needed: each is spread over many pages."""

_MATRICES = [matrices(*variant) for variant in VARIANTS]
TO_FREQUENCIES = [matrix for m in _MATRICES for matrix in (m.input, transposed(m.output))]
"""Kinds of transforms of tiles, two for each variant: B^T x B, and A y A^T of outputs."""
FROM_FREQUENCIES = [matrix for m in _MATRICES for matrix in (m.output, transposed(m.input))]
"""The kinds of transforms back: A^T m A, and B m B^T, whose tiles overlap."""
_FILTERS = [m.filter for m in _MATRICES]


def panel_vectors() -> int:
    """Return the vectors in a row of a panel."""
    return 4 if machine.vector_bytes() == 64 else 2


def _rows(e: Emitter, vectors: int) -> int:
    """Return the rows of a tile of a product that has so many vectors in a row.

    It divides the lanes, so that a tile never spans two blocks.
    """
    return min(e.lanes, 4 if vectors > 2 or panel_vectors() < 4 else 8)


@constant
def panel_columns(e: Emitter, x: Any) -> int:
    """Return the columns of a panel."""
    return panel_vectors() * e.lanes


def _combine(e: Emitter, coefficients: list[Fraction], vectors: list[Any]) -> Any:
    """Return the sum of coefficient times vector, None where all coefficients are zero."""
    build = e.builder
    total = None
    terms = [t for t in zip(coefficients, vectors, strict=True) if t[0]]
    for factor, vector in sorted(terms, key=lambda term: (abs(term[0]) != 1, term[0] != 1)):
        if total is None:
            total = vector if factor == 1 else build.fmul(e.filled(float(factor)), vector)
        elif abs(factor) == 1:
            total = build.fadd(total, vector) if factor == 1 else build.fsub(total, vector)
        else:
            total = e.multiply_add(e.filled(float(factor)), vector, total)
    return total


def _mirrored(lines: Matrix) -> list[tuple[int, int]]:
    """Return the pairs of lines that differ in signs only, as those of the points p and -p do."""
    pairs: list[tuple[int, int]] = []
    for j, line in enumerate(lines):
        for i in range(j):
            same = all(abs(a) == abs(b) for a, b in zip(lines[i], line, strict=True))
            if same and lines[i] != line:
                pairs.append((i, j))
    return pairs


def _summed(lines: Matrix) -> list[tuple[int, int, int]]:
    """Return three lines where two have no common column, and their sum is the third."""
    return [
        (i, j, k)
        for k, line in enumerate(lines)
        for j in range(k)
        for i in range(j)
        if all(a + b == c and 0 in (a, b) for a, b, c in zip(lines[i], lines[j], line, strict=True))
        and any(lines[i])
        and any(lines[j])
    ]


def matrix_product(e: Emitter, matrix: Matrix, vectors: list[Any]) -> list[Any]:
    """Return the matrix times a column of vectors; what the points p and -p share is done once.

    So is what the rows or columns of +-i share: one is the sum of two others, or a part of them.
    """
    build = e.builder
    columns = transposed(matrix)
    vectors = [*vectors]
    for i, j, k in _summed(columns):
        vectors[i], vectors[j] = (build.fadd(vectors[each], vectors[k]) for each in (i, j))
        columns[k] = [Fraction(0)] * len(matrix)
    for i, j in _mirrored(columns):
        a, b = columns[i], columns[j]
        vectors[i], vectors[j] = (
            build.fadd(vectors[i], vectors[j]),
            build.fsub(vectors[i], vectors[j]),
        )
        columns[i] = [p if p == q else Fraction(0) for p, q in zip(a, b, strict=True)]
        columns[j] = [p if p != q else Fraction(0) for p, q in zip(a, b, strict=True)]
    rows = transposed(columns)
    results: list[Any] = [None] * len(rows)
    for i, j in _mirrored(rows):
        even = [p if p == q else Fraction(0) for p, q in zip(rows[i], rows[j], strict=True)]
        odd = [p if p != q else Fraction(0) for p, q in zip(rows[i], rows[j], strict=True)]
        a, b = _combine(e, even, vectors), _combine(e, odd, vectors)
        results[i], results[j] = build.fadd(a, b), build.fsub(a, b)
    sums = {k: (i, j) for i, j, k in _summed(rows)}
    for k, row in enumerate(rows):
        if k in sums:
            results[k] = build.fadd(*(results[each] for each in sums[k]))
        elif results[k] is None:
            results[k] = _combine(e, row, vectors)
    return results


def _both_sides(
    e: Emitter,
    matrix: Matrix,
    source: tuple[Any, Any, Any],
    target: tuple[Any, Any, Any],
    finish: Callable[[Any, Any], Any] = lambda vector, place: vector,
    ahead: Any = None,
) -> None:
    """Set Y = M X M^T, for vectors as elements.

    Parameters
    ----------
    matrix : Matrix
        M.
    source, target : (pointer, row, column)
        Where X and Y lie, and how far apart their rows and columns are.
    finish : callable, optional
        Maps an element and its place to what is stored there.
    ahead : optional
        How far from X another one lies that is to be brought near.
    """
    build = e.builder
    height, width = len(matrix), len(matrix[0])
    # M X goes through the stack: unrolled, it would not fit into the registers either.
    between = e.vectors(height * width)
    pointer, row, column = source
    with e.sweep(e.integer(width), (pointer, column), (between, e.integer(1))) as (place, slot):
        places = e.stepping(place, row, width)
        vectors = [e.load(place) for place in places]
        if ahead is not None:
            for place in places:
                e.prefetch(e.at(place, ahead))
        for i, vector in enumerate(matrix_product(e, matrix, vectors)):
            build.store(vector, build.gep(slot, [e.integer(i * width)]))
    pointer, row, column = target
    with e.sweep(e.integer(height), (pointer, row), (between, e.integer(width))) as (place, slot):
        vectors = [build.load(build.gep(slot, [e.integer(j)])) for j in range(width)]
        places = e.stepping(place, column, height)
        for place, vector in zip(places, matrix_product(e, matrix, vectors), strict=True):
            e.store(finish(vector, place), place)


def _either(e: Emitter, plane: Any, x: Any, x_start: Any) -> Any:
    """Return where a plane begins: in x, if `x_start` is not negative, else in scratch."""
    there = e.builder.icmp_signed(">=", x_start, e.integer(0))
    return e.builder.select(there, e.at(x, x_start), plane)


@emitted
def add_vectors(  # type: ignore[no-untyped-def]
    e, plane, x, x_start, row, rows, columns, total, total_start
):
    """Add the vectors of a plane, as in `tiles_from_plane`, to the one at `total_start`."""
    build = e.builder
    plane, total = _either(e, plane, x, x_start), e.at(total, total_start)
    partial = e.variable(e.zero())
    with e.sweep(rows, (plane, row)) as (line,):  # noqa: SIM117
        with e.sweep(columns, (line, e.integer(e.lanes))) as (place,):
            build.store(build.fadd(build.load(partial), e.load(place)), partial)
    e.store(build.fadd(e.load(total), build.load(partial)), total)


def _step_of(kind: int) -> int:
    """Return the places from one tile to the next."""
    return VARIANTS[kind // 2][0]


@emitted
def tiles_from_plane(  # type: ignore[no-untyped-def]
    e, plane, x, x_start, start, row, v, v_start, v_frequency, count, kind
):
    """Transform `count` tiles, side by side in a plane, for the products.

    The plane begins at `x_start` in x or, where that is negative, with the scratch `plane`.
    `kind` is an index of `TO_FREQUENCIES`.
    """
    build = e.builder
    plane, v = e.at(_either(e, plane, x, x_start), start), e.at(v, v_start)
    with e.cases(kind, len(TO_FREQUENCIES)) as each:
        for case in each:
            matrix, step = TO_FREQUENCIES[case], _step_of(case) * e.lanes
            line = build.mul(v_frequency, e.integer(len(matrix)))
            with e.loop(count) as t:
                tile = e.at(plane, build.mul(t.index, e.integer(step)))
                place = e.at(v, build.mul(t.index, e.integer(e.lanes)))
                _both_sides(e, matrix, (tile, row, e.integer(e.lanes)), (place, line, v_frequency))


@emitted
def tiles_to_plane(  # type: ignore[no-untyped-def]
    e, m, m_start, m_frequency, count, plane, y, y_start, start, row, bias, bias_start, channels,
    kind,
):  # fmt: skip
    """Transform `count` products back to tiles, side by side in a plane.

    The plane is in y or in scratch, as in `tiles_from_plane`. `kind` is an index of
    `FROM_FREQUENCIES`. Tiles that do not overlap are set to the result plus the bias of the first
    `channels` lanes; those that do are added to, and there is no bias.
    """
    build = e.builder
    m, plane = e.at(m, m_start), e.at(_either(e, plane, y, y_start), start)
    added = e.load(e.at(bias, bias_start), e.first_lanes(channels))
    with e.cases(kind, len(FROM_FREQUENCIES)) as each:
        for case in each:
            matrix, step = FROM_FREQUENCIES[case], _step_of(case) * e.lanes
            overlap = len(matrix) > _step_of(case)
            line = build.mul(m_frequency, e.integer(len(matrix[0])))
            with e.loop(count) as t:
                place = e.at(m, build.mul(t.index, e.integer(e.lanes)))
                tile = e.at(plane, build.mul(t.index, e.integer(step)))
                _both_sides(
                    e,
                    matrix,
                    (place, line, m_frequency),
                    (tile, row, e.integer(e.lanes)),
                    lambda vector, at, overlap=overlap: build.fadd(  # type: ignore[misc]
                        vector, e.load(at) if overlap else added
                    ),
                )


@emitted
def filters_to_panel(  # type: ignore[no-untyped-def]
    e, plane, start, step, count, u, u_start, u_row, u_frequency, variant
):
    """Transform `count` filters: G g G^T.

    Tap t of filter k is the vector at ``start + k * taps * taps * L + t * step``; its result has
    element f at ``u_start + k * u_row + f * u_frequency``. `variant` is an index of `VARIANTS`.
    """
    build = e.builder
    plane, u = e.at(plane, start), e.at(u, u_start)
    with e.cases(variant, len(_FILTERS)) as each:
        for case in each:
            matrix = _FILTERS[case]
            taps = len(matrix[0])
            line, u_line = (
                build.mul(x, e.integer(y)) for x, y in ((step, taps), (u_frequency, len(matrix)))
            )
            with e.loop(count) as k:
                place = e.at(plane, build.mul(k.index, e.integer(taps * taps * e.lanes)))
                target = e.at(u, build.mul(k.index, u_row))
                _both_sides(e, matrix, (place, line, step), (target, u_line, u_frequency))


@emitted
def panel_to_filters(  # type: ignore[no-untyped-def]
    e, du, du_start, du_row, du_frequency, count, plane, start, variant
):
    """Transform `count` gradients of filters back: G^T du G, to vectors of successive taps."""
    build = e.builder
    du, plane = e.at(du, du_start), e.at(plane, start)
    with e.cases(variant, len(_FILTERS)) as each:
        for case in each:
            matrix = transposed(_FILTERS[case])
            taps = len(matrix)
            line = build.mul(du_frequency, e.integer(len(matrix[0])))
            with e.loop(count) as k:
                place = e.at(du, build.mul(k.index, du_row))
                target = e.at(plane, build.mul(k.index, e.integer(taps * taps * e.lanes)))
                _both_sides(
                    e,
                    matrix,
                    (place, line, du_frequency),
                    (target, e.integer(taps * e.lanes), e.integer(e.lanes)),
                    ahead=build.mul(du_row, e.integer(_AHEAD)),
                )


def _accumulate(
    e: Emitter,
    count: Any,
    left: tuple[Any, Any],
    rows: list[Any],
    right: tuple[Any, Any],
    columns: list[Any],
    sums: list[Any],
    ahead: tuple[Any, Any],
) -> None:
    """Add `count` products of a column of scalars and a row of vectors to the sums of a tile.

    `left`, `right` and what is brought near `ahead` are pairs of a pointer and its step.
    """
    build = e.builder
    with e.sweep(count, left, right, ahead) as (scalars, line, later):
        e.prefetch(later, nearest=False)
        vectors = [e.load(e.at(line, step)) for step in columns]
        for i, step in enumerate(rows):
            factor = e.splat(e.scalar(e.at(scalars, step)))
            for slot, vector in zip(sums[i * len(vectors) :], vectors, strict=False):
                build.store(e.multiply_add(factor, vector, build.load(slot)), slot)


@emitted
def multiply_blocks(  # type: ignore[no-untyped-def]
    e, a, a_start, a_row, a_rows, a_k, a_ks, rows, depth, b, b_start, b_row, b_vector, vectors,
    c, c_start, c_row, c_rows, c_vector, keep, ahead, near, near_start, near_count, near_jump,
):  # fmt: skip
    """C (+)= A B for one panel of at most `panel_vectors` vectors.

    Rows and the contraction come in blocks of L: element (i, k) of A lies at
    ``i // L * a_rows + i % L * a_row + k // L * a_ks + k % L * a_k``, vector v of row k of B at
    ``k * b_row + v * b_vector``, and of row i of C at
    ``i // L * c_rows + i % L * c_row + v * c_vector``. Rows up to a multiple of `_rows` are
    computed from what lies there. `keep` is not 0 where C is added to.

    Meanwhile `depth` rows of B from element `ahead` on are brought into the second cache, and
    `near_count` elements of another array from `near_start` on. Where `near_jump` is not 0, each
    tile of C brings so many, those of the next tile begin `near_jump` elements further.
    """
    build = e.builder
    lanes = e.integer(e.lanes)
    later, near = e.at(b, ahead), e.at(near, near_start)
    a, b, c = e.at(a, a_start), e.at(b, b_start), e.at(c, c_start)
    jumps = build.icmp_signed("!=", near_jump, e.integer(0))
    near_step = build.select(jumps, build.sdiv(near_count, e.integer(_LINES)), lanes)
    near_end = build.select(jumps, build.mul(near_jump, rows), near_count)
    near_jump = build.select(jumps, near_jump, e.integer(_LINES * e.lanes))
    keeps = build.icmp_signed("!=", keep, e.integer(0))
    # Blocks of the contraction that follow each other are taken as one: each end of a loop may be
    # mispredicted, which takes as long as two of its rounds.
    apart = build.icmp_signed("!=", a_ks, build.mul(a_k, lanes))
    whole = build.select(apart, build.sdiv(depth, lanes), e.integer(0))
    rest = build.sub(depth, build.mul(whole, lanes))
    b_rows = build.mul(b_row, lanes)
    with e.cases(build.sub(vectors, e.integer(1)), panel_vectors()) as each:
        for case in each:
            nv = case + 1
            mr = _rows(e, nv)
            b_steps = [build.mul(b_vector, e.integer(v)) for v in range(nv)]
            a_steps = [build.mul(a_row, e.integer(i)) for i in range(mr)]
            tiles = build.sdiv(build.add(rows, e.integer(mr - 1)), e.integer(mr))
            share = build.add(build.sdiv(b_row, tiles), e.integer(1))
            with e.loop(tiles) as tile:
                top = build.mul(tile.index, e.integer(mr))
                block = build.sdiv(top, lanes)
                within = build.sub(top, build.mul(block, lanes))
                a_tile = e.at(a, build.mul(block, a_rows), build.mul(within, a_row))
                c_tile = e.at(c, build.mul(block, c_rows), build.mul(within, c_row))
                places = [
                    e.at(c_tile, build.mul(c_row, e.integer(i)), build.mul(c_vector, e.integer(v)))
                    for i in range(mr)
                    for v in range(nv)
                ]
                sums = [e.variable(e.zero()) for _ in places]
                with build.if_then(keeps):
                    for slot, place in zip(sums, places, strict=True):
                        build.store(e.load(place), slot)
                below = build.mul(c_row, e.integer(mr))
                for place in places:  # what the next tile adds to or overwrites
                    e.prefetch(e.at(place, below))
                offset = build.mul(tile.index, near_jump)
                with build.if_then(build.icmp_signed("<", offset, near_end)):
                    for line in range(_LINES):
                        place = e.at(near, offset, build.mul(near_step, e.integer(line)))
                        e.prefetch(place, nearest=False)
                slice_ = e.at(later, build.mul(build.mul(tile.index, depth), share))
                with e.sweep(
                    whole, (a_tile, a_ks), (b, b_rows), (slice_, build.mul(share, lanes))
                ) as (a_block, b_block, start):
                    _accumulate(
                        e, lanes, (a_block, a_k), a_steps, (b_block, b_row), b_steps, sums,
                        (start, share),
                    )  # fmt: skip
                done = build.mul(whole, lanes)
                _accumulate(
                    e, rest, (e.at(a_tile, build.mul(whole, a_ks)), a_k), a_steps,
                    (e.at(b, build.mul(whole, b_rows)), b_row), b_steps, sums,
                    (e.at(slice_, build.mul(done, share)), share),
                )  # fmt: skip
                for slot, place in zip(sums, places, strict=True):
                    e.store(build.load(slot), place)
