import io

import numpy as np
import pytest
from PIL import Image

from cgdnn.data.datum import RawDatums, decode_datum, encode_datum
from cgdnn.errors import DataError
from cgdnn.proto.cgdnn_pb2 import Datum

RGB = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [10, 20, 30]]], np.uint8)


def encoded(pixels, form="PNG", **options):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form, **options)
    return Datum(data=stream.getvalue(), label=3, encoded=True).SerializeToString()


def test_raw_bytes():
    datum = Datum(channels=2, height=1, width=3, data=bytes([0, 1, 2, 253, 254, 255]), label=7)
    picture, label = decode_datum(datum.SerializeToString())
    assert picture.dtype == np.uint8
    assert picture.tolist() == [[[0, 1, 2]], [[253, 254, 255]]]
    assert label == 7


def test_floats_and_missing_label():
    datum = Datum(channels=1, height=1, width=2, float_data=[0.5, -2])
    picture, label = decode_datum(datum.SerializeToString())
    assert picture.dtype == np.float32
    assert picture.tolist() == [[[0.5, -2]]]
    assert label == 0


def test_encoded_colour_comes_out_as_bgr_planes():
    picture, label = decode_datum(encoded(RGB))
    assert picture.tolist() == [
        [[0, 0], [255, 30]],
        [[0, 255], [0, 20]],
        [[255, 0], [0, 10]],
    ]
    assert label == 3


def test_colour_to_grey_by_caffe_weights():
    picture, _ = decode_datum(encoded(RGB), force_gray=True)
    # 9797*255>>15 = 76, 19234*255>>15 = 149, 3737*255>>15 = 29, (97970+384680+112110)>>15 = 18
    assert picture.tolist() == [[[76, 149], [29, 18]]]


def test_grey_to_colour_repeats():
    grey = np.array([[7, 9]], np.uint8)
    assert decode_datum(encoded(grey))[0].tolist() == [[[7, 9]]]
    assert decode_datum(encoded(grey), force_color=True)[0].tolist() == [[[7, 9]]] * 3


def test_alpha_is_a_channel_unless_colour_is_forced():
    rgba = np.array([[[1, 2, 3, 4]]], np.uint8)
    assert decode_datum(encoded(rgba))[0].ravel().tolist() == [3, 2, 1, 4]
    assert decode_datum(encoded(rgba), force_color=True)[0].ravel().tolist() == [3, 2, 1]


def test_sixteen_bits_keep_the_high_byte_when_forced():
    wide = encoded(np.array([[0x1234, 0xFF00]], np.uint16))
    assert decode_datum(wide, force_gray=True)[0].tolist() == [[[0x12, 0xFF]]]
    with pytest.raises(DataError, match="more than 8 bits a channel"):
        decode_datum(wide)


def test_jpeg_grey_is_its_luma_plane():
    grey = np.full((8, 8), 77, np.uint8)
    assert np.ptp(decode_datum(encoded(grey, form="JPEG", quality=95), force_gray=True)[0]) == 0
    colour = encoded(np.full((8, 8, 3), 77, np.uint8), form="JPEG", quality=95)
    assert decode_datum(colour, force_gray=True)[0].tolist() == [[[77] * 8] * 8]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"\xff\xff\xff", "is not a Datum; got 3 bytes"),
        (
            Datum(channels=1, height=2, width=2, data=b"abc").SerializeToString(),
            "picture has 3 values, expected 1 x 2 x 2",
        ),
        (Datum(label=1).SerializeToString(), "picture has 0 values, expected 0 x 0 x 0"),
        (
            Datum(data=b"no image", encoded=True).SerializeToString(),
            "marked as encoded but is no readable picture",
        ),
    ],
)
def test_bad_records(record, message):
    with pytest.raises(DataError, match=message):
        decode_datum(record)


def test_cut_picture_is_refused():
    whole = Datum.FromString(encoded(np.zeros((50, 50, 3), np.uint8)))
    cut = Datum(data=whole.data[:-30], encoded=True)
    with pytest.raises(DataError, match="no readable picture"):
        decode_datum(cut.SerializeToString())


def test_many_raw_records_at_once_equal_one_by_one():
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (5, 3, 9, 20), dtype=np.uint8)
    labels = [0, 1, 127, 128, -1]
    records = [encode_datum(p, label) for p, label in zip(pictures, labels, strict=True)]
    decoded = RawDatums((3, 9, 20)).decode(records)
    assert decoded is not None
    np.testing.assert_array_equal(decoded[0], pictures)
    assert decoded[1] == labels
    assert [decode_datum(record)[1] for record in records] == labels


@pytest.mark.parametrize(
    "record",
    [
        Datum(channels=1, height=1, width=2, data=b"ab", encoded=True).SerializeToString(),
        Datum(channels=1, height=1, width=2, data=b"ab", float_data=[1]).SerializeToString(),
        Datum(channels=1, height=2, width=1, data=b"ab").SerializeToString(),
        Datum(channels=1, height=1, width=2, float_data=[1, 2]).SerializeToString(),
        Datum(channels=1, height=1, width=2, data=b"ab").SerializeToString()[:-1],
    ],
)
def test_other_records_are_left_to_the_slow_way(record):
    assert RawDatums((1, 1, 2)).decode([record]) is None


def test_raw_record_without_label_has_label_zero():
    record = Datum(channels=1, height=1, width=2, data=b"ab").SerializeToString()
    decoded = RawDatums((1, 1, 2)).decode([record])
    assert decoded is not None
    assert decoded[1] == [0]
