import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from cgdnn.layers import inner_product
from tests.layers.contract import (
    Case,
    Trial,
    check_accumulation,
    check_cutting,
    check_gradients,
    given,
    normal,
)


def case(fields, x, shape):
    text = f"inner_product_param {{ num_output: {fields} }}"
    return Case("InnerProduct", text, [normal(*x)], [shape])


CASES = [
    case("4", (3, 5), (3, 4)),
    case("4", (3, 2, 2, 3), (3, 4)),
    case("4 bias_term: false", (3, 5), (3, 4)),
    case('2 weight_filler { type: "xavier" } bias_filler { value: 1 }', (1, 5), (1, 2)),
    case("4 axis: 2", (2, 3, 2, 2), (2, 3, 4)),
    case("4 axis: -1", (2, 3, 5), (2, 3, 4)),
    case("4 axis: 0", (2, 3), (4,)),
    case("4 transpose: true", (3, 5), (3, 4)),
    case("3 transpose: true axis: 2 bias_term: false", (2, 2, 5), (2, 2, 3)),
    case("70", (3, 80), (3, 70)),
]


def test_known_values():
    made = Case(
        "InnerProduct",
        "inner_product_param { num_output: 2 }",
        [given([[1, 2, 3], [4, 5, 6]])],
        [(2, 2)],
        params=[given([[1, 0, 0], [0, 10, 1]]), given([0.5, 0])],
    )
    trial = Trial(made)
    np.testing.assert_array_equal(trial.forward()[0], [[1.5, 23], [4.5, 56]])
    trial.weights = [np.array([[1.0, 2.0], [0.0, 1.0]])]
    np.testing.assert_array_equal(trial.backward()[0], [[1, 20, 2], [0, 10, 1]])
    dw, db = trial.param_diffs()
    np.testing.assert_array_equal(dw, [[1, 2, 3], [6, 9, 12]])
    np.testing.assert_array_equal(db, [1, 3])


@pytest.mark.parametrize("transpose", ["false", "true"])
def test_cutting_over_columns(transpose, monkeypatch):
    monkeypatch.setattr(inner_product, "_BLOCK", 4)
    made = case(f"9 transpose: {transpose}", (3, 11), (3, 9))
    for check in (check_gradients, check_accumulation, check_cutting):
        check(made)


def test_weights_are_stored_transposed():
    shapes = [
        [param.shape for param in Trial(case(fields, (3, 5), (3, 4))).params]
        for fields in ("4", "4 transpose: true")
    ]
    assert shapes == [[(4, 5), (4,)], [(5, 4), (4,)]]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ("0", "got num_output 0, expected 1 or more"),
        ("3 axis: 2", "axis 2 does not exist in a bottom of shape"),
    ],
)
def test_refusals(fields, text):
    with pytest.raises(DescriptionError, match=text):
        Trial(case(fields, (3, 5), (1,)))


def test_multiply_adds():
    layer = Trial(case("4", (3, 2, 5), (3, 4))).planned.layer
    assert layer.multiply_adds() == 3 * 10 * 4
