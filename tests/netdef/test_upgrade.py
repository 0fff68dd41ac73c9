from pathlib import Path

import pytest
from google.protobuf import text_format

from cgdnn.errors import DescriptionError
from cgdnn.netdef.read import read_net
from cgdnn.netdef.text import parse_text
from cgdnn.netdef.upgrade import _V1_TYPES, upgrade_net, upgrade_solver
from cgdnn.proto import cgdnn_pb2 as pb

GOLDEN = Path(__file__).parents[1] / "golden" / "upgrade"


def upgraded(text):
    return upgrade_net(parse_text(text, pb.NetParameter, "net.prototxt"))


def refusal(text):
    with pytest.raises(DescriptionError) as caught:
        upgraded(text)
    return str(caught.value)


@pytest.mark.parametrize("name", ["v0", "v1", "legacy_input"])
def test_nets_become_what_caffe_makes_of_them(name):
    expected = text_format.Parse((GOLDEN / f"{name}_out.prototxt").read_text(), pb.NetParameter())
    assert read_net(GOLDEN / f"{name}_in.prototxt").message == expected
    assert read_net(GOLDEN / f"{name}_out.prototxt").message == expected


@pytest.mark.parametrize("name", ["v0", "v1", "legacy_input"])
def test_binary_nets_are_upgraded_too(name, tmp_path):
    old = text_format.Parse((GOLDEN / f"{name}_in.prototxt").read_text(), pb.NetParameter())
    (tmp_path / "old.caffemodel").write_bytes(old.SerializeToString())
    expected = read_net(GOLDEN / f"{name}_out.prototxt").message
    net = read_net(tmp_path / "old.caffemodel")
    assert net.message == expected
    assert net.where("layer", 1, "param", 0) == str(tmp_path / "old.caffemodel")
    assert read_net(old).message == expected


def test_solver_becomes_what_caffe_makes_of_it():
    text = (GOLDEN / "solver_in.prototxt").read_text()
    solver = parse_text(text, pb.SolverParameter, "s")
    upgrade_solver(solver)
    expected = (GOLDEN / "solver_out.prototxt").read_text()
    assert solver.message == text_format.Parse(expected, pb.SolverParameter())
    assert solver.where("type") == "s:4:1"


def test_every_v1_type_has_a_name():
    assert set(_V1_TYPES) == set(pb.V1LayerParameter.LayerType.values())


def test_places_of_a_v0_net():
    net = read_net(GOLDEN / "v0_in.prototxt")
    file = str(GOLDEN / "v0_in.prototxt")
    assert net.where("layer", 0, "top", 0) == f"{file}:2:1"
    assert net.where("layer", 0, "input_param", "shape", 0, "dim", 2) == f"{file}:5:1"
    assert net.where("layer", 1) == f"{file}:8:1"
    assert net.where("layer", 1, "name") == f"{file}:8:18"
    assert net.where("layer", 1, "convolution_param", "pad", 0) == f"{file}:7:47"
    assert net.where("layer", 1, "convolution_param", "num_output") == f"{file}:8:45"
    assert net.where("layer", 1, "param", 1, "decay_mult") == f"{file}:8:221"


def test_places_of_a_v1_net():
    net = read_net(GOLDEN / "v1_in.prototxt")
    file = str(GOLDEN / "v1_in.prototxt")
    assert net.where("layer", 0, "transform_param", "scale") == f"{file}:2:122"
    assert net.where("layer", 0, "data_param", "backend") == f"{file}:2:108"
    assert net.where("layer", 1, "param", 1, "lr_mult") == f"{file}:3:74"
    assert net.where("layer", 4, "param", 0, "share_mode") == f"{file}:6:97"


def test_values_that_v0_types_have_no_use_for_are_warned_of():
    net = upgraded('layers { layer { name: "r" type: "relu" num_output: 3 } bottom: "x" top: "x" }')
    assert net.message.layer[0] == pb.LayerParameter(name="r", type="ReLU", bottom=["x"], top=["x"])
    assert net.warnings == [
        (
            'net.prototxt:1:41: layer "r" (relu) has no use for num_output, which is left out. '
            "Remove it."
        )
    ]


