"""Stochastic gradient descent with momentum: ``v = momentum * v + rate * g; w -= v``."""

from __future__ import annotations

from cgdnn.kernels.update import sgd_update
from cgdnn.plan.update import UpdateRule

RULE = UpdateRule(sgd_update, histories=1, scalars=("momentum",))
