"""Bring channels of N, C, H, W images into the lanes of vectors, and back.

Convolution kernels work on scratch whose innermost axis is L channels, the lanes of one vector:
[block of channels][row][column][L], with zeros around. A row is re-laid by transposing squares of L
channels by L columns in registers.
"""

from __future__ import annotations

from typing import Any

from cgdnn.kernels._jit import device
from cgdnn.kernels.vector import Emitter, emitted

_ROWS = 8
"""Channels that are written side by side."""
_BAND = 8
"""Rows of an image of which vectors below each other are brought at a time: masks are the same."""
_INTERLEAVED = 4
"""Channels of a pixel, at most, of which vectors are made that hold some whole pixels."""


@emitted
def to_lanes(e, x, x_start, x_row, channels, plane, plane_start, columns):  # type: ignore[no-untyped-def]
    """Copy `columns` elements of each of some channels to vectors, one for each column.

    Lane c of vector j is ``x.flat[x_start + c * x_row + j]``, or 0 for c >= `channels`. Up to
    L - 1 vectors beyond the last one are overwritten.
    """
    build = e.builder
    lanes = e.integer(e.lanes)
    x, plane = e.at(x, x_start), e.at(plane, plane_start)
    groups = build.sdiv(build.add(columns, e.integer(e.lanes - 1)), lanes)
    with e.loop(groups) as group:
        first = build.mul(group.index, lanes)
        left = build.sub(columns, first)
        sources = e.stepping(e.at(x, first), x_row, e.lanes)
        target = e.at(plane, build.mul(first, lanes))

        rows = [e.variable(e.zero()) for _ in sources]
        whole = build.icmp_signed(">=", e.smaller(left, channels), lanes)
        with build.if_else(whole) as (yes, no):
            with yes:
                for source, slot in zip(sources, rows, strict=True):
                    build.store(e.load(source), slot)
            with no:
                for i, (source, slot) in enumerate(zip(sources, rows, strict=True)):
                    exists = build.icmp_signed("<", e.integer(i), channels)
                    mask = e.first_lanes(build.select(exists, left, e.integer(0)))
                    build.store(e.load(source, mask), slot)
        for i, vector in enumerate(e.transposed([build.load(slot) for slot in rows])):
            e.store(vector, e.at(target, e.integer(i * e.lanes)))


@emitted
def to_pixels(  # type: ignore[no-untyped-def]
    e, x, x_start, x_row, channels, y, y_start, pitch, columns, rows, y_row
):  # fmt: skip
    """Copy rows of up to L channels, which follow each other, to pixels of `pitch` elements.

    ``y.flat[y_start + i * y_row + j * pitch + c]`` gets
    ``x.flat[x_start + c * x_row + i * columns + j]`` for i < `rows` and j < `columns`; nothing else
    is written.
    """
    build = e.builder
    x, y = e.at(x, x_start), e.at(y, y_start)
    one = e.integer(1)
    few = build.icmp_signed("<=", channels, e.integer(min(_INTERLEAVED, e.lanes)))
    alone = build.and_(few, build.icmp_signed("==", channels, pitch))
    number = build.select(alone, build.sub(channels, one), e.integer(0))
    with e.cases(number, min(_INTERLEAVED, e.lanes)) as each:
        for case in each:
            if case == 0:
                _squares_to_pixels(e, x, x_row, channels, y, pitch, columns, rows, y_row)
                continue
            with e.sweep(rows, (x, columns), (y, y_row)) as (source, target):
                _interleave(e, case + 1, source, x_row, target, columns)


def _squares_to_pixels(e, x, x_row, channels, y, pitch, columns, rows, y_row):  # type: ignore[no-untyped-def]
    """Emit `to_pixels` for any channels: squares of all channels by as many pixels as lanes."""
    build, lanes, one = e.builder, e.integer(e.lanes), e.integer(1)
    pixels = build.mul(rows, columns)
    groups = build.sdiv(build.add(pixels, e.integer(e.lanes - 1)), lanes)
    written, last = e.first_lanes(channels), build.sub(channels, one)
    offsets = [build.mul(e.smaller(e.integer(i), last), x_row) for i in range(e.lanes)]
    next_channels = build.mul(x_row, lanes)
    gap = build.sub(y_row, build.mul(columns, pitch))
    target, column = e.variable(y), e.variable(e.integer(0))
    missing = e.variable(pixels)
    with e.sweep(groups, (x, lanes)) as (source,):
        left = build.load(missing)
        build.store(build.sub(left, lanes), missing)
        mask = e.first_lanes(left)
        places = [e.at(source, offset) for offset in offsets]
        vectors = [e.load(place, mask) for place in places]
        for place in places:
            e.prefetch(e.at(place, next_channels))
        for i, vector in enumerate(e.transposed(vectors)):
            with build.if_then(build.icmp_signed("<", e.integer(i), left)):
                place, after = build.load(target), build.add(build.load(column), one)
                e.store(vector, place, written)
                ends = build.icmp_signed("==", after, columns)
                build.store(build.select(ends, e.integer(0), after), column)
                skipped = build.select(ends, gap, e.integer(0))
                build.store(e.at(place, pitch, skipped), target)


