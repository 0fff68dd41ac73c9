"""The steps of a convolution by Winograd's algorithm (see `cgdnn.kernels.conv_winograd`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from cgdnn.kernels import conv_winograd as kernels
from cgdnn.kernels import conv_winograd_few as few
from cgdnn.kernels.winograd_few_tiles import FEW
from cgdnn.kernels.winograd_points import OUTPUTS, TAPS, VARIANTS
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
    write,
)
from cgdnn.layers._layout import CHANNEL_LANE, lanes, stored_shape
from cgdnn.layers._partial import add_partials

_PRODUCT, _FILTER, _GRADIENT = 0.0042, 0.3, 0.35
"""Nanoseconds of a flop in the products, and of an element of U and dU."""
_INPUT, _OUTPUT = {4: 0.16, 5: 0.2, 7: 0.2, 8: 0.25}, {4: 0.11, 5: 0.14, 7: 0.15, 8: 0.19}
"""Nanoseconds of an element of V and M, by the outputs of a tile on an axis."""
_RELAY = 0.07
"""Nanoseconds of bringing an element of a blob into lanes, or out of them."""
_FEW_INPUT, _FEW_PRODUCT, _FEW_INVERSE, _FEW_OUTPUT = 0.07, 0.08, 0.47, 0.08
"""Nanoseconds, with few channels, of an element of V; of a frequency of a tile for a vector of
filters, for each channel and once; and of an element of y."""
_MOST_PARTIAL = 1 << 20
"""Weights beyond which each piece of the weight gradient computes some filters from all images."""
_LEAST_PIECES = 4
"""Pieces over images that a pass has at least, where there are so many; below, the weight gradient
is cut over filters."""
_FEW = 0.58
"""Elements of V and M for one of U where a pass is better cut over filters than over samples."""
_MOST_SPREAD = 4 << 20
"""Elements of V and M of all images that a last cache holds beside U."""
_LEAST_TOGETHER, _MOST_TOGETHER = 32, 128
"""Filters that such a piece computes."""
_MOST_SUMS = 5 << 19
"""Elements of dU beyond which such a piece computes fewer: it is passed through for each block."""


@dataclass(frozen=True)
class Winograd:
    """A convolution with square kernels of a size in `VARIANTS`, stride 1 and dilation 1.

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

    @property
    def whole_vectors(self) -> tuple[bool, bool]:
        """Whether channels, and filters, fill vectors in all that the kernels take together."""
        filters = self._together if self._cut_by_filter else self.filters
        return self.w[1] % lanes() == 0, filters % lanes() == 0

    def cost(self, which: str) -> float:
        """Return the estimated nanoseconds of a pass on one core."""
        if which == "backward_weights":
            return self._cost_of(kernels.FORWARD, self._summing, _GRADIENT)
        if which == "forward" and self._has_few:
            return self._few_cost
        return self._cost(self._backward_form() if which == "backward_data" else kernels.FORWARD)

    def forward(self, operands: Operands) -> list[Step]:
        """Return the steps for each bottom."""
        pairs = list(zip(operands.bottom, operands.top, strict=True))
        bias = read_all(operands.param[-1], (operands.param[-1].size,))
        if self._has_few and all(_pitch(x, self.x) == 1 for x, _ in pairs):
            return self._few(operands, pairs, bias)
        return self._products(operands, pairs, kernels.FORWARD, bias, self.bias)

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the steps for each bottom whose diff is wanted."""
        diffs = zip(operands.top_diff, operands.bottom_diff, operands.propagate, strict=True)
        pairs = [(dy, dx) for dy, dx, wanted in diffs if wanted]
        nothing = read_all(operands.param[0], (operands.param[0].size,))
        return self._products(operands, pairs, self._backward_form(), nothing, False)

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that sum the gradients of all bottoms, one bottom after the other."""
        steps: list[Step] = []
        for x, dy in zip(operands.bottom, operands.top_diff, strict=True):
            make = self._by_filter if self._cut_by_filter else self._by_sample
            steps += make(operands, x, dy)
        return steps

    @property
    def _cut_by_filter(self) -> bool:
        """Whether each piece of the weight gradient computes some filters from all images."""
        large = prod(self.w) > _MOST_PARTIAL or self._pieces < _LEAST_PIECES
        return large and self._together >= _LEAST_TOGETHER

    def _backward_form(self) -> int:
        """Return the form of backward_data that takes less time."""
        blocking = self._blocking(kernels.TRANSPOSED)
        whole = (blocking.down, blocking.across) == self._grid(kernels.TRANSPOSED, blocking.outputs)
        faster = self._cost(kernels.TRANSPOSED) < self._cost(kernels.FLIPPED)
        return kernels.TRANSPOSED if whole and faster else kernels.FLIPPED

    def _grid(self, form: int, outputs: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of so many outputs on an axis, of an image."""
        rows, columns = kernels.grid_of(
            outputs, *(self.x if form == kernels.FLIPPED else self.y)[2:]
        )
        return rows, columns

    def _tiles(self, form: int, outputs: int) -> int:
        """Return the tiles of all images."""
        return self.x[0] * prod(self._grid(form, outputs))

    def _blocking(self, form: int, *, summed: bool = False) -> kernels.Blocking:
        """Return the blocking of the fastest tiles: those of backward_weights, or of a form."""
        depth, columns = self.w[1], self.filters
        if form != kernels.FORWARD:
            depth, columns = columns, depth
        blockings = (
            kernels.choose_blocking(
                outputs, taps, depth, columns, self._grid(form, outputs), self.x[0], summed=summed
            )
            for outputs, taps in VARIANTS
            if taps == self.taps
        )
        weight = _GRADIENT if summed else _FILTER
        return min(blockings, key=lambda blocking: self._cost_of(form, blocking, weight))

    @property
    def _summing(self) -> kernels.Blocking:
        """The blocking of backward_weights."""
        return self._blocking(kernels.FORWARD, summed=True)

    def _cost(self, form: int) -> float:
        """Return the estimated nanoseconds of a pass on one core."""
        return self._cost_of(form, self._blocking(form), _FILTER)

    def _cost_of(self, form: int, blocking: kernels.Blocking, weight: float) -> float:
        """Return the same with a blocking, and so many nanoseconds for an element of U or dU."""
        weights = self.group * blocking.channels * kernels.padded(blocking.filters)
        return self._channels_cost(form, blocking) + weight * blocking.frequencies * weights

    def _channels_cost(self, form: int, blocking: kernels.Blocking) -> float:
        """Return the same without the nanoseconds for U."""
        inputs, outputs = map(kernels.padded, (blocking.channels, blocking.filters))
        each = 2 * _PRODUCT * blocking.channels * outputs
        each += _INPUT[blocking.outputs] * inputs + _OUTPUT[blocking.outputs] * outputs
        tiles = self._tiles(form, blocking.outputs)
        return self.group * blocking.frequencies * tiles * each

    @property
    def _has_few(self) -> bool:
        """Whether the forward pass is faster by the kernel for few channels."""
        served = self.group == 1 and self.w[1] <= FEW and self.taps in TAPS
        return served and self._few_cost < self._cost(kernels.FORWARD)

    @property
    def _few_cost(self) -> float:
        """The estimated nanoseconds of the forward pass by the kernel for few channels."""
        channels, vectors = self.w[1], kernels.padded(self.filters) / kernels.padded(1)
        each = vectors * (_FEW_PRODUCT * channels + _FEW_INVERSE) + _FEW_INPUT * channels
        products = self._tiles(kernels.FORWARD, OUTPUTS) * (self.taps + OUTPUTS - 1) ** 2
        return products * each + _FEW_OUTPUT * prod(self.y)

    def _few(self, operands: Operands, pairs: list[tuple[Buffer, Buffer]], bias: Use) -> list[Step]:
        """Return the step that transforms the filters, and one over samples for each pair."""
        filters, channels, grid = self.w[0], self.w[1], self._grid(kernels.FORWARD, OUTPUTS)
        shape = few.filters_shape(self.taps, channels, filters)
        band = few.band_of(self.taps, channels, grid)
        u = operands.temporary("u", shape)
        lengths = few.scratch_of(self.taps, channels, band, grid[1], self.x[3])
        scratch = [operands.scratch(f"few{i}", (length,)) for i, length in enumerate(lengths)]
        plane = operands.scratch("plane", (few.plane_scratch(self.y[3]),))
        transform = Step(
            few.winograd_few_filters,
            [
                read_all(operands.param[0], self.w),
                write(u),
                operands.scratch("filters", (few.filters_scratch(self.taps, channels),)),
                BEGIN,
                END,
            ],
            shape[0],
            _FILTER * prod(shape[1:]),
        )
        weights: list[Argument] = [read_all(u, shape), bias, int(self.bias)]
        rest: list[Argument] = [*self.pad, band, *scratch]
        steps = [transform]
        for x, y in pairs:
            kernel, view, last = few.conv_forward_winograd_few, self.y, [plane]
            if _pitch(y, self.y) > 1:
                kernel, last = few.conv_forward_winograd_few_lanes, []
                view = (self.y[0], filters // lanes(), *self.y[2:], lanes())
            arguments = [read(x, self.x), *weights, write(y, view), *rest, *last, BEGIN, END]
            cost = self._few_cost - _spared(y, self.y)
            steps.append(Step(kernel, arguments, self.x[0], cost / self.x[0]))
        return steps

    def _products(
        self,
        operands: Operands,
        pairs: list[tuple[Buffer, Buffer]],
        form: int,
        bias: Use,
        has_bias: bool,
    ) -> list[Step]:
        """Return the steps of the forward pass or of backward_data, for each source and target."""
        blocking = self._blocking(form)
        pads = [self.taps - 1 - pad if form == kernels.FLIPPED else pad for pad in self.pad]
        geometry: list[Argument] = [self.group, blocking.outputs, self.taps]
        geometry += [int(form == kernels.TRANSPOSED), *pads]
        shapes = (self.x, self.y) if form == kernels.FORWARD else (self.y, self.x)
        depth, columns = blocking.channels, blocking.filters
        whole = (blocking.down, blocking.across) == self._grid(form, blocking.outputs)
        tiles = self._tiles(form, blocking.outputs) * (depth + columns)
        few = tiles < _FEW * depth * columns and tiles * blocking.frequencies < _MOST_SPREAD
        make = self._over_filters if whole and few else self._over_samples
        return make(operands, pairs, shapes, form, geometry, [bias, int(has_bias)])

    def _over_samples(
        self,
        operands: Operands,
        pairs: list[tuple[Buffer, Buffer]],
        shapes: tuple[Shape, Shape],
        form: int,
        geometry: list[Argument],
        bias: list[Argument],
    ) -> list[Step]:
        """Return the step that makes U, and a step over samples for each pair."""
        u, transform = self._filters_step(operands, form)
        blocking = self._blocking(form)
        most = max(1, self.x[0] // _LEAST_PIECES)
        images = max(i for i in range(1, most + 1) if i <= blocking.images and self.x[0] % i == 0)
        blocking = replace(blocking, images=images)
        sizes = (
            blocking.plane_scratch(),
            blocking.tiles_scratch(blocking.channels),
            blocking.tiles_scratch(blocking.filters),
        )
        rest: list[Argument] = [*geometry, blocking.images, blocking.down, blocking.across]
        rest += [operands.scratch(f"tiles{i}", (size,)) for i, size in enumerate(sizes)]
        units = self.x[0] // blocking.images
        cost = self._channels_cost(form, blocking)
        return [
            transform,
            *(
                Step(
                    kernels.conv_winograd,
                    [
                        *_blob(read, source, shapes[0]),
                        read_all(u),
                        *bias,
                        *_blob(write, target, shapes[1]),
                        *rest,
                        BEGIN,
                        END,
                    ],
                    units,
                    (cost - _spared(source, shapes[0]) - _spared(target, shapes[1])) / units,
                )
                for source, target in pairs
            ),
        ]

    def _filters_step(self, operands: Operands, form: int) -> tuple[Buffer, Step]:
        """Return U, and the step that makes it."""
        blocking = self._blocking(form)
        depth, columns = blocking.channels, blocking.filters
        variant = (blocking.outputs, self.taps)
        shape = kernels.filters_shape(*variant, self.group, depth, columns)
        u = operands.temporary("u", shape)
        step = Step(
            kernels.winograd_filters,
            [
                read_all(operands.param[0], self.w),
                write(u),
                blocking.outputs,
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
        return u, step

    def _over_filters(
        self,
        operands: Operands,
        pairs: list[tuple[Buffer, Buffer]],
        shapes: tuple[Shape, Shape],
        form: int,
        geometry: list[Argument],
        bias: list[Argument],
    ) -> list[Step]:
        """Return a step over samples, one over filters and one over samples for each pair."""
        blocking = self._blocking(form)
        depth, columns = blocking.channels, blocking.filters
        groups = self.x[0] // blocking.images
        variant = (blocking.outputs, self.taps)
        units, _, _, width = kernels.filters_shape(*variant, self.group, depth, columns)
        frequencies, tiles = blocking.frequencies, self._tiles(form, blocking.outputs)
        plane = operands.scratch("plane", (blocking.plane_scratch(),))
        part = operands.scratch("u", kernels.part_shape(*variant, depth, columns))
        product = width * depth * frequencies * (2 * _PRODUCT * tiles + _FILTER)
        steps = []
        for source, target in pairs:
            v = operands.temporary("v", (groups, self.group, blocking.tiles_scratch(depth)))
            m = operands.temporary("m", (units, groups, blocking.tiles_scratch(width)))
            inputs = [*_blob(read, source, shapes[0]), write(v), *geometry, blocking.images]
            products = [read_all(v), read_all(operands.param[0], self.w), write(m)]
            numbers: list[Argument] = [blocking.outputs, self.group, columns, form, blocking.tiles]
            outputs = [read_all(m), *bias, *_blob(write, target, shapes[1]), *geometry]
            through = tiles * frequencies * self.group / groups
            steps += [
                Step(
                    kernels.winograd_inputs,
                    [*inputs, plane, BEGIN, END],
                    groups,
                    _INPUT[blocking.outputs] * through * depth,
                ),
                Step(
                    kernels.winograd_products,
                    [*products, *numbers, plane, part, BEGIN, END],
                    units,
                    product,
                ),
                Step(
                    kernels.winograd_outputs,
                    [*outputs, blocking.images, width, plane, BEGIN, END],
                    groups,
                    _OUTPUT[blocking.outputs] * through * columns,
                ),
            ]
        return steps

    @property
    def _pieces(self) -> float:
        """Pieces whose transforms from dU to dw take a fifth of the weight gradient's time."""
        blocking = self._summing
        sizes = map(kernels.padded, (blocking.channels, blocking.filters))
        finish = _GRADIENT * self.group * blocking.frequencies * prod(sizes)
        return self._channels_cost(kernels.FORWARD, blocking) / 5 / finish

    @property
    def _together(self) -> int:
        """Filters of a group that a piece computes from all samples: a divisor of them."""
        near = _MOST_SUMS // (self._summing.frequencies * kernels.padded(self.w[1]))
        most = min(_MOST_TOGETHER, max(1, self.filters // 2), max(_LEAST_TOGETHER, near))
        return max(count for count in range(1, most + 1) if self.filters % count == 0)

    def _by_sample(self, operands: Operands, x: Buffer, dy: Buffer) -> list[Step]:
        """Return a step over samples that writes partial gradients, and the steps that add them."""
        size = prod(self.w)
        sums = [operands.partial("dw", (size,)), operands.partial("db", (self.w[0],))]
        arrays = [*_blob(read, x, self.x), *_blob(read, dy, self.y), *map(row, sums)]
        groups = self.x[0] // self._summing.images
        most = max(_LEAST_PIECES, int(self._pieces))
        pieces = max(
            count for count in range(1, groups + 1) if groups % count == 0 and count <= most
        )
        numbers: list[Argument] = [PIECE, 0.0, 0.0, 0, self.group, groups // pieces, BEGIN, END]
        step = self._weights_step(operands, arrays, numbers, pieces, self.filters)
        return [step, *add_partials(operands, sums)]

    def _by_filter(self, operands: Operands, x: Buffer, dy: Buffer) -> list[Step]:
        """Return one step over filters that reads all samples."""
        together = self._together
        diffs = operands.param_diff
        keep = [operands.accumulate(index) for index in range(len(diffs))]
        arrays = [
            *_blob(read_all, x, self.x),
            *_blob(read_all, dy, self.y),
            *(operands.gradient(index, (1, diffs[index].size)) for index in (0, -1)),
        ]
        groups = self.x[0] // self._summing.images
        numbers: list[Argument] = [0, keep[0], keep[-1], BEGIN, END, groups, 0, 1]
        return [self._weights_step(operands, arrays, numbers, self.w[0] // together, together)]

    def _weights_step(
        self,
        operands: Operands,
        arrays: list[Argument],
        numbers: list[Argument],
        extent: int,
        together: int,
    ) -> Step:
        blocking = self._summing
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
                blocking.outputs,
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
            self._channels_cost(kernels.FORWARD, blocking) / extent,
        )


def _pitch(blob: Buffer, shape: Shape) -> int:
    """Return what places of a plane are apart in a blob that is seen as N, C, H, W."""
    in_lanes = shape[1] % lanes() == 0 and blob.shape == stored_shape(CHANNEL_LANE, shape)
    return lanes() if in_lanes else 1


def _blob(use: Callable[[Buffer, Shape], Use], blob: Buffer, shape: Shape) -> list[Argument]:
    """Return a blob as the kernels take it: the array, and what places of a plane are apart."""
    return [use(blob, shape), _pitch(blob, shape)]


def _spared(blob: Buffer, shape: Shape) -> float:
    """Return the nanoseconds that a blob in lanes spares the kernels."""
    return _RELAY * prod(shape) if _pitch(blob, shape) > 1 else 0.0
