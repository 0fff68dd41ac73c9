"""Losses."""

from __future__ import annotations

from math import prod
from typing import ClassVar

from cgdnn.kernels import loss as kernels
from cgdnn.layers._axis import canonical_axis, view_by_axis
from cgdnn.layers._base import (
    BEGIN,
    END,
    PIECE,
    Buffer,
    Count,
    Layer,
    Operands,
    Shape,
    Step,
    exactly,
    read,
    read_all,
    row,
    rows,
    write,
    write_all,
)
from cgdnn.layers._labels import check_label_shape, explain_label
from cgdnn.layers.softmax import EXPONENTIAL_NANOSECONDS
from cgdnn.proto.cgdnn_pb2 import LossParameter


class SoftmaxWithLoss(Layer):
    """Cross entropy of the softmax of scores (bottom 0) with class labels (bottom 1).

    ``loss = -sum_i log(max(p_i[label_i], FLT_MIN)) / normalizer``, over all positions i: samples,
    and places in an image. Top 0 is the loss, of shape (), with loss weight 1; an optional top 1
    gets the probabilities p, and no gradient flows back from it. The gradient,
    ``(p - onehot(label)) / normalizer`` times the loss's diff, flows to the scores only.

    Fields: ``softmax_param { axis }`` (default 1), where the classes lie; ``loss_param``:
    ``ignore_label``, positions that count neither in the loss nor in the gradient;
    ``normalization``: VALID (default: positions not ignored), FULL (positions), BATCH_SIZE (all
    axes before the class axis), NONE (1); the older ``normalize``: true is VALID, false is
    BATCH_SIZE, heard only where ``normalization`` is not given. The normalizer is at least 1
    (Caffe, softmax_loss_layer.cpp).

    Other than in Caffe, a label outside the classes, or no whole number, is an error that names the
    sample, and top 1 works.
    """

    bottoms: ClassVar[Count] = exactly(2)
    tops: ClassVar[Count] = Count(1, 2)
    is_loss: ClassVar[bool] = True
    no_gradient: ClassVar[tuple[int, ...]] = (1,)

    def setup(self) -> None:
        """Read the label to ignore and the normalization."""
        param = self.node.param.loss_param
        self._ignore = [int(param.HasField("ignore_label")), param.ignore_label]
        self._mode = param.normalization
        if param.HasField("normalize") and not param.HasField("normalization"):
            self._mode = LossParameter.VALID if param.normalize else LossParameter.BATCH_SIZE

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return () and, for a second top, the shape of the scores."""
        axis = canonical_axis(
            self, self.node.param.softmax_param.axis, bottoms[0], "softmax_param", "axis"
        )
        check_label_shape(self, bottoms, axis)
        self._view = n, r, _, i = view_by_axis(bottoms[0], axis)
        self._labels = (n, r, i)
        self._divisor = {
            LossParameter.VALID: -1.0,
            LossParameter.FULL: float(n * r * i),
            LossParameter.BATCH_SIZE: float(n * r),
            LossParameter.NONE: 1.0,
        }[self._mode]
        return [(), bottoms[0]][: len(self.node.tops)]

    def forward(self, operands: Operands) -> list[Step]:
        """Return a step over samples, and one that adds up what its pieces found."""
        n, r, c, i = self._view
        partial = operands.partial("sums", (2,))
        forward = Step(
            kernels.softmax_loss_forward,
            [
                read(operands.bottom[0], self._view),
                read(operands.bottom[1], self._labels),
                write(self._prob(operands), self._view),
                row(partial),
                *self._ignore,
                PIECE,
                BEGIN,
                END,
            ],
            extent=n,
            cost=EXPONENTIAL_NANOSECONDS * r * c * i,
            explain=explain_label(self, self._view),
        )
        return [forward, _finish(operands, partial, self._divisor)]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return one step over samples."""
        n, r, c, i = self._view
        return [
            Step(
                kernels.softmax_loss_backward,
                [
                    read(self._prob(operands), self._view),
                    read(operands.bottom[1], self._labels),
                    read_all(operands.state("normalizer", (1,))),
                    read_all(operands.top_diff[0], (1,)),
                    write(operands.bottom_diff[0], self._view),
                    *self._ignore,
                    BEGIN,
                    END,
                ],
                extent=n,
                cost=0.3 * r * c * i,
            )
        ]

    def _prob(self, operands: Operands) -> Buffer:
        if len(operands.top) > 1:
            return operands.top[1]
        return operands.state("prob", self.bottom_shapes[0])


class EuclideanLoss(Layer):
    """Half the mean square distance of two blobs: ``loss = sum((a - b)**2) / (2 n)``.

    n is the number of samples. The gradient, ``(a - b) / n`` times the loss's diff, flows to
    bottom 0, and with the other sign to bottom 1. The top has the shape () and loss weight 1
    (Caffe, euclidean_loss_layer.cpp). There are no fields.
    """

    bottoms: ClassVar[Count] = exactly(2)
    is_loss: ClassVar[bool] = True

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return ()."""
        first, second = bottoms
        if first[:1] != second[:1] or prod(first) != prod(second):
            raise self.error(
                f"the bottoms must have as many samples and values; got {first} and {second}, "
                "expected equal shapes. Check the layer that makes the second one.",
                "bottom",
            )
        samples = first[0] if first else 1
        self._view = (samples, prod(first) // samples if samples else 0)
        return [()]

    def forward(self, operands: Operands) -> list[Step]:
        """Return a step over samples, and one that adds up what its pieces found."""
        n, size = self._view
        partial = operands.partial("sums", (1,))
        forward = Step(
            kernels.euclidean_forward,
            [
                read(operands.bottom[0], self._view),
                read(operands.bottom[1], self._view),
                write(self._difference(operands), self._view),
                row(partial),
                PIECE,
                BEGIN,
                END,
            ],
            extent=n,
            cost=0.9 * size,
        )
        return [forward, _finish(operands, partial, 2.0 * n)]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return one step over samples for each wanted bottom."""
        n, size = self._view
        return [
            Step(
                kernels.euclidean_backward,
                [
                    read(self._difference(operands), self._view),
                    read_all(operands.top_diff[0], (1,)),
                    write(diff, self._view),
                    sign / n,
                    BEGIN,
                    END,
                ],
                extent=n,
                cost=0.3 * size,
            )
            for diff, wanted, sign in zip(
                operands.bottom_diff, operands.propagate, (1.0, -1.0), strict=True
            )
            if wanted
        ]

    def _difference(self, operands: Operands) -> Buffer:
        return operands.state("difference", self.bottom_shapes[0])


def _finish(operands: Operands, partial: Buffer, divisor: float) -> Step:
    """Return the step that makes the loss of the pieces' sums; it keeps the normalizer."""
    return Step(
        kernels.loss_finish,
        [
            rows(partial),
            write_all(operands.top[0], (1,)),
            write_all(operands.state("normalizer", (1,))),
            divisor,
        ],
    )
