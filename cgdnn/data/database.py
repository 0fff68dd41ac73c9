"""Batches from a database of Datum records: what a Data layer reads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cgdnn.data.cursor import Draw
from cgdnn.data.datum import RawDatums, decode_datum
from cgdnn.data.lmdb import LmdbReader
from cgdnn.data.transform import Transform
from cgdnn.errors import CgdnnError, DataError


class DatumSource:
    """Read, decode and transform the records of an LMDB in order, wrapping at its end.

    Implements `cgdnn.data.cursor.BatchSource`. The first record fixes the shape of a batch, as in
    Caffe; later pictures may have another height and width only under a crop.

    Parameters
    ----------
    path : str or path
        The database's folder, or its data.mdb.
    backend : "LMDB" or "LEVELDB"
        What the description says; what the files are decides.
    batch_size : int
    transform : Transform
    phase : "TRAIN" or "TEST"
    draw : Draw
        Random numbers of this layer.
    with_label : bool
        Whether a batch has the labels (float, shape ``(batch_size,)``) as its second array.

    Raises
    ------
    DataError
        The database or its first record cannot be read, or the mean file does not fit it.
    DescriptionError
        The transform cannot apply to pictures of this shape.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        backend: str,
        batch_size: int,
        transform: Transform,
        phase: str,
        draw: Draw,
        with_label: bool,
    ) -> None:
        self._reader = LmdbReader(path)
        self._transform = transform
        self._phase = phase
        self._draw = draw
        self._batch_size = batch_size
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self.warnings: list[str] = []
        if backend != "LMDB":
            self.warnings.append(
                f"{Path(path).absolute()}: is an LMDB, but backend is {backend} (the default "
                "where none is given); reading it as LMDB. Write `backend: LMDB`."
            )
        try:
            picture, _ = self._decode(self._reader.read(0, 1)[0], 0)
            self._channels = picture.shape[0]
            output = transform.output_shape(picture.shape)
        except BaseException:
            self._reader.close()
            raise
        self._picture_shape = picture.shape
        self._raw = RawDatums(picture.shape)
        self.seconds = {"read": 0.0, "decode": 0.0, "transform": 0.0}
        self.shapes: list[tuple[int, ...]] = [(batch_size, *output)]
        if with_label:
            self.shapes.append((batch_size,))

    @property
    def entries(self) -> int:
        """Number of records in the database."""
        return self._reader.entries

    def read_batch(self, position: int, out: Sequence[npt.NDArray[Any]]) -> None:
        """Fill ``out[0]`` with pictures and ``out[1]``, where there is one, with labels.

        See `BatchSource.read_batch`. Float values are rounded to the type of `out`.
        """
        with self._timed("read"):
            records = self._reader.read(position, self._batch_size)
        with self._timed("decode"):
            raw = self._raw.decode(records)
        if raw is not None:
            pictures, labels = raw
            self._apply(pictures, position, out[0])
        else:
            labels = [
                self._read_one(record, position + i, out[0][i : i + 1])
                for i, record in enumerate(records)
            ]
        if len(out) > 1:
            out[1][:] = labels

    def _read_one(self, record: bytes, position: int, row: npt.NDArray[Any]) -> int:
        with self._timed("decode"):
            picture, label = self._decode(record, position)
        self._check_shape(picture.shape, position, row.shape)
        self._apply(picture[None], position, row)
        return label

    def _apply(self, pictures: npt.NDArray[Any], position: int, out: npt.NDArray[Any]) -> None:
        with self._timed("transform"):
            self._transform.apply(pictures, out, self._phase, position, self._draw)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begin

    def _decode(self, record: bytes, position: int) -> tuple[npt.NDArray[Any], int]:
        transform = self._transform
        try:
            return decode_datum(record, transform.force_color, transform.force_gray)
        except DataError as error:
            raise DataError(f"{self._place(position)}: {error}") from error

    def _check_shape(self, got: tuple[int, ...], position: int, row_shape: tuple[int, ...]) -> None:
        expected = self._picture_shape
        if got == expected:
            return
        try:
            fits = (1, *self._transform.output_shape((got[0], got[1], got[2]))) == row_shape
        except CgdnnError as error:
            raise DataError(f"{self._place(position)}: {error}") from error
        if not fits:
            raise DataError(
                f"{self._place(position)}: picture has another shape than the first; got "
                f"{' x '.join(map(str, got))}, expected {' x '.join(map(str, expected))} "
                "(channels x height x width). Resize the pictures when building the database, "
                "or set crop_size (and force_color or force_gray for mixed channels)."
            )

    def _place(self, position: int) -> str:
        record = position % self._reader.entries
        key = self._reader.key(record).decode(errors="backslashreplace")
        return f'{self._reader.name}, record {record} ("{key}")'

    def close(self) -> None:
        """Give the database back; closing twice is fine."""
        self._reader.close()
