import json
import os
from pathlib import Path

import pytest

from cgdnn.errors import DescriptionError
from cgdnn.netdef.graph import build_graph
from cgdnn.netdef.read import find_file, is_solver_text, read_net, read_solver
from cgdnn.proto import cgdnn_pb2 as pb

TESTS = Path(__file__).parents[1]
CASES = TESTS / "cases" / "run"
ABORTS = json.loads((TESTS / "golden" / "aborts.json").read_text())

SOUND = {"net": '"n"', "base_lr": "0.1", "max_iter": "3", "lr_policy": '"fixed"'}


def write_solver(folder, without=(), **fields):
    """Write a sound solver, one field a line, changed by `fields`."""
    lines = [f"{k}: {v}\n" for k, v in (SOUND | fields).items() if k not in without]
    path = folder / "s.prototxt"
    path.write_text("".join(lines))
    return path


@pytest.fixture
def refusal(tmp_path):
    def refuse(without=(), overrides=None, **fields):
        path = write_solver(tmp_path, without, **fields)
        with pytest.raises(DescriptionError) as caught:
            read_solver(path, overrides)
        return str(caught.value).replace(f"{tmp_path}{os.sep}", "")

    return refuse


# Files


def test_text_with_bom_crlf_and_foreign_comments(tmp_path):
    path = tmp_path / "n.prototxt"
    path.write_bytes(b'\xef\xbb\xbf# caf\xe9\r\nlayer { type: "A" }\r\n')
    net = read_net(path)
    assert net.message.layer[0].type == "A"
    assert net.where("layer", 0) == f"{path}:2:1"


def test_binary_nets_are_told_by_content(tmp_path):
    path = tmp_path / "n.prototxt"
    path.write_bytes(pb.NetParameter(layer=[pb.LayerParameter(type="A")]).SerializeToString())
    net = read_net(path)
    assert net.message.layer[0].type == "A"
    assert net.where("layer", 0) == str(path)


def test_messages_are_copied():
    source = pb.NetParameter(input=["a"], input_dim=[1, 2, 3, 4])
    net = read_net(source)
    assert [layer.type for layer in net.message.layer] == ["Input"]
    assert list(source.input) == ["a"]


def test_inline_nets_keep_their_places(tmp_path):
    path = write_solver(tmp_path, without=["net"], net_param='{ layers { type: LRN top: "x" } }')
    solver = read_solver(path)
    for _ in range(2):  # the training net and a test net are read from one message
        net = read_net(solver.part("net_param"))
        assert net.message.layer[0].type == "LRN"
        assert net.where("layer", 0, "top", 0) == f"{path}:4:33"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\x0a\xff\x00", "is not the text of a net or a binary net, or is damaged"),
        ('name: "a"'.encode("utf-16"), "text is saved as UTF-8"),
        (pb.SolverState(iter=1, learned_net="x").SerializeToString(), "is not the text of a net"),
    ],
)
def test_files_that_are_no_net(tmp_path, content, text):
    path = tmp_path / "n"
    path.write_bytes(content)
    with pytest.raises(DescriptionError) as caught:
        read_net(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(DescriptionError, match="nope: no such file"):
        read_net(tmp_path / "nope")
    with pytest.raises(DescriptionError, match="cannot be read: Is a directory"):
        read_net(tmp_path)


def test_a_binary_net_is_no_solver(tmp_path):
    path = tmp_path / "s"
    path.write_bytes(pb.NetParameter(layer=[pb.LayerParameter(type="A")]).SerializeToString())
    with pytest.raises(DescriptionError, match="is not the text of a solver"):
        read_solver(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('net: "n" base_lr: 1', True),
        ('debug_info: true train_net_param { layer { name: "base_lr" } }', True),
        ('name: "n" layer { }', False),
        ("debug_info: true layers { } base_lr: 1", False),
        ("debug_info: true", False),
    ],
)
def test_solvers_are_told_from_nets(tmp_path, text, expected):
    (tmp_path / "f").write_text(text)
    assert is_solver_text(tmp_path / "f") is expected


def test_a_binary_file_is_no_solver_text(tmp_path):
    (tmp_path / "f").write_bytes(b"\x01")
    assert not is_solver_text(tmp_path / "f")


