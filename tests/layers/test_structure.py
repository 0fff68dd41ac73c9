import re

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.errors import DescriptionError
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net
from tests.layers.contract import Case, Trial, normal

CASES = [
    Case("Flatten", bottoms=[normal(3, 2, 4, 2)], tops=[(3, 16)]),
    Case("Flatten", "flatten_param { axis: 0 end_axis: 1 }", [normal(3, 2, 4)], [(6, 4)]),
    Case("Flatten", "flatten_param { axis: -3 end_axis: -2 }", [normal(3, 2, 4)], [(6, 4)]),
    Case("Flatten", "flatten_param { axis: 2 end_axis: 1 }", [normal(2, 3, 4)], [(2, 3, 1, 4)]),
    Case("Split", bottoms=[normal(3, 2, 4)], tops=[(3, 2, 4)]),
    Case("Split", bottoms=[normal(3, 2)], tops=[(3, 2)] * 2),
    Case("Split", bottoms=[normal(3)], tops=[(3,)] * 4),
    Case("Silence", bottoms=[normal(3, 2), normal(4)]),
]


def test_flatten_shares_the_memory_of_its_bottom():
    trial = Trial(CASES[0])
    trial.forward()
    bottom, top = (trial.net.blobs[name] for name in ("bottom0", "top0"))
    bottom.data[0, 0, 0, 0] = 42
    assert top.data[0, 0] == 42
    top.diff[0, 0] = 43
    assert bottom.diff[0, 0, 0, 0] == 43


def test_flatten_refuses_axes_in_the_wrong_order():
    fields = "flatten_param { axis: 2 end_axis: 0 }"
    message = "got axis 2 and end_axis 0 on a bottom of shape (2, 3, 4), expected axis <= end_axis"
    with pytest.raises(DescriptionError, match=re.escape(message)):
        Trial(Case("Flatten", fields, [normal(2, 3, 4)], [(2, 3, 4)]))


def net_of(text):
    message = text_format.Parse(text, NetParameter(force_backward=True))
    return Net(message, "TRAIN", dtype="float64", serial=True)


INPUT = 'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }'


def test_silence_gives_zero_gradients():
    net = net_of(f'{INPUT} layer {{ name: "s" type: "Silence" bottom: "x" }}')
    net.blobs["x"].diff[...] = np.nan
    net.forward()
    net.backward()
    assert net.outputs == []
    assert (net.blobs["x"].diff == 0).all()


def test_split_adds_up_the_gradients_of_all_consumers():
    consumers = " ".join(
        f'layer {{ name: "l{i}" type: "Eltwise" bottom: "x" bottom: "x" top: "y{i}"'
        f" eltwise_param {{ coeff: {10**i} coeff: {2 * 10**i} }} }}"
        for i in range(3)
    )
    net = net_of(f"{INPUT} {consumers}")
    net.forward()
    for i in range(3):
        net.blobs[f"y{i}"].diff[...] = 1
    net.backward()
    assert (net.blobs["x"].diff == 333).all()


def test_split_leaves_out_a_consumer_that_no_gradient_comes_from():
    text = f"""{INPUT}
        layer {{ name: "in_t" type: "Input" top: "t" input_param {{ shape {{ dim: 2 dim: 2 }} }} }}
        layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "y"
          inner_product_param {{ num_output: 2 weight_filler {{ value: 1 }} }} }}
        layer {{ name: "quiet" type: "Silence" bottom: "y" }}
        layer {{ name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }}"""
    net = Net(text_format.Parse(text, NetParameter()), "TRAIN", dtype="float64", serial=True)
    net.blobs["x"].data[...] = 1
    net.blobs["y"].diff[...] = np.nan
    net.forward()
    net.backward()
    np.testing.assert_allclose(net.blobs["y"].diff, np.full((2, 2), 3 / 2))
