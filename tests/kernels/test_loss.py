import numpy as np
import pytest

from cgdnn.kernels import loss
from tests.kernels.agree import assert_agrees

RNG = np.random.default_rng(2)
SHAPE = (3, 2, 5, 4)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])


def labels(classes=5):
    return RNG.integers(0, classes, size=(3, 2, 4)).astype(float)


def run_loss(x, label, has_ignore=0, ignore=0):
    x = np.array(x, float).reshape(len(label), 1, -1, 1)
    prob, partial = np.empty_like(x), np.zeros((1, 2))
    label = np.array(label, float).reshape(-1, 1, 1)
    status = loss.softmax_loss_forward(
        x, label, prob, partial, has_ignore, ignore, 0, 0, len(label)
    )
    return status, partial[0].tolist()


def test_loss_of_even_scores_is_log_of_the_classes():
    status, (total, count) = run_loss([[0, 0, 0, 0], [1, 1, 1, 1]], [3, 0])
    assert (status, count) == (0, 2)
    assert total == pytest.approx(2 * np.log(4))


def test_probability_is_clamped_at_the_smallest_float():
    _, (total, _) = run_loss([[1000, 0]], [1])
    assert total == pytest.approx(87.3365, abs=1e-4)


def test_nan_score_gives_nan_loss():
    assert np.isnan(run_loss([[np.nan, 0]], [1])[1][0])


def test_ignored_label_counts_nothing_whatever_it_is():
    assert run_loss([[0, 0], [0, 0]], [-1, 0], 1, -1)[1][1] == 1
    assert run_loss([[0, 0]], [255], 1, 255) == (0, [0.0, 0.0])


@pytest.mark.parametrize("label", [-1.0, 2.0, 1.5, np.nan, np.inf, -0.5])
def test_status_tells_index_and_value_of_a_bad_label(label):
    status, _ = run_loss([[0, 0], [0, 0]], [1, label])
    assert (status >> 32) - 1 == 1
    value = np.array([status & 0xFFFFFFFF], np.uint32).view(np.float32)[0]
    np.testing.assert_equal(float(value), label)


@DTYPES
@pytest.mark.parametrize("span", [(0, 3), (1, 2)])
@pytest.mark.parametrize("ignore", [(0, 0), (1, 2)])
def test_softmax_loss_forward_agrees(dtype, span, ignore):
    arrays = RNG.normal(size=SHAPE), labels(), np.full(SHAPE, 9.0), np.full((3, 2), 9.0)
    assert_agrees(loss.softmax_loss_forward, *arrays, *ignore, 1, *span, dtype=dtype)


@DTYPES
@pytest.mark.parametrize("span", [(0, 3), (1, 2)])
@pytest.mark.parametrize("ignore", [(0, 0), (1, 2)])
def test_softmax_loss_backward_agrees(dtype, span, ignore):
    prob = RNG.dirichlet(np.ones(5), size=(3, 2, 4)).transpose(0, 1, 3, 2)
    arrays = prob, labels(), np.array([7.0]), np.array([0.5]), np.full(SHAPE, 9.0)
    assert_agrees(loss.softmax_loss_backward, *arrays, *ignore, *span, dtype=dtype)


@DTYPES
@pytest.mark.parametrize("divisor", [-1.0, 6.0, 0.0])
@pytest.mark.parametrize("count", [3, 0])
def test_loss_finish_agrees(dtype, divisor, count):
    partial = np.array([[1.5, count], [2.5, 2 * count]])
    assert_agrees(loss.loss_finish, partial, np.zeros(1), np.zeros(1), divisor, dtype=dtype)


@DTYPES
def test_euclidean_agrees(dtype):
    a, b = RNG.normal(size=(2, 4, 7))
    arrays = a, b, np.full((4, 7), 9.0), np.full((2, 1), 9.0)
    assert_agrees(loss.euclidean_forward, *arrays, 1, 1, 3, dtype=dtype)
    arrays = a, np.array([0.5]), np.full((4, 7), 9.0)
    assert_agrees(loss.euclidean_backward, *arrays, -0.25, 1, 3, dtype=dtype)


def run_accuracy(x, label, top_k=1):
    x = np.array([x], float).reshape(1, 1, -1, 1)
    partial = np.zeros((1, 2))
    loss.accuracy_forward(x, np.array([[[label]]], float), partial, top_k, 0, 0, 0, 0, 1)
    return partial[0, 0]


def test_a_tie_counts_against_the_true_class():
    assert run_accuracy([1, 1, 0], 0) == 0
    assert run_accuracy([1, 1, 0], 0, top_k=2) == 1


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_nan_score_is_never_right(top_k):
    assert run_accuracy([np.nan, 1, 0], 0, top_k) == 0


def test_a_rival_that_is_nan_counts_as_better():
    assert run_accuracy([1, np.nan, 0], 0) == 0


def test_accuracy_reports_a_bad_label():
    x, partial = np.zeros((1, 1, 3, 1)), np.zeros((1, 2))
    status = loss.accuracy_forward(x, np.full((1, 1, 1), 3.0), partial, 1, 0, 0, 0, 0, 1)
    assert status >> 32 == 1


@DTYPES
@pytest.mark.parametrize("columns", [2, 12])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("ignore", [(0, 0), (1, 2)])
def test_accuracy_forward_agrees(dtype, columns, top_k, ignore):
    arrays = RNG.normal(size=SHAPE), labels(), np.full((3, columns), 9.0)
    assert_agrees(loss.accuracy_forward, *arrays, top_k, *ignore, 2, 0, 2, dtype=dtype)


@DTYPES
def test_accuracy_finish_agrees_and_gives_0_for_absent_classes(dtype):
    partial = np.array([[0, 0, 1, 0, 2, 0], [0, 0, 1, 0, 1, 0]], float)
    assert_agrees(loss.accuracy_finish, partial, np.full(2, 9.0), 2, 4, dtype=dtype)
