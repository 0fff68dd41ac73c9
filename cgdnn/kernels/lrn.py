"""Local response normalization, across channels and within a channel.

Both compute y = x s^-beta, where s is one constant plus a mean of squares around x; they keep s for
the backward pass.
"""

from __future__ import annotations

import math

from cgdnn.kernels._jit import INT, REAL, array, device, kernel, scratch
from cgdnn.kernels.pool import average_plane


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


@kernel(array(4), array(4), array(4), scratch(2), INT, REAL, REAL, INT, INT)
def lrn_within_forward(x, y, s, squares, size, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
    """Normalize over a square in the plane: s = 1 + alpha (mean of x^2 over size x size).

    The mean is that of average pooling with stride 1 and pad size // 2 (zeros count), as Caffe's
    lrn_layer.cpp composes it.

    Parameters
    ----------
    x : array (N, C, H, W)
    y, s : array (N, C, H, W), written
    squares : array (H, W)
        Working memory.
    """
    height, width = x.shape[2], x.shape[3]
    half = size // 2
    one = x.dtype.type(1)
    for n in range(begin, end):
        for c in range(x.shape[1]):
            for h in range(height):
                for w in range(width):
                    squares[h, w] = x[n, c, h, w] * x[n, c, h, w]
            average_plane(squares, s[n, c], size, size, half, half, 1, 1)
            for h in range(height):
                for w in range(width):
                    s[n, c, h, w] = one + alpha * s[n, c, h, w]
                _multiply_power(x[n, c, h], s[n, c, h], beta, y[n, c, h])


@kernel(array(4), array(4), array(4), array(4), array(4), scratch(3), INT, REAL, REAL, INT, INT)
def lrn_within_backward(x, y, s, dy, dx, work, size, alpha, beta, begin, end):  # type: ignore[no-untyped-def]
    """Compute dx = dy s^-beta - 2 alpha beta x (mean of dy y / s over size x size).

    Parameters
    ----------
    x, y, s, dy : array (N, C, H, W)
    dx : array (N, C, H, W), written
    work : array (2, H, W)
        Working memory.
    """
    height, width = x.shape[2], x.shape[3]
    half = size // 2
    factor = x.dtype.type(2) * alpha * beta
    for n in range(begin, end):
        for c in range(x.shape[1]):
            for h in range(height):
                for w in range(width):
                    work[0, h, w] = factor * dy[n, c, h, w] * y[n, c, h, w] / s[n, c, h, w]
            # These windows all have one size and are symmetric: the mean is its own adjoint.
            average_plane(work[0], work[1], size, size, half, half, 1, 1)
            for h in range(height):
                _multiply_power(dy[n, c, h], s[n, c, h], beta, dx[n, c, h])
                for w in range(width):
                    dx[n, c, h, w] -= x[n, c, h, w] * work[1, h, w]
