"""Deliberately wrong layers, each of which the contract suite must catch by the named check."""

from dataclasses import replace

import pytest

from cgdnn.kernels import elementwise
from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.layers import _registry
from cgdnn.layers._base import BEGIN, END, Slot, Step, Use, read, update, write
from cgdnn.layers.batch_norm import BatchNorm
from cgdnn.layers.loss import EuclideanLoss
from cgdnn.layers.scale import Scale
from cgdnn.layers.softmax import Softmax
from tests.layers.contract import CHECKS, Case, fields_of, fields_used, missing_fields, normal


def changed(steps, change):
    """Return `steps` with every argument replaced by ``change(argument)``."""
    for step in steps:
        step.arguments = [change(argument) for argument in step.arguments]
    return steps


def is_accumulate(argument):
    return isinstance(argument, Slot) and argument.name == "accumulate"


class DroppedTerm(BatchNorm):
    def backward_data(self, operands):
        self._global = True  # as if mean and deviation were constants
        steps = super().backward_data(operands)
        self._global = False
        return steps


class FlippedSign(EuclideanLoss):
    def backward_data(self, operands):
        return changed(
            super().backward_data(operands), lambda a: abs(a) if isinstance(a, float) else a
        )


class Overwrites(Scale):
    def backward_weights(self, operands):
        return changed(super().backward_weights(operands), lambda a: 0.0 if is_accumulate(a) else a)


class AlwaysAdds(Scale):
    def backward_weights(self, operands):
        return changed(super().backward_weights(operands), lambda a: 1.0 if is_accumulate(a) else a)


class AddsToBottomDiff(Scale):
    def backward_data(self, operands):
        (step,) = super().backward_data(operands)
        sample = self._view[0], 24 // self._view[0]
        gradient = operands.temporary("gradient", sample)
        target = operands.bottom_diff[0]
        step.arguments = [
            write(gradient, self._view) if isinstance(a, Use) and a.buffer is target else a
            for a in step.arguments
        ]
        diff = update(target, sample)
        add = [diff, 1.0, read(gradient), 1.0, diff, BEGIN, END]
        return [step, Step(elementwise.add_scaled, add, sample[0])]


class FirstSampleForward(Softmax):
    def forward(self, operands):
        return changed(super().forward(operands), lambda a: 1 if a is END else a)


class FirstSampleOfWeights(Scale):
    def backward_weights(self, operands):
        first, *rest = super().backward_weights(operands)
        return [*changed([first], lambda a: 1 if a is END else a), *rest]


class FirstPartialOnly(Scale):
    def backward_weights(self, operands):
        def first_row(argument):
            if not isinstance(argument, Use) or argument.buffer.kind != "partial":
                return argument
            if argument.mode == "write":
                return argument
            return replace(argument, shape=(1, *argument.buffer.shape))

        return changed(super().backward_weights(operands), first_row)


class ForgetsBottomInPlace(Scale):
    def _kept(self, operands):
        return operands.bottom[0]


class WrongShape(Softmax):
    def infer_shapes(self, bottoms):
        (shape,) = super().infer_shapes(bottoms)
        return [(*shape, 1)]


@kernel(array(4), array(4), INT, INT)
def clamp_below(x, y, begin, end):
    for n in range(begin, end):
        for r in range(x.shape[1]):
            for c in range(x.shape[2]):
                for i in range(x.shape[3]):
                    y[n, r, c, i] = x[n, r, c, i] if x[n, r, c, i] > -100 else -100


@kernel(array(4), array(4), INT, INT)
def absorb(x, y, begin, end):
    for n in range(begin, end):
        for r in range(x.shape[1]):
            for c in range(x.shape[2]):
                for i in range(x.shape[3]):
                    large = x.dtype.type(1e5)
                    y[n, r, c, i] = (x[n, r, c, i] + large) - large


class HidesNan(Softmax):
    forward_kernel = clamp_below

    def forward(self, operands):
        (step,) = super().forward(operands)
        step.kernel = self.forward_kernel
        return [step]


class LosesDigits(HidesNan):
    forward_kernel = absorb


X = normal(2, 3, 4)
SCALE = Case("Scale", "scale_param { bias_term: true }", [X], [(2, 3, 4)])
SOFTMAX = Case("Softmax", bottoms=[X], tops=[(2, 3, 4)])
MUTANTS = [
    (DroppedTerm, "gradients", Case("BatchNorm", bottoms=[X], tops=[(2, 3, 4)])),
    (FlippedSign, "gradients", Case("EuclideanLoss", bottoms=[X, X], tops=[()])),
    (FirstSampleOfWeights, "gradients", SCALE),
    (AddsToBottomDiff, "gradients", SCALE),
    (Overwrites, "accumulation", SCALE),
    (AlwaysAdds, "accumulation", SCALE),
    (FirstSampleForward, "shapes", SOFTMAX),
    (WrongShape, "shapes", SOFTMAX),
    (FirstPartialOnly, "cutting", SCALE),
    (ForgetsBottomInPlace, "in_place", SCALE),
    (HidesNan, "nan", SOFTMAX),
    (LosesDigits, "types", SOFTMAX),
]


@pytest.mark.parametrize(
    ("wrong", "check", "case"), MUTANTS, ids=[w.__name__ for w, _, _ in MUTANTS]
)
def test_a_wrong_layer_is_caught(monkeypatch, wrong, check, case):
    CHECKS[check](case)
    types = {**_registry.layer_types(), wrong.__name__: wrong}
    monkeypatch.setattr(_registry, "layer_types", lambda: types)
    with pytest.raises(AssertionError):
        CHECKS[check](replace(case, type=wrong.__name__))


def test_every_check_catches_something():
    assert {check for _, check, _ in MUTANTS} == set(CHECKS)


def test_fields_of_a_type_are_those_of_its_messages():
    assert fields_of("EuclideanLoss") == set()
    assert fields_of("Softmax") == {"softmax_param.axis"}
    assert fields_of("SoftmaxWithLoss") == {
        "softmax_param.axis",
        "loss_param.ignore_label",
        "loss_param.normalization",
        "loss_param.normalize",
    }
    assert "transform_param.mirror" in fields_of("Data")
    assert "hdf5_data_param.shuffle" in fields_of("HDF5Data")


def test_a_default_value_does_not_cover_a_field():
    assert fields_used(Case("Softmax", "softmax_param { axis: 1 }")) == set()
    assert fields_used(Case("Softmax", "softmax_param { axis: 2 }")) == {"softmax_param.axis"}
    assert missing_fields("Softmax", [Case("Softmax", "softmax_param { axis: 1 }")]) == {
        "softmax_param.axis"
    }
    other = Case("SoftmaxWithLoss", "softmax_param { axis: 2 }")
    assert missing_fields("Softmax", [other]) == {"softmax_param.axis"}
