"""Convolution as unfolding and matrix products, one piece on one core (GEMM-in-Parallel).

Any number of spatial axes is brought to two: the last one, and the rows that the others make up.
An image is (C, rows, W), a filter bank (Co, C / group, Q, KW) where Q counts the kernel's rows, an
output image (Co, R, OW). Which input row a kernel row meets at an output row comes from a table:

* ``rows[q, r]``: the input row that kernel row q reads for output row r, -1 in the padding;
* ``outputs[q, h]``: the output row r with rows[q, r] == h, -1 where there is none.

The unfolded input U of an image has one row for each (channel, kernel row, kernel column) and one
column for each output pixel: y = W U, dW += dy U^T, dU = W^T dy. Only a block of U exists at a
time, in scratch: some channels by some pixels, sized by the ``*_scratch`` functions to stay in a
near cache. Unfolding a 1x1 convolution is a copy, which costs less than the strides it removes.

See Chellapilla, Puri, Simard: "High performance convolutional neural networks for document
processing", IWFHR 2006; Hadjis et al.: "Caffe con Troll", DanaC 2015.
"""

from __future__ import annotations

from cgdnn import machine
from cgdnn.kernels._jit import INT, REAL, array, device, kernel, scratch
from cgdnn.kernels.gemm import BIAS, KEEP, ZERO, multiply_nn, multiply_nt, nn_vectors
from cgdnn.kernels.vector import add_sum, copy_window, emitted, lanes_of

_FORWARD_DEPTH = 128
"""Rows of U that the forward pass multiplies at a time; such a panel stays in the first cache."""
_CONTRACTION = 512
"""Output pixels that the weight gradient sums before it adds lanes."""
_BLOCK_ELEMENTS = 1 << 16
"""Elements of U or dU that a backward pass holds: 256 KiB of float32, part of the second cache."""


def _lanes() -> int:
    """Return the lanes of a float32 vector; float64 blocks of as many elements have room."""
    return machine.vector_bytes() // 4


def forward_scratch(channels: int, taps: int) -> int:
    """Return the elements of scratch for `conv_forward_unfold`.

    Parameters
    ----------
    channels : int
        Input channels of a group.
    taps : int
        Q * KW.
    """
    return _block_channels(_FORWARD_DEPTH, channels, taps) * taps * 5 * _lanes()


