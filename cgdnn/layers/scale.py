"""Scaling by a factor for each channel, and an offset."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

from cgdnn.kernels import norm as kernels
from cgdnn.kernels._jit import Kernel
from cgdnn.kernels.reduce import reduce_rows
from cgdnn.layers._axis import canonical_axis
from cgdnn.layers._base import (
    BEGIN,
    END,
    PIECE,
    Argument,
    Buffer,
    Count,
    Layer,
    Operands,
    Parameter,
    Shape,
    Slot,
    Step,
    Use,
    read,
    read_all,
    row,
    rows,
    write,
    write_all,
)
from cgdnn.layers._steps import copy
from cgdnn.proto.cgdnn_pb2 import FillerParameter


class Scale(Layer):
    """Multiply by a broadcast factor and add an offset: ``y = w x + b``.

    The factor's axes are those of bottom 0 from ``axis`` on: with a second bottom it is that blob,
    whose gradient flows back; else it is a learned blob. Gradients: ``dx = w dy``,
    ``dw = sum(x dy)``, ``db = sum(dy)``, over all that the factor is broadcast over.

    Fields of ``scale_param``: ``axis`` (default 1); ``num_axes`` (default 1; -1: all from ``axis``
    on; 0: a single number), without a second bottom only; ``filler`` (default: constant 1);
    ``bias_term`` (default false) with ``bias_filler`` (default: constant 0): a learned offset of
    the factor's shape, the last blob. May run in place on bottom 0 (Caffe, scale_layer.cpp).

    Other than in Caffe, gradients of the blobs are added up over sub-iterations for every shape.
    """

    bottoms: ClassVar[Count] = Count(1, 2)
    in_place: ClassVar[bool] = True

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the shape of bottom 0."""
        param = self.node.param.scale_param
        shape = bottoms[0]
        self._learned = len(bottoms) == 1
        count = param.num_axes if self._learned else len(bottoms[1])
        if count < -1:
            raise self.error(
                f"got num_axes {count}, expected -1 (all from axis on) or more. Correct it.",
                "scale_param",
                "num_axes",
            )
        axis = 0 if count == 0 else canonical_axis(self, param.axis, shape, "scale_param", "axis")
        stop = len(shape) if count == -1 else axis + count
        if stop > len(shape):
            raise self.error(
                f"a factor of {count} axes from axis {axis} on extends past a bottom of shape "
                f"{shape}; got {stop} axes, expected at most {len(shape)}. Use a smaller "
                f"{'num_axes' if self._learned else 'second bottom'}.",
                *(("scale_param", "num_axes") if self._learned else ("bottom",)),
            )
        self._shape = shape[axis:stop]
        if not self._learned and bottoms[1] != self._shape:
            raise self.error(
                f"the second bottom does not match bottom 0 of shape {shape} from axis {axis} on; "
                f"got {bottoms[1]}, expected {self._shape}. Correct its shape or the axis.",
                "bottom",
            )
        samples = shape[0] if shape else 1
        self._by_sample = axis == 0 and stop > 0
        if self._by_sample:
            factors = prod(shape[1:stop])
            self._view = (samples, 1, factors, prod(shape[stop:]))
            self._factors = (samples, factors)
        else:
            first = min(stop, 1)  # a single number: the samples are still axis 0 of the view
            inner = prod(shape[max(stop, 1) :])
            self._view = (samples, prod(shape[1:axis]) if first else 1, prod(self._shape), inner)
            self._factors = (1, prod(self._shape))
        return [shape]

    def parameters(self) -> list[Parameter]:
        """Return the factor, where it is learned, and the offset, where there is one."""
        param = self.node.param.scale_param
        filler = param.filler if param.HasField("filler") else FillerParameter(value=1)
        blobs = [Parameter(self._shape, filler)] if self._learned else []
        if param.bias_term:
            blobs.append(Parameter(self._shape, param.bias_filler))
        return blobs

    def multiply_adds(self) -> int:
        """Return one for each element."""
        return prod(self.bottom_shapes[0])

    @property
    def by_channel(self) -> bool:
        """Whether it learns a factor and an offset for each channel."""
        shape, bias = self.bottom_shapes[0], self.node.param.scale_param.bias_term
        channels = (shape[0], 1, shape[1], prod(shape[2:])) if len(shape) > 1 else None
        return self._learned and bias and not self._by_sample and self._view == channels

    def forward(self, operands: Operands) -> list[Step]:
        """Return one step over samples; in place, one before it that keeps the bottom."""
        x = read(operands.bottom[0], self._view)
        y = write(operands.top[0], self._view)
        factors = [self._read_factors(self._factor(operands))]
        kept = self._kept(operands)
        if self.node.param.scale_param.bias_term:
            factors.append(self._read_factors(operands.param[-1]))
            if kept is operands.bottom[0]:
                return [self._step(kernels.scale_multiply_add, [x, *factors, y], 0.3)]
            arrays = [x, *factors, write(kept, self._view), y]
            return [self._step(kernels.scale_multiply_add_keep, arrays, 0.4)]
        steps = [self._step(kernels.scale_multiply, [x, *factors, y], 0.3)]
        if kept is not operands.bottom[0]:
            steps.insert(0, copy(operands.bottom[0], kept, self.bottom_shapes[0]))
        return steps

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps for the learned factor and the offset."""
        steps: list[Step] = []
        factor = self._learned and operands.learn[0]
        bias = self.node.param.scale_param.bias_term and operands.learn[-1]
        if factor and bias and not self._by_sample:
            return self._factor_and_bias(operands)
        if factor:
            steps += self._sum_products(operands, operands.param_diff[0], operands.accumulate(0))
        if bias:
            dy = [read(operands.top_diff[0], self._view)]
            last = len(operands.learn) - 1
            steps += self._sums(
                operands, "bias", dy, operands.param_diff[last], operands.accumulate(last)
            )
        return steps

    def _factor_and_bias(self, operands: Operands) -> list[Step]:
        """Return the steps that sum both gradients in one pass over the top's diff."""
        arrays = [read(self._kept(operands), self._view), read(operands.top_diff[0], self._view)]
        partials = [operands.partial(name, (self._factors[1],)) for name in ("factor", "bias")]
        targets = [row(partial) for partial in partials]
        return [
            self._step(kernels.scale_backward_both, [*arrays, *targets, PIECE], 0.3),
            *(
                self._reduce(partial, operands.param_diff[i], operands.accumulate(i))
                for i, partial in enumerate(partials)
            ),
        ]

    def _reduce(self, partial: Buffer, diff: Buffer, accumulate: Slot | float) -> Step:
        size = self._factors[1]
        arguments = [rows(partial), write_all(diff, (size,)), accumulate, BEGIN, END]
        return Step(reduce_rows, arguments, size)

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the steps for the second bottom, then one over samples for the first.

        In this order, since in place the last one overwrites the top's diff.
        """
        steps: list[Step] = []
        if not self._learned and operands.propagate[1]:
            steps += self._sum_products(operands, operands.bottom_diff[1], 0.0)
        if operands.propagate[0]:
            arrays = [
                read(operands.top_diff[0], self._view),
                self._read_factors(self._factor(operands)),
                write(operands.bottom_diff[0], self._view),
            ]
            steps.append(self._step(kernels.scale_multiply, arrays, 0.3))
        return steps

    def _factor(self, operands: Operands) -> Buffer:
        return operands.param[0] if self._learned else operands.bottom[1]

    def _read_factors(self, buffer: Buffer) -> Use:
        return (read if self._by_sample else read_all)(buffer, self._factors)

    def _kept(self, operands: Operands) -> Buffer:
        """Return where backward finds the bottom: a copy, when the layer runs in place."""
        wanted = operands.learn[0] if self._learned else operands.propagate[1]
        if operands.top[0] is operands.bottom[0] and wanted:
            return operands.state("bottom", self.bottom_shapes[0])
        return operands.bottom[0]

    def _sum_products(
        self, operands: Operands, diff: Buffer, accumulate: Slot | float
    ) -> list[Step]:
        """Return the steps that write the factor's gradient to `diff`, or add it."""
        arrays = [
            read(self._kept(operands), self._view),
            read(operands.top_diff[0], self._view),
        ]
        return self._sums(operands, "factor", arrays, diff, accumulate)

    def _sums(
        self,
        operands: Operands,
        which: str,
        arrays: list[Use],
        diff: Buffer,
        accumulate: Slot | float,
    ) -> list[Step]:
        if self._by_sample:
            kernel = {
                "factor": kernels.scale_backward_factor_rows,
                "bias": kernels.scale_backward_bias_rows,
            }[which]
            return [self._step(kernel, [*arrays, write(diff, self._factors), accumulate], 0.3)]
        kernel = {
            "factor": kernels.scale_backward_factor,
            "bias": kernels.scale_backward_bias,
        }[which]
        partial = operands.partial(which, (self._factors[1],))
        return [
            self._step(kernel, [*arrays, row(partial), PIECE], 0.3),
            self._reduce(partial, diff, accumulate),
        ]

    def _step(self, kernel: Kernel, arguments: Sequence[Argument], nanoseconds: float) -> Step:
        n, r, d, i = self._view
        return Step(kernel, [*arguments, BEGIN, END], extent=n, cost=nanoseconds * r * d * i)