def test_find_file_looks_here_first_then_beside_the_description(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    base = there / "s.prototxt"
    assert find_file("n", base) == Path("n")
    (there / "n").touch()
    assert find_file("n", base) == there / "n"
    assert find_file("n", None) == Path("n")
    (here / "n").touch()
    assert find_file("n", base) == Path("n")
    assert find_file(str(there / "n"), base) == there / "n"


# Solvers


def test_a_sound_solver(tmp_path):
    path = write_solver(tmp_path)
    solver = read_solver(path)
    assert solver.message.base_lr == pytest.approx(0.1)
    assert solver.where("base_lr") == f"{path}:2:1"
    assert solver.warnings == []


def test_snapshots_are_named_after_the_solver(tmp_path):
    path = write_solver(tmp_path)
    assert read_solver(path).message.snapshot_prefix == str(tmp_path / "s")
    path = write_solver(tmp_path, snapshot_prefix=f'"{tmp_path}"')
    assert read_solver(path).message.snapshot_prefix == str(tmp_path / "s")
    path = write_solver(tmp_path, snapshot_prefix='"a/b"')
    assert read_solver(path).message.snapshot_prefix == "a/b"


def test_gpu_mode_is_warned_of_only_when_asked_for(tmp_path):
    path = write_solver(tmp_path, solver_mode="GPU")
    assert read_solver(path).warnings == [
        f"{path}:5:1: solver_mode GPU: cgdnn computes on the CPU."
    ]
    assert read_solver(write_solver(tmp_path, solver_mode="CPU")).warnings == []


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("step", {"gamma": "0.1", "stepsize": "5"}),
        ("exp", {"gamma": "0.1"}),
        ("inv", {"gamma": "0.1", "power": "0.75"}),
        ("multistep", {"gamma": "0.1", "stepvalue": "5"}),
        ("poly", {"power": "0.5"}),
        ("sigmoid", {"gamma": "0.1", "stepsize": "5"}),
    ],
)
def test_policies_and_what_they_need(tmp_path, refusal, policy, fields):
    assert read_solver(write_solver(tmp_path, lr_policy=f'"{policy}"', **fields))
    for name in fields:
        message = refusal(without=[name], lr_policy=f'"{policy}"', **fields)
        needed = " and ".join(fields)
        assert message == (
            f's.prototxt:4:1: lr_policy "{policy}" needs {needed}, but {name} is missing. Add it.'
        )


