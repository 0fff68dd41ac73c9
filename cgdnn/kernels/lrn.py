"""Local response normalization, across channels and within a channel.

Both compute y = x s^-beta, where s is one constant plus a mean of squares around x. Nothing is kept
for the backward pass: reading s and y back from memory would take longer than computing them again.

What they sum over are neighbouring rows, element by element: channels, or rows of a plane whose
places are vectors (the lane layouts); there, sums over neighbouring places follow. Planes in N, C,
H, W are brought into lanes and back. Kernels are generated for each size of the region, and for
the usual beta, whose power is computed by vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any

from llvmlite import ir

from cgdnn import machine
from cgdnn.kernels._jit import INT, REAL, Kernel, array, device, generated_device, kernel, scratch
from cgdnn.kernels.relay import from_lanes, prefetch_run, to_lanes
from cgdnn.kernels.reorder import PLACE
from cgdnn.kernels.vector import Emitter, emitted, lanes_of

_AHEAD = 2
"""Rows that are fetched ahead: caches do not foresee rows that lie far apart, or are written."""
_BLOCK = 512
"""How many elements of a row are worked on at a time, so that rings stay in the first cache."""
_LEAST = 1024
"""So many elements ahead is fetched at least."""
_UNROLLED = 7
"""Sums of up to so many rows are unrolled."""
USUAL_BETA = 0.75


def across_row(columns: int) -> int:
    """Return the elements of a block of a row of so many: whole vectors."""
    blocks = -(-columns // _BLOCK)
    return -(-columns // (blocks * PLACE)) * PLACE


def within_row(width: int, size: int) -> int:
    """Return the elements of a row of places and of the zeros beside it."""
    return (width + size - 1) * PLACE


def within_plane(height: int, width: int) -> int:
    """Return the elements that planes of this size take in lanes."""
    lanes = machine.vector_bytes() // 4
    return (height * width + lanes) * lanes


def work_rows(which: str, size: int) -> int:
    """Return the rows of working memory of a pass: backward with two rings."""
    return 2 if which == "forward" else 2 + 2 * size


def _is_single(e: Emitter) -> bool:
    return bool(e.vector.element == ir.FloatType())


def _integers(e: Emitter) -> Any:
    """Return the type of a vector's bits."""
    return ir.VectorType(ir.IntType(32 if _is_single(e) else 64), e.lanes)


def _fourth_root(e: Emitter, s: Any) -> Any:
    """Return s^(-1/4) for 2^-60 <= s <= 2^60, within 2 units in the last place.

    With h = 1 - s r^4 it is r (1 - h)^(-1/4) = r (1 + h / 4 + 5 h^2 / 32 + ...). It begins with
    |h| < 0.13, from the bits of s: read as a number they are close to a multiple of its logarithm.
    """
    build, numbers = e.builder, _integers(e)
    digits, bias = (23, 127) if _is_single(e) else (52, 1023)
    start = ir.Constant(numbers, [int(1.25 * (bias - 0.048) * 2.0**digits)] * e.lanes)
    quarter = build.lshr(build.bitcast(s, numbers), ir.Constant(numbers, [2] * e.lanes))
    root = build.bitcast(build.sub(start, quarter), e.vector)
    for degree in [6] if _is_single(e) else [6, 2]:
        factors = [prod((4 * i + 1) / (4 * i + 4) for i in range(k + 1)) for k in range(degree)]
        square = build.fmul(root, root)
        fourth = build.fmul(square, square)
        h = e.multiply_add(fourth, build.fneg(s), e.filled(1.0))
        series = e.filled(factors.pop())
        while factors:
            series = e.multiply_add(series, h, e.filled(factors.pop()))
        root = e.multiply_add(build.fmul(root, h), series, root)
    return root


def _powers(e: Emitter, s: Any) -> tuple[Any, Any]:
    """Return s^(-3/4) and 1 / s; two square roots and divisions where s is large, small or NaN."""
    build = e.builder
    low, high = (build.bitcast(e.filled(2.0**i), _integers(e)) for i in (-60, 60))
    above = build.sub(build.bitcast(s, low.type), low)
    usual = build.icmp_unsigned("<=", above, build.sub(high, low))
    flags = build.bitcast(usual, ir.IntType(e.lanes))
    power, inverse = e.variable(e.zero()), e.variable(e.zero())
    all_usual = build.icmp_signed("==", flags, ir.Constant(flags.type, -1))
    with build.if_else(all_usual) as (yes, no):
        with yes:
            root = _fourth_root(e, s)
            square = build.fmul(root, root)
            build.store(build.fmul(square, root), power)
            build.store(build.fmul(square, square), inverse)
        with no:
            root = e.square_root(s)
            divisor = build.fmul(root, e.square_root(root))
            build.store(build.fdiv(e.filled(1.0), divisor), power)
            build.store(build.fdiv(e.filled(1.0), s), inverse)
    return build.load(power), build.load(inverse)


