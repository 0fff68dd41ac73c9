import numpy as np

from cgdnn.data.dataset import Samples, write_database, write_mean
from cgdnn.data.datum import decode_datum
from cgdnn.data.lmdb import LmdbReader
from cgdnn.proto.cgdnn_pb2 import BlobProto


def test_database_holds_the_samples_in_order(tmp_path):
    pictures = np.arange(3 * 2 * 2, dtype=np.uint8).reshape(3, 1, 2, 2)
    write_database(tmp_path / "db", Samples(pictures, np.array([5, 0, 9], np.uint8)))
    reader = LmdbReader(tmp_path / "db")
    decoded = [decode_datum(record) for record in reader.read(0, 3)]
    reader.close()
    np.testing.assert_array_equal([picture for picture, _ in decoded], pictures)
    assert [label for _, label in decoded] == [5, 0, 9]


def test_mean_is_the_float_quotient_in_the_legacy_shape(tmp_path):
    pictures = np.array([[[[0, 255]]], [[[1, 255]]], [[[1, 0]]]], np.uint8)
    write_mean(tmp_path / "mean", pictures)
    blob = BlobProto.FromString((tmp_path / "mean").read_bytes())
    assert (blob.num, blob.channels, blob.height, blob.width) == (1, 1, 1, 2)
    assert list(blob.data) == [np.float32(2) / np.float32(3), 170]


def test_mean_equals_caffe_on_the_golden_database(golden, tmp_path):
    stored = np.load("data/source_arrays.npz")
    write_mean(tmp_path / "mean", stored["tiny_data"])
    assert (tmp_path / "mean").read_bytes() == (golden / "data/mean.binaryproto").read_bytes()
