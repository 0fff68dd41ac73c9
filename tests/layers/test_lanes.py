"""Layers in layouts with channels or images in the lanes do what they do in N, C, H, W."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.layers._layout import CHANNEL_LANE, IMAGE_LANE, NCHW, lanes
from cgdnn.plan import arrange
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net

BATCH, WIDE = 4 * lanes(), 2 * lanes()
FILLER = 'weight_filler { type: "gaussian" std: 0.2 } bias_filler { type: "uniform" min: -1 }'

# Layers whose channels fill vectors, after one whose do not, with paddings and odd planes.
NET = f"""
force_backward: true
layer {{ name: "in" type: "Input" top: "x"
  input_param {{ shape {{ dim: [{BATCH}, 3, 14, 13] }} shape {{ dim: [{BATCH}, 2] }} }} top: "y" }}
layer {{ name: "conv1" type: "Convolution" bottom: "x" top: "conv1" convolution_param {{
  num_output: {WIDE} kernel_size: 3 pad: 1 {FILLER} }} }}
layer {{ name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1" pooling_param {{
  kernel_size: 2 stride: 2 }} }}
layer {{ name: "relu1" type: "ReLU" bottom: "pool1" top: "pool1" }}
layer {{ name: "norm1" type: "LRN" bottom: "pool1" top: "norm1" lrn_param {{
  norm_region: WITHIN_CHANNEL local_size: 3 }} }}
layer {{ name: "conv2" type: "Convolution" bottom: "norm1" top: "conv2" convolution_param {{
  num_output: {lanes()} kernel_size: 5 pad: 2 {FILLER} }} }}
layer {{ name: "tanh" type: "TanH" bottom: "conv2" top: "tanh" }}
layer {{ name: "norm2" type: "LRN" bottom: "tanh" top: "norm2" lrn_param {{ local_size: 3 }} }}
layer {{ name: "pool2" type: "Pooling" bottom: "norm2" top: "pool2" pooling_param {{
  pool: AVE kernel_size: 3 stride: 2 }} }}
layer {{ name: "conv3" type: "Convolution" bottom: "pool2" top: "conv3" convolution_param {{
  num_output: 5 kernel_size: 3 pad: 1 {FILLER} }} }}
