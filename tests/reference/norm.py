import math


def _channel(x, c, begin, end):
    return [float(x[n, c, s]) for n in range(begin, end) for s in range(x.shape[2])]


def bn_moments(x, partial, piece, begin, end):
    for c in range(x.shape[1]):
        values = _channel(x, c, begin, end)
        mean = sum(values) / len(values)
        partial[piece, :, c] = len(values), mean, sum((v - mean) ** 2 for v in values)


def bn_merge(partial, mean, inverse, mean_sum, variance_sum, factor, fraction, eps):
    factor[0] = factor[0] * fraction + 1
    for c in range(mean.shape[0]):
        rows = [[float(v) for v in row[:, c]] for row in partial]
        count = sum(row[0] for row in rows)
        middle = sum(row[0] * row[1] for row in rows) / count
        squares = sum(row[2] + row[0] * (row[1] - middle) ** 2 for row in rows)
        variance = squares / count
        mean[c] = middle
        inverse[c] = 1 / math.sqrt(variance + eps)
        mean_sum[c] = mean_sum[c] * fraction + middle
        correction = count / (count - 1) if count > 1 else 1.0
        variance_sum[c] = variance_sum[c] * fraction + variance * correction


def bn_global(mean_sum, variance_sum, factor, mean, inverse, eps):
    scale = 1 / factor[0] if factor[0] != 0 else 0.0
    for c in range(mean.shape[0]):
        mean[c] = mean_sum[c] * scale
        inverse[c] = 1 / math.sqrt(variance_sum[c] * scale + eps)


def bn_normalize(x, y, mean, inverse, begin, end):
    for n in range(begin, end):
        for c in range(x.shape[1]):
            for s in range(x.shape[2]):
                y[n, c, s] = (float(x[n, c, s]) - mean[c]) * inverse[c]


def bn_normalize_keep(x, y, kept, mean, inverse, begin, end):
    bn_normalize(x, y, mean, inverse, begin, end)
    kept[begin:end] = y[begin:end]


def bn_backward_sums(y, dy, partial, piece, begin, end):
    channels = y.shape[1]
    for c in range(channels):
        pairs = list(zip(_channel(y, c, begin, end), _channel(dy, c, begin, end), strict=True))
        partial[piece, c] = sum(g for _, g in pairs)
        partial[piece, channels + c] = sum(v * g for v, g in pairs)


def bn_backward(y, dy, dx, sums, inverse, share, begin, end):
    channels = y.shape[1]
    for n in range(begin, end):
        for c in range(channels):
            for s in range(y.shape[2]):
                centred = float(dy[n, c, s]) - float(sums[c]) * share
                along = float(sums[channels + c]) * share * float(y[n, c, s])
                dx[n, c, s] = (centred - along) * inverse[c]


def _factor(w, n, d):
    return float(w[n if w.shape[0] > 1 else 0, d])


def scale_multiply(x, w, y, begin, end):
    for n in range(begin, end):
        for r in range(x.shape[1]):
            for d in range(x.shape[2]):
                for i in range(x.shape[3]):
                    y[n, r, d, i] = float(x[n, r, d, i]) * _factor(w, n, d)


def scale_multiply_add(x, w, b, y, begin, end):
    for n in range(begin, end):
        for r in range(x.shape[1]):
            for d in range(x.shape[2]):
                for i in range(x.shape[3]):
                    y[n, r, d, i] = float(x[n, r, d, i]) * _factor(w, n, d) + _factor(b, n, d)


def scale_multiply_add_keep(x, w, b, kept, y, begin, end):
    kept[begin:end] = x[begin:end]
    scale_multiply_add(x, w, b, y, begin, end)


def _products(x, dy, n, d):
    return [
        float(x[n, r, d, i]) * float(dy[n, r, d, i])
        for r in range(dy.shape[1])
        for i in range(dy.shape[3])
    ]


def scale_backward_factor(x, dy, partial, piece, begin, end):
    for d in range(x.shape[2]):
        partial[piece, d] = sum(sum(_products(x, dy, n, d)) for n in range(begin, end))


def scale_backward_bias(dy, partial, piece, begin, end):
    scale_backward_factor(dy * 0 + 1, dy, partial, piece, begin, end)


def scale_backward_both(x, dy, factor, bias, piece, begin, end):
    scale_backward_factor(x, dy, factor, piece, begin, end)
    scale_backward_bias(dy, bias, piece, begin, end)


def scale_backward_factor_rows(x, dy, dw, accumulate, begin, end):
    for n in range(begin, end):
        for d in range(x.shape[2]):
            total = sum(_products(x, dy, n, d))
            dw[n, d] = total + float(dw[n, d]) if accumulate else total


def scale_backward_bias_rows(dy, db, accumulate, begin, end):
    scale_backward_factor_rows(dy * 0 + 1, dy, db, accumulate, begin, end)
