import math

import numpy as np


def _softmax(scores):
    top = max(scores) if not any(math.isnan(s) for s in scores) else math.nan
    exponentials = [math.exp(s - top) for s in scores]
    total = sum(exponentials)
    return [e / total for e in exponentials]


def softmax_forward(x, y, begin, end):
    for n in range(begin, end):
        for r in range(x.shape[1]):
            for i in range(x.shape[3]):
                y[n, r, :, i] = _softmax([float(v) for v in x[n, r, :, i]])


def softmax_backward(y, dy, dx, begin, end):
    for n in range(begin, end):
        for r in range(y.shape[1]):
            for i in range(y.shape[3]):
                p = [float(v) for v in y[n, r, :, i]]
                g = [float(v) for v in dy[n, r, :, i]]
                for c in range(len(p)):
                    # the Jacobian, entry by entry
                    dx[n, r, c, i] = sum(
                        g[k] * p[k] * ((1.0 if k == c else 0.0) - p[c]) for k in range(len(p))
                    )


def log_loss(p):
    return -math.log(max(p, float(np.finfo(np.float32).tiny)))
