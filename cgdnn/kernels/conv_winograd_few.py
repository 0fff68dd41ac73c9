"""Winograd's algorithm for few input channels, forward: tiles in the lanes of vectors.

With a few channels there is little to sum over: bringing them into lanes would leave most of the
lanes empty, and writing the products to memory would take longer than computing them. Here a vector
holds L tiles side by side; for two filters at a time the products over the channels stay in
registers until a column of them has been transformed back. Blobs stay in N, C, H, W order.

See `cgdnn.kernels.conv_winograd` for the algorithm and its rounding.
"""

from __future__ import annotations

from cgdnn.kernels._jit import INT, array, device, kernel, scratch
from cgdnn.kernels.conv_winograd import padded
from cgdnn.kernels.relay import copy_run, from_lanes, to_lanes
from cgdnn.kernels.vector import lanes_of
from cgdnn.kernels.winograd_points import OUTPUTS
from cgdnn.kernels.winograd_tiles import (
    filters_to_panel,
    outputs_of_tiles,
    phases_from_row,
    tiles_from_phases,
)

_NEAR_BYTES = 256 << 10
"""Part of the second cache that V of a band may fill, in bytes of float32."""


def filters_scratch(taps: int) -> tuple[int, int]:
    """Return the elements of the two scratch arrays of `winograd_few_filters`."""
    lanes = padded(1)
    return (taps**2 + lanes) * lanes, ((taps + OUTPUTS - 1) ** 2 + lanes) * lanes


def band_of(taps: int, channels: int, grid: tuple[int, int]) -> int:
    """Return how many rows of tiles, of a grid of (rows, columns), are taken at a time."""
    row = 4 * (taps + OUTPUTS - 1) ** 2 * channels * grid[1]
    bands = -(-grid[0] // max(1, _NEAR_BYTES // row))
    return -(-grid[0] // bands)


def scratch_of(taps: int, channels: int, tiles: int) -> tuple[int, int, int]:
    """Return the elements of the scratch arrays of `conv_forward_winograd_few`."""
    frequencies = (taps + OUTPUTS - 1) ** 2
    whole = padded(tiles)
    return (
        frequencies * _phase_size(whole),
        frequencies * channels * whole,
        2 * OUTPUTS * OUTPUTS * whole,
    )


def _phase_size(tiles: int) -> int:
    """Return the elements from one phase to the next: spread over the cache, with spare ones."""
    return tiles + 2 * padded(1)


@kernel(array(4), array(4), scratch(1), scratch(1), INT, INT)
def winograd_few_filters(w, u, plane, panel, begin, end):  # type: ignore[no-untyped-def]
    """Set u[k] to the transform of filter and channel k, for k in [begin, end).

    Parameters
    ----------
    w : array (Co * C, 1, taps, taps)
    u : array (Co * C, 1, n, n)
    plane, panel : arrays
        See `filters_scratch`.
    """
    lanes = lanes_of(w)
    area, frequencies = w.shape[2] * w.shape[3], u.shape[2] * u.shape[3]
    for k in range(begin, end, lanes):
        some = min(lanes, end - k)
        to_lanes(w, k * area, area, some, plane, 0, area)
        filters_to_panel(plane, 0, lanes, 1, panel, 0, lanes, lanes, w.shape[2] // 2 - 1)
        from_lanes(panel, 0, u, k * frequencies, frequencies, some, frequencies, 0)


@kernel(
    array(4), array(4), array(1), INT, array(4), INT, INT, INT, scratch(1), scratch(1), scratch(1),
    INT, INT,
)  # fmt: skip
def conv_forward_winograd_few(  # type: ignore[no-untyped-def]
    x, u, b, has_bias, y, pad_h, pad_w, band, phases, v, rows, begin, end
):
    """Set y for the images [begin, end).

    Parameters
    ----------
    x : array (N, C, H, W)
    u : array (Co, C, n, n)
    b : array (Co,)
        Not read unless `has_bias`.
    y : array (N, Co, R, OW)
    pad_h, pad_w : int
        Zeros around x.
    band : int
        Rows of tiles that are taken at a time.
    phases, v, rows : arrays
        Scratch; see `scratch_of`.
    """
    lanes = lanes_of(x)
    channels, filters = u.shape[1], u.shape[0]
    kind = (u.shape[2] - OUTPUTS + 1) // 2 - 1
    weights = channels * u.shape[2] * u.shape[3]
    down, across = (y.shape[2] + OUTPUTS - 1) // OUTPUTS, (y.shape[3] + OUTPUTS - 1) // OUTPUTS
    row = OUTPUTS * ((band * across + lanes - 1) // lanes * lanes)
    for n in range(begin, end):
        for top in range(0, down, band):
            tall = min(band, down - top)
            groups = (tall * across + lanes - 1) // lanes
            _transform_band(
                x, n, top, tall, across, pad_h, pad_w, u.shape[2], kind, phases, v, groups
            )
            for o in range(0, filters, 2):
                both = 1 if o + 1 < filters else 0  # else the same filter twice
                first = b[o] if has_bias else x.dtype.type(0)
                second = b[o + both] if has_bias else x.dtype.type(0)
                for g in range(groups):
                    outputs_of_tiles(
                        v, g * weights * lanes, channels, u, o * weights, both * weights,
                        rows, g * OUTPUTS * lanes, both * OUTPUTS * row, row, first, second, kind,
                    )  # fmt: skip
                for i in range(1 + both):
                    plane = ((n * filters + o + i) * y.shape[2] + top * OUTPUTS) * y.shape[3]
                    for r in range(min(tall * OUTPUTS, y.shape[2] - top * OUTPUTS)):
                        source = (i * OUTPUTS + r % OUTPUTS) * row
                        source += r // OUTPUTS * across * OUTPUTS
                        copy_run(rows, source, y, plane + r * y.shape[3], y.shape[3])


@device
def _transform_band(  # type: ignore[no-untyped-def]
    x, n, top, tall, across, pad_h, pad_w, size, kind, phases, v, groups
):
    """Transform some rows of tiles of an image: V is [group of L tiles][channel][n * n][L]."""
    lanes = lanes_of(x)
    channels, height, width = x.shape[1], x.shape[2], x.shape[3]
    phase = len(phases) // (size * size)
    for c in range(channels):
        for i in range(size):
            for t in range(tall):
                h = (top + t) * OUTPUTS + i - pad_h
                inside = 0 <= h < height
                phases_from_row(
                    x, ((n * channels + c) * height + (h if inside else 0)) * width,
                    -pad_w, width if inside else 0,
                    phases, i * size * phase + t * across, phase, across, kind,
                )  # fmt: skip
        for g in range(groups):
            tiles_from_phases(
                phases, g * lanes, phase, v, (g * channels + c) * size * size * lanes, kind
            )