def test_all_that_a_policy_needs_is_missing(refusal):
    assert refusal(lr_policy='"step"').endswith("but gamma and stepsize are missing. Add them.")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_lr": "-1"}, "s.prototxt:2:1: base_lr got -1, expected at least 0."),
        ({"base_lr": "nan"}, "s.prototxt:2:1: base_lr got nan, expected a finite number."),
        ({"max_iter": "-1"}, "s.prototxt:3:1: max_iter got -1, expected at least 0."),
        ({"iter_size": "0"}, "s.prototxt:5:1: iter_size got 0, expected at least 1."),
        ({"average_loss": "0"}, "s.prototxt:5:1: average_loss got 0, expected at least 1."),
        ({"stepsize": "0"}, "s.prototxt:5:1: stepsize got 0, expected at least 1."),
        ({"stepvalue": "[5, -1]"}, "s.prototxt:5:1: stepvalue got -1, expected at least 0."),
        ({"weight_decay": "-0.5"}, "s.prototxt:5:1: weight_decay got -0.5, expected at least 0."),
        ({"momentum": "1"}, "s.prototxt:5:1: momentum got 1, expected at least 0 and below 1."),
        ({"rms_decay": "1"}, "s.prototxt:5:1: rms_decay got 1, expected at least 0 and below 1."),
        ({"momentum2": "-1"}, "s.prototxt:5:1: momentum2 got -1, expected at least 0 and below 1."),
        ({"display": "-1"}, "s.prototxt:5:1: display got -1, expected at least 0."),
        ({"snapshot": "-1"}, "s.prototxt:5:1: snapshot got -1, expected at least 0."),
        (
            {"lr_policy": '"steps"'},
            (
                's.prototxt:4:1: lr_policy got "steps", expected one of fixed, step, exp, inv, '
                "multistep, poly, sigmoid - did you mean 'step'?"
            ),
        ),
        (
            {"type": '"ADAM"'},
            (
                's.prototxt:5:1: type got "ADAM", expected one of SGD, Nesterov, AdaGrad, '
                "RMSProp, AdaDelta, Adam - did you mean 'Adam'?"
            ),
        ),
        (
            {"regularization_type": '"L3"'},
            's.prototxt:5:1: regularization_type got "L3", expected one of L1, L2.',
        ),
        (
            {"type": '"AdaGrad"', "momentum": "0.9"},
            "s.prototxt:6:1: AdaGrad takes no momentum, got 0.9. Remove it.",
        ),
        (
            {"solver_type": "RMSPROP", "momentum": "0.9"},
            "s.prototxt:6:1: RMSProp takes no momentum, got 0.9. Remove it.",
        ),
        (
            {"train_net": '"t"'},
            (
                "s.prototxt:5:1: the training net is given by net and train_net, expected exactly "
                "one of net, net_param, train_net, train_net_param."
            ),
        ),
        (
            {"test_net": '"t"'},
            "s.prototxt:5:1: 0 test_iter for 1 test nets. Give one test_iter for each test net.",
        ),
        (
            {"test_iter": "1"},
            (
                "s.prototxt:5:1: test_iter without test_interval. Say after how many iterations to "
                "test, such as test_interval: 500."
            ),
        ),
        (
            {"test_iter": "-1", "test_interval": "1"},
            ("s.prototxt:5:1: test_iter got -1, expected at least 0."),
        ),
        (
            {"test_iter": "1", "test_interval": "1", "test_state": "[{ }, { }]"},
            "s.prototxt:7:1: 2 test_state for 1 test nets. Give none, or one for each.",
        ),
    ],
)
def test_refused_fields(refusal, fields, message):
    assert refusal(**fields) == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_lr", "s.prototxt: base_lr is missing, expected a number. Add it."),
        ("max_iter", "s.prototxt: max_iter is missing, expected a number. Add it."),
        (
            "lr_policy",
            (
                "s.prototxt: lr_policy is missing, expected one of fixed, step, exp, inv, "
                "multistep, poly, sigmoid. Add it."
            ),
        ),
        (
            "net",
            (
                "s.prototxt: the training net is given by nothing, expected exactly one of net, "
                "net_param, train_net, train_net_param."
            ),
        ),
    ],
)
def test_missing_fields(refusal, name, message):
    assert refusal(without=[name]) == message


def test_test_nets_of_their_own_need_as_many_test_iter(tmp_path, refusal):
    own = {"train_net": '"t"', "test_net": '["a", "b"]', "test_interval": "5"}
    assert read_solver(write_solver(tmp_path, ["net"], **own, test_iter="[1, 2]"))
    assert refusal(["net"], **own, test_iter="[1, 2, 3]").startswith("s.prototxt:7:1: 3 test_iter")
    own = {"test_net": '["a", "b"]', "test_interval": "5"}
    assert read_solver(write_solver(tmp_path, **own, test_iter="[1, 2, 3]"))


def test_overrides_replace(tmp_path):
    path = write_solver(tmp_path, stepvalue="[1, 2]", solver_type="NESTEROV", gamma="1")
    solver = read_solver(
        path,
        {"base_lr": "5e-3", "lr_policy": "multistep", "stepvalue": "3,4", "type": "Adam",
         "solver_mode": "GPU", "snapshot_prefix": 'a\\"b'},
    )  # fmt: skip
    message = solver.message
    assert message.base_lr == pytest.approx(0.005)
    assert (message.lr_policy, list(message.stepvalue), message.type) == (
        "multistep",
        [3, 4],
        "Adam",
    )
    assert message.snapshot_prefix == 'a\\"b'
    assert solver.where("base_lr") == "base_lr=5e-3"
    assert solver.where("max_iter") == f"{path}:3:1"
    assert solver.warnings == ["solver_mode=GPU: solver_mode GPU: cgdnn computes on the CPU."]
    assert read_solver(path, {"solver_type": "ADAM"}).message.type == "Adam"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "base_ir",
            "1",
            ("base_ir=1: SolverParameter has no field 'base_ir' - did you mean 'base_lr'?"),
        ),
        ("base_lr", "x", "base_lr=x: base_lr got 'x', expected a number."),
        (
            "type",
            "adam",
            (
                'type=adam: type got "adam", expected one of SGD, Nesterov, '
                "AdaGrad, RMSProp, AdaDelta, Adam - did you mean 'Adam'?"
            ),
        ),
    ],
)
def test_refused_overrides(refusal, name, value, message):
    assert refusal(overrides={name: value}) == message


