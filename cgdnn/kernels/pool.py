"""Maximum and average pooling over planes.

A window is a range of rows and columns of the padded plane; what lies in the padding counts for
nothing. Outputs whose window lies inside the plane's columns are computed 16, 8 or 4 at a time in
vector registers, each lane in the order of the plain loop, so that the bits do not depend on the
lanes; the others, and strides above 2, take the plain loop.

Positions are int32 indices row * width + column within a plane.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cgdnn.kernels._jit import INT, array, device, kernel


def _load_strided(context, builder, array_type, data, index, lanes, stride):  # type: ignore[no-untyped-def]
    """Emit a vector of data[index + stride * lane] for stride 1 or 2, reading nothing beyond."""
    element = context.get_data_type(array_type.dtype)
    itemsize = context.get_abi_sizeof(element)
    vector = ir.VectorType(element, lanes)

    def load(offset):  # type: ignore[no-untyped-def]
        place = builder.gep(data, [builder.add(index, ir.Constant(index.type, offset))])
        return builder.load(builder.bitcast(place, vector.as_pointer()), align=itemsize)

    if stride == 1:
        return load(0)
    # The second half begins one early, so as to end with the last element that is wanted.
    picked = [*range(0, lanes, 2), *range(lanes + 1, 2 * lanes, 2)]
    choice = ir.Constant(ir.VectorType(ir.IntType(32), lanes), picked)
    return builder.shuffle_vector(load(0), load(lanes - 1), choice)


def _store(context, builder, array_type, data, index, value):  # type: ignore[no-untyped-def]
    """Emit a store of a vector at data[index]."""
    itemsize = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    place = builder.bitcast(builder.gep(data, [index]), value.type.as_pointer())
    builder.store(value, place, align=itemsize)


def _splat(builder, scalar, lanes):  # type: ignore[no-untyped-def]
    """Emit a vector with `scalar` in every lane."""
    vector = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(vector, scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(first, vector, zeros)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _max_block(typingctx, lanes, stride, x, start, width, rows, columns, y, argmax, out):  # type: ignore[no-untyped-def]
    """Write `lanes` outputs from `out` on, the first window of which begins at x[start]."""
    size = types.intp
    signature = types.void(lanes, stride, x, size, size, size, size, y, argmax, size)
    lane_count, step = lanes.literal_value, stride.literal_value

    def codegen(context, builder, _signature, args):  # type: ignore[no-untyped-def]
        i32 = ir.IntType(32)
        _, _, x_value, start_value, width_value, row_count, column_count, *outputs, at = args
        data = context.make_array(x)(context, builder, x_value).data
        best = cgutils.alloca_once_value(
            builder, _load_strided(context, builder, x, data, start_value, lane_count, step)
        )
        lanes_apart = ir.Constant(ir.VectorType(i32, lane_count), [step * i for i in range(lane_count)])

        def positions(index):  # type: ignore[no-untyped-def]
            return builder.add(_splat(builder, builder.trunc(index, i32), lane_count), lanes_apart)

        where = cgutils.alloca_once_value(builder, positions(start_value))
        with cgutils.for_range(builder, row_count, intp=start_value.type) as row:
            first = builder.add(start_value, builder.mul(row.index, width_value))
            with cgutils.for_range(builder, column_count, intp=start_value.type) as column:
                index = builder.add(first, column.index)
                value = _load_strided(context, builder, x, data, index, lane_count, step)
                known = builder.load(best)
                better = builder.or_(
                    builder.fcmp_ordered(">", value, known),
                    builder.fcmp_unordered("uno", value, value),
                )
                builder.store(builder.select(better, value, known), best)
                builder.store(
                    builder.select(better, positions(index), builder.load(where)), where
                )
        for kind, array_value, result in zip((y, argmax), outputs, (best, where), strict=True):
            target = context.make_array(kind)(context, builder, array_value).data
            _store(context, builder, kind, target, at, builder.load(result))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _average_block(typingctx, lanes, stride, x, start, width, rows, columns, divisor, y, out):  # type: ignore[no-untyped-def]
    """Write `lanes` outputs from `out` on, the first window of which begins at x[start]."""
    size = types.intp
    signature = types.void(lanes, stride, x, size, size, size, size, x.dtype, y, size)
    lane_count, step = lanes.literal_value, stride.literal_value

    def codegen(context, builder, _signature, args):  # type: ignore[no-untyped-def]
        _, _, x_value, start_value, width_value, row_count, column_count, by, y_value, at = args
        data = context.make_array(x)(context, builder, x_value).data
        vector = ir.VectorType(by.type, lane_count)
        total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * lane_count))
        with cgutils.for_range(builder, row_count, intp=start_value.type) as row:
            first = builder.add(start_value, builder.mul(row.index, width_value))
            with cgutils.for_range(builder, column_count, intp=start_value.type) as column:
                index = builder.add(first, column.index)
                value = _load_strided(context, builder, x, data, index, lane_count, step)
                builder.store(builder.fadd(builder.load(total), value), total)
        mean = builder.fdiv(builder.load(total), _splat(builder, by, lane_count))
        target = context.make_array(y)(context, builder, y_value).data
        _store(context, builder, y, target, at, mean)
        return context.get_dummy_value()

    return signature, codegen


@device
def _whole_columns(width, pooled_w, kernel_w, pad_w, stride_w):  # type: ignore[no-untyped-def]
    """Return the range [first, last) of output columns that the vector blocks compute."""
    first = (pad_w + stride_w - 1) // stride_w
    last = min(pooled_w, (width - kernel_w + pad_w) // stride_w + 1)
    if stride_w > 2 or last - first < 4:
        return 0, 0
    return first, last


@device
def _max_window(x, top, left, rows, columns):  # type: ignore[no-untyped-def]
    """Return the first maximum of a window of the plane x (H, W) and its position."""
    best = x[top, left]
    where = top * x.shape[1] + left
    for i in range(rows):
        row = x[top + i, left : left + columns]
        for j in range(columns):
            if row[j] > best or row[j] != row[j]:
                best = row[j]
                where = (top + i) * x.shape[1] + left + j
    return best, where


@device
def _max_blocks(x, start, width, rows, columns, stride, y, argmax, out, count):  # type: ignore[no-untyped-def]
    """Write `count` outputs in blocks; the last block ends with the last output."""
    lanes = 16 if count >= 16 else 8 if count >= 8 else 4
    for block in range((count + lanes - 1) // lanes):
        at = min(block * lanes, count - lanes)
        from_ = start + at * stride
        to = out + at
        if lanes == 16 and stride == 1:
            _max_block(16, 1, x, from_, width, rows, columns, y, argmax, to)
        elif lanes == 16:
            _max_block(16, 2, x, from_, width, rows, columns, y, argmax, to)
        elif lanes == 8 and stride == 1:
            _max_block(8, 1, x, from_, width, rows, columns, y, argmax, to)
        elif lanes == 8:
            _max_block(8, 2, x, from_, width, rows, columns, y, argmax, to)
        elif stride == 1:
            _max_block(4, 1, x, from_, width, rows, columns, y, argmax, to)
        else:
            _max_block(4, 2, x, from_, width, rows, columns, y, argmax, to)


@kernel(array(4), array(4), array(4, "int32"), INT, INT, INT, INT, INT, INT, INT, INT)
def pool_max_forward(
    x, y, argmax, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end
):  # type: ignore[no-untyped-def]
    """Write the maximum of each window and its position, for the samples [begin, end).

    A tie goes to the first position, row by row; a NaN is the maximum of its window. A window
    wholly outside the plane gives 0 and position -1.

    Parameters
    ----------
    x : array (N, C, H, W)
    y : array (N, C, PH, PW), written
    argmax : int32 array (N, C, PH, PW), written
    """
    height, width = x.shape[2], x.shape[3]
    pooled_h, pooled_w = y.shape[2], y.shape[3]
    first, last = _whole_columns(width, pooled_w, kernel_w, pad_w, stride_w)
    for n in range(begin, end):
        for c in range(x.shape[1]):
            plane, values, places = x[n, c], y[n, c], argmax[n, c]
            for ph in range(pooled_h):
                top = max(ph * stride_h - pad_h, 0)
                rows = min(ph * stride_h - pad_h + kernel_h, height) - top
                blocked = last - first if rows > 0 else 0
                if blocked > 0:
                    left = top * width + first * stride_w - pad_w
                    out = ph * pooled_w + first
                    _max_blocks(
                        plane, left, width, rows, kernel_w, stride_w, values, places, out, blocked
                    )
                for other in range(pooled_w - blocked):
                    pw = other if other < first else other + blocked
                    left = max(pw * stride_w - pad_w, 0)
                    columns = min(pw * stride_w - pad_w + kernel_w, width) - left
                    if rows > 0 and columns > 0:
                        values[ph, pw], places[ph, pw] = _max_window(
                            plane, top, left, rows, columns
                        )
                    else:
                        values[ph, pw] = 0
                        places[ph, pw] = -1


@kernel(array(3), array(3, "int32"), array(3), INT, INT)
def pool_max_backward(dy, argmax, dx, begin, end):  # type: ignore[no-untyped-def]
    """Write dx (N, C, H W) as the sum of the dy (N, C, PH PW) whose maximum it was."""
    zero = dx.dtype.type(0)
    for n in range(begin, end):
        for c in range(dx.shape[1]):
            plane = dx[n, c]
            for i in range(plane.shape[0]):
                plane[i] = zero
            for o in range(dy.shape[2]):
                position = argmax[n, c, o]
                if position >= 0:
                    plane[position] += dy[n, c, o]


@kernel(array(2, "int32"), array(2), INT, INT)
def pool_max_mask(argmax, mask, begin, end):  # type: ignore[no-untyped-def]
    """Write the positions as numbers of the run's type, for the rows [begin, end)."""
    for n in range(begin, end):
        for j in range(mask.shape[1]):
            mask[n, j] = argmax[n, j]


