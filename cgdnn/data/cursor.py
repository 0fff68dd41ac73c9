"""What a source of batches is: a pure function from a record position to a batch.

Positions count records from the start of training and never wrap; the source does (record
``position % len``). A batch, random crops and shuffles included, depends on its position alone, so
a reader can be put anywhere and gives the bits that an uninterrupted one would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Draw = Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.uint64]]
"""``draw(stream, indices)`` returns 32 random bits for each index, as
``functools.partial(uniform_u32, key_of(seed, layer_name))`` does."""


class BatchSource(Protocol):
    """Batches that can be read from any record position.

    Attributes
    ----------
    shapes : list of tuple of int
        Shape of each array of a batch; the first axis is the batch size.
    dtype : numpy.dtype
        The float type that holds the stored values without loss.
    warnings : list of str
        What is odd but usable, known once the source is open.
    seconds : dict
        Time that `read_batch` has taken so far, by stage, such as "decode".
    """

    shapes: list[tuple[int, ...]]
    dtype: np.dtype[Any]
    warnings: list[str]
    seconds: dict[str, float]

    @property
    def entries(self) -> int:
        """Number of records; an epoch."""

    def read_batch(self, position: int, out: Sequence[npt.NDArray[Any]]) -> None:
        """Fill the arrays `out` (float32 or float64, of `shapes`) with the batch at `position`.

        Raises
        ------
        DataError
            A record cannot be read; the message names file, record and key.
        """

    def close(self) -> None:
        """Give files back; closing twice is fine."""


def permutation(draw: Draw, stream: int, count: int) -> npt.NDArray[np.int64]:
    """Return a random order of ``range(count)`` that depends on `draw` and `stream` only."""
    return np.argsort(draw(stream, np.arange(count)), kind="stable")
