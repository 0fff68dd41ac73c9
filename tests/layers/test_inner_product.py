import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from cgdnn.layers import inner_product
from cgdnn.layers._layout import lanes
from cgdnn.layers.inner_product import InnerProduct
from cgdnn.plan.arrange import Arrangement
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


@pytest.mark.parametrize("fields", ["9", "6 transpose: true", "9 bias_term: false"])
def test_images_in_lanes(fields, monkeypatch):
    monkeypatch.setattr(Arrangement, "best", lambda self: [offer[-1] for offer in self._offers])
    monkeypatch.setattr(inner_product, "_UNIT", 4)
    batch = 4 * lanes()
    made = case(fields, (batch, 2, 2, 3), (batch, int(fields[0])))
    chosen = Trial(made).net.lowering.choices[-1]
    assert chosen["forward"].name == chosen["backward_data"].name == "image_lanes"
    for check in (check_gradients, check_accumulation, check_cutting):
        check(made)


@pytest.mark.parametrize(
    ("fields", "x"),
    [
        ("9", (3, 2, 2, 3)),
        ("6 bias_term: false", (3, 2, 2, 3)),
        ("4 axis: 2", (3, 2, 2, 3)),
        ("5", (3, 160)),
    ],
)
def test_nonzeros_of_the_diff(fields, x, monkeypatch):
    monkeypatch.setattr(InnerProduct, "_refuse_nonzeros", lambda layer, which: None)
    monkeypatch.setattr(inner_product, "_UNIT", 4)
    shape = (3, 2, int(fields[0])) if "axis" in fields else (3, int(fields[0]))
    made = case(fields, x, shape)
    chosen = Trial(made).net.lowering.choices[-1]
    assert chosen["backward_weights"].name == chosen["backward_data"].name == "sparse"
    for check in (check_gradients, check_accumulation, check_cutting):
        check(made)


@pytest.mark.parametrize(
    ("which", "slower"), [("backward_weights", "1.3 times"), ("backward_data", "2.0 times")]
)
def test_nonzeros_serve_where_they_are_few(which, slower):
    def reason(zeros, fields="100"):
        layer = Trial(case(fields, (64, 300), (64, 100))).planned.layer
        layer.zeros = zeros
        return layer.candidates(which)[0].refuse(layer)

    assert reason(0.9) is None
    assert reason(0.0) == f"would take {slower} as long at 0% zeros in dy"
    assert reason(0.9, "100 transpose: true") == "serves weights that are not transposed"


@pytest.mark.parametrize(
    ("shape", "fields", "which", "reason"),
    [
        ((4 * lanes(), 2, 3), "axis: 2", "forward", "serves one axis of samples"),
        ((4 * lanes() + 1, 6), "", "forward", "serves batches of a multiple of"),
        ((1 * lanes(), 6), "", "forward", "serves batches of a multiple of"),
        ((2 * lanes(), 6), "", "forward", None),
        ((2 * lanes(), 6), "transpose: true", "backward_data", None),
        ((3 * lanes(), 6), "", "backward_data", "serves batches of a multiple of"),
        ((3 * lanes(), 6), "transpose: true", "forward", "serves batches of a multiple of"),
        ((4 * lanes(), 6), "", "backward_data", None),
    ],
)
def test_when_images_are_in_lanes(shape, fields, which, reason):
    top = (*shape[:2], 5) if "axis" in fields else (shape[0], 5)
    layer = Trial(case(f"5 {fields}", shape, top)).planned.layer
    refused = layer.candidates(which)[-1].refuse(layer)
    assert refused is reason is None or refused.startswith(reason)


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
