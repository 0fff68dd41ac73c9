"""Layers that move no numbers forward: Flatten, Split and Silence."""

from __future__ import annotations

from math import prod

from cgdnn.kernels.elementwise import add_scaled
from cgdnn.layers._axis import by_sample, canonical_axis
from cgdnn.layers._base import (
    BEGIN,
    END,
    Count,
    Layer,
    Operands,
    Shape,
    Step,
    exactly,
    read,
    write,
)
from cgdnn.layers._steps import copy, zero


class Flatten(Layer):
    """Make one axis of several: ``(n, c, h, w)`` becomes ``(n, c h w)``.

    Fields of ``flatten_param``: ``axis`` (default 1) and ``end_axis`` (default -1), the first and
    the last axis that become one; negative ones count from the last. With ``end_axis`` just before
    ``axis`` an axis of size 1 is put there. The top shares the memory of the bottom, data and diff
    (Caffe, flatten_layer.cpp).
    """

    shares = ("data", "diff")

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the bottom's shape with the axes joined."""
        param, shape = self.node.param.flatten_param, bottoms[0]
        first = canonical_axis(self, param.axis, shape, "flatten_param", "axis")
        last = canonical_axis(self, param.end_axis, shape, "flatten_param", "end_axis")
        if last < first - 1:
            raise self.error(
                f"got axis {param.axis} and end_axis {param.end_axis} on a bottom of shape "
                f"{shape}, expected axis <= end_axis. Swap them.",
                "flatten_param",
                "end_axis",
            )
        return [(*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])]

    def forward(self, operands: Operands) -> list[Step]:
        """Return no steps: the memory is shared."""
        return []

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return no steps: the memory is shared."""
        return []


class Split(Layer):
    """Give one blob to several layers; the bottom's diff is the sum of the tops' diffs.

    It stands in a net wherever a blob has several consumers. The tops share the bottom's data. The
    diffs are added in the order of the tops; one that no layer writes is left out (Caffe,
    split_layer.cpp).
    """

    tops = Count(1, None)
    shares = ("data",)

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the bottom's shape for each top."""
        return [bottoms[0]] * len(self.node.tops)

    def forward(self, operands: Operands) -> list[Step]:
        """Return no steps: the memory is shared."""
        return []

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the steps that add up the diffs of the tops."""
        view = by_sample(self.bottom_shapes[0])
        total = operands.bottom_diff[0]
        wanted = [
            diff for diff, used in zip(operands.top_diff, operands.top_wanted, strict=True) if used
        ]
        if not wanted:
            return [zero(total, self.bottom_shapes[0])]
        if len(wanted) == 1:
            return [copy(wanted[0], total, self.bottom_shapes[0])]
        steps = []
        for i, diff in enumerate(wanted[1:]):
            a, b = read(wanted[0] if i == 0 else total, view), read(diff, view)
            y = write(total, view)
            steps.append(Step(add_scaled, [a, 1.0, b, 1.0, y, BEGIN, END], view[0], 0.2 * view[1]))
        return steps


class Silence(Layer):
    """Take blobs so that they are no outputs of the net; their gradient is 0.

    It has no fields and no tops (Caffe, silence_layer.cpp).
    """

    bottoms = Count(1, None)
    tops = exactly(0)

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return no shapes: there are no tops."""
        return []

    def forward(self, operands: Operands) -> list[Step]:
        """Return no steps: nothing is computed."""
        return []

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the steps that write zeros to every wanted bottom diff."""
        return [
            zero(diff, shape)
            for diff, shape, wanted in zip(
                operands.bottom_diff, self.bottom_shapes, operands.propagate, strict=True
            )
            if wanted
        ]