def _counts(e: Emitter, rows: Any, size: int) -> Iterator[int | None]:
    """Yield the number of rows to sum, for the body of a branch: `size`, or None for any other."""
    if size > _UNROLLED:
        yield None
        return
    with e.builder.if_else(e.builder.icmp_signed("==", rows, e.integer(size))) as (yes, no):
        with yes:
            yield size
        with no:
            yield None


def _sum(
    e: Emitter, squares: bool, count: int | None, first: Any, step: Any, rows: Any, mask: Any
) -> Any:
    """Return the sum of `rows` vectors or their squares, `step` apart: of `count`, if known."""
    build = e.builder

    def added(total: Any, place: Any) -> Any:
        value = e.load(place, mask)
        return e.multiply_add(value, value, total) if squares else build.fadd(value, total)

    if count is None:
        slot = e.variable(e.zero())
        with e.sweep(rows, (first, step)) as (place,):
            build.store(added(build.load(slot), place), slot)
        return build.load(slot)
    total = e.zero()
    for i in range(count):
        total = added(total, e.at(first, build.mul(step, e.integer(i))))
    return total


@cache
def _emitters(size: int, squares: bool) -> tuple[Any, Any, Any, Any]:
    """Return what works on a row of sums, of as many rows of `source` that begin `step` apart.

    These are mostly `size` rows. With `squares` their squares are summed.
    """

    @emitted
    def scale(e, source, first, step, rows, offset, weight, y, start, length):  # type: ignore[no-untyped-def]
        """Write y = offset + weight times the sum."""
        offset, weight = e.splat(offset), e.splat(weight)
        for count in _counts(e, rows, size):
            for (vector, target), mask in e.along(length, e.at(source, first), e.at(y, start)):
                total = _sum(e, squares, count, vector, step, rows, mask)
                e.store(e.multiply_add(weight, total, offset), target, mask)

    @emitted
    def multiply(  # type: ignore[no-untyped-def]
        e, source, first, step, rows, offset, weight, x, y, start, length, ahead_x, ahead_y
    ):
        """Write y = x s^(-3/4), where s is offset + weight times the sum."""
        offset, weight = e.splat(offset), e.splat(weight)
        pointers = e.at(source, first), e.at(x, start), e.at(y, start)
        for count in _counts(e, rows, size):
            for (vector, known, target), mask in e.along(length, *pointers):
                e.prefetch(e.at(known, ahead_x))
                e.prefetch(e.at(target, ahead_y))
                total = _sum(e, squares, count, vector, step, rows, mask)
                power, _ = _powers(e, e.multiply_add(weight, total, offset))
                e.store(e.builder.fmul(e.load(known, mask), power), target, mask)

    @emitted
    def divide(  # type: ignore[no-untyped-def]
        e, source, first, step, rows, offset, weight, factor, x, dy, start, scaled, ratio, length,
        ahead,
    ):  # fmt: skip
        """Write scaled = dy s^(-3/4) and ratio = factor scaled x / s, likewise."""
        build, offset, weight, factor = e.builder, *map(e.splat, (offset, weight, factor))
        pointers = e.at(source, first), e.at(x, start), e.at(dy, start), scaled, ratio
        for count in _counts(e, rows, size):
            for (vector, known, gradient, target, rest), mask in e.along(length, *pointers):
                e.prefetch(e.at(known, ahead))
                e.prefetch(e.at(gradient, ahead))
                total = _sum(e, squares, count, vector, step, rows, mask)
                power, inverse = _powers(e, e.multiply_add(weight, total, offset))
                value = build.fmul(e.load(gradient, mask), power)
                e.store(value, target, mask)
                share = build.fmul(build.fmul(factor, e.load(known, mask)), inverse)
                e.store(build.fmul(value, share), rest, mask)

    @emitted
    def subtract(e, source, step, x, scaled, dx, start, length, ahead):  # type: ignore[no-untyped-def]
        """Write dx = scaled - x times the sum of `size` rows."""
        build, rows = e.builder, e.integer(size)
        count = size if size <= _UNROLLED else None
        pointers = source, e.at(x, start), scaled, e.at(dx, start)
        for (vector, known, value, target), mask in e.along(length, *pointers):
            e.prefetch(e.at(target, ahead))
            total = _sum(e, squares, count, vector, step, rows, mask)
            product = build.fmul(e.load(known, mask), total)
            e.store(build.fsub(e.load(value, mask), product), target, mask)

    return scale, multiply, divide, subtract


