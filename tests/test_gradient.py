import numpy as np
import pytest

from tests.gradient import assert_gradient, numeric_gradient

X = np.array([[0.5, -1.0], [2.0, 0.0]])


def cubes(x):
    return lambda: float((x**3).sum())


def test_numeric_gradient_of_cubes_and_the_array_is_put_back():
    x = X.copy()
    np.testing.assert_allclose(numeric_gradient(cubes(x), x), 3 * X**2, atol=1e-7)
    np.testing.assert_array_equal(x, X)


def test_a_right_gradient_passes():
    x = X.copy()
    assert_gradient("x", cubes(x), x, 3 * x**2)


WRONG = {
    "sign": -3 * X**2,
    "one element": 3 * X**2 + [[0, 0], [0, 1e-3]],
    "factor": 3.001 * X**2,
    "nan": np.where(X == 2, np.nan, 3 * X**2),
    "zero": 0 * X,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_gradient_is_caught(wrong):
    x = X.copy()
    with pytest.raises(AssertionError, match=r"x\[\d, \d\]: gradient is"):
        assert_gradient("x", cubes(x), x, WRONG[wrong])


def test_the_message_names_the_element_and_both_gradients():
    x = X.copy()
    with pytest.raises(AssertionError) as caught:
        assert_gradient("w", cubes(x), x, WRONG["one element"])
    assert str(caught.value).startswith("w[1, 1]: gradient is np.float64(0.001)")
    assert "1 of 4 wrong" in str(caught.value)


def test_small_gradients_are_compared_absolutely():
    x = np.array([1e-5])
    assert_gradient("x", cubes(x), x, np.zeros(1))


def test_float32_is_refused():
    x = X.astype(np.float32)
    with pytest.raises(AssertionError, match="expected float64"):
        assert_gradient("x", cubes(x), x, 3 * x**2)
