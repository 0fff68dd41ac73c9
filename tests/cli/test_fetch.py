import struct

import numpy as np
import pytest

import cgdnn as library


@pytest.fixture
def idx_files(folder):
    """A folder with MNIST's four files, of 6 training and 4 test digits."""
    (folder / "idx").mkdir()
    for name, count in (("train", 6), ("t10k", 4)):
        pictures = np.arange(count * 784, dtype=np.uint8)
        images = struct.pack(">4i", 2051, count, 28, 28) + pictures.tobytes()
        labels = struct.pack(">2i", 2049, count) + bytes(range(count))
        (folder / "idx" / f"{name}-images-idx3-ubyte").write_bytes(images)
        (folder / "idx" / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return "idx"


def test_databases_come_into_the_working_directory(cgdnn, folder, idx_files):
    code, out, _ = cgdnn("fetch", "mnist", "--from", idx_files)
    assert code == 0
    assert "6 pictures" in out
    source = (folder / "SOURCE.txt").read_text()
    assert source.startswith("mnist: IDX files in ")
    assert source.split(": ", 1)[1].strip() in out
    (folder / "net.prototxt").write_text(
        'layer { name: "mnist" type: "Data" top: "data" top: "label" '
        'data_param { source: "mnist_test_lmdb" batch_size: 4 backend: LMDB } }'
    )
    net = library.Net("net.prototxt", phase="TEST")
    try:
        assert net.forward()["label"].tolist() == [0, 1, 2, 3]
    finally:
        net.close()


def test_the_folder_can_be_chosen(cgdnn, folder, idx_files):
    assert cgdnn("fetch", "mnist", "--from", idx_files, "--to", "there")[0] == 0
    assert (folder / "there" / "mnist_train_lmdb").is_dir()


def test_a_folder_without_the_files_ends_with_3(cgdnn, folder):
    code, _, err = cgdnn("fetch", "mnist", "--from", str(folder))
    assert code == 3
    assert err.startswith("error: ")
    assert "train-images-idx3-ubyte" in err


def test_an_unknown_data_set_ends_with_2(cgdnn, capsys):
    with pytest.raises(SystemExit) as ended:
        cgdnn("fetch", "imagenet")
    assert ended.value.code == 2
    assert "choose from" in capsys.readouterr().err