def _interleave(e, count, x, x_row, y, columns):  # type: ignore[no-untyped-def]
    """Emit y[j * count + c] = x[c * x_row + j] for the `count` channels of a row."""
    build, lanes = e.builder, e.integer(e.lanes)
    groups = build.sdiv(build.add(columns, e.integer(e.lanes - 1)), lanes)
    missing = e.variable(columns)
    with e.sweep(groups, (x, lanes), (y, e.integer(count * e.lanes))) as (source, target):
        left = build.load(missing)
        build.store(build.sub(left, lanes), missing)
        mask = e.first_lanes(left)
        rows = [e.load(e.at(source, build.mul(e.integer(c), x_row)), mask) for c in range(count)]
        for i, vector in enumerate(e.interleaved(rows)):
            first = e.integer(i * e.lanes)
            stored = e.first_lanes(build.sub(build.mul(left, e.integer(count)), first))
            e.store(vector, e.at(target, first), stored)


@emitted
def from_lanes(  # type: ignore[no-untyped-def]
    e, plane, plane_start, y, y_start, y_row, channels, columns, keep
):
    """Copy vectors, one for each column, to the rows of `channels` channels.

    ``y.flat[y_start + c * y_row + j]`` gets lane c of vector j, added to it if `keep` is not 0.
    Vectors beyond the last one are read.
    """
    build = e.builder
    lanes = e.integer(e.lanes)
    # Rows are often a multiple of 4 KiB apart: then more would throw each other out of a set of
    # the first cache before they are written.
    some = min(e.lanes, _ROWS)
    adds = build.icmp_signed("!=", keep, e.integer(0))
    groups = build.sdiv(build.add(columns, e.integer(e.lanes - 1)), lanes)
    with e.loop(e.integer(e.lanes // some)) as part:
        above = build.mul(part.index, e.integer(some))
        vectors = e.at(plane, plane_start, above)
        top = e.at(y, y_start, build.mul(above, y_row))
        below = build.sub(channels, above)
        with e.loop(groups) as group:
            first = build.mul(group.index, lanes)
            left = build.sub(columns, first)
            source = e.at(vectors, build.mul(first, lanes))
            targets = e.stepping(e.at(top, first), y_row, some)
            parts = [
                e.load_part(e.at(source, e.integer(i * e.lanes)), some) for i in range(e.lanes)
            ]
            rows = e.transposed([_joined(e, parts[i::some]) for i in range(some)])
            enough = build.icmp_signed(">=", below, e.integer(some))
            whole = build.and_(build.icmp_signed(">=", left, lanes), enough)
            with build.if_else(build.and_(whole, build.not_(adds))) as (yes, no):
                with yes:
                    for vector, target in zip(rows, targets, strict=True):
                        e.store(vector, target)
                with no:
                    for i, (vector, target) in enumerate(zip(rows, targets, strict=True)):
                        exists = build.icmp_signed("<", e.integer(i), below)
                        mask = e.first_lanes(build.select(exists, left, e.integer(0)))
                        old = e.load(target, build.and_(mask, e.splat(adds)))
                        e.store(build.fadd(vector, old), target, mask)


def _joined(e: Emitter, parts: list[Any]) -> Any:
    """Return the lanes of 1, 2, 4, ... vectors one after the other."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    low, high = _joined(e, parts[:half]), _joined(e, parts[half:])
    return e.shuffle(low, high, range(2 * low.type.count))


@emitted
def fill_zero(e, plane, start, count):  # type: ignore[no-untyped-def]
    """Set `count` vectors to zero."""
    plane = e.at(plane, start)
    with e.sweep(count, (plane, e.integer(e.lanes))) as (place,):
        e.store(e.zero(), place)


@emitted
def prefetch_run(e, x, start, count):  # type: ignore[no-untyped-def]
    """Bring `count` elements from `start` on near."""
    build = e.builder
    lanes = e.integer(e.lanes)
    lines = build.sdiv(build.add(count, e.integer(e.lanes - 1)), lanes)
    with e.sweep(lines, (e.at(x, start), lanes)) as (place,):
        e.prefetch(place)


@emitted
def copy_vectors(e, x, x_start, x_step, y, y_start, y_step, count):  # type: ignore[no-untyped-def]
    """Copy `count` vectors, which begin some elements apart."""
    with e.sweep(count, (e.at(x, x_start), x_step), (e.at(y, y_start), y_step)) as (source, target):
        e.store(e.load(source), target)


@emitted
def _relay_rows(e, u, u_start, x, x_start, x_row, rows, width, first, stride, columns):  # type: ignore[no-untyped-def]
    """Set u[i, j] = x[i, first + j * stride], or 0 outside of the row, at stride 1, 2 or 4."""
    build = e.builder
    vectors = build.sdiv(build.add(columns, e.integer(e.lanes - 1)), e.integer(e.lanes))
    bands = build.sdiv(build.add(rows, e.integer(_BAND - 1)), e.integer(_BAND))
    with e.cases(build.lshr(stride, e.integer(1)), 3) as each:
        for doublings in each:
            with e.loop(bands) as band, e.loop(vectors) as v:
                above = build.mul(band.index, e.integer(_BAND))
                place = build.mul(v.index, e.integer(e.lanes))
                start = build.add(first, build.mul(place, e.integer(1 << doublings)))
                spans = [e.integer(span * e.lanes) for span in range(1 << doublings)]
                numbers = [e.lane_numbers(build.add(start, span)) for span in spans]
                masks = [e.held(e.within(number, width)) for number in numbers]
                written = e.held(e.first_lanes(build.sub(columns, place)))
                from_x = e.at(x, x_start, start, build.mul(above, x_row))
                to_u = e.at(u, u_start, place, build.mul(above, columns))
                count = e.smaller(e.integer(_BAND), build.sub(rows, above))
                with e.sweep(count, (from_x, x_row), (to_u, columns)) as (source, target):
                    places = [e.at(source, span) for span in spans]
                    parts = [e.load(*of) for of in zip(places, masks, strict=True)]
                    for of in places:
                        e.prefetch(e.at(of, build.mul(x_row, e.integer(_BAND))))
                    while len(parts) > 1:
                        even = range(0, 2 * e.lanes, 2)
                        pairs = zip(parts[::2], parts[1::2], strict=True)
                        parts = [e.shuffle(a, b, even) for a, b in pairs]
                    e.store(parts[0], target, written)


@emitted
def _zeros(e, u, start, count):  # type: ignore[no-untyped-def]
    """Set `count` elements to zero."""
    for (place,), mask in e.along(count, e.at(u, start)):
        e.store(e.zero(), place, mask)


@device
def relay_planes(  # type: ignore[no-untyped-def]
    x, n, images, c_begin, c_end, row_begin, rows, row_stride, firsts, stride, columns, u,
    u_channel, u_plane,
):  # fmt: skip
    """Write rows row_begin, row_begin + row_stride, ... of some images and channels to u.

    Row i of plane p of image m of channel c begins at
    c * u_channel + (m * planes + p) * u_plane + i * columns.
    """
    height, width = x.shape[2], x.shape[3]
    top = min(rows, max(0, (row_stride - 1 - row_begin) // row_stride))
    bottom = max(top, min(rows, (height - 1 - row_begin) // row_stride + 1))
    for c in range(c_begin, c_end):
        for image in range(images):
            source = ((n + image) * x.shape[1] + c) * height + row_begin + top * row_stride
            for plane in range(firsts.shape[0]):
                place = (c - c_begin) * u_channel
                place += (image * firsts.shape[0] + plane) * u_plane
                _zeros(u, place, top * columns)
                if stride == 1 or stride == 2 or stride == 4:
                    _relay_rows(
                        u, place + top * columns, x, source * width, row_stride * width,
                        bottom - top, width, firsts[plane], stride, columns,
                    )  # fmt: skip
                else:
                    for i in range(top, bottom):
                        for j in range(columns):
                            column = firsts[plane] + j * stride
                            inside = 0 <= column < width
                            u[place + i * columns + j] = (
                                x[n + image, c, row_begin + i * row_stride, column] if inside else 0
                            )  # fmt: skip
                _zeros(u, place + bottom * columns, (rows - bottom) * columns)