@emitted
def _clear(e, x, length):  # type: ignore[no-untyped-def]
    """Set a row to zero."""
    for (place,), mask in e.along(length, x):
        e.store(e.zero(), place, mask)


@device
def _ahead(rows, pitch):  # type: ignore[no-untyped-def]
    """Return how many elements ahead is prefetched: so many rows, at least."""
    return max(rows * pitch, _LEAST)


@cache
def _normalize(size: int, squares: bool, usual: bool) -> Any:
    """Return what writes a row of y from a row of sums: by vectors for the `usual` beta of 3/4."""
    scale, multiply, _, _ = _emitters(size, squares)

    def normalize(  # type: ignore[no-untyped-def]
        source, first, step, rows, offset, weight, beta, x, y, start, s, length, ahead_x, ahead_y
    ):
        if usual:
            multiply(
                source, first, step, rows, offset, weight, x, y, start, length, ahead_x, ahead_y
            )
        else:
            scale(source, first, step, rows, offset, weight, s, 0, length)
            for j in range(length):
                y[start + j] = x[start + j] * s[j] ** -beta

    return generated_device(normalize, f"normalize_{size}_{squares}_{usual}")


@cache
def _begin_gradient(size: int, squares: bool, usual: bool) -> Any:
    """Return what writes a row of scaled = dy s^-beta and of ratio = factor scaled x / s."""
    scale, _, divide, _ = _emitters(size, squares)

    def begin_gradient(  # type: ignore[no-untyped-def]
        source, first, step, rows, offset, weight, beta, factor, x, dy, start, scaled, ratio, s,
        length, ahead,
    ):  # fmt: skip
        if usual:
            divide(
                source, first, step, rows, offset, weight, factor, x, dy, start, scaled, ratio,
                length, ahead,
            )  # fmt: skip
        else:
            scale(source, first, step, rows, offset, weight, s, 0, length)
            for j in range(length):
                scaled[j] = dy[start + j] * s[j] ** -beta
                ratio[j] = scaled[j] * (factor * x[start + j] / s[j])

    return generated_device(begin_gradient, f"begin_gradient_{size}_{squares}_{usual}")


@cache
def _forward_rows(across: bool, size: int, usual: bool) -> Any:
    """Return what normalizes `count` rows of `length` elements that begin `pitch` apart.

    Sums are over `size` rows and, where not `across`, over so many places, `step` elements apart.
    """
    sum_rows, normalize = _emitters(size, True)[0], _normalize(size, across, usual)
    half = size // 2

    def forward_rows(  # type: ignore[no-untyped-def]
        x, y, start, pitch, count, length, work, step, offset, weight, beta
    ):
        # What is summed reaches `half` rows further than what is written.
        ahead_x, ahead_y = _ahead(half + _AHEAD, pitch), _ahead(_AHEAD, pitch)
        sums, s = work[0], work[1]
        _clear(sums, work.shape[1])
        for c in range(count):
            top = max(c - half, 0)
            rows = min(c + half + 1, count) - top
            place, first = start + c * pitch, start + top * pitch
            source, distance = x, pitch
            if not across:
                sum_rows(x, first, pitch, rows, 0.0, 1.0, sums, half * step, length)
                source, first, distance, rows = sums, 0, step, size
            normalize(
                source, first, distance, rows, offset, weight, beta, x, y, place, s, length,
                ahead_x, ahead_y,
            )  # fmt: skip

    return generated_device(forward_rows, f"forward_rows_{across}_{size}_{usual}")


