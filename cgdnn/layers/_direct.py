"""The steps of a direct convolution (see `cgdnn.kernels.conv_direct`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from cgdnn.kernels import conv_direct as kernels
from cgdnn.kernels import stencil
from cgdnn.layers._base import (
    BEGIN,
    END,
    PIECE,
    Argument,
    Buffer,
    Operands,
    Shape,
    Step,
    Use,
    read,
    read_all,
    row,
    rows,
    update,
    write,
)

_MOST_PARTIAL = 1 << 18
"""Weights beyond which each piece of the weight gradient computes some filters from all images:
partial sums of more take longer than to re-lay x once for each piece."""
_MOST_PIXELS = 4096
"""Pixels of all outputs up to which it does so, too, where x is read where it lies: partial sums
of so few take longer than to read x once for each piece."""
_PIECE_UNITS, _FEW_PIECES = 8, 4
"""Units of filters that such a piece computes at most: it reads or re-lays the images for itself.
Fewer, but two, which make up a tile, where there would not be so many pieces."""
_PACK, _UNPACK = 0.3, 1.5
"""Nanoseconds of a weight that is packed, and of one that is unpacked from some partial sums."""


@dataclass(frozen=True)
class Direct:
    """A convolution of two spatial axes.

    Attributes
    ----------
    samples : int
    window : stencil.Window
    bias : bool
    pixel_lanes : bool
        Whether pixels rather than filters are in the lanes where outputs and data gradients are
        computed.
    """

    samples: int
    window: stencil.Window
    bias: bool
    pixel_lanes: bool

    def cost(self, which: str) -> float:
        """Return the estimated nanoseconds of a pass on one core."""
        if which == "backward_weights":
            return self.samples * self._weights.cost
        return self.samples * self._stencil(which).cost

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that packs the weights, and one over samples for each bottom."""
        bias = read_all(operands.param[-1], (operands.param[-1].size,))
        pairs = list(zip(operands.bottom, operands.top, strict=True))
        return self._products(operands, "forward", pairs, bias, self.bias)

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that packs the weights, and one over samples for each diff."""
        triples = zip(operands.top_diff, operands.bottom_diff, operands.propagate, strict=True)
        pairs = [(dy, dx) for dy, dx, wanted in triples if wanted]
        nothing = read_all(operands.param[0], (operands.param[0].size,))
        return self._products(operands, "backward_data", pairs, nothing, False)

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that sum the gradients of all bottoms, one bottom after the other."""
        steps: list[Step] = []
        for x, dy in zip(operands.bottom, operands.top_diff, strict=True):
            steps += (self._by_filter if self._together else self._by_sample)(operands, x, dy)
        return steps

    @property
    def _filters(self) -> int:
        return self.window.group * self.window.filters

    @cached_property
    def _weights(self) -> stencil.WeightStencil:
        return stencil.backward_weights(self.window.flat, self._together or None)

    @cached_property
    def _together(self) -> int:
        """Units of filters that a piece of the weight gradient computes from all images.

        They divide those of a group. 0 where a piece computes all filters from some images.
        """
        window, unit = self.window, stencil.unit_filters()
        pixels = self.samples * window.rows.output * window.columns.output
        weights = self._filters * window.channels * window.taps
        if weights <= _MOST_PARTIAL and (not window.pointwise or pixels > _MOST_PIXELS):
            return 0
        units = -(-window.filters // unit)
        if window.filters % unit:
            return units  # pieces of equal size have to be whole groups
        equal = [n for n in range(1, _PIECE_UNITS + 1) if units % n == 0]
        many = window.group * units // _FEW_PIECES
        even = [n for n in equal if n == 2 or (n % 2 == 0 and n <= many)]
        return max(even or equal)

    def _stencil(self, which: str) -> stencil.Stencil:
        describe: Callable[..., stencil.Stencil] = getattr(stencil, which)
        return describe(self.window.flat, pixel_lanes=self.pixel_lanes)

    @property
    def _views(self) -> tuple[Shape, Shape]:
        """The shapes of a bottom and a top."""
        window = self.window.flat
        axes = (window.rows, window.columns)
        inputs = (self.samples, window.group * window.channels, *(side.size for side in axes))
        return inputs, (self.samples, self._filters, *(side.output for side in axes))

    def _products(
        self,
        operands: Operands,
        which: str,
        pairs: list[tuple[Buffer, Buffer]],
        bias: Use,
        has_bias: bool,
    ) -> list[Step]:
        plan = self._stencil(which)
        lanes = "pixels" if self.pixel_lanes else "filters"
        packed = operands.temporary("packed", plan.weights)
        weights = (self._filters, self.window.channels, self.window.taps)
        units, depth, unit = plan.weights
        transposed = int(which == "backward_data")
        pack: list[Argument] = [read_all(operands.param[0], weights), write(packed)]
        pack += [self.window.group, transposed, int(not self.pixel_lanes), BEGIN, END]
        steps = [Step(kernels.conv_direct_pack, pack, units, _PACK * depth * unit)]
        names = ("table", "fields", "firsts")
        tables = [
            read_all(operands.constant(f"direct.{which}.{lanes}.{name}", values))
            for name, values in zip(names, plan.tables, strict=True)
        ]
        shapes = self._views
        source, target = reversed(shapes) if transposed else shapes
        last: list[Argument] = [operands.scratch("u", (plan.relaid,))]
        if self.pixel_lanes:
            last += [plan.width]
        else:
            last += [plan.block, plan.most, operands.scratch("t", (plan.chunk,))]
        for x, y in pairs:
            arrays: list[Argument] = [read(x, source), read_all(packed), bias, int(has_bias)]
            arrays += [write(y, target), *tables, *plan.numbers, *last, BEGIN, END]
            run = kernels.conv_direct_pixels if self.pixel_lanes else kernels.conv_direct_filters
            steps.append(Step(run, arrays, self.samples, plan.cost))
        return steps

    def _by_sample(self, operands: Operands, x: Buffer, dy: Buffer) -> list[Step]:
        """Return a step over samples that writes partial gradients, and those that add them up."""
        plan, unit = self._weights, stencil.unit_filters()
        sums = [
            operands.partial("dw", (plan.units * plan.depth * unit,)),
            operands.partial("db", (plan.units * unit,)),
        ]
        inputs, outputs = self._views
        arrays = [read(x, inputs), read(dy, outputs), *map(row, sums)]
        arguments = [*arrays, *self._weights_arguments(operands), PIECE, BEGIN, END]
        run = kernels.conv_direct_backward_weights
        return [
            Step(run, arguments, self.samples, plan.cost),
            *self._unpacking(operands, [rows(buffer) for buffer in sums]),
        ]

    def _by_filter(self, operands: Operands, x: Buffer, dy: Buffer) -> list[Step]:
        """Return one step over filters that reads all samples."""
        plan, unit, units = self._weights, stencil.unit_filters(), self._together
        inputs, outputs = self._views
        weights = (self._filters, self.window.channels, self.window.taps)
        diffs = operands.param_diff
        arrays = [read_all(x, inputs), read_all(dy, outputs)]
        arrays += [update(diffs[0], weights), update(diffs[-1], (diffs[-1].size,))]
        sums = operands.scratch("sums", (units * unit * (plan.depth + 1),))
        keep = [operands.accumulate(index) for index in range(len(diffs))]
        arguments = [*arrays, *self._weights_arguments(operands), sums, keep[0], keep[-1]]
        pieces = plan.units // units
        cost = self.samples * plan.cost / pieces
        run = kernels.conv_direct_filter_gradients
        return [Step(run, [*arguments, units, BEGIN, END], pieces, cost)]

    def _weights_arguments(self, operands: Operands) -> list[Argument]:
        """Return what the kernels of the weight gradient take behind their arrays."""
        plan = self._weights
        return [
            int(self.bias and operands.learn[-1]),
            read_all(operands.constant("direct.backward_weights.firsts", plan.firsts)),
            *plan.numbers,
            operands.scratch("u", (plan.relaid,)),
            operands.scratch("v", (plan.vectors,)),
        ]

    def _unpacking(self, operands: Operands, partial: list[Use]) -> list[Step]:
        """Return the steps that add up partial sums, in the order of Caffe."""
        plan, unit = self._weights, stencil.unit_filters()
        shapes: list[Shape] = [(self._filters, self.window.channels, self.window.taps)]
        shapes.append((self._filters,))
        steps = []
        for index, diff in enumerate(operands.param_diff):
            if operands.learn[index]:
                arguments: list[Argument] = [partial[index], update(diff, shapes[index])]
                arguments += [self.window.group, operands.accumulate(index)]
                together = 1
                if index == 0:
                    together = gcd(self.window.filters, unit)
                    arguments += [operands.scratch("t", (plan.depth * unit,)), together]
                run = (kernels.conv_direct_unpack, kernels.conv_direct_bias)[index]
                cost = _UNPACK * together * (plan.depth if index == 0 else 1)
                steps.append(Step(run, [*arguments, BEGIN, END], self._filters // together, cost))
        return steps
