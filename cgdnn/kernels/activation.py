"""Activation functions over arrays seen as (rows, columns); the output may be the input itself."""

from __future__ import annotations

from cgdnn.kernels._jit import INT, REAL, array, kernel
from cgdnn.kernels.vector import emitted


@emitted
def _relu_forward(e, x, y, slope, start, length):  # type: ignore[no-untyped-def]
    build, zero, slope = e.builder, e.zero(), e.splat(slope)
    for (source, target), mask in e.along(length, e.at(x, start), e.at(y, start)):
        value = e.load(source, mask)
        # Adding zero turns the -0 of a zero slope into 0.
        scaled = build.fadd(build.fmul(slope, value), zero)
        below = build.fcmp_ordered("<=", value, zero)
        e.store(build.select(below, scaled, value), target, mask)


@kernel(array(2), array(2), REAL, INT, INT)
def relu_forward(x, y, negative_slope, begin, end):  # type: ignore[no-untyped-def]
    """Compute y = x where x > 0 or x is NaN, else negative_slope x, for the rows [begin, end)."""
    columns = x.shape[1]
    _relu_forward(x, y, negative_slope, begin * columns, (end - begin) * columns)


@emitted
def _relu_backward(e, x, dy, dx, slope, start, length):  # type: ignore[no-untyped-def]
    build, one, slope = e.builder, e.filled(1.0), e.splat(slope)
    pointers = [e.at(pointer, start) for pointer in (x, dy, dx)]
    for (known, gradient, target), mask in e.along(length, *pointers):
        above = build.fcmp_ordered(">", e.load(known, mask), e.zero())
        factor = build.select(above, one, slope)
        e.store(build.fmul(e.load(gradient, mask), factor), target, mask)


@kernel(array(2), array(2), array(2), REAL, INT, INT)
def relu_backward(x, dy, dx, negative_slope, begin, end):  # type: ignore[no-untyped-def]
    """Compute dx = dy where x > 0, else negative_slope dy, for the rows [begin, end).

    x may be the output instead, where negative_slope is not below zero.
    """
    columns = x.shape[1]
    _relu_backward(x, dy, dx, negative_slope, begin * columns, (end - begin) * columns)


@emitted
def _sigmoid_forward(e, x, y, start, length):  # type: ignore[no-untyped-def]
    build, one = e.builder, e.filled(1.0)
    for (source, target), mask in e.along(length, e.at(x, start), e.at(y, start)):
        inverse = build.fadd(one, e.exp(build.fneg(e.load(source, mask))))
        e.store(build.fdiv(one, inverse), target, mask)


@kernel(array(2), array(2), INT, INT)
def sigmoid_forward(x, y, begin, end):  # type: ignore[no-untyped-def]
    """Compute y = 1 / (1 + exp(-x)) within 4 units in the last place; 0 where that is denormal."""
    columns = x.shape[1]
    _sigmoid_forward(x, y, begin * columns, (end - begin) * columns)


@emitted
def _sigmoid_backward(e, y, dy, dx, start, length):  # type: ignore[no-untyped-def]
    build, one = e.builder, e.filled(1.0)
    pointers = [e.at(pointer, start) for pointer in (y, dy, dx)]
    for (known, gradient, target), mask in e.along(length, *pointers):
        value = e.load(known, mask)
        product = build.fmul(e.load(gradient, mask), value)
        e.store(build.fmul(product, build.fsub(one, value)), target, mask)


@kernel(array(2), array(2), array(2), INT, INT)
def sigmoid_backward(y, dy, dx, begin, end):  # type: ignore[no-untyped-def]
    """Compute dx = dy y (1 - y) from the output y."""
    columns = y.shape[1]
    _sigmoid_backward(y, dy, dx, begin * columns, (end - begin) * columns)


@emitted
def _tanh_forward(e, x, y, start, length):  # type: ignore[no-untyped-def]
    for (source, target), mask in e.along(length, e.at(x, start), e.at(y, start)):
        e.store(e.tanh(e.load(source, mask)), target, mask)


@kernel(array(2), array(2), INT, INT)
def tanh_forward(x, y, begin, end):  # type: ignore[no-untyped-def]
    """Compute y = tanh(x) within 4 units in the last place."""
    columns = x.shape[1]
    _tanh_forward(x, y, begin * columns, (end - begin) * columns)


@emitted
def _tanh_backward(e, y, dy, dx, start, length):  # type: ignore[no-untyped-def]
    build, one = e.builder, e.filled(1.0)
    pointers = [e.at(pointer, start) for pointer in (y, dy, dx)]
    for (known, gradient, target), mask in e.along(length, *pointers):
        value = e.load(known, mask)
        rest = build.fsub(one, build.fmul(value, value))
        e.store(build.fmul(e.load(gradient, mask), rest), target, mask)


@kernel(array(2), array(2), array(2), INT, INT)
def tanh_backward(y, dy, dx, begin, end):  # type: ignore[no-untyped-def]
    """Compute dx = dy (1 - y^2) from the output y."""
    columns = y.shape[1]
    _tanh_backward(y, dy, dx, begin * columns, (end - begin) * columns)
