"""Turn stored pictures into net input: crop, mirror, subtract a mean, scale.

The rules are those of Caffe's data_transformer.cpp: ``(pixel - mean) * scale``; the crop is random
in TRAIN and central (rounded down) in TEST; `mirror` flips half of the pictures, in TEST as well;
a mean image has the size of the uncropped picture and is cropped with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cgdnn.data.cursor import Draw
from cgdnn.errors import DataError, DescriptionError
from cgdnn.netdef.weights import read_mean
from cgdnn.proto.cgdnn_pb2 import TransformationParameter

_MIRROR, _TOP, _LEFT = range(3)  # the random streams of a Draw; the index is the record position


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


class Transform:
    """What a TransformationParameter does to pictures.

    Parameters
    ----------
    param : TransformationParameter
    mean_path : str or path, optional
        Where ``param.mean_file`` was found; default: that name as it stands.
    where : callable
        Gives the place of a field of `param` for messages, such as
        ``net.prototxt:7:3: layer "data" (Data)``.

    Attributes
    ----------
    force_color, force_gray : bool
        How to decode encoded pictures.

    Raises
    ------
    DescriptionError
        Fields that exclude each other.
    DataError
        The mean file is missing or holds something else.
    """

    def __init__(
        self,
        param: TransformationParameter,
        mean_path: str | os.PathLike[str] | None = None,
        where: Callable[[str], str] = "transform_param.{}".format,
    ) -> None:
        self.force_color = param.force_color
        self.force_gray = param.force_gray
        self._where = where
        self._crop = param.crop_size
        self._mirror = param.mirror
        self._scale = param.scale
        self._mean_values = np.array(param.mean_value, np.float32)[:, None, None]
        self._mean_image: npt.NDArray[np.float32] | None = None
        self._mean_path = Path(mean_path if mean_path is not None else param.mean_file)
        if param.force_color and param.force_gray:
            raise DescriptionError(
                f"{where('force_gray')}: force_color and force_gray are both set; "
                "expected at most one. Remove one of them."
            )
        if param.HasField("mean_file"):
            if len(param.mean_value) > 0:
                raise DescriptionError(
                    f"{where('mean_value')}: mean_file and mean_value are both set; "
                    "expected at most one. Remove one of them."
                )
            if not self._mean_path.is_file():
                raise DataError(
                    f"{where('mean_file')}: mean file does not exist; got "
                    f"{self._mean_path.absolute()}, expected a binaryproto. Compute it with "
                    "Caffe's compute_image_mean, fetch the data set again, or give mean_value."
                )
            self._mean_image = read_mean(self._mean_path)

    def output_shape(self, picture_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the shape (C, H, W) that pictures of `picture_shape` come out with.

        Raises
        ------
        DescriptionError
            The crop is larger than the picture, or the number of mean values is wrong.
        DataError
            The mean image has another size than the picture.
        """
        channels, height, width = picture_shape
        crop = self._crop
        if crop > min(height, width):
            raise DescriptionError(
                f"{self._where('crop_size')}: crop_size {crop} is larger than the picture; got "
                f"{height} x {width} (height x width), expected at least {crop} x {crop}. "
                "Use a smaller crop_size."
            )
        if len(self._mean_values) not in (0, 1, channels):
            expected = "1" if channels == 1 else f"1 or {channels}"
            raise DescriptionError(
                f"{self._where('mean_value')}: mean_value is given {len(self._mean_values)} times "
                f"for pictures of {channels} channels; expected {expected}. "
                "Give one for all channels or one for each (B, G, R for encoded pictures)."
            )
        self._check_mean_image(picture_shape)
        return (channels, crop, crop) if crop else picture_shape

    def _check_mean_image(self, picture_shape: tuple[int, int, int]) -> None:
        if self._mean_image is None or self._mean_image.shape == picture_shape:
            return
        message = (
            f"{self._where('mean_file')}: mean file {self._mean_path} does not fit the pictures; "
            f"got {_shape_text(self._mean_image.shape)}, expected {_shape_text(picture_shape)} "
            "(channels x height x width). "
        )
        if self._mean_image.shape == (picture_shape[0], self._crop, self._crop):
            message += (
                "It has the size of the crop, but the mean is subtracted before cropping: "
                "compute it on the uncropped pictures, or give mean_value."
            )
        else:
            message += "Compute the mean on this database, or give mean_value."
        raise DataError(message)

    def apply(
        self,
        pictures: npt.NDArray[Any],
        out: npt.NDArray[Any],
        phase: str,
        position: int,
        draw: Draw,
    ) -> None:
        """Write the transformed `pictures` into `out`.

        Parameters
        ----------
        pictures : array, uint8 or float32, N x C x H x W
            Of a shape that `output_shape` accepts.
        out : array, float32 or float64, N x C x h x w
            Written.
        phase : "TRAIN" or "TEST"
        position : int
            Record position of the first picture; the random choices depend on it alone.
        draw : Draw
            Source of the random choices.
        """
        spare_height = pictures.shape[2] - out.shape[2]
        spare_width = pictures.shape[3] - out.shape[3]
        top, left = spare_height // 2, spare_width // 2
        random_crop = self._crop > 0 and phase == "TRAIN"
        if random_crop or self._mirror:
            count = len(pictures)
            positions = np.arange(position, position + count)

            def choose(stream: int, choices: int) -> list[int]:
                chosen: list[int] = (draw(stream, positions) % choices).tolist()
                return chosen

            tops = choose(_TOP, spare_height + 1) if random_crop else [top] * count
            lefts = choose(_LEFT, spare_width + 1) if random_crop else [left] * count
            flips = choose(_MIRROR, 2) if self._mirror else [0] * count
            for i in range(count):
                self._place(pictures[i], out[i], tops[i], lefts[i], flips[i])
        else:
            self._place(pictures, out, top, left, 0)

        if len(self._mean_values):
            out -= self._mean_values
        if self._scale != 1:
            out *= self._scale

    def _place(
        self, picture: npt.NDArray[Any], out: npt.NDArray[Any], top: int, left: int, flip: int
    ) -> None:
        """Copy the window of `picture` into `out`, less the same window of the mean image."""
        height, width = out.shape[-2:]
        columns = slice(left, left + width)
        window = picture[..., top : top + height, columns]
        if self._mean_image is not None:
            mean = self._mean_image[:, top : top + height, columns]
            if flip:
                window, mean = window[..., ::-1], mean[..., ::-1]
            np.subtract(window, mean, out=out, dtype=out.dtype)
        else:
            np.copyto(out, window[..., ::-1] if flip else window)
