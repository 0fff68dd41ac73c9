"""Dropout."""

from __future__ import annotations

from cgdnn.kernels.elementwise import dropout_backward, dropout_forward
from cgdnn.layers._axis import by_sample
from cgdnn.layers._base import (
    BEGIN,
    COUNTER,
    END,
    Argument,
    Buffer,
    Layer,
    Operands,
    Shape,
    Step,
    read,
    write,
)
from cgdnn.layers._steps import copy


class Dropout(Layer):
    """Set a random share of the values to 0 while training, and scale the others to make up for it.

    In phase TRAIN a value is kept with probability ``1 - dropout_ratio`` and multiplied by
    ``1 / (1 - dropout_ratio)``, so that its expectation stays; the gradient is scaled alike. In
    phase TEST the values pass unchanged (Caffe, dropout_layer.cpp; Srivastava et al., JMLR 2014).

    Field of ``dropout_param``: ``dropout_ratio`` (default 0.5; 0 <= ratio < 1). May run in place.

    Which values are kept depends on the seed, the layer's name, the number of the forward pass and
    the place of the value in the blob, never on threads. A NaN or infinity that is dropped gives
    NaN, so that it is seen.
    """

    in_place = True

    def setup(self) -> None:
        """Check the ratio."""
        self._ratio = float(self.node.param.dropout_param.dropout_ratio)
        if not 0 <= self._ratio < 1:
            raise self.error(
                f"got dropout_ratio {self._ratio:g}, expected 0 <= dropout_ratio < 1. "
                "It is the share of values that are dropped; take 0.5.",
                "dropout_param",
                "dropout_ratio",
            )

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the shape of the bottom."""
        return [bottoms[0]]

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that draws the mask and applies it (TEST: that copies, if anything)."""
        bottom, top = operands.bottom[0], operands.top[0]
        if self.phase != "TRAIN":
            return self._pass_on(bottom, top)
        view = by_sample(self.bottom_shapes[0])
        arguments: list[Argument] = [
            read(bottom, view),
            write(top, view),
            write(self._mask(operands), view),
            int(self._ratio * 2**32),
            1 / (1 - self._ratio),
            operands.key,
            COUNTER,
            BEGIN,
            END,
        ]
        return [Step(dropout_forward, arguments, view[0], 0.5 * view[1])]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that applies the mask to the diff (TEST: that copies, if anything)."""
        top_diff, bottom_diff = operands.top_diff[0], operands.bottom_diff[0]
        if self.phase != "TRAIN":
            return self._pass_on(top_diff, bottom_diff)
        view = by_sample(self.bottom_shapes[0])
        arguments: list[Argument] = [
            read(top_diff, view),
            read(self._mask(operands), view),
            1 / (1 - self._ratio),
            write(bottom_diff, view),
            BEGIN,
            END,
        ]
        return [Step(dropout_backward, arguments, view[0], 0.4 * view[1])]

    def _mask(self, operands: Operands) -> Buffer:
        return operands.state("mask", self.bottom_shapes[0], "uint8")

    def _pass_on(self, source: Buffer, target: Buffer) -> list[Step]:
        return [] if source is target else [copy(source, target, self.bottom_shapes[0])]
