import json
from pathlib import Path

import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from cgdnn.netdef.graph import Blob, build_graph
from cgdnn.netdef.read import read_net
from cgdnn.netdef.text import parse_text
from cgdnn.proto import cgdnn_pb2 as pb

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.stem for path in (GOLDEN / "cases").glob("*.npz"))
INPUT = 'layer { name: "in" type: "Input" top: "x" }\n'


def graph(text, phase="TRAIN", level=0, stages=()):
    net = parse_text(INPUT + text, pb.NetParameter, "net.prototxt")
    return build_graph(net, phase, level, stages)


def refusal(text, phase="TRAIN"):
    with pytest.raises(DescriptionError) as caught:
        graph(text, phase)
    return str(caught.value)


def test_a_chain():
    net = graph(
        'layer { name: "a" type: "A" bottom: "x" top: "y" }\n'
        'layer { name: "b" type: "B" bottom: "y" top: "z" lrn_param { } }'
    )
    assert [(n.name, n.type, n.bottoms, n.tops, n.index) for n in net.nodes] == [
        ("in", "Input", (), (0,), 0),
        ("a", "A", (0,), (1,), 1),
        ("b", "B", (1,), (2,), 2),
    ]
    assert net.blobs == [
        Blob("x", 0, [(1, 0)]),
        Blob("y", 1, [(2, 0)]),
        Blob("z", 2, []),
    ]
    assert (net.inputs, net.outputs) == ([0], [2])
    assert net.nodes[2].at("lrn_param") == "net.prototxt:3:50"
    assert net.nodes[2].at() == "net.prototxt:3:1"
    assert net.nodes[2].label == 'layer "b" (B)'
    assert net.nodes[2].param.phase == pb.TRAIN


def test_in_place_keeps_the_blob():
    net = graph(
        'layer { name: "a" type: "A" bottom: "x" top: "x" }\n'
        'layer { name: "b" type: "B" bottom: "x" top: "y" }'
    )
    assert net.nodes[1].bottoms == net.nodes[1].tops == (0,)
    assert net.blobs[0] == Blob("x", 0, [(1, 0), (2, 0)])
    assert net.outputs == [1]


def test_an_in_place_end_is_an_output():
    net = graph('layer { name: "a" type: "A" bottom: "x" top: "x" }')
    assert net.outputs == [0]


def test_two_consumers_get_a_split():
    net = graph(
        'layer { name: "a" type: "A" bottom: "x" top: "y" }\n'
        'layer { name: "b" type: "B" bottom: "y" bottom: "x" top: "z" }'
    )
    assert [n.name for n in net.nodes] == ["in", "x_in_0_split", "a", "b"]
    split = net.nodes[1]
    assert (split.type, split.index) == ("Split", 0)
    assert list(split.param.top) == ["x_in_0_split_0", "x_in_0_split_1"]
    assert list(net.nodes[2].param.bottom) == ["x_in_0_split_0"]
    assert list(net.nodes[3].param.bottom) == ["y", "x_in_0_split_1"]
    assert [blob.name for blob in net.blobs] == ["x", "x_in_0_split_0", "x_in_0_split_1", "y", "z"]


def test_a_split_follows_the_layer_that_last_changed_the_blob():
    net = graph(
        'layer { name: "a" type: "A" bottom: "x" top: "x" }\n'
        'layer { name: "b" type: "B" bottom: "x" bottom: "x" top: "y" }'
    )
    assert [n.name for n in net.nodes] == ["in", "a", "x_a_0_split", "b"]


def test_a_loss_weight_is_a_use_and_moves_to_the_split():
    net = graph(
        'layer { name: "a" type: "A" bottom: "x" top: "y" loss_weight: 0.5 }\n'
        'layer { name: "b" type: "B" bottom: "y" top: "z" }'
    )
    assert [n.name for n in net.nodes] == ["in", "a", "y_a_0_split", "b"]
    assert list(net.nodes[1].param.loss_weight) == [0]
    assert list(net.nodes[2].param.loss_weight) == [0.5, 0]
    assert list(net.nodes[3].param.bottom) == ["y_a_0_split_1"]
    assert [net.blobs[i].name for i in net.outputs] == ["y_a_0_split_0", "z"]


