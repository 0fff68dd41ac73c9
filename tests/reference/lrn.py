"""Local response normalization by its definition, one value at a time."""

import numpy as np


def _near(center, half, size):
    return range(max(center - half, 0), min(center + half + 1, size))


def _regions(x, within, size):
    """Yield each place of x (N, C, H, W) with the places that its sum is over."""
    _, channels, height, width = x.shape
    for n, c, h, w in np.ndindex(*x.shape):
        if within:
            rows, columns = _near(h, size // 2, height), _near(w, size // 2, width)
            yield (n, c, h, w), [(n, c, i, j) for i in rows for j in columns]
        else:
            yield (n, c, h, w), [(n, i, h, w) for i in _near(c, size // 2, channels)]


def lrn_forward(x, within, size, alpha, beta, k):
    """Return y and s for x (N, C, H, W)."""
    y, s = np.zeros(x.shape), np.zeros(x.shape)
    for place, region in _regions(x, within, size):
        total = sum(float(x[other]) ** 2 for other in region)
        s[place] = k + alpha * total / (size * size if within else size)
        y[place] = x[place] * s[place] ** -beta
    return y, s


def lrn_backward(x, s, dy, within, size, alpha, beta):
    """Return dx: dy_i / dx_c = [i = c] s_c^-beta - 2 alpha beta / count x_i x_c s_i^(-beta - 1)."""
    dx = np.zeros(x.shape)
    factor = 2 * alpha * beta / (size * size if within else size)
    for place, region in _regions(x, within, size):
        dx[place] = dy[place] * s[place] ** -beta - sum(
            dy[other] * factor * x[other] * x[place] * s[other] ** (-beta - 1) for other in region
        )
    return dx
