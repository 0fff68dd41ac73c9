import math


def sum_squares(dw, partial, piece, begin, end):
    partial[piece, 0] = sum(float(v) ** 2 for v in dw[begin:end])


def clip_factor(sums, factor, clip, average):
    norm = math.sqrt(sum(float(row[0]) for row in sums))
    factor[0] = average * (clip / norm if norm > clip else 1.0)


def sgd_update(w, dw, history, factor, bad, rate, momentum, decay_l2, decay_l1, piece, begin, end):
    bad[piece, 0] = 0
    for i in range(begin, end):
        weight = float(w[i])
        sign = (weight > 0) - (weight < 0)
        gradient = float(factor[0]) * float(dw[i]) + decay_l2 * weight + decay_l1 * sign
        history[i] = momentum * float(history[i]) + rate * gradient
        w[i] = weight - float(history[i])
        if not math.isfinite(w[i]):
            bad[piece, 0] = 1
