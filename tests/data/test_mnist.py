import gzip

import numpy as np
import pytest

from cgdnn.data.mnist import parse_idx, parse_mnist, read_bytes, read_csv
from cgdnn.errors import DataError
from tests.data.files import idx


def test_idx_axes_are_big_endian():
    array = parse_idx(idx(range(12), 2, 3, 2), 3, "f")
    assert array.shape == (2, 3, 2)
    assert array[1, 2].tolist() == [10, 11]


def test_samples():
    samples = parse_mnist(idx(range(8), 2, 2, 2), idx([7, 3], 2), "train")
    assert samples.pictures.shape == (2, 1, 2, 2)
    assert samples.pictures[1].ravel().tolist() == [4, 5, 6, 7]
    assert samples.labels.tolist() == [7, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train images: is not an IDX file .* begins with nothing, expected 00 00 08 03"),
        (idx([1], 1), "begins with 00 00 08 01, expected 00 00 08 03"),
        (idx([1, 2, 3], 1, 2, 2), "is torn; got 3 values, expected 1 x 2 x 2"),
        (idx([1, 2, 3, 4, 5], 1, 2, 2), "got 5 values"),
        (idx(range(8), 2, 2, 2), "got 2 images and 1 labels"),
    ],
)
def test_damaged_files(content, message):
    with pytest.raises(DataError, match=message):
        parse_mnist(content, idx([1], 1), "train")


def test_gzipped_and_plain_files(tmp_path):
    (tmp_path / "plain").write_bytes(b"abc")
    (tmp_path / "packed").write_bytes(gzip.compress(b"abc"))
    (tmp_path / "torn").write_bytes(gzip.compress(b"abc" * 100)[:-9])
    assert read_bytes(tmp_path / "plain") == read_bytes(tmp_path / "packed") == b"abc"
    with pytest.raises(DataError, match="torn: is a damaged gzip file"):
        read_bytes(tmp_path / "torn")


def test_table_of_digits(tmp_path):
    rows = [[*range(200), *[0] * 584, 5], [*[255] * 784, 9]]
    with gzip.open(tmp_path / "digits.csv.gz", "wt") as file:
        file.writelines(",".join(map(str, row)) + "\n" for row in rows)
    samples = read_csv(tmp_path / "digits.csv.gz")
    assert samples.pictures.shape == (2, 1, 28, 28)
    np.testing.assert_array_equal(samples.pictures[0].ravel()[:200], np.arange(200))
    assert samples.labels.tolist() == [5, 9]


@pytest.mark.parametrize("text", ["1,2,3\n", "a,b\n", ",".join(["1"] * 785) + "\n1,2\n"])
def test_table_of_something_else(tmp_path, text):
    (tmp_path / "digits.csv").write_text(text)
    with pytest.raises(DataError, match="is not a table of 28 x 28 pixels"):
        read_csv(tmp_path / "digits.csv")
