"""Maximum and average pooling over planes whose places are vectors (the lane layouts).

Lane by lane the results are those of `cgdnn.kernels.pool`, bit for bit: windows, sizes, positions
and the order of additions are the same. Arrays are (planes, H, W, L) and (planes, PH, PW, L); a
place holds L numbers, one vector of float32 or two of float64.

Windows of up to `_UNROLLED` rows and columns get kernels of their own, where those that lie inside
the plane are unrolled. Backward, each place of dx gathers what the windows that it lies in give to
it, in their order. Blocks of stride_h by stride_w places lie in the same windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import inf
from typing import Any

from llvmlite import ir

from cgdnn.kernels._jit import INT, Kernel, array, generated_device, kernel, scratch
from cgdnn.kernels.pool import WINDOWS, inside, next_sharing, window_size
from cgdnn.kernels.reorder import PLACE
from cgdnn.kernels.vector import Emitter, emitted, lanes_of, sums

_UNROLLED = 3
"""Kernels are generated for windows of up to so many rows and columns."""
_ADDED = 4
"""So many places are added to each other before the sum of all, on which each round waits."""

_AHEAD = 128
"""Places of dx that are fetched ahead."""

Size = tuple[int, int]


def is_unrolled(size: Size, stride: Size = (1, 1)) -> bool:
    """Tell whether windows of this size and stride, in rows and columns, have own kernels."""
    return max(*size, *stride) <= _UNROLLED


def _name(*sizes: Size | None) -> str:
    """Return what tells generated functions apart: ``3x3_2x2``, or ``any``."""
    return "_".join("any" if size is None else f"{size[0]}x{size[1]}" for size in sizes)


def _elements(
    e: Emitter, size: Size | None, start: Any, width: Any, rows: Any, columns: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield the places of a window, row by row: (pointer, how far it is behind the first one).

    For a known size each in turn, otherwise once, inside loops over rows and columns.
    """
    build = e.builder

    def place(row: Any, column: Any) -> tuple[Any, Any]:
        distance = build.add(build.mul(row, width), column)
        return e.at(start, build.mul(distance, e.integer(PLACE))), distance

    if size is not None:
        for i in range(size[0]):
            for j in range(size[1]):
                yield place(e.integer(i), e.integer(j))
    else:
        with e.loop(rows) as row, e.loop(columns) as column:
            yield place(row.index, column.index)


def _integers(e: Emitter, number: Any) -> Any:
    """Return a whole number as a vector of int32."""
    return e.splat(e.builder.trunc(number, ir.IntType(32)))


def store_maximum(e, elements, known, first, y, places):  # type: ignore[no-untyped-def]
    """Write the maximum of a window and its position, at pointers.

    elements : the places of the window, each with how far it is behind the first one
    known : whether the window has elements, and none of them is NaN
    first : position of the first element; -1 where there are none
    """
    build = e.builder
    empty = build.icmp_signed("<", first, e.integer(0))
    best = e.variable(build.select(empty, e.zero(), e.filled(-inf)))
    where = e.variable(_integers(e, e.integer(0)))  # from the first one on
    for number, (place, distance) in enumerate(elements):
        value = e.load(place)
        if known and number == 0:
            build.store(value, best)
            continue
        better = build.fcmp_ordered(">", value, build.load(best))
        if not known:
            better = build.or_(better, build.fcmp_unordered("uno", value, value))
        build.store(build.select(better, value, build.load(best)), best)
        here = _integers(e, distance)
        build.store(build.select(better, here, build.load(where)), where)
    e.store(build.load(best), y)
    e.store(e.shifted(build.load(where), first), places)


def _average(e, elements, divisor, y):  # type: ignore[no-untyped-def]
    """Write the sum of a window over `divisor` at a pointer."""
    build = e.builder
    total = e.variable(e.zero())
    for place, _ in elements:
        build.store(build.fadd(build.load(total), e.load(place)), total)
    whole = e.splat(build.sitofp(divisor, e.vector.element))
    e.store(build.fdiv(build.load(total), whole), y)


