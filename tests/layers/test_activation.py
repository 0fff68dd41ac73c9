import numpy as np
import pytest

from tests.layers.contract import Case, Trial, apart, given, normal

CASES = [
    Case("ReLU", bottoms=[apart(3, 4, 2, 2)], tops=[(3, 4, 2, 2)]),
    Case("ReLU", "relu_param { negative_slope: 0.25 engine: CAFFE }", [apart(5)], [(5,)]),
    Case("Sigmoid", bottoms=[normal(3, 2, 4)], tops=[(3, 2, 4)]),
    Case("Sigmoid", "sigmoid_param { engine: CAFFE }", [normal(4, 2)], [(4, 2)], "TEST"),
    Case("TanH", bottoms=[normal(3, 2, 2, 1, 2)], tops=[(3, 2, 2, 1, 2)]),
    Case("TanH", "tanh_param { engine: CAFFE }", [normal(4, 2)], [(4, 2)], "TEST"),
]


@pytest.mark.parametrize(
    ("layer", "fields", "expected"),
    [
        ("ReLU", "", [0, 0, 2]),
        ("ReLU", "relu_param { negative_slope: 0.5 }", [-0.5, 0, 2]),
        ("ReLU", "relu_param { negative_slope: -1 }", [1, 0, 2]),
        ("Sigmoid", "", 1 / (1 + np.exp([1, 0, -2]))),
        ("TanH", "", np.tanh([-1, 0, 2])),
    ],
)
def test_known_values(layer, fields, expected):
    (top,) = Trial(Case(layer, fields, [given([-1, 0, 2])], [(3,)])).forward()
    np.testing.assert_allclose(top, expected, rtol=1e-15)


def test_relu_takes_the_gradient_at_zero_from_the_negative_side():
    trial = Trial(Case("ReLU", "relu_param { negative_slope: 0.5 }", [given([-1, 0, 2])], [(3,)]))
    trial.weights[0][...] = 1
    trial.forward()
    assert trial.backward()[0].tolist() == [0.5, 0.5, 1]