def test_a_loss_weight_that_moves_leaves_the_others():
    net = graph(
        'layer { name: "a" type: "A" bottom: "x" top: "y" top: "z" loss_weight: [0.5, 2] }\n'
        'layer { name: "b" type: "B" bottom: "y" top: "w" }'
    )
    assert list(net.nodes[1].param.loss_weight) == [0, 2]
    assert list(net.nodes[2].param.loss_weight) == [0.5, 0]


def test_a_loss_weight_of_zero_is_no_use():
    net = graph(
        'layer { name: "a" type: "A" bottom: "x" top: "y" loss_weight: 0 }\n'
        'layer { name: "b" type: "B" bottom: "y" top: "z" }'
    )
    assert [n.name for n in net.nodes] == ["in", "a", "b"]
    assert list(net.nodes[1].param.loss_weight) == [0]


def test_outputs_are_sorted_by_name():
    net = graph('layer { name: "a" type: "A" bottom: "x" top: "m" top: "B" top: "a" }')
    assert [net.blobs[i].name for i in net.outputs] == ["B", "a", "m"]


def test_a_loss_without_top_makes_one_that_is_no_output():
    net = graph('layer { name: "l" type: "EuclideanLoss" bottom: "x" loss_weight: 2 }')
    assert [blob.name for blob in net.blobs] == ["x", "l (automatic)"]
    assert net.nodes[1].tops == (1,)
    assert net.outputs == []


def test_stages_of_the_net_add_to_those_given():
    text = 'state { stage: "a" } layer { type: "S" include { stage: "a" stage: "b" } }'
    assert [n.type for n in graph(text, stages=["b"]).nodes] == ["Input", "S"]
    assert [n.type for n in graph(text).nodes] == ["Input"]
    assert graph(text, stages=["b", "a"]).stages == ("a", "b")


def test_the_description_is_not_changed():
    text = INPUT + 'layer { type: "A" bottom: "x" bottom: "x" top: "y" }'
    net = parse_text(text, pb.NetParameter, "net.prototxt")
    build_graph(net, "TEST")
    assert net == parse_text(text, pb.NetParameter, "net.prototxt")


def test_message_is_the_net_with_splits():
    net = graph('name: "n" layer { name: "a" type: "A" bottom: "x" bottom: "x" top: "y" }')
    message = net.message()
    assert message.name == "n"
    assert [layer.name for layer in message.layer] == ["in", "x_in_0_split", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'layer { name: "a" type: "A" bottom: "xs" }',
            'net.prototxt:2:29: layer "a" (A) has the unknown bottom "xs" - did you mean \'x\'?',
        ),
        (
            'layer { name: "a" type: "A" bottom: "q" }',
            (
                'net.prototxt:2:29: layer "a" (A) has the unknown bottom "q": no layer produces '
                'it. Before it are "x".'
            ),
        ),
        (
            'layer { name: "a" type: "A" bottom: "xs" }\nlayer { name: "b" type: "B" top: "xs" }',
            (
                'net.prototxt:2:29: layer "a" (A) has the unknown bottom "xs": it is produced '
                'later, line 3, by layer "b" (B). Move that layer up.'
            ),
        ),
        (
            (
                'layer { name: "b" type: "B" top: "xs" include { phase: TEST } }\n'
                'layer { name: "a" type: "A" bottom: "xs" }'
            ),
            (
                'net.prototxt:3:29: layer "a" (A) has the unknown bottom "xs" in phase TRAIN: it '
                'is produced only in phase TEST, by layer "b" (B) at net.prototxt:2:1. Add a layer '
                "that produces it here, or leave this one out."
            ),
        ),
        (
            (
                'layer { name: "b" type: "B" top: "xs" include { stage: "s" } }\n'
                'layer { name: "a" type: "A" bottom: "xs" }'
            ),
            (
                'net.prototxt:3:29: layer "a" (A) has the unknown bottom "xs" in phase TRAIN: it '
                'is produced only where its rules let it in, by layer "b" (B) at '
                "net.prototxt:2:1. Add a "
                "layer that produces it here, or leave this one out."
            ),
        ),
        (
            'layer { name: "a" type: "A" top: "x" }',
            (
                'net.prototxt:2:29: layer "a" (A) produces "x", which layer "in" (Input) at '
                "net.prototxt:1:1 produces already. Rename one of the tops; in place, a top takes "
                "the position of its bottom."
            ),
        ),
        (
            (
                'layer { name: "b" type: "B" bottom: "x" top: "y" }\n'
                'layer { name: "a" type: "A" bottom: "x" top: "x" }'
            ),
            (
                'net.prototxt:3:41: layer "a" (A) works in place on "x", but layer "b" (B) at '
                "net.prototxt:2:1 reads it too. Give it a top of its own."
            ),
        ),
        (
            'layer { name: "a" type: "A" }\nlayer { name: "a" type: "B" }',
            (
                'net.prototxt:3:9: layer "a" (B) has the name of the layer at net.prototxt:2:1; '
                "weights are kept by name. Rename one."
            ),
        ),
        (
            'layer { name: "a" type: "A" bottom: "x" propagate_down: [true, true] }',
            (
                'net.prototxt:2:41: layer "a" (A) has 2 propagate_down, expected none or 1, one '
                "for each bottom."
            ),
        ),
        (
            'layer { name: "a" type: "A" top: "p" top: "q" loss_weight: 1 }',
            (
                'net.prototxt:2:47: layer "a" (A) has 1 loss_weight, expected none or 2, one for '
                "each top."
            ),
        ),
        ('layer { name: "a" }', 'net.prototxt:2:1: layer "a" has no type. Add one.'),
    ],
)
def test_refusals(text, message):
    assert refusal(text) == message


