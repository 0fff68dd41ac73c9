import string

import pytest
from google.protobuf import text_format
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cgdnn.errors import DescriptionError
from cgdnn.netdef.text import is_repeated, parse_text, top_level_fields
from cgdnn.proto import cgdnn_pb2 as pb


def read(text, message_class=pb.NetParameter):
    return parse_text(text, message_class, "net.prototxt")


def refusal(text, message_class=pb.NetParameter):
    with pytest.raises(DescriptionError) as caught:
        read(text, message_class)
    return str(caught.value)


def test_places_point_at_the_first_character_of_each_name():
    net = read('name: "n"\nlayer {\n  name: "a" top: "x"\ttop: "y"\n}\nlayer { dropout_param { } }')
    assert net.where() == "net.prototxt"
    assert net.where("name") == "net.prototxt:1:1"
    assert net.where("layer", 0) == "net.prototxt:2:1"
    assert net.where("layer", 0, "top", 1) == "net.prototxt:3:22"
    assert net.where("layer", 1, "dropout_param") == "net.prototxt:5:9"


def test_a_field_that_is_not_there_gives_the_place_around_it():
    net = read("\nlayer { dropout_param { } }")
    assert net.where("layer", 0, "dropout_param", "dropout_ratio") == "net.prototxt:2:9"
    assert net.where("layer", 0, "bottom", 3) == "net.prototxt:2:1"
    assert net.where("layer", 7) == "net.prototxt"


def test_part_keeps_places():
    solver = read("\nnet_param { layer { } }", pb.SolverParameter)
    assert solver.part("net_param", "layer", 0).where() == "net.prototxt:2:13"


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffname: 'n' # BOM, single quotes",
        "name: 'n'\r\n# \u4e2d\u6587\r\n",
        "name\t:\t'n';",
        'name: "n",',
        "name: '' \"n\"",
        "name: '\\156'",
        "name: '\\x6e'",
        "# latin-1 comment \udce9\nname: 'n'",
    ],
)
def test_forms_of_a_string(text):
    assert read(text).message == pb.NetParameter(name="n")


@pytest.mark.parametrize(
    "text",
    [
        "dropout_param { dropout_ratio: 0.25 }",
        "dropout_param: { dropout_ratio: .25f }",
        "dropout_param < dropout_ratio: 2.5e-1 >",
        "dropout_param:<dropout_ratio:25E-2;>,",
    ],
)
def test_forms_of_a_message_and_a_float(text):
    expected = pb.LayerParameter(dropout_param=pb.DropoutParameter(dropout_ratio=0.25))
    assert read(text, pb.LayerParameter).message == expected


@pytest.mark.parametrize("word", ["true", "True", "t", "1"])
def test_forms_of_true(word):
    assert read(f"force_backward: {word}").message.force_backward is True


@pytest.mark.parametrize(
    ("text", "values"),
    [("16", [16]), ("0x10", [16]), ("020", [16]), ("[1, 2]", [1, 2]), ("[]", [])],
)
def test_forms_of_integers_and_lists(text, values):
    assert list(read(f"pad: {text}", pb.ConvolutionParameter).message.pad) == values


@pytest.mark.parametrize("text", ["inf", "-inf", "Infinity", "-3", "- 3", "1.", "7"])
def test_forms_of_float_words(text):
    assert read(f"scale: {text}", pb.PowerParameter).message.scale == float(text.replace(" ", ""))


@pytest.mark.parametrize("text", ["AVE", "1"])
def test_enums_by_name_and_number(text):
    assert read(f"pool: {text}", pb.PoolingParameter).message.pool == pb.PoolingParameter.AVE


