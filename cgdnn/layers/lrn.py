"""Local response normalization."""

from __future__ import annotations

from math import prod

from cgdnn.kernels import lrn as kernels
from cgdnn.layers._base import (
    BEGIN,
    END,
    Argument,
    Buffer,
    Layer,
    Operands,
    Shape,
    Step,
    Use,
    read,
    write,
)
from cgdnn.proto.cgdnn_pb2 import LRNParameter


class LRN(Layer):
    """Divide each value by a power of the mean square around it: ``y = x s^-beta``.

    Fields of ``lrn_param``:

    * ``norm_region``: ACROSS_CHANNELS (default): ``s = k + alpha / local_size * sum(x^2)`` over
      ``local_size`` channels around this one; WITHIN_CHANNEL: ``s = 1 + alpha * mean(x^2)`` over a
      square of ``local_size`` by ``local_size`` around this place. Beyond the blob x counts as 0.
    * ``local_size`` (default 5, odd), ``alpha`` (1), ``beta`` (0.75).
    * ``k`` (1): ACROSS_CHANNELS only; WITHIN_CHANNEL ignores it, as Caffe does.
    * ``engine`` is accepted and ignored.

    The bottom must have four axes (Caffe, lrn_layer.cpp; Krizhevsky et al., NIPS 2012).
    """

    def setup(self) -> None:
        """Check the size."""
        param = self.node.param.lrn_param
        self._within = param.norm_region == LRNParameter.WITHIN_CHANNEL
        if param.local_size % 2 == 0:
            raise self.error(
                f"got local_size {param.local_size}, expected an odd number. "
                f"Use {param.local_size + 1}.",
                "lrn_param",
                "local_size",
            )

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the shape of the bottom."""
        if len(bottoms[0]) != 4:
            raise self.error(
                f"got a bottom of shape {bottoms[0]}, expected four axes (num, channels, height, "
                "width). Add axes of size 1.",
                "bottom",
            )
        num, channels, height, width = bottoms[0]
        self._view = bottoms[0] if self._within else (num, channels, height * width)
        return [bottoms[0]]

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that computes the top and keeps s."""
        param, view = self.node.param.lrn_param, self._view
        arguments: list[Argument] = [
            read(operands.bottom[0], view),
            write(operands.top[0], view),
            write(self._scale(operands), view),
        ]
        if self._within:
            arguments.append(self._work(operands, 2))
        arguments += [param.local_size, param.alpha, param.beta]
        if not self._within:
            arguments.append(param.k)
        kernel = kernels.lrn_within_forward if self._within else kernels.lrn_across_forward
        return [Step(kernel, [*arguments, BEGIN, END], view[0], 0.5 * prod(view[1:]))]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that computes the bottom's diff."""
        param, view = self.node.param.lrn_param, self._view
        arguments: list[Argument] = [
            read(operands.bottom[0], view),
            read(operands.top[0], view),
            read(self._scale(operands), view),
            read(operands.top_diff[0], view),
            write(operands.bottom_diff[0], view),
            self._work(operands, 3),
            param.local_size,
            param.alpha,
            param.beta,
            BEGIN,
            END,
        ]
        kernel = kernels.lrn_within_backward if self._within else kernels.lrn_across_backward
        return [Step(kernel, arguments, view[0], 0.7 * prod(view[1:]))]

    def _work(self, operands: Operands, count: int) -> Use:
        """Return the working memory of a kernel: within channels, for planes `count` times."""
        view = self._view
        shape = (count, kernels.within_scratch(*view[2:])) if self._within else view[1:]
        return operands.scratch("work", shape)

    def _scale(self, operands: Operands) -> Buffer:
        return operands.state("scale", self.bottom_shapes[0])
