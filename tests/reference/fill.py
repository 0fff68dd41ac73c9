import math

from cgdnn.kernels.random import uniform_u32


def _draw(key, counter, index):
    return (int(uniform_u32(key, counter, index)[0]) + 0.5) / 2**32


def fill_uniform(x, low, high, key, counter, first, begin, end):
    for i in range(begin, end):
        x[i] = low + (high - low) * _draw(key, counter, first + i)


def fill_gaussian(x, mean, deviation, keep, key, counter, first, begin, end):
    for i in range(begin, end):
        index = 3 * (first + i)
        u, v = _draw(key, counter, index), _draw(key, counter, index + 1)
        normal = math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
        dropped = keep < 1 and _draw(key, counter, index + 2) >= keep
        x[i] = 0.0 if dropped else mean + deviation * normal


def fill_unitball(x, key, counter, first, begin, end):
    for n in range(begin, end):
        index = (first + n) * x.shape[1]
        row = [_draw(key, counter, index + i) for i in range(x.shape[1])]
        x[n] = [v / sum(row) for v in row]


def fill_bilinear(x, begin, end):
    size = x.shape[2]
    factor = math.ceil(size / 2)
    centre = (size - 1) / (2 * factor)
    for n in range(begin, end):
        for row in range(size):
            for column in range(size):
                x[n, row, column] = (1 - abs(row / factor - centre)) * (
                    1 - abs(column / factor - centre)
                )
