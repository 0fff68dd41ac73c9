"""What every layer must hold to, as checks that run over cases.

Each ``tests/layers/test_<family>.py`` has a list ``CASES``; `test_contract.py` runs every check of
`CHECKS` over every case, and demands cases for every registered layer and parameter field. A layer
runs through `Net`, so the plan, the cutting and the executors are those of real use.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from cgdnn.layers import _registry
from cgdnn.layers._base import Use
from cgdnn.plan import partition
from cgdnn.proto.cgdnn_pb2 import LayerParameter, NetParameter
from cgdnn.runtime.net import Net
from tests.gradient import assert_gradient

Values = Callable[[np.random.Generator], np.ndarray]


def normal(*shape: int) -> Values:
    """Return normally distributed values."""
    return lambda rng: rng.normal(size=shape)


def apart(*shape: int) -> Values:
    """Return shuffled values that differ from each other and from 0 by at least 0.05.

    For layers with kinks (ReLU, MAX): differences stay on one side of each.
    """

    def values(rng: np.random.Generator) -> np.ndarray:
        count = int(np.prod(shape))
        return rng.permutation((np.arange(count) - count // 2 + 0.5) * 0.1).reshape(shape)

    return values


def positive(*shape: int) -> Values:
    """Return values between 0.5 and 1.5."""
    return lambda rng: rng.uniform(0.5, 1.5, size=shape)


def labels(classes: int, *shape: int) -> Values:
    """Return whole numbers below `classes`, each of which occurs if there is room."""
    return lambda rng: rng.permutation(np.arange(int(np.prod(shape))) % classes).reshape(shape)


def given(values: object) -> Values:
    """Return these values."""
    return lambda rng: np.array(values, np.float64)


@dataclass(frozen=True)
class Case:
    """One use of a layer.

    Attributes
    ----------
    type : str
        Layer type.
    fields : str
        Text of the layer's fields, such as ``scale_param { axis: 0 }``.
    bottoms : sequence of Values
        What the bottoms hold: `normal`, `apart`, `positive`, `labels` or `given`.
    tops : sequence of shapes
        What the tops' shapes must be.
    phase : str
    params : sequence of Values
        What the parameters hold (default: normal values, whatever the filler).
    passive : sequence of int
        Tops that pass no gradient back, such as the mask of MAX pooling.
    hides_nan : str
        Why a NaN in a bottom, or in a top's gradient, rightly need not show in the result.
    names : sequence of str
        Names of the tops, where the layer reads them (HDF5Data).
    """

    type: str
    fields: str = ""
    bottoms: Sequence[Values] = ()
    tops: Sequence[tuple[int, ...]] = ()
    phase: str = "TRAIN"
    params: Sequence[Values] = field(default=())
    passive: Sequence[int] = ()
    hides_nan: str = ""
    names: Sequence[str] = ()

    def __str__(self) -> str:
        shapes = "+".join("x".join(map(str, b.shape)) for b in self.values())
        words = re.findall(r"[\w.-]+", re.sub(r"\w+_param|source: \S+", "", self.fields))
        return "-".join([self.type, *filter(None, [shapes]), *words, self.phase])

    def values(self) -> list[np.ndarray]:
        """Return fresh arrays for the bottoms: the same ones each time."""
        rng = np.random.default_rng(7)
        return [np.asarray(make(rng), np.float64) for make in self.bottoms]

    def layer(self) -> LayerParameter:
        """Return the layer's description without bottoms and tops."""
        param = LayerParameter(name="layer", type=self.type)
        text_format.Merge(self.fields, param)
        return param