def test_a_v1_layer_among_v0_layers_is_kept():
    net = upgraded('layers { layer { type: "relu" } } layers { type: LRN lrn_param { k: 2 } }')
    assert [layer.type for layer in net.message.layer] == ["ReLU", "LRN"]
    assert net.message.layer[1].lrn_param.k == 2


def test_batch_norm_statistics_stop_learning_only_with_three_params():
    text = 'layer { type: "BatchNorm" param { lr_mult: 1 } param { } param { name: "s" } }'
    params = upgraded(text).message.layer[0].param
    assert [(p.lr_mult, p.decay_mult, p.name) for p in params] == [
        (0, 0, ""),
        (0, 0, ""),
        (0, 0, "s"),
    ]
    params = upgraded('layer { type: "BatchNorm" param { } }').message.layer[0].param
    assert not params[0].HasField("lr_mult")


def test_input_names_alone_are_dropped_from_binary_nets():
    net = read_net(pb.NetParameter(input=["data"], layer=[pb.LayerParameter(type="ReLU")]))
    assert len(net.message.layer) == 1
    assert not net.message.input


def test_an_input_net_may_have_no_layers():
    net = upgraded('input: "a" input_dim: [1, 2, 3, 4]')
    assert list(net.message.layer[0].input_param.shape[0].dim) == [1, 2, 3, 4]
    assert net.where("layer", 0) == "net.prototxt:1:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'layer { type: "A" }\nlayers { type: LRN }\nlayer { }',
            (
                "net.prototxt:2:1: `layers` (V1) in a net whose other layers are written as "
                "`layer`, first at net.prototxt:1:1; only one style is read. Upgrade every "
                '`layers { type: ENUM .. }` to `layer { type: "Name" .. }`.'
            ),
        ),
        (
            'layers { layer { name: "c" type: "covn" } }',
            'net.prototxt:1:28: layer "c" has the unknown V0 type "covn" - did you mean \'conv\'?',
        ),
        (
            (
                'layers { layer { name: "p" type: "padding" } bottom: "x" top: "y" }\n'
                'layers { layer { name: "r" type: "relu" } bottom: "y" top: "z" }'
            ),
            (
                'net.prototxt:2:1: layer "r" (relu) reads the padding layer "p"; only a conv or '
                "pool layer with one bottom can. Remove the padding layer."
            ),
        ),
        (
            (
                'layers { layer { name: "p" type: "padding" } top: "y" }\n'
                'layers { layer { name: "c" type: "conv" } bottom: "y" top: "z" }'
            ),
            'net.prototxt:1:1: padding layer "p" has 0 bottoms and 1 tops, expected one each.',
        ),
        (
            '\ninput: "a" input: "b" input_dim: 1',
            (
                "net.prototxt:2:1: 2 input with 0 input_shape and 1 input_dim, expected one "
                "input_shape or four input_dim for each input."
            ),
        ),
        (
            'input: "a"',
            (
                "net.prototxt:1:1: 1 input with 0 input_shape and 0 input_dim, expected one "
                "input_shape or four input_dim for each input."
            ),
        ),
    ],
)
def test_refusals(text, message):
    assert refusal(text) == message


def test_both_solver_types():
    solver = parse_text('type: "SGD"\nsolver_type: SGD', pb.SolverParameter, "s")
    upgrade_solver(solver)
    assert solver.warnings == [
        's:2:1: solver_type says the same as type "SGD" (at s:1:1). Remove solver_type.'
    ]
    assert not solver.message.HasField("solver_type")
    solver = parse_text('type: "SGD"\nsolver_type: ADAM', pb.SolverParameter, "s")
    with pytest.raises(
        DescriptionError, match=r's:2:1: solver_type means "Adam", .* type "SGD" \(at s:1:1\)'
    ):
        upgrade_solver(solver)
