"""Pooling: maximum or average over windows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cgdnn.errors import DescriptionError
from cgdnn.kernels import pool as kernels
from cgdnn.kernels import pool_lanes as lane_kernels
from cgdnn.kernels._jit import Kernel
from cgdnn.layers._axis import by_sample
from cgdnn.layers._base import (
    BEGIN,
    END,
    Argument,
    Buffer,
    Candidate,
    Count,
    Layer,
    Operands,
    Shape,
    Step,
    Use,
    read,
    write,
)
from cgdnn.layers._layout import NCHW, lane_candidates, stored_shape
from cgdnn.proto.cgdnn_pb2 import PoolingParameter


class Pooling(Layer):
    """Take the maximum or the average over windows of each channel.

    Fields of ``pooling_param``:

    * ``pool``: MAX (default) or AVE. STOCHASTIC is refused, since Caffe computes it on GPUs only.
    * ``kernel_size``, or ``kernel_h`` and ``kernel_w``; ``stride`` (default 1), or ``stride_h`` and
      ``stride_w``; ``pad`` (default 0), or ``pad_h`` and ``pad_w``. A pad must be below its kernel.
    * ``global_pooling``: one window as large as the bottom; then no kernel, stride or pad.
    * ``round_mode``: how ``(size + 2 pad - kernel) / stride + 1`` is rounded, CEIL (default) or
      FLOOR. With padding, a last window that would begin beyond the bottom and its padding in front
      is left out.
    * ``engine`` is accepted and ignored.

    AVE divides by the size of the window in the padded bottom, which ends at ``size + pad``. MAX
    gives the gradient to the first of equal values, row by row. With MAX a second top holds the
    place of each maximum as a number ``row * width + column`` (Caffe, pooling_layer.cpp).

    Other than in Caffe, a window wholly outside the bottom (rounding up with stride > kernel) gives
    0, place -1 and no gradient; Caffe gives -FLT_MAX, or divides by a negative size.
    """

    tops = Count(1, 2)

    def setup(self) -> None:
        """Read the window's fields and check all that needs no shapes."""
        param = self.node.param.pooling_param
        self._max = param.pool == PoolingParameter.MAX
        if param.pool == PoolingParameter.STOCHASTIC:
            raise self.error(
                "got pool: STOCHASTIC, which has no CPU implementation; expected MAX or AVE. "
                "Use pool: AVE or pool: MAX.",
                "pooling_param",
                "pool",
            )
        if len(self.node.tops) > 1 and not self._max:
            raise self.error(
                "got 2 tops with pool: AVE, expected 1, since only MAX has a mask. Remove the "
                "second top.",
                "top",
            )
        self._pad = self._pair("pad", default=(0, 0))
        self._stride = self._pair("stride", default=(1, 1))
        if min(self._stride) < 1:
            raise self._field_error(f"got stride {_by(self._stride)}, expected 1 or more", "stride")
        if param.global_pooling:
            self._check_global()
        else:
            self._kernel = self._pair("kernel_size", default=None)
            self._check_window()

    def _pair(self, name: str, default: tuple[int, int] | None) -> tuple[int, int]:
        """Return (h, w) of a field that is given square as `name`, or as its _h and _w forms."""
        param = self.node.param.pooling_param
        stem = name.removesuffix("_size")
        parts = (f"{stem}_h", f"{stem}_w")
        given = [part for part in parts if param.HasField(part)]
        if param.HasField(name):
            # Caffe lets a lone kernel_h or kernel_w beside kernel_size pass, and ignores it.
            if given and (len(given) == 2 or name != "kernel_size"):
                raise self._field_error(
                    f"got {name} and {' and '.join(given)}, expected {name}, or {parts[0]} and "
                    f"{parts[1]}. Keep one form",
                    given[0],
                )
            size = int(getattr(param, name))
            return size, size
        if len(given) == 2:
            return int(getattr(param, parts[0])), int(getattr(param, parts[1]))
        if given or default is None:
            raise self._field_error(
                f"got {' and '.join(given) or 'no kernel'}, expected {name}, or {parts[0]} and "
                f"{parts[1]}. Give {name}",
                *given,
            )
        return default

    def _check_window(self) -> None:
        if min(self._kernel) < 1:
            raise self._field_error(
                f"got kernel {_by(self._kernel)}, expected 1 or more. Give a size", "kernel_size"
            )
        if any(pad >= size for pad, size in zip(self._pad, self._kernel, strict=True)):
            raise self._field_error(
                f"got pad {_by(self._pad)} with kernel {_by(self._kernel)}, expected pad < kernel, "
                "so that no window lies in the padding alone. "
                f"Use pad {min(self._kernel) - 1} or less",
                "pad",
            )

    def _check_global(self) -> None:
        param = self.node.param.pooling_param
        for name in ("kernel_size", "kernel_h", "kernel_w"):
            if param.HasField(name):
                raise self._field_error(
                    f"got {name} {getattr(param, name)} with global_pooling, expected none, since "
                    f"the window is the whole bottom. Remove {name}",
                    name,
                )
        if self._pad != (0, 0) or self._stride != (1, 1):
            raise self._field_error(
                f"got pad {_by(self._pad)} and stride {_by(self._stride)} with global_pooling, "
                "expected pad 0 and stride 1. Remove them",
                "pad" if self._pad != (0, 0) else "stride",
            )

    def _field_error(self, text: str, *fields: str) -> DescriptionError:
        return self.error(f"{text}.", "pooling_param", *fields)

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return (num, channels, windows down, windows across), once or twice."""
        if len(bottoms[0]) != 4:
            raise self.error(
                f"got a bottom of shape {bottoms[0]}, expected four axes (num, channels, height, "
                "width). Add axes of size 1.",
                "bottom",
            )
        size = bottoms[0][2:]
        if self.node.param.pooling_param.global_pooling:
            self._kernel = size
        pooled = tuple(map(self._windows, size, self._kernel, self._pad, self._stride))
        if min(pooled) < 1:
            raise self._field_error(
                f"kernel {_by(self._kernel)} does not fit input {_by(size)} (+pad "
                f"{_by(self._pad)}). Use a smaller kernel, or more padding",
                "kernel_size",
            )
        return [(*bottoms[0][:2], *pooled)] * len(self.node.tops)

    def _windows(self, size: int, kernel: int, pad: int, stride: int) -> int:
        """Return the number of windows along one axis."""
        room = size + 2 * pad - kernel
        up = self.node.param.pooling_param.round_mode == PoolingParameter.CEIL
        count = (-(-room // stride) if up else room // stride) + 1
        # Caffe clips both axes where either is padded.
        if max(self._pad) > 0 and (count - 1) * stride >= size + pad:
            count -= 1
        return count

    @property
    def window(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Size, stride and padding of the windows, known after `infer_shapes`."""
        return self._kernel, self._stride, self._pad

    def route(self, layout: str) -> str | None:
        """Return the places of the maxima, where every window holds one."""
        sizes, counts = self.bottom_shapes[0][2:], self.top_shapes[0][2:]
        windows = zip(sizes, counts, self._stride, self._pad, strict=True)
        filled = all((count - 1) * step - pad < size for size, count, step, pad in windows)
        return f"places_{layout}" if self._max and filled else None

    def candidates(self, which: str) -> list[Candidate]:
        """Return the plain way, then those that work in lanes."""
        plain = super().candidates(which)
        if which == "backward_weights":
            return plain
        step = Pooling._forward_in_lanes if which == "forward" else Pooling._backward_in_lanes
        return [*plain, *lane_candidates(step, lambda layer, _: layer._refuse_lanes())]

    def _refuse_lanes(self) -> str | None:
        """Return why the layer cannot work in lane layouts, if so."""
        return "the mask is in N, C, H, W" if len(self.top_shapes) > 1 else None

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that pools (and the one that writes the mask top)."""
        blobs = [read(operands.bottom[0]), write(operands.top[0])]
        if not self._max:
            return [self._average(kernels.pool_average_forward, operands, blobs)]
        places = self._places(operands, NCHW)
        kernel = kernels.max_forward(self._kernel, self._stride)
        arguments: list[Argument] = [*blobs, write(places), *self._window(), BEGIN, END]
        num, channels, rows, columns = self.top_shapes[0]
        if kernel is kernels.pool_max_forward:
            cost = channels * rows * columns * (3.0 + prod(self._kernel))
        else:  # vectors, of 16 values where they are widest, begin anew in each row
            cost = channels * rows * -(-columns // 16) * 2.2 * self._kernel[0]
        steps = [Step(kernel, arguments, num, cost)]
        if len(operands.top) > 1:
            view = by_sample(self.top_shapes[0])
            source, mask = read(places, view), write(operands.top[1], view)
            steps.append(
                Step(kernels.pool_max_mask, [source, mask, BEGIN, END], view[0], 0.3 * view[1])
            )
        return steps

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that computes the bottom's diff."""
        top_diff, bottom_diff = operands.top_diff[0], operands.bottom_diff[0]
        if not self._max:
            blobs = [read(top_diff), write(bottom_diff)]
            return [self._average(kernels.pool_average_backward, operands, blobs)]
        pooled, plane = _planes(self.top_shapes[0]), _planes(self.bottom_shapes[0])
        dy, dx = read(top_diff, pooled), write(bottom_diff, plane)
        places = read(self._places(operands, NCHW), pooled)
        cost = 0.05 * plane[1] * plane[2] + 0.4 * pooled[1] * pooled[2]
        return [Step(kernels.pool_max_backward, [dy, places, dx, BEGIN, END], plane[0], cost)]

    def _forward_in_lanes(self, operands: Operands, layout: str) -> Step:
        """Return the step that pools in a lane layout."""
        plane, pooled = self._in_lanes(layout)
        blobs = [read(operands.bottom[0], plane), write(operands.top[0], pooled)]
        if self._max:
            kernel = lane_kernels.max_forward(self._kernel)
            blobs.append(write(self._places(operands, layout), pooled))
        else:
            kernel = lane_kernels.average_forward(self._kernel)
        added = prod(pooled[1:3]) * prod(self._kernel)
        unrolled = lane_kernels.is_unrolled(self._kernel)
        cost = prod(pooled[1:3]) + added * (0.3 if unrolled else 1.6 if self._max else 0.6)
        cost += prod(plane[1:3]) * (0.6 if self._max else 0.3)  # maxima search for NaN first
        return Step(kernel, [*blobs, *self._window(), BEGIN, END], plane[0], cost)

    def _backward_in_lanes(self, operands: Operands, layout: str) -> Step:
        """Return the step that computes the bottom's diff in a lane layout."""
        plane, pooled = self._in_lanes(layout)
        dy, dx = read(operands.top_diff[0], pooled), write(operands.bottom_diff[0], plane)
        if self._max:
            kernel = lane_kernels.max_backward(self._kernel, self._stride)
            places = read(self._places(operands, layout), pooled)
            arguments: list[Argument] = [dy, places, dx, *self._window(), BEGIN, END]
        else:
            kernel = lane_kernels.average_backward(self._kernel, self._stride)
            values = operands.scratch("values", (prod(pooled[1:]),))
            arguments = [dy, dx, *self._window(), values, BEGIN, END]
        unrolled = lane_kernels.is_unrolled(self._kernel, self._stride)
        cost = prod(plane[1:3]) + 0.35 * prod(pooled[1:3]) * prod(self._kernel)
        return Step(kernel, arguments, plane[0], cost if unrolled else 2 * cost)

    def _in_lanes(self, layout: str) -> tuple[Shape, Shape]:
        """Return bottom and top in a lane layout as (planes, height, width, lanes)."""
        bottom, top = self.bottom_shapes[0], self.top_shapes[0]
        num, channels, _, size = stored_shape(layout, bottom)
        return (num * channels, *bottom[2:], size), (num * channels, *top[2:], size)

    def _average(self, kernel: Kernel, operands: Operands, blobs: Sequence[Use]) -> Step:
        """Return the step over samples of one of the averaging kernels."""
        num, channels, height, width = self.bottom_shapes[0]
        pooled_h, pooled_w = self.top_shapes[0][2:]
        kernel_h, stride_h = self._kernel[0], self._stride[0]
        band = kernels.band_scratch(width, kernel_h)
        pooled = kernels.pooled_scratch(width, (pooled_h, pooled_w), kernel_h, stride_h)
        arguments: list[Argument] = [
            *blobs,
            *self._window(),
            kernels.band_rows(width),
            operands.scratch("band", (band,)),
            operands.scratch("pooled", (pooled,)),
            BEGIN,
            END,
        ]
        added = pooled_h * pooled_w * prod(self._kernel)
        cost = 0.04 * channels * (height * width + 2 * pooled_h * pooled_w + added)
        return Step(kernel, arguments, num, cost)

    def _window(self) -> list[int]:
        """Return what kernels want to know of the windows."""
        return [*self._kernel, *self._pad, *self._stride]

    def _places(self, operands: Operands, layout: str) -> Buffer:
        """Return the place of each maximum, kept for the backward pass in the same layout."""
        shape = stored_shape(layout, self.top_shapes[0])
        return operands.state(f"places_{layout}", shape, "int32")


def _planes(shape: Shape) -> tuple[int, int, int]:
    """Return (num, channels, height * width)."""
    return shape[0], shape[1], shape[2] * shape[3]


def _by(size: Sequence[int]) -> str:
    """Return sizes as messages show them: ``3x2``."""
    return "x".join(map(str, size))
