"""Check analytic gradients against central differences, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def numeric_gradient(
    objective: Callable[[], float], array: np.ndarray, step: float = 1e-4
) -> np.ndarray:
    """Return ``(f(a + step) - f(a - step)) / (2 step)`` for every element of `array`.

    `objective` reads `array`, which is changed in place and put back.
    """
    gradient = np.empty(array.shape)
    for index in np.ndindex(*array.shape):
        value = array[index]
        array[index] = value + step
        above = objective()
        array[index] = value - step
        below = objective()
        array[index] = value
        gradient[index] = (above - below) / (2 * step)
    return gradient


def assert_gradient(
    name: str,
    objective: Callable[[], float],
    array: np.ndarray,
    analytic: np.ndarray,
    *,
    step: float = 1e-4,
    tolerance: float = 1e-6,
) -> None:
    """Compare `analytic` with the numeric gradient of `objective` by `array`.

    The difference may be `tolerance` times the larger of the two magnitudes, or times 1 where both
    are smaller. The objective must be smooth within `step` of `array`.

    Raises
    ------
    AssertionError
        Names the element, its value and both gradients.
    """
    assert array.dtype == np.float64, f"{name}: checked in {array.dtype}, expected float64"
    assert analytic.shape == array.shape, f"{name}: gradient of shape {analytic.shape}"
    numeric = numeric_gradient(objective, array, step)
    scale = np.maximum(1.0, np.maximum(np.abs(analytic), np.abs(numeric)))
    wrong = ~(np.abs(analytic - numeric) <= tolerance * scale)  # true for NaN as well
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}{list(index)}: gradient is {analytic[index]!r}, but differences give "
            f"{numeric[index]!r} (value {array[index]!r}; {wrong.sum()} of {wrong.size} wrong)"
        )
