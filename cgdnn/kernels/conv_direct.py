"""Direct convolution of two spatial axes: the input is read where it lies, never unfolded.

A piece re-lays a band of rows of one or more images into scratch, with the padding as zeros around
it, so that the micro-kernels check no borders. Columns are sorted by their remainder modulo the
stride, each remainder a plane of its own: whatever the stride, neighbours in the output read
neighbours in a plane. Without padding and column stride the images are read where they lie.

Two kernels compute outputs:

* `conv_direct_filters`: filters in the lanes of vectors. A few scalars of the input, neighbours in
  a row, meet one to three vectors of weights in each step. The tile goes to scratch and from there,
  transposed, to the output.
* `conv_direct_pixels`: pixels in the lanes. A few scalars of the weights meet up to four vectors of
  the input. Each half of a vector may lie in another row, so that narrow images waste few lanes.
  For filters that would leave lanes empty.

What a step reads comes from a table: ``table[0, t]`` is an offset into the input from the place of
the output pixel, ``table[1, t]`` the number of the weight that it meets. So the forward pass, and
the data gradient as a convolution of dy, differ in their tables only. With a stride, the data
gradient consists of one field for each remainder of row and column, with a range of the table of
its own (``fields[a, b]``: its begin and length), which gives the pixels
(a + i * fields.shape[0], b + j * fields.shape[1]).

`conv_direct_backward_weights` has filters in the lanes as well, and scalars from neighbouring
channels of one pixel.

Weights lie in units of some filters: (units of all groups, depth, filters of a unit). What a group
lacks to whole units is zeros. With filters in the lanes a unit is one vector of float32; one of
float64 consists of two blocks (depth, lanes).
"""

from __future__ import annotations

from typing import Any

from cgdnn import machine
from cgdnn.kernels._jit import INT, REAL, array, device, kernel, scratch
from cgdnn.kernels.relay import fill_zero, from_lanes, relay_planes, to_lanes, to_pixels
from cgdnn.kernels.vector import (
    Emitter,
    constant,
    emitted,
    lanes_of,
    transpose_block,
)

CHUNK_PIXELS = 64
"""About how many pixels are computed before they are transposed to the output, in whole rows."""
_SUMMED = 8
"""Vectors that are summed side by side: some cache lines of each row."""
MOST_ROWS = 6
"""Most filters in a tile of `conv_direct_pixels`."""


def most_scalars() -> tuple[int, ...]:
    """Return the most scalars that meet 1, 2 and 3 vectors in a tile.

    Their products, the vectors and a scalar have to fit the registers.
    """
    return (14, 14, 9) if machine.vector_bytes() == 64 else (6, 6, 3)


@constant
def _most_scalars_of_two(e: Emitter, x: Any) -> int:
    """Return the most scalars that meet one or two vectors."""
    return most_scalars()[1]


@constant
def _most_scalars_of_three(e: Emitter, x: Any) -> int:
    """Return the most scalars that meet three vectors."""
    return most_scalars()[2]


def most_pixel_vectors() -> int:
    """Return the most vectors in a tile of `conv_direct_pixels`."""
    return 4 if machine.vector_bytes() == 64 else 2


@constant
def _most_vectors(e: Emitter, x: Any) -> int:
    """Return the most vectors in a tile of `conv_direct_pixels`."""
    return most_pixel_vectors()


@device
def _most_scalars(x, vectors):  # type: ignore[no-untyped-def]
    return _most_scalars_of_two(x) if vectors < 3 else _most_scalars_of_three(x)


def _scalar_tiles(e, scalars, vectors, limits):  # type: ignore[no-untyped-def]
    """Return the (scalars, vectors) of every tile, and the number of the wanted one.

    `limits` are the most scalars that meet 1, 2, ... vectors.
    """
    tiles = [(s, v + 1) for v, most in enumerate(limits) for s in range(1, most + 1)]
    number = e.builder.sub(scalars, e.integer(1))
    before = 0
    for v, most in enumerate(limits[:-1]):
        before += most
        wider = e.builder.icmp_signed(">", vectors, e.integer(v + 1))
        number = e.builder.select(
            wider, e.builder.add(e.builder.sub(scalars, e.integer(1)), e.integer(before)), number
        )  # fmt: skip
    return tiles, number


def _multiply_step(e, sums, left, right):  # type: ignore[no-untyped-def]
    """Add left[i] * right[j] to sums[i][j]; `left` are pointers to scalars, `right` vectors."""
    for pointer, line in zip(left, sums, strict=True):
        scalar = e.splat(e.scalar(pointer))
        for vector, slot in zip(right, line, strict=True):
            e.builder.store(e.multiply_add(scalar, vector, e.builder.load(slot)), slot)


