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
from cgdnn.kernels.gemm import BIAS, KEEP, ZERO, multiply_nn, multiply_scattered, nn_vectors
from cgdnn.kernels.vector import add_sum, emitted, lanes_of, transpose_block

_FORWARD_DEPTH = 128
"""Rows of U that the forward pass multiplies at a time; such a panel stays in the first cache."""
_CONTRACTION = 128
"""Output pixels that the weight gradient contracts at a time, in whole rows."""
_DEPTH = 512
"""Rows of U and of the weight gradient that it holds."""
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


def backward_weights_scratch(
    channels: int, taps: int, kernel_columns: int, output: tuple[int, int], padded: int
) -> tuple[int, int]:  # fmt: skip
    """Return the sizes of the two scratch arrays of `conv_backward_weights_unfold`.

    Parameters
    ----------
    channels, taps
        As in `forward_scratch`.
    kernel_columns : int
    output : tuple of int
        Rows and columns of an output image.
    padded : int
        Columns of an input image, padding included.
    """
    rows = min(output[0], max(1, _CONTRACTION // output[1]))
    depth = _block_channels(_DEPTH, channels, taps) * taps
    width = 4 * _lanes()
    gathered = depth // kernel_columns * rows * padded + _lanes()
    return depth * width + (rows * output[1] + _lanes()) * width + gathered, depth


def backward_data_scratch(channels: int, taps: int, pixels: int) -> int:
    """Return the elements of scratch for `conv_backward_data_unfold`."""
    row = pixels + 2 * _lanes()
    return _block_channels(_BLOCK_ELEMENTS // row, channels, taps) * taps * row


def _block_channels(depth: int, channels: int, taps: int) -> int:
    """Return how many channels make up about `depth` rows of U, at least one."""
    return max(1, min(channels, depth // taps))


@emitted
def _unfold_vectors(  # type: ignore[no-untyped-def]
    e, u, u_start, u_row, x, x_start, channels, plane, width,
    rows, rows_start, rows_row, kernel_rows, kernel_columns, first, dilation, stride,
):  # fmt: skip
    """Write one vector to each row of U, for one run of output pixels, at stride 1, 2 or 4.

    Lane i of the row of (channel c, kernel row q, kernel column j) gets column
    first + j * dilation + i * stride of the input row that the table names, or 0 outside of it.
    """
    build = e.builder
    taps = build.mul(build.mul(kernel_rows, kernel_columns), u_row)
    with e.cases(build.lshr(stride, e.integer(1)), 3) as each:
        for doublings in each:
            with e.loop(channels) as c, e.loop(kernel_rows) as q:
                row = e.scalar(e.at(rows, rows_start, build.mul(q.index, rows_row)))
                exists = build.icmp_signed(">=", row, e.integer(0))
                bound = build.select(exists, width, e.integer(0))
                plane_start = build.add(x_start, build.mul(c.index, plane))
                source = e.at(x, plane_start, build.mul(row, width))
                tap = build.mul(build.mul(q.index, kernel_columns), u_row)
                target = e.at(u, u_start, build.mul(c.index, taps), tap)
                numbers = e.variable(e.lane_numbers(first))
                moving = (e.at(source, first), dilation), (target, u_row)
                with e.sweep(kernel_columns, *moving) as (from_x, to_u):
                    columns = build.load(numbers)
                    build.store(e.shifted(columns, dilation), numbers)
                    parts = []
                    for span in range(1 << doublings):
                        distance = e.integer(span * e.lanes)
                        mask = e.within(e.shifted(columns, distance), bound)
                        parts.append(e.load(e.at(from_x, distance), mask))
                    while len(parts) > 1:
                        even = range(0, 2 * e.lanes, 2)
                        pairs = zip(parts[::2], parts[1::2], strict=True)
                        parts = [e.shuffle(a, b, even) for a, b in pairs]
                    e.store(parts[0], to_u)


@device
def _unfold(  # type: ignore[no-untyped-def]
    x, n, c_begin, c_end, rows, kw, stride, pad, dilation, ow, p_begin, p_end, u, u_start, u_row
):  # fmt: skip
    """Write channels [c_begin, c_end) and pixels [p_begin, p_end) of the unfolded image n to U.

    Up to one vector beyond the end of each row of U is overwritten with anything.
    """
    lanes = lanes_of(x)
    height, width = x.shape[2], x.shape[3]
    r = p_begin // ow
    o = p_begin - r * ow
    p = p_begin
    while p < p_end:
        count = min(lanes, ow - o, p_end - p)
        first = o * stride - pad
        place = u_start + p - p_begin
        if stride == 1 or stride == 2 or stride == 4:
            # Lanes from `count` on do not matter: the next run overwrites them.
            _unfold_vectors(
                u, place, u_row, x, (n * x.shape[1] + c_begin) * height * width,
                c_end - c_begin, height * width, width,
                rows, r, rows.shape[1], rows.shape[0], kw, first, dilation, stride,
            )  # fmt: skip
        else:
            for c in range(c_begin, c_end):
                for q in range(rows.shape[0]):
                    row = rows[q, r]
                    for j in range(kw):
                        for i in range(count):
                            column = first + j * dilation + i * stride
                            inside = row >= 0 and 0 <= column < width
                            u[place + i] = x[n, c, row, column] if inside else 0
                        place += u_row
        p += count
        o += count
        if o == ow:
            o = 0
            r += 1


@emitted
def _fold_vector(  # type: ignore[no-untyped-def]
    e, dx, dx_start, count, du, du_start, du_row, outputs, outputs_start, outputs_row,
    kernel_rows, kernel_columns, first, dilation, ow,
):  # fmt: skip
    """Set dx[dx_start + i] for i < count to the sum of what it gets from dU, at stride 1.

    Lane i meets output column first - j * dilation + i at kernel column j.
    """
    build = e.builder
    total = e.variable(e.zero())
    lanes = e.lane_numbers(first)
    back = build.neg(dilation)
    next_tap = build.sub(du_row, dilation)
    with e.loop(kernel_rows) as q:
        output = e.scalar(e.at(outputs, outputs_start, build.mul(q.index, outputs_row)))
        with build.if_then(build.icmp_signed(">=", output, e.integer(0))):
            tap = build.mul(build.mul(q.index, kernel_columns), du_row)
            source = e.at(du, du_start, tap, build.mul(output, ow), first)
            numbers = e.variable(lanes)
            with e.sweep(kernel_columns, (source, next_tap)) as (place,):
                columns = build.load(numbers)
                build.store(e.shifted(columns, back), numbers)
                value = e.load(place, e.within(columns, ow))
                build.store(build.fadd(build.load(total), value), total)
    e.store(build.load(total), e.at(dx, dx_start), e.first_lanes(count))


@device
def _fold(  # type: ignore[no-untyped-def]
    dx, n, c_begin, c_end, rows, outputs, kw, stride, pad, dilation, ow, du, du_row
):  # fmt: skip
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
                    )  # fmt: skip
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
):  # fmt: skip
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
                    )  # fmt: skip
                    multiply_nn(
                        w, g * outputs * depth + c * taps, depth, 1,
                        u, 0, u_row,
                        y, (n * w.shape[0] + g * outputs) * pixels + p_begin, pixels,
                        outputs, p_end - p_begin, (c_end - c) * taps,
                        start, b, g * outputs, 0,
                    )  # fmt: skip
                    start = KEEP


@emitted
def _copy_padded_row(e, y, y_start, x, x_start, width, pad, length):  # type: ignore[no-untyped-def]
    """Set y[i] = x[i - pad] for i < length, or 0 outside of the row of `width` values.

    Up to one vector beyond the end of y is overwritten with anything.
    """
    build = e.builder
    vectors = build.sdiv(build.add(length, e.integer(e.lanes - 1)), e.integer(e.lanes))
    with e.loop(vectors) as v:
        place = build.mul(v.index, e.integer(e.lanes))
        column = build.sub(place, pad)
        mask = e.within(e.lane_numbers(column), width)
        e.store(e.load(e.at(x, x_start, column), mask), e.at(y, y_start, place))


@device
def _gather_rows(  # type: ignore[no-untyped-def]
    x, n, c_begin, c_end, rows, r_begin, r_end, pad, padded, u, u_start, u_row
):  # fmt: skip
    """Write the padded input rows that output rows [r_begin, r_end) read.

    One row of U for each (channel, kernel row) holds them one after the other. Up to one vector
    beyond its end is overwritten with anything.
    """
    height, width = x.shape[2], x.shape[3]
    for c in range(c_begin, c_end):
        for q in range(rows.shape[0]):
            place = u_start + ((c - c_begin) * rows.shape[0] + q) * u_row
            for r in range(r_begin, r_end):
                row = rows[q, r]
                source = ((n * x.shape[1] + c) * height + row) * width
                _copy_padded_row(u, place, x, source, width if row >= 0 else 0, pad, padded)
                place += padded


@device
def _transpose(y, y_start, y_row, x, x_start, x_row, rows, columns, keep):  # type: ignore[no-untyped-def]
    """Set, or with `keep` add to, y[j, i] = x[i, j] for i < rows, j < columns."""
    lanes = lanes_of(x)
    for i in range(0, rows, lanes):
        for j in range(0, columns, lanes):
            transpose_block(
                y, y_start + j * y_row + i, y_row, x, x_start + i * x_row + j, x_row,
                min(lanes, rows - i), min(lanes, columns - j), keep,
            )  # fmt: skip


@kernel(
    *(array(4), array(4), array(2), array(2), INT, INT, INT, *_GEOMETRY),
    *(scratch(1), scratch(1, "int64"), INT, REAL, REAL, INT, INT, INT, INT, INT),
)
def conv_backward_weights_unfold(  # type: ignore[no-untyped-def]
    x, dy, dw, db, has_bias, group, kw, rows, stride, pad, dilation, u, places,
    piece, keep_w, keep_b, unit, first, last, begin, end,
):  # fmt: skip
    """Set or add to the gradients of some filters from the images [begin, end).

    Here U is unfolded along rows only: the kernel's columns are the same row read from different
    places. The product is dW^T += U dy^T with dy transposed, so that no sum is spread over lanes.

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
    u, places : array, array of int64
        As large as `backward_weights_scratch` says.
    keep_w, keep_b : real
        Where 0, what dw or db holds is overwritten, else added to.
    unit, first, last : int
        The filters are [first * unit, last * unit).
    """
    lanes = lanes_of(x)
    o_begin, o_end = first * unit, last * unit
    channels, filters = x.shape[1] // group, dy.shape[1] // group
    taps = rows.shape[0] * kw
    ow = dy.shape[3]
    pixels = dy.shape[2] * ow
    chunk = min(dy.shape[2], max(1, _CONTRACTION // ow))
    padded = x.shape[3] + 2 * pad
    width = nn_vectors(x) * lanes
    block = min(channels, max(1, _DEPTH // taps))
    dy_start = block * taps * width
    u_start = dy_start + (chunk * ow + lanes) * width
    for i in range(block * rows.shape[0]):
        for j in range(kw):
            places[i * kw + j] = u_start + i * chunk * padded + j * dilation
    if has_bias:
        for o in range(o_begin, o_end):
            if keep_b == 0:
                db[piece, o] = 0
            for n in range(begin, end):
                add_sum(db, piece * dy.shape[1] + o, dy, (n * dy.shape[1] + o) * pixels, pixels)
    for g in range(group):
        stop = min(o_end, (g + 1) * filters)
        for o in range(max(o_begin, g * filters), stop, width):
            count = min(width, stop - o)
            for c in range(0, channels, block):
                c_end = min(c + block, channels)
                depth = (c_end - c) * taps
                for i in range(depth * width):
                    u[i] = 0
                for n in range(begin, end):
                    for r in range(0, dy.shape[2], chunk):
                        r_end = min(r + chunk, dy.shape[2])
                        _gather_rows(
                            x, n, g * channels + c, g * channels + c_end, rows, r, r_end, pad,
                            padded, u, u_start, chunk * padded,
                        )  # fmt: skip
                        _transpose(
                            u, dy_start, width, dy, (n * dy.shape[1] + o) * pixels + r * ow, pixels,
                            count, (r_end - r) * ow, 0,
                        )  # fmt: skip
                        multiply_scattered(
                            u, places, padded, stride, u, dy_start, width, u, 0, width,
                            depth, count, ow, r_end - r,
                        )  # fmt: skip
                _transpose(
                    dw, piece * dw.shape[1] + o * channels * taps + c * taps, channels * taps,
                    u, 0, width, depth, count, keep_w != 0,
                )  # fmt: skip


@kernel(array(4), array(4), array(4), array(2, "int64"), *_GEOMETRY, scratch(1), INT, INT)
def conv_backward_data_unfold(  # type: ignore[no-untyped-def]
    dy, w, dx, outputs, rows, stride, pad, dilation, du, begin, end
):  # fmt: skip
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
                    (c_end - c) * taps, pixels, filters, ZERO, w, 0, 0,
                )  # fmt: skip
                _fold(
                    dx, n, channel + c, channel + c_end, rows, outputs, w.shape[3], stride, pad,
                    dilation, dy.shape[3], du, du_row,
                )  # fmt: skip
