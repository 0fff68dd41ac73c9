import shutil

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.errors import DataError, DescriptionError
from cgdnn.layers._registry import make_layer
from cgdnn.netdef.graph import build_graph
from cgdnn.netdef.read import read_net
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net
from tests.layers.contract import Case

BOTH = [(3, 3, 8, 9), (3,)]
MEAN = 'mean_file: "data/mean.binaryproto"'
SHUFFLED = 'hdf5_data_param { source: "data/h5list.txt" batch_size: 3 shuffle: true }'


def data(fields="", transform="", tops=BOTH, source="data/tiny_lmdb", batch=3, phase="TRAIN"):
    return Case(
        "Data",
        f'data_param {{ source: "{source}" batch_size: {batch} {fields} }} '
        f"transform_param {{ {transform} }}",
        tops=tops,
        phase=phase,
    )


CASES = [
    data("backend: LMDB"),
    data("backend: LMDB prefetch: 1 rand_skip: 4", tops=BOTH[:1]),
    data("backend: LMDB", "scale: 0.5 mirror: true mean_value: 100"),
    data("backend: LMDB", f"crop_size: 6 {MEAN}", [(3, 3, 6, 6), (3,)], phase="TEST"),
    data(
        "backend: LMDB",
        "force_color: true",
        [(2, 3, 10, 12), (2,)],
        "data/encoded_mixed_lmdb",
        2,
    ),
    data(
        "backend: LMDB force_encoded_color: true",
        "",
        [(2, 3, 10, 12), (2,)],
        "data/encoded_mixed_lmdb",
        2,
    ),
    data("backend: LMDB", "force_gray: true", [(2, 1, 10, 12), (2,)], "data/encoded_mixed_lmdb", 2),
    Case(
        "HDF5Data",
        'hdf5_data_param { source: "data/h5list.txt" batch_size: 3 }',
        tops=[(3, 2, 3), (3,), (3, 1, 2, 2)],
        names=["data", "label", "extra"],
    ),
    Case("HDF5Data", SHUFFLED, tops=[(3,)], names=["label"]),
]


def message(case, names):
    net = NetParameter()
    text_format.Merge(str(case.layer()), net.layer.add())
    net.layer[0].top.extend(names)
    return net


def make(case, names=("data", "label"), **more):
    return Net(message(case, names), case.phase, threads=1, **more)


def labels(net, passes):
    batches = []
    for _ in range(passes):
        net.forward()
        batches.append(net.blobs["label"].data.copy())
    return batches


@pytest.mark.parametrize(
    "case",
    [
        data("backend: LMDB", "crop_size: 6 mirror: true", [(3, 3, 6, 6), (3,)]),
        Case("HDF5Data", SHUFFLED, tops=[(3, 2, 3), (3,)]),
    ],
    ids=str,
)
def test_seeking_continues_exactly_there(case):
    net, resumed = make(case), make(case)
    layer, other = net.data_layers["layer"], resumed.data_layers["layer"]
    net.forward()
    net.forward()
    assert layer.position == 6
    other.seek(6)
    for _ in range(4):
        net.forward()
        resumed.forward()
        np.testing.assert_array_equal(net.blobs["data"].data, resumed.blobs["data"].data)
    assert layer.position == other.position == 18
    other.seek(0)
    resumed.forward()
    assert other.position == 3
    net.close()
    resumed.close()


def test_another_seed_shuffles_otherwise():
    case = Case("HDF5Data", SHUFFLED, tops=[(3, 2, 3), (3,)])
    orders = []
    for seed in (1, 1, 2):
        net = make(case, seed=seed)
        orders.append(np.concatenate(labels(net, 6)).tolist())
        net.close()
    assert orders[0] == orders[1] != orders[2]


