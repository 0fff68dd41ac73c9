import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from tests.layers.contract import Case, Trial, given, normal, pieces, positive

SUMS = [positive(3), positive(3), given([1.5])]
GLOBAL = "batch_norm_param { use_global_stats: true }"
CASES = [
    Case("BatchNorm", bottoms=[normal(5, 3)], tops=[(5, 3)], params=SUMS),
    Case("BatchNorm", bottoms=[normal(3, 3, 2, 3)], tops=[(3, 3, 2, 3)], params=SUMS),
    Case(
        "BatchNorm",
        "batch_norm_param { eps: 0.1 moving_average_fraction: 0.5 }",
        [normal(2, 3, 2, 1, 2)],
        [(2, 3, 2, 1, 2)],
        params=SUMS,
    ),
    Case(
        "BatchNorm",
        bottoms=[normal(6)],
        tops=[(6,)],
        params=[positive(1), positive(1), positive(1)],
    ),
    Case("BatchNorm", GLOBAL, [normal(4, 3, 2)], [(4, 3, 2)], params=SUMS),
    Case("BatchNorm", bottoms=[normal(4, 3)], tops=[(4, 3)], phase="TEST", params=SUMS),
    Case(
        "BatchNorm",
        "batch_norm_param { use_global_stats: false }",
        [normal(4, 3)],
        [(4, 3)],
        phase="TEST",
        params=SUMS,
    ),
]
X = [[[1.0, 3.0]], [[5.0, 7.0]]]  # mean 4, variance 5, unbiased 20 / 3


def run(fields="", phase="TRAIN", params=((0.0,), (0.0,), (0.0,)), x=X):
    case = Case(
        "BatchNorm",
        f"batch_norm_param {{ {fields} }}",
        [given(x)],
        [np.shape(x)],
        phase,
        params=[given(p) for p in params],
    )
    trial = Trial(case)
    return trial.forward()[0], [param.data.copy() for param in trial.params], trial


def test_training_normalizes_the_batch():
    y, _, _ = run("eps: 4")
    np.testing.assert_allclose(y.ravel(), [-1, -1 / 3, 1 / 3, 1])


def test_training_moves_the_running_sums():
    _, (mean, variance, factor), trial = run("moving_average_fraction: 0.5", params=[[8], [4], [2]])
    assert (mean[0], variance[0], factor[0]) == (8.0, pytest.approx(2 + 20 / 3), 2.0)
    trial.forward()
    assert trial.params[0].data[0] == 8.0
    assert trial.params[2].data[0] == 2.0


def test_one_value_a_channel_has_variance_0_uncorrected():
    y, (_, variance, _), _ = run(x=[[5.0, 6.0]], params=[[0, 0], [0, 0], [0]])
    assert y.ravel().tolist() == [0.0, 0.0]
    assert variance.tolist() == [0.0, 0.0]


def test_testing_uses_the_running_sums_and_keeps_them():
    y, params, _ = run("eps: 1", "TEST", [[6.0], [24.0], [3.0]])
    np.testing.assert_allclose(y.ravel(), (np.ravel(X) - 2) / 3)
    assert [p[0] for p in params] == [6.0, 24.0, 3.0]


def test_testing_before_any_training_divides_by_eps_alone():
    y, _, _ = run("eps: 4", "TEST")
    np.testing.assert_allclose(y.ravel(), np.ravel(X) / 2)


def test_running_sums_are_never_learned():
    _, _, trial = run()
    assert trial.learned() == []


def test_any_cut_gives_nearly_the_same_statistics_and_always_the_same_bits():
    x = np.random.default_rng(3).normal(100, 1, size=(40, 2, 5))
    results = []
    for nanoseconds in (1e30, 1e-30, 1e-30):
        with pieces(nanoseconds):
            results.append(run(x=x, params=[[0, 0], [0, 0], [0]])[0])
    np.testing.assert_allclose(results[1], results[0], atol=1e-11)
    np.testing.assert_array_equal(results[1], results[2])


def test_a_learning_rate_for_the_sums_is_refused():
    case = Case("BatchNorm", "param { lr_mult: 1 }", [normal(2, 3)], [(2, 3)])
    with pytest.raises(DescriptionError, match=r"running sums .* got lr_mult 1, expected 0"):
        Trial(case)


def test_zero_rates_as_caffe_writes_them_are_accepted():
    fields = "param { lr_mult: 0 } param { lr_mult: 0 } param { lr_mult: 0 }"
    Trial(Case("BatchNorm", fields, [normal(2, 3)], [(2, 3)])).forward()
