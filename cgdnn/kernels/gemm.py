"""Matrix products on one core: two register-tiled micro-kernels and the loops around them.

* `multiply_nn`: C (+)= A B where the rows of B are contiguous. Each step of the contraction
  multiplies a few scalars of A, read where they lie with any strides, with a few vectors of B.
* `multiply_scattered`: the same where the rows of A begin anywhere.
* `multiply_apart`: the same where the vectors of a row of B, and of C, lie apart.
* `multiply_nt`: C += A B^T where the rows of both are contiguous along the contraction; sums stay
  in vectors until the end.

None packs anything: the callers arrange that B lies in a cache. A row of a tile that does not
exist repeats the last one that does, and is stored over it; columns that do not exist are masked.
All offsets and strides are in elements.
"""

from __future__ import annotations

from typing import Any

from cgdnn import machine
from cgdnn.kernels._jit import device
from cgdnn.kernels.vector import Emitter, constant, emitted, lanes_of

ZERO, KEEP, BIAS, STREAM = 0, 1, 2, 3
"""What a product is added to: nothing, the content of C, one number a row; or nothing, and C, which
is too large for a cache, is written past the caches where vectors of it fall on whole lines."""

_NN_LEAST_ROWS = 5
"""Rows of the smallest nn tile that there is code for."""
NT_COLUMNS = 4


def _many_registers() -> bool:
    """Tell whether there are 32 vector registers rather than 16."""
    return machine.vector_bytes() == 64


def _nn_shape() -> tuple[int, int]:
    """Return the most rows and vectors of an nn tile."""
    return (6, 4) if _many_registers() else (6, 2)


def _nt_rows() -> int:
    """Return the rows of an nt tile."""
    return 4 if _many_registers() else 2


@constant
def nn_rows(e: Emitter, x: Any) -> int:
    """Return the most rows of an nn tile."""
    return _nn_shape()[0]


@constant
def nn_vectors(e: Emitter, x: Any) -> int:
    """Return the most vectors in a row of an nn tile."""
    return _nn_shape()[1]


@constant
def nt_rows(e: Emitter, x: Any) -> int:
    """Return the rows of an nt tile."""
    return _nt_rows()


def _emit_broadcast_tile(  # type: ignore[no-untyped-def]
    e, a_row, rows, b, b_row, columns, c, c_row, begin, segments, a_segment, depth, a_k,
    ahead=None, stream=None, apart=None,
):  # fmt: skip
    """Emit C[rows x columns] = begin + sum over s < segments, k < depth of A[., s, k] B[s, k, .].

    Parameters
    ----------
    a_row : callable
        From the number of a row of the tile, an IR value, to the pointer of that row of A.
    begin : callable
        Given the sums, the row numbers, the pointers into C and the masks of the vectors, emits
        what the sums begin with where that is not 0.
    ahead : IR value, optional
        How far behind each vector of B lies one to be prefetched; 0 for none.
    stream : IR value, optional
        Whether C is to be written past the caches.
    apart : (IR value, IR value), optional
        From one vector of a row of B, and of C, to the next, where they do not follow each other;
        `columns` are then whole vectors.
    """
    build = e.builder
    most_rows, most_vectors = _nn_shape()
    last_lane = build.sub(columns, e.integer(1))
    vectors = build.sdiv(last_lane, e.integer(e.lanes))  # less one
    whole = build.mul(vectors, e.integer(e.lanes))
    last_mask = e.reloaded(e.first_lanes(build.sub(columns, whole)))

    def masks(count):  # type: ignore[no-untyped-def]
        """Return the masks of so many vectors of a row, where those of C follow each other."""
        return [None] * (count - 1) + [last_mask() if apart is None else None]

    more = build.sub(rows, e.integer(_NN_LEAST_ROWS))
    more = build.select(build.icmp_signed("<", more, e.integer(0)), e.integer(0), more)
    last_row = build.sub(rows, e.integer(1))
    variant = build.add(build.mul(more, e.integer(most_vectors)), vectors)
    with e.cases(variant, (most_rows - _NN_LEAST_ROWS + 1) * most_vectors) as each:
        for case in each:
            e.free_registers()
            mr, nv = case // most_vectors + _NN_LEAST_ROWS, case % most_vectors + 1
            numbers = [e.integer(m) for m in range(mr)]
            if mr == _NN_LEAST_ROWS:
                numbers = [e.smaller(number, last_row) for number in numbers]
            places, c_places = (
                [build.mul(e.integer(v), step) for v in range(nv)]
                for step in apart or [e.integer(e.lanes)] * 2
            )
            a_rows = [a_row(number) for number in numbers]
            c_rows = [e.at(c, build.mul(number, c_row)) for number in numbers]
            tile = [(m, v) for m in range(mr) for v in range(nv)]
            targets = {(m, v): e.at(c_rows[m], c_places[v]) for m, v in tile}
            sums = {(m, v): e.variable(e.zero()) for m, v in tile}
            begin(sums, numbers, targets, masks(nv))
            with e.loop(segments) as s:
                offset = build.mul(s.index, a_segment)
                a_s = [(e.at(row, offset), a_k) for row in a_rows]
                b_s = e.at(b, build.mul(build.mul(s.index, depth), b_row))
                with e.sweep(depth, (b_s, b_row), *a_s) as (b_k, *a_k_rows):
                    right = [
                        e.load(e.at(b_k, place), mask)
                        for place, mask in zip(places, masks(nv), strict=True)
                    ]
                    if ahead is not None:
                        with build.if_then(build.icmp_signed("!=", ahead, e.integer(0))):
                            for place in places:
                                e.prefetch(e.at(b_k, place, ahead))
                    if apart is not None:  # rows of A that are neighbours: those of the next tiles
                        e.prefetch(e.at(a_k_rows[0], e.integer(e.lanes)))
                    for m in range(mr):
                        left = e.splat(e.scalar(a_k_rows[m]))
                        for v in range(nv):
                            total = e.multiply_add(left, right[v], build.load(sums[m, v]))
                            build.store(total, sums[m, v])
            last_masks = masks(nv)
            results = [(build.load(sums[m, v]), targets[m, v], last_masks[v]) for m, v in tile]
            if stream is None:
                for value, target, vector_mask in results:
                    e.store(value, target, vector_mask)
                continue
            with build.if_else(stream) as (past_caches, through_caches):
                with past_caches:
                    for value, target, _ in results:
                        e.store_past_caches(value, target)
                with through_caches:
                    for value, target, vector_mask in results:
                        e.store(value, target, vector_mask)