def _windows(maximum: bool, size: Size | None) -> Any:
    """Return what pools a row of windows, unrolled for a known size.

    Of that size rows may be missing, but not all. For maxima no element may be NaN then. Averages
    have no places and no position.
    """

    @emitted
    def windows(  # type: ignore[no-untyped-def]
        e, x, start, width, rows, columns, step, y, places, out, position, divisor, count
    ):
        build = e.builder

        def each(shape):  # type: ignore[no-untyped-def]
            with e.loop(count) as one:
                moved = build.mul(one.index, step)
                source = e.at(x, start, build.mul(moved, e.integer(PLACE)))
                target = build.add(out, build.mul(one.index, e.integer(PLACE)))
                elements = _elements(e, shape, source, width, rows, columns)
                if maximum:
                    known, first = shape is not None, build.add(position, moved)
                    store_maximum(e, elements, known, first, e.at(y, target), e.at(places, target))
                else:
                    _average(e, elements, divisor, e.at(y, target))

        if size is None:
            each(None)
        else:
            with e.cases(rows, size[0] + 1) as cases:
                for case in cases:
                    if case > 0:
                        each((case, size[1]))

    return windows


@sums(1)
def _unknown(e, x, start, count):  # type: ignore[no-untyped-def]
    """Return 1 where there may be a NaN among `count` places, else 0."""
    build, total = e.builder, e.variable(e.zero())
    rounds = build.sdiv(count, e.integer(_ADDED))
    whole = build.mul(rounds, e.integer(_ADDED))
    rest = e.at(x, start, build.mul(whole, e.integer(PLACE)))
    for first, times, together in (
        (e.at(x, start), rounds, _ADDED),
        (rest, build.sub(count, whole), 1),
    ):
        with e.sweep(times, (first, e.integer(together * PLACE))) as (place,):
            values = [e.load(e.at(place, e.integer(i * PLACE))) for i in range(together)]
            while len(values) > 1:
                values = [build.fadd(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
            build.store(build.fadd(build.load(total), values[0]), total)
    # A sum is NaN where an element is.
    unknown = build.fcmp_unordered("uno", build.load(total), build.load(total))
    lanes = build.bitcast(unknown, ir.IntType(e.lanes))
    found = build.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, 0))
    return [build.uitofp(found, ir.DoubleType())]


