"""Losses and scores that compare predictions with labels or targets.

Labels are class numbers stored as reals. A label that is no class ends the kernel with a status
that holds its place and its value (`label_status`); the layer makes the message of it.
"""

from __future__ import annotations

import numpy as np

from cgdnn.kernels._jit import INT, REAL, array, device, kernel
from cgdnn.kernels.softmax import softmax_column

_FLT_MIN = 1.1754943508222875e-38
"""Smallest normal float32: the floor of a probability before its logarithm, as in Caffe."""


@device
def class_of(label, classes):  # type: ignore[no-untyped-def]
    """Return the class that a label names, or -1 when it is no whole number in 0..classes-1."""
    value = np.float64(label)
    if value >= 0.0 and value < classes and np.floor(value) == value:
        return np.int64(value)
    return np.int64(-1)


@device
def label_status(index, label):  # type: ignore[no-untyped-def]
    """Return a non-zero status: ``index + 1`` above, the bits of the float32 label below."""
    bits = np.int64(np.float32(label).view(np.int32))
    return (np.int64(index + 1) << np.int64(32)) | (bits & np.int64(0xFFFFFFFF))


@kernel(array(4), array(3), array(4), array(2), INT, INT, INT, INT, INT, status=True)
def softmax_loss_forward(  # type: ignore[no-untyped-def]
    x, label, prob, partial, has_ignore, ignore, piece, begin, end
):
    """Write softmax of the scores, the summed loss and the count of labels of one piece.

    `x` and `prob` are (n, r, c, i), `label` is (n, r, i). Row `piece` of `partial` gets the sum of
    ``-log(max(prob[label], FLT_MIN))`` over the labels that are not ignored, and their count.
    """
    classes = x.shape[2]
    floor = x.dtype.type(_FLT_MIN)
    loss = 0.0
    count = 0
    for n in range(begin, end):
        for r in range(x.shape[1]):
            for i in range(x.shape[3]):
                softmax_column(x, prob, n, r, i)
                value = label[n, r, i]
                if has_ignore != 0 and value == ignore:
                    continue
                k = class_of(value, classes)
                if k < 0:
                    return label_status((n * x.shape[1] + r) * x.shape[3] + i, value)
                p = prob[n, r, k, i]
                if p < floor:
                    p = floor
                loss -= np.log(p)
                count += 1
    partial[piece, 0] = loss
    partial[piece, 1] = count
    return 0


@kernel(array(4), array(3), array(1), array(1), array(4), INT, INT, INT, INT)
def softmax_loss_backward(  # type: ignore[no-untyped-def]
    prob, label, normalizer, dy, dx, has_ignore, ignore, begin, end
):
    """Write ``dx = dy[0] / normalizer[0] * (prob - onehot(label))``, 0 where a label is ignored."""
    factor = dy[0] / normalizer[0]
    for n in range(begin, end):
        for r in range(prob.shape[1]):
            for c in range(prob.shape[2]):
                for i in range(prob.shape[3]):
                    dx[n, r, c, i] = prob[n, r, c, i] * factor
            for i in range(prob.shape[3]):
                value = label[n, r, i]
                if has_ignore != 0 and value == ignore:
                    for c in range(prob.shape[2]):
                        dx[n, r, c, i] = 0
                    continue
                k = class_of(value, prob.shape[2])
                if k >= 0:
                    dx[n, r, k, i] = (prob[n, r, k, i] - prob.dtype.type(1)) * factor


@kernel(array(2), array(1), array(1), REAL)
def loss_finish(partial, loss, normalizer, divisor):  # type: ignore[no-untyped-def]
    """Write ``loss[0]``, the sum over the pieces in order, divided by the normalizer written too.

    The normalizer is `divisor`, or, where that is negative, the count in column 1 of `partial`;
    it is at least 1.
    """
    total = 0.0
    count = 0.0
    for p in range(partial.shape[0]):
        total += partial[p, 0]
        if divisor < 0:
            count += partial[p, 1]
    if divisor >= 0:
        count = np.float64(divisor)
    count = max(count, 1.0)
    normalizer[0] = count
    loss[0] = total / count


@kernel(array(2), array(2), array(2), array(2), INT, INT, INT)
def euclidean_forward(a, b, diff, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write ``diff = a - b`` and, to row `piece` of `partial`, the sum of its squares."""
    total = 0.0
    for n in range(begin, end):
        for i in range(a.shape[1]):
            d = a[n, i] - b[n, i]
            diff[n, i] = d
            total += d * d
    partial[piece, 0] = total


@kernel(array(2), array(1), array(2), REAL, INT, INT)
def euclidean_backward(diff, dy, dx, factor, begin, end):  # type: ignore[no-untyped-def]
    """Write ``dx = factor * dy[0] * diff``."""
    scale = factor * dy[0]
    for n in range(begin, end):
        for i in range(diff.shape[1]):
            dx[n, i] = scale * diff[n, i]


@kernel(array(4), array(3), array(2), INT, INT, INT, INT, INT, INT, status=True)
def accuracy_forward(  # type: ignore[no-untyped-def]
    x, label, partial, top_k, has_ignore, ignore, piece, begin, end
):
    """Count right predictions of one piece into row `piece` of `partial`.

    The row holds: predictions that are right, predictions; and, where it is longer, for each class
    those that are right, then for each class those that there are. A prediction is right when
    fewer than `top_k` other classes score at least as high as the true one; a score that is NaN
    counts as higher, and as never right.
    """
    classes = x.shape[2]
    per_class = partial.shape[1] > 2
    for j in range(partial.shape[1]):
        partial[piece, j] = 0
    for n in range(begin, end):
        for r in range(x.shape[1]):
            for i in range(x.shape[3]):
                value = label[n, r, i]
                if has_ignore != 0 and value == ignore:
                    continue
                k = class_of(value, classes)
                if k < 0:
                    return label_status((n * x.shape[1] + r) * x.shape[3] + i, value)
                mine = x[n, r, k, i]
                better = -1
                for c in range(classes):
                    if not x[n, r, c, i] < mine:
                        better += 1
                right = better < top_k and mine == mine
                partial[piece, 1] += 1
                if per_class:
                    partial[piece, 2 + classes + k] += 1
                if right:
                    partial[piece, 0] += 1
                    if per_class:
                        partial[piece, 2 + k] += 1
    return 0


@kernel(array(2), array(1), INT, INT)
def accuracy_finish(partial, y, right, count):  # type: ignore[no-untyped-def]
    """Write the share of right predictions: columns `right` + j over `count` + j, 0 for 0 / 0."""
    for j in range(y.shape[0]):
        hits = 0.0
        total = 0.0
        for p in range(partial.shape[0]):
            hits += partial[p, right + j]
            total += partial[p, count + j]
        y[j] = hits / total if total > 0 else 0.0
