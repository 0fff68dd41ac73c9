from dataclasses import replace

import pytest

from cgdnn.layers import _sparse
from cgdnn.layers._base import Candidate
from cgdnn.layers.convolution import Convolution
from tests.layers.contract import Trial, check_accumulation, check_cutting, check_gradients
from tests.layers.test_convolution import case

MADE = [
    case("19 kernel_size: 3 stride: 2 pad: 1", (3, 5, 5, 8), (3, 19, 3, 4)),
    case("7 kernel_h: 2 kernel_w: 3 pad_w: 2 bias_term: false", (2, 17, 4, 3), (2, 7, 3, 5)),
    case("40 kernel_size: 1", (6, 20, 2, 3), (6, 40, 2, 3), bottoms=2),
    case("64 kernel_size: 2 pad: 1", (4, 16, 3, 3), (4, 64, 4, 4)),
    case("8 kernel_size: 3 group: 2", (3, 34, 5, 5), (3, 8, 3, 3)),
]


@pytest.fixture
def _sparse_kernels(monkeypatch):
    """Let Convolution skip zeros wherever it can, whatever that costs."""
    plain = Convolution.candidates

    def candidates(layer: Convolution, which: str) -> list[Candidate]:
        found = {candidate.name: candidate for candidate in plain(layer, which)}
        if which == "forward":
            return [found["unfold_gemm"]]
        return [replace(found["sparse"], refuse=lambda layer: None)]

    monkeypatch.setattr(Convolution, "candidates", candidates)
    monkeypatch.setattr(_sparse.Sparse, "_cost", lambda self, which, zeros: 1e6)


@pytest.mark.usefixtures("_sparse_kernels")
@pytest.mark.parametrize("scatter", [0.0, 1.0])
@pytest.mark.parametrize("made", MADE, ids=str)
def test_backward_passes(made, scatter, monkeypatch):
    monkeypatch.setattr(_sparse, "_SCATTER", scatter)
    check_gradients(made)
    check_accumulation(made)
    check_cutting(made)


@pytest.mark.usefixtures("_sparse_kernels")
@pytest.mark.parametrize("made", MADE, ids=str)
def test_large_weights_are_cut_over_filters(made, monkeypatch):
    monkeypatch.setattr(_sparse, "_MOST_PARTIAL", 0)
    assert not Trial(made).uses_partials()
    check_gradients(made)
    check_accumulation(made)


def reasons(made, zeros):
    layer = Trial(made).planned.layer
    layer.zeros = zeros
    return [
        c.refuse(layer)
        for which in ("backward_weights", "backward_data")
        for c in layer.candidates(which)
        if c.name == "sparse"
    ]


def test_chosen_from_a_share_of_zeros():
    made = case("64 kernel_size: 3 stride: 2 pad: 1", (4, 64, 28, 28), (4, 64, 14, 14))
    assert reasons(made, 0.99) == [None, None]
    assert all("times as long at 0% zeros" in reason for reason in reasons(made, 0.0))


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (case("4 kernel_size: 2 dilation: 2", (1, 2, 5, 5), (1, 4, 3, 3)), "dilation 1"),
        (case("4 kernel_size: 2", (1, 2, 5), (1, 4, 4)), "two spatial axes"),
        (case("4 kernel_h: 1 kernel_w: 26", (1, 2, 1, 30), (1, 4, 1, 5)), "columns"),
    ],
)
def test_refuses_what_it_cannot_serve(made, text):
    assert all(text in reason for reason in reasons(made, 1.0))
