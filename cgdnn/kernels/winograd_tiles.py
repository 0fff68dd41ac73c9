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
from cgdnn.kernels.winograd_points import OUTPUTS, TAPS, Matrix, matrices, transposed

_MATRICES = [matrices(taps) for taps in TAPS]
_INPUTS = [m.input for m in _MATRICES]
_OUTPUTS = [m.output for m in _MATRICES]
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


def _product(e: Emitter, matrix: Matrix, vectors: list[Any]) -> list[Any]:
    """Return the matrix times a column of vectors; what the points p and -p share is done once."""
    build = e.builder
    columns = transposed(matrix)
    for i, j in _mirrored(columns):
        a, b = columns[i], columns[j]
        vectors = [*vectors]
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
    return [
        _combine(e, row, vectors) if result is None else result
        for row, result in zip(rows, results, strict=True)
    ]


def _both_sides(
    e: Emitter, matrix: Matrix, load: Callable[[int, int], Any]
) -> list[list[Any]]:
    """Return M X M^T, where load(i, j) gives element (i, j) of X."""
    size = range(len(matrix[0]))
    columns = [_product(e, matrix, [load(i, j) for i in size]) for j in size]
    return [_product(e, matrix, list(row)) for row in zip(*columns, strict=True)]


@emitted
def add_vectors(e, plane, start, count, total, total_start):  # type: ignore[no-untyped-def]
    """Add `count` vectors to the one at `total_start`."""
    build = e.builder
    plane, total = e.at(plane, start), e.at(total, total_start)
    partial = e.variable(e.zero())
    with e.loop(count) as i:
        vector = e.load(e.at(plane, build.mul(i.index, e.integer(e.lanes))))
        build.store(build.fadd(build.load(partial), vector), partial)
    e.store(build.fadd(e.load(total), build.load(partial)), total)


def _element(e: Emitter, pointer: Any, row: Any, i: int, j: int) -> Any:
    """Return the place of column j of row i, where rows are `row` apart."""
    return e.at(pointer, e.builder.mul(row, e.integer(i)), e.integer(j * e.lanes))


@emitted
def tiles_from_plane(  # type: ignore[no-untyped-def]
    e, plane, start, row, v, v_start, v_frequency, count, kind
):
    """Transform `count` tiles, side by side in a plane, for the products.

    `kind` is 0 for B^T x B of F(4, 3), 1 of F(4, 5); 2 and 3 for A y A^T of the same.
    """
    build = e.builder
    plane, v = e.at(plane, start), e.at(v, v_start)
    kinds = [*_INPUTS, *map(transposed, _OUTPUTS)]
    with e.cases(kind, len(kinds)) as each:
        for case in each:
            with e.loop(count) as t:
                tile = e.at(plane, build.mul(t.index, e.integer(OUTPUTS * e.lanes)))
                result = _both_sides(
                    e,
                    kinds[case],
                    lambda i, j, tile=tile: e.load(_element(e, tile, row, i, j)),  # type: ignore[misc]
                )
                place = e.at(v, build.mul(t.index, e.integer(e.lanes)))
                _store_frequencies(e, result, place, v_frequency)


def _store_frequencies(e: Emitter, result: list[list[Any]], place: Any, stride: Any) -> None:
    """Store the elements of a transformed tile, `stride` apart."""
    flat = [vector for line in result for vector in line]
    for frequency, vector in enumerate(flat):
        e.store(vector, e.at(place, e.builder.mul(stride, e.integer(frequency))))


@emitted
def tiles_to_plane(  # type: ignore[no-untyped-def]
    e, m, m_start, m_frequency, count, plane, start, row, bias, bias_start, channels, kind
):
    """Transform `count` products back to tiles, side by side in a plane.

    `kind` is 0 for A^T m A of F(4, 3), 1 of F(4, 5): the tiles do not overlap, and are set to the
    result plus the bias of the first `channels` lanes. It is 2 and 3 for B m B^T of the same: the
    overlapping tiles are added to, and there is no bias.
    """
    build = e.builder
    m, plane = e.at(m, m_start), e.at(plane, start)
    kinds = [*_OUTPUTS, *map(transposed, _INPUTS)]
    added = e.load(e.at(bias, bias_start), e.first_lanes(channels))
    with e.cases(kind, len(kinds)) as each:
        for case in each:
            size = len(kinds[case][0])
            with e.loop(count) as t:
                place = e.at(m, build.mul(t.index, e.integer(e.lanes)))
                result = _both_sides(
                    e,
                    kinds[case],
                    lambda i, j, place=place, size=size: e.load(  # type: ignore[misc]
                        e.at(place, build.mul(m_frequency, e.integer(i * size + j)))
                    ),
                )
                tile = e.at(plane, build.mul(t.index, e.integer(OUTPUTS * e.lanes)))
                for i, line in enumerate(result):
                    for j, vector in enumerate(line):
                        target = _element(e, tile, row, i, j)
                        other = added if case < len(_OUTPUTS) else e.load(target)
                        e.store(build.fadd(vector, other), target)


