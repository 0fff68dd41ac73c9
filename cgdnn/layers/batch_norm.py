"""Batch normalization."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import numpy.typing as npt

from cgdnn.kernels import norm as kernels
from cgdnn.kernels._jit import Kernel
from cgdnn.kernels.reduce import reduce_rows
from cgdnn.layers._base import (
    BEGIN,
    END,
    PIECE,
    Argument,
    Buffer,
    Layer,
    Operands,
    Parameter,
    Shape,
    Step,
    Use,
    read,
    read_all,
    row,
    rows,
    update_all,
    write,
    write_all,
)
from cgdnn.layers.activation import ReLU
from cgdnn.layers.scale import Scale


class BatchNorm(Layer):
    """Normalize each channel to mean 0 and variance 1: ``y = (x - m) / sqrt(v + eps)``.

    Channels lie on axis 1; a bottom of one axis is one channel. In training m and v are the
    mean and the biased variance of the batch. The gradient is
    ``dx = (dy - mean(dy) - y mean(y dy)) / sqrt(v + eps)`` (Ioffe, Szegedy, "Batch normalization",
    2015). There is no learned scale or offset: a Scale layer with ``bias_term`` follows.

    Three blobs hold running sums, are never learned, and take part in no update: of means, of
    variances (times m / (m - 1) for m values a channel), and of the factor that both are to be
    divided by. Each training forward pass multiplies them by ``moving_average_fraction`` and adds
    the batch's (1 for the factor); with iter_size so does every sub-iteration.

    Fields of ``batch_norm_param``: ``use_global_stats`` (default: in TEST) uses the running sums
    for m and v, both 0 while the factor is 0, and lets the gradient pass as through a constant
    factor; ``moving_average_fraction`` (default 0.999); ``eps`` (default 1e-5). May run in place
    (Caffe, batch_norm_layer.cpp).

    Other than in Caffe, a bottom of one axis works.
    """

    in_place: ClassVar[bool] = True

    def setup(self) -> None:
        """Read the fields; refuse learning rates for the running sums."""
        param = self.node.param.batch_norm_param
        self._global = self.phase == "TEST"
        if param.HasField("use_global_stats"):
            self._global = param.use_global_stats
        self._slope: float | None = None  # of the ReLU that it absorbs
        self._fraction = param.moving_average_fraction
        self._eps = param.eps
        for spec in self.node.param.param:
            if spec.lr_mult != 0:
                raise self.error(
                    f"its blobs are running sums that cannot be learned; got lr_mult "
                    f"{spec.lr_mult:g}, expected 0. Remove the param entries, and add a Scale "
                    "layer for a learned scale and offset.",
                    "param",
                )

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the shape of the bottom."""
        shape = bottoms[0]
        if not shape:
            raise self.error("got a bottom without axes, expected at least 1.", "bottom")
        channels = shape[1] if len(shape) > 1 else 1
        self._view = (shape[0], channels, prod(shape[2:]))
        return [shape]

    def parameters(self) -> list[Parameter]:
        """Return the running sums of means and variances, and their factor."""
        channels = (self._view[1],)
        return [Parameter(shape, learned=False) for shape in (channels, channels, (1,))]

    def doubt(self, params: Sequence[npt.NDArray[Any]]) -> str | None:
        """Tell where the running sums are used, but nothing was added to them yet."""
        if self._global and params[2][0] == 0:
            return (
                "its running sums are empty (their factor is 0), so it takes mean and variance for "
                "0 and the scores say nothing. Train first, or load weights."
            )
        return None

    def absorbs(self, followers: Sequence[Layer]) -> int:
        """Return 1 for a Scale by channel, 2 where a ReLU follows it, in training."""
        if self._global or not followers or len(self.bottom_shapes[0]) < 2:
            return 0
        scale, *others = followers
        if not (isinstance(scale, Scale) and scale.by_channel):
            return 0
        # In place, the sign of a ReLU's output tells that of its input unless the slope is below 0.
        if others and isinstance(others[0], ReLU) and others[0].slope >= 0:
            self._slope = others[0].slope
            return 2
        return 1

    def forward(self, operands: Operands) -> list[Step]:
        """Return steps that find mean and deviation, and one over samples that applies them."""
        _, channels, _ = self._view
        mean, inverse = operands.temporary("mean", (channels,)), self._inverse(operands)
        x, y = read(operands.bottom[0], self._view), write(operands.top[0], self._view)
        statistics = [read_all(mean), read_all(inverse)]
        if self._global:
            sums = [read_all(param) for param in operands.param]
            return [
                Step(
                    kernels.bn_global,
                    [*sums, write_all(mean), write_all(inverse), self._eps],
                ),
                self._step(kernels.bn_normalize, [x, y, *statistics], 0.3),
            ]
        partial = operands.partial("moments", (3, channels))
        moments = self._step(kernels.bn_moments, [x, row(partial), PIECE], 0.2)
        merge = Step(
            kernels.bn_merge,
            [
                rows(partial),
                write_all(mean),
                write_all(inverse),
                *(update_all(param) for param in operands.param),
                self._fraction,
                self._eps,
            ],
        )
        kept = write(self._normalized(operands), self._view)
        if operands.followers:
            factors = map(read_all, operands.followers[0].param)
            arrays = [x, y, kept, *statistics, *factors]
            apply = self._step(kernels.bn_scale_forward, [*arrays, *self._rectifier], 0.5)
        elif operands.propagate[0]:
            apply = self._step(kernels.bn_normalize_keep, [x, y, kept, *statistics], 0.4)
        else:
            apply = self._step(kernels.bn_normalize, [x, y, *statistics], 0.3)
        return [moments, merge, apply]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return steps that sum the gradient by channel, and one over samples."""
        n, channels, inner = self._view
        dy, dx = read(operands.top_diff[0], self._view), write(operands.bottom_diff[0], self._view)
        inverse = self._inverse(operands)
        if self._global:
            view = (n, 1, channels, inner)
            arrays = [
                read(operands.top_diff[0], view),
                read_all(inverse, (1, channels)),
                write(operands.bottom_diff[0], view),
            ]
            return [self._step(kernels.scale_multiply, arrays, 0.3)]
        y = read(self._normalized(operands), self._view)
        if operands.followers:
            return self._backward_with_scale(operands, y, dy, dx)
        partial = operands.partial("sums", (2 * channels,))
        sums = operands.temporary("sum", (2 * channels,))
        share = 1.0 / (n * inner)
        return [
            self._step(kernels.bn_backward_sums, [y, dy, row(partial), PIECE], 0.3),
            Step(reduce_rows, [rows(partial), write_all(sums), 0.0, BEGIN, END], 2 * channels),
            self._step(
                kernels.bn_backward, [y, dy, dx, read_all(sums), read_all(inverse), share], 0.4
            ),
        ]

    def _backward_with_scale(self, operands: Operands, kept: Use, dy: Use, dx: Use) -> list[Step]:
        """Return the steps of a backward pass that includes those of the followers."""
        n, channels, inner = self._view
        scale = operands.followers[0]
        y = kept if self._slope is None else read(operands.top[0], self._view)
        partials = [operands.partial(name, (channels,)) for name in ("factor", "bias")]
        totals = [operands.temporary(f"{name}_sum", (1, channels)) for name in ("factor", "bias")]
        arrays = [y, kept, dy, *map(row, partials)]
        steps = [
            self._step(kernels.bn_scale_backward_sums, [*arrays, *self._rectifier, PIECE], 0.3)
        ]
        for index, (partial, total) in enumerate(zip(partials, totals, strict=True)):
            sums = [rows(partial), write_all(total, (channels,))]
            steps.append(Step(reduce_rows, [*sums, 0.0, BEGIN, END], channels))
            if scale.learn[index]:
                sums = [read_all(total), write_all(scale.param_diff[index], (channels,))]
                accumulate = scale.accumulate(index)
                steps.append(Step(reduce_rows, [*sums, accumulate, BEGIN, END], channels))
        factors = [read_all(scale.param[0]), *(read_all(total, (channels,)) for total in totals)]
        arguments: list[Argument] = [y, kept, dy, dx, *factors, read_all(self._inverse(operands))]
        arguments += [1.0 / (n * inner), *self._rectifier]
        return [*steps, self._step(kernels.bn_scale_backward, arguments, 0.5)]

    @property
    def _rectifier(self) -> list[Argument]:
        """Whether an absorbed ReLU follows, and its slope."""
        return [int(self._slope is not None), self._slope or 0.0]

    def _step(self, kernel: Kernel, arguments: Sequence[Argument], nanoseconds: float) -> Step:
        n, channels, inner = self._view
        return Step(kernel, [*arguments, BEGIN, END], extent=n, cost=nanoseconds * channels * inner)

    def _inverse(self, operands: Operands) -> Buffer:
        return operands.state("inverse", (self._view[1],))

    def _normalized(self, operands: Operands) -> Buffer:
        return operands.state("normalized", self.bottom_shapes[0])
