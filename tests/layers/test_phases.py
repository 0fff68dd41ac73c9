import pytest

from cgdnn.layers import _sparse, _winograd
from cgdnn.layers._base import Candidate
from cgdnn.layers.convolution import Convolution
from tests.layers.contract import Trial, check_accumulation, check_cutting, check_gradients
from tests.layers.test_convolution import case

MADE = [
    case("3 kernel_size: 5 stride: 2 pad: 1", (2, 2, 9, 8), (2, 3, 4, 3)),
    case("5 kernel_size: 7 stride: 3 pad: 2 bias_term: false", (3, 2, 12, 11), (3, 5, 4, 3)),
    case("2 kernel_size: 11 stride: 4", (2, 1, 16, 19), (2, 2, 2, 3), bottoms=2),
    case("18 kernel_size: 5 stride: 2 pad: 2", (2, 4, 11, 12), (2, 18, 6, 6)),
    case("3 kernel_size: 7 stride: 2", (2, 1, 12, 13), (2, 3, 3, 4)),
    case("4 kernel_size: 4 stride: 2 group: 2", (2, 4, 7, 8), (2, 4, 2, 3)),
]
every_case = pytest.mark.parametrize("made", MADE, ids=str)


@pytest.fixture(params=["winograd", "sparse"])
def _by_phases(request, monkeypatch):
    """Let Convolution use Winograd's algorithm, or skip zeros, over phases, whatever that costs."""
    plain = Convolution.candidates

    def candidates(layer: Convolution, which: str) -> list[Candidate]:
        name = "winograd" if which == "forward" else request.param
        (found,) = (c for c in plain(layer, which) if c.name == name)
        assert found.serves(layer)
        return [Candidate(found.name, found.steps)]

    monkeypatch.setattr(Convolution, "candidates", candidates)
    monkeypatch.setattr(
        _sparse.Sparse, "_cost", lambda self, which, zeros: 1e6 * self.window.stride[0]
    )


@pytest.mark.usefixtures("_by_phases")
@every_case
def test_all_passes(made):
    check_gradients(made)
    check_accumulation(made)
    check_cutting(made)


@pytest.mark.usefixtures("_by_phases")
def test_gradients_of_filters_from_all_images(monkeypatch):
    monkeypatch.setattr(_sparse, "_MOST_PARTIAL", 0)
    monkeypatch.setattr(_winograd, "_MOST_PARTIAL", 0)
    monkeypatch.setattr(_winograd, "_LEAST_TOGETHER", 1)
    for made in MADE:
        assert not Trial(made).uses_partials()
        check_gradients(made)
        check_accumulation(made)
