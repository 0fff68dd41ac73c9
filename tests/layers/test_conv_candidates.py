"""Every way to run a convolution, against its definition."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from cgdnn.layers import _parallel_gemm
from cgdnn.layers._base import Candidate
from cgdnn.layers.convolution import Axis, Convolution
from tests.layers import test_convolution
from tests.layers.contract import Case, Trial, check_accumulation
from tests.reference import conv as reference

PASSES = ("forward", "backward_weights", "backward_data")
WIDER = [
    test_convolution.case("17 kernel_size: 3 pad: 1", (2, 9, 13, 11), (2, 17, 13, 11)),
    test_convolution.case("18 kernel_size: 5 pad: 2 group: 2", (3, 6, 9, 10), (3, 18, 9, 10)),
    test_convolution.case("7 kernel_size: 4 stride: 3 pad: 1", (2, 17, 12, 9), (2, 7, 4, 3)),
    test_convolution.case(
        "6 kernel_size: 7 stride: 2 pad: 3 group: 2", (2, 4, 13, 10), (2, 6, 7, 5)
    ),
    test_convolution.case("17 kernel_size: 11 stride: 4", (2, 3, 27, 31), (2, 17, 5, 6), bottoms=2),
    test_convolution.case("4 kernel_size: 3 stride: 4 pad: 2", (2, 4, 9, 8), (2, 4, 3, 3)),
    test_convolution.case("3 kernel_size: 1 stride_h: 3 stride_w: 2", (2, 4, 7, 9), (2, 3, 3, 5)),
    test_convolution.case("18 kernel_size: 1 stride: 2", (2, 17, 8, 9), (2, 18, 4, 5), bottoms=2),
]
plain = Convolution.candidates


def of_name(layer: Convolution, which: str, name: str) -> Candidate | None:
    """Return the candidate `name` of a pass if it can run there."""
    found = [c for c in plain(layer, which) if c.name == name]
    can = found and (name == _parallel_gemm.NAME or found[0].serves(layer))
    return found[0] if can else None


def expected(trial: Trial) -> list[np.ndarray]:
    """Return the tops, the bottoms' diffs and the parameters' diffs by the definition."""
    layer = trial.planned.layer
    assert isinstance(layer, Convolution)
    *leading, columns = layer.axes or [Axis(1, 1, 1, 0, 1)]
    rows, _ = reference.row_tables(
        [(a.size, a.kernel, a.stride, a.pad, a.dilation) for a in leading]
    )
    move = (rows, columns.stride, columns.pad, columns.dilation)
    weights, *bias = trial.start
    filters, inner, *_ = weights.shape
    w = weights.reshape(filters, inner, len(rows), columns.kernel)
    channels = inner * layer.node.param.convolution_param.group
    x_view = (-1, channels, prod(axis.size for axis in leading), columns.size)
    y_view = (-1, filters, prod(axis.output for axis in leading), columns.output)
    tops, diffs = [], []
    dw, db = np.zeros_like(w), np.zeros(filters)
    for value, weight in zip(trial.values, trial.weights, strict=True):
        x, dy = value.reshape(x_view), weight.reshape(y_view)
        y, dx = np.empty_like(dy), np.empty_like(x)
        reference.forward(x, w, bias[0] if bias else None, y, *move)
        reference.backward_data(dy, w, dx, *move)
        reference.backward_weights(x, dy, dw, db, *move)
        tops.append(y.reshape(weight.shape))
        diffs.append(dx.reshape(value.shape))
    return [*tops, *diffs, dw.reshape(weights.shape), *[db] * len(bias)]


@pytest.mark.parametrize("case", test_convolution.CASES + WIDER, ids=str)
def test_each_candidate_is_as_defined(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Trial(case)
    layer = first.planned.layer
    assert isinstance(layer, Convolution)
    known = expected(first)
    names = {c.name for which in PASSES for c in plain(layer, which)}
    ran = {name for name in names if any(of_name(layer, which, name) for which in PASSES)}
    assert ran >= {"unfold_gemm", "parallel_gemm"}
    for name in sorted(ran):

        def candidates(layer: Convolution, which: str, name: str = name) -> list[Candidate]:
            found = of_name(layer, which, name) or plain(layer, which)[-1]
            return [Candidate(found.name, found.steps)]

        monkeypatch.setattr(Convolution, "candidates", candidates)
        trial = Trial(case)
        results = trial.both()
        for index, (got, wanted) in enumerate(zip(results, known, strict=True)):
            scale = max(1.0, float(np.abs(wanted).max()))
            np.testing.assert_allclose(
                got, wanted, rtol=0, atol=1e-11 * scale, err_msg=f"{name}, result {index}"
            )


@pytest.mark.parametrize("case", test_convolution.CASES[::9], ids=str)
def test_the_baseline_adds_gradients_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def candidates(layer: Convolution, which: str) -> list[Candidate]:
        found = of_name(layer, which, _parallel_gemm.NAME)
        assert found is not None
        return [Candidate(found.name, found.steps)]

    monkeypatch.setattr(Convolution, "candidates", candidates)
    check_accumulation(case)


@pytest.mark.parametrize("which", PASSES)
def test_the_baseline_is_never_chosen(which: str) -> None:
    layer = Trial(test_convolution.CASES[0]).planned.layer
    (found,) = [c for c in layer.candidates(which) if c.name == _parallel_gemm.NAME]
    assert found.refuse(layer) == "the fine-grain baseline, for comparison only"
    assert not found.serves(layer)
