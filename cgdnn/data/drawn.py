"""Pictures that cgdnn draws itself, for a first run where no real data can be had.

Digits in the form of MNIST and textures in the form of CIFAR-10. Both are the same on every
machine with the same Pillow: all choices come from counter-based random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from cgdnn.data.dataset import Samples
from cgdnn.kernels.random import key_of, uniform_u32

_CHUNK = 1000  # samples drawn at once, to bound memory
_CANVAS = 56
_FONT_PIXELS = 44
_STROKES = 4  # thicknesses of a digit

Floats = npt.NDArray[np.float64]
Uniform = Callable[[float, float], Floats]
"""``uniform(low, high)`` returns new random numbers, one for each sample of a chunk."""


def _chunks(name: str, count: int) -> Iterator[tuple[slice, Uniform, Callable[[int], Floats]]]:
    """Yield the samples of each chunk, a source of numbers and one of noise (in -1..1) for them."""
    key = key_of(1, name)
    for begin in range(0, count, _CHUNK):
        samples = np.arange(begin, min(begin + _CHUNK, count))
        stream = iter(range(1 << 20))

        def uniform(low: float, high: float, indices: npt.NDArray[np.int64] = samples,
                    stream: Iterator[int] = stream) -> Floats:  # fmt: skip
            return low + (high - low) * (uniform_u32(key, next(stream), indices) / 2.0**32)

        def noise(
            pixels: int, indices: npt.NDArray[np.int64] = samples, uniform: Uniform = uniform
        ) -> Floats:
            cells = indices[:, None] * pixels + np.arange(pixels)
            return 2 * (uniform_u32(key, -1, cells.ravel()) / 2.0**32).reshape(cells.shape) - 1

        yield slice(begin, begin + len(samples)), uniform, noise


def _glyph(digit: int, stroke: int) -> Image.Image:
    font = ImageFont.load_default(_FONT_PIXELS)
    canvas = Image.new("L", (_CANVAS, _CANVAS))
    centre = (_CANVAS / 2, _CANVAS / 2)
    pen = ImageDraw.Draw(canvas)
    pen.text(centre, str(digit), 255, font, anchor="mm", stroke_width=stroke)
    return canvas.filter(ImageFilter.GaussianBlur(1))


def draw_digits(name: str, count: int) -> Samples:
    """Return `count` drawn digits, 1 x 28 x 28, the labels 0..9 in turn.

    Each is a printed digit of random thickness, turned, sheared, stretched and moved, with random
    contrast and noise. `name` selects the random numbers.
    """
    glyphs = [[_glyph(digit, stroke) for stroke in range(_STROKES)] for digit in range(10)]
    labels = np.arange(count) % 10
    pictures = np.empty((count, 1, 28, 28), np.uint8)
    for samples, uniform, noise in _chunks(name, count):
        strokes = uniform(0, _STROKES).astype(int)
        angle, shear = uniform(-0.35, 0.35), uniform(-0.3, 0.3)
        size_x, size_y = uniform(0.8, 1.35), uniform(0.85, 1.25)
        move_x, move_y = uniform(-6, 6), uniform(-5, 5)
        # The map from a point of the picture to one of the glyph, both from their centres.
        a, b = np.cos(angle) * size_x, (np.sin(angle) + shear) * size_x
        d, e = -np.sin(angle) * size_y, np.cos(angle) * size_y
        zoom, centre = _CANVAS / 28, _CANVAS / 2
        coefficients = np.stack(
            [zoom * a, zoom * b, centre + move_x - centre * (a + b),
             zoom * d, zoom * e, centre + move_y - centre * (d + e)], axis=1
        )  # fmt: skip
        drawn = np.stack(
            [
                np.asarray(
                    glyphs[label][stroke].transform(
                        (28, 28), Image.Transform.AFFINE, row, Image.Resampling.BILINEAR
                    )
                )
                for label, stroke, row in zip(
                    labels[samples].tolist(), strokes.tolist(), coefficients.tolist(), strict=True
                )
            ]
        ).reshape(-1, 784)
        values = drawn * uniform(0.6, 1)[:, None] + uniform(5, 40)[:, None] * noise(784)
        pictures[samples] = values.clip(0, 255).reshape(-1, 1, 28, 28)
    return Samples(pictures, labels)


class _Plane(NamedTuple):
    """Coordinates that patterns are made of, each N x 32 x 32 or N x 1 x 1."""

    x: Floats  # turned and moved, one unit a picture
    y: Floats
    from_x: Floats  # from a random centre
    from_y: Floats
    ramp: Floats  # along a random direction, -1..1
    grain: Floats  # noise, -1..1
    pace: Floats  # random frequency in radians a unit

    def of(self, samples: slice) -> _Plane:
        """Return the coordinates of some of the samples."""
        return _Plane(*(field[samples] for field in self))


TEXTURES: dict[str, Callable[[_Plane], Floats]] = {
    "horizontal stripes": lambda p: np.sin(p.pace * p.y),
    "vertical stripes": lambda p: np.sin(p.pace * p.x),
    "diagonal stripes": lambda p: np.sin(p.pace * (p.x + p.y) * np.sqrt(0.5)),
    "checks": lambda p: np.sign(np.sin(p.pace * p.x) * np.sin(p.pace * p.y)),
    "dots": lambda p: np.sign(np.sin(p.pace * p.x) + np.sin(p.pace * p.y) - 0.8),
    "rings": lambda p: np.sin(p.pace * np.hypot(p.from_x, p.from_y)),
    "rays": lambda p: np.sin(np.round(p.pace / 2) * np.arctan2(p.from_y, p.from_x)),
    "gradient": lambda p: p.ramp,
    "grain": lambda p: p.grain,
    "waves": lambda p: np.sin(p.pace * (p.y + 0.12 * np.sin(p.pace * p.x))),
}
"""The classes of `draw_textures` in the order of their labels, and their patterns in -1..1."""


def draw_textures(name: str, count: int) -> Samples:
    """Return `count` drawn textures, 3 x 32 x 32, the classes of `TEXTURES` in turn.

    Each mixes two random colours by a pattern of random frequency, phase and slight turn, with
    noise. `name` selects the random numbers.
    """
    labels = np.arange(count) % len(TEXTURES)
    pictures = np.empty((count, 3, 32, 32), np.uint8)
    rows, columns = (np.mgrid[:32, :32] - 15.5) / 32
    for samples, uniform, noise in _chunks(name, count):

        def each(low: float, high: float, uniform: Uniform = uniform) -> Floats:
            return uniform(low, high)[:, None, None]

        turn, slope = each(-0.3, 0.3), each(0, 2 * np.pi)
        plane = _Plane(
            x=columns * np.cos(turn) + rows * np.sin(turn) + each(-0.5, 0.5),
            y=rows * np.cos(turn) - columns * np.sin(turn) + each(-0.5, 0.5),
            from_x=columns - each(-0.4, 0.4),
            from_y=rows - each(-0.4, 0.4),
            ramp=np.clip(2 * (columns * np.cos(slope) + rows * np.sin(slope)), -1, 1),
            grain=noise(32 * 32).reshape(-1, 32, 32),
            pace=2 * np.pi * each(2.5, 5),
        )
        pattern = np.empty_like(plane.x)
        for label, make in enumerate(TEXTURES.values()):
            own = slice(label, None, len(TEXTURES))  # chunks begin at multiples of the classes
            pattern[own] = make(plane.of(own))
        for channel in range(3):
            first = each(0, 255)
            second = (first + each(64, 192)) % 256
            speckle = each(5, 40) * np.roll(plane.grain, 7 * (channel + 1), axis=2)
            mixed = first + (second - first) * (pattern + 1) / 2 + speckle
            pictures[samples, channel] = mixed.clip(0, 255)
    return Samples(pictures, labels)