def _begin(e: Emitter, start: Any, bias: Any) -> Any:
    """Return the `begin` of a tile whose sums begin with what `start` says."""
    build = e.builder

    def begin(sums, numbers, targets, masks):  # type: ignore[no-untyped-def]
        with build.if_then(build.icmp_signed("==", start, e.integer(KEEP))):
            for (m, v), slot in sums.items():
                build.store(e.load(targets[m, v], masks[v]), slot)
        with build.if_then(build.icmp_signed("==", start, e.integer(BIAS))):
            firsts = [e.splat(e.scalar(e.at(bias, number))) for number in numbers]
            for (m, _), slot in sums.items():
                build.store(firsts[m], slot)

    return begin


@emitted
def _nn_tile(  # type: ignore[no-untyped-def]
    e, a, a_start, a_row, a_k, rows, b, b_start, b_row, columns, c, c_start, c_row, depth,
    start, bias, bias_start, ahead,
):  # fmt: skip
    """C[rows x columns] = start + sum over k < depth of A[., k] B[k, .]; all numbers are int64."""
    build = e.builder
    a, c, bias = e.at(a, a_start), e.at(c, c_start), e.at(bias, bias_start)
    in_lines = e.on_lines(c, c_row, columns)
    stream = build.and_(build.icmp_signed("==", start, e.integer(STREAM)), in_lines)

    _emit_broadcast_tile(
        e, lambda number: e.at(a, build.mul(number, a_row)), rows, e.at(b, b_start), b_row,
        columns, c, c_row, _begin(e, start, bias), e.integer(1), e.integer(0), depth, a_k, ahead,
        stream,
    )  # fmt: skip


@emitted
def _apart_tile(  # type: ignore[no-untyped-def]
    e, a, a_start, a_row, a_k, rows, b, b_start, b_row, b_vector, vectors,
    c, c_start, c_row, c_vector, depth, start, bias, bias_start,
):  # fmt: skip
    """C[rows x vectors] = start + sum over k < depth of A[., k] B[k, .]; all numbers are int64."""
    build = e.builder
    a, bias = e.at(a, a_start), e.at(bias, bias_start)
    _emit_broadcast_tile(
        e, lambda number: e.at(a, build.mul(number, a_row)), rows, e.at(b, b_start), b_row,
        build.mul(vectors, e.integer(e.lanes)), e.at(c, c_start), c_row, _begin(e, start, bias),
        e.integer(1), e.integer(0), depth, a_k, apart=(b_vector, c_vector),
    )  # fmt: skip


