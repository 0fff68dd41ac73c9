"""Element by element kernels over arrays seen as (rows, columns).

In every kernel the output may be one of the inputs, since element (n, j) of the output depends on
the elements (n, j) of the inputs alone. Only rows [begin, end) are touched.

What layers run in place on large blobs is written in vectors: LLVM's own loops are scalar where
arrays overlap.
"""

from __future__ import annotations

from cgdnn.kernels._jit import INT, REAL, array, kernel
from cgdnn.kernels.random import random_u32
from cgdnn.kernels.vector import emitted


@kernel(array(2), REAL, INT, INT)
def fill(y, value, begin, end):  # type: ignore[no-untyped-def]
    """Set y to `value`."""
    for n in range(begin, end):
        for j in range(y.shape[1]):
            y[n, j] = value


@kernel(array(2), INT, array(2), INT, INT, INT, INT)
def copy_columns(x, x_start, y, y_start, count, begin, end):  # type: ignore[no-untyped-def]
    """Copy `count` columns: y[:, y_start + j] = x[:, x_start + j]; the other columns stay."""
    for n in range(begin, end):
        source = x[n, x_start : x_start + count]
        target = y[n, y_start : y_start + count]
        for j in range(count):
            target[j] = source[j]


@kernel(array(2), REAL, array(2), INT, INT)
def scale(x, alpha, y, begin, end):  # type: ignore[no-untyped-def]
    """Compute y = alpha x."""
    for n in range(begin, end):
        for j in range(x.shape[1]):
            y[n, j] = alpha * x[n, j]


@emitted
def _add_scaled(e, a, alpha, b, beta, y, start, length):  # type: ignore[no-untyped-def]
    build, alpha, beta = e.builder, e.splat(alpha), e.splat(beta)
    pointers = [e.at(pointer, start) for pointer in (a, b, y)]
    for (left, right, target), mask in e.along(length, *pointers):
        first = build.fmul(alpha, e.load(left, mask))
        second = build.fmul(beta, e.load(right, mask))
        e.store(build.fadd(first, second), target, mask)


@kernel(array(2), REAL, array(2), REAL, array(2), INT, INT)
def add_scaled(a, alpha, b, beta, y, begin, end):  # type: ignore[no-untyped-def]
    """Compute y = alpha a + beta b."""
    columns = a.shape[1]
    _add_scaled(a, alpha, b, beta, y, begin * columns, (end - begin) * columns)


@emitted
def _multiply(e, a, b, y, start, length):  # type: ignore[no-untyped-def]
    pointers = [e.at(pointer, start) for pointer in (a, b, y)]
    for (left, right, target), mask in e.along(length, *pointers):
        e.store(e.builder.fmul(e.load(left, mask), e.load(right, mask)), target, mask)


@kernel(array(2), array(2), array(2), INT, INT)
def multiply(a, b, y, begin, end):  # type: ignore[no-untyped-def]
    """Compute y = a b."""
    columns = a.shape[1]
    _multiply(a, b, y, begin * columns, (end - begin) * columns)


@kernel(array(2), array(2), array(2), array(2), INT, INT)
def divide_multiply(a, b, c, y, begin, end):  # type: ignore[no-untyped-def]
    """Compute y = a / b c; a zero in b gives what IEEE division gives."""
    for n in range(begin, end):
        for j in range(a.shape[1]):
            y[n, j] = a[n, j] / b[n, j] * c[n, j]


@kernel(array(2), array(2), array(2), array(2, "int32"), INT, INT)
def max_of_two(a, b, y, mask, begin, end):  # type: ignore[no-untyped-def]
    """Compute y = max(a, b) and mask = 0 where it is a's value, 1 where b's.

    A tie is b's, as in Caffe's eltwise_layer.cpp; a NaN in either is the maximum.
    """
    for n in range(begin, end):
        for j in range(a.shape[1]):
            first = a[n, j]
            second = b[n, j]
            takes_first = (first > second) | (first != first)
            y[n, j] = first if takes_first else second
            mask[n, j] = 0 if takes_first else 1


@kernel(array(2), INT, array(2), array(2, "int32"), INT, INT)
def max_with_next(x, index, y, mask, begin, end):  # type: ignore[no-untyped-def]
    """Update y = max(y, x), and set mask = index where x is strictly greater or NaN."""
    for n in range(begin, end):
        for j in range(x.shape[1]):
            value = x[n, j]
            known = y[n, j]
            better = (value > known) | (value != value)
            y[n, j] = value if better else known
            mask[n, j] = index if better else mask[n, j]


@kernel(array(2), array(2, "int32"), INT, array(2), INT, INT)
def select(x, mask, index, y, begin, end):  # type: ignore[no-untyped-def]
    """Compute y = x where mask equals `index`, else 0."""
    zero = x.dtype.type(0)
    for n in range(begin, end):
        for j in range(x.shape[1]):
            y[n, j] = x[n, j] if mask[n, j] == index else zero


@kernel(array(2), array(2), array(2, "uint8"), INT, REAL, INT, INT, INT, INT)
def dropout_forward(x, y, mask, threshold, factor, key, counter, begin, end):  # type: ignore[no-untyped-def]
    """Keep an element times `factor` where its random bits are at least `threshold`, else give 0.

    The bits of element (n, j) are ``random_u32(key, counter, n * columns + j)``, so that they
    depend on nothing else. mask is 1 where the element is kept. A NaN stays one when dropped.
    """
    bound = threshold  # up to 2**32
    for n in range(begin, end):
        first = n * x.shape[1]
        for j in range(x.shape[1]):
            kept = random_u32(key, counter, first + j) >= bound
            mask[n, j] = kept
            y[n, j] = x[n, j] * (factor if kept else x.dtype.type(0))


@kernel(array(2), array(2, "uint8"), REAL, array(2), INT, INT)
def dropout_backward(dy, mask, factor, dx, begin, end):  # type: ignore[no-untyped-def]
    """Compute dx = dy factor where mask is set, else 0 (times dy, so that a NaN shows)."""
    for n in range(begin, end):
        for j in range(dy.shape[1]):
            dx[n, j] = dy[n, j] * (factor if mask[n, j] else dy.dtype.type(0))
