"""Concatenation along an axis."""

from __future__ import annotations

from math import prod

from cgdnn.kernels.elementwise import copy_columns
from cgdnn.layers._axis import canonical_axis
from cgdnn.layers._base import (
    BEGIN,
    END,
    Argument,
    Count,
    Layer,
    Operands,
    Shape,
    Step,
    read,
    update,
    write,
)


class Concat(Layer):
    """Put the bottoms side by side along one axis; the other axes must agree.

    Fields of ``concat_param``: ``axis`` (default 1; negative ones count from the last), or the
    older ``concat_dim`` (not negative), but not both. Any number of bottoms, even one. Gradients
    are the slices of the top's diff (Caffe, concat_layer.cpp).
    """

    bottoms = Count(1, None)

    def setup(self) -> None:
        """Check that the axis is given in one way only."""
        param = self.node.param.concat_param
        if param.HasField("axis") and param.HasField("concat_dim"):
            raise self.error(
                f"got axis {param.axis} and concat_dim {param.concat_dim}, expected one of them. "
                "Keep axis.",
                "concat_param",
                "concat_dim",
            )

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the first bottom's shape with the sizes along the axis added up."""
        param = self.node.param.concat_param
        word = "concat_dim" if param.HasField("concat_dim") else "axis"
        axis = canonical_axis(self, getattr(param, word), bottoms[0], "concat_param", word)
        for i, shape in enumerate(bottoms):
            if shape[:axis] + shape[axis + 1 :] != bottoms[0][:axis] + bottoms[0][axis + 1 :]:
                raise self.error(
                    f"bottom {i} has shape {shape}, bottom 0 has {bottoms[0]}; expected the same "
                    f"sizes in all axes but axis {axis}. Correct the layers below, or the axis.",
                    "bottom",
                )
        self._outer = prod(bottoms[0][:axis])
        self._columns = [prod(shape[axis:]) for shape in bottoms]
        joined = sum(shape[axis] for shape in bottoms)
        return [(*bottoms[0][:axis], joined, *bottoms[0][axis + 1 :])]

    def forward(self, operands: Operands) -> list[Step]:
        """Return one step a bottom, which copies it to its columns of the top."""
        steps = []
        for bottom, start, count in zip(
            operands.bottom, self._starts(), self._columns, strict=True
        ):
            top_view = (self._outer, sum(self._columns))
            # The first step opens the top; the others leave the columns before theirs alone.
            use = write if start == 0 else update
            arguments: list[Argument] = [
                read(bottom, (self._outer, count)),
                0,
                use(operands.top[0], top_view),
            ]
            arguments += [start, count, BEGIN, END]
            steps.append(Step(copy_columns, arguments, self._outer, 0.3 * count))
        return steps

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return one step a wanted bottom, which copies its columns of the top's diff."""
        top = read(operands.top_diff[0], (self._outer, sum(self._columns)))
        steps = []
        for i, (start, count) in enumerate(zip(self._starts(), self._columns, strict=True)):
            if operands.propagate[i]:
                target = write(operands.bottom_diff[i], (self._outer, count))
                arguments: list[Argument] = [top, start, target, 0, count, BEGIN, END]
                steps.append(Step(copy_columns, arguments, self._outer, 0.3 * count))
        return steps

    def _starts(self) -> list[int]:
        """Return the column of the top where each bottom begins."""
        return [sum(self._columns[:i]) for i in range(len(self._columns))]
