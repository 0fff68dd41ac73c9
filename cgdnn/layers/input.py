"""Layers that make blobs without reading files."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import numpy.typing as npt

from cgdnn.layers._base import (
    COUNTER,
    Buffer,
    Count,
    Layer,
    Operands,
    Shape,
    Step,
    exactly,
    write_all,
)
from cgdnn.layers._fillers import check_filler_fits, filling
from cgdnn.proto.cgdnn_pb2 import BlobShape, DummyDataParameter, FillerParameter


class Input(Layer):
    """Declare blobs that the user fills before a forward pass.

    Field of ``input_param``: ``shape``, once for all tops or once for each
    (Caffe, input_layer.cpp). The forward pass does nothing.
    """

    bottoms: ClassVar[Count] = exactly(0)
    tops: ClassVar[Count] = Count(1, None)
    differentiable: ClassVar[bool] = False

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the declared shapes."""
        shapes = self.node.param.input_param.shape
        return [
            _blob_shape(self, _one_each(self, shapes, top, "input_param", "shape"))
            for top in range(len(self.node.tops))
        ]

    def forward(self, operands: Operands) -> list[Step]:
        """Return no step."""
        return []

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return no step."""
        return []


class DummyData(Layer):
    """Make blobs with a filler, for tests and timing.

    Fields of ``dummy_data_param``: ``shape``, or the older ``num``, ``channels``, ``height`` and
    ``width``, each once for all tops or once for each; ``data_filler`` likewise (default:
    constant 0). A top with a constant filler is filled once, so that what a user writes to it
    stays; any other is filled anew in every forward pass, with random numbers that depend on the
    seed, the layer's name, the top and the number of the pass (Caffe, dummy_data_layer.cpp).
    """

    bottoms: ClassVar[Count] = exactly(0)
    tops: ClassVar[Count] = Count(1, None)
    differentiable: ClassVar[bool] = False

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the declared shapes."""
        param = self.node.param.dummy_data_param
        legacy = [len(getattr(param, name)) > 0 for name in _LEGACY]
        if any(legacy) and len(param.shape) > 0:
            raise self.error(
                "got both shape and the older num, channels, height, width, expected one form. "
                "Remove the older fields.",
                "dummy_data_param",
                "shape",
            )
        tops = range(len(self.node.tops))
        fillers = param.data_filler or [FillerParameter()]
        self._fillers = [
            _one_each(self, fillers, top, "dummy_data_param", "data_filler") for top in tops
        ]
        self._filled: dict[int, int] = {}
        if any(legacy):
            shapes = [self._legacy_shape(param, top) for top in tops]
        else:
            shapes = [
                _blob_shape(self, _one_each(self, param.shape, top, "dummy_data_param", "shape"))
                for top in tops
            ]
        for filler, shape in zip(self._fillers, shapes, strict=True):
            check_filler_fits(self.node, filler, shape)
        return shapes

    def _legacy_shape(self, param: DummyDataParameter, top: int) -> Shape:
        return tuple(
            int(_one_each(self, getattr(param, name), top, "dummy_data_param", name))
            for name in _LEGACY
        )

    def forward(self, operands: Operands) -> list[Step]:
        """Return a step for each top."""
        steps = []
        for top, (buffer, filler) in enumerate(zip(operands.top, self._fillers, strict=True)):
            if filler.type == "constant":
                steps.append(self._fill_once(top, buffer, filler.value))
            else:
                way = filling(filler, buffer.shape)
                steps.append(way.step(buffer, operands.key ^ top, COUNTER))
        return steps

    def _fill_once(self, top: int, buffer: Buffer, value: float) -> Step:
        def fill_once(array: npt.NDArray[Any]) -> None:
            if self._filled.get(top) != array.ctypes.data:
                array[...] = value
                self._filled[top] = array.ctypes.data

        return Step(fill_once, [write_all(buffer)], cost=0.1 * prod(buffer.shape))

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return no step."""
        return []


_LEGACY = ("num", "channels", "height", "width")


def _one_each(layer: Layer, values: Sequence[Any], top: int, *fields: str) -> Any:
    """Return the value for this top of a field that is given once, or once for each top."""
    if len(values) not in (1, len(layer.node.tops)):
        raise layer.error(
            f"{fields[-1]} is given {len(values)} time(s), expected once, or once for each of "
            f"{len(layer.node.tops)} tops. Add or remove some.",
            *(fields if values else fields[:1]),
        )
    return values[top % len(values)]


def _blob_shape(layer: Layer, shape: BlobShape) -> Shape:
    for dim in shape.dim:
        if dim < 1:
            raise layer.error(f"got dim {dim} in a shape, expected 1 or more. Correct it.")
    return tuple(shape.dim)
