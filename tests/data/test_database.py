import json
import os

import numpy as np
import pytest

from cgdnn.data.database import DatumSource
from cgdnn.data.datum import encode_datum
from cgdnn.data.lmdb import write_lmdb
from cgdnn.data.transform import Transform
from cgdnn.errors import DataError, DescriptionError
from cgdnn.proto.cgdnn_pb2 import Datum, TransformationParameter


def open_source(path, draw, batch_size=2, phase="TEST", with_label=True, backend="LMDB", **param):
    transform = Transform(TransformationParameter(**param))
    return DatumSource(path, backend, batch_size, transform, phase, draw, with_label)


def read(source, position=0, dtype=np.float32):
    out = [np.full(shape, np.nan, dtype) for shape in source.shapes]
    source.read_batch(position, out)
    return out


GOLDEN = [
    ("data_crop_even", "tiny_lmdb", 3, {"crop_size": 5}),
    ("data_crop_full", "tiny_lmdb", 3, {"crop_size": 8}),
    ("data_encoded", "encoded_lmdb", 2, {}),
    (
        "data_encoded_crop_mean",
        "encoded_lmdb",
        2,
        {"crop_size": 7, "mean_value": [10, 20, 30], "scale": 0.25},
    ),
    ("data_encoded_force_color", "encoded_mixed_lmdb", 2, {"force_color": True}),
    ("data_encoded_force_gray", "encoded_mixed_lmdb", 2, {"force_gray": True}),
    ("data_lmdb_gray_resized", "images_gray_lmdb", 2, {}),
    ("data_lmdb_nolabel", "tiny_lmdb", 3, {}),
    ("data_mean_value3", "tiny_lmdb", 3, {"mean_value": [104, 117.5, 123]}),
    ("data_scale", "tiny_lmdb", 3, {"scale": 0.00390625}),
]


@pytest.mark.parametrize(("name", "database", "batch_size", "param"), GOLDEN)
def test_golden_batches(golden, draw, name, database, batch_size, param):
    values = np.load(golden / "cases" / f"{name}.npz")
    meta = json.loads(str(values["meta"]))
    with_label = "label" in meta["blob_shapes"]
    source = open_source(f"data/{database}", draw, batch_size, with_label=with_label, **param)
    assert source.shapes == [tuple(shape) for shape in meta["blob_shapes"].values()]
    for step in range(meta["steps"]):
        prefix = f"step{step}/" if meta["steps"] > 1 else ""
        batch = read(source, step * batch_size)
        for blob, array in zip(meta["blob_shapes"], batch, strict=True):
            np.testing.assert_array_equal(array, values[f"{prefix}blobs/{blob}"])
    source.close()


def test_golden_random_crops_are_windows_of_their_records(golden, draw):
    stored = np.load("data/source_arrays.npz")
    for batch in (
        read(open_source("data/tiny_lmdb", draw, 7, "TRAIN", crop_size=6, mirror=True)),
        [
            np.load("cases/data_train_crop_mirror.npz")[f"blobs/{blob}"]
            for blob in ("data", "label")
        ],
    ):
        np.testing.assert_array_equal(batch[1], stored["tiny_label"])
        for row, picture in zip(batch[0], stored["tiny_data"], strict=True):
            views = np.lib.stride_tricks.sliding_window_view(picture, (6, 6), axis=(1, 2))
            windows = [views[:, top, left] for top in range(3) for left in range(4)]
            assert any(
                np.array_equal(row, window) or np.array_equal(row, window[:, :, ::-1])
                for window in windows
            )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_golden_mean_image_and_scale(golden, draw, dtype):
    stored = np.load("data/source_arrays.npz")
    source = open_source("data/tiny_lmdb", draw, 2, mean_file="data/mean.binaryproto", scale=0.5)
    expected = (stored["tiny_data"][:2].astype(dtype) - stored["tiny_mean"]) * dtype(0.5)
    np.testing.assert_array_equal(read(source, dtype=dtype)[0], expected)
    source.close()


def test_golden_float_records(golden, draw):
    stored = np.load("data/source_arrays.npz")
    source = open_source("data/float_lmdb", draw, 5)
    pictures, labels = read(source)
    np.testing.assert_array_equal(pictures, stored["float_data"])
    np.testing.assert_array_equal(labels, stored["float_label"])
    source.close()


