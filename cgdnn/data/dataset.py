"""Labelled pictures in memory, and the files that training reads them from."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cgdnn.data.datum import encode_datum
from cgdnn.data.lmdb import write_lmdb
from cgdnn.files import atomic_write_bytes
from cgdnn.proto.cgdnn_pb2 import BlobProto


class Samples(NamedTuple):
    """Pictures (uint8, N x C x H x W) and their labels (N integers)."""

    pictures: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.integer]


def write_database(path: str | os.PathLike[str], samples: Samples) -> None:
    """Write `samples` in order as an LMDB of raw Datum records, replacing what is at `path`."""
    pairs = zip(samples.pictures, samples.labels.tolist(), strict=True)
    write_lmdb(path, (encode_datum(picture, label) for picture, label in pairs))


def write_mean(path: str | os.PathLike[str], pictures: npt.NDArray[np.uint8]) -> None:
    """Write the mean picture as Caffe's compute_image_mean.cpp does: float32, num = 1."""
    total = pictures.sum(axis=0, dtype=np.int64)
    mean = total.astype(np.float32) / np.float32(len(pictures))
    channels, height, width = mean.shape
    blob = BlobProto(num=1, channels=channels, height=height, width=width, data=mean.ravel())
    atomic_write_bytes(path, blob.SerializeToString())
