"""The steps of a convolution by Winograd's algorithm (see `cgdnn.kernels.conv_winograd`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from cgdnn.kernels import conv_winograd as kernels
from cgdnn.kernels.reduce import reduce_rows
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

_PRODUCT, _INPUT, _OUTPUT, _FILTER = 0.0042, 0.16, 0.11, 0.2
"""Nanoseconds of a flop in the products, and of an element of V, M and U."""
_MOST_PARTIAL = 1 << 20
"""Weights beyond which each piece of the weight gradient computes some filters from all images."""
_TOGETHER, _LEAST_TOGETHER = 128, 32
"""Filters that such a piece best computes at a time, and at least."""


@dataclass(frozen=True)
class Winograd:
    """A convolution with square kernels of 3 or 5 taps, stride 1 and dilation 1.

    Attributes
    ----------
    x, w, y : tuple of int
        Shapes (N, C, H, W), (Co, C / group, taps, taps) and (N, Co, R, OW).
    pad : tuple of int
    bias : bool
    """

    x: Shape
    w: Shape
    y: Shape
    pad: tuple[int, int]
    bias: bool

    @property
    def taps(self) -> int:
        """Size of the kernel."""
        return self.w[2]

    @property
    def group(self) -> int:
        """Groups of channels."""
        return self.x[1] // self.w[1]

    @property
    def filters(self) -> int:
        """Filters of a group."""
        return self.w[0] // self.group

    def cost(self, which: str) -> float:
        """Return the estimated nanoseconds of a pass on one core."""
        if which == "backward_data":
            form = self._backward_form()
            return self._cost(self._blocking(form), form)
        return self._cost(self._blocking(kernels.FORWARD), kernels.FORWARD)

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that transforms the weights, and one over samples for each bottom."""
        bias = read_all(operands.param[-1], (operands.param[-1].size,))
        return self._products(
            operands, operands.bottom, operands.top, kernels.FORWARD, bias, self.bias
        )

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that transforms the weights, and one over samples for each diff."""
        pairs = zip(operands.top_diff, operands.bottom_diff, operands.propagate, strict=True)
        wanted = [(dy, dx) for dy, dx, asked in pairs if asked]
        nothing = read_all(operands.param[0], (operands.param[0].size,))
        return self._products(
            operands,
            [dy for dy, _ in wanted],
            [dx for _, dx in wanted],
            self._backward_form(),
            nothing,
            False,
        )

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that sum the gradients of all bottoms, one bottom after the other."""
        by_filter = prod(self.w) > _MOST_PARTIAL and gcd(self.filters, _TOGETHER) >= _LEAST_TOGETHER
        steps: list[Step] = []
        for x, dy in zip(operands.bottom, operands.top_diff, strict=True):
            steps += (self._by_filter if by_filter else self._by_sample)(operands, x, dy)
        return steps

    def _backward_form(self) -> int:
        """Return the form of backward_data that takes less time."""
        transposed = self._blocking(kernels.TRANSPOSED)
        whole = (transposed.down, transposed.across) == kernels.grid_of(*self.y[2:])
        costs = {
            form: self._cost(self._blocking(form), form)
            for form in (kernels.FLIPPED, kernels.TRANSPOSED)
        }
        if whole and costs[kernels.TRANSPOSED] < costs[kernels.FLIPPED]:
            return kernels.TRANSPOSED
        return kernels.FLIPPED

    def _blocking(self, form: int) -> kernels.Blocking:
        depth, columns = self.w[1], self.filters
        if form != kernels.FORWARD:
            depth, columns = columns, depth
        grid = kernels.grid_of(*(self.x if form == kernels.FLIPPED else self.y)[2:])
        return kernels.choose_blocking(self.taps, depth, columns, grid, self.x[0])

    def _cost(self, blocking: kernels.Blocking, form: int) -> float:
        """Return the estimated nanoseconds of a pass on one core."""
        grid = kernels.grid_of(*(self.x if form == kernels.FLIPPED else self.y)[2:])
        tiles = self.x[0] * prod(grid)
        inputs, outputs = (kernels.padded(count) for count in (blocking.channels, blocking.filters))
        each = 2 * _PRODUCT * blocking.channels * outputs + _INPUT * inputs + _OUTPUT * outputs
        weights = _FILTER * inputs * outputs
        return self.group * blocking.frequencies * (tiles * each + weights)

    def _products(
        self,
        operands: Operands,
        sources: list[Buffer],
        targets: list[Buffer],
        form: int,
        bias: Use,
        has_bias: bool,
    ) -> list[Step]:
        blocking = self._blocking(form)
        depth, columns = blocking.channels, blocking.filters
        shape = kernels.filters_shape(self.taps, self.group, depth, columns)
        u = operands.temporary("u", shape)
        source_shape, target_shape = self.x, self.y
        if form != kernels.FORWARD:
            source_shape, target_shape = self.y, self.x
        pads = [self.taps - 1 - pad if form == kernels.FLIPPED else pad for pad in self.pad]
        scratch = [
            operands.scratch("plane", (blocking.plane_scratch(),)),
            operands.scratch("v", (blocking.tiles_scratch(depth),)),
            operands.scratch("m", (blocking.tiles_scratch(columns),)),
        ]
        first = Step(
            kernels.winograd_filters,
            [
                read_all(operands.param[0], self.w),
                write(u),
                self.group,
                columns,
                form,
                operands.scratch("plane", (kernels.filters_scratch(self.taps),)),
                BEGIN,
                END,
            ],
            shape[0],
            _FILTER * prod(shape[1:]),
        )
        units = self.x[0] // blocking.images
        steps = [
            Step(
                kernels.conv_winograd,
                [
                    read(source, source_shape),
                    read_all(u),
                    bias,
                    int(has_bias),
                    write(target, target_shape),
                    self.group,
                    self.taps,
                    int(form == kernels.TRANSPOSED),
                    *pads,
                    blocking.images,
                    blocking.down,
                    blocking.across,
                    *scratch,
                    BEGIN,
                    END,
                ],
                units,
                self._cost(blocking, form) / units,
            )
            for source, target in zip(sources, targets, strict=True)
        ]
        return [first, *steps]

    def _by_sample(self, operands: Operands, x: Buffer, dy: Buffer) -> list[Step]:
        """Return a step over samples that writes partial gradients, and the steps that add them."""
        size = prod(self.w)
        sums = [operands.partial("dw", (size,)), operands.partial("db", (self.w[0],))]
        arrays = [read(x, self.x), read(dy, self.y), *map(row, sums)]
        numbers: list[Argument] = [PIECE, 0.0, 0.0, 0, self.group, BEGIN, END]
        steps = [self._weights_step(operands, arrays, numbers, self._groups, self.filters)]
        for index, diff in enumerate(operands.param_diff):
            if operands.learn[index]:
                target: list[Argument] = [update(diff, (diff.size,)), operands.accumulate(index)]
                arguments = [rows(sums[index]), *target, BEGIN, END]
                steps.append(Step(reduce_rows, arguments, diff.size, 2.0))
        return steps

    def _by_filter(self, operands: Operands, x: Buffer, dy: Buffer) -> list[Step]:
        """Return one step over filters that reads all samples."""
        together = gcd(self.filters, _TOGETHER)
        diffs = operands.param_diff
        keep = [operands.accumulate(index) for index in range(len(diffs))]
        arrays = [
            read_all(x, self.x),
            read_all(dy, self.y),
            *(update(diff, (1, diff.size)) for diff in (diffs[0], diffs[-1])),
        ]
        numbers: list[Argument] = [0, keep[0], keep[-1], BEGIN, END, 0, self._groups]
        return [self._weights_step(operands, arrays, numbers, self.w[0] // together, together)]

    @property
    def _groups(self) -> int:
        """Groups of images whose tiles of y are taken together."""
        return self.x[0] // self._blocking(kernels.FORWARD).images

    def _weights_step(
        self,
        operands: Operands,
        arrays: list[Use],
        numbers: list[Argument],
        extent: int,
        together: int,
    ) -> Step:
        blocking = self._blocking(kernels.FORWARD)
        lengths = {
            "plane": blocking.plane_scratch(),
            "v": blocking.tiles_scratch(blocking.channels),
            "m": blocking.tiles_scratch(together),
            "du": blocking.gradient_scratch(together),
            "sums": kernels.padded(together),
        }
        return Step(
            kernels.conv_backward_weights_winograd,
            [
                *arrays,
                int(self.bias and operands.learn[-1]),
                self.group,
                self.taps,
                *self.pad,
                blocking.images,
                blocking.down,
                blocking.across,
                together,
                *(operands.scratch(name, (length,)) for name, length in lengths.items()),
                *numbers,
            ],
            extent,
            self._cost(blocking, kernels.FORWARD) / extent,
        )
