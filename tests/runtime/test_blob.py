import numpy as np
import pytest

from cgdnn.errors import UsageError
from cgdnn.runtime.blob import Blob


@pytest.fixture
def arrays():
    return {"data": np.zeros((2, 3)), "diff": np.ones((2, 3))}


@pytest.fixture
def blob(arrays):
    return Blob("x", (2, 3), arrays.__getitem__, 0)


def test_arrays_are_live(blob, arrays):
    assert blob.data is arrays["data"]
    assert blob.diff is arrays["diff"]


def test_assigning_copies_into_the_array(blob, arrays):
    blob.data = np.full((2, 3), 4)
    blob.diff = [[1, 2, 3], [4, 5, 6]]
    assert (arrays["data"] == 4).all()
    assert arrays["diff"][1].tolist() == [4, 5, 6]


@pytest.mark.parametrize("value", [np.zeros(5), np.zeros(3), np.zeros((1, 3)), 4])
def test_nothing_is_broadcast(blob, value):
    with pytest.raises(UsageError, match=r'blob "x": got an array of shape .*expected \(2, 3\)'):
        blob.data = value


def test_shape_and_count(blob):
    assert (blob.shape, blob.count) == ((2, 3), 6)
    blob.reshape(4, 5, 1)
    assert (blob.shape, blob.count) == ((4, 5, 1), 20)
    assert repr(blob) == "Blob('x', shape=(4, 5, 1))"


def test_negative_dimension(blob):
    with pytest.raises(UsageError, match=r'blob "x": got shape \(2, -1\)'):
        blob.reshape(2, -1)
    assert blob.shape == (2, 3)