@device
def _average_blocks(x, start, width, rows, columns, stride, divisor, y, out, count):  # type: ignore[no-untyped-def]
    """Write `count` outputs in blocks; the last block ends with the last output."""
    lanes = 16 if count >= 16 else 8 if count >= 8 else 4
    for block in range((count + lanes - 1) // lanes):
        at = min(block * lanes, count - lanes)
        from_ = start + at * stride
        to = out + at
        if lanes == 16 and stride == 1:
            _average_block(16, 1, x, from_, width, rows, columns, divisor, y, to)
        elif lanes == 16:
            _average_block(16, 2, x, from_, width, rows, columns, divisor, y, to)
        elif lanes == 8 and stride == 1:
            _average_block(8, 1, x, from_, width, rows, columns, divisor, y, to)
        elif lanes == 8:
            _average_block(8, 2, x, from_, width, rows, columns, divisor, y, to)
        elif stride == 1:
            _average_block(4, 1, x, from_, width, rows, columns, divisor, y, to)
        else:
            _average_block(4, 2, x, from_, width, rows, columns, divisor, y, to)


@device
def average_plane(x, y, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w):  # type: ignore[no-untyped-def]
    """Pool one plane x (H, W) to y (PH, PW); see `pool_average_forward`."""
    height, width = x.shape
    pooled_w = y.shape[1]
    first, last = _whole_columns(width, pooled_w, kernel_w, pad_w, stride_w)
    for ph in range(y.shape[0]):
        above = ph * stride_h - pad_h
        below = min(above + kernel_h, height + pad_h)
        top = max(above, 0)
        rows = min(below, height) - top
        blocked = last - first if rows > 0 else 0
        if blocked > 0:
            divisor = x.dtype.type((below - above) * kernel_w)
            left = top * width + first * stride_w - pad_w
            out = ph * pooled_w + first
            _average_blocks(x, left, width, rows, kernel_w, stride_w, divisor, y, out, blocked)
        for other in range(pooled_w - blocked):
            pw = other if other < first else other + blocked
            before = pw * stride_w - pad_w
            after = min(before + kernel_w, width + pad_w)
            left = max(before, 0)
            columns = min(after, width) - left
            total = x.dtype.type(0)
            if rows > 0 and columns > 0:
                for i in range(rows):
                    row = x[top + i, left : left + columns]
                    for j in range(columns):
                        total += row[j]
                total /= x.dtype.type((below - above) * (after - before))
            y[ph, pw] = total


@device
def average_plane_backward(dy, dx, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w):  # type: ignore[no-untyped-def]
    """Spread dy (PH, PW) over the windows in one plane dx (H, W), overwritten."""
    height, width = dx.shape
    for h in range(height):
        for w in range(width):
            dx[h, w] = 0
    for ph in range(dy.shape[0]):
        above = ph * stride_h - pad_h
        below = min(above + kernel_h, height + pad_h)
        top = max(above, 0)
        rows = min(below, height) - top
        for pw in range(dy.shape[1]):
            before = pw * stride_w - pad_w
            after = min(before + kernel_w, width + pad_w)
            left = max(before, 0)
            columns = min(after, width) - left
            if rows > 0 and columns > 0:
                share = dy[ph, pw] / dy.dtype.type((below - above) * (after - before))
                for i in range(rows):
                    row = dx[top + i, left : left + columns]
                    for j in range(columns):
                        row[j] += share


@kernel(array(4), array(4), INT, INT, INT, INT, INT, INT, INT, INT)
def pool_average_forward(
    x, y, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end
):  # type: ignore[no-untyped-def]
    """Write the sum of each window over its size, for the samples [begin, end).

    The size counts padding, but only up to pad rows and columns beyond the far border, as in
    Caffe's pooling_layer.cpp. A window wholly outside the plane gives 0.

    Parameters
    ----------
    x : array (N, C, H, W)
    y : array (N, C, PH, PW), written
    """
    for n in range(begin, end):
        for c in range(x.shape[1]):
            average_plane(x[n, c], y[n, c], kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w)


@kernel(array(4), array(4), INT, INT, INT, INT, INT, INT, INT, INT)
def pool_average_backward(
    dy, dx, kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w, begin, end
):  # type: ignore[no-untyped-def]
    """Write dx (N, C, H, W) from dy (N, C, PH, PW), for the samples [begin, end)."""
    for n in range(begin, end):
        for c in range(dx.shape[1]):
            average_plane_backward(
                dy[n, c], dx[n, c], kernel_h, kernel_w, pad_h, pad_w, stride_h, stride_w
            )
