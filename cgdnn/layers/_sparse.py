"""The steps of backward passes that skip zeros (see `cgdnn.kernels.conv_sparse`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd, prod

import numpy as np

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
from cgdnn.layers._layout import CHANNEL_LANE, lanes, stored_shape

_ADD, _ENTRY, _LIST, _ELEMENT, _RELAY, _WEIGHT = 0.11, 1.2, 10.0, 0.2, 0.36, 0.4
"""Nanoseconds of a vector's multiply-add, of an entry and a list that a tile goes through, of
looking at an element of dy, of re-laying an element of an image, and of a partial sum."""
_CROSSING_ADD = 0.22
"""Nanoseconds of a multiply-add of a vector that lies on two cache lines."""
_SCATTER = 0.25
"""Nanoseconds of a vector's multiply-add to the image."""
_SPREAD_ENTRY = 0.6
"""Nanoseconds of an entry where no vector of x crosses a cache line."""
_SHARE = 0.2
"""Share of non-zeros that pieces are cut for: how passes are cut must not depend on values."""
_MOST_PARTIAL = 1 << 18
"""Weights beyond which each piece of the weight gradient computes some filters from all images,
rather than all filters from some images: partial gradients would not stay in a near cache."""
_PARTIALS = 16
"""Partial gradients that are expected else."""
_FILTERS = 64
"""Filters that such a piece computes at least: each piece re-lays all images."""


