"""Pooling as the loops of Caffe's pooling_layer.cpp have it, one window at a time."""


def _windows(shape, pooled, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w):
    """Yield (ph, pw, places in the plane, size of the padded window)."""
    height, width = shape
    for ph in range(pooled[0]):
        for pw in range(pooled[1]):
            above, before = ph * stride_h - pad_h, pw * stride_w - pad_w
            below = min(above + kernel_h, height + pad_h)
            after = min(before + kernel_w, width + pad_w)
            places = [
                (h, w)
                for h in range(above, below)
                for w in range(before, after)
                if 0 <= h < height and 0 <= w < width
            ]
            yield ph, pw, places, (below - above) * (after - before)


def _planes(x, begin, end):
    return ((n, c) for n in range(begin, end) for c in range(x.shape[1]))


def pool_max_forward(x, y, argmax, *window_begin_end):
    *window, begin, end = window_begin_end
    for n, c in _planes(x, begin, end):
        for ph, pw, places, _ in _windows(x.shape[2:], y.shape[2:], *window):
            y[n, c, ph, pw], argmax[n, c, ph, pw] = 0, -1
            best = None
            for h, w in places:
                if best is None or x[n, c, h, w] > x[n, c][best]:
                    best = (h, w)
            if best is not None:
                y[n, c, ph, pw] = x[n, c][best]
                argmax[n, c, ph, pw] = best[0] * x.shape[3] + best[1]


def pool_max_backward(dy, argmax, dx, begin, end):
    for n, c in _planes(dx, begin, end):
        dx[n, c] = 0
        for o in range(dy.shape[2]):
            if argmax[n, c, o] >= 0:
                dx[n, c, argmax[n, c, o]] += dy[n, c, o]


def pool_max_mask(argmax, mask, begin, end):
    for n in range(begin, end):
        for j in range(mask.shape[1]):
            mask[n, j] = float(argmax[n, j])


def pool_average_forward(x, y, *window_scratch_begin_end):
    *window, _, _, _, begin, end = window_scratch_begin_end
    for n, c in _planes(x, begin, end):
        for ph, pw, places, size in _windows(x.shape[2:], y.shape[2:], *window):
            total = sum(float(x[n, c][place]) for place in places)
            y[n, c, ph, pw] = total / size if places else 0


def pool_average_backward(dy, dx, *window_scratch_begin_end):
    *window, _, _, _, begin, end = window_scratch_begin_end
    for n, c in _planes(dx, begin, end):
        dx[n, c] = 0
        for ph, pw, places, size in _windows(dx.shape[2:], dy.shape[2:], *window):
            for place in places:
                dx[n, c][place] += dy[n, c, ph, pw] / size
