"""The seven learning rate policies, as in Caffe's ``SGDSolver::GetLearningRate``."""

from __future__ import annotations

import math

from cgdnn.proto.cgdnn_pb2 import SolverParameter


class LearningRate:
    """The learning rate of each iteration.

    ==========  =====================================================
    fixed       base_lr
    step        base_lr * gamma ^ floor(iter / stepsize)
    exp         base_lr * gamma ^ iter
    inv         base_lr * (1 + gamma * iter) ^ -power
    multistep   base_lr * gamma ^ (steps taken)
    poly        base_lr * (1 - iter / max_iter) ^ power
    sigmoid     base_lr / (1 + exp(-gamma * (iter - stepsize)))
    ==========  =====================================================

    Attributes
    ----------
    current_step : int
        Steps that multistep has taken. It takes at most one an iteration, so the state must be
        kept in snapshots; `step` sets it too.
    """

    def __init__(self, param: SolverParameter) -> None:
        self._param = param
        self.current_step = 0

    def at(self, iteration: int) -> float:
        """Return the rate of this iteration; to be asked once for each, in order.

        It is infinite where the formula exceeds all numbers (a gamma above 1 in "exp").
        """
        param = self._param
        base, gamma = param.base_lr, param.gamma
        match param.lr_policy:
            case "fixed":
                return base
            case "step":
                self.current_step = iteration // param.stepsize
                return base * _power(gamma, self.current_step)
            case "exp":
                return base * _power(gamma, iteration)
            case "inv":
                return base * _power(1 + gamma * iteration, -param.power)
            case "multistep":
                steps = param.stepvalue
                if self.current_step < len(steps) and iteration >= steps[self.current_step]:
                    self.current_step += 1
                return base * _power(gamma, self.current_step)
            case "poly":
                # Caffe gives NaN past max_iter; the rate stays at zero here.
                return base * _power(max(0.0, 1 - iteration / param.max_iter), param.power)
            case _:  # "sigmoid": the reader has refused every other name
                # e^700 is nearly the largest number, and the rate then zero to every digit.
                return base / (1 + math.exp(min(700.0, -gamma * (iteration - param.stepsize))))


def _power(base: float, exponent: float) -> float:
    """Return base^exponent: infinite beyond all numbers, NaN where it is none."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.inf if base == 0 else math.nan
