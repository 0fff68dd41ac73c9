"""Phases of images: a strided convolution of two spatial axes as one of stride 1.

Places of an axis that have the same remainder, counted from the padding on, are a phase. A tap
reads one phase only, and from one output place to the next it goes on to the neighbour there. So
with the planes of the phases as channels ::

    x'[n, (c, a, b), i, j] = x[n, c, stride i + a - pad_h, stride j + b - pad_w]
    w'[o, (c, a, b), i, j] = w[o, c, stride i + a, stride j + b]

where what lies outside of x and w is 0, w * x is w' * x' with stride 1 and without padding. Of the
phases only those below the size of the kernel are needed.

Winograd's algorithm rounds w' * x' as it does any product of its taps, in float32 against float64,
rms over the largest magnitude: up to 8e-7 for 3 x 3 taps, of kernels of 11 x 11 with stride 4 and
of 5 x 5 with stride 2, and up to 1.5e-6 for 4 x 4, of kernels of 7 x 7 with stride 2 (directly:
1e-7 and 2.5e-7).
"""

from __future__ import annotations

from llvmlite import ir

from cgdnn.kernels._jit import INT, REAL, array, device, kernel
from cgdnn.kernels.relay import relay_planes
from cgdnn.kernels.reorder import PLACE
from cgdnn.kernels.vector import emitted

LANE_STRIDES = tuple(stride for stride in (2, 4) if 2 * stride <= PLACE)
"""Strides whose phases can be brought into lanes: half of them, or less, fills a vector."""


@kernel(array(4), array(4), array(1, "int64"), INT, INT, INT, INT, INT)
def phases_of_image(x, y, firsts, stride_h, stride_w, pad_h, begin, end):  # type: ignore[no-untyped-def]
    """Write the phases of the images [begin, end).

    Parameters
    ----------
    x : array (N, C, H, W)
    y : array (N, C phases phases, rows, columns)
    firsts : array of int64 (phases,)
        The column of x that each phase begins with; below 0 in the padding.
    stride_h, stride_w, pad_h : int
    """
    phases = firsts.shape[0]
    rows, columns = y.shape[2], y.shape[3]
    area = rows * columns
    for n in range(begin, end):
        for a in range(phases):
            relay_planes(
                x, n, 1, 0, x.shape[1], a - pad_h, rows, stride_h, firsts, stride_w, columns,
                y.reshape(y.size)[(n * y.shape[1] + a * phases) * area :],
                phases * phases * area, area,
            )  # fmt: skip


