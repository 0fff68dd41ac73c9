"""Layers that apply one function to every value."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from cgdnn.kernels import activation as kernels
from cgdnn.kernels._jit import Kernel
from cgdnn.layers._axis import by_sample
from cgdnn.layers._base import (
    BEGIN,
    END,
    Argument,
    Candidate,
    Layer,
    Operands,
    Shape,
    Step,
    read,
    write,
)
from cgdnn.layers._layout import full_layouts


class _Activation(Layer):
    """A function of each value, whose gradient needs one array beside the top's diff."""

    in_place = True
    forward_kernel: ClassVar[Kernel]
    backward_kernel: ClassVar[Kernel]
    from_top: ClassVar[bool] = True
    """Whether the gradient is computed from the top's values or from the bottom's."""
    cost: ClassVar[float]
    """Estimated nanoseconds a value of the forward pass."""

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the shape of the bottom."""
        return [bottoms[0]]

    def numbers(self) -> list[Argument]:
        """Return the numbers that both kernels take before their range."""
        return []

    def candidates(self, which: str) -> list[Candidate]:
        """Return the one way, which serves any layout."""
        return [
            replace(candidate, layouts=full_layouts(self.bottom_shapes[0]))
            for candidate in super().candidates(which)
        ]

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that computes the top."""
        view = by_sample(operands.bottom[0].shape)
        arrays = [read(operands.bottom[0], view), write(operands.top[0], view)]
        arguments: list[Argument] = [*arrays, *self.numbers(), BEGIN, END]
        return [Step(self.forward_kernel, arguments, view[0], self.cost * view[1])]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that computes the bottom's diff."""
        view = by_sample(operands.bottom[0].shape)
        known = operands.top[0] if self.from_top else operands.bottom[0]
        arrays = [
            read(known, view),
            read(operands.top_diff[0], view),
            write(operands.bottom_diff[0], view),
        ]
        arguments: list[Argument] = [*arrays, *self.numbers(), BEGIN, END]
        return [Step(self.backward_kernel, arguments, view[0], 0.4 * view[1])]


class ReLU(_Activation):
    """Keep positive values and scale the others: ``y = x`` where ``x > 0``, else ``slope x``.

    Field of ``relu_param``: ``negative_slope`` (default 0); ``engine`` is accepted and ignored.
    May run in place. The gradient at exactly 0 is that of the negative side. In place it looks at
    the top, which has the bottom's sign unless the slope is negative (Caffe, relu_layer.cpp). A NaN
    stays one.
    """

    forward_kernel = kernels.relu_forward
    backward_kernel = kernels.relu_backward
    from_top = False
    cost = 0.3

    @property
    def slope(self) -> float:
        """What values that are not positive are multiplied by."""
        return float(self.node.param.relu_param.negative_slope)

    def numbers(self) -> list[Argument]:
        """Return the slope."""
        return [self.slope]


class Sigmoid(_Activation):
    """Compute the logistic function: ``y = 1 / (1 + exp(-x))``, with ``dx = y (1 - y) dy``.

    It has no fields but ``sigmoid_param { engine }``, which is accepted and ignored. May run in
    place, since the gradient needs the top alone (Caffe, sigmoid_layer.cpp).
    """

    forward_kernel = kernels.sigmoid_forward
    backward_kernel = kernels.sigmoid_backward
    cost = 0.3


class TanH(_Activation):
    """Compute the hyperbolic tangent: ``y = tanh(x)``, with ``dx = (1 - y^2) dy``.

    It has no fields but ``tanh_param { engine }``, which is accepted and ignored. May run in
    place, since the gradient needs the top alone (Caffe, tanh_layer.cpp).
    """

    forward_kernel = kernels.tanh_forward
    backward_kernel = kernels.tanh_backward
    cost = 0.3
