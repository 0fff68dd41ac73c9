"""Maximum and average pooling over planes.

A window is a range of rows and columns of the padded plane; what lies in the padding counts for
nothing.

Maxima are taken a vector of windows of one row at a time, by kernels that are generated for the
windows' columns (`max_forward`); those of unusual windows one by one. For averages as many planes
as a vector has lanes are brought into lanes together, where plain loops serve any window. Each
lane adds in the order of the plain loops, so that the bits do not depend on the width.

Positions are int32 indices row * width + column within a plane.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import inf
from typing import Any

from llvmlite import ir

from cgdnn import machine
from cgdnn.kernels._jit import INT, Kernel, array, device, kernel, scratch
from cgdnn.kernels.relay import from_lanes, to_lanes
from cgdnn.kernels.vector import Emitter, emitted, lanes_of, sums

_I32 = ir.IntType(32)
_COLUMNS = 5
"""Kernels are generated for windows of up to so many columns."""
_AHEAD = 1024
"""What is prefetched lies this far ahead at least: masked loads leave it to us."""
_ROWS = 8
"""How many rows of maxima are written at a time, one vector of each with the same masks."""
_BAND = 512
"""How many vectors the rows of a band may take, so that they stay in the first cache."""
WINDOWS = (INT,) * 6  # kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w


@device
def inside(first, size, bound):  # type: ignore[no-untyped-def]
    """Return where the part of [first, first + size) within [0, bound) begins, and its size."""
    begin = max(first, 0)
    return begin, max(min(first + size, bound) - begin, 0)


@device
def _max_plane(x, y, argmax, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w):  # type: ignore[no-untyped-def]
    """Pool one plane x (H, W) to y and argmax (PH, PW), window by window."""
    height, width = x.shape
    for ph in range(y.shape[0]):
        top, rows = inside(ph * stride_h - pad_h, kernel_h, height)
        for pw in range(y.shape[1]):
            left, columns = inside(pw * stride_w - pad_w, kernel_w, width)
            best, where = x.dtype.type(0), -1
            for i in range(top, top + rows):
                for j in range(left, left + columns):
                    value = x[i, j]
                    better = (where < 0) | (value > best) | (value != value)
                    best = value if better else best
                    where = i * width + j if better else where
            y[ph, pw], argmax[ph, pw] = best, where


@kernel(array(4), array(4), array(4, "int32"), *WINDOWS, INT, INT)
def pool_max_forward(  # type: ignore[no-untyped-def]
    x, y, argmax, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end
):
    """Write the maximum of each window and its position, for the samples [begin, end).

    A tie goes to the first position, row by row; a NaN is the maximum of its window. A window
    wholly outside the plane gives 0 and position -1.

    Parameters
    ----------
    x : array (N, C, H, W)
    y : array (N, C, PH, PW), written
    argmax : int32 array (N, C, PH, PW), written
    """
    for n in range(begin, end):
        for c in range(x.shape[1]):
            _max_plane(
                x[n, c], y[n, c], argmax[n, c],
                kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w,
            )  # fmt: skip


def max_forward(kernel: tuple[int, int], stride: tuple[int, int]) -> Kernel:
    """Return the kernel for windows of this size; see `pool_max_forward`."""
    gaps = stride[0] > kernel[0] or stride[1] > kernel[1]
    if gaps or stride[1] > 2 or kernel[1] > _COLUMNS:
        return pool_max_forward
    return _max_forward(kernel[1], stride[1])


def _numbers(values: Iterable[int]) -> Any:
    """Return a constant vector of int32."""
    values = list(values)
    return ir.Constant(ir.VectorType(_I32, len(values)), values)


def _first_maximum(e: Emitter, vectors: list[Any]) -> tuple[Any, Any]:
    """Return the maximum of the vectors in each lane, and the number of the first that has it."""
    build = e.builder
    value, number = vectors[0], _numbers([0] * e.lanes)
    for i, other in enumerate(vectors[1:], start=1):
        larger = build.fcmp_ordered(">", other, value)
        value = build.select(larger, other, value)
        number = build.select(larger, _numbers([i] * e.lanes), number)
    return value, number


@cache
def _max_forward(size: int, stride: int) -> Kernel:
    """Return `pool_max_forward` for windows of `size` >= `stride` columns, `stride` 1 or 2."""

    @sums(1)
    def write_plane(  # type: ignore[no-untyped-def]
        e, x, height, width, kernel_h, pad_h, pad_w, stride_h, y, argmax, pooled_h, pooled_w
    ):
        """Pool one plane; returns 0, or 1 where there may be NaN: these are passed over."""
        build, lanes = e.builder, e.lanes

        # Column j of all windows is a vector that begins there, or the even or odd lanes of two.
        halves = range(0, stride * lanes, lanes)
        starts = [first + half for first in range(0, size, stride) for half in halves]
        vectors = build.sdiv(build.add(pooled_w, e.integer(lanes - 1)), e.integer(lanes))
        last = build.sub(pooled_w, e.integer(lanes))
        wanted = e.first_lanes(pooled_w)
        # Every column is in one of these vectors; their sum is NaN where an element is.
        checked = [i for i in range(len(starts)) if i // stride % lanes == 0]
        checked.append(len(starts) - 1)
        total = e.variable(e.zero())
        # What is prefetched is needed for the next rows of maxima.
        most = e.integer(_ROWS)
        bands = build.sdiv(build.add(pooled_h, e.integer(_ROWS - 1)), most)
        ahead = e.larger(build.mul(build.mul(most, stride_h), width), e.integer(_AHEAD))
        with e.loop(bands) as band, e.loop(vectors) as vector:
            first = build.mul(band.index, most)
            count = e.smaller(most, build.sub(pooled_h, first))
            # The last vector ends with the last output, where there are enough.
            pw = build.mul(vector.index, e.integer(lanes))
            pw = e.larger(e.smaller(pw, last), e.integer(0))
            left = build.sub(build.mul(pw, e.integer(stride)), pad_w)
            masks = [
                e.within(e.lane_numbers(build.add(left, e.integer(start))), width)
                for start in starts
            ]
            begin = e.shifted(_numbers(range(0, stride * lanes, stride)), left)
            negative = build.icmp_signed("<", begin, _numbers([0] * lanes))
            inner = build.select(negative, _numbers([0] * lanes), begin)
            with e.loop(count) as each:
                ph = build.add(first, each.index)
                above = build.sub(build.mul(ph, stride_h), pad_h)
                top = e.larger(above, e.integer(0))
                rows = build.sub(e.smaller(build.add(above, kernel_h), height), top)
                top = build.mul(top, width)
                best, where = e.variable(e.filled(-inf)), e.variable(e.shifted(inner, top))
                place = e.variable(e.shifted(begin, top))
                with e.sweep(rows, (e.at(x, top, left), width)) as (row,):
                    for half in halves:
                        e.prefetch(e.at(row, ahead, e.integer(half)))
                    loaded = [
                        e.load(e.at(row, e.integer(start)), mask, -inf)
                        for start, mask in zip(starts, masks, strict=True)
                    ]
                    for i in checked:
                        build.store(build.fadd(build.load(total), loaded[i]), total)
                    columns = [
                        e.shuffle(
                            loaded[j - j % stride],
                            loaded[j - j % stride + stride - 1],
                            range(j % stride, stride * lanes, stride),
                        )
                        for j in range(size)
                    ]
                    value, number = _first_maximum(e, columns)
                    larger = build.fcmp_ordered(">", value, build.load(best))
                    here = build.add(build.load(place), number)
                    build.store(build.select(larger, value, build.load(best)), best)
                    build.store(build.select(larger, here, build.load(where)), where)
                    build.store(e.shifted(build.load(place), width), place)
                out = build.add(build.mul(ph, pooled_w), pw)
                e.store(build.load(best), e.at(y, out), wanted)
                e.store(build.load(where), e.at(argmax, out), wanted)
        unknown = build.fcmp_unordered("uno", build.load(total), build.load(total))
        unknown = build.bitcast(unknown, ir.IntType(lanes))
        found = build.icmp_unsigned("!=", unknown, ir.Constant(unknown.type, 0))
        return [build.uitofp(found, ir.DoubleType())]

    def function(  # type: ignore[no-untyped-def]
        x, y, argmax, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end
    ):
        for n in range(begin, end):
            for c in range(x.shape[1]):
                plane, values, places = x[n, c], y[n, c], argmax[n, c]
                passed_over = write_plane(
                    plane, x.shape[2], x.shape[3], kernel_h, pad_h, pad_w, stride_h,
                    values, places, y.shape[2], y.shape[3],
                )[0]  # fmt: skip
                if passed_over > 0:
                    _max_plane(
                        plane, values, places,
                        kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w,
                    )  # fmt: skip

    function.__name__ = f"pool_max_forward_{size}_by_{stride}"
    return kernel(array(4), array(4), array(4, "int32"), *WINDOWS, INT, INT)(function)


@kernel(array(3), array(3, "int32"), array(3), INT, INT)
def pool_max_backward(dy, argmax, dx, begin, end):  # type: ignore[no-untyped-def]
    """Write dx (N, C, H W) as the sum of the dy (N, C, PH PW) whose maximum it was."""
    zero = dx.dtype.type(0)
    for n in range(begin, end):
        for c in range(dx.shape[1]):
            plane = dx[n, c]
            for i in range(plane.shape[0]):
                plane[i] = zero
            for o in range(dy.shape[2]):
                position = argmax[n, c, o]
                if position >= 0:
                    plane[position] += dy[n, c, o]


@kernel(array(2, "int32"), array(2), INT, INT)
def pool_max_mask(argmax, mask, begin, end):  # type: ignore[no-untyped-def]
    """Write the positions as numbers of the run's type, for the rows [begin, end)."""
    for n in range(begin, end):
        for j in range(mask.shape[1]):
            mask[n, j] = argmax[n, j]


