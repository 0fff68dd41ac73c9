"""Batches from HDF5 files: what an HDF5Data layer reads.

The rules are those of Caffe's hdf5_data_layer.cpp: a text file lists HDF5 files; each top is the
dataset of its name; batches run across the borders of files and wrap at the end of the list;
`shuffle` permutes the files, and the rows within each file, anew in every pass. Unlike there,
every file is looked at before the first batch.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from cgdnn.data.cursor import Draw, permutation
from cgdnn.errors import DataError


class HDF5Source:
    """Read rows of the listed HDF5 files in order (or shuffled), wrapping at the end.

    Implements `cgdnn.data.cursor.BatchSource`. One file at a time is held in memory.

    Parameters
    ----------
    list_path : str or path
        Text file with the names of HDF5 files, separated by blanks or line ends. A name is looked
        up from the working directory, then from the folder of `list_path`.
    tops : sequence of str
        Names of the datasets, one for each array of a batch.
    batch_size : int
    shuffle : bool
    draw : Draw
        Random numbers of this layer, for `shuffle`.

    Raises
    ------
    DataError
        A file is missing or is no HDF5 file, a dataset is missing or not numeric, or its rows do
        not agree with those of the other tops and files.
    """

    def __init__(
        self,
        list_path: str | os.PathLike[str],
        tops: Sequence[str],
        batch_size: int,
        shuffle: bool,
        draw: Draw,
    ) -> None:
        self._files = _listed_files(Path(list_path))
        self._tops = list(tops)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._draw = draw
        self.warnings: list[str] = []
        contents = [_inspect(file, self._tops) for file in self._files]
        for file, datasets in zip(self._files, contents, strict=True):
            for top, got, expected in zip(self._tops, datasets, contents[0], strict=True):
                if got.row_shape != expected.row_shape:
                    raise DataError(
                        f'{file}: dataset "{top}" has rows of another shape than in '
                        f"{self._files[0]}; got {got.row_shape}, expected {expected.row_shape}. "
                        "Write all listed files with rows of one shape."
                    )
        self._rows = np.array([datasets[0].rows for datasets in contents])
        self.dtype: np.dtype[Any] = np.result_type(
            np.float32, *(dataset.dtype for datasets in contents for dataset in datasets)
        )
        self.shapes: list[tuple[int, ...]] = [
            (batch_size, *dataset.row_shape) for dataset in contents[0]
        ]
        self.seconds = {"read": 0.0}
        self._loaded: tuple[int, list[npt.NDArray[Any]]] | None = None
        self._file_order: tuple[int, npt.NDArray[np.int64]] | None = None
        self._row_order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def entries(self) -> int:
        """Number of rows in all files together."""
        return int(self._rows.sum())

    def read_batch(self, position: int, out: Sequence[npt.NDArray[Any]]) -> None:
        """Fill ``out[i]`` with rows of the dataset ``tops[i]``; see `BatchSource.read_batch`."""
        begin = time.perf_counter()
        filled = 0
        while filled < self._batch_size:
            epoch, row = divmod(position + filled, self.entries)
            file, row = self._locate(epoch, row)
            count = min(self._batch_size - filled, int(self._rows[file]) - row)
            rows = self._row_numbers(epoch, file, row, count)
            for array, target in zip(self._load(file), out, strict=True):
                target[filled : filled + count] = array[rows]
            filled += count
        self.seconds["read"] += time.perf_counter() - begin

    def _locate(self, epoch: int, row: int) -> tuple[int, int]:
        """Return the file, and the place within its pass, of place `row` of pass `epoch`."""
        if self._shuffle:
            stream = epoch * (len(self._files) + 1)
            if self._file_order is None or self._file_order[0] != stream:
                self._file_order = stream, permutation(self._draw, stream, len(self._files))
            order = self._file_order[1]
        else:
            order = np.arange(len(self._files))
        ends = np.cumsum(self._rows[order])
        at = int(np.searchsorted(ends, row, side="right"))
        file = int(order[at])
        return file, row - int(ends[at]) + int(self._rows[file])

    def _row_numbers(
        self, epoch: int, file: int, begin: int, count: int
    ) -> slice | npt.NDArray[np.int64]:
        if not self._shuffle:
            return slice(begin, begin + count)
        stream = epoch * (len(self._files) + 1) + 1 + file
        if self._row_order is None or self._row_order[0] != stream:
            self._row_order = stream, permutation(self._draw, stream, int(self._rows[file]))
        return self._row_order[1][begin : begin + count]

    def _load(self, file: int) -> list[npt.NDArray[Any]]:
        if self._loaded is None or self._loaded[0] != file:
            path = self._files[file]
            with _open(path) as h5:
                try:
                    arrays = [h5[top][()] for top in self._tops]
                except (KeyError, OSError) as error:
                    raise DataError(
                        f"{path}: cannot be read ({error}). Write the file again."
                    ) from error
            self._loaded = file, arrays
        return self._loaded[1]

    def close(self) -> None:
        """Drop the file held in memory; closing twice is fine."""
        self._loaded = None


class _Dataset:
    """Row count, row shape and type of one dataset."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self.rows = int(dataset.shape[0])
        self.row_shape: tuple[int, ...] = tuple(dataset.shape[1:])
        self.dtype: np.dtype[Any] = dataset.dtype


