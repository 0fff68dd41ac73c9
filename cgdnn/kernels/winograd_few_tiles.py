"""Vector code of Winograd convolution for few input channels: transforms and products of tiles.

*Lines* hold rows of tiles that are transformed along columns only, [n][column]. V then has tiles in
its lanes, U and the products have filters. The products are transformed back along rows to
*columns*, [column][n][L].

All numbers are int64, all offsets and strides are in elements.
"""

from __future__ import annotations

from typing import Any

from cgdnn import machine
from cgdnn.kernels.vector import Emitter, emitted
from cgdnn.kernels.winograd_points import OUTPUTS, TAPS, matrices
from cgdnn.kernels.winograd_tiles import matrix_product

FEW = 4
"""Channels up to which there is code."""
_MATRICES = [matrices(OUTPUTS, taps) for taps in TAPS]


def _held() -> int:
    """Return the vectors of U that stay in registers while some tiles are multiplied by them.

    More, and LLVM keeps others on the stack instead.
    """
    return 18 if machine.vector_bytes() == 64 else 9


@emitted
def lines_from_rows(  # type: ignore[no-untyped-def]
    e, x, x_start, first, height, width, lines, start, line, zeros, variant
):
    """Transform n rows of a plane along columns: B^T x.

    The plane of `height` rows of `width` elements begins at `x_start`; the rows are those from
    `first` on, and zero where they are outside the plane. Line i of the result begins at
    ``start + i * line``. At `zeros` there must be a row of zeros in `lines`.
    """
    build = e.builder
    x, target, nothing = e.at(x, x_start), e.at(lines, start), e.at(lines, zeros)
    with e.cases(variant, len(_MATRICES)) as each:
        for case in each:
            matrix = _MATRICES[case].input
            rows = []
            for i in range(len(matrix)):
                number = build.add(first, e.integer(i))
                inside = build.icmp_unsigned("<", number, height)
                rows.append(build.select(inside, e.at(x, build.mul(number, width)), nothing))
            for (*sources, place), mask in e.along(width, *rows, target):
                results = matrix_product(e, matrix, [e.load(source, mask) for source in sources])
                places = e.stepping(place, line, len(matrix))
                for value, place in zip(results, places, strict=True):
                    e.store(value, place, mask)


def _phases(e: Emitter, run: list[Any]) -> list[Any]:
    """Return elements 0, 4, ... of a run of four vectors, then 1, 5, ..., then 2, ..., then 3."""

    def every_other(vectors: list[Any], first: int) -> Any:
        return e.shuffle(vectors[0], vectors[1], range(first, 2 * e.lanes, 2))

    halves = [[every_other(run[i : i + 2], odd) for i in (0, 2)] for odd in (0, 1)]
    return [every_other(halves[phase % 2], phase // 2) for phase in range(OUTPUTS)]


@emitted
def tiles_from_line(e, lines, start, count, v, v_start, group, variant):  # type: ignore[no-untyped-def]
    """Transform a line along rows, for `count` vectors of tiles: X B, tiles in lanes.

    Column j of tile t is element 4 t + j of the line. Element j of group g of L tiles becomes a
    vector at ``v_start + g * group + j * L``.
    """
    lines, v = e.at(lines, start), e.at(v, v_start)
    with e.cases(variant, len(_MATRICES)) as each:
        for case in each:
            step = e.integer(OUTPUTS * e.lanes)
            with e.sweep(count, (lines, step), (v, group)) as (line, place):
                columns: list[Any] = []
                for first in (0, OUTPUTS):
                    places = [e.integer(first + i * e.lanes) for i in range(OUTPUTS)]
                    columns += _phases(e, [e.load(e.at(line, place)) for place in places])
                matrix = _MATRICES[case].input
                for j, value in enumerate(matrix_product(e, matrix, columns[: len(matrix)])):
                    e.store(value, e.at(place, e.integer(j * e.lanes)))


@emitted
def columns_of_tiles(  # type: ignore[no-untyped-def]
    e, v, v_start, tiles, channels, u, u_start, columns, start, variant
):
    """Compute L filters' outputs for some tiles, transformed back along rows: (sum of V U) A.

    Element f of channel c of V is a scalar at ``v_start + (c * n * n + f) * L``, the next tile one
    further; of U a vector at ``u_start + (f * channels + c) * L``. Column k of tile t becomes n
    vectors at ``start + (4 t + k) * n * L``.
    """
    build, lanes = e.builder, e.lanes
    number = build.add(build.mul(variant, e.integer(FEW)), build.sub(channels, e.integer(1)))
    v, u, columns = e.at(v, v_start), e.at(u, u_start), e.at(columns, start)
    with e.cases(number, len(_MATRICES) * FEW) as each:
        for case in each:
            matrix, depth = _MATRICES[case // FEW].output, case % FEW + 1
            size = len(matrix[0])
            with e.sweep(
                e.integer(size),
                (v, e.integer(size * lanes)),
                (u, e.integer(size * depth * lanes)),
                (columns, e.integer(lanes)),
            ) as (row, weights, line):
                places = [e.at(weights, e.integer(k * lanes)) for k in range(size * depth)]
                held = [e.load(place) for place in places[: _held()]]
                tile = e.integer(OUTPUTS * size * lanes)
                with e.sweep(tiles, (row, e.integer(1)), (line, tile)) as (scalars, place):
                    filters = [*held, *map(e.load, places[len(held) :])]
                    products = []
                    for j in range(size):
                        total = None
                        for c, weight in enumerate(filters[j * depth : (j + 1) * depth]):
                            offset = e.integer((c * size * size + j) * lanes)
                            factor = e.splat(e.scalar(e.at(scalars, offset)))
                            if total is None:
                                total = build.fmul(factor, weight)
                            else:
                                total = e.multiply_add(factor, weight, total)
                        products.append(total)
                    for k, value in enumerate(matrix_product(e, matrix, products)):
                        e.store(value, e.at(place, e.integer(k * size * lanes)))


@emitted
def outputs_of_columns(  # type: ignore[no-untyped-def]
    e, columns, start, count, bias, bias_start, channels, y, y_start, y_row, y_column, rows, variant
):
    """Transform columns of tiles back to the first `rows` rows, plus bias: A^T M + bias.

    The n vectors of column k begin at ``start + k * n * L``; row r of it becomes a vector at
    ``y_start + r * y_row + k * y_column``. Only the first `channels` lanes have a bias.
    """
    build, lanes = e.builder, e.lanes
    columns, y = e.at(columns, start), e.at(y, y_start)
    added = e.load(e.at(bias, bias_start), e.first_lanes(channels))
    with e.cases(variant, len(_MATRICES)) as each:
        for case in each:
            matrix = _MATRICES[case].output
            size = len(matrix[0])
            # A column of ones takes the bias to all rows.
            ones = next((i for i in range(size) if all(row[i] == 1 for row in matrix)), None)
            with e.sweep(count, (columns, e.integer(size * lanes)), (y, y_column)) as (line, top):
                vectors = [e.load(e.at(line, e.integer(i * lanes))) for i in range(size)]
                if ones is not None:
                    vectors[ones] = build.fadd(vectors[ones], added)
                values = matrix_product(e, matrix, vectors)
                if ones is None:
                    values = [build.fadd(value, added) for value in values]
                for r, value in enumerate(values):
                    with build.if_then(build.icmp_signed("<", e.integer(r), rows)):
                        e.store(value, e.at(top, build.mul(y_row, e.integer(r))))