@kernel(array(4), array(5), INT, INT, INT, INT, INT)
def phases_in_lanes(x, y, stride, pad_h, pad_w, begin, end):  # type: ignore[no-untyped-def]
    """Write all phases of the images [begin, end) with channels in the lanes.

    Parameters
    ----------
    x : array (N, C, H, W)
    y : array (N, C stride stride / L, rows, columns, L)
        L is the floats of a vector.
    stride : int
        One of `LANE_STRIDES`.
    pad_h, pad_w : int
    """
    channels, height, width = x.shape[1:]
    blocks, rows, columns, place = y.shape[1:]
    for n in range(begin, end):
        for block in range(blocks):
            for i in range(rows):
                _row_in_lanes(
                    x, n * channels * height * width, height, width, block * (place // stride),
                    stride, i * stride - pad_h, pad_w,
                    y, ((n * blocks + block) * rows + i) * columns * place, columns,
                )  # fmt: skip


@emitted
def _row_in_lanes(  # type: ignore[no-untyped-def]
    e, x, image, height, width, first, stride, top, pad, y, target, columns
):
    """Write a row of L planes: of all phases b of the pairs (c, a) with numbers from `first` on.

    What such a pair gives to a column lies together in a row of x. So squares are transposed whose
    elements are as many floats.
    """
    build = e.builder
    x, y = e.at(x, image), e.at(y, target)
    with e.cases(build.lshr(stride, e.integer(2)), len(LANE_STRIDES)) as each:
        for case in each:
            size = LANE_STRIDES[case]
            count = e.lanes // size
            groups = build.sdiv(build.add(columns, e.integer(count - 1)), e.integer(count))
            for lane in range(0, PLACE, e.lanes):
                sources, exist = [], []
                for pair in range(lane // size, lane // size + count):
                    number = build.add(first, e.integer(pair))
                    channel = build.sdiv(number, e.integer(size))
                    row = build.add(top, build.srem(number, e.integer(size)))
                    exists = build.icmp_unsigned("<", row, height)
                    above = build.add(build.mul(channel, height), row)
                    # Loads that are masked off take long where no memory is.
                    above = build.select(exists, above, e.integer(0))
                    sources.append(e.at(x, build.mul(above, width)))
                    exist.append(exists)
                with e.loop(groups) as group:
                    column = build.mul(group.index, e.integer(count))
                    start = build.sub(build.mul(column, e.integer(size)), pad)
                    inside = e.within(e.lane_numbers(start), width)
                    none = ir.Constant(inside.type, None)
                    vectors = [
                        e.load(e.at(source, start), build.select(exists, inside, none))
                        for source, exists in zip(sources, exist, strict=True)
                    ]
                    for i, vector in enumerate(e.transposed(vectors, size)):
                        place = build.add(column, e.integer(i))
                        with build.if_then(build.icmp_signed("<", place, columns)):
                            at = build.mul(place, e.integer(PLACE))
                            e.store(vector, e.at(y, at, e.integer(lane)))


@kernel(array(4), array(4), INT, INT, INT, INT, INT, INT, INT)
def phases_to_image(x, y, phases, stride_h, stride_w, pad_h, pad_w, begin, end):  # type: ignore[no-untyped-def]
    """Write the images [begin, end) from their phases; what is in none of them becomes 0.

    Parameters
    ----------
    x : array (N, C phases phases, rows, columns)
    y : array (N, C, H, W)
    phases : int
        On each axis.
    stride_h, stride_w, pad_h, pad_w : int
    """
    rows, columns = x.shape[2], x.shape[3]
    for n in range(begin, end):
        for c in range(y.shape[1]):
            for r in range(y.shape[2]):
                i, a = (r + pad_h) // stride_h, (r + pad_h) % stride_h
                planes = phases if a < phases and i < rows else 0
                start = (((n * y.shape[1] + c) * phases + a) * phases * rows + i) * columns
                _interleave(
                    x, start * min(planes, 1), rows * columns, planes, columns,
                    y, n, c, r, stride_w, pad_w,
                )  # fmt: skip


@device
def _interleave(x, start, plane, planes, columns, y, n, c, r, stride, pad):  # type: ignore[no-untyped-def]
    """Write a row of y from rows of some phases, which begin `plane` elements apart."""
    width = y.shape[3]
    if stride == 2 or stride == 4:
        target = ((n * y.shape[1] + c) * y.shape[2] + r) * width
        _interleave_vectors(x, start, plane, planes, columns, y, target, width, stride, pad)
    else:
        for k in range(width):
            j, b = (k + pad) // stride, (k + pad) % stride
            inside = b < planes and j < columns
            y[n, c, r, k] = x.reshape(x.size)[start + b * plane + j] if inside else 0


@emitted
def _interleave_vectors(e, x, start, plane, planes, columns, y, target, width, stride, pad):  # type: ignore[no-untyped-def]
    """Do that for a stride of 2 or 4."""
    build = e.builder
    x, y = e.at(x, start), e.at(y, target)
    last = build.sub(build.add(width, pad), e.integer(1))
    spans = build.sdiv(last, build.mul(stride, e.integer(e.lanes)))
    with e.cases(build.lshr(stride, e.integer(2)), 2) as each:
        for case in each:
            count = 2 << case
            with e.loop(build.add(spans, e.integer(1))) as span:
                first = build.mul(span.index, e.integer(e.lanes))
                left = build.sub(columns, first)
                vectors = []
                for b in range(count):
                    exists = build.icmp_signed("<", e.integer(b), planes)
                    mask = e.first_lanes(build.select(exists, left, e.integer(0)))
                    place = build.select(exists, build.mul(e.integer(b), plane), e.integer(0))
                    vectors.append(e.load(e.at(x, first, place), mask))
                column = build.sub(build.mul(first, stride), pad)
                for i, vector in enumerate(e.interleaved(vectors)):
                    here = build.add(column, e.integer(i * e.lanes))
                    e.store(vector, e.at(y, here), e.within(e.lane_numbers(here), width))


@kernel(array(2), array(2), array(1, "int64"), REAL, INT, INT)
def phases_of_taps(x, y, table, keep, begin, end):  # type: ignore[no-untyped-def]
    """Set y[i, t], or add to it if `keep` is not 0, x[i, table[t]] for i in [begin, end).

    Parameters
    ----------
    x : array (R, taps)
        Those of a filter and a channel.
    y : array (R, other taps)
    table : array of int64 (other taps,)
        -1 where there is nothing, as if x were 0.
    keep : real
    """
    for i in range(begin, end):
        for t in range(table.shape[0]):
            if keep == 0:
                y[i, t] = 0
            if table[t] >= 0:
                y[i, t] += x[i, table[t]]
