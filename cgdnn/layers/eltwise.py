"""Sum, product and maximum of blobs, element by element."""

from __future__ import annotations

from cgdnn.kernels import elementwise as kernels
from cgdnn.kernels._jit import Kernel
from cgdnn.layers._axis import by_sample
from cgdnn.layers._base import (
    BEGIN,
    END,
    Argument,
    Buffer,
    Count,
    Layer,
    Operands,
    Shape,
    Step,
    read,
    update,
    write,
)
from cgdnn.proto.cgdnn_pb2 import EltwiseParameter


class Eltwise(Layer):
    """Combine blobs of one shape element by element.

    Fields of ``eltwise_param``:

    * ``operation``: SUM (default), PROD or MAX.
    * ``coeff``: for SUM, one factor a bottom (default 1 each). MAX ignores it, as Caffe does; PROD
      refuses it.
    * ``stable_prod_grad`` (default true): the gradient of PROD is the top's diff times the product
      of the other bottoms; when false it is top / bottom times the top's diff, which is cheaper
      with many bottoms and wrong (NaN or infinite) where a bottom is 0.

    MAX gives the gradient to one bottom: of the first two to the second if they tie; a later one
    must be strictly greater (Caffe, eltwise_layer.cpp). A NaN in any bottom gives NaN.
    """

    bottoms = Count(2, None)

    def setup(self) -> None:
        """Check the coefficients."""
        param = self.node.param.eltwise_param
        self._operation = param.operation
        coefficients, count = list(param.coeff), len(self.node.bottoms)
        if coefficients and self._operation == EltwiseParameter.PROD:
            raise self.error(
                f"got {len(coefficients)} coeff values for operation PROD, expected none. "
                "Remove them, or use operation: SUM.",
                "eltwise_param",
                "coeff",
            )
        if coefficients and len(coefficients) != count:
            raise self.error(
                f"got {len(coefficients)} coeff values, expected {count}, one for each bottom. "
                "Give one a bottom, or none.",
                "eltwise_param",
                "coeff",
            )
        if coefficients and self._operation == EltwiseParameter.MAX:
            self.warnings.append(
                f"{self.node.at('eltwise_param', 'coeff')}: {self.node.label}: coeff has no "
                "effect with operation MAX"
            )
        self._coefficients = [float(c) for c in coefficients] or [1.0] * count

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the shape that all bottoms have."""
        for i, shape in enumerate(bottoms):
            if shape != bottoms[0]:
                raise self.error(
                    f"bottom {i} has shape {shape}, expected {bottoms[0]} like bottom 0. "
                    "Make the layers below give the same shape.",
                    "bottom",
                )
        self._view = by_sample(bottoms[0])
        return [bottoms[0]]

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that combines the first two bottoms, and one for each later bottom."""
        return {
            EltwiseParameter.SUM: self._sum,
            EltwiseParameter.PROD: self._product,
            EltwiseParameter.MAX: self._max,
        }[self._operation](operands)

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the steps that write each wanted bottom diff."""
        return [
            step
            for i, wanted in enumerate(operands.propagate)
            if wanted
            for step in self._gradient(operands, i)
        ]

    def _step(self, kernel: Kernel, *arguments: Argument) -> Step:
        return Step(kernel, [*arguments, BEGIN, END], self._view[0], 0.2 * self._view[1])

    def _sum(self, operands: Operands) -> list[Step]:
        top, steps = operands.top[0], []
        for i, bottom in enumerate(operands.bottom[1:], start=1):
            known, factor = (operands.bottom[0], self._coefficients[0]) if i == 1 else (top, 1.0)
            steps.append(
                self._step(
                    kernels.add_scaled,
                    read(known, self._view),
                    factor,
                    read(bottom, self._view),
                    self._coefficients[i],
                    write(top, self._view),
                )
            )
        return steps

    def _product(self, operands: Operands) -> list[Step]:
        return self._multiply(operands.bottom, operands.top[0])

    def _multiply(self, factors: list[Buffer], target: Buffer) -> list[Step]:
        """Return the steps that write the product of two or more buffers, in their order."""
        return [
            self._step(
                kernels.multiply,
                read(factors[0] if i == 1 else target, self._view),
                read(factor, self._view),
                write(target, self._view),
            )
            for i, factor in enumerate(factors[1:], start=1)
        ]

    def _mask(self, operands: Operands) -> Buffer:
        """Return the number of the bottom that each maximum came from."""
        return operands.state("mask", self.bottom_shapes[0], "int32")

    def _max(self, operands: Operands) -> list[Step]:
        view, mask = self._view, self._mask(operands)
        first, second, *others = operands.bottom
        top = operands.top[0]
        results = [write(top, view), write(mask, view)]
        steps = [self._step(kernels.max_of_two, read(first, view), read(second, view), *results)]
        for i, bottom in enumerate(others, start=2):
            results = [update(top, view), update(mask, view)]
            steps.append(self._step(kernels.max_with_next, read(bottom, view), i, *results))
        return steps

    def _gradient(self, operands: Operands, i: int) -> list[Step]:
        """Return the steps that write the diff of bottom `i`."""
        view = self._view
        top_diff = read(operands.top_diff[0], view)
        target = operands.bottom_diff[i]
        if self._operation == EltwiseParameter.SUM:
            return [self._step(kernels.scale, top_diff, self._coefficients[i], write(target, view))]
        if self._operation == EltwiseParameter.MAX:
            mask = read(self._mask(operands), view)
            return [self._step(kernels.select, top_diff, mask, i, write(target, view))]
        if self.node.param.eltwise_param.stable_prod_grad:
            others = operands.bottom[:i] + operands.bottom[i + 1 :]
            return self._multiply([*others, operands.top_diff[0]], target)
        top, bottom = read(operands.top[0], view), read(operands.bottom[i], view)
        return [self._step(kernels.divide_multiply, top, bottom, top_diff, write(target, view))]
