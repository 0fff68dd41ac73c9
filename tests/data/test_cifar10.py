import pytest

from cgdnn.data.cifar10 import TEST_FILE, TRAIN_FILES, parse_batch, parse_cifar10, read_archive
from cgdnn.errors import DataError
from tests.data.files import record, write_archive


def test_planes_are_red_green_blue():
    samples = parse_batch(record(3, 10, 20, 30) + record(9, 1, 2, 3), "f")
    assert samples.labels.tolist() == [3, 9]
    assert samples.pictures.shape == (2, 3, 32, 32)
    assert samples.pictures[:, :, 5, 7].tolist() == [[10, 20, 30], [1, 2, 3]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got 0 bytes"),
        (record(0, 1, 2, 3)[:-1], "got 3072 bytes, expected a multiple of 3073"),
        (record(0, 1, 2, 3) + record(10, 1, 2, 3), "f, record 1: label 10 is outside 0..9"),
    ],
)
def test_damaged_files(content, message):
    with pytest.raises(DataError, match=message):
        parse_batch(content, "f")


def test_batches_join_in_order():
    train, test = parse_cifar10([record(i, i, 0, 0) for i in range(5)], record(7, 0, 0, 0), "d")
    assert train.labels.tolist() == [0, 1, 2, 3, 4]
    assert test.labels.tolist() == [7]


def test_archive(tmp_path):
    contents = {name: record(i, 0, 0, 0) for i, name in enumerate((*TRAIN_FILES, TEST_FILE))}
    write_archive(tmp_path / "a.tar.gz", contents | {"readme.html": b"text"})
    train, test = read_archive(tmp_path / "a.tar.gz")
    assert train.labels.tolist() == [0, 1, 2, 3, 4]
    assert test.labels.tolist() == [5]


def test_torn_or_partial_archive(tmp_path):
    write_archive(tmp_path / "partial", {TEST_FILE: record(1, 0, 0, 0)})
    (tmp_path / "torn").write_bytes((tmp_path / "partial").read_bytes()[:-30])
    for name in ("partial", "torn"):
        with pytest.raises(DataError, match=f"{name}: is not the whole CIFAR-10 archive"):
            read_archive(tmp_path / name)
