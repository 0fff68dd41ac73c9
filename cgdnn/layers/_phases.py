"""A strided convolution as one of stride 1 over phases (see `cgdnn.kernels.phases`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from cgdnn.kernels import phases as kernels
from cgdnn.layers._base import (
    BEGIN,
    END,
    Argument,
    Buffer,
    Operands,
    Shape,
    Step,
    Use,
    read,
    read_all,
    update,
    write,
)
from cgdnn.layers._direct import Direct
from cgdnn.layers._layout import CHANNEL_LANE, NCHW, lanes, stored_shape
from cgdnn.layers._sparse import Sparse
from cgdnn.layers._winograd import Winograd

Make = Callable[[Operands], list[Step]]

_GATHER, _SPREAD, _TAP = 0.25, 0.15, 1.0
"""Nanoseconds of a value that phases get from an image, of one that an image gets from its phases,
and of a tap that is moved between filters and those of the phases."""


@dataclass(frozen=True)
class Phases:
    """How the images and the filters of a convolution of two spatial axes consist of phases.

    Attributes
    ----------
    x, w, y : tuple of int
        Shapes (N, C, H, W), (Co, C / group, taps, taps) and (N, Co, R, OW).
    stride, pad : tuple of int
    taps : int
        Size of the filters of the phases, or more: the others are 0.
    """

    x: Shape
    w: Shape
    y: Shape
    stride: tuple[int, int]
    pad: tuple[int, int]
    taps: int

    @property
    def count(self) -> int:
        """Phases of an axis that are needed."""
        return min(self.stride[0], self.w[2])

    @property
    def images(self) -> Shape:
        """Shape of the phases of x."""
        return (self.x[0], self.x[1] * self.count**2, *(n + self.taps - 1 for n in self.y[2:]))

    @property
    def filters(self) -> Shape:
        """Shape of the phases of w."""
        return (self.w[0], self.w[1] * self.count**2, self.taps, self.taps)

    @property
    def _fill_lanes(self) -> bool:
        """Whether phases of images can have channels in the lanes."""
        whole = self.count == self.stride[0] and self.filters[1] % lanes() == 0
        return whole and self.stride[0] in kernels.LANE_STRIDES

    def of_image(self, operands: Operands, x: Buffer, in_lanes: bool) -> tuple[Buffer, Step]:
        """Return the phases of a bottom, and the step over samples that makes them.

        With channels in the lanes, where they fill these, if `in_lanes`.
        """
        in_lanes = in_lanes and self._fill_lanes
        layout = CHANNEL_LANE if in_lanes else NCHW
        target = operands.temporary("x", stored_shape(layout, self.images))
        cost = _GATHER * prod(self.images[1:])
        arguments: list[Argument] = [read(x, self.x)]
        if in_lanes:
            num, channels, *size = self.images
            view = (num, channels // lanes(), *size, lanes())
            arguments += [write(target, view), self.stride[0], *self.pad, BEGIN, END]
            return target, Step(kernels.phases_in_lanes, arguments, num, cost)
        firsts = operands.constant("phases.firsts", np.arange(self.count) - self.pad[1])
        arguments += [write(target), read_all(firsts), *self.stride, self.pad[0], BEGIN, END]
        return target, Step(kernels.phases_of_image, arguments, self.x[0], cost)

    def to_image(self, source: Buffer, dx: Buffer) -> Step:
        """Return the step over samples that makes the diff of a bottom from that of its phases."""
        arguments: list[Argument] = [read(source), write(dx, self.x), self.count]
        arguments += [*self.stride, *self.pad, BEGIN, END]
        return Step(kernels.phases_to_image, arguments, self.x[0], _SPREAD * prod(self.x[1:]))

    def of_filters(self, operands: Operands, w: Buffer, target: Buffer) -> Step:
        """Return the step over filters and channels that makes the phases of the weights."""
        table = operands.constant(f"phases.taps{self.taps}", self._taps)
        shapes = self._tap_rows
        return _move_taps(read(w, shapes[0]), write(target, shapes[1]), table, 0.0)

    def to_filters(self, operands: Operands, source: Buffer) -> Step:
        """Return the step that makes the diff of the weights from that of their phases."""
        table = operands.constant(f"phases.places{self.taps}", self._places)
        diff, phases = self._tap_rows
        target = update(operands.param_diff[0], diff)
        return _move_taps(read(source, phases), target, table, operands.accumulate(0))

    @property
    def _tap_rows(self) -> tuple[Shape, Shape]:
        """The taps of each filter and channel of w, and of its phases."""
        rows = prod(self.w[:2])
        return (rows, prod(self.w[2:])), (rows, (self.count * self.taps) ** 2)

    @property
    def _taps(self) -> npt.NDArray[np.int64]:
        """The number in w of each tap of the phases, -1 where there is none."""
        size = self.w[2]
        at = self.stride[0] * np.arange(self.taps) + np.arange(self.count)[:, None]
        at = np.where(at < size, at, -1)  # (phase, tap) of an axis
        rows, columns = at[:, None, :, None], at[None, :, None, :]
        return np.where((rows >= 0) & (columns >= 0), rows * size + columns, -1).ravel()

    @property
    def _places(self) -> npt.NDArray[np.int64]:
        """The number in the phases of each tap of w."""
        places = np.empty(prod(self.w[2:]), np.int64)
        (inside,) = np.nonzero(self._taps >= 0)
        places[self._taps[inside]] = inside
        return places


def _move_taps(source: Use, target: Use, table: Buffer, keep: Argument) -> Step:
    assert target.shape is not None
    arguments = [source, target, read_all(table), keep, BEGIN, END]
    return Step(kernels.phases_of_taps, arguments, target.shape[0], _TAP * target.shape[1])


@dataclass(frozen=True)
class Phased:
    """A strided convolution by one of stride 1 over its phases.

    Attributes
    ----------
    phases : Phases
    inner : Winograd, Direct or Sparse
        Computes the convolution of the phases.
    """

    phases: Phases
    inner: Winograd | Direct | Sparse

    @property
    def whole_vectors(self) -> tuple[bool, bool]:
        """Whether bottoms, which is never, and tops can have their channels in the lanes."""
        return False, isinstance(self.inner, Winograd) and self.inner.whole_vectors[1]

    def cost(self, which: str) -> float:
        """Return the estimated nanoseconds of a pass on one core."""
        moved = _GATHER * prod(self.phases.images)
        if which == "backward_data":
            moved = _SPREAD * prod(self.phases.x)
        if not self._has_filters:
            moved += _TAP * prod(self.phases.filters)
        return self.inner.cost(which) + moved

    @property
    def _has_filters(self) -> bool:
        """Whether the filters are those of the phases."""
        return self.phases.filters == self.phases.w

    def forward(self, operands: Operands) -> list[Step]:
        """Return the steps for each bottom."""
        assert not isinstance(self.inner, Sparse), "skips zeros in gradients only"
        forward = self.inner.forward
        return self._of_filters(operands, lambda within: self._of_images(within, forward))

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the steps for each bottom whose diff is wanted."""
        diffs = [operands.temporary("dx", self.phases.images) for _ in operands.bottom_diff]
        within = replace(operands, bottom_diff=diffs)
        pairs = zip(diffs, operands.bottom_diff, operands.propagate, strict=True)
        return [
            *self._of_filters(within, self.inner.backward_data),
            *(self.phases.to_image(diff, dx) for diff, dx, wanted in pairs if wanted),
        ]

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that sum the gradients of all bottoms, one bottom after the other."""
        if self._has_filters:
            return self._of_images(operands, self.inner.backward_weights)
        steps: list[Step] = []
        for bottom, top_diff in zip(operands.bottom, operands.top_diff, strict=True):
            diff = operands.temporary("dw", self.phases.filters)
            diffs = [diff, *operands.param_diff[1:]]
            one = replace(operands, bottom=[bottom], top_diff=[top_diff], param_diff=diffs)
            steps += self._of_images(one, self.inner.backward_weights)
            if operands.learn[0]:
                steps.append(self.phases.to_filters(operands, diff))
        return steps

    def _of_filters(self, operands: Operands, make: Make) -> list[Step]:
        """Return steps that get the phases of the weights, made before them."""
        if self._has_filters:
            return make(operands)
        w = operands.temporary("w", self.phases.filters)
        first = self.phases.of_filters(operands, operands.param[0], w)
        return [first, *make(replace(operands, param=[w, *operands.param[1:]]))]

    def _of_images(self, operands: Operands, make: Make) -> list[Step]:
        """Return steps that get the phases of the bottoms, each made just before it is read."""
        in_lanes = isinstance(self.inner, Winograd)  # the others re-lay channels themselves
        making = dict(self.phases.of_image(operands, x, in_lanes) for x in operands.bottom)
        steps: list[Step] = []
        for step in make(replace(operands, bottom=list(making))):
            used = [use.buffer for use in step.arguments if isinstance(use, Use)]
            steps += [making.pop(buffer) for buffer in used if buffer in making]
            steps.append(step)
        return steps
