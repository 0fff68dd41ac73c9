"""Read and write LMDB databases of records in key order.

Reading takes no lock and writes nothing, so databases on read-only and network file systems work
and any number of processes may read at once. LMDB allows one open environment per file and
process: readers of the same file share it. Nobody may write to a database that is being read.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lmdb

from cgdnn.errors import DataError

_DATA_FILE = "data.mdb"
_MARK_STRIDE = 1000
_INITIAL_MAP_BYTES = 64 << 20
_RECORDS_PER_COMMIT = 1000
_MOST_MAPPED = 32 << 20
"""Bytes of records after which a reader opens the database anew. LMDB maps the whole file, and the
pages that were read count as resident memory of the process until they are unmapped."""


def find_lmdb(path: str | os.PathLike[str]) -> Path:
    """Return the data file of the database `path` (its folder, or the data file itself).

    Raises
    ------
    DataError
        Nothing is there, or it is a LevelDB or something else.
    """
    place = Path(path).absolute()
    if place.is_file():
        return place
    if not place.exists():
        raise DataError(
            f"{place}: database does not exist; expected the folder of an LMDB. "
            "Check `source`, or build the database first (`cgdnn fetch` builds MNIST and CIFAR-10)."
        )
    if (place / _DATA_FILE).is_file():
        return place / _DATA_FILE
    names = sorted(entry.name for entry in place.iterdir())
    if "CURRENT" in names:
        raise DataError(
            f"{place}: is a LevelDB database, which cgdnn does not read; expected an LMDB. "
            "Convert it to LMDB (Caffe's convert_imageset writes one with --backend=lmdb)."
        )
    held = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    raise DataError(
        f"{place}: is not a database; the folder holds {held}, expected {_DATA_FILE}. "
        "Check `source`."
    )


class _Environment:
    """One open database, the number of its readers, and the lock they hold while they read."""

    def __init__(self, data_file: Path) -> None:
        self.stamp = _stamp(data_file)
        self.lmdb = _open_read_only(data_file)
        self.users = 0
        self.reading = threading.Lock()


class _Environments:
    """The open environments of this process, shared by file.

    A fork waits until no thread reads: LMDB could never close an environment in the child if it
    had been copied amid a call of another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Environment] = {}
        os.register_at_fork(
            before=self._pause, after_in_parent=self._resume, after_in_child=self._forget
        )

    def acquire(self, data_file: Path) -> _Environment:
        name = os.path.realpath(data_file)
        with self._lock:
            if name not in self._open:
                self._open[name] = _Environment(data_file)
            self._open[name].users += 1
            return self._open[name]

    def release(self, data_file: Path) -> None:
        name = os.path.realpath(data_file)
        with self._lock:
            environment = self._open[name]
            environment.users -= 1
            if environment.users == 0:
                del self._open[name]
                environment.lmdb.close()

    def _pause(self) -> None:
        self._lock.acquire()
        for environment in self._open.values():
            environment.reading.acquire()

    def _resume(self) -> None:
        for environment in self._open.values():
            environment.reading.release()
        self._lock.release()

    def _forget(self) -> None:
        # This ends the child's copy only; its readers open anew when they see the process change.
        for environment in self._open.values():
            environment.lmdb.close()
        self._open.clear()
        self._lock.release()


def _stamp(data_file: Path) -> tuple[int, ...] | None:
    """Return what tells whether a file is still the same one, None where it is gone."""
    try:
        status = data_file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _open_read_only(data_file: Path) -> Any:
    try:
        environment = lmdb.open(os.fspath(data_file), subdir=False, readonly=True, lock=False)
    except lmdb.Error as error:
        raise DataError(
            f"{data_file}: is not a readable LMDB ({_reason(error, data_file)}). "
            "Build the database again."
        ) from error
    # Reading a mapped page that lies beyond the end of a cut file would kill the process.
    expected = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    got = data_file.stat().st_size
    if got < expected:
        environment.close()
        raise DataError(
            f"{data_file}: is cut off; got {got} bytes, expected {expected}. "
            "Copy or build the database again."
        )
    return environment


def _reason(error: Exception, data_file: Path) -> str:
    return str(error).removeprefix(f"{data_file}: ")


_environments = _Environments()