@emitted
def _nn_tile_scattered(  # type: ignore[no-untyped-def]
    e, a, places, places_start, a_segment, a_k, rows, b, b_start, b_row, columns,
    c, c_start, c_row, depth, segments,
):  # fmt: skip
    """C[rows x columns] += sum over s < segments, k < depth of A[., s, k] B[s, k, .]."""
    places = e.at(places, places_start)

    def begin(sums, numbers, targets, masks):  # type: ignore[no-untyped-def]
        for (m, v), slot in sums.items():
            e.builder.store(e.load(targets[m, v], masks[v]), slot)

    _emit_broadcast_tile(
        e, lambda number: e.at(a, e.scalar(e.at(places, number))), rows, e.at(b, b_start), b_row,
        columns, e.at(c, c_start), c_row, begin, segments, a_segment, depth, a_k,
    )  # fmt: skip


@emitted
def _nt_tile(  # type: ignore[no-untyped-def]
    e, a, a_start, a_row, rows, b, b_start, b_row, columns, c, c_start, c_row, depth, ahead
):  # fmt: skip
    """C[rows x columns] += sum over k < depth of A[., k] B[., k]; all numbers are int64."""
    build = e.builder
    mr, nc = _nt_rows(), NT_COLUMNS
    a, b, c = e.at(a, a_start), e.at(b, b_start), e.at(c, c_start)

    def lines(base, stride, count, valid):  # type: ignore[no-untyped-def]
        last = build.sub(valid, e.integer(1))
        numbers = [e.smaller(e.integer(i), last) for i in range(count)]
        return [e.at(base, build.mul(number, stride)) for number in numbers]

    a_rows, c_rows = lines(a, a_row, mr, rows), lines(c, c_row, mr, rows)
    b_rows = lines(b, b_row, nc, columns)
    sums = [[e.variable(e.zero()) for _ in range(nc)] for _ in range(mr)]
    whole = build.sdiv(depth, e.integer(e.lanes))
    done = build.mul(whole, e.integer(e.lanes))
    tail = build.sub(depth, done)

    def step(k, mask):  # type: ignore[no-untyped-def]
        right = [e.load(e.at(b_rows[j], k), mask) for j in range(nc)]
        with build.if_then(build.icmp_signed("!=", ahead, e.integer(0))):
            for j in range(nc):
                e.prefetch(e.at(b_rows[j], k, ahead))
        for m in range(mr):
            left = e.load(e.at(a_rows[m], k), mask)
            for j in range(nc):
                build.store(e.multiply_add(left, right[j], build.load(sums[m][j])), sums[m][j])

    with e.loop(whole) as v:
        step(build.mul(v.index, e.integer(e.lanes)), None)
    with build.if_then(build.icmp_signed(">", tail, e.integer(0))):
        step(done, e.first_lanes(tail))

    flat = [build.load(slot) for line in sums for slot in line]
    totals = [e.lane_sums(flat[i : i + e.lanes]) for i in range(0, mr * nc, e.lanes)]
    width = min(nc, e.lanes)
    stores = []
    for m in range(mr):
        for j in range(0, nc, width):
            first = m * nc + j
            source = totals[first // e.lanes]
            part = e.shuffle(source, source, [first % e.lanes + i for i in range(width)])
            mask = e.first_lanes(build.sub(columns, e.integer(j)), width)
            place = e.at(c_rows[m], e.integer(j))
            stores.append((build.fadd(e.load(place, mask), part), place, mask))
    for value, place, mask in stores:  # after every load: repeated rows must not add twice
        e.store(value, place, mask)


@device
def multiply_nn(  # type: ignore[no-untyped-def]
    a, a_start, a_row, a_k, b, b_start, b_row, c, c_start, c_row, m, n, depth,
    start, bias, bias_start, ahead,
):  # fmt: skip
    """Add A B to C, or to what `start` says, which C is then set to.

    Parameters
    ----------
    a, b, c : arrays of the run's type
        Of any number of axes; A[i, k] is ``a.flat[a_start + i * a_row + k * a_k]``, B[k, j] is
        ``b.flat[b_start + k * b_row + j]``, C[i, j] is ``c.flat[c_start + i * c_row + j]``.
    m, n, depth : int
        C is m x n, A is m x depth, B is depth x n.
    start : int
        ZERO, KEEP, BIAS or STREAM.
    bias : array
        With BIAS, row i starts from ``bias.flat[bias_start + i]``.
    ahead : int
        Where B comes from memory: how far behind each element of B lies one that is wanted soon.
        0 elsewhere.
    """
    lanes = lanes_of(c)
    vectors = (n + lanes - 1) // lanes
    column_tiles = (vectors + nn_vectors(c) - 1) // nn_vectors(c)
    row_tiles = (m + nn_rows(c) - 1) // nn_rows(c)
    for column_tile in range(column_tiles):
        left = vectors * column_tile // column_tiles * lanes
        right = min(vectors * (column_tile + 1) // column_tiles * lanes, n)
        for row_tile in range(row_tiles):
            top = m * row_tile // row_tiles
            bottom = m * (row_tile + 1) // row_tiles
            _nn_tile(
                a, a_start + top * a_row, a_row, a_k, bottom - top,
                b, b_start + left, b_row, right - left,
                c, c_start + top * c_row + left, c_row, depth,
                start, bias, bias_start + top, ahead,
            )  # fmt: skip


@device
def multiply_apart(  # type: ignore[no-untyped-def]
    a, a_start, a_row, a_k, b, b_start, b_row, b_vector, c, c_start, c_row, c_vector,
    m, vectors, depth, start, bias, bias_start,
):  # fmt: skip
    """Add A B to C as `multiply_nn` does, where the vectors of a row of B, and of C, lie apart.

    Parameters
    ----------
    b_vector, c_vector : int
        From one vector of a row to the next.
    vectors : int
        The columns of B and C, in vectors.
    """
    row_tiles = (m + nn_rows(c) - 1) // nn_rows(c)
    column_tiles = (vectors + nn_vectors(c) - 1) // nn_vectors(c)
    for row_tile in range(row_tiles):
        top = m * row_tile // row_tiles
        bottom = m * (row_tile + 1) // row_tiles
        for column_tile in range(column_tiles):
            left = vectors * column_tile // column_tiles
            right = vectors * (column_tile + 1) // column_tiles
            _apart_tile(
                a, a_start + top * a_row, a_row, a_k, bottom - top,
                b, b_start + left * b_vector, b_row, b_vector, right - left,
                c, c_start + top * c_row + left * c_vector, c_row, c_vector, depth,
                start, bias, bias_start + top,
            )  # fmt: skip


@device
def multiply_scattered(  # type: ignore[no-untyped-def]
    a, places, a_segment, a_k, b, b_start, b_row, c, c_start, c_row, m, n, depth, segments
):  # fmt: skip
    """Add A B to C, where the rows of A begin anywhere and are made of segments.

    Parameters
    ----------
    a, b, c : arrays of the run's type
        Element k of segment s of row i of A is ``a.flat[places[i] + s * a_segment + k * a_k]``; it
        meets row s * depth + k of B. B and C are as in `multiply_nn`; n is at most one tile.
    places : array of int64
    depth, segments : int
        Elements in a segment, and segments in a row.
    """
    row_tiles = (m + nn_rows(c) - 1) // nn_rows(c)
    for row_tile in range(row_tiles):
        top = m * row_tile // row_tiles
        bottom = m * (row_tile + 1) // row_tiles
        _nn_tile_scattered(
            a, places, top, a_segment, a_k, bottom - top, b, b_start, b_row, n,
            c, c_start + top * c_row, c_row, depth, segments,
        )  # fmt: skip


@device
def multiply_nt(  # type: ignore[no-untyped-def]
    a, a_start, a_row, b, b_start, b_row, c, c_start, c_row, m, n, depth, ahead
):  # fmt: skip
    """Add A B^T to C.

    Parameters
    ----------
    a, b, c : arrays of the run's type
        Of any number of axes; A[i, k] is ``a.flat[a_start + i * a_row + k]``, and B[j, k] and
        C[i, j] likewise.
    m, n, depth : int
        C is m x n, A is m x depth, B is n x depth.
    ahead : int
        As in `multiply_nn`.
    """
    for left in range(0, n, NT_COLUMNS):
        for top in range(0, m, nt_rows(c)):
            _nt_tile(
                a, a_start + top * a_row, a_row, min(nt_rows(c), m - top),
                b, b_start + left * b_row, b_row, min(NT_COLUMNS, n - left),
                c, c_start + top * c_row + left, c_row, depth, ahead,
            )  # fmt: skip
