"""Local response normalization by its definition, one value at a time."""

import numpy as np


def _near(center, half, size):
    return range(max(center - half, 0), min(center + half + 1, size))


def _each(x, begin, end):
    return ((n, *place) for n in range(begin, end) for place in np.ndindex(*x.shape[1:]))


def lrn_across_forward(x, y, s, size, alpha, beta, k, begin, end):
    for n, c, j in _each(x, begin, end):
        squares = [float(x[n, i, j]) ** 2 for i in _near(c, size // 2, x.shape[1])]
        s[n, c, j] = k + alpha / size * sum(squares)
        y[n, c, j] = x[n, c, j] * s[n, c, j] ** -beta


def lrn_across_backward(x, y, s, dy, dx, ratio, size, alpha, beta, begin, end):
    for n, c, j in _each(x, begin, end):
        # dy_i / dx_c = [i = c] s_c^-beta - 2 alpha beta / size x_i x_c s_i^(-beta - 1)
        dx[n, c, j] = dy[n, c, j] * s[n, c, j] ** -beta - sum(
            dy[n, i, j]
            * 2
            * alpha
            * beta
            / size
            * x[n, i, j]
            * x[n, c, j]
            * s[n, i, j] ** (-beta - 1)
            for i in _near(c, size // 2, x.shape[1])
        )


def lrn_within_forward(x, y, s, squares, size, alpha, beta, begin, end):
    for n, c, h, w in _each(x, begin, end):
        rows, columns = _near(h, size // 2, x.shape[2]), _near(w, size // 2, x.shape[3])
        total = sum(float(x[n, c, i, j]) ** 2 for i in rows for j in columns)
        s[n, c, h, w] = 1 + alpha * total / size**2
        y[n, c, h, w] = x[n, c, h, w] * s[n, c, h, w] ** -beta


def lrn_within_backward(x, y, s, dy, dx, work, size, alpha, beta, begin, end):
    for n, c, h, w in _each(x, begin, end):
        rows, columns = _near(h, size // 2, x.shape[2]), _near(w, size // 2, x.shape[3])
        dx[n, c, h, w] = dy[n, c, h, w] * s[n, c, h, w] ** -beta - sum(
            dy[n, c, i, j]
            * 2
            * alpha
            * beta
            / size**2
            * x[n, c, i, j]
            * x[n, c, h, w]
            * s[n, c, i, j] ** (-beta - 1)
            for i in rows
            for j in columns
        )
