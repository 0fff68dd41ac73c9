import json
import subprocess
import sys

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.errors import DescriptionError
from cgdnn.layers._fillers import _BLOCK, fill
from cgdnn.proto.cgdnn_pb2 import FillerParameter
from tests.layers.contract import Case, Trial, normal

KEY = 12345


def filler(kind, body=""):
    return text_format.Parse(f'type: "{kind}" {body}', FillerParameter())


def filled(described, shape, key, counter=0):
    array = np.empty(shape)
    fill(described, array, key, counter)
    return array


def test_statistics_are_those_of_caffe(golden):
    for known in json.loads((golden / "fillers.json").read_text()):
        values = filled(filler(known["type"], known["body"]), tuple(known["shape"]), KEY)
        name = f"{known['type']} {known['body']}"
        if "values" in known:
            np.testing.assert_allclose(values, known["values"], atol=1e-6, err_msg=name)
            continue
        spread = known["std"] / np.sqrt(values.size)
        assert abs(values.mean() - known["mean"]) < 6 * spread, name
        assert values.std() == pytest.approx(known["std"], rel=0.06), name
        assert np.count_nonzero(values) / values.size == pytest.approx(
            known["nonzero"], abs=0.02
        ), name
        if known["type"] in ("uniform", "xavier"):
            width = known["max"] - known["min"]
            assert values.min() == pytest.approx(known["min"], abs=0.02 * width), name
            assert values.max() == pytest.approx(known["max"], abs=0.02 * width), name


def test_rows_of_a_unit_ball_add_up_to_one():
    np.testing.assert_allclose(filled(filler("positive_unitball"), (5, 2, 3), 1).sum((1, 2)), 1)


def test_bounds_of_xavier_follow_the_fans():
    shape = (6, 2, 5, 5)  # 50 values in, 150 out
    for norm, fan in (("FAN_IN", 50), ("FAN_OUT", 150), ("AVERAGE", 100)):
        bound = np.sqrt(3 / fan)
        values = filled(filler("xavier", f"variance_norm: {norm}"), shape, KEY)
        assert 0.95 * bound < np.abs(values).max() <= bound


def test_values_depend_on_key_counter_and_nothing_else():
    gaussian = filler("gaussian")
    first = filled(gaussian, (40,), 1)
    np.testing.assert_array_equal(first, filled(gaussian, (40,), 1))
    assert (first != filled(gaussian, (40,), 2)).all()
    assert (first != filled(gaussian, (40,), 1, counter=1)).all()


@pytest.mark.parametrize("kind", ["gaussian", "uniform", "positive_unitball"])
def test_blocks_of_a_large_array_follow_each_other(kind):
    # each number depends on its index only, so the first numbers of a longer array are the same
    columns = _BLOCK // 3
    long, short = filled(filler(kind), (8, columns), 1), filled(filler(kind), (4, columns), 1)
    np.testing.assert_array_equal(long[:4], short)
    assert len(np.unique(long[:, 0])) == 8


def test_values_are_rounded_to_the_type_of_the_array():
    single = np.empty((7, 5), np.float32)
    fill(filler("gaussian"), single, KEY)
    wide = filled(filler("gaussian"), (7, 5), KEY)
    np.testing.assert_array_equal(single, wide.astype(np.float32))


def test_another_process_draws_the_same_values():
    code = (
        "from cgdnn.layers._fillers import fill\n"
        "from cgdnn.proto.cgdnn_pb2 import FillerParameter\n"
        "import numpy as np\n"
        "values = np.empty((3, 4))\n"
        "fill(FillerParameter(type='msra'), values, -7)\n"
        "print(values.tobytes().hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == filled(filler("msra"), (3, 4), -7).tobytes().hex()


@pytest.mark.parametrize(
    ("kind", "body", "shape", "text"),
    [
        ("xaver", "", (2, 2), 'got "xaver", expected one of .* Did you mean "xavier"?'),
        ("zzz", "", (2, 2), "Use one of these"),
        ("uniform", "sparse: 3", (2, 2), '"uniform" knows no sparse; got 3, expected -1'),
        ("gaussian", "sparse: -2", (2, 2), "got sparse -2, expected -1"),
        ("bilinear", "", (2, 3, 4), r"got shape \(2, 3, 4\), expected 4 axes"),
        ("bilinear", "", (1, 1, 2, 3), r"got shape \(1, 1, 2, 3\)"),
    ],
)
def test_fillers_that_cannot_be_are_refused(kind, body, shape, text):
    with pytest.raises(DescriptionError, match=text):
        fill(filler(kind, body), np.empty(shape), KEY)


def test_a_layer_with_an_unknown_filler_is_named():
    fields = 'scale_param { filler { type: "constnt" } }'
    with pytest.raises(DescriptionError) as caught:
        Trial(Case("Scale", fields, [normal(2, 3)], [(2, 3)]))
    assert 'layer "layer" (Scale): unknown filler type; got "constnt"' in str(caught.value)
    assert 'Did you mean "constant"?' in str(caught.value)


def test_a_wrong_filler_in_a_list_is_found():
    fields = 'dummy_data_param { shape { dim: 1 } data_filler { type: "nrmal" } }'
    with pytest.raises(DescriptionError, match=r'\(DummyData\): unknown filler type; got "nrmal"'):
        Trial(Case("DummyData", fields, tops=[(1,)]))