@cache
def _backward_rows(across: bool, size: int, usual: bool) -> Any:
    """Return what writes dx for such rows; dx may be dy.

    Row by row, what is summed, multiples of dy y / s, enters a ring, and size // 2 rows behind it
    the gradient is finished. Zeros in the ring stand for rows beyond the first and last.
    """
    sum_rows, begin_gradient = _emitters(size, True)[0], _begin_gradient(size, across, usual)
    sum_ratios, _, _, subtract = _emitters(size, False)
    half = size // 2

    def backward_rows(  # type: ignore[no-untyped-def]
        x, dy, dx, start, pitch, count, length, work, step, offset, weight, beta
    ):
        ahead, row = _ahead(half + _AHEAD, pitch), work.shape[1]
        sums, s, ratios, scaled = work[0], work[1], work[2 : 2 + size], work[2 + size :]
        factor = x.dtype.type(2) * beta * weight
        _clear(work, (2 + size) * row)
        for b in range(count + half):
            if b < count:
                top = max(b - half, 0)
                rows = min(b + half + 1, count) - top
                place, first = start + b * pitch, start + top * pitch
                source, distance = x, pitch
                if not across:
                    sum_rows(x, first, pitch, rows, 0.0, 1.0, sums, half * step, length)
                    source, first, distance, rows = sums, 0, step, size
                begin_gradient(
                    source, first, distance, rows, offset, weight, beta, factor, x, dy, place,
                    scaled[b % size], ratios[b % size], s, length, ahead,
                )  # fmt: skip
            else:
                _clear(ratios[b % size], length)
            c = b - half
            if c >= 0:
                place, value = start + c * pitch, scaled[c % size]
                if across:
                    subtract(ratios, row, x, value, dx, place, length, ahead)
                else:
                    sum_ratios(ratios, 0, row, size, 0.0, 1.0, sums, half * step, length)
                    subtract(sums, step, x, value, dx, place, length, ahead)

    return generated_device(backward_rows, f"backward_rows_{across}_{size}_{usual}")


@cache
def across_forward(size: int, usual: bool) -> Kernel:
    """Return the kernel (x, y, work, alpha, beta, k, begin, end) that normalizes over channels.

    s = k + alpha / size (sum of x^2 over `size` channels), where channels beyond the first and last
    count as zero. The sum is taken afresh for each channel (Caffe's lrn_layer.cpp adds and
    subtracts along the channels, which loses digits).

    size : odd
    usual : whether beta is `USUAL_BETA`; so it is for the other kernels.

    x : array (N, C, S), with images in lanes (N / L, C, S L)
    y : array of the same shape, written
    work : scratch array (work_rows("forward", size), across_row(S))
    """
    rows = _forward_rows(True, size, usual)

    def function(x, y, work, alpha, beta, k, begin, end):  # type: ignore[no-untyped-def]
        channels, columns = x.shape[1:]
        weight = alpha / x.dtype.type(size)
        for n in range(begin, end):
            for first in range(0, columns, work.shape[1]):
                length = min(work.shape[1], columns - first)
                rows(
                    x.reshape(x.size), y.reshape(y.size), n * channels * columns + first, columns,
                    channels, length, work, 0, k, weight, beta,
                )  # fmt: skip

    function.__name__ = _name("across_forward", size, usual)
    return kernel(array(3), array(3), scratch(2), REAL, REAL, REAL, INT, INT)(function)


@cache
def across_backward(size: int, usual: bool) -> Kernel:
    """Return the kernel (x, dy, dx, work, alpha, beta, k, begin, end) of its gradient.

    dx = dy s^-beta - 2 alpha beta / size x (sum of dy y / s over `size` channels)
    """
    rows = _backward_rows(True, size, usual)

    def function(x, dy, dx, work, alpha, beta, k, begin, end):  # type: ignore[no-untyped-def]
        channels, columns = x.shape[1:]
        weight = alpha / x.dtype.type(size)
        for n in range(begin, end):
            for first in range(0, columns, work.shape[1]):
                length = min(work.shape[1], columns - first)
                rows(
                    x.reshape(x.size), dy.reshape(dy.size), dx.reshape(dx.size),
                    n * channels * columns + first, columns,
                    channels, length, work, 0, k, weight, beta,
                )  # fmt: skip

    function.__name__ = _name("across_backward", size, usual)
    return kernel(array(3), array(3), array(3), scratch(2), REAL, REAL, REAL, INT, INT)(function)


