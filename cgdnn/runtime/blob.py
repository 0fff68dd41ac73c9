"""Blobs and parameters as users see them: NumPy arrays in N, C, H, W order."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from cgdnn.errors import UsageError

Array = npt.NDArray[Any]


class Blob:
    """A named array with its gradient.

    `data` and `diff` are live, writable arrays: writing into them and running from the next layer
    on works. They stay the same arrays until the net is reshaped.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], fetch: Callable[[str], Array], index: int
    ) -> None:
        self.name = name
        self.index = index
        self._shape = shape
        self._fetch = fetch

    @property
    def data(self) -> Array:
        """The values."""
        return self._fetch("data")

    @data.setter
    def data(self, value: npt.ArrayLike) -> None:
        self.assign("data", value)

    @property
    def diff(self) -> Array:
        """The gradient of the loss with respect to the values."""
        return self._fetch("diff")

    @diff.setter
    def diff(self, value: npt.ArrayLike) -> None:
        self.assign("diff", value)

    def assign(self, kind: str, value: npt.ArrayLike) -> None:
        """Copy numbers of exactly this shape into "data" or "diff".

        Raises
        ------
        UsageError
            `value` is of another shape (nothing is broadcast), or holds no real numbers.
        """
        target = self._fetch(kind)
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise UsageError(f'blob "{self.name}": got no array: {error}.') from error
        if array.shape != target.shape:
            raise UsageError(
                f'blob "{self.name}": got an array of shape {array.shape}, expected '
                f"{target.shape}. To change the shape, call reshape on the input blob first."
            )
        if array.dtype.kind not in "fiub":
            raise UsageError(
                f'blob "{self.name}": got an array of {array.dtype}, expected real numbers. '
                "Convert it first."
            )
        target[...] = array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; after `reshape` the one that `Net.reshape` will give it."""
        return self._shape

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self._shape)

    def reshape(self, *shape: int) -> None:
        """Ask for another shape, which holds from the next `Net.reshape` (or forward) on.

        Raises
        ------
        UsageError
            A dimension is negative.
        """
        if any(dimension < 0 for dimension in shape):
            raise UsageError(
                f'blob "{self.name}": got shape {shape}, expected no negative dimension. '
                "Give the whole shape."
            )
        self._shape = tuple(int(dimension) for dimension in shape)

    def __repr__(self) -> str:
        return f"Blob({self.name!r}, shape={self._shape})"
