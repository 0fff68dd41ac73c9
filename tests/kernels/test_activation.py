import numpy as np
import pytest

from cgdnn.kernels import activation as kernels
from tests.kernels.agree import assert_agrees

RNG = np.random.default_rng(3)
SHAPE = (4, 37)
X, DY = RNG.normal(size=SHAPE), RNG.normal(size=SHAPE)
Y = np.tanh(X) / 2 + 0.5
TYPES = ["float32", "float64"]


def row(*values, dtype="float64"):
    return np.array([values], dtype)


def test_relu_of_known_values():
    x, y = row(-2.0, 0.0, 3.0, np.nan, np.inf), row(*[9.0] * 5)
    kernels.relu_forward(x, y, 0.0, 0, 1)
    np.testing.assert_array_equal(y, row(0, 0, 3, np.nan, np.inf))
    assert not np.signbit(y[0, :3]).any()
    kernels.relu_forward(x, y, 0.5, 0, 1)
    np.testing.assert_array_equal(y, row(-1, 0, 3, np.nan, np.inf))


def test_relu_passes_no_gradient_at_zero():
    dx = row(9.0, 9.0, 9.0)
    kernels.relu_backward(row(-1.0, 0.0, 1.0), row(5.0, 5.0, 5.0), dx, 0.0, 0, 1)
    assert dx.tolist() == [[0, 0, 5]]
    kernels.relu_backward(row(-1.0, 0.0, 1.0), row(5.0, 5.0, 5.0), dx, 0.2, 0, 1)
    np.testing.assert_allclose(dx, [[1, 1, 5]])


@pytest.mark.parametrize("dtype", TYPES)
def test_sigmoid_and_tanh_of_known_values(dtype):
    x = row(0.0, np.log(3.0), 1000.0, -1000.0, np.nan, dtype=dtype)
    y = np.empty_like(x)
    kernels.sigmoid_forward(x, y, 0, 1)
    np.testing.assert_allclose(y, row(0.5, 0.75, 1, 0, np.nan), rtol=1e-6)
    kernels.tanh_forward(x, y, 0, 1)
    np.testing.assert_allclose(y, row(0, 0.8, 1, -1, np.nan), rtol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (kernels.relu_forward, (X, DY, 0.0)),
        (kernels.relu_forward, (X, DY, -0.3)),
        (kernels.relu_backward, (X, DY, X, 0.0)),
        (kernels.relu_backward, (X, DY, X, 0.1)),
        (kernels.sigmoid_forward, (X, DY)),
        (kernels.sigmoid_backward, (Y, DY, X)),
        (kernels.tanh_forward, (X, DY)),
        (kernels.tanh_backward, (Y, DY, X)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_agrees_with_reference(kernel, arguments, dtype):
    assert_agrees(kernel, *arguments, 1, 3, dtype=dtype)


@pytest.mark.parametrize(
    ("kernel", "numbers"),
    [
        (kernels.relu_forward, (0.1,)),
        (kernels.sigmoid_forward, ()),
        (kernels.tanh_forward, ()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_forward_in_place_gives_the_same_bits(kernel, numbers):
    apart, inside = np.empty_like(X), X.copy()
    kernel(X, apart, *numbers, 0, 4)
    kernel(inside, inside, *numbers, 0, 4)
    np.testing.assert_array_equal(inside, apart)


@pytest.mark.parametrize(
    ("kernel", "numbers"),
    [
        (kernels.relu_backward, (0.1,)),
        (kernels.sigmoid_backward, ()),
        (kernels.tanh_backward, ()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_backward_in_place_gives_the_same_bits(kernel, numbers):
    apart, inside = np.empty_like(X), DY.copy()
    kernel(Y, DY, apart, *numbers, 0, 4)
    kernel(Y, inside, inside, *numbers, 0, 4)
    np.testing.assert_array_equal(inside, apart)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["sigmoid_forward", "tanh_forward"])
def test_error_in_units_of_the_last_place(dtype, name):
    tiny = -87 if dtype == "float32" else -708  # below, sigmoid is denormal
    sizes = np.logspace(-30, 2, 20001)
    x = np.concatenate([-sizes, sizes, np.linspace(tiny, 50, 20001)]).astype(dtype)
    x = np.maximum(x, np.array(tiny, dtype))
    y = np.empty((1, x.size), dtype)
    getattr(kernels, name)(x[None], y, 0, 1)
    wide = x.astype(np.longdouble)
    true = 1 / (1 + np.exp(-wide)) if name == "sigmoid_forward" else np.tanh(wide)
    assert (np.abs(y[0] - true) <= 4 * np.spacing(np.abs(true.astype(dtype)))).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_tanh_keeps_the_sign_of_zero_and_what_is_tiny(dtype):
    x = row(-0.0, 1e-40, -1e-40, dtype=dtype)
    y = np.empty_like(x)
    kernels.tanh_forward(x, y, 0, 1)
    np.testing.assert_array_equal(y, x)
    assert np.signbit(y[0]).tolist() == [True, False, True]
