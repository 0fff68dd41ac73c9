import numpy as np
import pytest

from cgdnn.data.transform import Transform
from cgdnn.errors import DataError, DescriptionError
from cgdnn.proto.cgdnn_pb2 import BlobProto, TransformationParameter

PICTURES = np.arange(2 * 1 * 3 * 4, dtype=np.uint8).reshape(2, 1, 3, 4)


def transformed(pictures, phase, draw, position=0, dtype=np.float32, mean_path=None, **param):
    transform = Transform(TransformationParameter(**param), mean_path)
    out = np.full((len(pictures), *transform.output_shape(pictures.shape[1:])), np.nan, dtype)
    transform.apply(pictures, out, phase, position, draw)
    return out


def write_mean(path, values):
    channels, height, width = values.shape
    blob = BlobProto(num=1, channels=channels, height=height, width=width, data=values.ravel())
    path.write_bytes(blob.SerializeToString())
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_to_do_converts(draw, dtype):
    out = transformed(PICTURES, "TRAIN", draw, dtype=dtype)
    np.testing.assert_array_equal(out, PICTURES)
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mean_is_subtracted_before_scaling(draw, dtype):
    out = transformed(PICTURES, "TEST", draw, dtype=dtype, mean_value=[3], scale=0.5)
    np.testing.assert_array_equal(out, (PICTURES.astype(dtype) - 3) * 0.5)


def test_one_mean_value_for_each_channel(draw):
    pictures = np.zeros((1, 3, 1, 1), np.uint8)
    out = transformed(pictures, "TEST", draw, mean_value=[1, 2, 3])
    assert out.ravel().tolist() == [-1, -2, -3]


def test_test_phase_crops_the_centre_rounded_down(draw):
    out = transformed(PICTURES, "TEST", draw, crop_size=2)
    # offsets (3 - 2) / 2 = 0 and (4 - 2) / 2 = 1
    assert out[0, 0].tolist() == [[1, 2], [5, 6]]


def test_mean_image_is_cropped_with_the_picture(draw, tmp_path):
    mean = write_mean(tmp_path / "mean", np.arange(12, dtype=np.float32).reshape(1, 3, 4))
    out = transformed(PICTURES, "TEST", draw, crop_size=2, mean_file="m", mean_path=mean)
    assert out[0].ravel().tolist() == [0, 0, 0, 0]
    assert out[1].ravel().tolist() == [12, 12, 12, 12]


def test_train_phase_uses_every_window_and_both_directions(draw):
    pictures = np.repeat(PICTURES[:1], 400, axis=0)
    out = transformed(pictures, "TRAIN", draw, crop_size=2, mirror=True)
    picture = PICTURES[0, 0]
    windows = {
        tuple(window[:, ::step].ravel().tolist())
        for top in range(2)
        for left in range(3)
        for window in [picture[top : top + 2, left : left + 2]]
        for step in (1, -1)
    }
    assert {tuple(row.ravel().astype(int).tolist()) for row in out} == windows
    assert len(windows) == 12


def test_mirror_flips_the_mean_image_too_and_works_in_test_phase(draw, tmp_path):
    pictures = np.repeat(PICTURES[:1], 50, axis=0)
    mean = write_mean(tmp_path / "mean", np.arange(12, dtype=np.float32).reshape(1, 3, 4) / 2)
    out = transformed(pictures, "TEST", draw, mirror=True, mean_file="m", mean_path=mean)
    straight = PICTURES[0, 0] / 2
    flipped = [np.array_equal(row[0], straight[:, ::-1]) for row in out]
    kept = [np.array_equal(row[0], straight) for row in out]
    assert all(a or b for a, b in zip(flipped, kept, strict=True))
    assert 10 < sum(flipped) < 40


def test_random_choices_depend_on_the_record_position_alone(draw):
    pictures = np.random.default_rng(0).integers(0, 256, (20, 3, 6, 7), dtype=np.uint8)
    param = {"crop_size": 4, "mirror": True}
    whole = transformed(pictures, "TRAIN", draw, position=100, **param)
    tail = transformed(pictures[13:], "TRAIN", draw, position=113, **param)
    np.testing.assert_array_equal(whole[13:], tail)
    assert not np.array_equal(whole, transformed(pictures, "TRAIN", draw, position=0, **param))


@pytest.mark.parametrize(
    ("param", "shape", "message"),
    [
        (
            {"mean_value": [1, 2]},
            (3, 8, 8),
            "mean_value: mean_value is given 2 times for pictures of 3 channels; expected 1 or 3.",
        ),
        (
            {"mean_value": [1, 2]},
            (1, 8, 8),
            "mean_value is given 2 times for pictures of 1 channels; expected 1.",
        ),
        (
            {"crop_size": 9},
            (3, 8, 10),
            "transform_param.crop_size: crop_size 9 is larger than the picture; got 8 x 10 (height",
        ),
    ],
)
def test_parameters_that_do_not_fit_the_pictures(param, shape, message):
    with pytest.raises(DescriptionError) as caught:
        Transform(TransformationParameter(**param)).output_shape(shape)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "param",
    [{"mean_file": "m", "mean_value": [1]}, {"force_color": True, "force_gray": True}],
)
def test_fields_that_exclude_each_other(param):
    with pytest.raises(DescriptionError, match="are both set; expected at most one"):
        Transform(TransformationParameter(**param))


def test_missing_mean_file_is_named_by_its_absolute_path(tmp_path):
    param = TransformationParameter(mean_file="m.binaryproto")
    with pytest.raises(DataError) as caught:
        Transform(param, tmp_path / "m.binaryproto", lambda field: f"net.prototxt:3:5: {field}")
    assert str(caught.value).startswith("net.prototxt:3:5: mean_file: mean file does not exist")
    assert str(tmp_path / "m.binaryproto") in str(caught.value)


def test_mean_image_of_another_size(tmp_path):
    mean = write_mean(tmp_path / "mean", np.zeros((3, 4, 4), np.float32))
    transform = Transform(TransformationParameter(mean_file="m"), mean)
    with pytest.raises(DataError, match="got 3 x 4 x 4, expected 3 x 8 x 8"):
        transform.output_shape((3, 8, 8))


def test_mean_image_of_the_size_of_the_crop_is_explained(tmp_path):
    mean = write_mean(tmp_path / "mean", np.zeros((3, 4, 4), np.float32))
    transform = Transform(TransformationParameter(mean_file="m", crop_size=4), mean)
    with pytest.raises(DataError, match="the mean is subtracted before cropping"):
        transform.output_shape((3, 8, 8))
