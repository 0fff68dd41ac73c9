"""The steps of backward passes that skip zeros (see `cgdnn.kernels.conv_sparse`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cgdnn.kernels import conv_sparse as kernels
from cgdnn.kernels.reduce import reduce_rows
from cgdnn.layers._base import (
    BEGIN,
    END,
    PIECE,
    Argument,
    Buffer,
    Operands,
    Step,
    Use,
    read,
    read_all,
    row,
    rows,
    update,
    write,
)

_FLOP, _ELEMENT, _WEIGHT = 0.005, 0.1, 1.0
"""Nanoseconds of a flop, of looking at an element of dy, and of re-laying a weight."""
_SHARE = 0.2
"""Share of non-zeros that costs are estimated for: how passes are cut must not depend on values."""


@dataclass(frozen=True)
class Sparse:
    """A convolution over two spatial axes, dilation 1 and group 1.

    Attributes
    ----------
    images : int
    window : Window
    bias : bool
    """

    images: int
    window: kernels.Window
    bias: bool

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that re-lays the weights, and one over samples for each diff."""
        window = self.window
        packed = operands.temporary("packed", (window.filters, window.data_row))
        weights = read(operands.param[0], (window.filters, window.channels, *window.kernel))
        first = Step(
            kernels.conv_sparse_pack_weights,
            [weights, write(packed), BEGIN, END],
            window.filters,
            _WEIGHT * window.data_row,
        )
        steps = [
            Step(
                kernels.conv_backward_data_sparse(window.kernel[1]),
                [
                    read(dy, self._top),
                    read_all(packed),
                    write(dx, self._bottom),
                    *self._geometry(window.data_band()),
                    *_scratch(operands, window.data_scratch()),
                    BEGIN,
                    END,
                ],
                self.images,
                self._cost,
            )
            for dy, dx, wanted in zip(
                operands.top_diff, operands.bottom_diff, operands.propagate, strict=True
            )
            if wanted
        ]
        return [first, *steps]

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that sum the gradients of all bottoms, one bottom after the other."""
        steps: list[Step] = []
        for x, dy in zip(operands.bottom, operands.top_diff, strict=True):
            steps += self._sum_weights(operands, x, dy)
        return steps

    def _sum_weights(self, operands: Operands, x: Buffer, dy: Buffer) -> list[Step]:
        """Return a step over samples that writes partial gradients, and the steps that add them."""
        window, filters = self.window, self.window.filters
        columns = window.kernel[1] * (window.channels if window.packs else 1)
        dw = operands.partial("dw", (filters * window.weights_row,))
        db = operands.partial("db", (filters,))
        has_bias = self.bias and operands.learn[1]
        steps = [
            Step(
                kernels.conv_backward_weights_sparse(columns, window.packs),
                [
                    read(x, self._bottom),
                    read(dy, self._top),
                    row(dw),
                    row(db),
                    int(has_bias),
                    *self._geometry(window.weights_band()),
                    *_scratch(operands, window.weights_scratch()),
                    PIECE,
                    BEGIN,
                    END,
                ],
                self.images,
                self._cost,
            )
        ]
        if operands.learn[0]:
            steps.append(
                Step(
                    kernels.conv_sparse_sum_weights,
                    [
                        rows(dw),
                        update(operands.param_diff[0], (filters, window.channels, *window.kernel)),
                        int(window.packs),
                        operands.scratch("total", (window.weights_row,)),
                        operands.accumulate(0),
                        BEGIN,
                        END,
                    ],
                    filters,
                    _WEIGHT * window.weights_row,
                )
            )
        if has_bias:
            target: list[Argument] = [update(operands.param_diff[1]), operands.accumulate(1)]
            steps.append(Step(reduce_rows, [rows(db), *target, BEGIN, END], filters, 2.0))
        return steps

    @property
    def _bottom(self) -> tuple[int, ...]:
        return (self.images, self.window.channels, *self.window.size)

    @property
    def _top(self) -> tuple[int, ...]:
        return (self.images, self.window.filters, *self.window.output)

    @property
    def _cost(self) -> float:
        """Return the estimated nanoseconds of one image in either pass."""
        window = self.window
        flops = 2 * window.channels * prod(window.kernel)
        each = _ELEMENT + _SHARE * _FLOP * flops
        return each * window.filters * prod(window.output)

    def _geometry(self, band: int) -> tuple[int, ...]:
        """Return the numbers that both kernels get."""
        return (self.window.kernel[0], *self.window.stride, *self.window.pad, band)


def _scratch(operands: Operands, sizes: list[tuple[int, str]]) -> list[Use]:
    """Return scratch arrays of these lengths and types."""
    return [
        operands.scratch(f"sparse{number}", (length,), dtype)
        for number, (length, dtype) in enumerate(sizes)
    ]