def test_lists_of_messages_have_a_place_for_the_field():
    net = read("layer: [{ name: 'a' }, { name: 'b' }]")
    assert [layer.name for layer in net.message.layer] == ["a", "b"]
    assert net.where("layer", 1, "name") == "net.prototxt:1:26"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nme: 'n'", "net.prototxt:1:1: NetParameter has no field 'nme' - did you mean 'name'?"),
        (
            "\n base_lr: 1",
            (
                "net.prototxt:2:2: NetParameter has no field 'base_lr', but a solver "
                "has: is this a solver file?"
            ),
        ),
        (
            "layer { layer { } }",
            (
                "net.prototxt:1:9: layer has no field 'layer', but NetParameter "
                "has: is a '}' missing before it?"
            ),
        ),
        (
            "layer { global_pooling: true }",
            (
                "net.prototxt:1:9: layer has no field 'global_pooling' "
                "- it belongs inside pooling_param { .. }."
            ),
        ),
        (
            "layer { name: 'a' type: 'X' blobs_lr: 1 }",
            (
                "net.prototxt:1:29: layer has no field "
                "'blobs_lr' - `blobs_lr` is now `param { lr_mult: .. }`. In layer \"a\" (X)."
            ),
        ),
        ("name: 'a'\nname: 'b'", "net.prototxt:2:1: name given twice (first at 1:1). Keep one."),
        (
            "layer { lrn_param { } lrn_param { } }",
            ("net.prototxt:1:23: lrn_param given twice (first at 1:9). Keep one."),
        ),
        ("// hello", "net.prototxt:1:1: '//' starts no comment, use #."),
        ("layer {", "net.prototxt:1:1: layer { is not closed before the end of the file."),
        ("layer { } }", "net.prototxt:1:11: '}' closes nothing. Remove it."),
        (
            "layer { >",
            ("net.prototxt:1:9: '>' does not close layer, which is open since 1:1 and needs '}'."),
        ),
        ("layer ]", "net.prototxt:1:1: layer needs '{' .. '}', got ']'."),
        ("name 'n'", "net.prototxt:1:1: name needs a ':' before its value, got 'n'."),
        ("name: n", "net.prototxt:1:1: name got 'n', expected a string in quotes."),
        ("name: 'n\n'", "net.prototxt:1:1: the string of name is not closed on its line."),
        (
            "name: '\udce9'",
            ("net.prototxt:1:1: the string of name is not UTF-8. Save the file as UTF-8."),
        ),
        (
            "force_backward: yes",
            ("net.prototxt:1:1: force_backward got 'yes', expected true or false."),
        ),
        (
            "input_dim: 1.5",
            (
                "net.prototxt:1:1: input_dim got 1.5, expected a whole number from "
                "-2147483648 to 2147483647."
            ),
        ),
        (
            "input_dim: [1 2]",
            ("net.prototxt:1:1: the list of input_dim goes on with '2', expected ',' or ']'."),
        ),
        (
            "layer { clip_param { min: 0 } }",
            ("net.prototxt:1:9: clip_param lacks max. Add what is missing."),
        ),
        (
            "[a.b]: 1",
            ("net.prototxt:1:1: names of extensions cannot be read here. Write plain field names."),
        ),
        ("7: 1", "net.prototxt:1:1: got '7', expected the name of a field of NetParameter."),
    ],
)
def test_refusals_of_nets(text, message):
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "message_class", "expected"),
    [
        ("pad: -1", pb.ConvolutionParameter, "pad got -1, expected a whole number from 0 to"),
        ("pad: 4294967296", pb.ConvolutionParameter, "pad got 4294967296, expected a whole"),
        ("pad: '1'", pb.ConvolutionParameter, "pad got '1', expected a value without quotes"),
        (
            'pool: "AVG"',
            pb.PoolingParameter,
            ("expected an enum without quotes: AVE (one of MAX, AVE, STOCHASTIC)"),
        ),
        (
            "pool: AVG",
            pb.PoolingParameter,
            ("no value AVG (one of MAX, AVE, STOCHASTIC) - did you mean 'AVE'?"),
        ),
        ("pool: 7", pb.PoolingParameter, "pool got 7, expected a whole number from 0 to 2"),
        ("type: 'Convolution'", pb.V1LayerParameter, "without quotes: CONVOLUTION"),
        ("dropout_ratio: 0x1", pb.DropoutParameter, "dropout_ratio got '0x1', expected a number"),
        ("dropout_ratio: 4dim", pb.DropoutParameter, "dropout_ratio got '4dim', expected a number"),
        (r'source: "c:\new\train"', pb.DataParameter, r"In a path use / or \\."),
        (r'source: "c:\data\db"', pb.DataParameter, r"unknown escape \d. Write a backslash as \\"),
        (r"name: '\ud800'", pb.NetParameter, r"unknown escape \ud800"),
    ],
)
def test_refusals_of_values(text, message_class, expected):
    message = refusal(text, message_class)
    assert message.startswith("net.prototxt:1:1: ")
    assert expected in message


def test_newlines_are_fine_in_strings_that_name_no_path():
    assert read(r"param_str: 'a\nb'", pb.PythonParameter).message.param_str == "a\nb"


