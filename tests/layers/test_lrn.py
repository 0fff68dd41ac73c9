import re

import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from tests.layers.contract import Case, Trial, given, normal

SHAPE = (2, 6, 3, 4)
CASES = [
    Case("LRN", bottoms=[normal(*SHAPE)], tops=[SHAPE]),
    Case(
        "LRN",
        "lrn_param { local_size: 3 alpha: 2 beta: 0.6 k: 1.5 engine: CAFFE }",
        [normal(*SHAPE)],
        [SHAPE],
    ),
    Case(
        "LRN", "lrn_param { local_size: 3 norm_region: WITHIN_CHANNEL }", [normal(*SHAPE)], [SHAPE]
    ),
    Case(
        "LRN",
        "lrn_param { local_size: 5 alpha: 3 beta: 0.5 norm_region: WITHIN_CHANNEL }",
        [normal(*SHAPE)],
        [SHAPE],
    ),
]


def test_k_counts_across_channels_and_not_within_one():
    def top(fields):
        text = f"lrn_param {{ local_size: 1 {fields} }}"
        return Trial(Case("LRN", text, [given([[[[2]]]])], [(1, 1, 1, 1)])).forward()[0].item()

    assert np.isclose(top("beta: 1 k: 4"), 2 / (4 + 4))
    assert np.isclose(top("beta: 1 k: 4 norm_region: WITHIN_CHANNEL"), 2 / (1 + 4))


@pytest.mark.parametrize(
    ("fields", "shape", "message"),
    [
        (
            "lrn_param { local_size: 4 }",
            SHAPE,
            "got local_size 4, expected an odd number. Use 5",
        ),
        ("lrn_param { local_size: 0 }", SHAPE, "got local_size 0, expected an odd number. Use 1"),
        ("", (2, 3), "got a bottom of shape (2, 3), expected four axes"),
    ],
)
def test_what_cannot_be_normalized_is_refused(fields, shape, message):
    with pytest.raises(DescriptionError, match=re.escape(message)):
        Trial(Case("LRN", fields, [normal(*shape)], [shape]))
