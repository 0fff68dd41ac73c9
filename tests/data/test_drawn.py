import numpy as np
import pytest

from cgdnn.data.drawn import TEXTURES, draw_digits, draw_textures


@pytest.mark.parametrize(
    ("draw", "shape"), [(draw_digits, (1, 28, 28)), (draw_textures, (3, 32, 32))]
)
def test_drawings_are_reproducible_and_all_different(draw, shape):
    samples = draw("a", 1030)
    assert samples.pictures.shape == (1030, *shape)
    assert samples.labels.tolist() == [i % 10 for i in range(1030)]
    np.testing.assert_array_equal(samples.pictures[:40], draw("a", 40).pictures)
    assert len({picture.tobytes() for picture in samples.pictures}) == 1030
    assert not np.array_equal(samples.pictures[:40], draw("b", 40).pictures)


def nearest_class_accuracy(draw):
    """Share of samples whose nearest neighbour among other samples has their label."""
    train, test = draw("train", 2000), draw("test", 200)
    a = train.pictures.reshape(2000, -1).astype(np.float32)
    b = test.pictures.reshape(200, -1).astype(np.float32)
    distance = (a**2).sum(1) - 2 * b @ a.T
    return np.mean(train.labels[distance.argmin(axis=1)] == test.labels)


def test_digits_can_be_told_apart():
    assert nearest_class_accuracy(draw_digits) > 0.5


def test_digits_are_bright_on_a_dark_ground():
    pictures = draw_digits("a", 200).pictures
    assert (pictures.max(axis=(1, 2, 3)) > 120).all()
    assert np.mean(pictures < 64) > 0.6
    assert pictures.dtype == np.uint8


def test_there_are_ten_kinds_of_textures_with_two_colours_each():
    assert len(TEXTURES) == 10
    pictures = draw_textures("a", 200).pictures.astype(float)
    assert (pictures.std(axis=(2, 3)).max(axis=1) > 20).all()
    rows = np.abs(np.diff(pictures, axis=2)).mean(axis=(1, 2, 3))
    columns = np.abs(np.diff(pictures, axis=3)).mean(axis=(1, 2, 3))
    assert np.mean(rows[0::10] > columns[0::10]) > 0.9  # horizontal stripes change down the rows
    assert np.mean(rows[1::10] < columns[1::10]) > 0.9
