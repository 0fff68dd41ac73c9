"""Blobs that only exist piece by piece, between the parts of a task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.layers._layout import IMAGE_LANE, lanes
from cgdnn.plan import arrange
from cgdnn.plan.check import check
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net

# conv's top is larger than a near cache, and needed by nothing but the pooling.
NET = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: [10, 3, 40, 40] } } }
layer { name: "other" type: "Input" top: "y" input_param { shape { dim: [10, 2] } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "conv" convolution_param {
  num_output: 9 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param {
  kernel_size: 3 stride: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param {
  num_output: 2 weight_filler { type: "gaussian" std: 0.01 } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "y" top: "loss" }
"""
BATCH = 4 * lanes()
# With images in the lanes the two become one step, of which the top does not even have pieces.
MERGED = f"""
layer {{ name: "in" type: "Input" top: "x" input_param {{
  shape {{ dim: [{BATCH}, 1, 28, 28] }} shape {{ dim: [{BATCH}, 2] }} }} top: "y" }}
layer {{ name: "conv" type: "Convolution" bottom: "x" top: "conv" convolution_param {{
  num_output: 20 kernel_size: 5 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param {{
  kernel_size: 2 stride: 2 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param {{
  num_output: 2 weight_filler {{ type: "gaussian" std: 0.01 }} }} }}
layer {{ name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "y" top: "loss" }}
"""
BOTH = ("forward", "backward")


@pytest.fixture(params=[NET, MERGED], ids=["pieces", "merged"])
def text(request: pytest.FixtureRequest) -> str:
    net: str = request.param
    return net


@pytest.fixture
def images_in_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers work with images in the lanes wherever they can, whatever the lanes are."""

    def best(self: arrange.Arrangement) -> list[arrange.Pair]:
        return [arrange._nearest(IMAGE_LANE, offer) for offer in self._offers]

    monkeypatch.setattr(arrange.Arrangement, "best", best)


def made(threads: int = 2, phase: str = "TRAIN", text: str = NET, **options: Any) -> Net:
    net = Net(text_format.Parse(text, NetParameter()), phase, threads=threads, **options)
    rng = np.random.default_rng(0)
    for name in net.inputs:
        net.blobs[name].data = rng.standard_normal(net.blobs[name].shape)
    return net


def carried(net: Net) -> list[str]:
    (program,) = (run.program.program for run in net._programs.values())
    check(program)
    return [buffer.name.partition(".")[0] for buffer in program.carried]  # without the layout


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_same_bits(threads, dtype, text):
    kept, chained = made(1, dtype=dtype, text=text), made(threads, dtype=dtype, text=text)
    kept.run(BOTH)
    for _ in range(2):
        chained.run(BOTH, lend=True)
    assert carried(kept) == []
    assert carried(chained) == ["conv"]
    for name, blobs in kept.params.items():
        for mine, other in zip(blobs, chained.params[name], strict=True):
            np.testing.assert_array_equal(mine.diff, other.diff)
    np.testing.assert_array_equal(kept.blobs["loss"].data, chained.blobs["loss"].data)


def test_a_blob_that_is_looked_at_is_kept_from_then_on(text):
    kept, net = made(text=text), made(text=text)
    kept.run(BOTH)
    net.run(BOTH, lend=True)
    np.testing.assert_array_equal(net.blobs["conv"].data, kept.blobs["conv"].data)
    net._programs.clear()
    net.run(BOTH, lend=True)
    assert carried(net) == []


def test_forward_pass_of_the_phase_test(text):
    kept, chained = (made(phase="TEST", text=text) for _ in range(2))
    kept.run(("forward",))
    chained.run(("forward",), lend=True)
    assert "conv" in carried(chained)
    np.testing.assert_array_equal(kept.blobs["loss"].data, chained.blobs["loss"].data)


def test_backward_pass_after_a_chained_iteration(text):
    kept, net = made(text=text), made(text=text)
    kept.run(BOTH)
    net.run(BOTH, lend=True)
    net.clear_param_diffs()
    net.backward()
    for name, blobs in kept.params.items():
        np.testing.assert_array_equal(blobs[0].diff, net.params[name][0].diff, err_msg=name)


def test_trace_shares_the_time_of_a_task_out():
    net = made(threads=1)
    net.run(BOTH, lend=True)
    times = net.run(BOTH, lend=True, trace=True)
    pools = [i for i, time in enumerate(times) if time.name.startswith("pool.forward")]
    assert len(pools) > 1
    for i in pools:
        conv, pool = times[i - 1], times[i]
        assert conv.name == pool.name.replace("pool", "conv")
        assert conv.begin < conv.end == pool.begin <= pool.end
        assert (conv.layer, pool.layer) == (2, 3)


def test_a_merged_step_stands_for_both(images_in_lanes):
    net = made(threads=1, text=MERGED, exact=True)
    net.run(BOTH, lend=True)
    (program,) = (run.program.program for run in net._programs.values())
    assert list(program.carried.values()) == [0]
    names = {time.name.partition("[")[0] for time in net.run(BOTH, lend=True, trace=True)}
    assert "conv.forward" in names
    assert "pool.forward" not in names


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kernel_size: 2 stride: 2", "kernel_size: 3 stride: 2"),
        ("kernel_size: 2 stride: 2", "kernel_size: 2 stride: 1"),
        ("kernel_size: 2 stride: 2", "kernel_size: 2 stride: 2 pool: AVE"),
        ("1, 28, 28", "1, 27, 28"),
    ],
)
def test_other_steps_are_not_merged(old, new, images_in_lanes):
    net = made(text=MERGED.replace(old, new), exact=True)
    net.run(BOTH, lend=True)
    (program,) = (run.program.program for run in net._programs.values())
    assert all(size > 0 for size in program.carried.values())


def test_weights_are_found_where_their_values_were_not_kept(text):
    net = made(text=text)
    net.run(BOTH, lend=True)
    assert net.first_non_finite() is None
    net = made(text=text)
    net.params["conv"][0].data[0, 0, 0, 0] = np.nan
    net.run(BOTH, lend=True)
    assert net.first_non_finite() == 'layer "conv" (Convolution), weights conv[0]'
    net = made(text=text)
    net.run(BOTH, lend=True)
    net.params["conv"][0].data[...] = np.nan  # as an update can leave them
    net.params["ip"][0].diff[...] = np.nan
    assert net.first_non_finite() == 'layer "ip" (InnerProduct), gradient of ip[0]'


def test_temporaries_that_exist_piece_by_piece_are_no_loss():
    text = """
    force_backward: true
    layer { name: "in" type: "Input" top: "x" input_param { shape { dim: [10, 3, 160, 160] } } }
    layer { name: "conv" type: "Convolution" bottom: "x" top: "conv" convolution_param {
      num_output: 20 kernel_size: 11 stride: 4 weight_filler { type: "xavier" } } }
    """
    net = made(text=text)
    net.run(("forward",))
    assert carried(net) == ["conv"]
    for _ in range(2):
        net.run(("backward",))
        net.run(("forward",))
    assert {parts for parts, *_ in net._programs} == {("forward",), ("backward",)}