@cache
def within_lanes_forward(size: int, usual: bool) -> Kernel:
    """Return the kernel (x, y, work, alpha, beta, begin, end) that normalizes over a square.

    s = 1 + alpha (mean of x^2 over size x size places). The mean is that of average pooling with
    stride 1 and pad size // 2 (zeros count), as Caffe's lrn_layer.cpp composes it.

    x : array (planes, H, W, L)
    y : array of the same shape, written
    work : scratch array (work_rows("forward", size), within_row(W, size))
    """
    rows = _forward_rows(False, size, usual)

    def function(x, y, work, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
        height, row = x.shape[1], x.shape[2] * PLACE
        weight = alpha / x.dtype.type(size * size)
        for p in range(begin, end):
            rows(
                x.reshape(x.size), y.reshape(y.size), p * height * row, row, height, row,
                work, PLACE, 1.0, weight, beta,
            )  # fmt: skip

    function.__name__ = _name("within_lanes_forward", size, usual)
    return kernel(array(4), array(4), scratch(2), REAL, REAL, INT, INT)(function)


@cache
def within_lanes_backward(size: int, usual: bool) -> Kernel:
    """Return the kernel (x, dy, dx, work, alpha, beta, begin, end) of its gradient.

    dx = dy s^-beta - 2 alpha beta x (mean of dy y / s over size x size places)
    """
    rows = _backward_rows(False, size, usual)

    def function(x, dy, dx, work, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
        height, row = x.shape[1], x.shape[2] * PLACE
        weight = alpha / x.dtype.type(size * size)
        for p in range(begin, end):
            rows(
                x.reshape(x.size), dy.reshape(dy.size), dx.reshape(dx.size),
                p * height * row, row, height, row,
                work, PLACE, 1.0, weight, beta,
            )  # fmt: skip

    function.__name__ = _name("within_lanes_backward", size, usual)
    return kernel(array(4), array(4), array(4), scratch(2), REAL, REAL, INT, INT)(function)


@cache
def within_forward(size: int, usual: bool) -> Kernel:
    """Return the kernel (x, y, planes, work, alpha, beta, begin, end) for N, C, H, W.

    It gives the bits of `within_lanes_forward`.

    x : array (N, C, H, W)
    y : array (N, C, H, W), written
    planes : scratch array (2, within_plane(H, W))
    """
    rows = _forward_rows(False, size, usual)

    def function(x, y, planes, work, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
        channels, height, width = x.shape[1:]
        plane, lanes = height * width, lanes_of(x)
        row, weight = width * lanes, alpha / x.dtype.type(size * size)
        for first in range(begin * channels, end * channels, lanes):
            start, count = first * plane, min(end * channels - first, lanes)
            prefetch_run(x, start + plane * lanes, plane * lanes)
            prefetch_run(y, start + plane * lanes, plane * lanes)
            to_lanes(x, start, plane, count, planes[0], 0, plane)
            rows(planes[0], planes[1], 0, row, height, row, work, lanes, 1.0, weight, beta)
            from_lanes(planes[1], 0, y, start, plane, count, plane, 0)

    function.__name__ = _name("within_forward", size, usual)
    return kernel(array(4), array(4), scratch(2), scratch(2), REAL, REAL, INT, INT)(function)


@cache
def within_backward(size: int, usual: bool) -> Kernel:
    """Return the kernel (x, dy, dx, planes, work, alpha, beta, begin, end) of its gradient."""
    rows = _backward_rows(False, size, usual)

    def function(x, dy, dx, planes, work, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
        channels, height, width = x.shape[1:]
        plane, lanes = height * width, lanes_of(x)
        row, weight = width * lanes, alpha / x.dtype.type(size * size)
        for first in range(begin * channels, end * channels, lanes):
            start, count = first * plane, min(end * channels - first, lanes)
            for blob in (x, dy, dx):
                prefetch_run(blob, start + plane * lanes, plane * lanes)
            to_lanes(x, start, plane, count, planes[0], 0, plane)
            to_lanes(dy, start, plane, count, planes[1], 0, plane)
            rows(
                planes[0], planes[1], planes[1], 0, row, height, row, work, lanes, 1.0, weight, beta
            )
            from_lanes(planes[1], 0, dx, start, plane, count, plane, 0)

    function.__name__ = _name("within_backward", size, usual)
    blobs = [array(4)] * 3
    return kernel(*blobs, scratch(2), scratch(2), REAL, REAL, INT, INT)(function)


def _name(form: str, size: int, usual: bool) -> str:
    """Return the name of a generated kernel."""
    return f"lrn_{form}_{size}" if usual else f"lrn_{form}_{size}_any_beta"