def band_rows(width: int) -> int:
    """Return how many rows of planes of this width are in lanes at a time, at least 1."""
    return max(1, _BAND // width)


def band_scratch(width: int, kernel_h: int) -> int:
    """Return the elements that a band takes: its rows, at least those of one window."""
    return _vectors(max(band_rows(width), kernel_h) * width)


def pooled_scratch(width: int, pooled: tuple[int, int], kernel_h: int, stride_h: int) -> int:
    """Return the elements for the windows, of (PH, PW), that share rows with a band."""
    rows = min((band_rows(width) + kernel_h - 2) // stride_h + 1, pooled[0])
    return _vectors(rows * pooled[1])


def _vectors(count: int) -> int:
    """Return the elements of `count` vectors and those that `to_lanes` may overwrite."""
    lanes = machine.vector_bytes() // 4
    return (count + lanes) * lanes


@emitted
def sum_vectors(e, x, first, width, rows, columns, y, out):  # type: ignore[no-untyped-def]
    """Set vector `out` of y to the sum of some vectors of x, row by row.

    first : number of the first vector; width : vectors from one row to the next.
    """
    build, step = e.builder, e.integer(e.lanes)
    total = e.variable(e.zero())
    start = e.at(x, build.mul(first, step))
    with (
        e.sweep(rows, (start, build.mul(width, step))) as (row,),
        e.sweep(columns, (row, step)) as (place,),
    ):
        build.store(build.fadd(build.load(total), e.load(place)), total)
    e.store(build.load(total), e.at(y, build.mul(out, step)))


@emitted
def divide_vector(e, y, out, size):  # type: ignore[no-untyped-def]
    """Divide vector `out` of y by a whole number."""
    place = e.at(y, e.builder.mul(out, e.integer(e.lanes)))
    divisor = e.splat(e.builder.sitofp(size, e.vector.element))
    e.store(e.builder.fdiv(e.load(place), divisor), place)


@device
def _sharing(place, size, pad, stride, count):  # type: ignore[no-untyped-def]
    """Return the range of the windows, of `count`, that a row or column lies in."""
    return max((place + pad - size) // stride + 1, 0), min((place + pad) // stride + 1, count)


@device
def next_sharing(first, last, place, size, pad, stride, count):  # type: ignore[no-untyped-def]
    """Return the same without divisions, given it for an earlier row or column."""
    while last < count and last * stride - pad <= place:
        last += 1
    while first < last and first * stride - pad + size <= place:
        first += 1
    return first, last


@device
def window_size(index, size, pad, stride, bound):  # type: ignore[no-untyped-def]
    """Return the size of a window along one axis with its padding; 1 where it lies outside."""
    return max(min(size, bound + 2 * pad - index * stride), 1)


@kernel(array(4), array(4), *WINDOWS, INT, scratch(1), scratch(1), INT, INT)
def pool_average_forward(  # type: ignore[no-untyped-def]
    x, y, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, band_h, band, values, begin, end
):
    """Write the sum of each window over its size, for the samples [begin, end).

    The size counts padding, but only up to pad rows and columns beyond the far border, as in
    Caffe's pooling_layer.cpp. A window wholly outside the plane gives 0.

    Parameters
    ----------
    x : array (N, C, H, W)
    y : array (N, C, PH, PW), written
    band_h : band_rows(W)
    band : array (band_scratch(...),)
    values : array (pooled_scratch(...),)
        Working memory.
    """
    channels, height, width = x.shape[1:]
    pooled_h, pooled_w = y.shape[2:]
    plane, pooled = height * width, pooled_h * pooled_w
    lanes = lanes_of(x)
    step = max((band_h - kernel_h) // stride_h + 1, 1)
    for first in range(begin * channels, end * channels, lanes):
        planes = min(end * channels - first, lanes)
        for upper in range(0, pooled_h, step):
            lower = min(upper + step, pooled_h)
            reach = (lower - upper - 1) * stride_h + kernel_h
            top, rows = inside(upper * stride_h - pad_h, reach, height)
            to_lanes(x, first * plane + top * width, plane, planes, band, 0, rows * width)
            for ph in range(upper, lower):
                above, down = inside(ph * stride_h - pad_h, kernel_h, height)
                size = window_size(ph, kernel_h, pad_h, stride_h, height)
                for pw in range(pooled_w):
                    left, across = inside(pw * stride_w - pad_w, kernel_w, width)
                    out = (ph - upper) * pooled_w + pw
                    start = (above - top) * width + left
                    sum_vectors(band, start, width, down, across, values, out)
                    divide_vector(
                        values, out, size * window_size(pw, kernel_w, pad_w, stride_w, width)
                    )
            start, count = first * pooled + upper * pooled_w, (lower - upper) * pooled_w
            from_lanes(values, 0, y, start, pooled, planes, count, 0)


@kernel(array(4), array(4), *WINDOWS, INT, scratch(1), scratch(1), INT, INT)
def pool_average_backward(  # type: ignore[no-untyped-def]
    dy, dx, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, band_h, band, values, begin, end
):
    """Write dx (N, C, H, W) from dy (N, C, PH, PW), for the samples [begin, end).

    The working memory is that of `pool_average_forward`.
    """
    channels, height, width = dx.shape[1:]
    pooled_h, pooled_w = dy.shape[2:]
    plane, pooled = height * width, pooled_h * pooled_w
    lanes = lanes_of(dx)
    for first in range(begin * channels, end * channels, lanes):
        planes = min(end * channels - first, lanes)
        for top in range(0, height, band_h):
            bottom = min(top + band_h, height)
            upper, _ = _sharing(top, kernel_h, pad_h, stride_h, pooled_h)
            _, lower = _sharing(bottom - 1, kernel_h, pad_h, stride_h, pooled_h)
            start, count = first * pooled + upper * pooled_w, (lower - upper) * pooled_w
            to_lanes(dy, start, pooled, planes, values, 0, count)
            for ph in range(upper, lower):
                size = window_size(ph, kernel_h, pad_h, stride_h, height)
                for pw in range(pooled_w):
                    out = (ph - upper) * pooled_w + pw
                    divide_vector(
                        values, out, size * window_size(pw, kernel_w, pad_w, stride_w, width)
                    )
            above, below = upper, upper
            for h in range(top, bottom):
                above, below = next_sharing(above, below, h, kernel_h, pad_h, stride_h, pooled_h)
                left, right = 0, 0
                for w in range(width):
                    left, right = next_sharing(left, right, w, kernel_w, pad_w, stride_w, pooled_w)
                    sum_vectors(
                        values, (above - upper) * pooled_w + left, pooled_w,
                        below - above, right - left, band, (h - top) * width + w,
                    )  # fmt: skip
            start, count = first * plane + top * width, (bottom - top) * width
            from_lanes(band, 0, dx, start, plane, planes, count, 0)