@emitted
def filters_to_panel(  # type: ignore[no-untyped-def]
    e, plane, start, step, count, u, u_start, u_row, u_frequency, kind
):
    """Transform `count` filters: G g G^T.

    Tap t of filter k is the vector at ``start + k * taps * L + t * step``; its result has element
    f at ``u_start + k * u_row + f * u_frequency``. `kind` is 0 for F(4, 3), 1 for F(4, 5).
    """
    build = e.builder
    plane, u = e.at(plane, start), e.at(u, u_start)
    with e.cases(kind, len(_FILTERS)) as each:
        for case in each:
            taps = len(_FILTERS[case][0])
            with e.loop(count) as k:
                place = e.at(plane, build.mul(k.index, e.integer(taps * taps * e.lanes)))
                result = _both_sides(
                    e,
                    _FILTERS[case],
                    lambda i, j, place=place, taps=taps: e.load(  # type: ignore[misc]
                        e.at(place, build.mul(step, e.integer(i * taps + j)))
                    ),
                )
                _store_frequencies(e, result, e.at(u, build.mul(k.index, u_row)), u_frequency)


@emitted
def panel_to_filters(  # type: ignore[no-untyped-def]
    e, du, du_start, du_row, du_frequency, count, plane, start, kind
):
    """Transform `count` gradients of filters back: G^T du G, to vectors of successive taps."""
    build = e.builder
    du, plane = e.at(du, du_start), e.at(plane, start)
    with e.cases(kind, len(_FILTERS)) as each:
        for case in each:
            matrix = transposed(_FILTERS[case])
            size, taps = len(matrix[0]), len(matrix)
            with e.loop(count) as k:
                place = e.at(du, build.mul(k.index, du_row))
                result = _both_sides(
                    e,
                    matrix,
                    lambda i, j, place=place, size=size: e.load(  # type: ignore[misc]
                        e.at(place, build.mul(du_frequency, e.integer(i * size + j)))
                    ),
                )
                target = e.at(plane, build.mul(k.index, e.integer(taps * taps * e.lanes)))
                _store_frequencies(e, result, target, e.integer(e.lanes))


@emitted
def multiply_blocks(  # type: ignore[no-untyped-def]
    e, a, a_start, a_row, a_rows, a_k, a_ks, rows, depth,
    b, b_start, b_row, b_vector, vectors, c, c_start, c_row, c_rows, c_vector, keep,
):
    """C (+)= A B for one panel of at most `panel_vectors` vectors.

    Rows and the contraction come in blocks of L: element (i, k) of A lies at
    ``i // L * a_rows + i % L * a_row + k // L * a_ks + k % L * a_k``, vector v of row k of B at
    ``k * b_row + v * b_vector``, and of row i of C at
    ``i // L * c_rows + i % L * c_row + v * c_vector``. Rows up to a multiple of `_rows` are
    computed from what lies there. `keep` is not 0 where C is added to.
    """
    build = e.builder
    lanes = e.integer(e.lanes)
    a, b, c = e.at(a, a_start), e.at(b, b_start), e.at(c, c_start)
    keeps = build.icmp_signed("!=", keep, e.integer(0))
    blocks = build.sdiv(build.add(depth, e.integer(e.lanes - 1)), lanes)
    with e.cases(build.sub(vectors, e.integer(1)), panel_vectors()) as each:
        for case in each:
            nv = case + 1
            mr = _rows(e, nv)
            places = [build.mul(b_vector, e.integer(v)) for v in range(nv)]
            targets = [build.mul(c_vector, e.integer(v)) for v in range(nv)]
            tiles = build.sdiv(build.add(rows, e.integer(mr - 1)), e.integer(mr))
            with e.loop(tiles) as tile:
                top = build.mul(tile.index, e.integer(mr))
                block = build.sdiv(top, lanes)
                within = build.sub(top, build.mul(block, lanes))
                a_tile = e.at(a, build.mul(block, a_rows), build.mul(within, a_row))
                c_tile = e.at(c, build.mul(block, c_rows), build.mul(within, c_row))
                c_places = [
                    [e.at(c_tile, build.mul(c_row, e.integer(i)), target) for target in targets]
                    for i in range(mr)
                ]
                sums = [[e.variable(e.zero()) for _ in range(nv)] for _ in range(mr)]
                with build.if_then(keeps):
                    for line, at in zip(sums, c_places, strict=True):
                        for slot, place in zip(line, at, strict=True):
                            build.store(e.load(place), slot)
                with e.loop(blocks) as k_block:
                    first = build.mul(k_block.index, lanes)
                    a_block = e.at(a_tile, build.mul(k_block.index, a_ks))
                    b_block = e.at(b, build.mul(first, b_row))
                    with e.loop(e.smaller(lanes, build.sub(depth, first))) as k:
                        a_column = e.at(a_block, build.mul(k.index, a_k))
                        b_line = e.at(b_block, build.mul(k.index, b_row))
                        right = [e.load(e.at(b_line, place)) for place in places]
                        for i in range(mr):
                            left = e.splat(e.scalar(e.at(a_column, build.mul(a_row, e.integer(i)))))
                            for v in range(nv):
                                total = e.multiply_add(left, right[v], build.load(sums[i][v]))
                                build.store(total, sums[i][v])
                for line, at in zip(sums, c_places, strict=True):
                    for slot, place in zip(line, at, strict=True):
                        e.store(build.load(slot), place)
