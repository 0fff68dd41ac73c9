"""Batch normalization and scaling by channels.

Batch normalization views its arrays as (n, c, s). Scaling views them as (n, r, d, i) and takes its
factors as (rows, d): one row for all samples, or one row for each.
"""

from __future__ import annotations

import numpy as np

from cgdnn.kernels._jit import INT, REAL, array, device, kernel


@device
def dot_row(a, b):  # type: ignore[no-untyped-def]
    """Return the sum of ``a * b`` over two vectors, in eight float64 accumulators."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    whole = a.shape[0] - a.shape[0] % 8
    for k in range(0, whole, 8):
        s0 += np.float64(a[k]) * b[k]
        s1 += np.float64(a[k + 1]) * b[k + 1]
        s2 += np.float64(a[k + 2]) * b[k + 2]
        s3 += np.float64(a[k + 3]) * b[k + 3]
        s4 += np.float64(a[k + 4]) * b[k + 4]
        s5 += np.float64(a[k + 5]) * b[k + 5]
        s6 += np.float64(a[k + 6]) * b[k + 6]
        s7 += np.float64(a[k + 7]) * b[k + 7]
    for k in range(whole, a.shape[0]):
        s0 += np.float64(a[k]) * b[k]
    return ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))


@device
def sum_row(a):  # type: ignore[no-untyped-def]
    """Return the sum of a vector, in eight float64 accumulators."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    whole = a.shape[0] - a.shape[0] % 8
    for k in range(0, whole, 8):
        s0 += a[k]
        s1 += a[k + 1]
        s2 += a[k + 2]
        s3 += a[k + 3]
        s4 += a[k + 4]
        s5 += a[k + 5]
        s6 += a[k + 6]
        s7 += a[k + 7]
    for k in range(whole, a.shape[0]):
        s0 += a[k]
    return ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))


@device
def squares_row(a, mean):  # type: ignore[no-untyped-def]
    """Return the sum of ``(a - mean)**2`` over a vector, in four float64 accumulators."""
    s0 = s1 = s2 = s3 = 0.0
    whole = a.shape[0] - a.shape[0] % 4
    for k in range(0, whole, 4):
        d0, d1, d2, d3 = a[k] - mean, a[k + 1] - mean, a[k + 2] - mean, a[k + 3] - mean
        s0 += d0 * d0
        s1 += d1 * d1
        s2 += d2 * d2
        s3 += d3 * d3
    for k in range(whole, a.shape[0]):
        d0 = a[k] - mean
        s0 += d0 * d0
    return (s0 + s1) + (s2 + s3)


