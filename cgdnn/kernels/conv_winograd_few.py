"""Winograd's algorithm for few input channels, forward.

With a few channels there is little to sum over: bringing them into lanes would leave most of the
lanes empty, and writing the products to memory would take longer than computing them. Here the
input is transformed with L tiles in the lanes of a vector; in the products each of its elements
meets a vector of L filters, and the sums over the channels stay in registers until a row of them
has been transformed back. The other axis follows from a small buffer.

x is in N, C, H, W order; y, too, or it has its channels in lanes: [N][Co / L][R][OW][L].

See `cgdnn.kernels.conv_winograd` for the algorithm and its rounding.
"""

from __future__ import annotations

from cgdnn.kernels._jit import INT, array, device, kernel, scratch
from cgdnn.kernels.conv_winograd import grid_of, padded, variant_of
from cgdnn.kernels.relay import fill_zero, from_lanes, to_lanes
from cgdnn.kernels.vector import lanes_of
from cgdnn.kernels.winograd_few_tiles import (
    columns_of_tiles,
    lines_from_rows,
    outputs_of_columns,
    tiles_from_line,
)
from cgdnn.kernels.winograd_points import OUTPUTS
from cgdnn.kernels.winograd_tiles import filters_to_panel

_NEAR_BYTES = 64 << 10
"""Part of the caches that V of a band may fill, in bytes of float32."""
_TOGETHER = 8
"""Tiles whose products are transformed back together: in the first cache."""


def filters_shape(taps: int, channels: int, filters: int) -> tuple[int, int, int, int]:
    """Return the shape of U: (vectors of filters, n, n * channels, L)."""
    size, lanes = taps + OUTPUTS - 1, padded(1)
    return padded(filters) // lanes, size, size * channels, lanes


def filters_scratch(taps: int, channels: int) -> int:
    """Return the elements of scratch for `winograd_few_filters`."""
    lanes = padded(1)
    return (channels * taps**2 + lanes) * lanes


