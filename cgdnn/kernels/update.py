"""Solver updates, as one pass over each parameter, and the norm that gradients are clipped by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cgdnn.kernels._jit import INT, REAL, array, kernel
from cgdnn.kernels.norm import product_sums
from cgdnn.kernels.vector import Emitter, sums


@kernel(array(1), array(2), INT, INT, INT)
def sum_squares(dw, partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write the sum of ``dw**2`` over ``begin:end``, summed in float64, to row `piece`."""
    _, partial[piece, 0] = product_sums(dw, dw, begin, 1, 0, end - begin)


@kernel(array(2), array(1), REAL, REAL)
def clip_factor(squares, factor, clip, average):  # type: ignore[no-untyped-def]
    """Write the number that gradients are multiplied by before an update.

    `average` (one over iter_size), times ``clip / norm`` where the norm of the gradients exceeds
    `clip`. `squares` holds parts of the squared norm, one a row; they are added in order. Clipping
    sees the sum over the sub-iterations, before it is averaged (Caffe, SGDSolver::ClipGradients).
    """
    total = 0.0
    for p in range(squares.shape[0]):
        total += squares[p, 0]
    norm = np.sqrt(total)
    scale = np.float64(average)
    if norm > clip:
        scale *= clip / norm
    factor[0] = scale


def sgd_mover(  # type: ignore[no-untyped-def]
    e: Emitter, scale, rate, momentum, decay_l2, decay_l1
) -> tuple[Callable[[Any, Any, Any, Any], None], Callable[[], Any]]:
    """Return what emits the arithmetic of `sgd_update`.

    Returns
    -------
    move : callable
        Given the gradient of a vector of weights, pointers to these and to their history, and a
        mask, moves them.
    total : callable
        Returns a float64 that is NaN where a new weight is not finite, else 0.
    """
    build, zero = e.builder, e.zero()
    scale, rate, momentum = e.splat(scale), e.splat(rate), e.splat(momentum)
    decay_l2, up = e.splat(decay_l2), e.splat(decay_l1)
    down = build.fneg(up)
    finite = e.variable(zero)

    def move(gradient, weights, moments, mask):  # type: ignore[no-untyped-def]
        weight = e.load(weights, mask)
        pull = build.select(build.fcmp_ordered("<", weight, zero), down, zero)
        pull = build.select(build.fcmp_ordered(">", weight, zero), up, pull)
        pull = e.multiply_add(decay_l2, weight, pull)
        gradient = e.multiply_add(scale, gradient, pull)
        step = e.multiply_add(momentum, e.load(moments, mask), build.fmul(rate, gradient))
        e.store(step, moments, mask)
        weight = build.fsub(weight, step)
        e.store(weight, weights, mask)
        # The difference of what is not finite from itself is NaN.
        build.store(build.fadd(build.load(finite), build.fsub(weight, weight)), finite)

    def total():  # type: ignore[no-untyped-def]
        first, *others = e.wide(build.load(finite))
        for other in others:
            first = build.fadd(first, other)
        return e.total(first)

    return move, total


@sums(1)
def _sgd_update(  # type: ignore[no-untyped-def]
    e, w, dw, history, start, length, scale, rate, momentum, decay_l2, decay_l1
):
    """Do the arithmetic of `sgd_update`; returns NaN where a new weight is not finite, else 0."""
    move, total = sgd_mover(e, scale, rate, momentum, decay_l2, decay_l1)
    pointers = [e.at(pointer, start) for pointer in (w, dw, history)]
    for (weights, gradients, moments), mask in e.along(length, *pointers):
        move(e.load(gradients, mask), weights, moments, mask)
    return (total(),)


@kernel(array(1), array(1), array(1), array(1), array(2), REAL, REAL, REAL, REAL, INT, INT, INT)
def sgd_update(  # type: ignore[no-untyped-def]
    w, dw, history, factor, bad, rate, momentum, decay_l2, decay_l1, piece, begin, end
):
    """Move the weights one step of stochastic gradient descent with momentum.

    ``g = factor[0] * dw + decay_l2 * w + decay_l1 * sign(w)``;
    ``history = momentum * history + rate * g``; ``w -= history`` (Caffe, SGDSolver). Reads `dw`,
    updates `w` and `history` over ``begin:end``, and writes to row `piece` of `bad` 1 where a new
    weight is not finite (it is so wherever its gradient is not), else 0.
    """
    (total,) = _sgd_update(
        w, dw, history, begin, end - begin, factor[0], rate, momentum, decay_l2, decay_l1
    )
    bad[piece, 0] = 0 if total == 0 else 1


@kernel(array(1), status=True)
def check_finite(x):  # type: ignore[no-untyped-def]
    """Return 1 + the position of the first element that is not finite, 0 if all are."""
    for i in range(x.shape[0]):
        if x[i] - x[i] != x[i] - x[i]:  # true for NaN and infinity only
            return i + 1
    return 0


@kernel(array(2), status=True)
def check_zero(flags):  # type: ignore[no-untyped-def]
    """Return 1 + the first row of `flags` that is not zero, 0 if all are."""
    for p in range(flags.shape[0]):
        if flags[p, 0] != 0:
            return p + 1
    return 0
