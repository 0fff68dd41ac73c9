"""Convolution as Caffe runs it: unfold an image, multiply on all threads of BLAS, next image.

The fine-grain baseline that spg-CNN calls Unfold + Parallel-GEMM (Rajbhandari et al., ASPLOS 2017):
all cores share each product, so every core's part has fewer operations for each element that it
reads. Each pass is one Python step; BLAS takes as many threads as `threadpoolctl` allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from cgdnn.kernels.reduce import reduce_rows
from cgdnn.layers._base import (
    BEGIN,
    END,
    Argument,
    Operands,
    Shape,
    Step,
    Use,
    read_all,
    update,
    write_all,
)

NAME = "parallel_gemm"
REASON = "the fine-grain baseline, for comparison only"

_FLOP_NANOSECONDS = 0.02

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ParallelGemm:
    """A convolution over any number of spatial axes.

    Attributes
    ----------
    x, w, y : tuple of int
        Shapes (N, C, sizes...), (Co, C / group, kernel...) and (N, Co, output sizes...).
    stride, pad, dilation : tuple of int
        For each spatial axis.
    bias : bool
    """

    x: Shape
    w: Shape
    y: Shape
    stride: Shape
    pad: Shape
    dilation: Shape
    bias: bool

    @property
    def _group(self) -> int:
        return self.x[1] // self.w[1]

    @property
    def _padded(self) -> Shape:
        """Shape of an image with its padding."""
        return (self.x[1], *(n + 2 * p for n, p in zip(self.x[2:], self.pad, strict=True)))

    @property
    def _unfolded(self) -> Shape:
        """Shape of an unfolded image: (C, kernel..., output sizes...)."""
        return (self.x[1], *self.w[2:], *self.y[2:])

    def forward(self, operands: Operands) -> list[Step]:
        """Return a step for each bottom."""
        parameters = [read_all(operands.param[0], self.w), read_all(operands.param[-1])]
        return [
            self._step(
                self._forward,
                operands,
                [read_all(bottom, self.x), *parameters, write_all(top, self.y)],
            )
            for bottom, top in zip(operands.bottom, operands.top, strict=True)
        ]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return a step for each bottom whose diff is wanted."""
        w = read_all(operands.param[0], self.w)
        return [
            self._step(
                self._backward_data,
                operands,
                [read_all(dy, self.y), w, write_all(dx, self.x)],
            )
            for dy, dx, wanted in zip(
                operands.top_diff, operands.bottom_diff, operands.propagate, strict=True
            )
            if wanted
        ]

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that sum the gradients of all bottoms, one bottom after the other."""
        steps = []
        for x, dy in zip(operands.bottom, operands.top_diff, strict=True):
            sums = [
                operands.temporary("dw", (1, prod(self.w))),
                operands.temporary("db", (1, self.w[0])),
            ]
            arrays = [
                read_all(x, self.x),
                read_all(dy, self.y),
                write_all(sums[0], self.w),
                write_all(sums[1], (self.w[0],)),
            ]
            steps.append(self._step(self._backward_weights, operands, arrays))
            for index, diff in enumerate(operands.param_diff):
                if operands.learn[index]:
                    target: list[Argument] = [
                        update(diff, (diff.size,)),
                        operands.accumulate(index),
                    ]
                    arguments = [read_all(sums[index]), *target, BEGIN, END]
                    steps.append(Step(reduce_rows, arguments, diff.size, 2.0))
        return steps

    def _step(self, function: Callable[..., None], operands: Operands, arrays: list[Use]) -> Step:
        """Return the step that calls `function` with arrays, a padded and an unfolded image."""
        room = [
            write_all(operands.temporary("padded", self._padded)),
            write_all(operands.temporary("unfolded", self._unfolded)),
        ]
        flops = 2 * prod(self.y) * prod(self.w[1:])
        return Step(function, [*arrays, *room], cost=_FLOP_NANOSECONDS * flops)

    def _forward(
        self, x: Array, w: Array, b: Array, y: Array, padded: Array, unfolded: Array
    ) -> None:
        for image, columns in zip(y, self._unfold(x, padded, unfolded), strict=True):
            for outs, filters, rows in self._groups(image, w, columns):
                np.matmul(filters, rows, out=outs)
            if self.bias:
                image += b.reshape(-1, *[1] * len(self.pad))

    def _backward_data(
        self, dy: Array, w: Array, dx: Array, padded: Array, unfolded: Array
    ) -> None:
        for image, dimage in zip(dy, dx, strict=True):
            for outs, filters, rows in self._groups(image, w, unfolded):
                np.matmul(filters.T, outs, out=rows)
            padded[...] = 0
            for tap in np.ndindex(*self.w[2:]):
                column = (slice(None), *tap)
                padded[self._reach(tap)] += unfolded[column]
            dimage[...] = padded[self._inside]

    def _backward_weights(
        self, x: Array, dy: Array, dw: Array, db: Array, padded: Array, unfolded: Array
    ) -> None:
        dw[...] = 0
        for image, columns in zip(dy, self._unfold(x, padded, unfolded), strict=True):
            for outs, dfilters, rows in self._groups(image, dw, columns):
                dfilters += outs @ rows.T
        db[...] = dy.reshape(*dy.shape[:2], -1).sum(axis=(0, 2))

    def _unfold(self, x: Array, padded: Array, unfolded: Array) -> Iterator[Array]:
        """Yield each image unfolded; all of them lie in `unfolded`, one after the other."""
        along = padded.strides[1:]
        taps = [step * d for step, d in zip(along, self.dilation, strict=True)]
        places = [step * s for step, s in zip(along, self.stride, strict=True)]
        windows = as_strided(padded, self._unfolded, (padded.strides[0], *taps, *places))
        padded[...] = 0
        for image in x:
            padded[self._inside] = image
            np.copyto(unfolded, windows)
            yield unfolded

    @property
    def _inside(self) -> tuple[slice, ...]:
        """Where the image lies within its padding."""
        sizes = zip(self.x[2:], self.pad, strict=True)
        return (slice(None), *(slice(p, p + n) for n, p in sizes))

    def _reach(self, tap: Shape) -> tuple[slice, ...]:
        """Return the places of the padded image that a place of the kernel meets."""
        axes = zip(tap, self.dilation, self.stride, self.y[2:], strict=True)
        return (slice(None), *(slice(t * d, t * d + s * (n - 1) + 1, s) for t, d, s, n in axes))

    def _groups(
        self, image: Array, w: Array, columns: Array
    ) -> Iterator[tuple[Array, Array, Array]]:
        """Yield each group's part of an output image, the weights and an unfolded image."""
        group = self._group
        return zip(
            image.reshape(group, self.w[0] // group, -1),
            w.reshape(group, self.w[0] // group, -1),
            columns.reshape(group, prod(self.w[1:]), -1),
            strict=True,
        )
