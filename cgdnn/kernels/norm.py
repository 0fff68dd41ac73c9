"""Batch normalization and scaling by channels.

Batch normalization views its arrays as (n, c, s). Scaling views them as (n, r, d, i) and takes its
factors as (rows, d): one row for all samples, or one row for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from cgdnn.kernels._jit import INT, REAL, array, kernel
from cgdnn.kernels.vector import Emitter, emitted, sums


class _Sum:
    """A sum over many vectors, in as many float64 lanes as a vector of the run's type has."""

    def __init__(self, e: Emitter) -> None:
        self.e = e
        self.slots = [e.variable(part) for part in e.wide(e.zero())]

    def add_products(self, a: list[Any], b: list[Any]) -> None:
        """Add the products of two vectors, given in float64."""
        build = self.e.builder
        for slot, left, right in zip(self.slots, a, b, strict=True):
            build.store(self.e.multiply_add(left, right, build.load(slot)), slot)

    def add(self, a: list[Any]) -> None:
        """Add a vector, given in float64."""
        build = self.e.builder
        for slot, value in zip(self.slots, a, strict=True):
            build.store(build.fadd(build.load(slot), value), slot)

    def total(self) -> Any:
        """Return the sum of all lanes."""
        build = self.e.builder
        first, *others = (build.load(slot) for slot in self.slots)
        for other in others:
            first = build.fadd(first, other)
        return self.e.total(first)


@sums(2)
def _deviation_sums(e, x, start, rows, row_step, length):  # type: ignore[no-untyped-def]
    """Return the sums of ``x - x[start]`` and of its squares over rows that begin at x[start].

    In float64 the distance from any one value of the data is as good as that from the mean.
    """
    build = e.builder
    x = e.at(x, start)
    first = e.wide(e.splat(e.scalar(x)))
    plain, squares = _Sum(e), _Sum(e)
    for (source,), mask in e.along_rows(rows, row_step, length, x):
        away = [build.fsub(a, b) for a, b in zip(e.wide(e.load(source, mask)), first, strict=True)]
        if mask is not None:
            away = [
                build.select(inside, part, ir.Constant(part.type, None))
                for inside, part in zip(e.halves(mask), away, strict=True)
            ]
        plain.add(away)
        squares.add_products(away, away)
    return plain.total(), squares.total()


@sums(1)
def plain_sum(e, x, start, rows, row_step, length):  # type: ignore[no-untyped-def]
    """Return the sum over rows that begin at x[start], `row_step` apart, in float64."""
    plain = _Sum(e)
    for (source,), mask in e.along_rows(rows, row_step, length, e.at(x, start)):
        plain.add(e.wide(e.load(source, mask)))
    return (plain.total(),)


@sums(2)
def product_sums(e, x, dy, start, rows, row_step, length):  # type: ignore[no-untyped-def]
    """Return the sums of ``dy`` and of ``x * dy`` over the same rows of both, in float64."""
    plain, products = _Sum(e), _Sum(e)
    pointers = e.at(x, start), e.at(dy, start)
    for (left, right), mask in e.along_rows(rows, row_step, length, *pointers):
        gradient = e.wide(e.load(right, mask))
        plain.add(gradient)
        products.add_products(e.wide(e.load(left, mask)), gradient)
    return plain.total(), products.total()


