import json
import os

import h5py
import numpy as np
import pytest

from cgdnn.data.hdf5 import HDF5Source
from cgdnn.errors import DataError


def read(source, position=0, dtype=np.float32):
    out = [np.full(shape, np.nan, dtype) for shape in source.shapes]
    source.read_batch(position, out)
    return out


def write_files(folder, *files):
    """Write one HDF5 file for each dict of datasets, and their list."""
    for i, datasets in enumerate(files):
        with h5py.File(folder / f"{i}.h5", "w") as h5:
            for name, values in datasets.items():
                h5[name] = values
    (folder / "list.txt").write_text("".join(f"{i}.h5\n" for i in range(len(files))))
    return folder / "list.txt"


@pytest.mark.parametrize(
    ("name", "tops", "batch_size"),
    [("hdf5data", ["data", "label", "extra"], 3), ("hdf5data_one_top", ["label"], 2)],
)
def test_golden_batches(golden, draw, name, tops, batch_size):
    values = np.load(golden / "cases" / f"{name}.npz")
    meta = json.loads(str(values["meta"]))
    source = HDF5Source("data/h5list.txt", tops, batch_size, False, draw)
    assert source.shapes == [tuple(meta["blob_shapes"][top]) for top in tops]
    for step in range(meta["steps"]):
        for top, array in zip(tops, read(source, step * batch_size), strict=True):
            np.testing.assert_array_equal(array, values[f"step{step}/blobs/{top}"])
    source.close()


def test_rows_run_across_files_and_wrap(tmp_path, draw):
    files = write_files(tmp_path, {"x": np.arange(3.0)}, {"x": np.arange(3.0, 5.0)})
    source = HDF5Source(files, ["x"], 4, False, draw)
    assert source.entries == 5
    assert read(source, 0)[0].tolist() == [0, 1, 2, 3]
    assert read(source, 4)[0].tolist() == [4, 0, 1, 2]
    assert read(source, 13)[0].tolist() == [3, 4, 0, 1]
    source.close()


def test_batch_larger_than_all_files(tmp_path, draw):
    source = HDF5Source(write_files(tmp_path, {"x": [1.0, 2.0]}), ["x"], 5, False, draw)
    assert read(source)[0].tolist() == [1, 2, 1, 2, 1]


def test_shuffle_permutes_files_and_rows_anew_in_each_pass(tmp_path, draw):
    rows = np.arange(60.0).reshape(3, 20)
    files = write_files(tmp_path, *({"x": r, "y": -r} for r in rows))
    source = HDF5Source(files, ["x", "y"], 60, True, draw)
    passes = [read(source, 60 * epoch) for epoch in range(6)]
    orders = set()
    for x, y in passes:
        np.testing.assert_array_equal(y, -x)
        assert sorted(x.tolist()) == list(range(60))
        blocks = (x.reshape(3, 20) // 20).astype(int)
        assert (blocks == blocks[:, :1]).all()  # a file is read whole before the next
        orders.add(tuple(blocks[:, 0].tolist()))
    assert len({tuple(x.tolist()) for x, _ in passes}) == 6
    assert len(orders) > 1


def test_shuffled_batches_depend_on_position_only(tmp_path, draw):
    files = write_files(tmp_path, {"x": np.arange(7.0)}, {"x": np.arange(7.0, 12.0)})
    source = HDF5Source(files, ["x"], 5, True, draw)
    ahead = {position: read(source, position)[0] for position in range(0, 60, 5)}
    fresh = HDF5Source(files, ["x"], 5, True, draw)
    for position in reversed(ahead):
        np.testing.assert_array_equal(read(fresh, position)[0], ahead[position])


def test_integers_and_doubles_are_converted(tmp_path, draw):
    files = write_files(tmp_path, {"x": np.array([1, 2**40]), "y": np.array([1 / 3, 2.0])})
    source = HDF5Source(files, ["x", "y"], 2, False, draw)
    assert source.dtype == np.float64
    assert read(source, dtype=np.float64)[0].tolist() == [1, 2**40]
    assert read(source)[1].tolist() == [np.float32(1 / 3), 2]


def test_single_precision_is_told(golden, draw):
    assert HDF5Source("data/solver_h5.txt", ["data"], 4, False, draw).dtype == np.float32


def test_files_are_found_beside_their_list(tmp_path, draw, monkeypatch):
    files = write_files(tmp_path, {"x": [5.0]})
    monkeypatch.chdir("/")
    assert read(HDF5Source(files, ["x"], 1, False, draw))[0].tolist() == [5]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "h5_missing_key",
            ['a.h5: has no dataset "y"; got "label", "x".', "Name the tops of the layer"],
        ),
        (
            "h5_rows_mismatch",
            ["a.h5: datasets differ in their number of rows", '"x" 8, "y" 7', "expected one"],
        ),
        ("h5_empty_file", ['a.h5: dataset "x" is empty; got 0 rows, expected at least 1']),
        ("h5_list_missing_file", ['list.txt: file 2 of 2, "nope.h5", does not exist', "{cwd}"]),
        ("h5_not_hdf5", ["a.h5: is not an HDF5 file; got a file that begins with b'this is"]),
    ],
)
def test_bad_input_is_refused_at_start(case, draw, name, parts):
    case(name)
    with pytest.raises(DataError) as caught:
        HDF5Source("list.txt", ["x", "y"], 4, False, draw)
    for part in parts:
        assert part.format(cwd=os.getcwd()) in str(caught.value)


@pytest.mark.parametrize("name", ["h5_ok", "h5_one_class"])
def test_sound_cases_open(case, draw, name):
    case(name)
    source = HDF5Source("list.txt", ["x", "y"], 4, False, draw)
    assert source.shapes == [(4, 3, 8, 8), (4,)]
    assert np.isfinite(read(source)[0]).all()


def test_nearest_name_is_offered(tmp_path, draw):
    files = write_files(tmp_path, {"label": [1.0]})
    with pytest.raises(DataError, match='Did you mean "label"'):
        HDF5Source(files, ["labels"], 1, False, draw)


@pytest.mark.parametrize(
    ("values", "message"),
    [(np.float32(3), "got 0 axes of type float32"), ([b"text"], "expected at least 1 axis of")],
)
def test_dataset_that_cannot_be_a_blob(tmp_path, draw, values, message):
    with pytest.raises(DataError, match=message):
        HDF5Source(write_files(tmp_path, {"x": values}), ["x"], 1, False, draw)


def test_group_is_no_dataset(tmp_path, draw):
    with pytest.raises(DataError, match='has no dataset "g"'):
        HDF5Source(write_files(tmp_path, {"g/x": [1.0]}), ["g"], 1, False, draw)


def test_rows_of_another_shape_in_a_later_file(tmp_path, draw):
    files = write_files(tmp_path, {"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))})
    with pytest.raises(DataError, match=r'1\.h5: dataset "x".*got \(4,\), expected \(3,\)'):
        HDF5Source(files, ["x"], 1, False, draw)


@pytest.mark.parametrize(
    ("content", "message"), [("", "lists no files; got 0 names"), (None, "does not exist")]
)
def test_bad_lists(tmp_path, draw, content, message):
    if content is not None:
        (tmp_path / "list.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        HDF5Source(tmp_path / "list.txt", ["x"], 1, False, draw)


def test_hdf5_file_given_as_the_list(case, draw):
    case("h5_ok")
    with pytest.raises(DataError, match="not an HDF5 file itself"):
        HDF5Source("a.h5", ["x"], 1, False, draw)
