"""The steps of a convolution whose blobs have images in the lanes, direct or by Winograd.

See `cgdnn.kernels.conv_images` and `cgdnn.kernels.conv_winograd_images`. Such kernels are as good
for any count of channels as for another, and cut the batch by vectors of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

from cgdnn.kernels import conv_images as direct
from cgdnn.kernels import conv_winograd_images as winograd
from cgdnn.kernels._jit import Kernel
from cgdnn.kernels.conv_winograd import frequencies_of, grid_of, padded
from cgdnn.kernels.pool_lanes import max_forward
from cgdnn.kernels.stencil import Window
from cgdnn.kernels.winograd_images_tiles import SERVED
from cgdnn.kernels.winograd_points import OUTPUTS
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
    write_all,
)
from cgdnn.layers._layout import lanes
from cgdnn.layers._partial import add_partials

_PRODUCT, _FILTER, _GRADIENT = 0.0041, 0.08, 0.075
"""Nanoseconds of a flop in Winograd's products, and of an element of U and of dU."""
_INPUT = {
    "forward": (0.062, 0.08),
    "backward_data": (0.052, 0.09),
    "backward_weights": (0.11, 0.14),
}
_OUTPUT = {
    "forward": (0.055, 0.09),
    "backward_data": (0.084, 0.09),
    "backward_weights": (0.092, 0.16),
}
"""Of an element of V and of M, or dM; by pass, for tiles of `OUTPUTS` and for larger ones."""
_FAR, _FETCH = 128 << 10, 0.1
"""Elements of a group's blobs beyond which no near cache has them, and the nanoseconds of one."""


@dataclass(frozen=True)
class _Images:
    """A convolution of one group with stride 1 and dilation 1.

    Attributes
    ----------
    samples : int
        A multiple of the lanes.
    window : Window
    bias : bool
    """

    samples: int
    window: Window
    bias: bool

    @property
    def _groups(self) -> int:
        return self.samples // lanes()

    @property
    def _bottom(self) -> Shape:
        axes = (self.window.rows, self.window.columns)
        return (self._groups, self.window.channels, *(axis.size for axis in axes), lanes())

    @property
    def _top(self) -> Shape:
        axes = (self.window.rows, self.window.columns)
        return (self._groups, self.window.filters, *(axis.output for axis in axes), lanes())

    @property
    def _weights(self) -> Shape:
        rows, columns = self.window.rows.kernel, self.window.columns.kernel
        return (self.window.filters, self.window.channels, rows, columns)

    def _bias(self, operands: Operands) -> list[Argument]:
        """Return the bias, which kernels do not look at where there is none, and whether it is."""
        last = operands.param[-1]
        return [read_all(last, (last.size,)), int(self.bias)]

    def _learns_bias(self, operands: Operands) -> int:
        return int(self.bias and operands.learn[-1])

    def _sums(self, operands: Operands) -> list[Buffer]:
        """Return the partial gradients of the weights and of the bias."""
        return [
            operands.partial("dw", (prod(self._weights),)),
            operands.partial("db", (self.window.filters,)),
        ]


