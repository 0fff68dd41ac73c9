from pathlib import Path

import numpy as np
import pytest

from cgdnn.errors import DataError, UsageError
from cgdnn.netdef.graph import build_graph
from cgdnn.netdef.read import read_net, read_solver
from cgdnn.netdef.state import read_state
from cgdnn.netdef.weights import read_blob, read_mean, read_weights, write_blob, write_weights
from cgdnn.proto import cgdnn_pb2 as pb

GOLDEN = Path(__file__).parents[1] / "golden"
SNAP = GOLDEN / "snap"


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_reads_what_caffe_wrote(name):
    weights = read_weights(SNAP / f"{name}_iter_10.caffemodel")
    with np.load(SNAP / f"{name}.npz") as expected:
        assert list(weights) == ["ip1", "ip2"]
        for layer, blobs in weights.items():
            for i, blob in enumerate(blobs):
                assert blob.dtype == np.float32
                np.testing.assert_array_equal(blob, expected[f"iter10/{layer}/{i}"])


def test_writes_what_caffe_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(GOLDEN)
    solver = read_solver("snap/solver_sgd.prototxt").message
    net = build_graph(read_net(solver.net), "TRAIN").message()
    net.layer[-1].loss_weight.append(1)  # as Caffe's loss layers do when they are set up
    path = tmp_path / "w.caffemodel"
    write_weights(path, net, read_weights("snap/sgd_iter_10.caffemodel"))
    caffes = pb.NetParameter.FromString((SNAP / "sgd_iter_10.caffemodel").read_bytes())
    assert pb.NetParameter.FromString(path.read_bytes()) == caffes
    assert not net.layer[1].blobs


def test_old_layers_have_weights_too(tmp_path):
    blob = pb.BlobProto(num=1, channels=1, height=2, width=3, data=range(6))
    v1 = pb.V1LayerParameter(name="a", type="INNER_PRODUCT", blobs=[blob])
    path = tmp_path / "v1"
    path.write_bytes(pb.NetParameter(layers=[v1]).SerializeToString())
    np.testing.assert_array_equal(read_weights(path)["a"][0], np.arange(6.0).reshape(1, 1, 2, 3))
    v0 = pb.V0LayerParameter(name="a", type="innerproduct", blobs=[blob])
    path.write_bytes(pb.NetParameter(layers=[pb.V1LayerParameter(layer=v0)]).SerializeToString())
    np.testing.assert_array_equal(read_weights(path)["a"][0], np.arange(6.0).reshape(1, 1, 2, 3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 4), (300,)])
def test_blobs_survive(dtype, shape):
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    back = read_blob(pb.BlobProto.FromString(write_blob(array).SerializeToString()))
    assert back.dtype == (dtype if back.size else np.float32)
    assert back.flags.writeable
    np.testing.assert_array_equal(back, array)


def test_a_strided_array_is_written_in_order():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    blob = write_blob(array)
    assert list(blob.shape.dim) == [3, 2]
    assert list(blob.data) == [0, 3, 1, 4, 2, 5]


def test_diffs_are_no_data():
    blob = pb.BlobProto(data=[1, 2], diff=[3, 4], shape=pb.BlobShape(dim=[2]))
    assert list(read_blob(blob)) == [1, 2]
    assert list(blob.diff) == [3, 4]


def test_legacy_sizes_that_are_left_out_are_zero():
    with pytest.raises(DataError, match=r"w: has 2 values for the shape \(0, 0, 0, 2\)"):
        read_blob(pb.BlobProto(width=2, data=[1, 2]), "w")


def test_values_that_do_not_fit_the_shape(tmp_path):
    blob = pb.BlobProto(data=[1, 2], shape=pb.BlobShape(dim=[3]))
    layer = pb.LayerParameter(name="a", blobs=[blob])
    path = tmp_path / "w"
    path.write_bytes(pb.NetParameter(layer=[layer]).SerializeToString())
    with pytest.raises(DataError) as caught:
        read_weights(path)
    assert str(caught.value) == (
        f'{path}, layer "a", blob 0: has 2 values for the shape (3,). The file is damaged or '
        "foreign."
    )


def test_mean_image():
    mean = read_mean(GOLDEN / "data" / "mean.binaryproto")
    assert mean.dtype == np.float32
    with np.load(GOLDEN / "data" / "source_arrays.npz") as arrays:
        np.testing.assert_array_equal(mean, arrays["tiny_mean"])


def test_a_mean_image_without_batch_axis(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(write_blob(np.ones((3, 2, 2), np.float64)).SerializeToString())
    assert read_mean(path).shape == (3, 2, 2)
    assert read_mean(path).dtype == np.float32
    path.write_bytes(write_blob(np.ones((2, 3, 2, 2), np.float32)).SerializeToString())
    with pytest.raises(DataError, match=r"shape \(2, 3, 2, 2\), expected a mean image"):
        read_mean(path)


FILES = {
    "weights": SNAP / "sgd_iter_10.caffemodel",
    "a solver state": SNAP / "sgd_iter_10.solverstate",
    "a mean image": GOLDEN / "data" / "mean.binaryproto",
    "a text file": SNAP / "solver_sgd.prototxt",
    "an HDF5 file": SNAP / "sgd_h5_iter_10.caffemodel.h5",
}
READERS = {"weights": read_weights, "a solver state": read_state, "a mean image": read_mean}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("found", FILES)
def test_every_reader_knows_the_other_kinds(kind, found):
    if kind == found:
        assert READERS[kind](FILES[found]) is not None
        return
    with pytest.raises(UsageError) as caught:
        READERS[kind](FILES[found])
    assert str(caught.value).startswith(f"{FILES[found]}: is {found}, expected {kind}; ")


@pytest.mark.parametrize("kind", READERS)
def test_files_that_are_cut_short(kind, tmp_path):
    path = tmp_path / "cut"
    data = FILES[kind].read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(DataError, match=f"cut: is not {kind}, or is damaged or cut short"):
        READERS[kind](path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=f"cut: is empty, expected {kind}"):
        READERS[kind](path)
    path.unlink()
    with pytest.raises(DataError, match="cut: cannot be read: No such file"):
        READERS[kind](path)
