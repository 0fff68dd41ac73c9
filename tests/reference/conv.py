"""Convolution by its definition, on (N, C, rows, W) arrays with row tables."""

import numpy as np


def row_tables(axes):
    """Return the tables of the leading spatial axes.

    axes: (size, kernel, stride, pad, dilation) for each.
    """
    out = [(s + 2 * p - d * (k - 1) - 1) // t + 1 for s, k, t, p, d in axes]
    kernel = [a[1] for a in axes]
    size = [a[0] for a in axes]
    rows = np.full((int(np.prod(kernel)), int(np.prod(out))), -1, np.int64)
    for q, tap in enumerate(np.ndindex(*kernel)):
        for r, place in enumerate(np.ndindex(*out)):
            at = [o * a[2] - a[3] + k * a[4] for o, k, a in zip(place, tap, axes, strict=True)]
            if all(0 <= i < s for i, s in zip(at, size, strict=True)):
                rows[q, r] = np.ravel_multi_index(at, size) if size else 0
    outputs = np.full((rows.shape[0], int(np.prod(size))), -1, np.int64)
    for q in range(rows.shape[0]):
        for r in range(rows.shape[1]):
            if rows[q, r] >= 0:
                outputs[q, rows[q, r]] = r
    return rows, outputs


def _places(x, w, y, rows, stride, pad, dilation):
    """Yield (q, r, j, o, h, column) wherever a tap meets the input."""
    for q in range(w.shape[2]):
        for r in range(y.shape[2]):
            for j in range(w.shape[3]):
                for o in range(y.shape[3]):
                    column = o * stride - pad + j * dilation
                    if rows[q, r] >= 0 and 0 <= column < x.shape[3]:
                        yield q, r, j, o, rows[q, r], column


def _groups(x, w):
    group = x.shape[1] // w.shape[1]
    n = w.shape[0] // group
    for g in range(group):
        yield slice(g * n, (g + 1) * n), slice(g * w.shape[1], (g + 1) * w.shape[1])


def forward(x, w, b, y, rows, stride, pad, dilation):
    y[...] = 0 if b is None else b[:, None, None]
    for outs, ins in _groups(x, w):
        for q, r, j, o, h, column in _places(x, w, y, rows, stride, pad, dilation):
            y[:, outs, r, o] += x[:, ins, h, column] @ w[outs, :, q, j].T


def backward_weights(x, dy, dw, db, rows, stride, pad, dilation):
    """Add to dw and db."""
    db += dy.sum(axis=(0, 2, 3))
    for outs, ins in _groups(x, dw):
        for q, r, j, o, h, column in _places(x, dw, dy, rows, stride, pad, dilation):
            dw[outs, :, q, j] += dy[:, outs, r, o].T @ x[:, ins, h, column]


def backward_data(dy, w, dx, rows, stride, pad, dilation):
    dx[...] = 0
    for outs, ins in _groups(dx, w):
        for q, r, j, o, h, column in _places(dx, w, dy, rows, stride, pad, dilation):
            dx[:, ins, h, column] += dy[:, outs, r, o] @ w[outs, :, q, j]