@emitted
def _filters_tile(  # type: ignore[no-untyped-def]
    e, x, x_start, u, uses_u, segments, x_segment, table, t_begin, t_count, t_length,
    w, w_start, w_segment, w_vector, vectors, pixels, bias, bias_start, bias_count,
    t, t_start, t_vector, t_pixel,
):  # fmt: skip
    """Compute some neighbouring pixels of one to three vectors of filters, into t.

    All of it is compiled once for each shape of the tile. The first `bias_count` filters begin
    with their bias, the others with 0.
    """
    build = e.builder
    x = e.at(build.select(build.icmp_signed("!=", uses_u, e.integer(0)), u, x), x_start)
    w, t, bias = e.at(w, w_start), e.at(t, t_start), e.at(bias, bias_start)
    x_offsets, w_numbers = e.at(table, t_begin), e.at(table, t_begin, t_length)
    tiles, number = _scalar_tiles(e, pixels, vectors, most_scalars())
    lanes = [e.integer(v * e.lanes) for v in range(len(most_scalars()))]
    with e.cases(number, len(tiles)) as each:
        for case in each:
            count, nv = tiles[case]
            firsts = [
                e.load(e.at(bias, first), e.first_lanes(build.sub(bias_count, first)))
                for first in lanes[:nv]
            ]  # fmt: skip
            sums = [[e.variable(first) for first in firsts] for _ in range(count)]
            offsets = [build.mul(w_vector, e.integer(v)) for v in range(nv)]
            with e.loop(segments) as s:
                x_s = e.at(x, build.mul(s.index, x_segment))
                w_s = e.at(w, build.mul(s.index, w_segment))
                with e.loop(t_count) as k:
                    x_k = e.at(x_s, e.scalar(e.at(x_offsets, k.index)))
                    w_number = e.scalar(e.at(w_numbers, k.index))
                    w_k = e.at(w_s, build.mul(w_number, e.integer(e.lanes)))
                    e.prefetch(e.at(x_k, e.integer(2 * count)))  # what the next tiles read
                    right = [e.load(e.at(w_k, offset)) for offset in offsets]
                    left = [e.at(x_k, e.integer(p)) for p in range(count)]
                    _multiply_step(e, sums, left, right)
            for p, line in enumerate(sums):
                place = e.at(t, build.mul(e.integer(p), t_pixel))
                for v, slot in enumerate(line):
                    e.store(build.load(slot), e.at(place, build.mul(t_vector, e.integer(v))))


_READING = (
    array(2, "int64"), array(3, "int64"), array(1, "int64"), *(INT,) * 13, scratch(1)
)  # fmt: skip


