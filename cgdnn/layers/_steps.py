"""Steps that several layers answer with."""

from __future__ import annotations

from cgdnn.kernels.elementwise import copy_columns, fill
from cgdnn.layers._axis import by_sample
from cgdnn.layers._base import BEGIN, END, Buffer, Shape, Step, read, write


def copy(source: Buffer, target: Buffer, shape: Shape) -> Step:
    """Return the step that copies a blob or diff of `shape`."""
    num, count = by_sample(shape)
    x, y = read(source, (num, count)), write(target, (num, count))
    return Step(copy_columns, [x, 0, y, 0, count, BEGIN, END], num, 0.3 * count)


def zero(target: Buffer, shape: Shape) -> Step:
    """Return the step that fills a blob or diff of `shape` with zeros."""
    num, count = by_sample(shape)
    return Step(fill, [write(target, (num, count)), 0.0, BEGIN, END], num, 0.1 * count)
