import numpy as np
import pytest

from cgdnn.errors import DataError, DescriptionError
from tests.layers.contract import Case, Trial, given, labels, normal

SCORES, LABELS = normal(3, 5), labels(5, 3)
IMAGES, MAP = normal(3, 4, 2, 3), labels(4, 3, 1, 2, 3)
CASES = [
    Case("SoftmaxWithLoss", bottoms=[SCORES, LABELS], tops=[()]),
    Case("SoftmaxWithLoss", bottoms=[SCORES, LABELS], tops=[(), (3, 5)], passive=[1]),
    Case("SoftmaxWithLoss", bottoms=[IMAGES, MAP], tops=[()]),
    Case(
        "SoftmaxWithLoss",
        "softmax_param { axis: -1 }",
        [normal(3, 2, 4), labels(4, 3, 2)],
        [()],
    ),
    Case("SoftmaxWithLoss", "softmax_param { axis: 0 }", [normal(5, 3), labels(5, 1, 3)], [()]),
    *(
        Case("SoftmaxWithLoss", f"loss_param {{ ignore_label: 2 {more} }}", [IMAGES, MAP], [()])
        for more in (
            "",
            "normalization: FULL",
            "normalization: BATCH_SIZE",
            "normalization: NONE",
            "normalize: true",
            "normalize: false",
        )
    ),
    Case("EuclideanLoss", bottoms=[normal(4, 3), normal(4, 3)], tops=[()]),
    Case("EuclideanLoss", bottoms=[normal(2, 3, 1, 2), normal(2, 3, 1, 2)], tops=[()]),
    Case("EuclideanLoss", bottoms=[normal(4), normal(4)], tops=[()]),
]


def run(scores, label, fields="", layer="SoftmaxWithLoss"):
    trial = Trial(Case(layer, fields, [given(scores), given(label)], [()]))
    return float(trial.forward()[0]), trial


def test_loss_of_known_probabilities():
    scores = np.log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    assert run(scores, [0, 2])[0] == pytest.approx(-(np.log(0.5) + np.log(0.8)) / 2)


NORMALIZERS = {
    "": 6,
    "normalization: VALID": 6,
    "normalization: FULL": 8,
    "normalization: BATCH_SIZE": 2,
    "normalization: NONE": 1,
    "normalize: true": 6,
    "normalize: false": 2,
    "normalize: false normalization: NONE": 1,
}


@pytest.mark.parametrize("fields", NORMALIZERS)
def test_normalizers_with_two_of_eight_labels_ignored(fields):
    scores, label = np.zeros((2, 3, 4)), [[0, 9, 1, 2], [9, 0, 0, 1]]
    loss, _ = run(scores, label, f"loss_param {{ ignore_label: 9 {fields} }}")
    assert loss == pytest.approx(6 * np.log(3) / NORMALIZERS[fields])


def test_normalizer_is_at_least_one():
    loss, trial = run(np.zeros((2, 3)), [-1, -1], "loss_param { ignore_label: -1 }")
    assert loss == 0.0
    assert (trial.backward()[0] == 0).all()


def test_loss_weight_scales_the_gradient():
    gradients = []
    for weight in (1.0, 0.25):
        _, trial = run(np.zeros((2, 3)), [0, 2])
        trial.weights = [np.array(weight)]
        gradients.append(trial.backward()[0])
    np.testing.assert_array_equal(gradients[1], gradients[0] / 4)


def test_second_top_is_the_softmax():
    case = Case("SoftmaxWithLoss", "", [given([[0, np.log(3)]]), given([1])], [(), (1, 2)])
    np.testing.assert_allclose(Trial(case).forward()[1], [[0.25, 0.75]])


@pytest.mark.parametrize(
    ("label", "text"),
    [(-1, "label -1 is outside 0..2"), (3, "label 3 is"), (1.5, "1.5 is not a whole number")],
)
def test_a_label_that_is_no_class_is_named(label, text):
    with pytest.raises(DataError) as caught:
        run(np.zeros((3, 3)), [0, label, 2])
    message = str(caught.value)
    assert text in message
    for part in (
        'layer "layer" (SoftmaxWithLoss): "bottom1", sample 1 of the batch',
        "expected a whole number in 0..2",
        'the range of "bottom0" (3 classes)',
    ):
        assert part in message


def test_a_bad_label_in_an_image_is_named_with_its_position():
    label = np.zeros((2, 2, 2))
    label[1, 0, 1] = 7
    with pytest.raises(DataError, match="sample 1, position 1 of the batch: label 7"):
        run(np.zeros((2, 3, 2, 2)), label)


def test_the_net_runs_on_after_a_bad_label():
    _, trial = run(np.zeros((2, 3)), [0, 1])
    trial.values[1][:] = 3
    with pytest.raises(DataError):
        trial.forward()
    trial.values[1][:] = 1
    assert float(trial.forward()[0]) == pytest.approx(np.log(3))


def test_too_few_labels_are_refused_with_the_shape_they_should_have():
    with pytest.raises(DescriptionError, match=r"got shape \(4,\).*expected \(4, 1, 6, 6\)"):
        run(np.zeros((4, 5, 6, 6)), np.zeros(4))


def test_euclidean_loss_of_known_values():
    loss, trial = run([[1, 2], [3, 4]], [[0, 2], [3, 1]], layer="EuclideanLoss")
    assert loss == 10 / 4
    trial.weights = [np.array(1.0)]
    first, second = trial.backward()
    np.testing.assert_array_equal(first, [[0.5, 0], [0, 1.5]])
    np.testing.assert_array_equal(second, -first)


def test_euclidean_loss_refuses_blobs_that_differ():
    with pytest.raises(DescriptionError, match=r"got \(2, 3\) and \(2, 4\)"):
        run(np.zeros((2, 3)), np.zeros((2, 4)), layer="EuclideanLoss")
