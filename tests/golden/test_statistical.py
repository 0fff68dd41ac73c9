"""Caffe's cases that hang on its own random numbers: the same law, not the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cgdnn.runtime.net import Net

GOLDEN = Path(__file__).parent


@pytest.fixture(autouse=True)
def _in_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)


def test_dropout_train() -> None:
    with np.load("cases/dropout_train.npz") as stored:
        x, theirs, topdiff = stored["inputs/x"], stored["blobs/y"], stored["topdiff/y"]
    net = Net("cases/dropout_train.prototxt", threads=2)
    y = net.forward(x=x)["y"]
    kept = y != 0
    np.testing.assert_allclose(y[kept], x[kept] / 0.7, rtol=1e-6)
    # A mask of 11,520 draws: both shares lie within 4 standard deviations of 0.7.
    for mask in (kept, theirs != 0):
        assert abs(mask.mean() - 0.7) < 4 * np.sqrt(0.3 * 0.7 / mask.size)
    dx = net.backward(y=topdiff)["x"]
    np.testing.assert_allclose(dx, np.where(kept, topdiff / 0.7, 0), rtol=1e-6)
    again = net.forward(x=x)["y"]
    assert ((again != 0) != kept).any(), "every pass draws a mask of its own"


def test_data_train_crop_mirror() -> None:
    with np.load("data/source_arrays.npz") as stored:
        pictures, labels = stored["tiny_data"].astype(np.float32), stored["tiny_label"]
    net = Net("cases/data_train_crop_mirror.prototxt", threads=2)
    drawn = set()
    for _ in range(6):
        net.forward()
        np.testing.assert_array_equal(net.blobs["label"].data, labels)
        for item, picture in zip(net.blobs["data"].data, pictures, strict=True):
            crops = {
                (h, w, mirrored): picture[:, h : h + 6, w : w + 6][:, :, :: -1 if mirrored else 1]
                for h in range(3)
                for w in range(4)
                for mirrored in (False, True)
            }
            found = [place for place, crop in crops.items() if np.array_equal(crop, item)]
            assert found, "the item is no crop of its picture"
            drawn.add(found[0])
    net.close()
    assert {place[2] for place in drawn} == {False, True}
    assert len({place[:2] for place in drawn}) > 6


def test_dummydata_random() -> None:
    net = Net("cases/dummydata_random.prototxt", threads=2)
    net.forward()
    first = net.blobs["a"].data.copy()
    net.forward()
    second = net.blobs["a"].data
    assert not np.array_equal(first, second), "random fillers draw at every forward"
    for values in (first, second):
        assert abs(values.mean() - 3) < 4 * 2 / np.sqrt(values.size)
        assert abs(values.std() - 2) < 4 * 2 / np.sqrt(2 * values.size)
    np.testing.assert_array_equal(net.blobs["b"].data, 7)