def _forward(maximum: bool, size: Size | None) -> Any:
    """Return what pools planes: windows of `size` unrolled, but for those that lack columns."""
    unrolled, any_window = _windows(maximum, size), _windows(maximum, None)
    checks = maximum and size is not None

    def pool(  # type: ignore[no-untyped-def]
        x, y, places, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end
    ):
        height, width = x.shape[1:3]
        pooled_h, pooled_w = y.shape[1:3]
        first = min(-(-pad_w // stride_w), pooled_w)
        last = max(min((width + pad_w - kernel_w) // stride_w + 1, pooled_w), first)
        for p in range(begin, end):
            for part in range(0, PLACE, lanes_of(x)):
                # Rows of the plane that have been searched for NaN, and whether one was found.
                searched, unknown = 0, 0.0
                for ph in range(pooled_h):
                    top, rows = inside(ph * stride_h - pad_h, kernel_h, height)
                    source = (p * height + top) * width
                    if checks and top + rows > searched:
                        begins = (p * height + searched) * width * PLACE + part
                        unknown += _unknown(x, begins, (top + rows - searched) * width)[0]
                        searched = top + rows
                    down = window_size(ph, kernel_h, pad_h, stride_h, height)
                    out = (p * pooled_h + ph) * pooled_w
                    pw = 0
                    while pw < pooled_w:
                        left, columns = inside(pw * stride_w - pad_w, kernel_w, width)
                        divisor = down * window_size(pw, kernel_w, pad_w, stride_w, width)
                        start, target = (source + left) * PLACE + part, (out + pw) * PLACE + part
                        position = top * width + left if rows * columns > 0 else -1
                        if pw == first and pw < last and rows > 0 and unknown == 0:
                            unrolled(
                                x, start, width, rows, columns, stride_w,
                                y, places, target, position, divisor, last - first,
                            )  # fmt: skip
                            pw = last
                        else:
                            any_window(
                                x, start, width, rows, columns, stride_w,
                                y, places, target, position, divisor, 1,
                            )  # fmt: skip
                            pw += 1

    return generated_device(pool, f"pool_{_name(size)}_{maximum}")


def _contribution(e: Emitter, total: Any, dy: Any, places: Any, numbers: Any) -> Any:
    """Return `total` with dy added: everywhere, or in the lanes where places are `numbers`."""
    added = e.builder.fadd(total, dy)
    if places is None:
        return added
    here = e.builder.icmp_signed("==", places, numbers)
    return e.builder.select(here, added, total)


def _blocks(size: Size, stride: Size, routed: bool, masked: bool) -> Any:
    """Return what writes `count` blocks of a row of them; see `_spread_blocks`.

    masked : whether windows may be missing and parts of the blocks lie outside the plane.
    """
    kernel_h, kernel_w = size
    stride_h, stride_w = stride
    # Windows that a block lies in, by how far they begin before its own one.
    sharing = [
        (i, j)
        for i in reversed(range(-(-kernel_h // stride_h)))
        for j in reversed(range(-(-kernel_w // stride_w)))
    ]

    @emitted
    def blocks(  # type: ignore[no-untyped-def]
        e, dx, plane, height, width, dy, pooled, pooled_h, pooled_w, places, pad_h, pad_w,
        ph, first, count,
    ):  # fmt: skip
        build = e.builder

        def on(index: Any, bound: Any) -> Any:
            return build.icmp_unsigned("<", index, bound)

        top = build.sub(build.mul(ph, e.integer(stride_h)), pad_h)
        # Rows of dx come near before they are written: caches do not foresee them well.
        ahead = e.integer(_AHEAD * PLACE)
        with e.loop(count) as block:
            pw = build.add(first, block.index)
            left = build.sub(build.mul(pw, e.integer(stride_w)), pad_w)
            corner = _integers(e, build.add(build.mul(top, width), left))
            given = {}
            for i, j in sharing:
                row, column = build.sub(ph, e.integer(i)), build.sub(pw, e.integer(j))
                window = build.add(build.mul(row, pooled_w), column)
                exists = build.and_(on(row, pooled_h), on(column, pooled_w))
                if masked:
                    window = build.select(exists, window, e.integer(0))
                place = build.add(pooled, build.mul(window, e.integer(PLACE)))
                number = e.load_integers(e.at(places, place)) if routed else None
                value = e.load(e.at(dy, place))
                if masked:
                    # A missing window adds 0. Not by a load that is masked off: outside of what is
                    # mapped, that takes the processor hundreds of cycles.
                    value = build.select(exists, value, e.zero())
                given[i, j] = value, number
            for r in range(stride_h):
                for c in range(stride_w):
                    row, column = build.add(top, e.integer(r)), build.add(left, e.integer(c))
                    number = build.add(build.mul(row, width), column)
                    distance = build.add(build.mul(e.integer(r), width), e.integer(c))
                    numbers = build.add(corner, _integers(e, distance))
                    total = e.zero()
                    for i, j in sharing:
                        if i * stride_h + r < kernel_h and j * stride_w + c < kernel_w:
                            total = _contribution(e, total, *given[i, j], numbers)
                    out = e.at(dx, plane, build.mul(number, e.integer(PLACE)))
                    e.prefetch(e.at(out, ahead))
                    if masked:
                        with build.if_then(build.and_(on(row, height), on(column, width))):
                            e.store(total, out)
                    else:
                        e.store(total, out)

    return blocks


def _spread_blocks(size: Size, stride: Size, routed: bool) -> Any:
    """Return what writes a plane of dx, block by block; see `_spread`."""
    wholly_inside = _blocks(size, stride, routed, masked=False)
    at_borders = _blocks(size, stride, routed, masked=True)

    def spread(  # type: ignore[no-untyped-def]
        dx, plane, height, width, dy, pooled, pooled_h, pooled_w, places,
        kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w,
    ):  # fmt: skip
        # Blocks from first to last lie in the plane, and in windows that all exist.
        across = -(-(width + pad_w) // stride_w)
        first = min(max((kernel_w - 1) // stride_w, -(-pad_w // stride_w)), across)
        last = max(min(pooled_w, (width + pad_w) // stride_w), first)
        for ph in range(-(-(height + pad_h) // stride_h)):
            top = ph * stride_h - pad_h
            exist = (kernel_h - 1) // stride_h <= ph < pooled_h
            within = top >= 0 and top + stride_h <= height
            left, right = (first, last) if exist and within else (across, across)
            wholly_inside(
                dx, plane, height, width, dy, pooled, pooled_h, pooled_w, places, pad_h, pad_w,
                ph, left, right - left,
            )  # fmt: skip
            for begin, end in ((0, left), (right, across)):
                at_borders(
                    dx, plane, height, width, dy, pooled, pooled_h, pooled_w, places, pad_h, pad_w,
                    ph, begin, end - begin,
                )  # fmt: skip

    return generated_device(spread, f"spread_{_name(size, stride)}_{routed}")


def _spread_windows(routed: bool) -> Any:
    """Return what writes a plane of dx for any windows, place by place; see `_spread`."""

    @emitted
    def gather(  # type: ignore[no-untyped-def]
        e, dx, plane, number, count, dy, pooled, first, pooled_w, rows, columns, places
    ):
        """Write `count` places that lie in rows x columns windows from number `first` on."""
        build = e.builder
        start = build.add(pooled, build.mul(first, e.integer(PLACE)))
        with e.loop(count) as one:
            here = build.add(number, one.index)
            total, numbers = e.variable(e.zero()), _integers(e, here)
            for window, distance in _elements(e, None, e.at(dy, start), pooled_w, rows, columns):
                given = None
                if routed:
                    moved = build.mul(distance, e.integer(PLACE))
                    given = e.load_integers(e.at(places, start, moved))
                added = _contribution(e, build.load(total), e.load(window), given, numbers)
                build.store(added, total)
            e.store(build.load(total), e.at(dx, plane, build.mul(here, e.integer(PLACE))))

    def spread(  # type: ignore[no-untyped-def]
        dx, plane, height, width, dy, pooled, pooled_h, pooled_w, places,
        kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w,
    ):  # fmt: skip
        above, below = 0, 0
        for h in range(height):
            above, below = next_sharing(above, below, h, kernel_h, pad_h, stride_h, pooled_h)
            left, right, w = 0, 0, 0
            while w < width:
                left, right = next_sharing(left, right, w, kernel_w, pad_w, stride_w, pooled_w)
                # Up to there columns lie in the same windows.
                until = width
                if right < pooled_w:
                    until = min(until, right * stride_w - pad_w)
                if left < right:
                    until = min(until, left * stride_w - pad_w + kernel_w)
                gather(
                    dx, plane, h * width + w, until - w, dy, pooled, above * pooled_w + left,
                    pooled_w, below - above, right - left, places,
                )  # fmt: skip
                w = until

    return generated_device(spread, f"spread_any_{routed}")


def _spread(size: Size | None, stride: Size | None, routed: bool) -> Any:
    """Return what writes a plane of dx from dy: `routed` by places, or each dy to its window."""
    if size is None or stride is None:
        return _spread_windows(routed)
    return _spread_blocks(size, stride, routed)


def max_forward(size: Size) -> Kernel:
    """Return the kernel for windows of this size, with the arguments of `pool_max_forward`.

    Other than those, x is (planes, H, W, L), y and argmax are (planes, PH, PW, L), and [begin, end)
    is a range of planes; so it is for the other kernels.
    """
    return _max_forward(size if is_unrolled(size) else None)


def max_backward(size: Size, stride: Size) -> Kernel:
    """Return the kernel (dy, argmax, dx, windows..., begin, end) that writes dx from dy."""
    small = is_unrolled(size, stride)
    return _max_backward(size if small else None, stride if small else None)


def average_forward(size: Size) -> Kernel:
    """Return the kernel (x, y, windows..., begin, end) that averages windows of this size."""
    return _average_forward(size if is_unrolled(size) else None)


def average_backward(size: Size, stride: Size) -> Kernel:
    """Return the kernel (dy, dx, windows..., values, begin, end) that writes dx from dy.

    values : scratch array (PH PW L,)
    """
    small = is_unrolled(size, stride)
    return _average_backward(size if small else None, stride if small else None)


@cache
def _max_forward(size: Size | None) -> Kernel:
    pool = _forward(True, size)

    def function(  # type: ignore[no-untyped-def]
        x, y, argmax, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end
    ):
        pool(x, y, argmax, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end)

    function.__name__ = f"max_forward_{_name(size)}"
    return kernel(array(4), array(4), array(4, "int32"), *WINDOWS, INT, INT)(function)


@cache
def _average_forward(size: Size | None) -> Kernel:
    pool = _forward(False, size)

    def function(  # type: ignore[no-untyped-def]
        x, y, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end
    ):
        pool(x, y, 0, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end)

    function.__name__ = f"average_forward_{_name(size)}"
    return kernel(array(4), array(4), *WINDOWS, INT, INT)(function)


@cache
def _max_backward(size: Size | None, stride: Size | None) -> Kernel:
    spread = _spread(size, stride, routed=True)

    def function(  # type: ignore[no-untyped-def]
        dy, argmax, dx, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end
    ):
        height, width = dx.shape[1:3]
        pooled_h, pooled_w = dy.shape[1:3]
        for p in range(begin, end):
            for part in range(0, PLACE, lanes_of(dx)):
                spread(
                    dx, p * height * width * PLACE + part, height, width,
                    dy, p * pooled_h * pooled_w * PLACE + part, pooled_h, pooled_w, argmax,
                    kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w,
                )  # fmt: skip

    function.__name__ = f"max_backward_{_name(size, stride)}"
    return kernel(array(4), array(4, "int32"), array(4), *WINDOWS, INT, INT)(function)


@emitted
def _divide(e, dy, start, values, out, divisor, count):  # type: ignore[no-untyped-def]
    """Write `count` places of dy over a whole number to `values`."""
    build, step = e.builder, e.integer(PLACE)
    whole = e.splat(build.sitofp(divisor, e.vector.element))
    with e.sweep(count, (e.at(dy, start), step), (e.at(values, out), step)) as (source, target):
        e.store(build.fdiv(e.load(source), whole), target)


@cache
def _average_backward(size: Size | None, stride: Size | None) -> Kernel:
    spread = _spread(size, stride, routed=False)

    def function(  # type: ignore[no-untyped-def]
        dy, dx, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, values, begin, end
    ):
        height, width = dx.shape[1:3]
        pooled_h, pooled_w = dy.shape[1:3]
        # So many windows of a row do not end beyond the padding.
        full = max(min((width + 2 * pad_w - kernel_w) // stride_w + 1, pooled_w), 0)
        for p in range(begin, end):
            for part in range(0, PLACE, lanes_of(dx)):
                start = p * pooled_h * pooled_w * PLACE + part
                for ph in range(pooled_h):
                    down = window_size(ph, kernel_h, pad_h, stride_h, height)
                    row = ph * pooled_w * PLACE
                    _divide(dy, start + row, values, row, down * kernel_w, full)
                    for pw in range(full, pooled_w):
                        place = row + pw * PLACE
                        divisor = down * window_size(pw, kernel_w, pad_w, stride_w, width)
                        _divide(dy, start + place, values, place, divisor, 1)
                spread(
                    dx, p * height * width * PLACE + part, height, width,
                    values, 0, pooled_h, pooled_w, 0,
                    kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w,
                )  # fmt: skip

    function.__name__ = f"average_backward_{_name(size, stride)}"
    return kernel(array(4), array(4), *WINDOWS, scratch(1), INT, INT)(function)
