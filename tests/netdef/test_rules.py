import pytest

from cgdnn.errors import DescriptionError
from cgdnn.netdef.rules import merge_state, select_layers
from cgdnn.netdef.text import parse_text
from cgdnn.proto import cgdnn_pb2 as pb


def is_in(rules, phase="TRAIN", level=0, stages=()):
    net = parse_text(f"layer {{ {rules} }}", pb.NetParameter, "net.prototxt")
    return select_layers(net, phase, level, stages) == [0]


@pytest.mark.parametrize(
    ("rules", "state", "expected"),
    [
        ("", ("TRAIN", 0, ()), True),
        ("include { }", ("TRAIN", 0, ()), True),
        ("exclude { }", ("TRAIN", 0, ()), False),
        ("include { phase: TRAIN }", ("TRAIN", 0, ()), True),
        ("include { phase: TRAIN }", ("TEST", 0, ()), False),
        ("exclude { phase: TRAIN }", ("TEST", 0, ()), True),
        ("include { min_level: 2 }", ("TRAIN", 1, ()), False),
        ("include { min_level: 2 }", ("TRAIN", 2, ()), True),
        ("include { max_level: 2 }", ("TRAIN", 2, ()), True),
        ("include { max_level: 2 }", ("TRAIN", 3, ()), False),
        ("include { max_level: -1 }", ("TRAIN", 0, ()), False),
        ("include { stage: 'a' stage: 'b' }", ("TRAIN", 0, ("a",)), False),
        ("include { stage: 'a' stage: 'b' }", ("TRAIN", 0, ("b", "c", "a")), True),
        ("include { not_stage: 'a' }", ("TRAIN", 0, ("b",)), True),
        ("include { not_stage: 'a' not_stage: 'b' }", ("TRAIN", 0, ("b",)), False),
        ("include { phase: TEST stage: 'a' }", ("TEST", 0, ()), False),
        ("include { phase: TEST } include { stage: 'a' }", ("TRAIN", 0, ("a",)), True),
        ("exclude { phase: TEST } exclude { stage: 'a' }", ("TRAIN", 0, ("a",)), False),
        ("exclude { phase: TEST stage: 'a' }", ("TEST", 0, ("b",)), True),
    ],
)
def test_rules(rules, state, expected):
    assert is_in(rules, *state) is expected


def test_both_kinds_of_rules():
    with pytest.raises(DescriptionError) as caught:
        is_in("name: 'a' type: 'T' include { }\nexclude { }")
    assert str(caught.value) == (
        'net.prototxt:1:29: layer "a" (T) has include rules and, at net.prototxt:2:1, exclude '
        "rules. Keep one kind."
    )


def test_the_solvers_state_goes_over_the_nets():
    net = pb.NetParameter(state=pb.NetState(level=2, stage=["a"]))
    assert merge_state(net, "TRAIN") == ("TRAIN", 2, ("a",))
    state = pb.NetState(level=3, stage=["b"])
    assert merge_state(net, "TEST", state) == ("TEST", 3, ("a", "b"))
    assert merge_state(net, "TEST", pb.NetState(phase=pb.TRAIN)) == ("TRAIN", 2, ("a",))