class LmdbReader:
    """Read consecutive records of an LMDB, starting anywhere and wrapping at the end.

    Reading on from where the last call ended costs one step a record; a jump costs at most
    1,000 steps once the reader has passed there. One thread at a time may read. After a fork the
    child opens the database for itself.

    Parameters
    ----------
    path : str or path
        Folder of the database, or its data file.

    Attributes
    ----------
    name : str
        The path as messages show it.
    entries : int
        Number of records, at least 1.

    Raises
    ------
    DataError
        No such database, another format, a torn file, or no records.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._data_file = find_lmdb(path)
        self.name = os.fspath(path)
        self._pid = 0
        self._open()
        self.entries: int = self._transaction.stat()["entries"]
        if self.entries == 0:
            self.close()
            raise DataError(
                f"{Path(path).absolute()}: database is empty; got 0 records, expected at least 1. "
                "Build the database again."
            )

    def _open(self) -> None:
        self._environment = _environments.acquire(self._data_file)
        self._pid = os.getpid()
        self._transaction = self._environment.lmdb.begin()
        self._cursor = self._transaction.cursor()
        self._read = 0  # bytes of records since then
        self._next = -1  # the record at which self._values stands
        self._values: Iterator[bytes] = iter(())
        self._marks: list[bytes] = []  # keys of records 0, 1000, 2000, ... passed so far

    def _seek(self, record: int) -> None:
        cursor, marks = self._cursor, self._marks
        if not marks:
            cursor.first()
            marks.append(cursor.key())
        target = record // _MARK_STRIDE
        while len(marks) <= target:
            cursor.set_key(marks[-1])
            for _ in range(_MARK_STRIDE):
                cursor.next()
            marks.append(cursor.key())
        cursor.set_key(marks[target])
        for _ in range(record % _MARK_STRIDE):
            cursor.next()

    def key(self, position: int) -> bytes:
        """Return the key of record ``position % entries``."""
        if self._pid != os.getpid():
            self._open()
        with self._environment.reading:
            self._next = -1
            self._seek(position % self.entries)
            key: bytes = self._cursor.key()
        return key

    def read(self, position: int, count: int) -> list[bytes]:
        """Return the values of `count` records from ``position % entries`` on, wrapping.

        Raises
        ------
        DataError
            LMDB finds the file damaged.
        """
        if self._pid != os.getpid():
            self._open()
        record = position % self.entries
        values: list[bytes] = []
        try:
            if self._read > _MOST_MAPPED:
                self._unmap()
            with self._environment.reading:
                while len(values) < count:
                    if record != self._next:
                        self._seek(record)
                        self._values = self._cursor.iternext(keys=False, values=True)
                    wanted = min(count - len(values), self.entries - record)
                    values.extend(itertools.islice(self._values, wanted))
                    self._next = record + wanted
                    record = self._next % self.entries
        except lmdb.Error as error:
            raise DataError(
                f"{self.name}, record {record}: cannot be read ({error}). "
                "Copy or build the database again."
            ) from error
        self._read += sum(map(len, values))
        return values

    def _unmap(self) -> None:
        """Open the database anew; where other readers share it, its pages stay mapped."""
        self._read = 0
        if self._environment.stamp == _stamp(self._data_file):  # else go on with what was opened
            key, after, marks = self._cursor.key(), self._next, self._marks
            self.close()
            self._open()
            self._marks = marks
            # Stepping there from a mark would touch pages of each record before.
            self._cursor.set_key(key)
            self._cursor.next()
            self._values = self._cursor.iternext(keys=False, values=True)
            self._next = after

    def close(self) -> None:
        """Give the database back; closing twice is fine."""
        if self._pid == os.getpid():
            self._values = iter(())
            self._cursor.close()
            self._transaction.abort()
            _environments.release(self._data_file)
        self._pid = 0


def write_lmdb(path: str | os.PathLike[str], values: Iterable[bytes]) -> int:
    """Write an LMDB whose keys are the record numbers as Caffe writes them ("00000000").

    The database is built beside its final place and renamed over it, so `path` holds either what
    it held before or the whole new database.

    Parameters
    ----------
    path : str or path
        Folder to create; one that exists is replaced.
    values : iterable of bytes
        One record each, in order.

    Returns
    -------
    int
        Number of records written.
    """
    final = Path(path).absolute()
    building = final.with_name(f".{final.name}.{os.getpid()}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        count = _fill(building, values)
        shutil.rmtree(final, ignore_errors=True)
        building.rename(final)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return count


def _fill(folder: Path, values: Iterable[bytes]) -> int:
    count = 0
    remaining = iter(values)
    # Nobody else sees the folder yet, so neither a lock nor a flush for each commit is needed.
    with lmdb.open(
        os.fspath(folder), map_size=_INITIAL_MAP_BYTES, lock=False, sync=False, metasync=False
    ) as environment:
        while chunk := list(itertools.islice(remaining, _RECORDS_PER_COMMIT)):
            records = [(b"%08d" % (count + i), value) for i, value in enumerate(chunk)]
            while not _commit(environment, records):
                environment.set_mapsize(2 * environment.info()["map_size"])
            count += len(chunk)
        environment.sync(True)
    return count


def _commit(environment: Any, records: list[tuple[bytes, bytes]]) -> bool:
    """Append `records` in one transaction; return False where the map is too small for them."""
    try:
        with environment.begin(write=True) as transaction:
            for key, value in records:
                transaction.put(key, value, append=True)
    except lmdb.MapFullError:
        return False
    return True