layer {{ name: "pool3" type: "Pooling" bottom: "conv3" top: "pool3" pooling_param {{
  kernel_size: 3 stride: 2 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "pool3" top: "ip" inner_product_param {{
  num_output: 2 {FILLER} }} }}
layer {{ name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "y" top: "loss" }}
"""


@pytest.fixture(params=[IMAGE_LANE, CHANNEL_LANE])
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def keeping_to(layout: str) -> Callable[[arrange.Arrangement], list[arrange.Pair]]:
    """Return a choice of `layout` wherever layers can work in it."""
    return lambda self: [arrange._nearest(layout, offer) for offer in self._offers]


def made(monkeypatch: pytest.MonkeyPatch, layout: str, **options: Any) -> Net:
    """Return the net with its layers in `layout` wherever they can be."""
    with monkeypatch.context() as patch:
        patch.setattr(arrange.Arrangement, "best", keeping_to(layout))
        net = Net(text_format.Parse(NET, NetParameter()), "TRAIN", seed=3, **options)
    rng = np.random.default_rng(5)
    for name in net.inputs:
        net.blobs[name].data = rng.standard_normal(net.blobs[name].shape)
    return net


def works_in(net: Net) -> dict[str, tuple[str, str]]:
    return {
        planned.node.name: choices["forward"].layouts[0]
        for planned, choices in zip(net.assembly.layers, net.lowering.choices, strict=True)
    }


def gradients(net: Net) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for name, blobs in net.params.items():
        for index, blob in enumerate(blobs):
            yield f"{name}[{index}]", blob.diff.copy()


def agree(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any], name: str, close: float) -> None:
    np.testing.assert_allclose(mine, other, rtol=0, atol=close * np.abs(other).max(), err_msg=name)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_gradients(monkeypatch, layout, dtype, exact):
    options = {"dtype": dtype, "exact": exact}
    plain = made(monkeypatch, NCHW, threads=1, **options)
    net = made(monkeypatch, layout, threads=3, **options)
    assert all(pair == (NCHW, NCHW) for pair in works_in(plain).values())
    laned = {name for name, pair in works_in(net).items() if layout in pair}
    assert laned >= {"pool1", "relu1", "norm1", "tanh", "pool2"}
    assert ("norm2" in laned) == ("ip" in laned) == (layout == IMAGE_LANE)
    assert ("conv2" in laned) == (layout == IMAGE_LANE or not exact)
    for one in (plain, net):
        one.run(("forward", "backward"))
    close = 1e-4 if dtype == "float32" else 1e-12
    for name, blob in plain.blobs.items():
        agree(net.blobs[name].data, blob.data, name, close)
        agree(net.blobs[name].diff, blob.diff, f"diff of {name}", close)
    for (name, diff), (_, other) in zip(gradients(net), gradients(plain), strict=True):
        agree(diff, other, name, close)


def test_weight_gradient_from_pooled_gradients_with_channels_in_lanes(monkeypatch):
    plain, net = (made(monkeypatch, which, threads=1) for which in (NCHW, CHANNEL_LANE))
    sparse = {"conv1.backward_weights": "sparse_routed"}
    with monkeypatch.context() as patch:
        patch.setattr(arrange.Arrangement, "best", keeping_to(CHANNEL_LANE))
        net.choose_kernels({}, forced=sparse)
    assert sparse.items() <= net.lowering.chosen_names().items()
    assert net.lowering.choices[1]["backward_weights"].layouts == ((NCHW, CHANNEL_LANE),)
    for one in (plain, net):
        one.run(("forward", "backward"))
    for (name, diff), (_, other) in zip(gradients(net), gradients(plain), strict=True):
        agree(diff, other, name, 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_from_pooled_ones_with_images_in_lanes(monkeypatch, dtype):
    options = {"threads": 1, "exact": True, "dtype": dtype}
    plain, net = (made(monkeypatch, which, **options) for which in (NCHW, IMAGE_LANE))
    routed = {f"conv1.{which}": "routed_images" for which in ("backward_weights", "backward_data")}
    with monkeypatch.context() as patch:
        patch.setattr(arrange.Arrangement, "best", keeping_to(IMAGE_LANE))
        net.choose_kernels({}, forced=routed)
    assert routed.items() <= net.lowering.chosen_names().items()
    for one in (plain, net):
        one.run(("forward", "backward"))
    close = 1e-4 if dtype == "float32" else 1e-12
    agree(net.blobs["x"].diff, plain.blobs["x"].diff, "diff of x", close)
    kept = list(gradients(net))
    for (name, diff), (_, other) in zip(kept, gradients(plain), strict=True):
        agree(diff, other, name, close)
    net.run(("forward", "backward"), lend=True)
    for (name, diff), (_, other) in zip(kept, gradients(net), strict=True):
        np.testing.assert_array_equal(diff, other, err_msg=name)


def test_same_bits_with_lent_memory_and_any_number_of_threads(monkeypatch, layout):
    found = []
    for threads, lend in ((1, False), (3, True), (8, False)):
        net = made(monkeypatch, layout, threads=threads)
        net.run(("forward", "backward"), lend=lend)
        found.append([net.blobs["loss"].data.copy(), *(diff for _, diff in gradients(net))])
    for others in found[1:]:
        for mine, other in zip(found[0], others, strict=True):
            np.testing.assert_array_equal(mine, other)


def test_backward_pass_alone_begins_in_the_layouts_of_the_forward_pass(monkeypatch, layout):
    together, apart = (made(monkeypatch, layout, threads=2) for _ in range(2))
    together.run(("forward", "backward"))
    apart.run(("forward",))
    apart.run(("backward",))
    for (name, diff), (_, other) in zip(gradients(apart), gradients(together), strict=True):
        np.testing.assert_array_equal(diff, other, err_msg=name)


def test_layouts_that_change_between_the_passes(monkeypatch, layout):
    plain, net = (made(monkeypatch, which, threads=1) for which in (NCHW, layout))
    for one in (plain, net):
        one.run(("forward",))
    with monkeypatch.context() as patch:  # the choice that the net would have made itself
        patch.setattr(
            arrange.Arrangement, "best", lambda self: [offer[0] for offer in self._offers]
        )
        net.choose_kernels({})
    assert works_in(net) == works_in(plain)
    for one in (plain, net):
        one.run(("backward",))
    for (name, diff), (_, other) in zip(gradients(net), gradients(plain), strict=True):
        agree(diff, other, name, 1e-4)
