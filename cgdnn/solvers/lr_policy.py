"""The seven learning rate policies, as in Caffe's ``SGDSolver::GetLearningRate``."""

from __future__ import annotations

from typing import Any

import numpy as np

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
        with np.errstate(all="ignore"):
            return float(self._at(iteration))

    def _at(self, iteration: int) -> Any:
        param = self._param
        base, gamma = np.float64(param.base_lr), np.float64(param.gamma)
        match param.lr_policy:
            case "fixed":
                return base
            case "step":
                self.current_step = iteration // param.stepsize
                return base * gamma**self.current_step
            case "exp":
                return base * gamma**iteration
            case "inv":
                return base * (1 + gamma * iteration) ** -param.power
            case "multistep":
                steps = param.stepvalue
                if self.current_step < len(steps) and iteration >= steps[self.current_step]:
                    self.current_step += 1
                return base * gamma**self.current_step
            case "poly":
                # Caffe gives NaN past max_iter; the rate stays at zero here.
                left = np.maximum(0, 1 - np.float64(iteration) / param.max_iter)
                return base * left**param.power
            case _:  # "sigmoid": the reader has refused every other name
                return base / (1 + np.exp(-gamma * (iteration - param.stepsize)))