@kernel(array(3), array(3), INT, INT, INT)
def bn_moments(x, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write count, mean and sum of squared deviations of each channel over samples ``begin:end``.

    Row `piece` of `partial` is (3, c).
    """
    channels, inner = x.shape[1], x.shape[2]
    count = (end - begin) * inner
    for c in range(channels):
        start = (begin * channels + c) * inner
        plain, squares = _deviation_sums(x, start, end - begin, channels * inner, inner)
        squares -= plain * plain / count
        partial[piece, 0, c] = count
        partial[piece, 1, c] = x[begin, c, 0] + plain / count
        partial[piece, 2, c] = 0.0 if squares < 0.0 else squares


@kernel(array(3), array(1), array(1), array(1), array(1), array(1), REAL, REAL)
def bn_merge(  # type: ignore[no-untyped-def]
    partial, mean, inverse, mean_sum, variance_sum, factor, fraction, eps
):
    """Merge the moments of the pieces in order, and move the running sums on.

    Writes `mean` and ``inverse = 1 / sqrt(variance + eps)`` of each channel. The running sums are
    multiplied by `fraction` before the batch's mean, its variance times m / (m - 1), and 1 are
    added to `mean_sum`, `variance_sum` and `factor`. Merging after Chan, Golub, LeVeque,
    "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """
    factor[0] = factor[0] * fraction + factor.dtype.type(1)
    for c in range(mean.shape[0]):
        count = 0.0
        middle = 0.0
        squares = 0.0
        for p in range(partial.shape[0]):
            more = np.float64(partial[p, 0, c])
            step = np.float64(partial[p, 1, c]) - middle
            both = count + more
            squares += np.float64(partial[p, 2, c]) + step * step * (count * more / both)
            middle += step * (more / both)
            count = both
        variance = squares / count
        unbiased = squares / (count - 1.0) if count > 1.0 else variance
        mean[c] = middle
        inverse[c] = 1.0 / np.sqrt(variance + np.float64(eps))
        mean_sum[c] = mean_sum[c] * fraction + middle
        variance_sum[c] = variance_sum[c] * fraction + unbiased


@kernel(array(1), array(1), array(1), array(1), array(1), REAL)
def bn_global(mean_sum, variance_sum, factor, mean, inverse, eps):  # type: ignore[no-untyped-def]
    """Write the mean and ``1 / sqrt(variance + eps)`` that the running sums stand for."""
    scale = 0.0 if factor[0] == 0 else 1.0 / np.float64(factor[0])
    for c in range(mean.shape[0]):
        mean[c] = mean_sum[c] * scale
        inverse[c] = 1.0 / np.sqrt(variance_sum[c] * scale + np.float64(eps))


@emitted
def _normalize_row(e, x, y, kept, keeps, start, length, mean, inverse):  # type: ignore[no-untyped-def]
    """Write ``y = (x - mean) * inverse`` for one row, where it `keeps` to `kept` as well."""
    build = e.builder
    mean, inverse = e.splat(mean), e.splat(inverse)
    keeps = build.icmp_signed("!=", keeps, e.integer(0))
    pointers = [e.at(pointer, start) for pointer in (x, y, kept)]
    for (source, target, copy), mask in e.along(length, *pointers):
        value = build.fmul(build.fsub(e.load(source, mask), mean), inverse)
        e.store(value, target, mask)
        with build.if_then(keeps):
            e.store(value, copy, mask)


@kernel(array(3), array(3), array(1), array(1), INT, INT)
def bn_normalize(x, y, mean, inverse, begin, end):  # type: ignore[no-untyped-def]
    """Write ``y = (x - mean) * inverse``; `y` may be `x`."""
    channels, inner = x.shape[1], x.shape[2]
    for row in range(begin * channels, end * channels):
        c = row % channels
        _normalize_row(x, y, y, 0, row * inner, inner, mean[c], inverse[c])


@kernel(array(3), array(3), array(3), array(1), array(1), INT, INT)
def bn_normalize_keep(x, y, kept, mean, inverse, begin, end):  # type: ignore[no-untyped-def]
    """Write ``y = kept = (x - mean) * inverse``; `y` may be `x`."""
    channels, inner = x.shape[1], x.shape[2]
    for row in range(begin * channels, end * channels):
        c = row % channels
        _normalize_row(x, y, kept, 1, row * inner, inner, mean[c], inverse[c])


@kernel(array(3), array(3), array(2), INT, INT, INT)
def bn_backward_sums(y, dy, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write the sums of `dy`, then of ``y * dy``, over samples ``begin:end`` for each channel."""
    channels, inner = y.shape[1], y.shape[2]
    for c in range(channels):
        start = (begin * channels + c) * inner
        plain, weighted = product_sums(y, dy, start, end - begin, channels * inner, inner)
        partial[piece, c] = plain
        partial[piece, channels + c] = weighted


@emitted
def _bn_backward_row(e, y, dy, dx, start, length, plain, weighted, inverse):  # type: ignore[no-untyped-def]
    """Write ``dx = (dy - plain - weighted * y) * inverse`` for one row."""
    build = e.builder
    plain, weighted, inverse = e.splat(plain), e.splat(weighted), e.splat(inverse)
    pointers = [e.at(pointer, start) for pointer in (y, dy, dx)]
    for (known, gradient, target), mask in e.along(length, *pointers):
        centred = build.fsub(e.load(gradient, mask), plain)
        along = build.fmul(weighted, e.load(known, mask))
        e.store(build.fmul(build.fsub(centred, along), inverse), target, mask)


@kernel(array(3), array(3), array(3), array(1), array(1), REAL, INT, INT)
def bn_backward(y, dy, dx, sums, inverse, share, begin, end):  # type: ignore[no-untyped-def]
    """Write ``dx = (dy - mean(dy) - mean(y * dy) * y) * inverse``; `dx` may be `dy`.

    `sums` holds the sums of `dy`, then of ``y * dy``, by channel; `share` is one over their count.
    """
    channels, inner = y.shape[1], y.shape[2]
    for row in range(begin * channels, end * channels):
        c = row % channels
        _bn_backward_row(
            y, dy, dx, row * inner, inner,
            sums[c] * share, sums[channels + c] * share, inverse[c],
        )  # fmt: skip


@emitted
def _scale_row(e, x, y, start, length, factor):  # type: ignore[no-untyped-def]
    """Write ``y = x * factor`` for one row."""
    factor = e.splat(factor)
    for (source, target), mask in e.along(length, e.at(x, start), e.at(y, start)):
        e.store(e.builder.fmul(e.load(source, mask), factor), target, mask)


@emitted
def _scale_add_row(e, x, kept, keeps, y, start, length, factor, offset):  # type: ignore[no-untyped-def]
    """Write ``y = x * factor + offset`` for one row, where it `keeps` also ``kept = x``."""
    factor, offset = e.splat(factor), e.splat(offset)
    keeps = e.builder.icmp_signed("!=", keeps, e.integer(0))
    pointers = [e.at(pointer, start) for pointer in (x, y, kept)]
    for (source, target, copy), mask in e.along(length, *pointers):
        value = e.load(source, mask)
        with e.builder.if_then(keeps):
            e.store(value, copy, mask)
        e.store(e.multiply_add(value, factor, offset), target, mask)


@kernel(array(4), array(2), array(4), INT, INT)
def scale_multiply(x, w, y, begin, end):  # type: ignore[no-untyped-def]
    """Write ``y[n, r, d, i] = x[n, r, d, i] * w[n or 0, d]``; `y` may be `x`."""
    _, repeats, factors, inner = x.shape
    for n in range(begin, end):
        first = n if w.shape[0] > 1 else 0
        for row in range(n * repeats * factors, (n + 1) * repeats * factors):
            _scale_row(x, y, row * inner, inner, w[first, row % factors])


@kernel(array(4), array(2), array(2), array(4), INT, INT)
def scale_multiply_add(x, w, b, y, begin, end):  # type: ignore[no-untyped-def]
    """Write ``y[n, r, d, i] = x[n, r, d, i] * w[n or 0, d] + b[n or 0, d]``; `y` may be `x`."""
    _, repeats, factors, inner = x.shape
    for n in range(begin, end):
        first = n if w.shape[0] > 1 else 0
        for row in range(n * repeats * factors, (n + 1) * repeats * factors):
            d = row % factors
            _scale_add_row(x, x, 0, y, row * inner, inner, w[first, d], b[first, d])


@kernel(array(4), array(2), array(2), array(4), array(4), INT, INT)
def scale_multiply_add_keep(x, w, b, kept, y, begin, end):  # type: ignore[no-untyped-def]
    """Do what `scale_multiply_add` does, and write ``kept = x``; `y` may be `x`."""
    _, repeats, factors, inner = x.shape
    for n in range(begin, end):
        first = n if w.shape[0] > 1 else 0
        for row in range(n * repeats * factors, (n + 1) * repeats * factors):
            d = row % factors
            _scale_add_row(x, kept, 1, y, row * inner, inner, w[first, d], b[first, d])


@kernel(array(4), array(4), array(2), INT, INT, INT)
def scale_backward_factor(x, dy, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write the sums of ``x * dy`` over n in ``begin:end``, r and i to row `piece`, by d."""
    _, repeats, factors, inner = x.shape
    for d in range(factors):
        start = (begin * repeats * factors + d) * inner
        rows = (end - begin) * repeats
        _, partial[piece, d] = product_sums(x, dy, start, rows, factors * inner, inner)


@kernel(array(4), array(2), INT, INT, INT)
def scale_backward_bias(dy, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write the sums of `dy` over n in ``begin:end``, r and i to row `piece`, by d."""
    _, repeats, factors, inner = dy.shape
    for d in range(factors):
        start = (begin * repeats * factors + d) * inner
        rows = (end - begin) * repeats
        partial[piece, d] = plain_sum(dy, start, rows, factors * inner, inner)[0]


@kernel(array(4), array(4), array(2), array(2), INT, INT, INT)
def scale_backward_both(x, dy, factor, bias, piece, begin, end):  # type: ignore[no-untyped-def]
    """Do what `scale_backward_factor` and `scale_backward_bias` do, reading `dy` once."""
    _, repeats, factors, inner = x.shape
    for d in range(factors):
        start = (begin * repeats * factors + d) * inner
        rows = (end - begin) * repeats
        bias[piece, d], factor[piece, d] = product_sums(x, dy, start, rows, factors * inner, inner)


@kernel(array(4), array(4), array(2), REAL, INT, INT)
def scale_backward_factor_rows(x, dy, dw, accumulate, begin, end):  # type: ignore[no-untyped-def]
    """Write (`accumulate` 0) or add (1) the sums of ``x * dy`` over r and i to ``dw[n, d]``."""
    _, repeats, factors, inner = x.shape
    for n in range(begin, end):
        for d in range(factors):
            start = (n * repeats * factors + d) * inner
            _, total = product_sums(x, dy, start, repeats, factors * inner, inner)
            dw[n, d] = total if accumulate == 0 else total + dw[n, d]


@kernel(array(4), array(2), REAL, INT, INT)
def scale_backward_bias_rows(dy, db, accumulate, begin, end):  # type: ignore[no-untyped-def]
    """Write (`accumulate` 0) or add (1) the sums of `dy` over r and i to ``db[n, d]``."""
    _, repeats, factors, inner = dy.shape
    for n in range(begin, end):
        for d in range(factors):
            start = (n * repeats * factors + d) * inner
            total = plain_sum(dy, start, repeats, factors * inner, inner)[0]
            db[n, d] = total if accumulate == 0 else total + db[n, d]


@emitted
def _bn_scale_row(  # type: ignore[no-untyped-def]
    e, x, y, kept, start, length, mean, inverse, factor, offset, rectifies, slope
):
    """Write one row of `bn_scale_forward`."""
    build, zero = e.builder, e.zero()
    mean, inverse, factor, offset, slope = map(e.splat, (mean, inverse, factor, offset, slope))
    rectifies = e.splat(build.icmp_signed("!=", rectifies, e.integer(0)))
    pointers = [e.at(pointer, start) for pointer in (x, y, kept)]
    for (source, target, copy), mask in e.along(length, *pointers):
        value = build.fmul(build.fsub(e.load(source, mask), mean), inverse)
        e.store(value, copy, mask)
        value = e.multiply_add(value, factor, offset)
        below = build.and_(build.fcmp_ordered("<=", value, zero), rectifies)
        scaled = build.fadd(build.fmul(slope, value), zero)
        e.store(build.select(below, scaled, value), target, mask)


@kernel(
    array(3), array(3), array(3), array(1), array(1), array(1), array(1), INT, REAL, INT, INT
)  # fmt: skip
def bn_scale_forward(  # type: ignore[no-untyped-def]
    x, y, kept, mean, inverse, w, b, rectifies, slope, begin, end
):
    """Do what `bn_normalize_keep`, `scale_multiply_add` and `relu_forward` do, to the same bits.

    Writes ``kept = (x - mean) * inverse`` and ``y = w * kept + b``, where it `rectifies` then
    multiplied by `slope` unless positive; `y` may be `x`.
    """
    channels, inner = x.shape[1], x.shape[2]
    for row in range(begin * channels, end * channels):
        c = row % channels
        _bn_scale_row(
            x, y, kept, row * inner, inner, mean[c], inverse[c], w[c], b[c], rectifies, slope
        )


def _rectified(e: Emitter, y: Any, dy: Any, rectifies: Any, slope: Any) -> Any:
    """Return the gradient below a rectifier with the output y, or dy where there is none."""
    build = e.builder
    passes = build.fcmp_ordered(">", y, e.zero())
    passes = build.or_(passes, build.not_(rectifies))
    return build.fmul(dy, build.select(passes, e.filled(1.0), slope))


@sums(2)
def _rectified_sums(e, y, kept, dy, start, rows, row_step, length, rectifies, slope):  # type: ignore[no-untyped-def]
    """Return the sums of the gradient below the rectifier, and of `kept` times it."""
    plain, products, slope = _Sum(e), _Sum(e), e.splat(slope)
    rectifies = e.splat(e.builder.icmp_signed("!=", rectifies, e.integer(0)))
    pointers = [e.at(pointer, start) for pointer in (y, kept, dy)]
    for (output, normal, gradient), mask in e.along_rows(rows, row_step, length, *pointers):
        below = _rectified(e, e.load(output, mask), e.load(gradient, mask), rectifies, slope)
        wide = e.wide(below)
        plain.add(wide)
        products.add_products(e.wide(e.load(normal, mask)), wide)
    return plain.total(), products.total()


@kernel(array(3), array(3), array(3), array(2), array(2), INT, REAL, INT, INT, INT)
def bn_scale_backward_sums(  # type: ignore[no-untyped-def]
    y, kept, dy, factor, bias, rectifies, slope, piece, begin, end
):
    """Do what `relu_backward` and `scale_backward_both` do, to the same bits.

    Writes row `piece` of `factor` and `bias`, the gradients of w and b over samples
    ``begin:end``. `y` is the output; where it does not rectify, only any array of that shape.
    """
    channels, inner = y.shape[1], y.shape[2]
    for c in range(channels):
        start, step = (begin * channels + c) * inner, channels * inner
        bias[piece, c], factor[piece, c] = _rectified_sums(
            y, kept, dy, start, end - begin, step, inner, rectifies, slope
        )


@emitted
def _bn_scale_backward_row(  # type: ignore[no-untyped-def]
    e, y, kept, dy, dx, start, length, scale, plain, weighted, rectifies, slope
):
    """Write ``dx = (dy - plain - weighted * kept) * scale`` for one row, dy below the rectifier."""
    build = e.builder
    scale, plain, weighted, slope = map(e.splat, (scale, plain, weighted, slope))
    rectifies = e.splat(build.icmp_signed("!=", rectifies, e.integer(0)))
    pointers = [e.at(pointer, start) for pointer in (y, kept, dy, dx)]
    for (output, normal, gradient, target), mask in e.along(length, *pointers):
        below = _rectified(e, e.load(output, mask), e.load(gradient, mask), rectifies, slope)
        along = build.fmul(weighted, e.load(normal, mask))
        value = build.fsub(build.fsub(below, plain), along)
        e.store(build.fmul(value, scale), target, mask)


@kernel(
    array(3), array(3), array(3), array(3), array(1), array(1), array(1), array(1), REAL, INT, REAL,
    INT, INT,
)  # fmt: skip
def bn_scale_backward(  # type: ignore[no-untyped-def]
    y, kept, dy, dx, w, factor, bias, inverse, share, rectifies, slope, begin, end
):
    """Do what `relu_backward`, `scale_multiply` and `bn_backward` do, but for rounding.

    The sums that normalization needs are w times `bias` and `factor`, the sums over all samples of
    what `bn_scale_backward_sums` writes; `share` is one over their count. `dx` may be `dy`; `y` is
    as there.
    """
    channels, inner = y.shape[1], y.shape[2]
    for row in range(begin * channels, end * channels):
        c = row % channels
        _bn_scale_backward_row(
            y, kept, dy, dx, row * inner, inner,
            w[c] * inverse[c], bias[c] * share, factor[c] * share, rectifies, slope,
        )  # fmt: skip
