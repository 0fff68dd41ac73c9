import numpy as np
import pytest

from cgdnn.errors import DataError, DescriptionError
from tests.layers.contract import Case, Trial, given, labels, normal

IMAGES, MAP = normal(3, 4, 2, 3), labels(4, 3, 1, 2, 3)
CASES = [
    Case("Accuracy", bottoms=[normal(6, 3), labels(3, 6)], tops=[()]),
    Case("Accuracy", "accuracy_param { top_k: 2 }", [normal(6, 3), labels(3, 6)], [(), (3,)]),
    Case("Accuracy", "accuracy_param { ignore_label: 1 }", [IMAGES, MAP], [(), (4,)]),
    Case("Accuracy", "accuracy_param { axis: -1 }", [normal(3, 2, 4), labels(4, 3, 2)], [()]),
    Case("Accuracy", "accuracy_param { axis: 0 }", [normal(5, 3), labels(5, 1, 3)], [()]),
]
SCORES = [[3, 2, 1], [3, 2, 1], [1, 2, 3], [2, 2, 1]]


def run(label, fields="", tops=1, scores=SCORES):
    case = Case(
        "Accuracy",
        f"accuracy_param {{ {fields} }}",
        [given(scores), given(label)],
        [(), (np.shape(scores)[1],)][:tops],
    )
    return Trial(case).forward()


def test_known_scores():
    assert run([0, 1, 2, 0])[0] == 0.5  # the last one is a tie
    assert run([0, 1, 2, 0], "top_k: 2")[0] == 1.0


def test_ignored_labels_do_not_count():
    assert run([0, 7, 2, 7], "ignore_label: 7")[0] == 1.0
    assert run([7, 7, 7, 7], "ignore_label: 7")[0] == 0.0


def test_accuracy_of_each_class():
    total, classes = run([0, 0, 1, 1], tops=2)
    assert total == 0.5
    assert classes.tolist() == [1.0, 0.0, 0.0]


def test_nan_scores_are_never_right():
    assert run([0, 1, 2, 0], scores=np.full((4, 3), np.nan))[0] == 0.0


def test_a_label_that_is_no_class_is_named():
    with pytest.raises(DataError, match=r"sample 2 of the batch: label 3 is outside 0\.\.2"):
        run([0, 1, 3, 0])


@pytest.mark.parametrize("top_k", [0, 4])
def test_top_k_must_be_possible(top_k):
    with pytest.raises(DescriptionError, match=rf"got top_k {top_k}, expected 1 to 3"):
        run([0, 1, 2, 0], f"top_k: {top_k}")


def test_label_count_must_match():
    with pytest.raises(DescriptionError, match=r"got shape \(3,\) .* expected \(4, 1\)"):
        run([0, 1, 2])