def test_batches_wrap_and_depend_on_position_only(golden, draw):
    source = open_source("data/tiny_lmdb", draw, 5, "TRAIN", crop_size=6, mirror=True)
    ahead = [read(source, position) for position in (0, 5, 10)]
    again = [read(source, position) for position in (10, 0, 5)]
    for expected, got in zip([ahead[2], ahead[0], ahead[1]], again, strict=True):
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])
    labels = np.load("data/source_arrays.npz")["tiny_label"]
    np.testing.assert_array_equal(np.concatenate([b[1] for b in ahead]), np.tile(labels, 3)[:15])
    source.close()


def test_lmdb_under_the_default_backend_is_read_with_a_warning(case, draw):
    case("db_default_backend")
    source = open_source("db", draw, 4, backend="LEVELDB")
    assert source.shapes == [(4, 3, 8, 8), (4,)]
    assert len(source.warnings) == 1
    assert f"{os.getcwd()}/db: is an LMDB, but backend is LEVELDB" in source.warnings[0]
    source.close()


@pytest.mark.parametrize("name", ["db_ok", "db_is_file_path", "db_two_layers"])
def test_sound_cases_open_without_warnings(case, draw, name):
    case(name)
    path = "db/data.mdb" if name == "db_is_file_path" else "db"
    first, second = open_source(path, draw, 4), open_source(path, draw, 4)
    np.testing.assert_array_equal(read(first)[0], read(second)[0])
    assert first.warnings == []
    first.close()
    second.close()


def picture(channels, height, width, label=0):
    return encode_datum(np.zeros((channels, height, width), np.uint8), label)


def test_other_shape_is_named_by_record_and_key(tmp_path, draw):
    write_lmdb(tmp_path / "db", [picture(1, 4, 4), picture(1, 4, 5)])
    source = open_source(tmp_path / "db", draw)
    with pytest.raises(DataError) as caught:
        read(source)
    assert str(caught.value).startswith(
        f'{tmp_path}/db, record 1 ("00000001"): picture has another shape than the first; '
        "got 1 x 4 x 5, expected 1 x 4 x 4"
    )
    source.close()


def test_cropped_pictures_may_differ_in_size_but_not_in_channels(tmp_path, draw):
    write_lmdb(tmp_path / "db", [picture(1, 4, 4), picture(1, 6, 5), picture(3, 4, 4)])
    source = open_source(tmp_path / "db", draw, crop_size=3)
    assert not read(source)[0].any()
    with pytest.raises(DataError, match=r'record 2 \("00000002"\).*got 3 x 4 x 4'):
        read(source, 1)
    source.close()


def test_picture_smaller_than_the_crop_is_named(tmp_path, draw):
    write_lmdb(tmp_path / "db", [picture(1, 4, 4), picture(1, 2, 5)])
    source = open_source(tmp_path / "db", draw, crop_size=3)
    with pytest.raises(DataError, match=r'record 1 \("00000001"\): .*crop_size 3.*got 2 x 5'):
        read(source)
    source.close()


def test_torn_record_is_named(tmp_path, draw):
    write_lmdb(tmp_path / "db", [picture(1, 4, 4), picture(1, 4, 4)[:-10]])
    source = open_source(tmp_path / "db", draw)
    with pytest.raises(DataError, match=r'db, record 1 \("00000001"\): is not a Datum'):
        read(source)
    source.close()


def test_raw_and_float_records_mix(tmp_path, draw):
    values = Datum(channels=1, height=1, width=2, float_data=[0.5, -1], label=2)
    write_lmdb(tmp_path / "db", [picture(1, 1, 2, label=1), values.SerializeToString()])
    source = open_source(tmp_path / "db", draw)
    pictures, labels = read(source)
    assert pictures.ravel().tolist() == [0, 0, 0.5, -1]
    assert labels.tolist() == [1, 2]
    source.close()


def test_bad_description_gives_the_database_back(tmp_path, draw):
    write_lmdb(tmp_path / "db", [picture(3, 4, 4)])
    for _ in range(2):
        with pytest.raises(DescriptionError, match="mean_value is given 2 times"):
            open_source(tmp_path / "db", draw, mean_value=[1, 2])
