"""Local response normalization."""

from __future__ import annotations

from math import prod

from cgdnn.kernels import lrn as kernels
from cgdnn.kernels._jit import Kernel
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
from cgdnn.layers._layout import CHANNEL_LANE, NCHW, lane_candidates, stored_shape
from cgdnn.proto.cgdnn_pb2 import LRNParameter

_COST = {
    (False, False): {"forward": 0.37, "backward_data": 0.6},
    (False, True): {"forward": 0.27, "backward_data": 0.42},
    (True, False): {"forward": 0.55, "backward_data": 1.0},
    (True, True): {"forward": 0.23, "backward_data": 0.38},
}
"""(within a channel, in lanes) -> nanoseconds of a value that comes from memory, in each pass."""


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
        return [bottoms[0]]

    def candidates(self, which: str) -> list[Candidate]:
        """Return the plain way, then those that work in lanes."""
        plain = super().candidates(which)
        if which == "backward_weights":
            return plain
        in_lanes = lane_candidates(
            lambda layer, operands, layout: layer._step(operands, which, layout),
            lambda layer, layout: layer._refuse_lanes(layout),
        )
        return [*plain, *in_lanes]

    def _refuse_lanes(self, layout: str) -> str | None:
        """Return why the layer cannot work in a lane layout, if so."""
        if layout == CHANNEL_LANE and not self._within:
            return "sums over channels would be sums over lanes"
        return None

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that computes the top."""
        return [self._step(operands, "forward", NCHW)]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that computes the bottom's diff."""
        return [self._step(operands, "backward_data", NCHW)]

    def _step(self, operands: Operands, which: str, layout: str) -> Step:
        """Return the step of a pass in a layout."""
        param, view = self.node.param.lrn_param, self._view(layout)
        arguments: list[Argument] = [read(operands.bottom[0], view)]
        if which == "forward":
            arguments.append(write(operands.top[0], view))
        else:
            arguments.append(read(operands.top_diff[0], view))
            arguments.append(write(operands.bottom_diff[0], view))
        rows = kernels.work_rows(which, param.local_size)
        if not self._within:
            work = (rows, kernels.across_row(view[2]))
            numbers = [param.alpha, param.beta, param.k]
        else:
            if layout == NCHW:
                planes = (2, kernels.within_plane(*view[2:]))
                arguments.append(operands.scratch("planes", planes))
            work = (rows, kernels.within_row(self.bottom_shapes[0][3], param.local_size))
            numbers = [param.alpha, param.beta]
        arguments += [operands.scratch("work", work), *numbers, BEGIN, END]
        cost = _COST[self._within, layout != NCHW][which] * prod(view[1:])
        return Step(self._kernel(which, layout), arguments, view[0], cost)

    def _view(self, layout: str) -> Shape:
        """Return the shape in which kernels want blobs."""
        num, channels, height, width = self.bottom_shapes[0]
        if layout == NCHW:
            return self.bottom_shapes[0] if self._within else (num, channels, height * width)
        groups, planes, _, size = stored_shape(layout, self.bottom_shapes[0])
        if self._within:
            return (groups * planes, height, width, size)
        return (groups, planes, height * width * size)

    def _kernel(self, which: str, layout: str) -> Kernel:
        param, forward = self.node.param.lrn_param, which == "forward"
        if not self._within:
            make = kernels.across_forward if forward else kernels.across_backward
        elif layout == NCHW:
            make = kernels.within_forward if forward else kernels.within_backward
        else:
            make = kernels.within_lanes_forward if forward else kernels.within_lanes_backward
        return make(param.local_size, param.beta == kernels.USUAL_BETA)