def test_an_in_place_layer_does_not_produce_what_it_reads():
    text = (
        'layer { name: "a" type: "A" bottom: "X1" top: "X1" }\n'
        'layer { name: "b" type: "B" bottom: "X1" top: "X1" }'
    )
    assert refusal(text).endswith('unknown bottom "X1": no layer produces it. Before it are "x".')


def test_a_name_twice_is_only_warned_of_in_the_test_phase():
    net = graph('layer { name: "a" type: "A" }\nlayer { name: "a" type: "B" }', "TEST")
    assert len(net.warnings) == 1
    assert net.warnings[0].startswith("net.prototxt:3:9: ")


def test_layers_without_names_may_be_many():
    assert len(graph('layer { type: "A" } layer { type: "A" }').nodes) == 3


def test_no_layers_left():
    net = parse_text('layer { type: "A" include { phase: TEST } }', pb.NetParameter, "n")
    with pytest.raises(DescriptionError, match="n: phase TRAIN, level 1, stages s leaves the net"):
        build_graph(net, "TRAIN", 1, ["s"])


@pytest.mark.parametrize("name", CASES)
def test_layers_inputs_and_outputs_are_caffes(name):
    meta = json.loads(str(np.load(GOLDEN / "cases" / f"{name}.npz")["meta"]))
    net = build_graph(
        read_net(GOLDEN / "cases" / f"{name}.prototxt"),
        meta["phase"],
        meta["level"],
        meta["stages"],
    )
    assert [[node.name, node.type] for node in net.nodes] == meta["layers"]
    assert [net.blobs[i].name for i in net.inputs] == meta["inputs"]
    assert [net.blobs[i].name for i in net.outputs] == meta["outputs"]


ABORTS = {a["name"]: a for a in json.loads((GOLDEN / "aborts.json").read_text())}


@pytest.mark.parametrize(
    "name",
    [
        "unknown_bottom",
        "duplicate_top",
        "unknown_field",
        "include_and_exclude",
        "propagate_down_count",
        "loss_weight_count",
    ],
)
def test_what_caffe_refuses_is_refused(name, tmp_path):
    case = ABORTS[name]
    (tmp_path / "net.prototxt").write_text(case["prototxt"])
    with pytest.raises(DescriptionError, match=r"net\.prototxt:\d+:\d+: "):
        build_graph(read_net(tmp_path / "net.prototxt"), case["phase"])