@kernel(array(3), array(3), INT, INT, INT)
def bn_moments(x, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write count, mean and sum of squared deviations of each channel over samples ``begin:end``.

    Row `piece` of `partial` is (3, c).
    """
    count = (end - begin) * x.shape[2]
    for c in range(x.shape[1]):
        total = 0.0
        for n in range(begin, end):
            total += sum_row(x[n, c])
        mean = total / count
        squares = 0.0
        for n in range(begin, end):
            squares += squares_row(x[n, c], mean)
        partial[piece, 0, c] = count
        partial[piece, 1, c] = mean
        partial[piece, 2, c] = squares


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


@kernel(array(3), array(3), array(1), array(1), INT, INT)
def bn_normalize(x, y, mean, inverse, begin, end):  # type: ignore[no-untyped-def]
    """Write ``y = (x - mean) * inverse``; `y` may be `x`."""
    for n in range(begin, end):
        for c in range(x.shape[1]):
            m, v = mean[c], inverse[c]
            for s in range(x.shape[2]):
                y[n, c, s] = (x[n, c, s] - m) * v


@kernel(array(3), array(3), array(3), array(1), array(1), INT, INT)
def bn_normalize_keep(x, y, kept, mean, inverse, begin, end):  # type: ignore[no-untyped-def]
    """Write ``y = kept = (x - mean) * inverse``; `y` may be `x`."""
    for n in range(begin, end):
        for c in range(x.shape[1]):
            m, v = mean[c], inverse[c]
            for s in range(x.shape[2]):
                value = (x[n, c, s] - m) * v
                y[n, c, s] = value
                kept[n, c, s] = value


@kernel(array(3), array(3), array(2), INT, INT, INT)
def bn_backward_sums(y, dy, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write the sums of `dy`, then of ``y * dy``, over samples ``begin:end`` for each channel."""
    channels = y.shape[1]
    for c in range(channels):
        plain = 0.0
        weighted = 0.0
        for n in range(begin, end):
            plain += sum_row(dy[n, c])
            weighted += dot_row(y[n, c], dy[n, c])
        partial[piece, c] = plain
        partial[piece, channels + c] = weighted


@kernel(array(3), array(3), array(3), array(1), array(1), REAL, INT, INT)
def bn_backward(y, dy, dx, sums, inverse, share, begin, end):  # type: ignore[no-untyped-def]
    """Write ``dx = (dy - mean(dy) - mean(y * dy) * y) * inverse``; `dx` may be `dy`.

    `sums` holds the sums of `dy`, then of ``y * dy``, by channel; `share` is one over their count.
    """
    channels = y.shape[1]
    for n in range(begin, end):
        for c in range(channels):
            plain, weighted, v = sums[c] * share, sums[channels + c] * share, inverse[c]
            for s in range(y.shape[2]):
                dx[n, c, s] = (dy[n, c, s] - plain - weighted * y[n, c, s]) * v


@kernel(array(4), array(2), array(4), INT, INT)
def scale_multiply(x, w, y, begin, end):  # type: ignore[no-untyped-def]
    """Write ``y[n, r, d, i] = x[n, r, d, i] * w[n or 0, d]``; `y` may be `x`."""
    for n in range(begin, end):
        row = n if w.shape[0] > 1 else 0
        for r in range(x.shape[1]):
            for d in range(x.shape[2]):
                v = w[row, d]
                for i in range(x.shape[3]):
                    y[n, r, d, i] = x[n, r, d, i] * v


@kernel(array(4), array(2), array(2), array(4), INT, INT)
def scale_multiply_add(x, w, b, y, begin, end):  # type: ignore[no-untyped-def]
    """Write ``y[n, r, d, i] = x[n, r, d, i] * w[n or 0, d] + b[n or 0, d]``; `y` may be `x`."""
    for n in range(begin, end):
        row = n if w.shape[0] > 1 else 0
        for r in range(x.shape[1]):
            for d in range(x.shape[2]):
                v, u = w[row, d], b[row, d]
                for i in range(x.shape[3]):
                    y[n, r, d, i] = x[n, r, d, i] * v + u


@kernel(array(4), array(4), array(2), INT, INT, INT)
def scale_backward_factor(x, dy, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write the sums of ``x * dy`` over n in ``begin:end``, r and i to row `piece`, by d."""
    for d in range(x.shape[2]):
        total = 0.0
        for n in range(begin, end):
            for r in range(x.shape[1]):
                total += dot_row(x[n, r, d], dy[n, r, d])
        partial[piece, d] = total


@kernel(array(4), array(2), INT, INT, INT)
def scale_backward_bias(dy, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write the sums of `dy` over n in ``begin:end``, r and i to row `piece`, by d."""
    for d in range(dy.shape[2]):
        total = 0.0
        for n in range(begin, end):
            for r in range(dy.shape[1]):
                total += sum_row(dy[n, r, d])
        partial[piece, d] = total


@kernel(array(4), array(4), array(2), REAL, INT, INT)
def scale_backward_factor_rows(x, dy, dw, accumulate, begin, end):  # type: ignore[no-untyped-def]
    """Write (`accumulate` 0) or add (1) the sums of ``x * dy`` over r and i to ``dw[n, d]``."""
    for n in range(begin, end):
        for d in range(x.shape[2]):
            total = 0.0
            for r in range(x.shape[1]):
                total += dot_row(x[n, r, d], dy[n, r, d])
            dw[n, d] = total if accumulate == 0 else total + dw[n, d]


@kernel(array(4), array(2), REAL, INT, INT)
def scale_backward_bias_rows(dy, db, accumulate, begin, end):  # type: ignore[no-untyped-def]
    """Write (`accumulate` 0) or add (1) the sums of `dy` over r and i to ``db[n, d]``."""
    for n in range(begin, end):
        for d in range(dy.shape[2]):
            total = 0.0
            for r in range(dy.shape[1]):
                total += sum_row(dy[n, r, d])
            db[n, d] = total if accumulate == 0 else total + db[n, d]