class Trial:
    """A net of Input layers and the layer of a case, with everything set to known values."""

    def __init__(
        self, case: Case, dtype: str = "float64", *, in_place: bool = False, threads: int = 0
    ) -> None:
        message = NetParameter(name="contract", force_backward=True)
        self.bottoms = [f"bottom{i}" for i in range(len(case.bottoms))]
        self.tops = list(case.names) or [f"top{i}" for i in range(len(case.tops))]
        if in_place:
            self.tops[0] = self.bottoms[0]
        for name, value in zip(self.bottoms, case.values(), strict=True):
            made = message.layer.add(name=name, type="Input", top=[name])
            made.input_param.shape.add(dim=value.shape)
        layer = message.layer.add()
        layer.CopyFrom(case.layer())
        layer.bottom.extend(self.bottoms)
        layer.top.extend(self.tops)
        self.net = Net(
            message, case.phase, dtype=dtype, threads=max(1, threads), serial=threads == 0
        )
        self.params = self.net.params.get("layer", [])
        self.planned = self.net.assembly.layers[-1]
        rng = np.random.default_rng(11)
        makers = case.params or [normal(*param.shape) for param in self.params]
        for param, make in zip(self.params, makers, strict=True):
            param.data[...] = make(rng)
        self.values = case.values()
        self.weights = [
            np.zeros(shape) if i in case.passive else rng.normal(size=shape)
            for i, shape in enumerate(case.tops)
        ]
        self.start = [param.data.copy() for param in self.params]

    def learned(self) -> list[int]:
        """Return which parameters have a gradient."""
        declared = [self.net.assembly.params[i].declared for i in self.planned.params]
        return [i for i, parameter in enumerate(declared) if parameter.learned]

    def propagated(self) -> list[int]:
        """Return which bottoms have a gradient."""
        return [i for i, wanted in enumerate(self.planned.propagate) if wanted]

    def forward(self) -> list[np.ndarray]:
        """Set the bottoms, run forward from the first pass's state, and return the tops."""
        for name, value in zip(self.bottoms, self.values, strict=True):
            self.net.blobs[name].data[...] = value
        self.net.counter = 0
        self.net.forward()
        return [self.net.blobs[name].data.copy() for name in self.tops]

    def backward(self, accumulate: bool = False) -> list[np.ndarray]:
        """Set the tops' gradients, run backward, and return the gradients of the bottoms."""
        for name in self.bottoms:
            self.net.blobs[name].diff[...] = np.nan  # nothing may be added to this
        for name, weight in zip(self.tops, self.weights, strict=True):
            self.net.blobs[name].diff[...] = weight
        self.net.run(("backward",), accumulate=accumulate)
        return [self.net.blobs[self.bottoms[i]].diff.copy() for i in self.propagated()]

    def param_diffs(self) -> list[np.ndarray]:
        """Return the gradients of the learned parameters."""
        return [self.params[i].diff.copy() for i in self.learned()]

    def both(self) -> list[np.ndarray]:
        """Run forward and backward from the start; return tops and all gradients."""
        for param, value in zip(self.params, self.start, strict=True):
            param.data[...] = value
        return [*self.forward(), *self.backward(), *self.param_diffs()]

    def uses_partials(self) -> bool:
        """Tell whether sums over pieces take part, so that cutting may change roundings."""
        return any(
            isinstance(argument, Use) and argument.part == "row"
            for run in self.net._programs.values()
            for task in run.program.tasks
            if task.step is not None
            for argument in task.step.arguments
        )


@contextmanager
def pieces(nanoseconds: float):  # type: ignore[no-untyped-def]
    """Cut work into pieces of at least so many nanoseconds while the context lasts."""
    with mock.patch.object(partition, "PIECE_NANOSECONDS", nanoseconds):
        yield


def check_shapes(case: Case) -> None:
    """The tops have the declared shapes, and all are written but those that the user fills."""
    trial = Trial(case)
    for name, shape in zip(trial.tops, case.tops, strict=True):
        assert trial.net.blobs[name].shape == tuple(shape)
        trial.net.blobs[name].data[...] = np.nan
    for name, top in zip(trial.tops, trial.forward(), strict=True):
        written = np.isfinite(top).all() or name in trial.net.inputs
        assert written, f"{name} is not written everywhere"


def check_types(case: Case) -> None:
    """float32 gives what float64 gives, but for rounding."""
    wide, narrow = Trial(case).both(), Trial(case, "float32").both()
    for index, (expected, got) in enumerate(zip(wide, narrow, strict=True)):
        assert got.dtype == np.float32
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * scale, err_msg=str(index))


def check_gradients(case: Case) -> None:
    """Every wanted gradient is the derivative of the tops' weighted sum."""
    trial = Trial(case)
    trial.forward()
    bottom_diffs, param_diffs = trial.backward(), trial.param_diffs()

    def objective() -> float:
        return sum(
            float(np.vdot(t, w)) for t, w in zip(trial.forward(), trial.weights, strict=True)
        )

    for index, diff in zip(trial.propagated(), bottom_diffs, strict=True):
        assert_gradient(f"bottom{index}", objective, trial.values[index], diff)
    for index, diff in zip(trial.learned(), param_diffs, strict=True):
        assert_gradient(f"param{index}", objective, trial.params[index].data, diff)


