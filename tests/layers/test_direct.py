import pytest

from cgdnn.layers import _direct
from cgdnn.layers._base import Candidate
from cgdnn.layers.convolution import Convolution
from tests.layers.contract import Trial, check_accumulation, check_cutting, check_gradients
from tests.layers.test_convolution import CASES, case

MADE = [
    *(CASES[i] for i in (1, 3, 4, 5, 6, 9, 11, 12, -3)),
    case("19 kernel_size: 3 stride: 2 pad: 1", (2, 2, 5, 18), (2, 19, 3, 9)),
    case("36 kernel_size: 2 group: 2", (2, 6, 4, 3), (2, 36, 3, 2)),
    case("6 kernel_size: 3 pad: 1 group: 6", (2, 6, 3, 9), (2, 6, 3, 9)),
    case("17 kernel_size: 1", (3, 5, 3, 3), (3, 17, 3, 3), bottoms=2),
]
every_case = pytest.mark.parametrize("made", MADE, ids=str)


@pytest.fixture(params=["direct", "direct_pixels"])
def _direct_kernels(request, monkeypatch):
    """Let Convolution use direct kernels wherever they serve, whatever they cost."""
    plain = Convolution.candidates
    monkeypatch.setattr(_direct.Direct, "cost", lambda self, which: 0.0)

    def candidates(layer: Convolution, which: str) -> list[Candidate]:
        name = "direct" if which == "backward_weights" else request.param
        return [c for c in plain(layer, which) if c.name in (name, "unfold_gemm")]

    monkeypatch.setattr(Convolution, "candidates", candidates)


@pytest.mark.usefixtures("_direct_kernels")
@every_case
def test_all_passes(made):
    check_gradients(made)
    check_accumulation(made)
    check_cutting(made)


@pytest.mark.usefixtures("_direct_kernels")
@pytest.mark.parametrize("made", MADE[-4:], ids=str)
def test_large_weights_are_cut_over_filters(made, monkeypatch):
    monkeypatch.setattr(_direct, "_MOST_PARTIAL", 0)
    assert not Trial(made).uses_partials()
    check_gradients(made)
    check_accumulation(made)


@pytest.mark.parametrize(("axes", "served"), [(0, True), (1, True), (2, True), (3, False)])
def test_up_to_two_spatial_axes_are_served(axes, served):
    made = next(c for c in CASES if len(c.values()[0].shape) == 2 + axes)
    layer = Trial(made).planned.layer
    (reason,) = (c.refuse(layer) for c in layer.candidates("forward") if c.name == "direct")
    assert ("two spatial axes" not in str(reason)) == served
