import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from cgdnn.runtime.net import Net
from tests.layers.contract import Case, Trial, given, normal

CASES = [
    Case("Dropout", bottoms=[normal(4, 3, 2, 2)], tops=[(4, 3, 2, 2)]),
    Case("Dropout", "dropout_param { dropout_ratio: 0.25 }", [normal(4, 5)], [(4, 5)]),
    Case("Dropout", "dropout_param { dropout_ratio: 0 }", [normal(4)], [(4,)]),
    Case("Dropout", "dropout_param { dropout_ratio: 0.9 }", [normal(4, 5)], [(4, 5)], "TEST"),
]
ONES = given(np.ones((20, 100)))


def test_kept_values_are_scaled_up_and_dropped_ones_are_zero():
    trial = Trial(Case("Dropout", "dropout_param { dropout_ratio: 0.75 }", [ONES], [(20, 100)]))
    (top,) = trial.forward()
    assert set(np.unique(top)) == {0, 4}
    # 2,000 draws: the share has a standard deviation of 0.01.
    assert abs((top == 0).mean() - 0.75) < 0.05


def test_the_gradient_has_the_mask_of_the_forward_pass():
    trial = Trial(Case("Dropout", "", [ONES], [(20, 100)]))
    (top,) = trial.forward()
    trial.weights[0][...] = 1
    np.testing.assert_array_equal(trial.backward()[0], top)


def test_every_pass_and_every_seed_draws_another_mask():
    def net(seed):
        made = Trial(Case("Dropout", "", [ONES], [(20, 100)])).net
        return Net(made.assembly.graph.nodes[-1].source.message, "TRAIN", seed=seed)

    def passes(net):
        net.blobs["bottom0"].data[...] = 1
        return [(net.forward(), net.blobs["top0"].data.copy())[1] for _ in range(2)]

    first, second = passes(net(1))
    assert (first != second).any()
    np.testing.assert_array_equal(first, passes(net(1))[0])
    assert (first != passes(net(2))[0]).any()


def test_test_phase_passes_values_on():
    case = Case("Dropout", "dropout_param { dropout_ratio: 0.5 }", [normal(3, 4)], [(3, 4)], "TEST")
    trial = Trial(case)
    np.testing.assert_array_equal(trial.forward()[0], trial.values[0])


@pytest.mark.parametrize("ratio", ["1", "-0.5", "1.5", "nan"])
def test_a_ratio_outside_its_range_is_refused(ratio, tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(
        'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 } } }\n'
        'layer { name: "d" type: "Dropout" bottom: "x" top: "y"\n'
        f"  dropout_param {{ dropout_ratio: {ratio} }} }}\n"
    )
    pattern = rf'net.prototxt:3:19: layer "d" \(Dropout\): got dropout_ratio {ratio}, expected 0 <='
    with pytest.raises(DescriptionError, match=pattern):
        Net(path)
