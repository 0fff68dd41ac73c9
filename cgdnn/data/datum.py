"""Decode Caffe's Datum records into pictures: uint8 or float32 arrays in C, H, W order.

An encoded record (PNG, JPEG, ...) comes out as OpenCV gives it to Caffe: channels in the order
B, G, R, and grey as (9797 R + 19234 G + 3737 B) >> 15.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from PIL import Image, UnidentifiedImageError

from cgdnn.errors import DataError
from cgdnn.proto.cgdnn_pb2 import Datum

_GREY_WEIGHTS_BGR = np.array([3737, 19234, 9797], np.uint32)
_MAX_TAILS = 1 << 16


def encode_datum(picture: npt.NDArray[np.uint8], label: int) -> bytes:
    """Return the Datum record of `picture` (uint8, C x H x W), with the bytes that Caffe writes."""
    channels, height, width = picture.shape
    datum = Datum(
        channels=channels, height=height, width=width, data=picture.tobytes(), label=label
    )
    return datum.SerializeToString()


def decode_datum(
    record: bytes, force_color: bool = False, force_gray: bool = False
) -> tuple[npt.NDArray[Any], int]:
    """Decode one record.

    Parameters
    ----------
    record : bytes
        A serialized Datum.
    force_color, force_gray : bool
        Decode an encoded picture to 3 or 1 channels whatever it holds. Raw pictures stay as
        they are, as in Caffe.

    Returns
    -------
    picture : array, uint8 or float32, C x H x W
    label : int

    Raises
    ------
    DataError
        Not a Datum, or its parts do not fit together. The message lacks the place; whoever
        knows database, record and key puts it in front.
    """
    try:
        datum = Datum.FromString(record)
    except DecodeError as error:
        raise DataError(
            f"is not a Datum; got {len(record)} bytes that do not parse. Build the database again."
        ) from error
    if datum.encoded:
        return _decode_picture(datum.data, force_color, force_gray), datum.label
    values: npt.NDArray[Any]
    if datum.data:
        values = np.frombuffer(datum.data, np.uint8)
    else:
        values = np.array(datum.float_data, np.float32)
    shape = (datum.channels, datum.height, datum.width)
    if min(shape) < 1 or values.size != shape[0] * shape[1] * shape[2]:
        raise DataError(
            f"picture has {values.size} values, expected {shape[0]} x {shape[1]} x {shape[2]} "
            "(channels x height x width). Build the database again."
        )
    return values.reshape(shape), datum.label


def _decode_picture(data: bytes, force_color: bool, force_gray: bool) -> npt.NDArray[np.uint8]:
    """Decode an image file as cv::imdecode does: any number of channels unless forced."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            if force_gray and image.format == "JPEG":
                image.draft("L", image.size)  # the luma plane as stored, as libjpeg gives OpenCV
            image.load()
            pixels = _pixels(image, force_color or force_gray)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"is marked as encoded but is no readable picture ({error}); got {len(data)} bytes, "
            "expected a PNG, JPEG or other image file. Build the database again."
        ) from error
    channels = pixels.shape[2]
    if force_color:
        pixels = np.repeat(pixels, 3, axis=2) if channels == 1 else pixels[:, :, :3]
    elif force_gray and channels > 1:
        grey = (pixels[:, :, :3].astype(np.uint32) @ _GREY_WEIGHTS_BGR) >> 15
        pixels = grey.astype(np.uint8)[:, :, None]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _pixels(image: Image.Image, forced: bool) -> npt.NDArray[np.uint8]:
    """Return the pixels as H x W x C with C in 1, 3, 4, in B, G, R(, A) order."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        if not forced:
            raise DataError(
                f"picture has more than 8 bits a channel; got mode {image.mode}, expected 8 bits. "
                "Set force_gray or force_color, or convert the pictures."
            )
        return (np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)[:, :, None]
    if image.mode in ("1", "L"):
        return np.asarray(image.convert("L"))[:, :, None]
    if image.mode in ("LA", "PA", "RGBA"):
        return np.asarray(image.convert("RGBA"))[:, :, [2, 1, 0, 3]]
    return np.asarray(image.convert("RGB"))[:, :, ::-1]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class RawDatums:
    """Decode many raw records of one shape at once, without parsing each.

    A raw Datum as Caffe writes it is a head (channels, height, width and the length of the data,
    the same bytes in every record), the pixels, and a tail (the label). The tail is a Datum of its
    own in protobuf's encoding, so each different one is parsed once and remembered.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of every picture.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        channels, height, width = shape
        self._shape = shape
        self._size = channels * height * width
        self._head = (
            b"\x08" + _varint(channels) + b"\x10" + _varint(height) + b"\x18" + _varint(width)
            + b"\x22" + _varint(self._size)
        )  # fmt: skip
        self._labels: dict[bytes, int] = {}

    def decode(self, records: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], list[int]] | None:
        """Return pictures (uint8, N x C x H x W) and labels, or None where a record is not so."""
        head, begin = self._head, len(self._head)
        end = begin + self._size
        labels: list[int] = []
        for record in records:
            if not record.startswith(head):
                return None
            label = self._labels.get(record[end:])
            if label is None:
                label = self._parse_tail(record[end:])
                if label is None:
                    return None
            labels.append(label)
        pixels = b"".join([record[begin:end] for record in records])
        if len(pixels) != len(records) * self._size:
            return None
        return np.frombuffer(pixels, np.uint8).reshape(len(records), *self._shape), labels

    def _parse_tail(self, tail: bytes) -> int | None:
        try:
            datum = Datum.FromString(tail)
        except DecodeError:
            return None
        fields = {field.name for field, _ in datum.ListFields()}
        if datum.encoded or not fields <= {"label", "encoded"}:
            return None
        label = datum.label
        if len(self._labels) < _MAX_TAILS:
            self._labels[tail] = label
        return label