class DirectImages(_Images):
    """The convolution as sums of products."""

    def cost(self, which: str) -> float:
        """Return the estimated nanoseconds of a pass for a group of images."""
        weights = which == "backward_weights"
        each = direct.gradients_cost if weights else direct.outputs_cost
        return lanes() * each(self.window)

    def routed_cost(self, which: str) -> float:
        """Return the same of a backward pass behind maximum pooling."""
        weights = which == "backward_weights"
        each = direct.routed_weights_cost if weights else direct.routed_data_cost
        return lanes() * each(self.window)

    def forward(self, operands: Operands) -> list[Step]:
        """Return a step over groups of images for each bottom."""
        weights = [read_all(operands.param[0], self._weights), *self._bias(operands)]
        steps = []
        for x, y in zip(operands.bottom, operands.top, strict=True):
            taken = [read(x, self._bottom), *weights]
            arguments = [*taken, write(y, self._top), BEGIN, END]
            step = self._step(direct.forward(self.window), arguments, self.cost("forward"))
            step.merge = partial(self._pooled, taken)
            steps.append(step)
        return steps

    def _pooled(self, taken: list[Argument], reader: Step) -> Step | None:
        """Return the step over groups of images that pools what it computes, as `reader` does.

        Parameters
        ----------
        taken : list of Argument
            The bottom, the weights and the bias.
        reader : Step
        """
        numbers = [argument for argument in reader.arguments if isinstance(argument, int)]
        if reader.kernel is not max_forward((2, 2)) or numbers != [2, 2, 0, 0, 2, 2]:
            return None
        if not direct.pools(self.window):
            return None
        _, *written = (
            argument.buffer for argument in reader.arguments if isinstance(argument, Use)
        )
        uses = [write(buffer, self._pooled_top) for buffer in written]
        kernel, cost = direct.forward_pooled(self.window), lanes() * direct.pooled_cost(self.window)
        return self._step(kernel, [*taken, *uses, BEGIN, END], cost)

    @property
    def _pooled_top(self) -> Shape:
        """The top behind maximum pooling that halves it."""
        sides = self.window.rows, self.window.columns
        return (*self._top[:2], *(-(-side.output // 2) for side in sides), lanes())

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return a step over groups of images for each bottom whose diff is wanted."""
        weights = read_all(operands.param[0], self._weights)
        diffs = zip(operands.top_diff, operands.bottom_diff, operands.propagate, strict=True)
        return [
            self._step(
                direct.backward_data(self.window),
                [read(dy, self._top), weights, write(dx, self._bottom), BEGIN, END],
                self.cost("backward_data"),
            )
            for dy, dx, wanted in diffs
            if wanted
        ]

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that sum the gradients of all bottoms, one bottom after the other."""
        steps: list[Step] = []
        for x, dy in zip(operands.bottom, operands.top_diff, strict=True):
            kernel, cost = direct.backward_weights(self.window), self.cost("backward_weights")
            steps += self._summed(operands, x, [read(dy, self._top)], kernel, cost)
        return steps

    def routed_data(self, operands: Operands) -> list[Step]:
        """Return the step of the data gradient from the gradients behind maximum pooling."""
        arguments = [
            *self._routed(operands),
            read_all(operands.param[0], self._weights),
            write(operands.bottom_diff[0], self._bottom),
        ]
        kernel = direct.backward_data_routed(self.window)
        return [self._step(kernel, [*arguments, BEGIN, END], self.routed_cost("backward_data"))]

    def routed_weights(self, operands: Operands) -> list[Step]:
        """Return the steps of the weight gradient from the gradients behind maximum pooling."""
        kernel = direct.backward_weights_routed(self.window)
        cost = self.routed_cost("backward_weights")
        size = direct.masks_scratch(self.window, self._groups)
        masks = operands.scratch("masks", (size,), "uint8")
        given = self._routed(operands)
        return self._summed(operands, operands.bottom[0], given, kernel, cost, [masks])

    def _routed(self, operands: Operands) -> list[Use]:
        assert operands.routed is not None, "the plan gives them to a routed candidate"
        return [read(buffer, self._pooled_top) for buffer in operands.routed]

    def _summed(
        self,
        operands: Operands,
        x: Buffer,
        gradients: Sequence[Use],
        kernel: Kernel,
        cost: float,
        scratch: Sequence[Use] = (),
    ) -> list[Step]:
        """Return the step that writes partial gradients, and those that add them up."""
        sums = self._sums(operands)
        arrays = [read(x, self._bottom), *gradients, *map(row, sums), *scratch]
        numbers: list[Argument] = [self._learns_bias(operands), PIECE, BEGIN, END]
        step = self._step(kernel, [*arrays, *numbers], cost)
        return [step, *add_partials(operands, sums)]

    def _step(self, kernel: Kernel, arguments: list[Argument], cost: float) -> Step:
        return Step(kernel, arguments, self._groups, cost)


class WinogradImages(_Images):
    """The convolution by Winograd's algorithm, for 3 x 3 and 5 x 5 taps."""

    @property
    def _taps(self) -> int:
        return self.window.rows.kernel

    @property
    def _served(self) -> list[int]:
        """Outputs on an axis of the tiles that serve."""
        sizes = self.window.channels, self.window.filters
        return [
            outputs
            for outputs, taps in SERVED
            if taps == self._taps and winograd.stays_near(outputs, taps, *sizes)
        ]

    @property
    def serves(self) -> bool:
        """Whether there are tiles whose U stays in the second cache."""
        return bool(self._served)

    def _outputs(self, which: str) -> int:
        """Return the outputs on an axis of the tiles that take the least time."""

        def total(outputs: int) -> float:
            cost = self._groups * self._cost_of(which, outputs)
            if which == "backward_weights":
                return cost + self._pieces(outputs) * self._finish(outputs)
            return cost + self._filters_cost(outputs)

        return min(self._served, key=total)

    def _frequencies(self, outputs: int) -> int:
        """Return the products for a tile."""
        count: int = frequencies_of(outputs, self._taps)
        return count

    def _tiles(self, outputs: int) -> int:
        """Return the tiles of an image."""
        return prod(grid_of(outputs, *self._top[2:4]))

    def cost(self, which: str) -> float:
        """Return the estimated nanoseconds of a pass for a group of images, without U."""
        return self._cost_of(which, self._outputs(which))

    def _cost_of(self, which: str, outputs: int) -> float:
        """Return the same with tiles of so many outputs on an axis."""
        depth, columns = self.window.channels, self.window.filters
        if which == "backward_data":
            depth, columns = columns, depth
        elif which == "backward_weights":
            columns = winograd.filters_computed(columns)
        larger = outputs > OUTPUTS
        each = 2 * _PRODUCT * depth * columns
        each += _INPUT[which][larger] * depth + _OUTPUT[which][larger] * columns
        blobs = prod(self._bottom[1:]) + prod(self._top[1:])
        fetched = _FETCH * blobs if blobs > _FAR else 0.0
        return self._frequencies(outputs) * self._tiles(outputs) * lanes() * each + fetched

    def forward(self, operands: Operands) -> list[Step]:
        """Return the step that makes U, and one over groups of images for each bottom."""
        pairs = zip(operands.bottom, operands.top, strict=True)
        return self._products(operands, "forward", list(pairs), self._bias(operands))

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that makes U, and one for each bottom whose diff is wanted."""
        diffs = zip(operands.top_diff, operands.bottom_diff, operands.propagate, strict=True)
        pairs = [(dy, dx) for dy, dx, wanted in diffs if wanted]
        nothing: list[Argument] = [read_all(operands.param[0], (operands.param[0].size,)), 0]
        return self._products(operands, "backward_data", pairs, nothing)

    def _products(
        self,
        operands: Operands,
        which: str,
        pairs: list[tuple[Buffer, Buffer]],
        bias: list[Argument],
    ) -> list[Step]:
        sizes, views = [self.window.channels, self.window.filters], [self._bottom, self._top]
        if which == "backward_data":
            sizes, views = sizes[::-1], views[::-1]
        outputs = self._outputs(which)
        blocking = winograd.choose_blocking(
            outputs, self._taps, sizes[0], sizes[1], self._tiles(outputs), self._groups
        )
        scratch = winograd.scratch_of(outputs, self._taps, sizes[0], blocking)
        u, transform = self._filters_step(operands, outputs)
        transposed = int(which == "backward_data")
        numbers: list[Argument] = [outputs, self._taps, transposed, *self._pad, *blocking]
        numbers += [operands.scratch(f"tiles{i}", (size,)) for i, size in enumerate(scratch)]
        return [
            transform,
            *(
                Step(
                    winograd.conv_winograd_images,
                    [
                        read(source, views[0]),
                        read_all(u),
                        *bias,
                        write(target, views[1]),
                        *numbers,
                        BEGIN,
                        END,
                    ],
                    self._groups // blocking[0],
                    self.cost(which) * blocking[0],
                )
                for source, target in pairs
            ),
        ]

    @property
    def _pad(self) -> tuple[int, int]:
        return self.window.rows.pad, self.window.columns.pad

    def _filters_step(self, operands: Operands, outputs: int) -> tuple[Buffer, Step]:
        """Return U, and the step that makes it."""
        channels, filters = self.window.channels, self.window.filters
        u = operands.temporary("u", winograd.filters_shape(outputs, self._taps, filters, channels))
        arguments: list[Argument] = [
            read_all(operands.param[0], self._weights),
            write_all(u),
            outputs,
            lanes(),
            operands.scratch("plane", (winograd.filters_scratch(self._taps),)),
            0,
            -(-filters * channels // lanes()),
        ]
        return u, Step(winograd.winograd_images_filters, arguments, 1, self._filters_cost(outputs))

    def _filters_cost(self, outputs: int) -> float:
        """Return the nanoseconds of making U."""
        weights = padded(self.window.filters * self.window.channels)
        return _FILTER * self._frequencies(outputs) * weights

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that sum the gradients of all bottoms, one bottom after the other."""
        channels, filters = self.window.channels, self.window.filters
        outputs = self._outputs("backward_weights")
        pieces = self._pieces(outputs)
        groups = self._groups // pieces
        blocking = winograd.choose_weights_blocking(
            outputs, self._taps, filters, self._tiles(outputs), groups
        )
        scratch = winograd.weights_scratch_of(outputs, self._taps, channels, filters, blocking)
        learns = self._learns_bias(operands)
        numbers: list[Argument] = [learns, outputs, self._taps, *self._pad, *blocking]
        numbers += [operands.scratch(f"weights{i}", (size,)) for i, size in enumerate(scratch)]
        steps = []
        for x, dy in zip(operands.bottom, operands.top_diff, strict=True):
            sums = self._sums(operands)
            arrays = [read(x, self._bottom), read(dy, self._top), *map(row, sums)]
            step = Step(
                winograd.conv_backward_weights_winograd_images,
                [*arrays, *numbers, PIECE, groups, BEGIN, END],
                pieces,
                self.cost("backward_weights") * groups + self._finish(outputs),
            )
            steps += [step, *add_partials(operands, sums)]
        return steps

    def _finish(self, outputs: int) -> float:
        """Return the nanoseconds of transforming dU back."""
        weights = self.window.channels * padded(self.window.filters)
        return _GRADIENT * self._frequencies(outputs) * weights

    def _pieces(self, outputs: int) -> int:
        """Return a divisor of the groups: two, or more if transforming back takes little time."""
        products = self._cost_of("backward_weights", outputs) * self._groups
        most = max(2, int(products / 5 / self._finish(outputs)))
        counts = range(1, self._groups + 1)
        return max(count for count in counts if self._groups % count == 0 and count <= most)
