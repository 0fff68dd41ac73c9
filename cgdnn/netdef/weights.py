"""Read and write weights and mean images: Caffe's .caffemodel and .binaryproto files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from cgdnn.errors import DataError, UsageError
from cgdnn.files import atomic_write_bytes
from cgdnn.netdef.text import Located, Place, is_binary
from cgdnn.netdef.upgrade import upgrade_net
from cgdnn.proto import cgdnn_pb2 as pb

_LEGACY_SIZES = ("num", "channels", "height", "width")

# Kind of binary file -> its message, and what tells that message from the others. In this order:
# a state starts with its iteration, a varint, where a net has a string.
_KINDS: dict[str, tuple[type[Message], Callable[[Any], bool]]] = {
    "a solver state": (
        pb.SolverState,
        lambda state: state.HasField("iter") and bool(state.learned_net or state.history),
    ),
    "weights": (pb.NetParameter, lambda net: bool(net.layer or net.layers)),
    "a mean image": (pb.BlobProto, lambda blob: bool(blob.data or blob.double_data)),
}

# Kind of file -> what to do with it.
_USES = {
    "a text file": "name it where a net or a solver is expected",
    "an HDF5 file": "only binary protobuf files can be read here",
    "a solver state": "give it as --snapshot",
    "weights": "give it as --weights",
    "a mean image": "name it as mean_file",
}


def read_weights(path: str | os.PathLike[str]) -> dict[str, list[npt.NDArray[Any]]]:
    """Read the parameters in a .caffemodel file of any age.

    Returns
    -------
    dict
        Layer name -> parameter arrays, float32, or float64 where the file holds doubles. Layers
        without parameters are left out.

    Raises
    ------
    UsageError
        The file is of another kind.
    DataError
        The file is missing, empty, cut short or contradicts itself.
    """
    net = upgrade_net(Located(load(path, "weights"), Place(os.fspath(path))))
    weights = {}
    for layer in net.message.layer:
        if layer.blobs:
            where = f'{os.fspath(path)}, layer "{layer.name}"'
            weights[layer.name] = [
                read_blob(blob, f"{where}, blob {i}") for i, blob in enumerate(layer.blobs)
            ]
    return weights


def write_weights(
    path: str | os.PathLike[str],
    net: pb.NetParameter,
    blobs: Mapping[str, Sequence[npt.NDArray[Any]]],
) -> None:
    """Write a .caffemodel file that Caffe reads too; the file is never torn.

    Parameters
    ----------
    path
        The file to write or replace.
    net
        The description to store; not changed.
    blobs
        Layer name -> parameter arrays, float32 or float64, in Caffe's shapes.
    """
    message = pb.NetParameter()
    message.CopyFrom(net)
    for layer in message.layer:
        del layer.blobs[:]
        layer.blobs.extend(write_blob(array) for array in blobs.get(layer.name, ()))
    atomic_write_bytes(path, message.SerializeToString())


def read_mean(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Read a mean image, as Caffe's compute_image_mean writes it.

    Returns
    -------
    ndarray
        Shape (C, H, W), float32.

    Raises
    ------
    UsageError
        The file is of another kind.
    DataError
        The file is missing, damaged, or holds no single image.
    """
    array = read_blob(load(path, "a mean image"), os.fspath(path))
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3:
        raise DataError(
            f"{os.fspath(path)}: holds an array of shape {array.shape}, expected a mean image of "
            "shape (channels, height, width)."
        )
    return array.astype(np.float32, copy=False)


def read_blob(blob: pb.BlobProto, where: str = "blob") -> npt.NDArray[Any]:
    """Return the values of `blob` as an array of their own.

    Blobs with `num`, `channels`, `height` and `width` instead of a shape are 4-D. The array is
    float32, or float64 when the values are in `double_data`.

    Raises
    ------
    DataError
        The number of values does not fit the shape; the message starts with `where`.
    """
    if any(blob.HasField(name) for name in _LEGACY_SIZES):
        shape = tuple(getattr(blob, name) for name in _LEGACY_SIZES)
    else:
        shape = tuple(blob.shape.dim)
    # Iterating over the values would make a Python object of each. Their packed bytes are the
    # end of the message that holds nothing else.
    kept, dtype = ("double_data", "<f8") if blob.double_data else ("data", "<f4")
    packed = pb.BlobProto()
    packed.CopyFrom(blob)
    for descriptor, _ in packed.ListFields():
        if descriptor.name != kept:
            packed.ClearField(descriptor.name)
    count = len(getattr(packed, kept))
    if count != math.prod(shape):
        raise DataError(
            f"{where}: has {count} values for the shape {shape}. The file is damaged or foreign."
        )
    data = packed.SerializeToString()
    offset = len(data) - count * np.dtype(dtype).itemsize
    return np.frombuffer(data, dtype, count, offset).reshape(shape).astype(dtype[1:])


def write_blob(array: npt.NDArray[Any]) -> pb.BlobProto:
    """Return `array`, float32 or float64, as a BlobProto."""
    blob = pb.BlobProto()
    blob.shape.SetInParent()
    blob.shape.dim.extend(array.shape)
    number, dtype = (8, "<f8") if array.dtype == np.float64 else (5, "<f4")
    values = np.ascontiguousarray(array, dtype).tobytes()
    if values:
        blob.MergeFromString(bytes([number << 3 | 2]) + _varint(len(values)) + values)
    return blob


def _varint(number: int) -> bytes:
    """Return `number` in protobuf's variable-length form: 7 bits a byte, lowest first."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def load(path: str | os.PathLike[str], kind: str) -> Any:
    """Read the message in the binary file `path`, which must be `kind` (a key of ``_KINDS``).

    Raises
    ------
    UsageError
        The file is of another known kind; the message says what it is for.
    DataError
        The file cannot be read, is empty or is no whole message.
    """
    name = os.fspath(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{Path(path).absolute()}: cannot be read: {error.strerror}.") from None
    if not data:
        raise DataError(f"{name}: is empty, expected {kind}. Its writing was probably cut off.")
    found, message = _recognise(data)
    if not found:
        raise DataError(
            f"{name}: is not {kind}, or is damaged or cut short ({len(data)} bytes). "
            "Use another copy."
        )
    if found != kind:
        raise UsageError(f"{name}: is {found}, expected {kind}; {_USES[found]}.")
    return message


def _recognise(data: bytes) -> tuple[str, Any]:
    """Return what kind of file (a key of ``_USES``, or nothing) `data` is, and its message."""
    if data.startswith(b"\x89HDF\r\n"):
        return "an HDF5 file", None
    if not is_binary(data):
        return "a text file", None
    for kind, (message_class, is_one) in _KINDS.items():
        if kind == "a solver state" and data[0] != 1 << 3:
            continue
        message = message_class()
        try:
            message.ParseFromString(data)
        except DecodeError:
            continue
        if is_one(message):
            return kind, message
    return "", None
