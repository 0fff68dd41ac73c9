"""Blobs and parameters as users see them: NumPy arrays in N, C, H, W order."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

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
        self._fetch("data")[...] = value

    @property
    def diff(self) -> Array:
        """The gradient of the loss with respect to the values."""
        return self._fetch("diff")

    @diff.setter
    def diff(self, value: npt.ArrayLike) -> None:
        self._fetch("diff")[...] = value

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