@dataclass(frozen=True)
class Sparse:
    """A convolution over two spatial axes with dilation 1.

    Attributes
    ----------
    window : Window
        With `pooled`, backward_weights takes `Operands.routed`.
    bias : bool
    zeros : float
        Share of zeros in dy that is expected.
    """

    window: kernels.Window
    bias: bool
    zeros: float

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the step that re-lays the weights, and one over samples for each diff."""
        window = self.window
        by_pixel, by_filter = self._data_products(self.zeros)
        packed = operands.temporary("packed", (self._filters, window.data_row))
        weights = read(operands.param[0], (self._filters, window.channels, *window.kernel))
        first = Step(
            kernels.conv_sparse_pack_weights,
            [weights, write(packed), BEGIN, END],
            self._filters,
            _WEIGHT * window.data_row,
        )
        steps = [
            Step(
                kernels.conv_backward_data_sparse(window.kernel[1], by_filter < by_pixel),
                [
                    read(dy, self._top),
                    read_all(packed),
                    write(dx, self._bottom),
                    *self._geometry(window.data_band(), window.data_room),
                    *_scratch(operands, window.data_scratch()),
                    BEGIN,
                    END,
                ],
                self._images,
                self._cost("backward_data", 1 - _SHARE) / self._images,
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
        nowhere = operands.constant("nowhere", np.zeros((1, 1, 1, 1), np.int32))
        gradients = [(dy, nowhere) for dy in operands.top_diff]
        if self.window.pooled is not None:
            assert operands.routed is not None, "the plan gives them to a routed candidate"
            gradients = [operands.routed]
        make = self._by_filter if self._by_filters else self._by_sample
        for x, (dy, route) in zip(operands.bottom, gradients, strict=True):
            steps += make(operands, x, dy, route)
        return steps

    def _by_sample(self, operands: Operands, x: Buffer, dy: Buffer, route: Buffer) -> list[Step]:
        """Return a step over samples that writes partial gradients, and the steps that add them."""
        filters, (_, together) = self._filters, self.window.weights_band()
        dw = operands.partial("dw", (filters * self.window.weights_row,))
        db = operands.partial("db", (filters,))
        view, routed = self._listed(dy)
        gradients = [read(dy, view), read(route, view) if routed else read_all(route)]
        arrays = [read(x, self._bottom), *gradients, row(dw), row(db)]
        numbers: list[Argument] = [PIECE, filters, 0, 1, BEGIN, END]
        extent = self.window.images // together
        return [
            self._weights_step(operands, routed, arrays, self.window.filters, numbers, extent),
            *self._sum_steps(operands, rows(dw), rows(db)),
        ]

    def _by_filter(self, operands: Operands, x: Buffer, dy: Buffer, route: Buffer) -> list[Step]:
        """Return a step over filters that reads all samples, and the steps that re-lay its sums."""
        filters, (_, together) = self._filters, self.window.weights_band()
        size = filters * self.window.weights_row
        dw = operands.temporary("dw", (1, size))
        db = operands.temporary("db", (1, filters))
        view, routed = self._listed(dy)
        gradients = [read_all(dy, view), read_all(route, view if routed else None)]
        arrays = [read_all(x, self._bottom), *gradients, write(dw), write(db)]
        unit = self._unit
        numbers: list[Argument] = [0, unit, BEGIN, END, 0, self.window.images // together]
        return [
            self._weights_step(operands, routed, arrays, unit, numbers, filters // unit),
            *self._sum_steps(operands, read_all(dw), read_all(db)),
        ]

    def _weights_step(
        self,
        operands: Operands,
        routed: kernels.Routed,
        arrays: list[Use],
        filters: int,
        numbers: list[Argument],
        extent: int,
    ) -> Step:
        """Return the step that sums gradients in the kernel's order."""
        window = self.window
        return Step(
            kernels.conv_backward_weights_sparse(
                window.form, window.kernel[1], window.pixel, routed
            ),
            [
                *arrays,
                int(self.bias and operands.learn[1]),
                window.output[1],
                *self._geometry(*window.weights_band()),
                *window.reach,
                window.room,
                *_scratch(operands, window.weights_scratch(filters)),
                *numbers,
            ],
            extent,
            self._cost("backward_weights", 1 - _SHARE) / extent,
        )

    def _sum_steps(self, operands: Operands, dw: Use, db: Use) -> list[Step]:
        """Return the steps that set the gradients to the sums of rows."""
        window, diffs = self.window, operands.param_diff
        shape = (self._filters, window.channels, *window.kernel)
        steps = []
        if operands.learn[0]:
            total = operands.scratch("total", (window.total_scratch,))
            diff = operands.gradient(0, shape)
            weights: list[Argument] = [dw, diff, window.pixel, total]
            steps.append(
                Step(
                    kernels.conv_sparse_sum_weights,
                    [*weights, operands.accumulate(0), BEGIN, END],
                    self._filters,
                    _WEIGHT * window.weights_row,
                )
            )
        if self.bias and operands.learn[1]:
            bias: list[Argument] = [db, update(diffs[1]), operands.accumulate(1)]
            steps.append(Step(reduce_rows, [*bias, BEGIN, END], self._filters, 2.0))
        return steps

    @property
    def _by_filters(self) -> bool:
        """Whether the weight gradient is cut over filters."""
        return self._filters * self.window.weights_row > _MOST_PARTIAL

    @property
    def _unit(self) -> int:
        """Filters that are cut together."""
        return gcd(self.window.filters, _FILTERS)

    @property
    def _filters(self) -> int:
        """Filters of all groups."""
        return self.window.groups * self.window.filters

    @property
    def _images(self) -> int:
        """Images of all groups."""
        return self.window.groups * self.window.images

    @property
    def _bottom(self) -> tuple[int, ...]:
        return (self._images, self.window.channels, *self.window.size)

    def _listed(self, dy: Buffer) -> tuple[tuple[int, ...], kernels.Routed]:
        """Return the shape of the gradients that backward_weights lists, and whose they are."""
        window = self.window
        if window.pooled is None:
            return self._top, ""
        shape = (window.images, self._filters, *window.lists)
        if window.filters % lanes() or dy.shape != stored_shape(CHANNEL_LANE, shape):
            return (self._images, window.filters, *window.lists), "planes"
        return (self._images, window.filters // lanes(), *window.lists, lanes()), "lanes"

    @property
    def _top(self) -> tuple[int, ...]:
        return (self._images, self.window.filters, *self.window.output)

    def cost(self, which: str) -> float:
        """Return the estimated nanoseconds of a pass on one core."""
        return self._cost(which, self.zeros)

    def _cost(self, which: str, zeros: float) -> float:
        """Return that at a share of zeros."""
        window, gradients = self.window, prod(self._top)
        channels = window.channels
        if which == "backward_data" or window.form == "blocks":
            channels = ceil(channels / lanes()) * lanes()
        image = self._images * channels * prod(window.size)
        if which == "backward_data":
            return _ELEMENT * gradients + _RELAY * image + min(self._data_products(zeros))
        listed = self._images * window.filters * prod(window.lists)
        band, together = window.weights_band()
        lists = self._images * window.filters * ceil(window.lists[0] / band) / together
        pieces = window.filters // self._unit if self._by_filters else 1
        partials = 1 if self._by_filters else min(window.images, _PARTIALS)
        moved = _RELAY * image * pieces * window.relaid
        moved += _WEIGHT * self._filters * window.weights_row * partials
        entries = min((1 - zeros) * gradients, listed)
        entry = _SPREAD_ENTRY if window.form == "spread" else _ENTRY
        add = _CROSSING_ADD if window.form == "runs" else _ADD
        products = _products(window.weights_vectors, entries, lists, add, entry)
        return _ELEMENT * listed + moved + products

    def _data_products(self, zeros: float) -> tuple[float, float]:
        """Return the estimates for lists of pixels and of filters in backward_data."""
        window, gradients = self.window, prod(self._top)
        vectors, entries = window.data_vectors, (1 - zeros) * gradients
        pixels = self._images * prod(window.output) * window.panels
        planes = self._images * window.filters * ceil(window.output[0] / window.data_band())
        by_pixel = _products(vectors, entries, pixels, _ADD, _ENTRY)
        return by_pixel, _products(vectors, entries, planes, _SCATTER, _ENTRY)

    def _geometry(self, *band: int) -> tuple[int, ...]:
        """Return the numbers that both kernels get."""
        window = self.window
        return (window.kernel[0], *window.stride, *window.pad, window.groups, *band)


def _products(vectors: int, entries: float, lists: float, add: float, entry: float) -> float:
    """Return the estimated nanoseconds of the multiply-adds of entries in lists."""
    tiles = ceil(vectors / kernels.most_sums())
    return entries * (add * vectors + entry * tiles) + lists * tiles * _LIST


def _scratch(operands: Operands, sizes: list[tuple[int, str]]) -> list[Use]:
    """Return scratch arrays of these lengths and types."""
    return [
        operands.scratch(f"sparse{number}", (length,), dtype)
        for number, (length, dtype) in enumerate(sizes)
    ]
