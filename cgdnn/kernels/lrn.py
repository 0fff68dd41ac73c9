"""Local response normalization, across channels and within a channel.

Both compute y = x s^-beta, where s is one constant plus a mean of squares around x; they keep s for
the backward pass.
"""

from __future__ import annotations

import math

from cgdnn import machine
from cgdnn.kernels._jit import INT, REAL, array, device, kernel, scratch
from cgdnn.kernels.pool import sum_vectors
from cgdnn.kernels.relay import from_lanes, to_lanes
from cgdnn.kernels.vector import emitted, lanes_of


def within_scratch(height: int, width: int) -> int:
    """Return the elements that planes of this size take in lanes."""
    lanes = machine.vector_bytes() // 4
    return (height * width + lanes) * lanes


@device
def _multiply_power(x, s, beta, y):  # type: ignore[no-untyped-def]
    """Write y = x s^-beta for one row; the usual beta of 3/4 takes two square roots."""
    three_quarters = x.dtype.type(0.75)
    if beta == three_quarters:
        for j in range(x.shape[0]):
            root = math.sqrt(s[j])
            y[j] = x[j] / (root * math.sqrt(root))
    else:
        for j in range(x.shape[0]):
            y[j] = x[j] * s[j] ** -beta


@device
def _add_squares(x, weight, s):  # type: ignore[no-untyped-def]
    for j in range(x.shape[0]):
        s[j] += weight * x[j] * x[j]


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
    channels = x.shape[1]
    weight = alpha / x.dtype.type(size)
    half = size // 2
    for n in range(begin, end):
        for c in range(channels):
            total = s[n, c]
            for j in range(x.shape[2]):
                total[j] = k
            for other in range(max(c - half, 0), min(c + half + 1, channels)):
                _add_squares(x[n, other], weight, total)
            _multiply_power(x[n, c], total, beta, y[n, c])


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
        for c in range(channels):
            for j in range(columns):
                ratio[c, j] = factor * dy[n, c, j] * y[n, c, j] / s[n, c, j]
        for c in range(channels):
            _multiply_power(dy[n, c], s[n, c], beta, dx[n, c])
            for other in range(max(c - half, 0), min(c + half + 1, channels)):
                for j in range(columns):
                    dx[n, c, j] -= x[n, c, j] * ratio[other, j]


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
        _multiply_power(x.ravel()[start:stop], total, beta, y.ravel()[start:stop])


@kernel(array(4), array(4), array(4), array(4), array(4), scratch(2), INT, REAL, REAL, INT, INT)
def lrn_within_backward(x, y, s, dy, dx, work, size, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
    """Compute dx = dy s^-beta - 2 alpha beta x (mean of dy y / s over size x size).

    Parameters
    ----------
    x, y, s, dy : array (N, C, H, W)
    dx : array (N, C, H, W), written
    work : array (2, within_scratch(H, W))
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
        out = y.ravel()[start:stop]
        # dx holds the ratios, then their sums.
        for j in range(result.shape[0]):
            result[j] = factor * gradient[j] * out[j] / total[j]
        to_lanes(dx, start, plane, planes, work[0], 0, plane)
        _sum_around(work, height, width, size)  # symmetrical: its own adjoint
        from_lanes(work[1], 0, dx, start, plane, planes, plane, 0)
        scaled = work[0][: stop - start]
        _multiply_power(gradient, total, beta, scaled)
        for j in range(result.shape[0]):
            result[j] = scaled[j] - known[j] * result[j]
