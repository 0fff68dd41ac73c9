"""Local response normalization, across channels and within a channel.

Both compute y = x s^-beta, where s is one constant plus a mean of squares around x; they keep s for
the backward pass.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from cgdnn import machine
from cgdnn.kernels._jit import INT, REAL, array, device, kernel, scratch
from cgdnn.kernels.pool import sum_vectors
from cgdnn.kernels.relay import from_lanes, to_lanes
from cgdnn.kernels.vector import Emitter, emitted, lanes_of

_AHEAD = 1024
"""How many elements ahead is prefetched, where the processor does not see through the rows."""


def within_scratch(height: int, width: int) -> int:
    """Return the elements that planes of this size take in lanes."""
    lanes = machine.vector_bytes() // 4
    return (height * width + lanes) * lanes


def _fourth_root(e: Emitter, s: Any) -> Any:
    """Return s^(-1/4) for 2^-60 <= s <= 2^60, within 2 units in the last place.

    By Newton's method for r^-4 = s, r <- r (5 - s r^4) / 4, whose error is 5/2 times the square of
    the last one. It begins within 0.032, from the bits of s: read as a number they are close to a
    multiple of its logarithm.
    """
    build, single = e.builder, e.vector.element == ir.FloatType()
    digits, bias = (23, 127) if single else (52, 1023)
    numbers = ir.VectorType(ir.IntType(32 if single else 64), e.lanes)
    start = ir.Constant(numbers, [int(1.25 * (bias - 0.048) * 2.0**digits)] * e.lanes)
    quarter = build.lshr(build.bitcast(s, numbers), ir.Constant(numbers, [2] * e.lanes))
    root = build.bitcast(build.sub(start, quarter), e.vector)
    factor = build.fmul(s, e.filled(-0.25))
    for _ in range(3 if single else 4):
        square = build.fmul(root, root)
        change = e.multiply_add(build.fmul(square, square), factor, e.filled(1.25))
        root = build.fmul(root, change)
    return root


def _powers(e: Emitter, s: Any) -> tuple[Any, Any]:
    """Return s^(-3/4) and 1 / s; two square roots and divisions where s is large, small or NaN."""
    build = e.builder
    usual = build.and_(
        build.fcmp_ordered(">=", s, e.filled(2.0**-60)),
        build.fcmp_ordered("<=", s, e.filled(2.0**60)),
    )
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


@emitted
def _multiply_three_quarters(e, x, s, y, length):  # type: ignore[no-untyped-def]
    """Write y = x s^(-3/4)."""
    for (source, scale, target), mask in e.along(length, x, s, y):
        power, _ = _powers(e, e.load(scale, mask, 1.0))
        e.store(e.builder.fmul(e.load(source, mask), power), target, mask)


@emitted
def _divide_three_quarters(e, dy, y, s, dx, ratio, factor, length):  # type: ignore[no-untyped-def]
    """Write dx = dy s^(-3/4) and ratio = factor dy y / s."""
    build, factor = e.builder, e.splat(factor)
    for (gradient, known, scale, target, rest), mask in e.along(length, dy, y, s, dx, ratio):
        for pointer in gradient, known, scale:
            e.prefetch(e.at(pointer, e.integer(_AHEAD)))
        power, inverse = _powers(e, e.load(scale, mask, 1.0))
        value = e.load(gradient, mask)
        product = build.fmul(build.fmul(factor, value), e.load(known, mask))
        e.store(build.fmul(value, power), target, mask)
        e.store(build.fmul(product, inverse), rest, mask)


@device
def _normalize(x, s, beta, y):  # type: ignore[no-untyped-def]
    """Write y = x s^-beta for one row."""
    if beta == x.dtype.type(0.75):
        _multiply_three_quarters(x, s, y, x.shape[0])
    else:
        for j in range(x.shape[0]):
            y[j] = x[j] * s[j] ** -beta


@device
def _begin_gradient(dy, y, s, beta, factor, dx, ratio):  # type: ignore[no-untyped-def]
    """Write dx = dy s^-beta and ratio = factor dy y / s for one row."""
    if beta == y.dtype.type(0.75):
        _divide_three_quarters(dy, y, s, dx, ratio, factor, y.shape[0])
    else:
        for j in range(y.shape[0]):
            dx[j] = dy[j] * s[j] ** -beta
            ratio[j] = factor * dy[j] * y[j] / s[j]


@emitted
def _sum_squares(e, x, start, rows, columns, offset, weight, s, target):  # type: ignore[no-untyped-def]
    """Write s[target + j] = offset + weight times the sum of x^2 over some rows, in column j."""
    build, offset, weight = e.builder, e.splat(offset), e.splat(weight)
    ahead = build.add(build.mul(build.sub(rows, e.integer(1)), columns), e.integer(_AHEAD))
    for (source, result), mask in e.along(columns, e.at(x, start), e.at(s, target)):
        e.prefetch(e.at(source, ahead))
        total = e.variable(offset)
        with e.sweep(rows, (source, columns)) as (row,):
            value = e.load(row, mask)
            weighted = build.fmul(weight, value)
            build.store(e.multiply_add(weighted, value, build.load(total)), total)
        e.store(build.load(total), result, mask)


@emitted
def _subtract_sums(e, x, dx, target, ratio, start, rows, columns):  # type: ignore[no-untyped-def]
    """Subtract x[target + j] times the sum of some rows of `ratio` from dx[target + j]."""
    build = e.builder
    pointers = e.at(x, target), e.at(dx, target), e.at(ratio, start)
    for (known, result, source), mask in e.along(columns, *pointers):
        e.prefetch(e.at(known, e.integer(_AHEAD)))
        total = e.variable(e.zero())
        with e.sweep(rows, (source, columns)) as (row,):
            build.store(build.fadd(build.load(total), e.load(row, mask)), total)
        product = build.fmul(e.load(known, mask), build.load(total))
        e.store(build.fsub(e.load(result, mask), product), result, mask)


@kernel(array(3), array(3), array(3), INT, REAL, REAL, REAL, INT, INT)
def lrn_across_forward(x, y, s, size, alpha, beta, k, begin, end):  # type: ignore[no-untyped-def]
    """Normalize over channels: s = k + alpha / size (sum of x^2 over `size` channels).

    Channels beyond the first and last count as zero. The sum is taken afresh for each channel
    (Caffe's lrn_layer.cpp adds and subtracts along the channels, which loses digits).

    Parameters
    ----------
    x : array (N, C, S)
    y, s : array (N, C, S), written
    """
    channels, columns = x.shape[1], x.shape[2]
    weight = alpha / x.dtype.type(size)
    half = size // 2
    for n in range(begin, end):
        for c in range(channels):
            first = max(c - half, 0)
            rows = min(c + half + 1, channels) - first
            _sum_squares(
                x[n], first * columns, rows, columns, k, weight, s[n], c * columns,
            )  # fmt: skip
            _normalize(x[n, c], s[n, c], beta, y[n, c])


@kernel(array(3), array(3), array(3), array(3), array(3), scratch(2), INT, REAL, REAL, INT, INT)
def lrn_across_backward(x, y, s, dy, dx, ratio, size, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
    """Compute dx = dy s^-beta - 2 alpha beta / size x (sum of dy y / s over `size` channels).

    Parameters
    ----------
    x, y, s, dy : array (N, C, S)
    dx : array (N, C, S), written
    ratio : array (C, S)
        Working memory for dy y / s of one sample.
    """
    channels, columns = x.shape[1], x.shape[2]
    factor = x.dtype.type(2) * alpha * beta / x.dtype.type(size)
    half = size // 2
    for n in range(begin, end):
        begun = 0
        for c in range(channels):
            first, last = max(c - half, 0), min(c + half + 1, channels)
            for i in range(begun, last):
                _begin_gradient(dy[n, i], y[n, i], s[n, i], beta, factor, dx[n, i], ratio[i])
            begun, rows = last, last - first
            _subtract_sums(x[n], dx[n], c * columns, ratio, first * columns, rows, columns)


@emitted
def _square_vectors(e, x, count):  # type: ignore[no-untyped-def]
    """Square `count` vectors in place."""
    with e.sweep(count, (x, e.integer(e.lanes))) as (place,):
        value = e.load(place)
        e.store(e.builder.fmul(value, value), place)


@device
def _sum_around(work, height, width, size):  # type: ignore[no-untyped-def]
    """Set work[1] to the sums of the vectors of work[0] over squares around each place."""
    half = size // 2
    for h in range(height):
        top = max(h - half, 0)
        rows = min(h + half + 1, height) - top
        for w in range(width):
            left = max(w - half, 0)
            columns = min(w + half + 1, width) - left
            sum_vectors(work[0], top * width + left, width, rows, columns, work[1], h * width + w)


@kernel(array(4), array(4), array(4), scratch(2), INT, REAL, REAL, INT, INT)
def lrn_within_forward(x, y, s, work, size, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
    """Normalize over a square in the plane: s = 1 + alpha (mean of x^2 over size x size).

    The mean is that of average pooling with stride 1 and pad size // 2 (zeros count), as Caffe's
    lrn_layer.cpp composes it.

    Parameters
    ----------
    x : array (N, C, H, W)
    y, s : array (N, C, H, W), written
    work : array (2, within_scratch(H, W))
        Working memory: as many planes as a vector has lanes.
    """
    channels, height, width = x.shape[1:]
    plane, lanes = height * width, lanes_of(x)
    weight = alpha / x.dtype.type(size * size)
    for first in range(begin * channels, end * channels, lanes):
        planes = min(end * channels - first, lanes)
        start, stop = first * plane, (first + planes) * plane
        to_lanes(x, start, plane, planes, work[0], 0, plane)
        _square_vectors(work, plane)
        _sum_around(work, height, width, size)
        from_lanes(work[1], 0, s, start, plane, planes, plane, 0)
        total = s.ravel()[start:stop]
        for j in range(total.shape[0]):
            total[j] = x.dtype.type(1) + weight * total[j]
        _normalize(x.ravel()[start:stop], total, beta, y.ravel()[start:stop])


@kernel(array(4), array(4), array(4), array(4), array(4), scratch(2), INT, REAL, REAL, INT, INT)
def lrn_within_backward(x, y, s, dy, dx, work, size, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
    """Compute dx = dy s^-beta - 2 alpha beta x (mean of dy y / s over size x size).

    Parameters
    ----------
    x, y, s, dy : array (N, C, H, W)
    dx : array (N, C, H, W), written
    work : array (3, within_scratch(H, W))
        Working memory.
    """
    channels, height, width = x.shape[1:]
    plane, lanes = height * width, lanes_of(x)
    factor = x.dtype.type(2) * alpha * beta / x.dtype.type(size * size)
    for first in range(begin * channels, end * channels, lanes):
        planes = min(end * channels - first, lanes)
        start, stop = first * plane, (first + planes) * plane
        known, total = x.ravel()[start:stop], s.ravel()[start:stop]
        gradient, result = dy.ravel()[start:stop], dx.ravel()[start:stop]
        out, scaled = y.ravel()[start:stop], work[2][: stop - start]
        # dx holds the ratios, then their sums.
        _begin_gradient(gradient, out, total, beta, factor, scaled, result)
        to_lanes(dx, start, plane, planes, work[0], 0, plane)
        _sum_around(work, height, width, size)  # symmetrical: its own adjoint
        from_lanes(work[1], 0, dx, start, plane, planes, plane, 0)
        for j in range(result.shape[0]):
            result[j] = scaled[j] - known[j] * result[j]
