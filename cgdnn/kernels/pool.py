"""Maximum and average pooling over planes.

A window is a range of rows and columns of the padded plane; what lies in the padding counts for
nothing. With strides up to 2, a vector of outputs is computed at a time, each lane in the order of
the plain loop, so that the bits do not depend on the width; larger strides take the plain loop.

Positions are int32 indices row * width + column within a plane.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from llvmlite import ir

from cgdnn.kernels._jit import INT, array, device, kernel
from cgdnn.kernels.vector import Emitter, emitted, lanes_of

_I32 = ir.IntType(32)
_VECTOR_STRIDES = 2
"""Windows at strides up to this one are loaded as vectors."""
_AHEAD = 1024
"""How many elements ahead is prefetched."""


class _Windows:
    """The windows of one vector of outputs, of which lane i begins at column left + i stride.

    Where not all of them are `whole`, loads read only the columns [0, width) of a row.
    """

    def __init__(self, e: Emitter, left: Any, width: Any, stride: int, whole: bool) -> None:
        self.e, self.left, self.width, self.stride, self.whole = e, left, width, stride, whole
        kind = ir.VectorType(_I32, e.lanes)
        self.apart = ir.Constant(kind, [stride * lane for lane in range(e.lanes)])

    def load(self, x: Any, row: Any, column: Any, otherwise: float) -> Any:
        """Load each window's element of that column, from the row that begins at x[row]."""
        e, build = self.e, self.e.builder
        first = build.add(self.left, column)

        def part(offset: int) -> Any:
            start = build.add(first, e.integer(offset))
            place = e.at(x, row, start)
            if self.whole:
                return e.load(place)
            return e.load(place, e.within(e.lane_numbers(start), self.width), otherwise)

        if self.stride == 1:
            return part(0)
        # The second half begins one early, so as to end with the last element that is wanted.
        odd = range(e.lanes + 1, 2 * e.lanes, 2)
        return e.shuffle(part(0), part(e.lanes - 1), [*range(0, e.lanes, 2), *odd])

    def numbers(self, start: Any) -> Any:
        """Return the int32 vector start + lane * stride."""
        build = self.e.builder
        return build.add(self.e.splat(build.trunc(start, _I32)), self.apart)

    def outside(self) -> Any:
        """Return the mask of the windows that begin beyond the last column."""
        build = self.e.builder
        limit = self.e.splat(build.trunc(self.width, _I32))
        return build.icmp_signed(">=", self.numbers(self.left), limit)


