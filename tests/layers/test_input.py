import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from tests.layers.contract import Case, Trial

NORMAL = 'data_filler { type: "gaussian" std: 2 }'
LEGACY = "num: 2 channels: 3 height: 4 width: 5"
CASES = [
    Case("Input", "input_param { shape { dim: 2 dim: 3 } }", tops=[(2, 3)]),
    Case("Input", "input_param { shape { dim: 2 } }", tops=[(2,), (2,)]),
    Case("Input", "input_param { shape { dim: 2 } shape { dim: 1 } }", tops=[(2,), (1,)]),
    Case("DummyData", "dummy_data_param { shape { dim: 4 dim: 3 } }", tops=[(4, 3)]),
    Case(
        "DummyData",
        f"dummy_data_param {{ {NORMAL} data_filler {{ value: 7 }} shape {{ dim: 4 }} }}",
        tops=[(4,), (4,)],
    ),
    Case("DummyData", f"dummy_data_param {{ {NORMAL} {LEGACY} }}", tops=[(2, 3, 4, 5)] * 2),
    Case("DummyData", f"dummy_data_param {{ {LEGACY} num: 1 }}", tops=[(2, 3, 4, 5), (1, 3, 4, 5)]),
]


def dummy(fields, tops, **more):
    return Case("DummyData", f"dummy_data_param {{ {fields} }}", tops=tops, **more)


def test_default_filler_gives_zeros():
    assert (Trial(dummy("shape { dim: 3 }", [(3,)])).forward()[0] == 0).all()


def test_a_constant_top_is_filled_once_and_others_anew_in_every_pass():
    fillers = 'data_filler { value: 7 } data_filler { type: "uniform" }'
    net = Trial(dummy(f"{fillers} shape {{ dim: 30 }}", [(30,), (30,)])).net
    net.forward()
    constant, first = (net.blobs[name].data.copy() for name in ("top0", "top1"))
    assert (constant == 7).all()
    net.blobs["top0"].data[...] = 5
    net.forward()
    assert (net.blobs["top0"].data == 5).all()
    assert (net.blobs["top1"].data != first).all()


def test_random_tops_depend_on_the_pass_and_the_top_only():
    case = dummy(f"{NORMAL} shape {{ dim: 300 }}", [(300,), (300,)])
    first, second = Trial(case), Trial(case, threads=2)
    one, two = first.forward()
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.3
    assert one.std() == pytest.approx(2, rel=0.2)
    second.net.counter = 0
    np.testing.assert_array_equal(second.forward()[1], two)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (Case("Input", tops=[(1,)]), "shape is given 0 time.s., expected once"),
        (
            Case("Input", "input_param { shape { dim: 0 } }", tops=[(0,)]),
            "got dim 0 in a shape, expected 1 or more",
        ),
        (dummy(f"{LEGACY} shape {{ dim: 1 }}", [(1,)]), "got both shape and the older"),
        (dummy("num: 1", [(1,)]), "channels is given 0 time.s., expected once"),
        (
            dummy(f"{NORMAL} {NORMAL} shape {{ dim: 1 }}", [(1,)]),
            "data_filler is given 2 time.s., expected once, or once for each of 1 tops",
        ),
    ],
    ids=str,
)
def test_wrong_fields_are_refused(case, text):
    with pytest.raises(DescriptionError, match=text):
        Trial(case)