# A missing folder is made when the first snapshot is due; a type given twice is warned of.
ACCEPTED = ("solver_snapshot_dir", "solver_type_both")
REFUSED = [c for c in ABORTS if c["kind"] == "solver" and c["name"] not in ACCEPTED]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["name"])
def test_what_caffe_refuses_is_refused(tmp_path, case):
    path = tmp_path / "s.prototxt"
    path.write_text(case["prototxt"])
    with pytest.raises(DescriptionError, match=r"s\.prototxt(:\d+:\d+)?: "):
        read_solver(path)


# The failing inputs


def read_all(path):
    """Do what a training run does before any data is opened."""
    net = read_net(read_solver(path).message.net)
    return [build_graph(net, phase) for phase in ("TRAIN", "TEST")]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("typo_field", [("net.prototxt:4:84: inner_product_param has no field 'num_ouput' - did "
         "you mean 'num_output'?"), 'layer "fc" (InnerProduct)']),
        ("mixed_layer_layers", ["net.prototxt:4:1: `layers`", "net.prototxt:1:1", "Upgrade"]),
        ("slash_comment", ["net.prototxt:1:1: ", "use #"]),
        ("dup_scalar", ["net.prototxt:4:98: num_output given twice (first at 4:84)"]),
        ("quoted_enum", ["net.prototxt:6:72: ", ("enum without quotes: AVE (one of MAX, AVE, "
         "STOCHASTIC)")]),
        ("blobs_lr_in_layer", ["net.prototxt:4:62: ", "`blobs_lr` is now `param { lr_mult: .. }`"]),
        ("lr_policy_unknown", ["solver.prototxt:3:1: ", "fixed, step, exp, inv, multistep"]),
        ("lr_policy_missing", ["solver.prototxt: lr_policy is missing"]),
        ("step_no_stepsize", ["solver.prototxt:3:1: ", "needs gamma and stepsize"]),
        ("iter_size_zero", ["solver.prototxt:10:1: iter_size got 0, expected at least 1"]),
        ("solver_type_typo", ["solver.prototxt:10:1: ", "did you mean 'Adam'?"]),
        ("adagrad_momentum", ["solver.prototxt:4:1: AdaGrad takes no momentum, got 0.9"]),
        ("unknown_bottom", ["net.prototxt:5:46: ", "\"sc\" - did you mean 's'?"]),
        ("order", ["net.prototxt:1:41: ", "produced later, line 4"]),
        ("phase_missing_test", ["net.prototxt:4:41: ", "produced only in phase TRAIN"]),
        ("dup_layer_name", ["net.prototxt:6:9: ", "net.prototxt:4:1", "Rename one"]),
        ("snap_h5_dup_names", ["net.prototxt:6:9: ", "Rename one"]),
        ("include_exclude", ["net.prototxt:4:62: ", "net.prototxt:4:87"]),
    ],
)  # fmt: skip
def test_cases(monkeypatch, case, parts):
    monkeypatch.chdir(CASES / case)
    with pytest.raises(DescriptionError) as caught:
        read_all("solver.prototxt")
    for part in parts:
        assert part in str(caught.value)


def test_case_solver_type_both(monkeypatch):
    monkeypatch.chdir(CASES / "solver_type_both")
    assert read_solver("solver.prototxt").warnings == [
        (
            'solver.prototxt:11:1: solver_type says the same as type "SGD" (at '
            "solver.prototxt:10:1). "
            "Remove solver_type."
        )
    ]


def test_sound_cases(monkeypatch):
    for case in ("base", "v1_only", "h5_ok", "img_ok", "db_ok"):
        monkeypatch.chdir(CASES / case)
        graph = read_all("solver.prototxt")[0]
        assert graph.warnings == []
        assert [graph.blobs[i].name for i in graph.outputs] == ["loss"]
