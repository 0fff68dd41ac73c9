"""Softmax."""

from __future__ import annotations

from typing import ClassVar

from cgdnn.kernels import softmax as kernels
from cgdnn.kernels._jit import Kernel
from cgdnn.layers._axis import canonical_axis, view_by_axis
from cgdnn.layers._base import BEGIN, END, Layer, Operands, Shape, Step, Use, read, write

EXPONENTIAL_NANOSECONDS = 3.5
"""Cost of one element of a softmax."""


class Softmax(Layer):
    """Normalize exponentials along one axis: ``y_c = exp(x_c - m) / sum_k exp(x_k - m)``.

    m is the largest score, so that nothing overflows. The gradient is
    ``dx_c = y_c (dy_c - sum_k dy_k y_k)``.

    Fields of ``softmax_param``: ``axis`` (default 1; negative ones count from the last axis);
    ``engine`` changes nothing. A NaN among the scores makes the whole distribution NaN. May run in
    place (Caffe, softmax_layer.cpp).
    """

    in_place: ClassVar[bool] = True

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the shape of the bottom."""
        axis = canonical_axis(
            self, self.node.param.softmax_param.axis, bottoms[0], "softmax_param", "axis"
        )
        self._view = view_by_axis(bottoms[0], axis)
        return [bottoms[0]]

    def forward(self, operands: Operands) -> list[Step]:
        """Return one step over samples."""
        arrays = [read(operands.bottom[0], self._view), write(operands.top[0], self._view)]
        return [self._step(kernels.softmax_forward, arrays, EXPONENTIAL_NANOSECONDS)]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return one step over samples; it reads the top, not the bottom."""
        arrays = [
            read(operands.top[0], self._view),
            read(operands.top_diff[0], self._view),
            write(operands.bottom_diff[0], self._view),
        ]
        return [self._step(kernels.softmax_backward, arrays, 1.0)]

    def _step(self, kernel: Kernel, arrays: list[Use], cost: float) -> Step:
        n, r, c, i = self._view
        return Step(kernel, [*arrays, BEGIN, END], extent=n, cost=cost * r * c * i)
