import re

import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from tests.layers.contract import Case, Trial, apart, given, normal, positive

SHAPE = (3, 4, 2)


def moved(offset):
    """Return values `apart` from each other and, for other offsets, from those of the others."""
    return lambda rng: apart(*SHAPE)(rng) + offset


TWO, THREE = [normal(*SHAPE)] * 2, [normal(*SHAPE)] * 3
CASES = [
    Case("Eltwise", bottoms=TWO, tops=[SHAPE]),
    Case("Eltwise", "eltwise_param { coeff: 2 coeff: -0.5 coeff: 1 }", THREE, [SHAPE]),
    Case("Eltwise", "eltwise_param { operation: PROD }", TWO, [SHAPE]),
    Case("Eltwise", "eltwise_param { operation: PROD }", THREE, [SHAPE]),
    Case(
        "Eltwise",
        "eltwise_param { operation: PROD stable_prod_grad: false }",
        [positive(*SHAPE)] * 3,
        [SHAPE],
    ),
    Case("Eltwise", "eltwise_param { operation: MAX }", [moved(0), moved(0.03)], [SHAPE]),
    Case(
        "Eltwise",
        "eltwise_param { operation: MAX }",
        [moved(0), moved(0.03), moved(0.06), moved(0.015)],
        [SHAPE],
    ),
]


def test_sum_uses_its_coefficients():
    case = Case(
        "Eltwise", "eltwise_param { coeff: 2 coeff: -1 }", [given([1, 2]), given([3, 5])], [(2,)]
    )
    assert Trial(case).forward()[0].tolist() == [-1, -1]


def test_max_gives_the_gradient_of_ties_as_caffe_does():
    bottoms = [given([1, 2, 2]), given([1, 1, 2]), given([1, 2, 3])]
    trial = Trial(Case("Eltwise", "eltwise_param { operation: MAX }", bottoms, [(3,)]))
    trial.weights[0][...] = 1
    assert trial.forward()[0].tolist() == [1, 2, 3]
    assert [diff.tolist() for diff in trial.backward()] == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_product_with_a_zero_has_a_gradient_unless_the_unstable_form_is_asked():
    bottoms = [given([0.0]), given([3.0])]
    case = Case("Eltwise", "eltwise_param { operation: PROD }", bottoms, [(1,)])
    unstable = "eltwise_param { operation: PROD stable_prod_grad: false }"
    diffs = []
    for fields in (case.fields, unstable):
        trial = Trial(Case("Eltwise", fields, bottoms, [(1,)]))
        trial.weights[0][...] = 1
        trial.forward()
        diffs.append(float(trial.backward()[0][0]))
    assert diffs[0] == 3
    assert np.isnan(diffs[1])


def test_max_warns_of_coefficients_without_effect():
    fields = "eltwise_param { operation: MAX coeff: 2 coeff: 3 }"
    trial = Trial(Case("Eltwise", fields, [given([1]), given([2])], [(1,)]))
    assert trial.forward()[0].tolist() == [2]
    assert any("coeff has no effect" in text for text in trial.net.assembly.warnings)


@pytest.mark.parametrize(
    ("fields", "bottoms", "message"),
    [
        (
            "eltwise_param { coeff: 1 coeff: 2 coeff: 3 }",
            TWO,
            "got 3 coeff values, expected 2, one for each bottom",
        ),
        (
            "eltwise_param { operation: PROD coeff: 1 coeff: 2 }",
            TWO,
            "got 2 coeff values for operation PROD, expected none",
        ),
        ("", [normal(2, 3), normal(2, 4)], "bottom 1 has shape (2, 4), expected (2, 3)"),
        ("", [normal(2, 3)], "got 1 bottom blob(s), expected at least 2"),
    ],
)
def test_what_cannot_be_combined_is_refused(fields, bottoms, message):
    with pytest.raises(DescriptionError, match=re.escape(message)):
        Trial(Case("Eltwise", fields, bottoms, [(2, 3)]))