def test_rand_skip_begins_later_and_the_position_counts_from_there():
    plain, skipping = make(data("backend: LMDB")), make(data("backend: LMDB rand_skip: 5"))
    order = np.concatenate(labels(plain, 4)).tolist()
    batch = labels(skipping, 1)[0].tolist()
    assert any(order[skip : skip + 3] == batch for skip in range(5))
    assert skipping.data_layers["layer"].position == 3
    plain.close()
    skipping.close()


def test_reading_is_in_the_type_of_the_net():
    wide, narrow = make(data("backend: LMDB"), dtype="float64"), make(data("backend: LMDB"))
    wide.forward()
    narrow.forward()
    np.testing.assert_array_equal(wide.blobs["data"].data, narrow.blobs["data"].data)
    wide.close()
    narrow.close()


def test_a_database_whose_format_is_not_the_stated_one_warns():
    net = make(data())
    (warning,) = net.assembly.warnings
    assert "is an LMDB, but backend is LEVELDB" in warning
    net.close()


def test_files_are_found_beside_the_description(tmp_path, golden, monkeypatch):
    case = data("backend: LMDB", source="../golden/data/tiny_lmdb")
    for name in ("nets", "golden"):
        (tmp_path / name).mkdir()
    shutil.copytree(golden / "data/tiny_lmdb", tmp_path / "golden/data/tiny_lmdb")
    path = tmp_path / "nets" / "net.prototxt"
    path.write_text(str(message(case, ["data", "label"])))
    monkeypatch.chdir("/")
    net = Net(path, threads=1)
    net.forward()
    assert net.blobs["data"].shape == BOTH[0]
    net.close()


def test_transform_fields_inside_data_param_have_no_effect_but_a_warning():
    net = make(data("backend: LMDB scale: 0.5 crop_size: 6"))
    assert net.blobs["data"].shape == BOTH[0]
    assert [w.partition(": ")[2] for w in net.assembly.warnings] == [
        f'layer "layer" (Data): {name} inside data_param has no effect. Move it to transform_param.'
        for name in ("scale", "crop_size")
    ]
    net.close()


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        (data(batch=0), DescriptionError, "batch_size is missing"),
        (data(source=""), DescriptionError, "source is missing"),
        (
            data("backend: LMDB", "crop_size: 50"),
            DescriptionError,
            r"\(Data\): crop_size 50 is larger than the picture",
        ),
        (data(source="data/nowhere"), DataError, r"layer \"layer\" \(Data\): .*nowhere"),
        (
            Case("HDF5Data", SHUFFLED + " transform_param { scale: 2 }"),
            DescriptionError,
            "data is not transformed; got transform_param",
        ),
        (
            Case("HDF5Data", 'hdf5_data_param { source: "data/no.txt" batch_size: 1 }'),
            DataError,
            r"layer \"layer\" \(HDF5Data\): .*no.txt",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(case, error, text):
    with pytest.raises(error, match=text):
        make(case)


def without_data(case, tops, hint=None):
    located = read_net(message(case, tops))
    layer = make_layer(build_graph(located, case.phase).nodes[0], case.phase)
    layer.without_data = True
    layer.shape_hint = hint
    return layer.infer_shapes([]), layer.warnings


def test_shapes_without_data_come_from_the_description_or_a_hint():
    nowhere = {"source": "nowhere", "batch": 7}
    assert without_data(data(**nowhere), ["data", "label"], (1, 28, 28))[0] == [
        (7, 1, 28, 28),
        (7,),
    ]
    shapes, warnings = without_data(data("", "crop_size: 227", **nowhere), ["data"])
    assert shapes == [(7, 3, 227, 227)]
    assert "taking 3 channel(s), without data" in warnings[0]
    means = "mean_value: 1 mean_value: 2 crop_size: 5"
    assert without_data(data("", means, **nowhere), ["data"]) == ([(7, 2, 5, 5)], [])
    with pytest.raises(DescriptionError, match=r"--shape data=3,227,227"):
        without_data(data(**nowhere), ["data"])
