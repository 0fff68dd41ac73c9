"""Fillers: how a parameter or a dummy blob gets its first values.

A filler is described by a ``FillerParameter`` and lowered to one kernel over an axis that may be
cut, so that a DummyData layer fills in parallel and `fill` runs the very same code. Every value
depends on (filler, shape, key, counter) and its index only. The rules are those of Caffe's
filler.hpp; fans are ``count / shape[0]`` (in) and ``count / shape[1]`` (out).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from cgdnn.errors import DescriptionError
from cgdnn.kernels import elementwise
from cgdnn.kernels import fill as kernels
from cgdnn.kernels._jit import Kernel
from cgdnn.layers._base import BEGIN, END, Argument, Buffer, Shape, Step, write
from cgdnn.netdef.graph import Node
from cgdnn.proto.cgdnn_pb2 import FillerParameter

_BLOCK = 1 << 18
"""Numbers that `fill` draws at a time."""
TYPES = ("bilinear", "constant", "gaussian", "msra", "positive_unitball", "uniform", "xavier")


@dataclass(frozen=True)
class Filling:
    """A filler for one shape: the kernel, the view it works on, and its numbers.

    The kernel takes the viewed array, the numbers, then (where `random`) a key, a counter and the
    index of the first row, then a range of axis 0 of the view.
    """

    kernel: Kernel
    view: Shape
    numbers: tuple[float, ...] = ()
    random: bool = True

    def step(self, buffer: Buffer, key: int, counter: Argument) -> Step:
        """Return the step that fills `buffer`."""
        stream: list[Argument] = [key, counter, 0] if self.random else []
        return Step(
            self.kernel,
            [write(buffer, self.view), *self.numbers, *stream, BEGIN, END],
            extent=self.view[0],
            cost=20.0 * prod(self.view[1:]),
        )


def filling(filler: FillerParameter, shape: Shape) -> Filling:
    """Return how to fill an array of `shape`.

    Raises
    ------
    DescriptionError
        The type is unknown, or cannot fill this shape.
    """
    problem = filler_problem(filler)
    if problem is not None:
        raise DescriptionError(problem)
    count = prod(shape)
    if filler.type == "constant":
        return Filling(elementwise.fill, (count, 1), (filler.value,), random=False)
    if filler.type == "uniform":
        return Filling(kernels.fill_uniform, (count,), (filler.min, filler.max))
    if filler.type == "gaussian":
        keep = filler.sparse / _axis(shape, 0) if filler.sparse >= 0 else 1.0
        return Filling(kernels.fill_gaussian, (count,), (filler.mean, filler.std, keep))
    if filler.type == "positive_unitball":
        return Filling(kernels.fill_unitball, (_axis(shape, 0), count // _axis(shape, 0)))
    if filler.type == "xavier":
        bound = sqrt(3.0 / _fan(filler, shape))
        return Filling(kernels.fill_uniform, (count,), (-bound, bound))
    if filler.type == "msra":
        return Filling(kernels.fill_gaussian, (count,), (0.0, sqrt(2.0 / _fan(filler, shape)), 1.0))
    if len(shape) != 4 or shape[2] != shape[3]:
        raise DescriptionError(
            f'filler "bilinear" fills square kernels only; got shape {shape}, expected 4 axes with '
            "equal height and width. Use another filler."
        )
    return Filling(kernels.fill_bilinear, (prod(shape[:2]), *shape[2:]), random=False)


def fill(filler: FillerParameter, array: npt.NDArray[Any], key: int, counter: int = 0) -> None:
    """Fill an array with first values.

    They are drawn in float64, block by block, so that a large array is never held twice.

    Parameters
    ----------
    filler : FillerParameter
    array : array of any real type, C-contiguous
    key : int
        Signed 64-bit key of the random numbers, as `cgdnn.kernels.random.key_of` makes it.
    counter : int
        Other counters give other values under the same key.

    Raises
    ------
    DescriptionError
        The type is unknown, or cannot fill this shape.
    """
    way = filling(filler, array.shape)
    target = array.reshape(way.view)
    rows = max(1, _BLOCK // max(1, prod(way.view[1:])))
    block = np.empty((min(rows, len(target)), *way.view[1:]), np.float64)
    for first in range(0, len(target), rows):
        part = block[: len(target) - first]
        stream: list[Any] = [key, counter, first] if way.random else []
        way.kernel(part, *way.numbers, *stream, 0, len(part))
        target[first : first + rows] = part


def filler_problem(filler: FillerParameter) -> str | None:
    """Return what is wrong in a filler whatever it fills, or None."""
    if filler.type not in TYPES:
        close = difflib.get_close_matches(filler.type, TYPES, n=1)
        hint = f'Did you mean "{close[0]}"?' if close else "Use one of these."
        return (
            f'unknown filler type; got "{filler.type}", expected one of {", ".join(TYPES)}. {hint}'
        )
    if filler.sparse >= 0 and filler.type != "gaussian":
        return (
            f'filler "{filler.type}" knows no sparse; got {filler.sparse}, expected -1. '
            'Remove it, or use "gaussian".'
        )
    if filler.sparse < -1:
        return f"got sparse {filler.sparse}, expected -1 (off) or more. Correct it."
    return None


def check_fillers(node: Node) -> None:
    """Check every filler that a layer's description holds.

    Raises
    ------
    DescriptionError
        One is of unknown type or has a field that does not go with its type.
    """
    for path, filler in _fillers_in(node.param, ()):
        problem = filler_problem(filler)
        if problem is not None:
            raise DescriptionError(f"{node.at(*path)}: {node.label}: {problem}")


def check_filler_fits(node: Node, filler: FillerParameter, shape: Shape) -> None:
    """Check that a filler of a layer's description can fill `shape`.

    Raises
    ------
    DescriptionError
        It cannot.
    """
    try:
        filling(filler, shape)
    except DescriptionError as error:
        path = next(path for path, other in _fillers_in(node.param, ()) if other == filler)
        raise DescriptionError(f"{node.at(*path)}: {node.label}: {error}") from error


def _fillers_in(
    message: Message, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], FillerParameter]]:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        repeated = not isinstance(value, Message)
        for index, part in enumerate(value if repeated else [value]):
            place = (*path, field.name, index) if repeated else (*path, field.name)
            if isinstance(part, FillerParameter):
                yield (*place, "type"), part
            else:
                yield from _fillers_in(part, place)


def _axis(shape: Shape, axis: int) -> int:
    return shape[axis] if axis < len(shape) else 1


def _fan(filler: FillerParameter, shape: Shape) -> float:
    count = prod(shape)
    fan_in, fan_out = count / _axis(shape, 0), count / _axis(shape, 1)
    if filler.variance_norm == FillerParameter.FAN_OUT:
        return fan_out
    if filler.variance_norm == FillerParameter.AVERAGE:
        return (fan_in + fan_out) / 2
    return fan_in
