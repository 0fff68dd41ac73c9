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
every_case = pytest.mark.parametrize("case", test_convolution.CASES, ids=str)


@pytest.fixture
def _baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Convolution have no candidate but the baseline, which refuses nothing."""
    plain = Convolution.candidates

    def candidates(layer: Convolution, which: str) -> list[Candidate]:
        found = [c for c in plain(layer, which) if c.name == _parallel_gemm.NAME]
        return [Candidate(c.name, c.steps) for c in found]

    monkeypatch.setattr(Convolution, "candidates", candidates)


@pytest.mark.usefixtures("_baseline")
@every_case
def test_all_passes_are_as_defined(case: Case) -> None:
    trial = Trial(case)
    results = iter(trial.both())
    tops = [next(results) for _ in trial.tops]
    bottom_diffs = [next(results) for _ in trial.bottoms]
    dw, *more = results

    *leading, columns = trial.planned.layer.axes or [Axis(1, 1, 1, 0, 1)]
    rows, _ = reference.row_tables(
        [(a.size, a.kernel, a.stride, a.pad, a.dilation) for a in leading]
    )
    move = (rows, columns.stride, columns.pad, columns.dilation)
    filters, channels, *_ = dw.shape
    channels *= trial.planned.node.param.convolution_param.group
    sizes, outputs = (
        prod(axis.size for axis in leading),
        prod(axis.output for axis in leading),
    )
    w = trial.start[0].reshape(*dw.shape[:2], len(rows), columns.kernel)
    b = trial.start[1] if more else None
    known_dw, known_db = np.zeros_like(w), np.zeros(filters)
    for x, y, dy, dx in zip(trial.values, tops, trial.weights, bottom_diffs, strict=True):
        x_view = x.reshape(-1, channels, sizes, columns.size)
        dy_view = dy.reshape(-1, filters, outputs, columns.output)
        known_y, known_dx = np.empty_like(dy_view), np.empty_like(x_view)
        reference.forward(x_view, w, b, known_y, *move)
        reference.backward_data(dy_view, w, known_dx, *move)
        reference.backward_weights(x_view, dy_view, known_dw, known_db, *move)
        np.testing.assert_allclose(y, known_y.reshape(y.shape), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(dx, known_dx.reshape(dx.shape), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(dw, known_dw.reshape(dw.shape), rtol=1e-12, atol=1e-12)
    if more:
        np.testing.assert_allclose(more[0], known_db, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_baseline")
@pytest.mark.parametrize("case", test_convolution.CASES[::9], ids=str)
def test_gradients_are_added_up(case: Case) -> None:
    check_accumulation(case)


@pytest.mark.parametrize("which", PASSES)
def test_it_is_never_chosen(which: str) -> None:
    layer = Trial(test_convolution.CASES[0]).planned.layer
    assert isinstance(layer, Convolution)
    (found,) = [c for c in layer.candidates(which) if c.name == _parallel_gemm.NAME]
    assert found.refuse(layer) == "the fine-grain baseline, for comparison only"
