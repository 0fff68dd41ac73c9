from cgdnn.kernels.random import uniform_u32


def _each(y, begin, end):
    return ((n, j) for n in range(begin, end) for j in range(y.shape[1]))


def fill(y, value, begin, end):
    for place in _each(y, begin, end):
        y[place] = value


def copy_columns(x, x_start, y, y_start, count, begin, end):
    for n in range(begin, end):
        for j in range(count):
            y[n, y_start + j] = x[n, x_start + j]


def scale(x, alpha, y, begin, end):
    for place in _each(y, begin, end):
        y[place] = alpha * x[place]


def add_scaled(a, alpha, b, beta, y, begin, end):
    for place in _each(y, begin, end):
        y[place] = alpha * a[place] + beta * b[place]


def multiply(a, b, y, begin, end):
    for place in _each(y, begin, end):
        y[place] = a[place] * b[place]


def divide_multiply(a, b, c, y, begin, end):
    for place in _each(y, begin, end):
        y[place] = a[place] / b[place] * c[place]


def max_of_two(a, b, y, mask, begin, end):
    for place in _each(y, begin, end):
        mask[place] = 0 if a[place] > b[place] else 1
        y[place] = (a, b)[mask[place]][place]


def max_with_next(x, index, y, mask, begin, end):
    for place in _each(y, begin, end):
        if x[place] > y[place]:
            y[place], mask[place] = x[place], index


def select(x, mask, index, y, begin, end):
    for place in _each(y, begin, end):
        y[place] = x[place] if mask[place] == index else 0


def dropout_forward(x, y, mask, threshold, factor, key, counter, begin, end):
    for n, j in _each(y, begin, end):
        drawn = int(uniform_u32(key, counter, n * x.shape[1] + j)[0])
        mask[n, j] = drawn >= threshold
        y[n, j] = x[n, j] * factor if mask[n, j] else 0


def dropout_backward(dy, mask, factor, dx, begin, end):
    for place in _each(dx, begin, end):
        dx[place] = dy[place] * factor if mask[place] else 0