@kernel(array(4), array(3), array(1), INT, array(4), *_READING, INT, INT, scratch(1), INT, INT)
def conv_direct_filters(  # type: ignore[no-untyped-def]
    x, w, b, has_bias, y, table, fields, firsts, relays, group, segment, stride, columns, row_first,
    row_stride, row_step, span, row_pitch, channel_pitch, band, together, u, block, most, t,
    begin, end,
):  # fmt: skip
    """Set y = w * x + b for the images [begin, end), with filters in the lanes.

    Parameters
    ----------
    x : array (N, C, H, W)
    w : array (units of all groups, depth, filters of a unit)
        As `conv_direct_pack` leaves it.
    b : array (filters,)
        Not read unless `has_bias`.
    y : array (N, filters, OH, OW)
    table : array of int64 (2, steps)
        Offsets from the place of an output pixel, and numbers of weights, for the first `segment`
        channels; the next ones follow at their distances.
    fields : array of int64 (row remainders, column remainders, 2)
    firsts : array of int64 (planes,)
        The input column that each plane begins with.
    relays : int
        Whether the input is re-laid, or read where it lies.
    group, segment : int
    stride, columns : int
        Distance of neighbours of a plane in the input, and columns of a plane.
    row_first, row_stride : int
        The first input row, and the distance of those that are re-laid.
    row_step, span : int
        Re-laid rows from one row of a field to the next, and those that one row reads.
    row_pitch, channel_pitch : int
        Distances, in what is read, of re-laid rows and of channels.
    band, together : int
        Rows of a field, and images, that are re-laid at a time.
    u : array
        Room for what is re-laid, and one vector.
    block : int
        Input channels that are summed at a time, whole segments.
    most : int
        Vectors of filters in a tile, at most.
    t : array
        Room for the vectors of the pixels of a chunk, `most` times, and as many as lanes.
    """
    lanes = lanes_of(x)
    channels, filters = x.shape[1] // group, y.shape[1] // group
    depth = w.shape[1]
    taps = depth // channels
    oh, ow = y.shape[2], y.shape[3]
    sh = fields.shape[0]
    blocks = (filters + lanes - 1) // lanes
    tiles = (blocks + most - 1) // most
    chunk = max(1, CHUNK_PIXELS // ow) if sh == 1 else 1
    t_vector = (chunk * ow + lanes) * lanes
    field_rows = (oh + sh - 1) // sh
    u_plane = ((band - 1) * row_step + span) * columns
    for n in range(begin, end, together):
        images = min(together, end - n)
        for g in range(group):
            for r_begin in range(0, field_rows, band):
                r_end = min(r_begin + band, field_rows)
                rows = (r_end - r_begin - 1) * row_step + span
                for c in range(0, channels, block):
                    c_end = min(c + block, channels)
                    if relays:
                        relay_planes(
                            x, n, images, g * channels + c, g * channels + c_end,
                            row_first + r_begin * row_step * row_stride, rows, row_stride,
                            firsts, stride, columns, u, channel_pitch, u_plane,
                        )  # fmt: skip
                        origin, image_pitch = 0, firsts.shape[0] * u_plane
                    else:
                        image_pitch = x.shape[1] * channel_pitch
                        origin = (
                            n * image_pitch
                            + (g * channels + c) * channel_pitch
                            + r_begin * row_step * row_pitch
                        )
                    for tile in range(tiles):
                        first = blocks * tile // tiles
                        vectors = blocks * (tile + 1) // tiles - first
                        w_start = w.size // group * g + (first * depth + c * taps) * lanes
                        first *= lanes
                        count = min(vectors * lanes, filters - first)
                        for image in range(images):
                            y_start = ((n + image) * y.shape[1] + g * filters + first) * oh * ow
                            for r in range(r_begin, r_end, chunk):
                                r_last = min(r + chunk, r_end)
                                for a in range(min(sh, oh - sh * r)):
                                    _compute_rows(
                                        x, origin + image * image_pitch
                                        + (r - r_begin) * row_step * row_pitch,
                                        row_step * row_pitch, u, relays, (c_end - c) // segment,
                                        segment * channel_pitch, table, fields, a, r_last - r, ow,
                                        w, w_start, segment * taps * lanes, depth * lanes, vectors,
                                        b, g * filters + first,
                                        count if has_bias and c == 0 else 0, t, t_vector,
                                    )  # fmt: skip
                                    for v in range(0, count, lanes):
                                        from_lanes(
                                            t, v // lanes * t_vector, y,
                                            y_start + v * oh * ow + (a + sh * r) * ow, oh * ow,
                                            min(lanes, count - v), (r_last - r) * ow, c,
                                        )  # fmt: skip


@device
def _compute_rows(  # type: ignore[no-untyped-def]
    x, x_start, x_row, u, uses_u, segments, x_segment, table, fields, a, rows, ow,
    w, w_start, w_segment, w_vector, vectors, b, b_start, b_count, t, t_vector,
):  # fmt: skip
    """Compute whole rows of the output, all fields of the row remainder `a`, into t."""
    lanes = lanes_of(x)
    sw = fields.shape[1]
    most = _most_scalars(x, vectors)
    for r in range(rows):
        for remainder in range(sw):
            count = (ow - remainder + sw - 1) // sw
            parts = (count + most - 1) // most
            for part in range(parts):
                left = count * part // parts
                _filters_tile(
                    x, x_start + r * x_row + left, u, uses_u, segments, x_segment,
                    table, fields[a, remainder, 0], fields[a, remainder, 1], table.shape[1],
                    w, w_start, w_segment, w_vector, vectors, count * (part + 1) // parts - left,
                    b, b_start, b_count,
                    t, (r * ow + remainder + left * sw) * lanes, t_vector, sw * lanes,
                )  # fmt: skip


@emitted
def _pixels_tile(  # type: ignore[no-untyped-def]
    e, u, u_start, u_row, segments, u_segment, table, t_count, t_length, w, w_start, w_segment,
    w_unit, units, rows, filters, vectors, first_row, first_column, width, ow, halves, y, y_start,
    y_plane, bias, bias_start, has_bias,
):  # fmt: skip
    """Compute the pixels of some vectors for all filters of a group, and store what exists of them.

    Rows of pixels count as `width` long, whole halves of vectors; `ow` pixels of them exist. The
    tile begins at (first_row, first_column) and has `halves` halves. Of `units` times `rows`
    filters, `filters` exist. The rows and the vectors choose among the tiles that are compiled.
    """
    build = e.builder
    half = e.lanes // 2
    u, w, y, bias = e.at(u, u_start), e.at(w, w_start), e.at(y, y_start), e.at(bias, bias_start)
    w_numbers = e.at(table, t_length)
    most = most_pixel_vectors()
    sources, targets, counts = [], [], []  # of halves: where they lie, and the pixels that exist
    row, column = first_row, first_column
    for i in range(2 * most):
        exists = build.icmp_signed("<", e.integer(i), halves)
        sources.append(build.add(build.mul(row, u_row), column))
        targets.append(build.add(build.mul(row, ow), column))
        counts.append(build.select(exists, build.sub(ow, column), e.integer(0)))
        column = build.add(column, e.integer(half))
        ends = build.icmp_signed(">=", column, width)
        row = build.add(row, build.zext(ends, row.type))
        column = build.select(ends, e.integer(0), column)
    whole = build.and_(
        build.icmp_signed("==", ow, width),
        build.icmp_signed(">=", halves, build.mul(vectors, e.integer(2))),
    )  # fmt: skip
    number = build.add(
        build.mul(build.sub(rows, e.integer(1)), e.integer(most)),
        build.sub(vectors, e.integer(1)),
    )  # fmt: skip
    with e.cases(number, MOST_ROWS * most) as each:
        for case in each:
            mr, nv = case // most + 1, case % most + 1
            left = e.variable(filters)
            moving = (w, w_unit), (y, build.mul(rows, y_plane)), (bias, rows)
            with e.sweep(units, *moving) as (w_q, y_q, bias_q):
                valid = build.load(left)
                build.store(build.sub(valid, rows), left)
                starts = [e.variable(e.zero()) for _ in range(mr)]
                for m, slot in enumerate(starts):
                    exists = build.icmp_signed("<", e.integer(m), valid)
                    biased = build.icmp_signed("!=", has_bias, e.integer(0))
                    with build.if_then(build.and_(exists, biased)):
                        build.store(e.splat(e.scalar(e.at(bias_q, e.integer(m)))), slot)
                sums = [[e.variable(build.load(slot)) for _ in range(nv)] for slot in starts]
                with e.loop(segments) as s:
                    u_s = e.at(u, build.mul(s.index, u_segment))
                    w_s = e.at(w_q, build.mul(s.index, w_segment))
                    with e.loop(t_count) as k:
                        u_k = e.at(u_s, e.scalar(e.at(table, k.index)))
                        w_number = e.scalar(e.at(w_numbers, k.index))
                        w_k = e.at(w_s, build.mul(w_number, e.integer(mr)))
                        right = [e.load(e.at(u_k, sources[2 * v])) for v in range(nv)]
                        _multiply_step(e, sums, [e.at(w_k, e.integer(m)) for m in range(mr)], right)
                for m, line in enumerate(sums):
                    plane = e.at(y_q, build.mul(e.integer(m), y_plane))
                    values = [build.load(slot) for slot in line]
                    exists = build.icmp_signed("<", e.integer(m), valid)
                    with build.if_then(exists), build.if_else(whole) as (yes, no):
                        with yes:
                            for v, value in enumerate(values):
                                e.store(value, e.at(plane, targets[2 * v]))
                        with no:
                            for i in range(2 * nv):
                                lanes = range(i % 2 * half, (i % 2 + 1) * half)
                                part = e.shuffle(values[i // 2], values[i // 2], lanes)
                                mask = e.first_lanes(counts[i], half)
                                e.store(part, e.at(plane, targets[i]), mask)


@kernel(array(4), array(3), array(1), INT, array(4), *_READING, INT, INT, INT)
def conv_direct_pixels(  # type: ignore[no-untyped-def]
    x, w, b, has_bias, y, table, fields, firsts, relays, group, segment, stride, columns, row_first,
    row_stride, row_step, span, row_pitch, channel_pitch, band, together, u, width, begin, end,
):  # fmt: skip
    """Set y = w * x + b for the images [begin, end), with pixels in the lanes.

    The arguments are those of `conv_direct_filters`, but the input is always re-laid, and there is
    one field. Rows of the output count as `width` long, whole halves of vectors. Unless these are
    whole vectors, re-laid rows have the same length, so that vectors go on in the next row.
    """
    half = lanes_of(x) // 2
    channels, filters = x.shape[1] // group, y.shape[1] // group
    units, depth, unit = w.shape[0] // group, w.shape[1], w.shape[2]
    taps = depth // channels
    oh, ow = y.shape[2], y.shape[3]
    most = _most_vectors(x)
    u_plane = ((band - 1) * row_step + span) * columns
    for n in range(begin, end, together):
        images = min(together, end - n)
        for g in range(group):
            for r_begin in range(0, oh, band):
                r_end = min(r_begin + band, oh)
                rows = (r_end - r_begin - 1) * row_step + span
                relay_planes(
                    x, n, images, g * channels, (g + 1) * channels,
                    row_first + r_begin * row_step * row_stride, rows, row_stride,
                    firsts, stride, columns, u, channel_pitch, u_plane,
                )  # fmt: skip
                halves = (r_end - r_begin) * (width // half)
                vectors = (halves + 1) // 2
                tiles = (vectors + most - 1) // most
                for image in range(images):
                    first = g * filters
                    for tile in range(tiles):
                        left = vectors * tile // tiles
                        row = left * 2 * half // width
                        _pixels_tile(
                            u, image * firsts.shape[0] * u_plane, row_step * row_pitch,
                            channels // segment, segment * channel_pitch,
                            table, fields[0, 0, 1], table.shape[1],
                            w, g * units * depth * unit, segment * taps * unit, depth * unit,
                            units, unit, filters, vectors * (tile + 1) // tiles - left,
                            row, left * 2 * half - row * width, width, ow, halves - 2 * left,
                            y, (((n + image) * y.shape[1] + first) * oh + r_begin) * ow,
                            oh * ow, b, first, has_bias,
                        )  # fmt: skip


@emitted
def _copy_vectors(e, y, y_start, x, x_start, x_row, rows, count):  # type: ignore[no-untyped-def]
    """Set a vector of y for each of some rows of x to its first `count` elements, and zeros."""
    build, mask = e.builder, e.first_lanes(count)
    rows_of_x, vectors = (e.at(x, x_start), x_row), (e.at(y, y_start), e.integer(e.lanes))
    with e.sweep(rows, rows_of_x, vectors) as (source, target):
        e.prefetch(e.at(source, build.mul(x_row, e.integer(16))))
        e.store(e.load(source, mask), target)


@kernel(array(3), array(3), INT, INT, INT, INT, INT)
def conv_direct_pack(w, packed, group, transposed, lanes_first, begin, end):  # type: ignore[no-untyped-def]
    """Set units [begin, end) of the packed weights.

    Parameters
    ----------
    w : array (filters, channels of a group, taps)
    packed : array (units of all groups, depth, filters of a unit)
    group, transposed : int
        With `transposed`, for the data gradient: channels take the place of filters, and the depth
        consists of the filters and taps, not of channels and taps.
    lanes_first : int
        Whether a unit consists of blocks of one vector, for `conv_direct_filters`.
    """
    outer, inner, taps = w.shape[0] // group, w.shape[1], w.shape[2]
    units, depth, unit = packed.shape[0] // group, packed.shape[1], packed.shape[2]
    lanes = lanes_of(w)
    rows = inner if transposed else outer
    width = min(lanes, unit) if lanes_first else unit
    row_pitch = taps if transposed else depth
    runs = outer if transposed else 1  # of weights that lie together for one row
    run = taps if transposed else depth
    source_flat, target_flat = w.reshape(w.size), packed.reshape(packed.size)
    for u in range(begin, end):
        g = u // units
        for first in range(0, unit, width):
            row = u % units * unit + first
            count = max(0, min(width, rows - row))
            target = u * depth * unit + first * depth
            if count < width:
                for i in range(target, target + depth * width):
                    target_flat[i] = 0
            start = (g * outer * inner + row) * taps if transposed else (g * outer + row) * depth
            if lanes_first and run == 1:
                _copy_vectors(packed, target, w, start, inner, runs, count)
                continue
            for o in range(runs):
                source = start + o * inner * taps
                place = target + o * run * width
                if count > 0 and lanes_first and run > 1:
                    for i in range(0, run, lanes):
                        transpose_block(
                            packed, place + i * width, width, w, source + i, row_pitch,
                            count, min(lanes, run - i), 0,
                        )  # fmt: skip
                else:
                    for k in range(run):
                        for i in range(count):
                            value = source_flat[source + i * row_pitch + k]
                            target_flat[place + k * width + i] = value


@emitted
def _weights_tile(  # type: ignore[no-untyped-def]
    e, x, x_start, u, uses_u, x_image, x_row, x_pixel, x_scalar, dy, dy_start, dy_vector, images,
    rows, columns, dw, dw_start, dw_vector, scalars, vectors,
    next_dy, next_start, next_image, next_row, next_filter,
):  # fmt: skip
    """Add to some neighbouring rows of dw, for one or two vectors of filters.

    Pixel after pixel, values of x that are `x_scalar` apart meet vectors of dy, which follow each
    other. Compiled once for each shape of the tile. Meanwhile the pixels of 16 filters, which are
    `next_filter` apart, come to the first cache.
    """
    build = e.builder
    x = e.at(build.select(build.icmp_signed("!=", uses_u, e.integer(0)), u, x), x_start)
    dy, dw, next_dy = e.at(dy, dy_start), e.at(dw, dw_start), e.at(next_dy, next_start)
    tiles, number = _scalar_tiles(e, scalars, vectors, most_scalars()[:2])
    row_length = build.mul(columns, e.integer(e.lanes))
    image_length = build.mul(rows, row_length)
    with e.cases(number, len(tiles)) as each:
        for case in each:
            count, nv = tiles[case]
            places = [
                [
                    e.at(dw, e.integer(p * e.lanes), build.mul(dw_vector, e.integer(v)))
                    for v in range(nv)
                ]
                for p in range(count)
            ]  # fmt: skip
            sums = [[e.variable(e.load(place)) for place in line] for line in places]
            for line in places:
                for place in line:
                    e.prefetch(e.at(place, build.mul(dw_vector, e.integer(nv))))  # comes next
            offsets = [build.mul(dy_vector, e.integer(v)) for v in range(nv)]
            with e.loop(images) as n, e.loop(rows) as r:
                x_r = e.at(x, build.mul(n.index, x_image), build.mul(r.index, x_row))
                dy_r = e.at(
                    dy, build.mul(n.index, image_length), build.mul(r.index, row_length)
                )  # fmt: skip
                # An address has room for a register and once or twice another: three scalars each.
                firsts = e.stepping(x_r, build.mul(x_scalar, e.integer(3)), -(-count // 3))
                moving = [(first, x_pixel) for first in firsts]
                ahead = e.at(x_r, build.mul(x_scalar, e.integer(count)))
                later = e.at(next_dy, build.mul(n.index, next_image), build.mul(r.index, next_row))
                slot = e.variable(e.integer(0))
                with e.sweep(columns, (dy_r, e.integer(e.lanes)), *moving) as (dy_j, *x_j):
                    # What the next scalars are read from: 16 pixels of 16 channels, in turn.
                    j = build.load(slot)
                    build.store(build.add(j, e.integer(1)), slot)
                    channel = build.and_(j, e.integer(15))
                    pixel = build.sub(j, channel)
                    e.prefetch(e.at(ahead, build.mul(channel, x_scalar), pixel))
                    e.prefetch(e.at(later, build.mul(channel, next_filter), pixel))
                    right = [e.load(e.at(dy_j, offset)) for offset in offsets]
                    near = [e.integer(0), x_scalar, build.mul(x_scalar, e.integer(2))]
                    left = [e.at(x_j[p // 3], near[p % 3]) for p in range(count)]
                    _multiply_step(e, sums, left, right)
            for line, pointers in zip(sums, places, strict=True):
                for slot, place in zip(line, pointers, strict=True):
                    e.store(build.load(slot), place)


@emitted
def _add_vectors(e, y, y_start, x, x_start, count):  # type: ignore[no-untyped-def]
    """Add `count` vectors of x to one of y."""
    build, x, y = e.builder, e.at(x, x_start), e.at(y, y_start)
    # Even and odd ones apart: a sum waits for the one before.
    sums = [e.variable(e.load(y)), e.variable(e.zero())]
    pairs = build.sdiv(count, e.integer(2))
    with e.sweep(pairs, (x, e.integer(2 * e.lanes))) as (place,):
        for i, total in enumerate(sums):
            value = e.load(e.at(place, e.integer(i * e.lanes)))
            build.store(build.fadd(build.load(total), value), total)
    done = build.mul(pairs, e.integer(2))
    with build.if_then(build.icmp_signed("<", done, count)):
        value = e.load(e.at(x, build.mul(done, e.integer(e.lanes))))
        build.store(build.fadd(build.load(sums[0]), value), sums[0])
    e.store(build.fadd(*map(build.load, sums)), y)


@device
def _zero(u, start, count):  # type: ignore[no-untyped-def]
    """Set `count` elements of u, and up to a vector beyond them, to 0."""
    lanes = lanes_of(u)
    fill_zero(u, start, (count + lanes - 1) // lanes)


@device
def _relay_channels(  # type: ignore[no-untyped-def]
    x, n, images, c_begin, channels, row_begin, rows, row_stride, first, columns, u, pitch
):  # fmt: skip
    """Write rows of some images to u, channels of a pixel together: u[image, row, column, c]."""
    lanes = lanes_of(x)
    height, width = x.shape[2], x.shape[3]
    left = min(columns, max(0, -first))
    right = max(left, min(columns, width - first))
    top = min(rows, max(0, (row_stride - 1 - row_begin) // row_stride))
    bottom = max(top, min(rows, (height - 1 - row_begin) // row_stride + 1))
    whole = row_stride == 1 and right - left == width
    together = max(1, bottom - top) if whole else 1
    for image in range(images):
        start = image * rows * columns * pitch
        begin, end = start, start + (top * columns + left) * pitch
        for _ in range(top, bottom):
            _zero(u, begin, end - begin)
            begin = end + (right - left) * pitch
            end += columns * pitch
        _zero(u, begin, start + rows * columns * pitch - begin)
        for i in range(top, bottom, together):
            source = ((n + image) * x.shape[1] + c_begin) * height + row_begin + i * row_stride
            source = source * width + first + left
            place = start + (i * columns + left) * pitch
            for c in range(0, channels, lanes):
                to_pixels(
                    x, source + c * height * width, height * width, min(lanes, channels - c),
                    u, place + c, pitch, right - left, together, columns * pitch,
                )  # fmt: skip


@device
def _add_gradients(  # type: ignore[no-untyped-def]
    x, dy, dw, dw_start, db, db_start, has_bias, firsts, relays, group, unit, kernel_rows,
    kernel_columns, row_stride, row_step, row_dilation, pad_rows, column_stride, column_dilation,
    pitch, run, band, together, u, v, u_begin, u_end, begin, end,
):  # fmt: skip
    """Set the gradients of the units [u_begin, u_end) from the images [begin, end).

    Those of unit 0 would begin at `dw_start` and `db_start`.
    """
    lanes = lanes_of(x)
    channels, filters = x.shape[1] // group, dy.shape[1] // group
    oh, ow = dy.shape[2], dy.shape[3]
    depth = kernel_rows * kernel_columns * channels
    units = (filters + unit - 1) // unit
    columns = (ow - 1) * column_stride + (kernel_columns - 1) * column_dilation + 1
    runs = kernel_columns * channels // run
    vectors = (u_end - u_begin) * unit // lanes
    fill_zero(dw, dw_start + u_begin * unit * depth, vectors * depth)
    if has_bias:
        fill_zero(db, db_start + u_begin * unit, vectors)
    for n in range(begin, end, together):
        images = min(together, end - n)
        for g in range(group):
            b_begin = max(0, u_begin - g * units) * unit // lanes
            b_end = min(
                min(units, u_end - g * units) * unit // lanes, (filters + lanes - 1) // lanes
            )  # fmt: skip
            for r_begin in range(0, oh if b_begin < b_end else 0, band):
                r_count = min(band, oh - r_begin)
                rows = (r_count - 1) * row_step + (kernel_rows - 1) * row_dilation + 1
                pixels = images * r_count * ow
                v_pitch = (pixels + lanes) * lanes
                place, image_pitch = 0, rows * columns * pitch
                row_pitch, pixel_pitch = row_step * columns * pitch, column_stride * pitch
                scalar_pitch = 1
                row_begin = r_begin * row_step * row_stride - pad_rows
                if relays == 0:
                    place = ((n * x.shape[1] + g * channels) * oh + r_begin) * ow
                    image_pitch, row_pitch = x.shape[1] * oh * ow, ow
                    pixel_pitch, scalar_pitch = 1, oh * ow
                elif channels == 1:
                    relay_planes(
                        x, n, images, g, g + 1, row_begin, rows, row_stride, firsts, 1, columns,
                        u, 0, rows * columns,
                    )  # fmt: skip
                else:
                    _relay_channels(
                        x, n, images, g * channels, channels, row_begin, rows, row_stride,
                        firsts[0], columns, u, pitch,
                    )  # fmt: skip
                for k in range(b_begin, b_end):
                    count = min(lanes, filters - k * lanes)
                    for image in range(images):
                        source = ((n + image) * dy.shape[1] + g * filters + k * lanes) * oh * ow
                        source += r_begin * ow
                        to_lanes(
                            dy, source, oh * ow, count, v,
                            (k - b_begin) * v_pitch + image * r_count * ow * lanes, r_count * ow,
                        )  # fmt: skip
                    if has_bias:
                        _add_vectors(
                            db, db_start + (g * units * unit + k * lanes),
                            v, (k - b_begin) * v_pitch, pixels,
                        )  # fmt: skip
                most = _most_scalars(x, min(2, b_end - b_begin))
                parts = (run + most - 1) // most
                tiles = (b_end - b_begin + 1) // 2
                # What is re-laid next of dy: each tile fetches a block of filters.
                more = r_begin + band < oh
                next_n, next_r = (n, r_begin + band) if more else (n + together, 0)
                later = ((next_n * dy.shape[1] + g * filters + b_begin * lanes) * oh + next_r) * ow
                block = 0
                target = dw_start + (g * units * unit + b_begin * lanes) * depth
                for q in range(kernel_rows):
                    for j in range(runs):
                        if relays:
                            place = (q * row_dilation * columns + j * column_dilation) * pitch
                        for part in range(parts):
                            left = run * part // parts
                            count = run * (part + 1) // parts - left
                            for tile in range(tiles):
                                k = (b_end - b_begin) * tile // tiles
                                _weights_tile(
                                    x, place + left * scalar_pitch, u, relays,
                                    image_pitch, row_pitch, pixel_pitch, scalar_pitch,
                                    v, k * v_pitch, v_pitch, images, r_count, ow,
                                    dw, target + (k * depth + (q * runs + j) * run + left) * lanes,
                                    depth * lanes, count,
                                    (b_end - b_begin) * (tile + 1) // tiles - k,
                                    dy, later + block * lanes * oh * ow,
                                    dy.shape[1] * oh * ow, ow, oh * ow,
                                )  # fmt: skip
                                block = min(block + 1, b_end - b_begin - 1)


_NUMBERS = (array(1, "int64"), *(INT,) * 15, scratch(1), scratch(1))


@kernel(array(4), array(4), array(2), array(2), INT, *_NUMBERS, INT, INT, INT)
def conv_direct_backward_weights(  # type: ignore[no-untyped-def]
    x, dy, dw, db, has_bias, firsts, relays, group, unit, kernel_rows, kernel_columns, row_stride,
    row_step, row_dilation, pad_rows, column_stride, column_dilation, pitch, run, band, together,
    u, v, piece, begin, end,
):  # fmt: skip
    """Set partial gradients of all filters from the images [begin, end).

    Parameters
    ----------
    x : array (N, C, H, W)
    dy : array (N, filters, OH, OW)
    dw : array (pieces, units * depth * unit)
        Row `piece` is written: for each unit, as far as it is one vector wide, an array
        (kernel rows, kernel columns, channels of a group, unit); see `conv_direct_unpack`.
    db : array (pieces, units * unit)
        Likewise; not touched unless `has_bias`.
    firsts : array of int64 (1,)
        The input column that the first output column and the first tap meet.
    relays : int
        Whether x is re-laid, or, where each output pixel meets its own one only, read where it
        lies.
    group, unit : int
    kernel_rows, kernel_columns : int
    row_stride, row_step : int
        Distance of the input rows that are re-laid, and re-laid rows from one output row to the
        next.
    row_dilation, pad_rows, column_stride, column_dilation : int
    pitch : int
        Distance of pixels in u.
    run : int
        How many values of u are neighbours that neighbouring weights meet: the channels of a
        group, or those of a row of taps where nothing lies between them.
    band, together : int
        Output rows, and images, that are re-laid at a time.
    u, v : array
        Room for the re-laid rows of x, and for the vectors of dy.
    """
    _add_gradients(
        x, dy, dw, piece * dw.shape[1], db, piece * db.shape[1], has_bias, firsts, relays, group,
        unit, kernel_rows, kernel_columns, row_stride, row_step, row_dilation, pad_rows,
        column_stride, column_dilation, pitch, run, band, together, u, v,
        0, db.shape[1] // unit, begin, end,
    )  # fmt: skip


@kernel(
    *(array(4), array(4), array(3), array(1), INT, *_NUMBERS),
    *(scratch(1), REAL, REAL, INT, INT, INT),
)
def conv_direct_filter_gradients(  # type: ignore[no-untyped-def]
    x, dy, dw, db, has_bias, firsts, relays, group, unit, kernel_rows, kernel_columns, row_stride,
    row_step, row_dilation, pad_rows, column_stride, column_dilation, pitch, run, band, together,
    u, v, sums, keep_w, keep_b, units, begin, end,
):  # fmt: skip
    """Set or add to the gradients of some filters from all images.

    The filters are those of the units [begin * units, end * units), which are whole or all of a
    group. Further arguments are those of `conv_direct_backward_weights`.

    Parameters
    ----------
    dw : array (filters, channels of a group, taps)
    db : array (filters,)
        Not touched unless `has_bias`.
    sums : array
        Room for the gradients of so many units.
    keep_w, keep_b : real
        Where 0, what dw or db holds is overwritten, else added to.
    """
    lanes = lanes_of(x)
    depth = dw.shape[1] * dw.shape[2]
    filters = dw.shape[0] // group
    count = min(filters, units * unit)
    for block in range(begin, end):
        biases = units * unit * depth
        first = block * units * unit
        _add_gradients(
            x, dy, sums, -first * depth, sums, biases - first, has_bias, firsts, relays, group,
            unit, kernel_rows, kernel_columns, row_stride, row_step, row_dilation, pad_rows,
            column_stride, column_dilation, pitch, run, band, together, u, v,
            block * units, (block + 1) * units, 0, x.shape[0],
        )  # fmt: skip
        for o in range(0, count, lanes):
            _unpack(
                dw, block * count + o, min(lanes, count - o), sums, o * depth, keep_w,
            )  # fmt: skip
        if has_bias:
            for o in range(count):
                db[block * count + o] = sums[biases + o] + (db[block * count + o] if keep_b else 0)


@device
def _unpack(dw, o, count, sums, start, keep):  # type: ignore[no-untyped-def]
    """Set or add to the gradients of `count` filters, the first lanes of sums[start :]."""
    lanes = lanes_of(dw)
    channels, taps = dw.shape[1], dw.shape[2]
    if taps == 1:
        for c in range(0, channels, lanes):
            transpose_block(
                dw, o * channels + c, channels, sums, start + c * lanes, lanes,
                min(lanes, channels - c), count, keep != 0,
            )  # fmt: skip
    else:
        for c in range(channels):
            for tap in range(0, taps, lanes):
                transpose_block(
                    dw, (o * channels + c) * taps + tap, channels * taps,
                    sums, start + (tap * channels + c) * lanes, channels * lanes,
                    min(lanes, taps - tap), count, keep != 0,
                )  # fmt: skip


@emitted
def _sum_rows(e, t, x, x_start, rows, x_row, count):  # type: ignore[no-untyped-def]
    """Set `count` vectors of t to the sums of those of some rows of x, in order."""
    build = e.builder
    x, done = e.at(x, x_start), e.integer(0)
    for together in (_SUMMED, 1):
        groups = build.sdiv(build.sub(count, done), e.integer(together))
        start, step = build.mul(done, e.integer(e.lanes)), e.integer(together * e.lanes)
        with e.sweep(groups, (e.at(t, start), step), (e.at(x, start), step)) as (target, source):
            places = [e.integer(i * e.lanes) for i in range(together)]
            sums = [e.variable(e.load(e.at(source, place))) for place in places]
            others = build.sub(rows, e.integer(1))
            with e.sweep(others, (e.at(source, x_row), x_row)) as (row,):
                for total, place in zip(sums, places, strict=True):
                    e.prefetch(e.at(row, place, step))  # comes next
                    value = e.load(e.at(row, place))
                    build.store(build.fadd(build.load(total), value), total)
            for total, place in zip(sums, places, strict=True):
                e.store(build.load(total), e.at(target, place))
        done = build.add(done, build.mul(groups, e.integer(together)))


@kernel(array(2), array(3), INT, REAL, scratch(1), INT, INT, INT)
def conv_direct_unpack(partial, dw, group, keep, t, together, begin, end):  # type: ignore[no-untyped-def]
    """Set or add to the gradients of some filters the sum of partial ones.

    The filters are [begin * together, end * together).

    Parameters
    ----------
    partial : array (pieces, units * depth * unit)
        As `conv_direct_backward_weights` leaves it; rows are added in order.
    dw : array (filters, channels of a group, taps)
    group : int
    keep : real
        Where 0, what dw holds is overwritten, else added to.
    t : array
        Room for one unit.
    together : int
    """
    lanes = lanes_of(dw)
    filters, depth = dw.shape[0] // group, dw.shape[1] * dw.shape[2]
    group_size = partial.shape[1] // group
    o, stop = begin * together, end * together
    while o < stop:
        g = o // filters
        first = (o - g * filters) // lanes * lanes  # of the block that o lies in
        lane = o - g * filters - first
        count = min(lanes - lane, filters - first - lane, stop - o)
        source = g * group_size + first * depth
        _sum_rows(t, partial, source, partial.shape[0], partial.shape[1], depth)
        _unpack(dw, o, count, t, lane, keep)
        o += count


@kernel(array(2), array(1), INT, REAL, INT, INT)
def conv_direct_bias(partial, db, group, keep, begin, end):  # type: ignore[no-untyped-def]
    """Set or add to the gradients of the biases [begin, end) the sum of partial ones.

    As `conv_direct_unpack`, with partial (pieces, units * unit).
    """
    filters = db.shape[0] // group
    for o in range(begin, end):
        place = o // filters * (partial.shape[1] // group) + o % filters
        total = partial[0, place]
        for row in range(1, partial.shape[0]):
            total += partial[row, place]
        db[o] = total if keep == 0 else db[o] + total
