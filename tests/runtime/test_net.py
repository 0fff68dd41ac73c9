import logging

import numpy as np
import pytest

from cgdnn.errors import DataError, DescriptionError, RunError, UsageError
from cgdnn.runtime.net import Net
from tests.runtime.programs import CONV_NET, message, rng_like

# y = x W^T + b, summed into a loss: every gradient can be written down
LINEAR = """
name: "linear"
layer { name: "in" type: "Input" top: "x" top: "t"
  input_param { shape { dim: 2 dim: 3 } shape { dim: 2 dim: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y"
  inner_product_param { num_output: 2 weight_filler { type: "constant" value: 1 }
    bias_filler { type: "constant" value: 0.5 } } }
layer { name: "relu" type: "ReLU" bottom: "y" top: "z" }
layer { name: "loss" type: "EuclideanLoss" bottom: "z" bottom: "t" top: "loss" }
"""
X = np.array([[1, 2, 3], [-4, 0, 1]], np.float32)
Y = np.array([[6.5, 6.5], [-2.5, -2.5]], np.float32)


@pytest.fixture
def net() -> Net:
    return Net(message(LINEAR), threads=1)


def test_names_and_orders(net):
    assert net.name == "linear"
    assert net.inputs == ["x", "t"]
    assert net.outputs == ["loss"]
    assert list(net.blobs) == ["x", "t", "y", "z", "loss"]
    assert [(layer.name, layer.type) for layer in net.layers] == [
        ("in", "Input"),
        ("ip", "InnerProduct"),
        ("relu", "ReLU"),
        ("loss", "EuclideanLoss"),
    ]
    assert [blob.shape for blob in net.params["ip"]] == [(2, 3), (2,)]
    assert net.layers[1].blobs == net.params["ip"]


def test_forward_and_backward_by_hand(net):
    outputs = net.forward(x=X, t=np.zeros((2, 2)))
    np.testing.assert_array_equal(net.blobs["y"].data, Y)
    assert outputs["loss"] == (6.5**2 * 2) / 4
    assert net.loss == outputs["loss"]
    net.backward()
    dy = np.array([[3.25, 3.25], [0, 0]])  # z / 2 where the ReLU lets it through
    np.testing.assert_array_equal(net.blobs["y"].diff, dy)
    np.testing.assert_array_equal(net.params["ip"][0].diff, dy.T @ X)
    np.testing.assert_array_equal(net.params["ip"][1].diff, [3.25, 3.25])


def test_backward_adds_to_parameter_diffs_until_they_are_cleared(net):
    net.forward(x=X)
    net.backward()
    once = net.params["ip"][0].diff.copy()
    net.backward()
    np.testing.assert_array_equal(net.params["ip"][0].diff, 2 * once)
    net.clear_param_diffs()
    assert not net.params["ip"][0].diff.any()


def test_loss_weight(net):
    weighted = Net(message(LINEAR.replace('top: "loss"', 'top: "loss" loss_weight: 3')), threads=1)
    for one in (net, weighted):
        one.forward(x=X)
        one.backward()
    assert weighted.loss == 3 * net.loss
    np.testing.assert_array_equal(weighted.params["ip"][0].diff, 3 * net.params["ip"][0].diff)


def test_outputs_are_copies_and_blobs_are_live(net):
    outputs = net.forward(x=X)
    live = net.blobs["loss"].data
    net.forward(x=0 * X)
    assert outputs["loss"] != live
    assert live == net.blobs["loss"].data
    net.params["ip"][0].data[...] = 0
    assert net.forward(x=X)["loss"] == 0.5**2 * 4 / 4


def test_part_of_the_layers(net):
    net.blobs["x"].data[...] = X
    assert list(net.forward(end="ip")) == ["y"]
    assert not net.blobs["z"].data.any()
    net.blobs["y"].data[...] = -1
    assert net.forward(start="relu", end="loss")["loss"] == 0
    np.testing.assert_array_equal(net.blobs["y"].data, -np.ones((2, 2)))
    net.blobs["y"].data[...] = 1
    diffs = net.backward(start="relu", end="relu", z=[[1, 2], [3, 4]])
    np.testing.assert_array_equal(diffs["y"], [[1, 2], [3, 4]])


def test_wrong_names_and_shapes(net):
    with pytest.raises(UsageError, match=r'net "linear" has no layer "rule".* in, ip, relu, loss'):
        net.forward(start="rule")
    with pytest.raises(UsageError, match=r'net "linear" has no blob "w".*x, t, y'):
        net.forward(w=1)
    with pytest.raises(UsageError, match=r'blob "x": got an array of shape \(3,\).*\(2, 3\)'):
        net.forward(x=[1, 2, 3])
    with pytest.raises(UsageError, match="phase: got 'DREAM'"):
        Net(message(LINEAR), phase="DREAM")
    with pytest.raises(UsageError, match="dtype: got 'float16'"):
        Net(message(LINEAR), dtype="float16")


def test_float64():
    net = Net(message(LINEAR), dtype="float64")
    net.forward(x=X.astype(np.float64) / 3)
    assert net.blobs["y"].data.dtype == np.float64
    np.testing.assert_allclose(net.blobs["y"].data[0], 2.5, rtol=1e-15)


def test_seed_decides_fillers_and_random_data():
    nets = [Net(message(), seed=seed) for seed in (1, 1, 2)]
    weights = [net.params["conv1"][0].data for net in nets]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[0] != weights[2]).any()
    first, second = (net.forward()["loss"] for net in nets[:2])
    assert first == second
    assert first != nets[0].forward()["loss"]  # new data, new dropout


