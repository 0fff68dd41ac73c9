"""Products of a batch of vectors with a weight matrix.

The weights are read where they lie. A large layer is bound by reading them, so a forward or
backward_data step is cut over output columns rather than samples: each piece reads its own part
of the weights once. A piece then writes blocks of columns, an array (blocks, rows, width), which
`join_blocks` turns into rows. With images in the lanes of vectors (`product_images`) a weight is a
scalar that meets the vectors of all images, and nothing has to be joined.
"""

from __future__ import annotations

from cgdnn.kernels._jit import INT, REAL, array, device, kernel
from cgdnn.kernels.gemm import (
    BIAS,
    KEEP,
    NT_COLUMNS,
    STREAM,
    ZERO,
    multiply_apart,
    multiply_nn,
    multiply_nt,
)
from cgdnn.kernels.vector import fence, lanes_of

_CONTRACTION = 1024
"""Elements that a product by dot products sums before it adds lanes: rows stay in near caches."""
_DEPTH = 256
"""Rows of the right matrix that a broadcasting product takes at a time."""
_COLUMNS = 1024
"""Columns of a gradient that are computed at a time: the samples' parts of x stay in a cache."""
_PANEL = 1 << 16
"""Elements of vectors of images that stay in the second cache while all weights meet them."""
LARGE = 1 << 22
"""A gradient of more elements is in no cache when it is wanted: caches would read it to write it
(VGG-16's fc6 at batch 8, 411 MB: 26 ms, without them 11)."""


@device
def _start(c, block_begin, block_end, begin, end, columns, bias, has_bias):  # type: ignore[no-untyped-def]
    """Set rows [begin, end) of blocks of C to the bias, or to 0."""
    for block in range(block_begin, block_end):
        first = block * c.shape[2]
        count = min(c.shape[2], columns - first)
        for i in range(begin, end):
            row, values = c[block, i], bias[first : first + count]
            for j in range(count):
                row[j] = values[j] if has_bias else 0


_ARGUMENTS = (array(2), array(2), array(1), INT, array(3), INT, INT, INT, INT)


@kernel(*_ARGUMENTS)
def product_nt(a, b, bias, has_bias, c, block_begin, block_end, begin, end):  # type: ignore[no-untyped-def]
    """Set rows [begin, end) of blocks [block_begin, block_end) of C to A B^T + bias.

    Parameters
    ----------
    a : array (M, depth)
    b : array (N, depth)
    bias : array (N,)
        Not read unless `has_bias`.
    c : array (blocks, M, width)
        Column j of block i is column i * width + j of the product.
    """
    depth, columns, width = a.shape[1], b.shape[0], c.shape[2]
    _start(c, block_begin, block_end, begin, end, columns, bias, has_bias)
    for k in range(0, depth, _CONTRACTION):
        for block in range(block_begin, block_end):
            first = block * width
            multiply_nt(
                a, begin * depth + k, depth,
                b, first * depth + k, depth,
                c, (block * c.shape[1] + begin) * width, width,
                end - begin, min(width, columns - first), min(_CONTRACTION, depth - k),
                NT_COLUMNS * depth,
            )  # fmt: skip


@kernel(*_ARGUMENTS)
def product_nn(a, b, bias, has_bias, c, block_begin, block_end, begin, end):  # type: ignore[no-untyped-def]
    """Set rows [begin, end) of blocks [block_begin, block_end) of C to A B + bias.

    Parameters
    ----------
    a : array (M, depth)
    b : array (depth, N)
    bias, has_bias, c
        As in `product_nt`.
    """
    depth, columns, width = a.shape[1], b.shape[1], c.shape[2]
    _start(c, block_begin, block_end, begin, end, columns, bias, has_bias)
    for k in range(0, depth, _DEPTH):
        for block in range(block_begin, block_end):
            first = block * width
            multiply_nn(
                a, begin * depth + k, depth, 1,
                b, k * columns + first, columns,
                c, (block * c.shape[1] + begin) * width, width,
                end - begin, min(width, columns - first), min(_DEPTH, depth - k), KEEP, bias, 0,
                width,
            )  # fmt: skip


@kernel(array(2), INT, array(3), array(1), INT, array(3), INT, INT, INT)
def product_images(w, transposed, x, bias, has_bias, y, unit, begin, end):  # type: ignore[no-untyped-def]
    """Set, in each group of images, rows [begin, end) * unit of y to those of w x + bias.

    Parameters
    ----------
    w : array (M, depth), or (depth, M) if `transposed`
    x : array (N / L, depth, L)
    bias : array (M,)
        Not read unless `has_bias`.
    y : array (N / L, M, L)
    """
    groups, depth, place = x.shape
    rows = y.shape[1]
    w_row, w_k = (1, rows) if transposed else (depth, 1)
    top, count = begin * unit, (end - begin) * unit
    part = max(1, _PANEL // (groups * place))
    start = BIAS if has_bias else ZERO
    for k in range(0, depth, part):
        for lane in range(0, place, lanes_of(x)):
            multiply_apart(
                w, top * w_row + k * w_k, w_row, w_k,
                x, k * place + lane, place, depth * place,
                y, top * place + lane, place, rows * place,
                count, groups, min(part, depth - k), start, bias, top,
            )  # fmt: skip
        start = KEEP


@kernel(array(2), array(2), array(2), REAL, INT, INT)
def product_tn(a, b, c, accumulate, begin, end):  # type: ignore[no-untyped-def]
    """Set rows [begin, end) of C to A^T B, or add it where `accumulate` is not 0.

    Parameters
    ----------
    a : array (depth, M)
    b : array (depth, N)
    c : array (M, N)
    """
    start = ZERO
    if accumulate != 0:
        start = KEEP
    elif c.size > LARGE:
        start = STREAM
    columns = c.shape[1]
    for left in range(0, columns, _COLUMNS):
        multiply_nn(
            a, begin, 1, a.shape[1], b, left, columns, c, begin * columns + left, columns,
            end - begin, min(_COLUMNS, columns - left), a.shape[0], start, b, 0, 0,
        )  # fmt: skip
    fence(c)


@kernel(array(3), array(2), INT, INT)
def join_blocks(blocks, y, begin, end):  # type: ignore[no-untyped-def]
    """Copy rows [begin, end) of the array (blocks, rows, width) to those of y (rows, columns)."""
    width = blocks.shape[2]
    for block in range(blocks.shape[0]):
        first = block * width
        count = min(width, y.shape[1] - first)
        for i in range(begin, end):
            row, part = y[i, first : first + count], blocks[block, i]
            for j in range(count):
                row[j] = part[j]