def check_accumulation(case: Case) -> None:
    """Parameter gradients are replaced in a first pass whatever was there, then added to."""
    trial = Trial(case)
    trial.forward()
    for index in trial.learned():
        trial.params[index].diff[...] = np.nan
    trial.backward()
    once = trial.param_diffs()
    trial.forward()
    trial.backward(accumulate=True)
    for first, both in zip(once, trial.param_diffs(), strict=True):
        np.testing.assert_allclose(both, 2 * first, rtol=1e-12, atol=1e-14, equal_nan=False)


def check_cutting(case: Case) -> None:
    """Pieces of any size give the values of the whole, and the same bits on several threads."""
    with pieces(1e30):
        whole = Trial(case)
        expected = whole.both()
    with pieces(1e-30):
        cut = Trial(case)
        got = cut.both()
        threaded = Trial(case, threads=3).both()
    for index, (mine, theirs, other) in enumerate(zip(got, expected, threaded, strict=True)):
        np.testing.assert_array_equal(mine, other, err_msg=f"result {index}: threads")
        if cut.uses_partials():
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12, err_msg=str(index))
        else:
            np.testing.assert_array_equal(mine, theirs, err_msg=f"result {index}: pieces")


def check_in_place(case: Case) -> None:
    """A layer that may run in place gives the same bits when it does."""
    if not _registry.layer_types()[case.type].in_place:
        return
    for mine, theirs in zip(Trial(case, in_place=True).both(), Trial(case).both(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def check_nan(case: Case) -> None:
    """A NaN in a bottom shows in a top, and one in a top's gradient in a gradient."""
    trial = Trial(case)
    for index in trial.propagated():
        place = tuple(size // 2 for size in trial.values[index].shape)
        kept = trial.values[index][place]
        trial.values[index][place] = np.nan
        tops = trial.forward()
        trial.values[index][place] = kept
        shows = any(np.isnan(top).any() for top in tops)
        assert shows or case.hides_nan or not tops, f"a NaN in bottom{index} is lost"
    for index, weight in enumerate(trial.weights):
        if index in case.passive or not (trial.propagated() or trial.learned()):
            continue
        place = tuple(size // 2 for size in weight.shape)
        kept = weight[place]
        weight[place] = np.nan
        trial.forward()
        diffs = [*trial.backward(), *trial.param_diffs()]
        weight[place] = kept
        shows = any(np.isnan(diff).any() for diff in diffs)
        assert shows or case.hides_nan, f"a NaN in the gradient of top{index} is lost"


CHECKS: dict[str, Callable[[Case], None]] = {
    "shapes": check_shapes,
    "types": check_types,
    "gradients": check_gradients,
    "accumulation": check_accumulation,
    "cutting": check_cutting,
    "in_place": check_in_place,
    "nan": check_nan,
}


def all_cases() -> list[Case]:
    """Return the cases of every test file beside this one."""
    found: list[Case] = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.layers.{path.stem}")
        found += getattr(module, "CASES", [])
    return found


# Parameter messages of a type beyond the one of its own name.
MORE_MESSAGES = {"SoftmaxWithLoss": ("softmax_param", "loss_param"), "Data": ("transform_param",)}
# Fields without effect: `engine` chooses among Caffe's own kernels, the others moved elsewhere.
WITHOUT_EFFECT = {
    "engine",
    *(f"data_param.{name}" for name in ("scale", "mean_file", "crop_size", "mirror")),
}


def fields_of(layer_type: str) -> set[str]:
    """Return the parameter fields of a layer type, such as ``scale_param.axis``."""
    own = [
        name
        for name in LayerParameter.DESCRIPTOR.fields_by_name
        if name.replace("_", "") == f"{layer_type.lower()}param"
    ]
    fields = set()
    for name in (*own, *MORE_MESSAGES.get(layer_type, ())):
        message = LayerParameter.DESCRIPTOR.fields_by_name[name].message_type
        assert message is not None
        fields |= {f"{name}.{f.name}" for f in message.fields if f.name not in WITHOUT_EFFECT}
    return fields - WITHOUT_EFFECT


def fields_used(case: Case) -> set[str]:
    """Return the parameter fields that a case sets to another value than the default."""
    used = set()
    for parent, message in case.layer().ListFields():
        if parent.type != FieldDescriptor.TYPE_MESSAGE or not hasattr(message, "ListFields"):
            continue
        for child, value in message.ListFields():
            if not child.has_default_value or value != child.default_value:
                used.add(f"{parent.name}.{child.name}")
    return used


def missing_fields(layer_type: str, cases: Sequence[Case]) -> set[str]:
    """Return the parameter fields of a type that no case sets to another value than the default."""
    used = set().union(*(fields_used(case) for case in cases if case.type == layer_type))
    return fields_of(layer_type) - used
