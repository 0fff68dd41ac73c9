"""Accuracy."""

from __future__ import annotations

from typing import ClassVar

from cgdnn.kernels import loss as kernels
from cgdnn.layers._axis import canonical_axis, view_by_axis
from cgdnn.layers._base import (
    BEGIN,
    END,
    PIECE,
    Count,
    Layer,
    Operands,
    Shape,
    Step,
    exactly,
    read,
    row,
    rows,
    write_all,
)
from cgdnn.layers._labels import check_label_shape, explain_label


class Accuracy(Layer):
    """Share of positions whose true class (bottom 1) is among the `top_k` best scores (bottom 0).

    A score equal to the true class's counts as better than it, so a tie can cost the point. Top 0
    is the accuracy, of shape (); an optional top 1 gets the accuracy of each class, 0 for classes
    that do not occur. There is no backward pass.

    Fields of ``accuracy_param``: ``top_k`` (default 1); ``axis`` (default 1), where the classes
    lie; ``ignore_label``, positions that do not count. With nothing left to count the accuracy is 0
    (Caffe, accuracy_layer.cpp).

    Other than in Caffe, a score that is NaN is never right and counts as better than the true
    class, and a label outside the classes is an error that names the sample.
    """

    bottoms: ClassVar[Count] = exactly(2)
    tops: ClassVar[Count] = Count(1, 2)
    no_gradient: ClassVar[tuple[int, ...]] = (0, 1)
    differentiable: ClassVar[bool] = False

    def setup(self) -> None:
        """Read the fields."""
        param = self.node.param.accuracy_param
        self._top_k = param.top_k
        self._ignore = [int(param.HasField("ignore_label")), param.ignore_label]

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return () and, for a second top, (classes,)."""
        axis = canonical_axis(
            self, self.node.param.accuracy_param.axis, bottoms[0], "accuracy_param", "axis"
        )
        check_label_shape(self, bottoms, axis)
        self._view = view_by_axis(bottoms[0], axis)
        classes = bottoms[0][axis]
        if not 1 <= self._top_k <= classes:
            raise self.error(
                f"got top_k {self._top_k}, expected 1 to {classes}, the number of classes. "
                "Correct top_k.",
                "accuracy_param",
                "top_k",
            )
        return [(), (classes,)][: len(self.node.tops)]

    def forward(self, operands: Operands) -> list[Step]:
        """Return a step over samples, and one for each top that adds up what its pieces counted."""
        n, r, c, i = self._view
        partial = operands.partial("counts", (2 + 2 * c,) if len(operands.top) > 1 else (2,))
        count = Step(
            kernels.accuracy_forward,
            [
                read(operands.bottom[0], self._view),
                read(operands.bottom[1], (n, r, i)),
                row(partial),
                self._top_k,
                *self._ignore,
                PIECE,
                BEGIN,
                END,
            ],
            extent=n,
            cost=0.5 * r * c * i,
            explain=explain_label(self, self._view),
        )
        finishes = [
            Step(kernels.accuracy_finish, [rows(partial), write_all(top, shape), *columns])
            for top, shape, columns in zip(
                operands.top, ((1,), (c,)), ((0, 1), (2, 2 + c)), strict=False
            )
        ]
        return [count, *finishes]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return nothing: there is no gradient."""
        return []