def test_overrides_have_no_line():
    with pytest.raises(DescriptionError, match=r"^momentum=x: momentum got 'x', expected a number"):
        parse_text("momentum: x", pb.SolverParameter, "momentum=x", numbered=False)


def test_top_level_fields():
    text = "name: 'a' # b: 1\nlayer { top: 'x' } solver_mode: CPU net_param: { name: 'c' }"
    assert top_level_fields(text) == ["name", "layer", "solver_mode", "net_param"]


# Whatever protobuf prints, both readers read alike.

SCALARS = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "bool": st.booleans(),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6),
    "bytes": st.binary(max_size=6),
}
KINDS = {
    "int32": "TYPE_INT32", "int64": "TYPE_INT64", "uint32": "TYPE_UINT32", "bool": "TYPE_BOOL",
    "float": "TYPE_FLOAT", "double": "TYPE_DOUBLE", "string": "TYPE_STRING", "bytes": "TYPE_BYTES",
}  # fmt: skip


@st.composite
def messages(draw, message_class, depth=3):
    message = message_class()
    fields = list(message.DESCRIPTOR.fields)
    required = [field for field in fields if field.name in ("min", "max") and len(fields) == 2]
    for field in required or draw(st.lists(st.sampled_from(fields), max_size=4)):
        if field.message_type is not None:
            if depth == 0:
                continue
            inner = messages(field.message_type._concrete_class, depth - 1)
            values = [draw(inner) for _ in range(draw(st.integers(1, 2)))]
            if is_repeated(field):
                getattr(message, field.name).extend(values)
            else:
                getattr(message, field.name).CopyFrom(values[0])
            continue
        if field.enum_type is not None:
            values = st.sampled_from([value.number for value in field.enum_type.values])
        else:
            values = next(SCALARS[k] for k, t in KINDS.items() if field.type == getattr(field, t))
        if is_repeated(field):
            getattr(message, field.name).extend(draw(st.lists(values, max_size=3)))
        else:
            setattr(message, field.name, draw(values))
    return message


@settings(max_examples=150, deadline=None)
@given(
    message=st.sampled_from([pb.NetParameter, pb.SolverParameter, pb.Datum]).flatmap(messages),
    options=st.fixed_dictionaries(
        {
            "as_one_line": st.booleans(),
            "use_short_repeated_primitives": st.booleans(),
            "pointy_brackets": st.booleans(),
            "as_utf8": st.booleans(),
        }
    ),
)
def test_reads_what_protobuf_prints(message, options):
    text = text_format.MessageToString(message, **options)
    assert read(text, type(message)).message == message


def places(place):
    for name, children in place.children.items():
        for child in children:
            yield name, child
            yield from places(child)


@settings(max_examples=100, deadline=None)
@given(message=messages(pb.NetParameter))
def test_every_value_has_the_place_of_its_name(message):
    text = text_format.MessageToString(message)
    lines = text.split("\n")
    found = list(places(read(text).place))
    assert len(found) == sum(line.strip() not in ("", "}") for line in lines)
    for name, place in found:
        assert lines[place.line - 1][place.column - 1 :].startswith(name)


@settings(max_examples=150, deadline=None)
@given(
    message=messages(pb.NetParameter),
    blanks=st.lists(st.sampled_from(["\n", "\t", "\r\n", ' # } note "\n', "  "]), min_size=1),
)
def test_blanks_and_comments_change_nothing(message, blanks):
    lines = text_format.MessageToString(message).split("\n")
    text = "".join(line + blanks[i % len(blanks)] + "\n" for i, line in enumerate(lines))
    assert read(text).message == message


@settings(max_examples=300, deadline=None)
@given(
    message=messages(pb.LayerParameter),
    position=st.floats(0, 1),
    wrong=st.sampled_from(sorted({*string.punctuation, *"a0 \n"} - {"+", "_"})),
)
def test_a_changed_character_is_judged_as_protobuf_judges_it(message, position, wrong):
    text = text_format.MessageToString(message, as_utf8=True)
    at = int(position * len(text))
    text = text[:at] + wrong + text[at + 1 :]
    # protobuf's Python reader, unlike its C++ one, takes unknown escapes, plus signs and 1_000.
    assume("\\" not in text)
    expected = pb.LayerParameter()
    try:
        text_format.Parse(text, expected)
        complete = expected.IsInitialized()
    except text_format.ParseError:
        complete = False
    if complete:
        assert read(text, pb.LayerParameter).message == expected
    else:
        refusal(text, pb.LayerParameter)
