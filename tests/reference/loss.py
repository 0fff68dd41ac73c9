import math

from tests.reference.softmax import log_loss, softmax_forward


def _ignored(label, has_ignore, ignore):
    return bool(has_ignore) and label == ignore


def softmax_loss_forward(x, label, prob, partial, has_ignore, ignore, piece, begin, end):
    softmax_forward(x, prob, begin, end)
    losses = [
        log_loss(float(prob[n, r, int(label[n, r, i]), i]))
        for n in range(begin, end)
        for r in range(x.shape[1])
        for i in range(x.shape[3])
        if not _ignored(label[n, r, i], has_ignore, ignore)
    ]
    partial[piece] = sum(losses), len(losses)


def softmax_loss_backward(prob, label, normalizer, dy, dx, has_ignore, ignore, begin, end):
    for n in range(begin, end):
        for r in range(prob.shape[1]):
            for i in range(prob.shape[3]):
                for c in range(prob.shape[2]):
                    target = 1.0 if c == int(label[n, r, i]) else 0.0
                    gradient = (float(prob[n, r, c, i]) - target) * dy[0] / normalizer[0]
                    ignored = _ignored(label[n, r, i], has_ignore, ignore)
                    dx[n, r, c, i] = 0.0 if ignored else gradient


def loss_finish(partial, loss, normalizer, divisor):
    count = divisor if divisor >= 0 else sum(float(row[1]) for row in partial)
    normalizer[0] = max(1.0, count)
    loss[0] = sum(float(row[0]) for row in partial) / max(1.0, count)


def euclidean_forward(a, b, diff, partial, piece, begin, end):
    total = 0.0
    for n in range(begin, end):
        for i in range(a.shape[1]):
            diff[n, i] = float(a[n, i]) - float(b[n, i])
            total += (float(a[n, i]) - float(b[n, i])) ** 2
    partial[piece, 0] = total


def euclidean_backward(diff, dy, dx, factor, begin, end):
    for n in range(begin, end):
        for i in range(diff.shape[1]):
            dx[n, i] = factor * dy[0] * diff[n, i]


def accuracy_forward(x, label, partial, top_k, has_ignore, ignore, piece, begin, end):
    classes = x.shape[2]
    partial[piece] = 0
    for n in range(begin, end):
        for r in range(x.shape[1]):
            for i in range(x.shape[3]):
                if _ignored(label[n, r, i], has_ignore, ignore):
                    continue
                k = int(label[n, r, i])
                mine = x[n, r, k, i]
                rivals = [c for c in range(classes) if c != k and not x[n, r, c, i] < mine]
                right = len(rivals) < top_k and not math.isnan(mine)
                partial[piece, 0] += right
                partial[piece, 1] += 1
                if partial.shape[1] > 2:
                    partial[piece, 2 + k] += right
                    partial[piece, 2 + classes + k] += 1


def accuracy_finish(partial, y, right, count):
    for j in range(y.shape[0]):
        total = sum(float(row[count + j]) for row in partial)
        hits = sum(float(row[right + j]) for row in partial)
        y[j] = hits / total if total else 0.0