@contextmanager
def _vector_of_windows(
    e: Emitter, left: Any, width: Any, columns: Any, stride: Any, count: Any
) -> Iterator[Iterator[_Windows]]:
    """Emit a block for each stride, with and without checks; chooses the one that serves."""
    build = e.builder
    last = build.add(left, build.mul(stride, e.integer(e.lanes - 1)))
    whole = build.icmp_signed(">=", count, e.integer(e.lanes))
    whole = build.and_(whole, build.icmp_signed(">=", left, e.integer(0)))
    fits = build.icmp_signed("<=", build.add(last, columns), width)
    number = build.mul(build.sub(stride, e.integer(1)), e.integer(2))
    number = build.add(number, build.zext(build.and_(whole, fits), number.type))
    with e.cases(number, 2 * _VECTOR_STRIDES) as cases:
        yield (_Windows(e, left, width, case // 2 + 1, case % 2 == 1) for case in cases)


@contextmanager
def _elements(
    windows: _Windows, x: Any, top: Any, rows: Any, columns: Any
) -> Iterator[tuple[Any, Any]]:
    """Open the loops over a window, row by row; yields where the row begins, and the column.

    What is read some rows later is prefetched: masked loads do not set the processor's own
    prefetching off (3x3 windows over 13 MB: 1.5 ms instead of 3 to 4).
    """
    e = windows.e
    with e.loop(rows) as row:
        begin = e.builder.add(top, e.builder.mul(row.index, windows.width))
        for vector in range(windows.stride):
            e.prefetch(e.at(x, begin, windows.left, e.integer(_AHEAD + vector * e.lanes)))
        with e.loop(columns) as column:
            yield begin, column.index


def _exceeds(e: Emitter, value: Any, known: Any) -> Any:
    """Return the mask of the lanes where a value is the new maximum: larger, or NaN."""
    build = e.builder
    larger = build.fcmp_ordered(">", value, known)
    return build.or_(larger, build.fcmp_unordered("uno", value, value))


@emitted
def _max_outputs(e, x, top, left, width, rows, columns, stride, y, argmax, out, count):  # type: ignore[no-untyped-def]
    """Write a vector of `count` outputs at most, from y[out] and argmax[out] on.

    The windows begin in the row at x[top]; the first one at column `left`, which may be negative.
    """
    build = e.builder
    with _vector_of_windows(e, left, width, columns, stride, count) as variants:
        for windows in variants:
            begin = windows.numbers(left)
            zero = ir.Constant(begin.type, None)
            inner = build.select(build.icmp_signed("<", begin, zero), zero, begin)
            best = e.variable(e.filled(-inf))
            where = e.variable(build.add(e.splat(build.trunc(top, _I32)), inner))
            with _elements(windows, x, top, rows, columns) as (row, column):
                value, known = windows.load(x, row, column, -inf), build.load(best)
                position = windows.numbers(build.add(build.add(row, left), column))
                better = _exceeds(e, value, known)
                build.store(build.select(better, value, known), best)
                build.store(build.select(better, position, build.load(where)), where)
            if windows.whole:
                e.store(build.load(best), e.at(y, out))
                e.store(build.load(where), e.at(argmax, out))
                continue
            outside, wanted = windows.outside(), e.first_lanes(count)
            nowhere = ir.Constant(begin.type, [-1] * e.lanes)
            e.store(build.select(outside, e.zero(), build.load(best)), e.at(y, out), wanted)
            e.store(build.select(outside, nowhere, build.load(where)), e.at(argmax, out), wanted)


@emitted
def _max_row_by_two(e, x, top, width, rows, columns, y, argmax, out, count):  # type: ignore[no-untyped-def]
    """Write a row of maxima at stride 2 without padding, from y[out] and argmax[out] on.

    The windows, of 2 or 3 columns, begin in the row at x[top]. Their columns are taken apart from
    a few vectors of each row, whose masks do not change from row to row.
    """
    build, lanes = e.builder, e.lanes
    # Where the vectors begin that are loaded from a row; which two of them make a column, and the
    # lanes of both that do.
    offsets_of = [0, lanes], [0, lanes, 2, lanes + 1]
    make_column = (
        (0, 1, [*range(0, 2 * lanes, 2)]),
        (0, 1, [*range(1, 2 * lanes, 2)]),
        (2, 3, [*range(0, lanes, 2), *range(lanes + 1, 2 * lanes, 2)]),
    )
    vectors = build.sdiv(build.add(count, e.integer(lanes - 1)), e.integer(lanes))
    with e.loop(vectors) as vector:
        first = build.mul(vector.index, e.integer(lanes))
        left = build.mul(first, e.integer(2))
        end = build.add(build.add(left, columns), e.integer(2 * lanes - 2))
        enough = build.icmp_signed("<=", build.add(first, e.integer(lanes)), count)
        whole = build.and_(enough, build.icmp_signed("<=", end, width))
        number = build.mul(build.sub(columns, e.integer(2)), e.integer(2))
        number = build.add(number, build.zext(whole, number.type))
        with e.cases(number, 4) as cases:
            for case in cases:
                offsets = offsets_of[case // 2]
                inside = build.sub(width, left)
                masks = [
                    None if case % 2 else e.first_lanes(build.sub(inside, e.integer(offset)))
                    for offset in offsets
                ]
                start = build.add(top, left)
                place = build.add(e.lane_numbers(start), e.lane_numbers(e.integer(0)))
                best, where, row_place = map(e.variable, (e.filled(-inf), place, place))
                with e.sweep(rows, (e.at(x, start), width)) as (row,):
                    for step in range(2):
                        e.prefetch(e.at(row, e.integer(_AHEAD + step * lanes)))
                    loaded = [
                        e.load(e.at(row, e.integer(offset)), mask, -inf)
                        for offset, mask in zip(offsets, masks, strict=True)
                    ]
                    value, *others = (
                        e.shuffle(loaded[a], loaded[b], order)
                        for a, b, order in make_column[: len(offsets) // 2 + 1]
                    )
                    column = ir.Constant(place.type, None)
                    for i, other in enumerate(others, start=1):
                        better = _exceeds(e, other, value)
                        value = build.select(better, other, value)
                        here = ir.Constant(place.type, [i] * lanes)
                        column = build.select(better, here, column)
                    better = _exceeds(e, value, build.load(best))
                    position = build.add(build.load(row_place), column)
                    build.store(build.select(better, value, build.load(best)), best)
                    build.store(build.select(better, position, build.load(where)), where)
                    build.store(e.shifted(build.load(row_place), width), row_place)
                wanted = None if case % 2 else e.first_lanes(build.sub(count, first))
                target = build.add(out, first)
                e.store(build.load(best), e.at(y, target), wanted)
                e.store(build.load(where), e.at(argmax, target), wanted)


@emitted
def _average_outputs(e, x, top, left, width, rows, columns, stride, height, pad, y, out, count):  # type: ignore[no-untyped-def]
    """Write a vector of `count` averages at most, from y[out] on; see `_max_outputs`.

    height : rows of the windows with their padding; pad : columns of padding that count.
    """
    build = e.builder
    with _vector_of_windows(e, left, width, columns, stride, count) as variants:
        for windows in variants:
            total = e.variable(e.zero())
            with _elements(windows, x, top, rows, columns) as (row, column):
                value = windows.load(x, row, column, 0.0)
                build.store(build.fadd(build.load(total), value), total)
            if windows.whole:
                size = e.splat(build.sitofp(build.mul(height, columns), e.vector.element))
                e.store(build.fdiv(build.load(total), size), e.at(y, out))
                continue
            across = e.splat(build.trunc(columns, _I32))
            room = build.sub(
                e.splat(build.trunc(build.add(width, pad), _I32)), windows.numbers(left)
            )
            across = build.select(build.icmp_signed("<", room, across), room, across)
            size = build.mul(across, e.splat(build.trunc(height, _I32)))
            mean = build.fdiv(build.load(total), build.sitofp(size, e.vector))
            mean = build.select(windows.outside(), e.zero(), mean)
            e.store(mean, e.at(y, out), e.first_lanes(count))


@device
def _max_window(x, top, left, rows, columns):  # type: ignore[no-untyped-def]
    """Return the first maximum of a window of the plane x (H, W) and its position."""
    if rows <= 0 or columns <= 0:
        return x.dtype.type(0), -1
    best = x[top, left]
    where = top * x.shape[1] + left
    for i in range(rows):
        row = x[top + i, left : left + columns]
        for j in range(columns):
            better = (row[j] > best) | (row[j] != row[j])
            best = row[j] if better else best
            where = (top + i) * x.shape[1] + left + j if better else where
    return best, where


@kernel(array(4), array(4), array(4, "int32"), INT, INT, INT, INT, INT, INT, INT, INT)
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
    height, width = x.shape[2], x.shape[3]
    pooled_w = y.shape[3]
    lanes = lanes_of(x)
    by_two = stride_w == 2 and pad_w == 0 and (kernel_w == 2 or kernel_w == 3)
    for n in range(begin, end):
        for c in range(x.shape[1]):
            plane, values, places = x[n, c], y[n, c], argmax[n, c]
            for ph in range(y.shape[2]):
                top = max(ph * stride_h - pad_h, 0)
                rows = min(ph * stride_h - pad_h + kernel_h, height) - top
                if by_two and rows > 0:
                    _max_row_by_two(
                        plane, top * width, width, rows, kernel_w, values, places,
                        ph * pooled_w, pooled_w,
                    )  # fmt: skip
                elif stride_w <= _VECTOR_STRIDES and rows > 0:
                    for first in range(0, pooled_w, lanes):
                        # The last vector ends with the last output, where there are enough.
                        pw = max(min(first, pooled_w - lanes), 0)
                        left = pw * stride_w - pad_w
                        out = ph * pooled_w + pw
                        _max_outputs(
                            plane, top * width, left, width, rows, kernel_w, stride_w,
                            values, places, out, pooled_w,
                        )  # fmt: skip
                else:
                    for pw in range(pooled_w):
                        left = max(pw * stride_w - pad_w, 0)
                        columns = min(pw * stride_w - pad_w + kernel_w, width) - left
                        values[ph, pw], places[ph, pw] = _max_window(
                            plane, top, left, rows, columns
                        )


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


@device
def average_plane(x, y, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w):  # type: ignore[no-untyped-def]
    """Pool one plane x (H, W) to y (PH, PW); see `pool_average_forward`."""
    height, width = x.shape
    pooled_w = y.shape[1]
    lanes = lanes_of(x)
    for ph in range(y.shape[0]):
        above = ph * stride_h - pad_h
        size = min(above + kernel_h, height + pad_h) - above
        top = max(above, 0)
        rows = min(above + kernel_h, height) - top
        if stride_w <= _VECTOR_STRIDES and rows > 0:
            for first in range(0, pooled_w, lanes):
                pw = max(min(first, pooled_w - lanes), 0)
                left = pw * stride_w - pad_w
                out = ph * pooled_w + pw
                _average_outputs(
                    x, top * width, left, width, rows, kernel_w, stride_w, size, pad_w,
                    y, out, pooled_w,
                )  # fmt: skip
        else:
            for pw in range(pooled_w):
                before = pw * stride_w - pad_w
                after = min(before + kernel_w, width + pad_w)
                left = max(before, 0)
                columns = min(after, width) - left
                total = x.dtype.type(0)
                for i in range(rows if columns > 0 else 0):
                    row = x[top + i, left : left + columns]
                    for j in range(columns):
                        total += row[j]
                y[ph, pw] = total / x.dtype.type(max(size * (after - before), 1))


@kernel(array(4), array(4), INT, INT, INT, INT, INT, INT, INT, INT)
def pool_average_forward(x, y, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end):  # type: ignore[no-untyped-def]
    """Write the sum of each window over its size, for the samples [begin, end).

    The size counts padding, but only up to pad rows and columns beyond the far border, as in
    Caffe's pooling_layer.cpp. A window wholly outside the plane gives 0.

    Parameters
    ----------
    x : array (N, C, H, W)
    y : array (N, C, PH, PW), written
    """
    for n in range(begin, end):
        for c in range(x.shape[1]):
            average_plane(x[n, c], y[n, c], kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w)


@kernel(array(4), array(4), INT, INT, INT, INT, INT, INT, INT, INT)
def pool_average_backward(dy, dx, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end):  # type: ignore[no-untyped-def]
    """Write dx (N, C, H, W) from dy (N, C, PH, PW), for the samples [begin, end)."""
    height, width = dx.shape[2], dx.shape[3]
    for n in range(begin, end):
        for c in range(dx.shape[1]):
            for h in range(height):
                for w in range(width):
                    dx[n, c, h, w] = 0
            for ph in range(dy.shape[2]):
                above = ph * stride_h - pad_h
                size = min(above + kernel_h, height + pad_h) - above
                top = max(above, 0)
                rows = min(above + kernel_h, height) - top
                for pw in range(dy.shape[3]):
                    before = pw * stride_w - pad_w
                    after = min(before + kernel_w, width + pad_w)
                    left = max(before, 0)
                    columns = min(after, width) - left
                    if rows > 0 and columns > 0:
                        share = dy[n, c, ph, pw] / dy.dtype.type(size * (after - before))
                        for i in range(rows):
                            row = dx[n, c, top + i, left : left + columns]
                            for j in range(columns):
                                row[j] += share
