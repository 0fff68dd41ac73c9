import math

import numpy as np


def relu_forward(x, y, negative_slope, begin, end):
    for n in range(begin, end):
        for j in range(x.shape[1]):
            y[n, j] = negative_slope * x[n, j] if x[n, j] <= 0 else x[n, j]


def relu_backward(x, dy, dx, negative_slope, begin, end):
    for n in range(begin, end):
        for j in range(x.shape[1]):
            dx[n, j] = dy[n, j] if x[n, j] > 0 else negative_slope * dy[n, j]


def sigmoid_forward(x, y, begin, end):
    for n in range(begin, end):
        for j in range(x.shape[1]):
            y[n, j] = 1 / (1 + np.exp(-x[n, j]))


def sigmoid_backward(y, dy, dx, begin, end):
    for n in range(begin, end):
        for j in range(y.shape[1]):
            dx[n, j] = y[n, j] * (1 - y[n, j]) * dy[n, j]


def tanh_forward(x, y, begin, end):
    for n in range(begin, end):
        for j in range(x.shape[1]):
            y[n, j] = math.tanh(x[n, j])


def tanh_backward(y, dy, dx, begin, end):
    for n in range(begin, end):
        for j in range(y.shape[1]):
            dx[n, j] = (1 - y[n, j] ** 2) * dy[n, j]