def band_of(taps: int, channels: int, grid: tuple[int, int]) -> int:
    """Return how many rows of tiles, of a grid of (rows, columns), are taken at a time."""
    row = 4 * (taps + OUTPUTS - 1) ** 2 * channels * (grid[1] + 1)
    bands = -(-grid[0] // max(1, _NEAR_BYTES // row))
    return -(-grid[0] // bands)


def scratch_of(
    taps: int, channels: int, band: int, across: int, width: int
) -> tuple[int, int, int]:
    """Return the elements of the scratch arrays lines, v and columns.

    Parameters
    ----------
    taps, channels : int
    band, across : int
        Rows of tiles that are taken at a time, and the tiles in one.
    width : int
        Columns of x.
    """
    size, lanes = taps + OUTPUTS - 1, padded(1)
    whole = padded(band * (across + 1))
    return (
        (size + 1) * max(OUTPUTS * whole + lanes, padded(width)),  # the last one is a row of zeros
        size**2 * channels * whole,
        size * OUTPUTS * _TOGETHER * lanes,
    )


def plane_scratch(width: int) -> int:
    """Return the elements of the rows of a tile of L filters for outputs of this width."""
    return padded(OUTPUTS * width) * padded(1)


@kernel(array(4), array(4), scratch(1), INT, INT)
def winograd_few_filters(w, u, plane, begin, end):  # type: ignore[no-untyped-def]
    """Set u[k] to the transforms of a vector of filters, for k in [begin, end).

    Parameters
    ----------
    w : array (Co, C, taps, taps)
    u : array
        See `filters_shape`; in float64 each u[k] holds two vectors of filters.
    plane : array
        See `filters_scratch`.
    """
    lanes = lanes_of(w)
    channels = w.shape[1]
    area = w.shape[2] * w.shape[3]
    size = u.shape[1] * u.shape[2] * lanes
    parts = u.shape[3] // lanes
    for k in range(begin * parts, end * parts):
        some = max(0, min(lanes, w.shape[0] - k * lanes))
        to_lanes(
            w, k * lanes * channels * area if some else 0, channels * area, some, plane, 0,
            channels * area,
        )  # fmt: skip
        filters_to_panel(
            plane, 0, lanes, channels, u, k * size, lanes, channels * lanes,
            variant_of(OUTPUTS, w.shape[2]),
        )  # fmt: skip


@kernel(
    array(4), array(4), array(1), INT, array(4), INT, INT, INT, scratch(1), scratch(1), scratch(1),
    scratch(1), INT, INT,
)  # fmt: skip
def conv_forward_winograd_few(  # type: ignore[no-untyped-def]
    x, u, b, has_bias, y, pad_h, pad_w, band, lines, v, columns, plane, begin, end
):
    """Set y for the images [begin, end).

    Parameters
    ----------
    x : array (N, C, H, W)
    u : array
        See `filters_shape`.
    b : array (Co,)
        Not read unless `has_bias`.
    y : array (N, Co, R, OW)
    pad_h, pad_w : int
        Zeros around x.
    band : int
        Rows of tiles that are taken at a time.
    lines, v, columns, plane : arrays
        Scratch; see `scratch_of` and `plane_scratch`.
    """
    lanes = lanes_of(x)
    filters, height, width = y.shape[1], y.shape[2], y.shape[3]
    down, _ = grid_of(OUTPUTS, height, width)
    fill_zero(lines, 0, len(lines) // lanes)
    for n in range(begin, end):
        for top in range(0, down, band):
            tall = min(band, down - top)
            _transform_band(x, n, top, tall, width, pad_h, pad_w, u.shape[1], lines, v)
            for o in range(0, filters, lanes):
                some = min(lanes, filters - o)
                for t in range(tall):
                    row = (top + t) * OUTPUTS
                    rows = min(OUTPUTS, height - row)
                    _outputs_of_row(
                        v, t, u, o, b, some if has_bias else 0, columns,
                        plane, 0, width * lanes, lanes, rows, width,
                    )  # fmt: skip
                    from_lanes(
                        plane, 0, y, ((n * filters + o) * height + row) * width, height * width,
                        some, rows * width, 0,
                    )  # fmt: skip


@kernel(
    array(4), array(4), array(1), INT, array(5), INT, INT, INT, scratch(1), scratch(1), scratch(1),
    INT, INT,
)  # fmt: skip
def conv_forward_winograd_few_lanes(  # type: ignore[no-untyped-def]
    x, u, b, has_bias, y, pad_h, pad_w, band, lines, v, columns, begin, end
):
    """Set y, with its channels in lanes, for the images [begin, end).

    Parameters
    ----------
    y : array (N, Co / L, R, OW, L)
        L is that of float32, also in float64.
    x, u, b, has_bias, pad_h, pad_w, band, lines, v, columns
        As for `conv_forward_winograd_few`.
    """
    lanes = lanes_of(x)
    blocks, height, width, pixel = y.shape[1], y.shape[2], y.shape[3], y.shape[4]
    down, _ = grid_of(OUTPUTS, height, width)
    fill_zero(lines, 0, len(lines) // lanes)
    for n in range(begin, end):
        for top in range(0, down, band):
            tall = min(band, down - top)
            _transform_band(x, n, top, tall, width, pad_h, pad_w, u.shape[1], lines, v)
            for o in range(0, blocks * pixel, lanes):
                for t in range(tall):
                    row = (top + t) * OUTPUTS
                    place = ((n * blocks + o // pixel) * height + row) * width * pixel + o % pixel
                    _outputs_of_row(
                        v, t, u, o, b, lanes if has_bias else 0, columns,
                        y, place, width * pixel, pixel, min(OUTPUTS, height - row), width,
                    )  # fmt: skip


@device
def _transform_band(  # type: ignore[no-untyped-def]
    x, n, top, tall, out_width, pad_h, pad_w, size, lines, v
):
    """Transform some rows of tiles of an image: V is [group of L tiles][channel][n * n][L].

    A tile follows each row of tiles that is not one: it holds the last columns of the one before.
    """
    lanes = lanes_of(x)
    channels, height, width = x.shape[1], x.shape[2], x.shape[3]
    variant = variant_of(OUTPUTS, size - OUTPUTS + 1)
    pitch = (out_width + OUTPUTS - 1) // OUTPUTS + 1
    line = len(lines) // (size + 1)
    groups = (tall * pitch + lanes - 1) // lanes
    for c in range(channels):
        for t in range(tall):
            lines_from_rows(
                x, (n * channels + c) * height * width, (top + t) * OUTPUTS - pad_h, height, width,
                lines, t * pitch * OUTPUTS + pad_w, line, size * line, variant,
            )  # fmt: skip
        for i in range(size):
            tiles_from_line(
                lines, i * line, groups, v, (c * size + i) * size * lanes,
                channels * size * size * lanes, variant,
            )  # fmt: skip


@device
def _outputs_of_row(  # type: ignore[no-untyped-def]
    v, t, u, o, b, biased, columns, y, y_start, y_row, y_column, rows, width
):
    """Compute the vector of filters that begins with `o` for row `t` of the tiles of a band."""
    lanes = lanes_of(v)
    size = u.shape[1]
    channels, weights = u.shape[2] // size, size * u.shape[2]
    variant = variant_of(OUTPUTS, size - OUTPUTS + 1)
    across = (width + OUTPUTS - 1) // OUTPUTS
    first = 0
    while first < across:
        tile = t * (across + 1) + first
        lane = tile % lanes
        count = min(min(_TOGETHER, across - first), lanes - lane)
        columns_of_tiles(
            v, (tile - lane) * weights + lane, count, channels,
            u, o * weights, columns, 0, variant,
        )  # fmt: skip
        done = first * OUTPUTS
        outputs_of_columns(
            columns, 0, min(count * OUTPUTS, width - done), b, o, biased,
            y, y_start + done * y_column, y_row, y_column, rows, variant,
        )  # fmt: skip
        first += count
