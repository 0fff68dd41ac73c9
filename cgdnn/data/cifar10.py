"""CIFAR-10's binary files: 1 label byte and 3 x 32 x 32 pixel bytes a record, planes R, G, B."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cgdnn.data.dataset import Samples
from cgdnn.errors import DataError

TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"
ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"

_SHAPE = (3, 32, 32)
_RECORD_BYTES = 1 + 3 * 32 * 32


def parse_batch(content: bytes, where: str) -> Samples:
    """Return the samples in one binary file.

    Raises
    ------
    DataError
        The length is no whole number of records, or a label is outside 0..9.
    """
    if not content or len(content) % _RECORD_BYTES:
        raise DataError(
            f"{where}: is no CIFAR-10 binary file; got {len(content)} bytes, expected a multiple "
            f"of {_RECORD_BYTES}. Fetch it again (the version for C programs)."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)
    labels = records[:, 0]
    if labels.max() > 9:
        record = int(np.argmax(labels > 9))
        raise DataError(
            f"{where}, record {record}: label {labels[record]} is outside 0..9. Fetch it again."
        )
    return Samples(records[:, 1:].reshape(-1, *_SHAPE), labels)


def parse_cifar10(train: Sequence[bytes], test: bytes, where: str) -> tuple[Samples, Samples]:
    """Return the training and test samples; `train` in the order data_batch_1 to 5."""
    batches = [
        parse_batch(content, f"{where}/{name}")
        for content, name in zip(train, TRAIN_FILES, strict=True)
    ]
    joined = Samples(
        np.concatenate([batch.pictures for batch in batches]),
        np.concatenate([batch.labels for batch in batches]),
    )
    return joined, parse_batch(test, f"{where}/{TEST_FILE}")


def read_archive(path: Path) -> tuple[Samples, Samples]:
    """Return the training and test samples in the tar archive as published.

    Raises
    ------
    DataError
        It is damaged, or a file is missing in it.
    """
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                stream = archive.extractfile(member)
                if stream is not None:
                    contents[Path(member.name).name] = stream.read()
        train = [contents[name] for name in TRAIN_FILES]
        test = contents[TEST_FILE]
    except (OSError, EOFError, tarfile.TarError, KeyError) as error:
        raise DataError(
            f"{path}: is not the whole CIFAR-10 archive ({error}); expected data_batch_1..5.bin "
            "and test_batch.bin. Fetch it again."
        ) from error
    return parse_cifar10(train, test, str(path))
