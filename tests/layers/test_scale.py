import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from cgdnn.runtime.net import Net
from tests.layers.contract import Case, Trial, given, normal

X = normal(2, 3, 4, 2)
SHAPE = (2, 3, 4, 2)


def case(fields="", *more, x=X, shape=SHAPE):
    return Case("Scale", f"scale_param {{ {fields} }}", [x, *more], [shape])


CASES = [
    case(),
    case("bias_term: true"),
    case('filler { value: 2 } bias_term: true bias_filler { type: "gaussian" }'),
    case("axis: 0 bias_term: true"),
    case("axis: 0 num_axes: 2 bias_term: true"),
    case("axis: 0 num_axes: -1 bias_term: true"),
    case("axis: 1 num_axes: -1"),
    case("axis: 2 num_axes: 2 bias_term: true"),
    case("axis: -1 bias_term: true"),
    case("num_axes: 0 bias_term: true"),
    case("num_axes: 0", x=normal(), shape=()),
    case("bias_term: true", x=normal(4, 3), shape=(4, 3)),
    case("axis: 0 bias_term: true", x=normal(5), shape=(5,)),
    case("bias_term: true", x=normal(1, 3, 4), shape=(1, 3, 4)),
    case("axis: 0", normal(2)),
    case("axis: 0 bias_term: true", normal(2, 3)),
    case("axis: 2", normal(4)),
    case("axis: 0", normal(2, 3, 4, 2)),
    case("bias_term: true", normal()),
]


def test_known_values():
    trial = Trial(case("bias_term: true", x=given([[1, 2], [3, 4]]), shape=(2, 2)))
    trial.params[0].data[:] = [2, 10]
    trial.params[1].data[:] = [0, 1]
    np.testing.assert_array_equal(trial.forward()[0], [[2, 21], [6, 41]])
    trial.weights = [np.array([[1.0, 1.0], [1.0, 0.0]])]
    np.testing.assert_array_equal(trial.backward()[0], [[2, 10], [2, 0]])
    factor, offset = trial.param_diffs()
    np.testing.assert_array_equal(factor, [4, 2])
    np.testing.assert_array_equal(offset, [2, 1])


def test_fillers_start_at_the_identity_and_are_heard():
    for fields, factor, offset in (
        ("bias_term: true", 1, 0),
        ("bias_term: true filler { value: 3 } bias_filler { value: 2 }", 3, 2),
        ("bias_term: true filler { }", 0, 0),
    ):
        trial = Trial(Case("Scale", f"scale_param {{ {fields} }}", [X], [SHAPE]))
        start = [p.declared.filler.value for p in trial.net.assembly.params]
        assert start == [factor, offset]


# Caffe overwrites the factor's gradient for these shapes, so that a second pass does not add to it.
MENDED = [
    "scale_all",
    "scale_all_bias",
    "scale_axis0",
    "scale_axis0_num2",
    "scale_axis1_n1",
]


@pytest.mark.parametrize("name", MENDED)
def test_gradients_add_up_where_caffe_overwrites(name, golden):
    values = np.load(golden / "cases" / f"{name}.npz")
    net = Net(golden / "cases" / f"{name}.prototxt", threads=1)
    for key in values.files:
        kind, _, rest = key.partition("/")
        if kind == "inputs":
            net.blobs[rest].data[...] = values[key]
        elif kind == "params":
            layer, index = rest.split("/")
            net.params[layer][int(index)].data[...] = values[key]
    for _ in range(2):
        net.forward()
        net.backward(**{k.removeprefix("topdiff/"): values[k] for k in values if "topdiff/" in k})
    once = values["param_diffs/l/0"]
    np.testing.assert_array_equal(values["param_diffs_accum2/l/0"], once)
    np.testing.assert_allclose(net.params["l"][0].diff, 2 * once, rtol=1e-4)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (case("axis: 4"), r"axis 4 does not exist"),
        (case("axis: 2 num_axes: 3"), r"got 5 axes, expected at most 4"),
        (case("num_axes: -2"), r"got num_axes -2, expected -1"),
        (case("axis: 1", normal(4)), r"got \(4,\), expected \(3,\)"),
        (case("axis: 3", normal(2, 2)), r"got 5 axes, expected at most 4"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(made, text):
    with pytest.raises(DescriptionError, match=text):
        Trial(made)
