import pytest

from cgdnn.errors import DescriptionError
from tests.layers.contract import Case, Trial, normal

CASES = [
    Case("Softmax", bottoms=[normal(3, 5)], tops=[(3, 5)]),
    Case("Softmax", "softmax_param { axis: 2 }", [normal(3, 2, 4, 2)], [(3, 2, 4, 2)]),
    Case("Softmax", "softmax_param { axis: -1 engine: CAFFE }", [normal(3, 2, 4)], [(3, 2, 4)]),
    Case("Softmax", "softmax_param { axis: 0 }", [normal(5, 3)], [(5, 3)]),
]


def test_an_axis_that_is_not_there_is_refused():
    with pytest.raises(DescriptionError, match=r"axis 2 does not exist .*\(3, 5\).* -2 to 1"):
        Trial(Case("Softmax", "softmax_param { axis: 2 }", [normal(3, 5)], [(3, 5)]))