def test_shared_parameters_of_two_nets():
    first = Net(message())
    second = Net(message(), phase="TEST", share=first, seed=9)
    first.params["ip"][0].data[...] = 5
    assert (second.params["ip"][0].data == 5).all()
    other = message(
        CONV_NET.replace("num_output: 10 kernel_size: 5", "num_output: 11 kernel_size: 5")
    )
    with pytest.raises(RunError, match=r"conv1\[0\]: shape \(11, 3, 5, 5\)"):
        Net(other, share=first)


# Shapes


def test_reshape(net):
    net.forward(x=X)
    weights = net.params["ip"][0].data
    x, y = net.blobs["x"], net.blobs["y"]
    x.reshape(5, 3)
    net.blobs["t"].reshape(5, 2)
    net.reshape()
    assert y.data.shape == (5, 2)
    assert net.params["ip"][0].data is weights
    x.data[...] = rng_like(x.data)
    net.forward()
    np.testing.assert_allclose(y.data, x.data.sum(1, keepdims=True) + np.full(2, 0.5), rtol=1e-6)


def test_reshape_of_a_blob_that_is_no_input(net):
    net.blobs["y"].reshape(4, 4)
    with pytest.raises(UsageError, match='blob "y" is no input'):
        net.reshape()
    assert net.blobs["y"].shape == (2, 2)


def test_reshape_that_a_layer_refuses(net):
    net.blobs["x"].reshape(5, 3)  # and t stays at two samples
    with pytest.raises(DescriptionError, match="loss"):
        net.reshape()
    assert net.blobs["x"].shape == (2, 3)
    net.forward(x=X)


def test_reshape_that_needs_other_parameters(net):
    net.blobs["x"].reshape(2, 4)
    with pytest.raises(UsageError, match=r"ip\[0\]: the new shape of x needs .*\(2, 4\)"):
        net.reshape()
    assert net.forward(x=X)["loss"] > 0


# Weights


def test_weights_are_saved_and_read_back(net, tmp_path):
    net.params["ip"][0].data[...] = rng_like(net.params["ip"][0].data)
    net.save(tmp_path / "w.caffemodel")
    again = Net(message(LINEAR), weights=tmp_path / "w.caffemodel")
    for ours, theirs in zip(again.params["ip"], net.params["ip"], strict=True):
        np.testing.assert_array_equal(ours.data, theirs.data)
    assert again.copy_from(tmp_path / "w.caffemodel") == ["ip"]


def test_weights_of_another_net(net, tmp_path):
    net.save(tmp_path / "w.caffemodel")
    renamed = LINEAR.replace('name: "ip"', 'name: "fc"')
    with pytest.raises(RunError, match=r"no layer of the file \(ip\) is in the net \(fc\)"):
        Net(message(renamed), weights=tmp_path / "w.caffemodel")
    wider = LINEAR.replace("dim: 3", "dim: 4")
    with pytest.raises(RunError, match=r"ip\[0\] has shape \(2, 3\), expected \(2, 4\)"):
        Net(message(wider), weights=tmp_path / "w.caffemodel")
    (tmp_path / "torn.caffemodel").write_bytes((tmp_path / "w.caffemodel").read_bytes()[:-3])
    with pytest.raises(DataError, match="torn"):
        net.copy_from(tmp_path / "torn.caffemodel")


def test_refused_weights_change_nothing(tmp_path):
    # the first layer would fit, the second does not
    text = """
    layer {{ name: "in" type: "Input" top: "x" input_param {{ shape {{ dim: 1 dim: 2 }} }} }}
    layer {{ name: "a" type: "InnerProduct" bottom: "x" top: "y"
      inner_product_param {{ num_output: 2 }} }}
    layer {{ name: "b" type: "InnerProduct" bottom: "y" top: "z"
      inner_product_param {{ num_output: {} }} }}
    """
    stored = Net(message(text.format(3)))
    stored.params["a"][0].data[...] = 7
    stored.save(tmp_path / "w.caffemodel")
    net = Net(message(text.format(4)))
    with pytest.raises(RunError, match=r"b\[0\]"):
        net.copy_from(tmp_path / "w.caffemodel")
    assert not net.params["a"][0].data.any()


# Trouble


def test_first_non_finite_names_the_layer(net):
    net.forward(x=X)
    net.backward()
    assert net.first_non_finite() is None
    net.params["ip"][1].diff[0] = np.inf
    assert net.first_non_finite() == 'layer "ip" (InnerProduct), gradient of ip[1]'
    net.blobs["z"].diff[0, 0] = np.nan
    assert net.first_non_finite() == 'layer "relu" (ReLU), gradient of blob "z"'
    net.blobs["y"].data[0, 0] = np.nan
    assert net.first_non_finite() == 'layer "ip" (InnerProduct), blob "y"'
    net.params["ip"][0].data[0, 0] = np.nan
    assert net.first_non_finite() == 'layer "ip" (InnerProduct), weights ip[0]'


def test_warnings_are_logged(caplog):
    twice = """
    layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 } } }
    layer { name: "a" type: "ReLU" bottom: "x" top: "y" }
    layer { name: "a" type: "ReLU" bottom: "y" top: "z" }
    """
    with caplog.at_level(logging.WARNING, "cgdnn"):
        Net(message(twice), phase="TEST")
    assert any('"a"' in record.getMessage() for record in caplog.records)