def backward_weights_scratch(channels: int, taps: int, pixels: int) -> int:
    """Return the elements of scratch for `conv_backward_weights_unfold`."""
    images = max(1, _CONTRACTION // pixels)
    row = images * (min(pixels, _CONTRACTION) + 2 * _lanes())
    return _block_channels(_BLOCK_ELEMENTS // row, channels, taps) * taps * row


def backward_data_scratch(channels: int, taps: int, pixels: int) -> int:
    """Return the elements of scratch for `conv_backward_data_unfold`."""
    row = pixels + 2 * _lanes()
    return _block_channels(_BLOCK_ELEMENTS // row, channels, taps) * taps * row


def _block_channels(depth: int, channels: int, taps: int) -> int:
    """Return how many channels make up about `depth` rows of U, at least one."""
    return max(1, min(channels, depth // taps))


@device
def _unfold(  # type: ignore[no-untyped-def]
    x, n, c_begin, c_end, rows, kw, stride, pad, dilation, ow, p_begin, p_end, u, u_start, u_row
):
    """Write channels [c_begin, c_end) and pixels [p_begin, p_end) of the unfolded image n to U.

    Up to one vector beyond the end of each row of U is overwritten with anything.
    """
    lanes = lanes_of(x)
    channels, height, width = x.shape[1], x.shape[2], x.shape[3]
    for c in range(c_begin, c_end):
        for q in range(rows.shape[0]):
            target = u_start + ((c - c_begin) * rows.shape[0] + q) * kw * u_row
            r = p_begin // ow
            o = p_begin - r * ow
            p = p_begin
            while p < p_end:
                count = min(lanes, ow - o, p_end - p)
                row = rows[q, r]
                if row < 0:
                    for j in range(kw):
                        copy_window(u, target + j * u_row + p - p_begin, x, 0, 0, 0)
                else:
                    source = ((n * channels + c) * height + row) * width
                    for j in range(kw):
                        first = o * stride - pad + j * dilation
                        place = target + j * u_row + p - p_begin
                        if stride == 1:
                            high = min(count, width - first)
                            copy_window(u, place, x, source + first, -first, high)
                        else:
                            for i in range(count):
                                column = first + i * stride
                                inside = 0 <= column < width
                                u[place + i] = x[n, c, row, column] if inside else 0
                p += count
                o += count
                if o == ow:
                    o = 0
                    r += 1


@emitted
def _fold_vector(  # type: ignore[no-untyped-def]
    e, dx, dx_start, count, du, du_start, du_row, outputs, outputs_start, outputs_row,
    kernel_rows, kernel_columns, first, dilation, ow,
):
    """Set dx[dx_start + i] for i < count to the sum of what it gets from dU, at stride 1.

    Lane i meets output column first - j * dilation + i at kernel column j.
    """
    build = e.builder
    total = e.variable(e.zero())
    with e.loop(kernel_rows) as q:
        index = build.add(outputs_start, build.mul(q.index, outputs_row))
        output = e.scalar(e.at(outputs, index))
        with build.if_then(build.icmp_signed(">=", output, e.integer(0))):
            row = build.add(du_start, build.mul(output, ow))
            tap = build.mul(build.mul(q.index, kernel_columns), du_row)
            with e.loop(kernel_columns) as j:
                start = build.sub(first, build.mul(j.index, dilation))
                tap_row = build.add(tap, build.mul(j.index, du_row))
                offset = build.add(build.add(row, start), tap_row)
                high = e.smaller(count, build.sub(ow, start))
                mask = e.mask(build.neg(start), high)
                value = e.load(e.at(du, offset), mask)
                build.store(build.fadd(build.load(total), value), total)
    e.store(build.load(total), e.at(dx, dx_start), e.mask(e.integer(0), count))


@device
def _fold(  # type: ignore[no-untyped-def]
    dx, n, c_begin, c_end, rows, outputs, kw, stride, pad, dilation, ow, du, du_row
):
    """Set channels [c_begin, c_end) of image n of dx to the sums of their places in dU."""
    lanes = lanes_of(dx)
    channels, height, width = dx.shape[1], dx.shape[2], dx.shape[3]
    taps = rows.shape[0] * kw
    for c in range(c_begin, c_end):
        source = (c - c_begin) * taps * du_row
        if stride == 1:
            for h in range(height):
                target = ((n * channels + c) * height + h) * width
                for column in range(0, width, lanes):
                    _fold_vector(
                        dx, target + column, min(lanes, width - column), du, source, du_row,
                        outputs, h, height, rows.shape[0], kw, column + pad, dilation, ow,
                    )
        else:
            for h in range(height):
                for column in range(width):
                    dx[n, c, h, column] = 0
            for q in range(rows.shape[0]):
                for r in range(rows.shape[1]):
                    row = rows[q, r]
                    if row >= 0:
                        for j in range(kw):
                            shift = j * dilation - pad
                            place = source + (q * kw + j) * du_row + r * ow
                            o_begin = max(0, -(shift // stride))
                            o_end = min(ow, (width - 1 - shift) // stride + 1)
                            for o in range(o_begin, o_end):
                                dx[n, c, row, o * stride + shift] += du[place + o]


_GEOMETRY = (array(2, "int64"), INT, INT, INT)


@kernel(array(4), array(4), array(1), INT, array(4), *_GEOMETRY, scratch(1), INT, INT)
def conv_forward_unfold(  # type: ignore[no-untyped-def]
    x, w, b, has_bias, y, rows, stride, pad, dilation, u, begin, end
):
    """Set y = w * x + b for the images [begin, end).

    Parameters
    ----------
    x : array (N, C, H, W)
    w : array (Co, C / group, Q, KW)
    b : array (Co,)
        Not read unless `has_bias`.
    y : array (N, Co, R, OW)
    rows : array of int64 (Q, R)
    stride, pad, dilation : int
        Of the last axis.
    u : array (forward_scratch(C / group, Q * KW),)
    """
    group = x.shape[1] // w.shape[1]
    outputs, depth = w.shape[0] // group, w.shape[1] * w.shape[2] * w.shape[3]
    taps = w.shape[2] * w.shape[3]
    pixels = y.shape[2] * y.shape[3]
    lanes = lanes_of(x)
    u_row = (nn_vectors(x) + 1) * lanes
    block = min(w.shape[1], u.shape[0] // (taps * u_row))
    vectors = (pixels + lanes - 1) // lanes
    panels = (vectors + nn_vectors(x) - 1) // nn_vectors(x)
    for n in range(begin, end):
        for g in range(group):
            for panel in range(panels):
                p_begin = vectors * panel // panels * lanes
                p_end = min(vectors * (panel + 1) // panels * lanes, pixels)
                start = BIAS if has_bias else ZERO
                for c in range(0, w.shape[1], block):
                    c_end = min(c + block, w.shape[1])
                    channel = g * w.shape[1]
                    _unfold(
                        x, n, channel + c, channel + c_end, rows, w.shape[3], stride, pad,
                        dilation, y.shape[3], p_begin, p_end, u, 0, u_row,
                    )
                    multiply_nn(
                        w, g * outputs * depth + c * taps, depth, 1,
                        u, 0, u_row,
                        y, (n * w.shape[0] + g * outputs) * pixels + p_begin, pixels,
                        outputs, p_end - p_begin, (c_end - c) * taps,
                        start, b, g * outputs,
                    )
                    start = KEEP


@kernel(
    array(4), array(4), array(2), array(2), INT, INT, INT, *_GEOMETRY, scratch(1),
    INT, REAL, REAL, INT, INT, INT, INT,
)
def conv_backward_weights_unfold(  # type: ignore[no-untyped-def]
    x, dy, dw, db, has_bias, group, kw, rows, stride, pad, dilation, u,
    piece, keep_w, keep_b, o_begin, o_end, begin, end,
):
    """Set or add to the gradients of the filters [o_begin, o_end) from the images [begin, end).

    Parameters
    ----------
    x : array (N, C, H, W)
    dy : array (N, Co, R, OW)
    dw : array (pieces, Co * C / group * Q * KW)
        Row `piece` is written.
    db : array (pieces, Co)
        Likewise; not touched unless `has_bias`.
    group, kw : int
    rows, stride, pad, dilation
        As in `conv_forward_unfold`.
    u : array (backward_weights_scratch(C / group, Q * KW, R * OW),)
    keep_w, keep_b : real
        Where 0, what dw or db holds is overwritten, else added to.
    """
    channels, filters = x.shape[1] // group, dy.shape[1] // group
    taps = rows.shape[0] * kw
    depth = channels * taps
    pixels = dy.shape[2] * dy.shape[3]
    lanes = lanes_of(x)
    together = max(1, _CONTRACTION // pixels)  # images in one contraction
    chunk = min(pixels, _CONTRACTION)
    segment = (chunk + 2 * lanes - 1) // lanes * lanes
    u_row = together * segment
    block = min(channels, u.shape[0] // (taps * u_row))
    if keep_w == 0:
        for i in range(o_begin * depth, o_end * depth):
            dw[piece, i] = 0
    if has_bias and keep_b == 0:
        for o in range(o_begin, o_end):
            db[piece, o] = 0
    for n in range(begin, end, together):
        images = min(together, end - n)
        for p in range(0, pixels, chunk):
            length = min(chunk, pixels - p)
            if has_bias:
                for i in range(n, n + images):
                    for o in range(o_begin, o_end):
                        source = (i * dy.shape[1] + o) * pixels + p
                        add_sum(db, piece * dy.shape[1] + o, dy, source, length)
            for g in range(group):
                first = max(o_begin, g * filters)
                last = min(o_end, (g + 1) * filters)
                if first >= last:
                    continue
                for c in range(0, channels, block):
                    c_end = min(c + block, channels)
                    for i in range(images):
                        _unfold(
                            x, n + i, g * channels + c, g * channels + c_end, rows, kw, stride,
                            pad, dilation, dy.shape[3], p, p + length, u, i * segment, u_row,
                        )
                    multiply_nt(
                        dy, (n * dy.shape[1] + first) * pixels + p, pixels, dy.shape[1] * pixels,
                        u, 0, u_row, segment,
                        dw, piece * dw.shape[1] + first * depth + c * taps, depth,
                        last - first, (c_end - c) * taps, length, images,
                    )


@kernel(
    array(4), array(4), array(4), array(2, "int64"), *_GEOMETRY, scratch(1), INT, INT
)
def conv_backward_data_unfold(  # type: ignore[no-untyped-def]
    dy, w, dx, outputs, rows, stride, pad, dilation, du, begin, end
):
    """Set dx to the gradient of the images [begin, end).

    Parameters
    ----------
    dy : array (N, Co, R, OW)
    w : array (Co, C / group, Q, KW)
    dx : array (N, C, H, W)
    outputs : array of int64 (Q, H)
    rows, stride, pad, dilation
        As in `conv_forward_unfold`.
    du : array (backward_data_scratch(C / group, Q * KW, R * OW),)
    """
    group = dx.shape[1] // w.shape[1]
    filters, depth = w.shape[0] // group, w.shape[1] * w.shape[2] * w.shape[3]
    taps = w.shape[2] * w.shape[3]
    pixels = dy.shape[2] * dy.shape[3]
    lanes = lanes_of(dy)
    du_row = (pixels + 2 * lanes - 1) // lanes * lanes
    block = min(w.shape[1], du.shape[0] // (taps * du_row))
    for n in range(begin, end):
        for g in range(group):
            for c in range(0, w.shape[1], block):
                c_end = min(c + block, w.shape[1])
                channel = g * w.shape[1]
                multiply_nn(
                    w, g * filters * depth + c * taps, 1, depth,
                    dy, (n * w.shape[0] + g * filters) * pixels, pixels,
                    du, 0, du_row,
                    (c_end - c) * taps, pixels, filters, ZERO, w, 0,
                )
                _fold(
                    dx, n, channel + c, channel + c_end, rows, outputs, w.shape[3], stride, pad,
                    dilation, dy.shape[3], du, du_row,
                )
