"""Batch normalization with the Scale and the ReLU behind it, as one or one by one."""

from dataclasses import replace

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.errors import UsageError
from cgdnn.layers._layout import CHANNEL_LANE, lanes
from cgdnn.layers.batch_norm import BatchNorm
from cgdnn.plan.check import check
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net

BOTH = ("forward", "backward")
SCALE = 'layer { name: "scale" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }'
RELU = 'layer { name: "relu" type: "ReLU" bottom: "c" top: "c" }'
LEAKY = RELU.replace("}", "relu_param { negative_slope: 0.1 } }")
FALLING = RELU.replace("}", "relu_param { negative_slope: -1 } }")


def made(*followers, phase="TRAIN", filters=5, last="c"):
    text = """
    layer { name: "in" type: "Input" top: "x" input_param { shape { dim: [6, 3, 8, 9] } } }
    layer { name: "other" type: "Input" top: "t" input_param { shape { dim: [6, 2] } } }
    layer { name: "conv" type: "Convolution" bottom: "x" top: "c" convolution_param {
      num_output: %d kernel_size: 3 weight_filler { type: "xavier" } } }
    layer { name: "bn" type: "BatchNorm" bottom: "c" top: "c" }
    %s
    layer { name: "ip" type: "InnerProduct" bottom: "%s" top: "y" inner_product_param {
      num_output: 2 weight_filler { type: "xavier" } } }
    layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }
    """
    text %= (filters, "\n".join(followers), last)
    net = Net(text_format.Parse(text, NetParameter()), phase, threads=2)
    rng = np.random.default_rng(0)
    net.blobs["x"].data[...] = rng.standard_normal((6, 3, 8, 9))
    net.params["scale"][0].data[...] = rng.standard_normal(filters)
    net.params["scale"][1].data[...] = rng.standard_normal(filters)
    return net


def names(net):
    programs = [run.program.program for run in net._programs.values()]
    for program in programs:
        check(program)
    return {task.name.partition("[")[0] for program in programs for task in program.tasks}


def state(net):
    arrays = [blob.diff for blobs in net.params.values() for blob in blobs]
    arrays += [blob.data for blob in net.params["bn"]]
    return [net.loss, net.blobs["c"].diff, *arrays]


def same(mine, theirs):
    np.testing.assert_array_equal(mine.blobs["c"].data, theirs.blobs["c"].data)
    for a, b in zip(state(mine), state(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("followers", "absorbed"),
    [
        ([SCALE], {"scale"}),
        ([SCALE, RELU], {"scale", "relu"}),
        ([SCALE, LEAKY], {"scale", "relu"}),
        ([SCALE, FALLING], {"scale"}),
        ([RELU, SCALE], set()),
    ],
)
def test_results_are_those_of_the_layers_one_by_one(followers, absorbed, monkeypatch):
    mine = made(*followers)
    monkeypatch.setattr(BatchNorm, "absorbs", lambda self, followers: 0)
    theirs = made(*followers)
    for accumulate in (False, True):
        for net in (mine, theirs):
            net.run(BOTH, accumulate=accumulate)
        same(mine, theirs)
    for layer in ("scale", "relu"):
        parts = {f"{layer}.{which}" for which in ("forward", "backward_weights", "backward_data")}
        run = parts & names(theirs)
        assert parts & names(mine) == (set() if layer in absorbed else run)


def test_parts_of_the_chain_run_one_by_one():
    mine, theirs = made(SCALE, RELU), made(SCALE, RELU)
    mine.run(BOTH)
    theirs.forward(end="bn")
    theirs.forward(start="scale")
    theirs.backward(end="scale")
    theirs.backward(start="bn")
    same(mine, theirs)
    assert "scale.backward_data" in names(theirs)


def test_what_only_the_parts_keep_is_never_made_up():
    net = made(SCALE, RELU)
    net.run(BOTH)
    with pytest.raises(UsageError, match=r"scale\.bottom was not kept"):
        net.backward(start="scale")
    net.backward()


def test_a_backward_pass_computes_nothing_forward():
    net = made(SCALE, RELU)
    for _ in range(2):
        net.forward()
        net.backward()
    assert {key[0] for key in net._programs} == {("forward",), ("backward",)}
    assert net.params["bn"][2].data[0] == pytest.approx(1 + 0.999)


def test_running_statistics_are_applied_one_by_one():
    net = made(SCALE, RELU, phase="TEST")
    net.forward()
    assert {"bn.forward", "scale.forward", "relu.forward"} <= names(net)


def test_zeros_are_counted_without_taking_the_chain_apart():
    net = made(SCALE, RELU)
    net.watch_zeros()
    net.run(BOTH)
    diffs = {"conv": net.blobs["c"].diff, "ip": net.blobs["y"].diff}
    assert net.count_zeros() == {
        name: 1 - np.count_nonzero(diff) / diff.size for name, diff in diffs.items()
    }
    assert "scale.forward" not in names(net)


def test_a_gradient_that_lies_otherwise_is_brought_to_the_layer_that_absorbs():
    behind = f"""
    layer {{ name: "wide" type: "Convolution" bottom: "c" top: "w" convolution_param {{
      num_output: {lanes()} kernel_size: 3 weight_filler {{ type: "xavier" }} }} }}
    """
    plain, mixed = (made(SCALE, RELU, behind, filters=lanes(), last="w") for _ in range(2))
    index = next(i for i, p in enumerate(mixed.assembly.layers) if p.node.name == "wide")
    layer = mixed.assembly.layers[index].layer
    choices = mixed.lowering.choices[index]
    choices["backward_data"] = next(
        replace(candidate, layouts=(pair,))
        for candidate in layer.candidates("backward_data")
        for pair in candidate.layouts
        if candidate.serves(layer) and pair[0] == CHANNEL_LANE
    )
    for net in (plain, mixed):
        net.run(BOTH)
    assert "c.diff.to_nchw" in names(mixed)
    same(mixed, plain)
