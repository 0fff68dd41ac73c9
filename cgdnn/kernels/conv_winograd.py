"""Convolution by Winograd's minimal filtering F(4x4, 3x3) and F(4x4, 5x5), one piece on one core.

For two spatial axes, stride 1 and dilation 1. An output plane is covered with tiles of 4 x 4, each
computed from a patch of n x n inputs, n = taps + 3, by the matrices of
`cgdnn.kernels.winograd_points`. For each of the n * n frequencies the sum over channels is a
matrix product over tiles; the products need 4 (3x3) or 6.25 (5x5) times fewer multiplications than
the convolution:

* forward: V = B^T x B, U = G w G^T, M = V U, y = A^T M A + b;
* backward_data, whichever has fewer tiles: the forward pass with flipped filters over the input
  plane, or the transposed algorithm over the output plane, dM = A dy A^T, dV = dM U^T,
  dx += B dV B^T, the patches overlapping;
* backward_weights: dM = A dy A^T, dU += V^T dM, dw = G^T dU G.

Blobs stay in N, C, H, W order: a piece takes some tiles at a time (a `Blocking`), brings the
channels of a part of an image into lanes with zeros around, and works on scratch that stays in the
second cache where it can (see `cgdnn.kernels.winograd_tiles` for its layouts). U is made by a step
of its own, `winograd_filters`.

Rounding, in float32 against float64, rms over the largest magnitude of the result: about 3e-7 for
3x3 and 1e-6 for 5x5 (unfolding: 1e-7). A NaN or an infinity in x, w or dy reaches all that depends
on it, and up to a tile around.

See Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

from cgdnn import machine
from cgdnn.kernels._jit import INT, REAL, array, device, kernel, scratch
from cgdnn.kernels.relay import fill_zero, from_lanes, to_lanes
from cgdnn.kernels.vector import lanes_of
from cgdnn.kernels.winograd_points import OUTPUTS, TAPS
from cgdnn.kernels.winograd_tiles import (
    add_vectors,
    filters_to_panel,
    multiply_blocks,
    panel_columns,
    panel_to_filters,
    panel_vectors,
    tiles_from_plane,
    tiles_to_plane,
)

FORWARD, FLIPPED, TRANSPOSED = 0, 1, 2
"""What U is for: the forward pass, or one of the two ways of backward_data."""

_DEPTH = 128
"""Channels that a product sums at a time: such a panel of U stays in the first cache."""
_PADDING = 5
"""Vectors between frequencies: the places of a tile in V must not all fall into the same sets."""
_NEAR_BYTES = 800 << 10
"""Part of the second cache that U, V and M of a block may fill, in bytes of float32."""
_FEWEST_TILES, _MOST_TILES = 24, 100


def _lanes() -> int:
    """Return the lanes of a float32 vector; scratch for as many float64 elements has room."""
    return machine.vector_bytes() // 4


def _padded(count: int) -> int:
    """Return `count` rounded up to whole vectors of float32."""
    return -(-count // _lanes()) * _lanes()


def filters_shape(taps: int, group: int, depth: int, columns: int) -> tuple[int, int, int, int]:
    """Return the shape of U: (units, n * n, depth + 1, columns of a unit).

    A unit holds some columns of a group. The last row of each matrix is not used; it spreads the
    frequencies over the cache.

    Parameters
    ----------
    taps, group : int
    depth, columns : int
        Channels and filters of a group for the forward pass, the other way round for
        backward_data.
    """
    width = min(panel_vectors() * _lanes(), _padded(columns))
    return group * -(-columns // width), (taps + OUTPUTS - 1) ** 2, depth + 1, width


def filters_scratch(taps: int) -> int:
    """Return the elements of scratch for `winograd_filters`."""
    return (_lanes() * taps**2 + _lanes()) * _lanes()


@dataclass(frozen=True)
class Blocking:
    """The tiles that a piece takes together: of some images, some rows and columns of tiles.

    Attributes
    ----------
    taps : int
        Size of the kernel on both axes, one of `TAPS`.
    channels, filters : int
        Of a group: what the products sum over, and what they give.
    images, down, across : int
        Only where `down` rows and `across` columns of tiles make up an image can a block hold
        more than one.
    """

    taps: int
    channels: int
    filters: int
    images: int
    down: int
    across: int

    @property
    def frequencies(self) -> int:
        """Products for a tile."""
        return (self.taps + OUTPUTS - 1) ** 2

    @property
    def tiles(self) -> int:
        """Tiles in a block."""
        return self.images * self.down * self.across

    def plane_scratch(self) -> int:
        """Return the elements of a plane, or of the gradients of one vector's filters."""
        rows, columns = (OUTPUTS * count + self.taps - 1 for count in (self.down, self.across))
        return max((rows * columns + _lanes()) * _lanes(), filters_scratch(self.taps))

    def tiles_scratch(self, channels: int) -> int:
        """Return the elements of the transformed tiles of so many channels."""
        blocks = _padded(channels) // _lanes()
        return self.frequencies * (blocks * _tile_rows(self.tiles) + _PADDING) * _lanes()

    def gradient_scratch(self, filters: int) -> int:
        """Return the elements of dU for so many filters."""
        panel = panel_vectors() * _lanes()
        columns = min(_padded(filters), panel) * -(-filters // panel)
        return self.frequencies * (_padded(self.channels) + 1) * columns


def choose_blocking(
    taps: int, channels: int, filters: int, grid: tuple[int, int], images: int
) -> Blocking:
    """Return the blocking for images covered with a grid of tiles (rows, columns)."""
    frequencies = (taps + OUTPUTS - 1) ** 2
    weights = 4 * frequencies * _padded(channels) * _padded(filters)
    tile = 4 * frequencies * (_padded(channels) + _padded(filters))
    most = max(_FEWEST_TILES, min(_MOST_TILES, (_NEAR_BYTES - weights) // tile))
    if weights > _NEAR_BYTES:
        most = min(_MOST_TILES, max(_FEWEST_TILES, channels // 4))
    rows, columns = grid
    if rows * columns <= most:
        return Blocking(taps, channels, filters, min(images, most // (rows * columns)), *grid)
    down = max(1, most // columns)
    down = -(-rows // -(-rows // down))
    across = -(-columns // -(-columns // most))
    return Blocking(taps, channels, filters, 1, down, across)


def grid_of(height: int, width: int) -> tuple[int, int]:
    """Return the rows and columns of tiles that cover a plane."""
    return -(-height // OUTPUTS), -(-width // OUTPUTS)


@device
def _tile_rows(tiles):  # type: ignore[no-untyped-def]
    """Return the vectors from one block of transformed tiles to the next.

    Products compute whole tiles of up to 8 rows; an odd number spreads the blocks over the cache.
    """
    return (tiles + 7) // 8 * 8 + 1


@device
def _image_to_tiles(  # type: ignore[no-untyped-def]
    x, image, images, channel, channels, row, column, down, across, patch, kind,
    plane, v, v_block, v_frequency, with_sums, sums,
):
    """Transform the tiles of a block, and add up the plane of each channel in `sums`, if asked.

    The first patch begins at (row, column) of the image, which may be outside of it.
    """
    lanes = lanes_of(x)
    height, width = x.shape[2], x.shape[3]
    rows, columns = OUTPUTS * (down - 1) + patch, OUTPUTS * (across - 1) + patch
    stride = columns * lanes
    first = min(max(0, -column), columns)
    last = max(first, min(columns, width - column))
    for block in range((channels + lanes - 1) // lanes):
        c = channel + block * lanes
        valid = min(lanes, channels - block * lanes)
        for i in range(images):
            start = ((image + i) * x.shape[1] + c) * height * width + column + first
            for r in range(rows):
                if 0 <= row + r < height:
                    fill_zero(plane, r * stride, first)
                    to_lanes(
                        x, start + (row + r) * width, height * width, valid,
                        plane, r * stride + first * lanes, last - first,
                    )
                    fill_zero(plane, r * stride + last * lanes, columns - last)
                else:
                    fill_zero(plane, r * stride, columns)
            if with_sums:
                add_vectors(plane, 0, rows * columns, sums, block * lanes)
            for d in range(down):
                tiles_from_plane(
                    plane, d * OUTPUTS * stride, stride,
                    v, block * v_block + (i * down + d) * across * lanes, v_frequency,
                    across, kind,
                )


@device
def _tiles_to_image(  # type: ignore[no-untyped-def]
    m, m_block, m_frequency, image, images, channel, channels, row, column, down, across, patch,
    kind, plane, bias, has_bias, y,
):
    """Set the part of y that the products of a block give."""
    lanes = lanes_of(y)
    height, width = y.shape[2], y.shape[3]
    rows, columns = OUTPUTS * (down - 1) + patch, OUTPUTS * (across - 1) + patch
    stride = columns * lanes
    first = min(max(0, -column), columns)
    last = max(first, min(columns, width - column))
    for block in range((channels + lanes - 1) // lanes):
        c = channel + block * lanes
        valid = min(lanes, channels - block * lanes)
        for i in range(images):
            if patch > OUTPUTS:
                fill_zero(plane, 0, rows * columns)
            for d in range(down):
                tiles_to_plane(
                    m, block * m_block + (i * down + d) * across * lanes, m_frequency, across,
                    plane, d * OUTPUTS * stride, stride, bias, c, valid if has_bias else 0, kind,
                )
            start = ((image + i) * y.shape[1] + c) * height * width + column + first
            for r in range(max(0, -row), min(rows, height - row)):
                from_lanes(
                    plane, r * stride + first * lanes, y, start + (row + r) * width,
                    height * width, valid, last - first, 0,
                )


@kernel(array(4), array(4), INT, INT, INT, scratch(1), INT, INT)
def winograd_filters(w, u, group, columns, form, plane, begin, end):  # type: ignore[no-untyped-def]
    """Make the units [begin, end) of U, the transformed filters.

    Parameters
    ----------
    w : array (Co, C / group, taps, taps)
    u : array (filters_shape(taps, group, depth, columns))
    group : int
    columns : int
        Filters of a group, where `form` is FORWARD, and `depth` the channels of a group; the other
        way round where it is FLIPPED or TRANSPOSED.
    form : int
    plane : array (filters_scratch(taps),)
    """
    lanes = lanes_of(w)
    area = w.shape[2] * w.shape[3]
    filters, channels = w.shape[0] // group, w.shape[1]
    units, depth, width = u.shape[0] // group, u.shape[2] - 1, u.shape[3]
    frequency = u.shape[2] * width
    first, step = 0, lanes
    if form == FLIPPED:
        first, step = (area - 1) * lanes, -lanes
    for unit in range(begin, end):
        g = unit // units
        left = (unit - g * units) * width
        for block in range(left, min(left + width, columns), lanes):
            valid = min(lanes, columns - block)
            for k in range(0, depth, lanes):
                count = min(lanes, depth - k)
                if form == FORWARD:
                    source = ((g * filters + block) * channels + k) * area
                    to_lanes(w, source, channels * area, valid, plane, 0, count * area)
                else:
                    for i in range(count):
                        source = ((g * filters + k + i) * channels + block) * area
                        to_lanes(w, source, area, valid, plane, i * area * lanes, area)
                filters_to_panel(
                    plane, first, step, count,
                    u, unit * u.shape[1] * frequency + k * width + block - left, width, frequency,
                    w.shape[2] // 2 - 1,
                )


_BLOCKING = (INT, INT, INT)


@kernel(
    array(4), array(4), array(1), INT, array(4), INT, INT, INT, INT, INT, *_BLOCKING,
    scratch(1), scratch(1), scratch(1), INT, INT,
)
def conv_winograd(  # type: ignore[no-untyped-def]
    x, u, b, has_bias, y, group, taps, transposed, pad_h, pad_w, images, down, across,
    plane, v, m, begin, end,
):
    """Set y for the images [begin, end): the forward pass, or with another U the data gradient.

    Parameters
    ----------
    x : array (N, C, H, W)
        dy for a data gradient.
    u : array (filters_shape(taps, group, C / group, Co / group))
    b : array (Co,)
        Not read unless `has_bias`.
    y : array (N, Co, R, OW)
        dx for a data gradient.
    group, taps : int
    transposed : int
        Not 0 for the transposed algorithm; a block must then hold whole images.
    pad_h, pad_w : int
        Zeros around x, or around y where `transposed`.
    images, down, across : int
        The blocking, of the grid of tiles of x where `transposed`, else of y.
    plane, v, m : arrays
        Scratch; see `Blocking`.
    """
    lanes = lanes_of(x)
    channels, filters = x.shape[1] // group, y.shape[1] // group
    channel_blocks, filter_blocks = (channels + lanes - 1) // lanes, (filters + lanes - 1) // lanes
    block = _tile_rows(images * down * across) * lanes
    v_frequency = channel_blocks * block + _PADDING * lanes
    m_frequency = filter_blocks * block + _PADDING * lanes
    kind, patch, opposite = taps // 2 - 1, taps + OUTPUTS - 1, OUTPUTS
    grid = y
    if transposed:
        kind, patch, opposite = kind + len(TAPS), opposite, patch
        grid = x
    top, left = (0, 0) if transposed else (-pad_h, -pad_w)
    y_top, y_left = (-pad_h, -pad_w) if transposed else (0, 0)
    grid_rows = (grid.shape[2] + OUTPUTS - 1) // OUTPUTS
    grid_columns = (grid.shape[3] + OUTPUTS - 1) // OUTPUTS
    for image in range(begin, end, images):
        ni = min(images, end - image)
        for row in range(0, grid_rows, down):
            nd = min(down, grid_rows - row)
            for column in range(0, grid_columns, across):
                na = min(across, grid_columns - column)
                for g in range(group):
                    _image_to_tiles(
                        x, image, ni, g * channels, channels,
                        row * OUTPUTS + top, column * OUTPUTS + left, nd, na, patch, kind,
                        plane, v, block, v_frequency, False, plane,
                    )
                    _multiply(v, block, v_frequency, u, g, m, m_frequency, ni * nd * na, filters)
                    _tiles_to_image(
                        m, block, m_frequency, image, ni, g * filters, filters,
                        row * OUTPUTS + y_top, column * OUTPUTS + y_left, nd, na, opposite, kind,
                        plane, b, has_bias, y,
                    )


@device
def _multiply(v, block, v_frequency, u, g, m, m_frequency, tiles, filters):  # type: ignore[no-untyped-def]
    """M = V U for the group g, frequency by frequency."""
    lanes = lanes_of(v)
    frequencies, channels, width = u.shape[1], u.shape[2] - 1, u.shape[3]
    units = (filters + width - 1) // width
    panel = panel_columns(v)
    for frequency in range(frequencies):
        for column in range(0, filters, panel):
            unit = column // width
            u_start = ((g * units + unit) * frequencies + frequency) * u.shape[2] * width
            u_start += column - unit * width
            vectors = (min(panel, filters - column) + lanes - 1) // lanes
            for k in range(0, channels, _DEPTH):
                multiply_blocks(
                    v, frequency * v_frequency + k // lanes * block,
                    lanes, lanes * lanes, 1, block, tiles, min(_DEPTH, channels - k),
                    u, u_start + k * width, width, lanes, vectors,
                    m, frequency * m_frequency + column // lanes * block,
                    lanes, lanes * lanes, block, k,
                )


@kernel(
    array(4), array(4), array(2), array(2), INT, INT, INT, INT, INT, *_BLOCKING, INT,
    scratch(1), scratch(1), scratch(1), scratch(1), scratch(1),
    INT, REAL, REAL, INT, INT, INT, INT,
)
def conv_backward_weights_winograd(  # type: ignore[no-untyped-def]
    x, dy, dw, db, has_bias, group, taps, pad_h, pad_w, images, down, across, together,
    plane, v, m, du, sums, piece, keep_w, keep_b, o_begin, o_end, begin, end,
):
    """Set or add to the gradients of the filters [o_begin, o_end) from the images [begin, end).

    Parameters
    ----------
    x : array (N, C, H, W)
    dy : array (N, Co, R, OW)
    dw : array (pieces, Co * C / group * taps * taps)
        Row `piece` is written.
    db : array (pieces, Co)
        Likewise; not touched unless `has_bias`.
    group, taps : int
    pad_h, pad_w : int
        Zeros around x.
    images, down, across : int
        The blocking of the grid of tiles of dy.
    together : int
        Filters of a group whose dU is kept at a time.
    plane, v, m, du : arrays
        Scratch; see `Blocking`.
    sums : array (filters rounded up to whole vectors,)
    keep_w, keep_b : real
        Where 0, what dw or db holds is overwritten, else added to.
    """
    lanes = lanes_of(x)
    channels, filters = x.shape[1] // group, dy.shape[1] // group
    channel_blocks, filter_blocks = (channels + lanes - 1) // lanes, (together + lanes - 1) // lanes
    block = _tile_rows(images * down * across) * lanes
    v_frequency = channel_blocks * block + _PADDING * lanes
    m_frequency = filter_blocks * block + _PADDING * lanes
    kind, patch = taps // 2 - 1, taps + OUTPUTS - 1
    width = min(panel_columns(x), filter_blocks * lanes)
    du_panel = (channel_blocks * lanes + 1) * width
    du_frequency = (together + width - 1) // width * du_panel
    grid_rows = (dy.shape[2] + OUTPUTS - 1) // OUTPUTS
    grid_columns = (dy.shape[3] + OUTPUTS - 1) // OUTPUTS
    for g in range(group):
        last = min(o_end, (g + 1) * filters)
        for o in range(max(o_begin, g * filters), last, together):
            count = min(together, last - o)
            fill_zero(sums, 0, (count + lanes - 1) // lanes)
            keep = 0
            for image in range(begin, end, images):
                ni = min(images, end - image)
                for row in range(0, grid_rows, down):
                    nd = min(down, grid_rows - row)
                    for column in range(0, grid_columns, across):
                        na = min(across, grid_columns - column)
                        _image_to_tiles(
                            dy, image, ni, o, count, row * OUTPUTS, column * OUTPUTS, nd, na,
                            OUTPUTS, kind + len(TAPS), plane, m, block, m_frequency, has_bias, sums,
                        )
                        _image_to_tiles(
                            x, image, ni, g * channels, channels,
                            row * OUTPUTS - pad_h, column * OUTPUTS - pad_w, nd, na,
                            patch, kind, plane, v, block, v_frequency, 0, sums,
                        )
                        for frequency in range(patch * patch):
                            for left in range(0, count, width):
                                vectors = (min(width, count - left) + lanes - 1) // lanes
                                multiply_blocks(
                                    v, frequency * v_frequency, 1, block, lanes, lanes * lanes,
                                    channels, ni * nd * na,
                                    m, frequency * m_frequency + left // lanes * block,
                                    lanes, block, vectors,
                                    du, frequency * du_frequency + left // width * du_panel,
                                    width, lanes * width, lanes, keep,
                                )
                        keep = 1
            _finish_filters(
                du, width, du_panel, du_frequency, plane, o, count, channels, taps,
                dw, piece, 1 if keep_w != 0 else 0,
            )
            if has_bias:
                for i in range(count):
                    old = db[piece, o + i] if keep_b != 0 else sums[i] * 0
                    db[piece, o + i] = old + sums[i]


@device
def _finish_filters(  # type: ignore[no-untyped-def]
    du, width, du_panel, du_frequency, plane, o, count, channels, taps, dw, piece, keep
):
    """Set or add to the gradients of the filters [o, o + count) from dU."""
    lanes = lanes_of(du)
    area = taps * taps
    for left in range(0, count, lanes):
        panel = left // width
        start = panel * du_panel + left - panel * width
        for c in range(0, channels, lanes):
            some = min(lanes, channels - c)
            panel_to_filters(
                du, start + c * width, width, du_frequency, some, plane, 0, taps // 2 - 1
            )
            from_lanes(
                plane, 0,
                dw, piece * dw.shape[1] + ((o + left) * channels + c) * area, channels * area,
                min(lanes, count - left), some * area, keep,
            )
