import re

import pytest

from cgdnn.errors import DescriptionError
from tests.layers.contract import Case, Trial, given, normal

CASES = [
    Case("Concat", bottoms=[normal(3, 2, 4), normal(3, 5, 4)], tops=[(3, 7, 4)]),
    Case("Concat", "concat_param { axis: 0 }", [normal(3, 2), normal(1, 2)], [(4, 2)]),
    Case(
        "Concat",
        "concat_param { axis: -1 }",
        [normal(3, 2, 4), normal(3, 2, 1), normal(3, 2, 2)],
        [(3, 2, 7)],
    ),
    Case("Concat", "concat_param { concat_dim: 2 }", [normal(2, 2, 4)] * 2, [(2, 2, 8)]),
    Case("Concat", bottoms=[normal(3, 4)], tops=[(3, 4)]),
]


def test_known_values():
    case = Case("Concat", "", [given([[1, 2], [3, 4]]), given([[5], [6]])], [(2, 3)])
    assert Trial(case).forward()[0].tolist() == [[1, 2, 5], [3, 4, 6]]


@pytest.mark.parametrize(
    ("fields", "bottoms", "message"),
    [
        (
            "concat_param { axis: 1 concat_dim: 1 }",
            [normal(2, 3)],
            "got axis 1 and concat_dim 1, expected one of them",
        ),
        (
            "",
            [normal(2, 3, 4), normal(2, 3, 5)],
            "bottom 1 has shape (2, 3, 5), bottom 0 has (2, 3, 4)",
        ),
        ("", [normal(2, 3, 4), normal(2, 3)], "bottom 1 has shape (2, 3)"),
        ("concat_param { axis: 2 }", [normal(2, 3)], "axis 2 does not exist"),
        ("concat_param { concat_dim: 3 }", [normal(2, 3)], "axis 3 does not exist"),
    ],
)
def test_what_cannot_be_joined_is_refused(fields, bottoms, message):
    with pytest.raises(DescriptionError, match=re.escape(message)):
        Trial(Case("Concat", fields, bottoms, [(2, 3)]))