def _listed_files(list_path: Path) -> list[Path]:
    try:
        names = list_path.read_text(encoding="utf-8-sig").split()
    except FileNotFoundError as error:
        raise DataError(
            f"{list_path.absolute()}: list of HDF5 files does not exist. "
            "Check `source`: a text file with one HDF5 file name a line."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        hint = "`source` names a text file that lists HDF5 files, not an HDF5 file itself."
        raise DataError(f"{list_path.absolute()}: is not a readable text file. {hint}") from error
    if not names:
        raise DataError(
            f"{list_path.absolute()}: lists no files; got 0 names, expected at least 1. "
            "Write one HDF5 file name a line."
        )
    files = []
    for number, name in enumerate(names, 1):
        found = [path for path in (Path(name), list_path.parent / name) if path.is_file()]
        if not found:
            folders = dict.fromkeys([str(Path.cwd()), str(list_path.parent.absolute())])
            raise DataError(
                f'{list_path}: file {number} of {len(names)}, "{name}", does not exist; looked in '
                f"{' and '.join(folders)}. Correct the name or remove it."
            )
        files.append(found[0])
    return files


def _open(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DataError(
            f"{path}: is not an HDF5 file; got {_first_bytes(path)}, expected an HDF5 signature. "
            "Write it with h5py, or correct the list of files."
        ) from error


def _first_bytes(path: Path) -> str:
    with path.open("rb") as stream:
        begin = stream.read(16)
    return f"a file that begins with {begin!r}" if begin else "an empty file"


def _inspect(path: Path, tops: Sequence[str]) -> list[_Dataset]:
    """Check that `path` has a numeric dataset for each top, with equally many rows, at least 1."""
    datasets = []
    with _open(path) as h5:
        for top in tops:
            entry = h5.get(top)
            if not isinstance(entry, h5py.Dataset):
                raise DataError(_missing(path, top, sorted(h5)))
            if entry.dtype.kind not in "fiu" or entry.ndim < 1:
                raise DataError(
                    f'{path}: dataset "{top}" cannot be a blob; got {entry.ndim} axes of type '
                    f"{entry.dtype}, expected at least 1 axis of floats or integers. "
                    "Write it as a float array whose first axis counts the rows."
                )
            datasets.append(_Dataset(entry))
    counts = [dataset.rows for dataset in datasets]
    if len(set(counts)) > 1:
        raise DataError(
            f"{path}: datasets differ in their number of rows; got "
            + ", ".join(f'"{top}" {rows}' for top, rows in zip(tops, counts, strict=True))
            + ", expected one number. Write one row of each dataset for every sample."
        )
    if counts[0] == 0:
        raise DataError(
            f'{path}: dataset "{tops[0]}" is empty; got 0 rows, expected at least 1. '
            "Write the file again, or remove it from the list."
        )
    return datasets


def _missing(path: Path, top: str, present: list[str]) -> str:
    nearest = difflib.get_close_matches(top, present, n=1, cutoff=0.5)
    remedy = (
        f'Did you mean "{nearest[0]}"?'
        if nearest
        else "Name the tops of the layer as the datasets are named."
    )
    held = ", ".join(f'"{name}"' for name in present) or "none"
    return f'{path}: has no dataset "{top}"; got {held}. {remedy}'
