"""Convolution by Winograd's minimal filtering F(m x m, r x r), one piece on one core.

For two spatial axes, stride 1 and dilation 1. An output plane is covered with tiles of m x m
outputs, for r x r taps each computed from a patch of m + r - 1 inputs on each axis by the matrices
of `cgdnn.kernels.winograd_points`. For each of the n * n frequencies the sum over channels is a
matrix product over tiles. Where tiles fill the plane, F(4x4, 3x3), F(5x5, 3x3) and F(7x7, 3x3) need
4, 4.6 and 5.4 times fewer multiplications in the products than the convolution, F(4x4, 5x5),
F(7x7, 5x5) and F(8x8, 5x5) 6.25, 8.5 and 9.5; a plane of 14 x 14 outputs is 16 tiles of 36 products
by the first, 9 of 49 by the second and 4 of 81 by the third.

* forward: V = B^T x B, U = G w G^T, M = V U, y = A^T M A + b;
* backward_data, whichever has fewer tiles: the forward pass with flipped filters over the input
  plane, or the transposed algorithm over the output plane, dM = A dy A^T, dV = dM U^T,
  dx += B dV B^T, the patches overlapping;
* backward_weights: dM = A dy A^T, dU += V^T dM, dw = G^T dU G.

A piece takes some tiles at a time (a `Blocking`), brings the channels of a part of an image into
lanes, where the blob does not have them there, with zeros around, and works on scratch that stays
in the second cache where it can (see `cgdnn.kernels.winograd_tiles` for its layouts). U is made by
a step of its own, `winograd_filters`.

Rounding, in float32 against float64, rms over the largest magnitude of the result, with 32 and with
512 channels: 2e-7 and 5e-7 for F(4x4, 3x3), 3e-7 and 9e-7 for F(5x5, 3x3), 1.3e-6 and 5e-6 for
F(7x7, 3x3), 6e-7 and 2e-6 for F(4x4, 5x5), 4e-7 and 1.6e-6 for F(7x7, 5x5), 9e-7 and 3.3e-6 for
F(8x8, 5x5); weight gradients, which sum over tiles, up to 4e-6 for F(7x7, 3x3) and 1e-6 for the
others (unfolding: 1e-7). A NaN or an infinity in x, w or dy reaches all that depends on it, and up
to a tile around.

See Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

from cgdnn import machine
from cgdnn.kernels._jit import INT, REAL, array, device, kernel, scratch
from cgdnn.kernels.relay import copy_vectors, fill_zero, from_lanes, prefetch_run, to_lanes
from cgdnn.kernels.vector import lanes_of
from cgdnn.kernels.winograd_points import SIZES, VARIANTS
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
_PART_BYTES = 6 << 20
"""Part of the third cache that a part of U may fill, in bytes of float32."""
_FETCHED = 1 << 19
"""Most elements of V and M of a block behind which places of y are still near."""
_FEWEST_TILES, _MOST_TILES = 32, 100
_MOST_OF_IMAGE = 64
"""Tiles that a pass takes together of a part of an image, at most."""
_LEAST_SUMMED, _MOST_SUMMED = 20, 64 * 36
"""Tiles that backward_weights takes together where there are so many, and elements of a channel of
the transformed tiles beyond which it takes no more: dU is passed through for each block of them."""
_ROWS, _BLOCK_ROWS = 8, 4
"""Most tiles that a product computes at a time; as many take as long as a block does besides."""


def _lanes() -> int:
    """Return the lanes of a float32 vector; scratch for as many float64 elements has room."""
    return machine.vector_bytes() // 4


def padded(count: int) -> int:
    """Return `count` rounded up to whole vectors of float32."""
    return -(-count // _lanes()) * _lanes()


def filters_shape(
    outputs: int, taps: int, group: int, depth: int, columns: int
) -> tuple[int, int, int, int]:
    """Return the shape of U: (units, n * n, depth + 1, columns of a unit).

    A unit holds some columns of a group. The last row of each matrix is not used; it spreads the
    frequencies over the cache.

    Parameters
    ----------
    outputs, taps : int
        One of `VARIANTS`.
    group : int
    depth, columns : int
        Channels and filters of a group for the forward pass, the other way round for
        backward_data.
    """
    width = min(panel_vectors() * _lanes(), padded(columns))
    return group * -(-columns // width), frequencies_of(outputs, taps), depth + 1, width


def part_shape(outputs: int, taps: int, depth: int, columns: int) -> tuple[int, int, int]:
    """Return the shape of the part of U that `winograd_products` keeps in scratch."""
    _, frequencies, _, width = filters_shape(outputs, taps, 1, depth, columns)
    rows = _PART_BYTES // (4 * frequencies * width) // _lanes() * _lanes()
    return frequencies, min(max(rows, _lanes()), padded(depth)) + 1, width


def filters_scratch(taps: int) -> int:
    """Return the elements of scratch for `winograd_filters`."""
    return (_lanes() * taps**2 + _lanes()) * _lanes()


@dataclass(frozen=True)
class Blocking:
    """The tiles that a piece takes together: of some images, some rows and columns of tiles.

    Attributes
    ----------
    outputs, taps : int
        Outputs of a tile, and size of the kernel, on both axes: one of `VARIANTS`.
    channels, filters : int
        Of a group: what the products sum over, and what they give.
    images, down, across : int
        Only where `down` rows and `across` columns of tiles make up an image can a block hold
        more than one, and then a divisor of the batch.
    """

    outputs: int
    taps: int
    channels: int
    filters: int
    images: int
    down: int
    across: int

    @property
    def frequencies(self) -> int:
        """Products for a tile."""
        count: int = frequencies_of(self.outputs, self.taps)
        return count

    @property
    def tiles(self) -> int:
        """Tiles in a block."""
        return self.images * self.down * self.across

    def plane_scratch(self) -> int:
        """Return the elements of a plane, or of the gradients of one vector's filters."""
        rows, columns = (self.outputs * count + self.taps - 1 for count in (self.down, self.across))
        return max((rows * columns + _lanes()) * _lanes(), filters_scratch(self.taps))

    def tiles_scratch(self, channels: int) -> int:
        """Return the elements of the transformed tiles of so many channels."""
        rows: int = _tile_rows(self.tiles)
        return self.frequencies * (padded(channels) * rows + _PADDING * _lanes())

    def gradient_scratch(self, filters: int) -> int:
        """Return the elements of dU for so many filters."""
        panel = panel_vectors() * _lanes()
        # A panel of float64 has half the columns, so there may be one more of them.
        columns = padded(filters) if 2 * filters <= panel else -(-filters // panel) * panel
        return self.frequencies * (padded(self.channels) + 1) * columns


def choose_blocking(
    outputs: int,
    taps: int,
    channels: int,
    filters: int,
    grid: tuple[int, int],
    images: int,
    *,
    summed: bool = False,
) -> Blocking:
    """Return the blocking for a batch of images covered with a grid of tiles (rows, columns).

    `summed` is whether it is for backward_weights, whose products sum over the tiles.
    """
    frequencies = frequencies_of(outputs, taps)
    weights = 4 * frequencies * padded(channels) * padded(filters)
    tile = 4 * frequencies * (padded(channels) + padded(filters))
    room = _NEAR_BYTES - weights
    if room < 0:  # U comes from the third cache for each block, and V and M, less than that, too
        room = 2 * weights // 3
    most = min(_MOST_TILES, max(_FEWEST_TILES, room // tile))
    if summed:
        most = min(most, max(_LEAST_SUMMED, _MOST_SUMMED // frequencies))
    rows, columns = grid
    if rows * columns <= most:
        counts = range(1, min(images, most // (rows * columns)) + 1)
        unit = 1 if summed else _ROWS
        together = min(
            (count for count in counts if images % count == 0),
            key=lambda count: (-(-rows * columns * count // unit) * unit + _BLOCK_ROWS) / count,
        )
        return Blocking(outputs, taps, channels, filters, together, *grid)
    most = min(most, _MOST_OF_IMAGE)
    down = max(1, most // columns)
    down = -(-rows // -(-rows // down))
    across = -(-columns // -(-columns // most))
    return Blocking(outputs, taps, channels, filters, 1, down, across)


@device
def grid_of(outputs, height, width):  # type: ignore[no-untyped-def]
    """Return the rows and columns of tiles of so many outputs that cover a plane."""
    return (height + outputs - 1) // outputs, (width + outputs - 1) // outputs


@device
def variant_of(outputs, taps):  # type: ignore[no-untyped-def]
    """Return the index of one of `VARIANTS`."""
    index = 0
    while VARIANTS[index][0] != outputs or VARIANTS[index][1] != taps:
        index += 1
    return index


@device
def frequencies_of(outputs, taps):  # type: ignore[no-untyped-def]
    """Return the products for a tile, n * n."""
    return SIZES[variant_of(outputs, taps)] ** 2


@device
def _tile_rows(tiles):  # type: ignore[no-untyped-def]
    """Return the vectors from one block of transformed tiles to the next.

    Products compute whole `_ROWS`; an odd number spreads the blocks over the cache.
    """
    return (tiles + _ROWS - 1) // _ROWS * _ROWS + 1


@device
def _block_count(plane, blocking, begin, end):  # type: ignore[no-untyped-def]
    """Return the blocks of the groups [begin, end) of images, with planes of this size."""
    _, down, across, outputs = blocking
    rows, columns = grid_of(outputs, plane[0], plane[1])
    return (end - begin) * ((rows + down - 1) // down) * ((columns + across - 1) // across)


@device
def _block_at(index, plane, blocking, begin):  # type: ignore[no-untyped-def]
    """Return a block: first and count of images, tile rows and tile columns, outputs of a tile."""
    images, down, across, outputs = blocking
    rows, columns = grid_of(outputs, plane[0], plane[1])
    row_blocks, column_blocks = (rows + down - 1) // down, (columns + across - 1) // across
    above = index // column_blocks
    image = (begin + above // row_blocks) * images
    row, column = above % row_blocks * down, index % column_blocks * across
    return (
        image, images, row, min(down, rows - row),
        column, min(across, columns - column), outputs,
    )  # fmt: skip


@device
def sides(outputs, taps, transposed, pad_h, pad_w):  # type: ignore[no-untyped-def]
    """Return the kind of the transforms, and for x and for y the shift and the size of patches."""
    kind = 2 * variant_of(outputs, taps) + transposed
    around, nothing = (-pad_h, -pad_w), (0, 0)
    if transposed:
        return kind, nothing, outputs, around, taps + outputs - 1
    return kind, around, taps + outputs - 1, nothing, outputs


@device
def _patches(first, count, outputs, patch, shift, size):  # type: ignore[no-untyped-def]
    """Return what some tiles cover on an axis: the first place, the places, those that exist.

    What exists is given as its first place among those covered, and the one after its last.
    """
    start, length = first * outputs + shift, outputs * (count - 1) + patch
    begin = min(max(0, -start), length)
    return start, length, begin, max(begin, min(length, size - start))


@device
def _image_to_tiles(  # type: ignore[no-untyped-def]
    x, pitch, channel, channels, block, shift, patch, kind, plane, v, v_start, v_block,
    v_frequency, sums, summed,
):  # fmt: skip
    """Transform the tiles of a block; add each channel's plane to `sums` if `summed` is 1."""
    lanes = lanes_of(x)
    image, images, _, down, _, across, _ = block
    for first in range(0, channels, lanes):
        for i in range(images):
            _plane_to_tiles(
                x, _plane_at(x, image + i, channel + first, pitch), pitch,
                min(lanes, channels - first), block, shift, patch, kind, plane,
                v, v_start + first // lanes * v_block + i * down * across * lanes, v_frequency,
                sums, first, summed,
            )  # fmt: skip


@device
def _plane_at(x, image, channel, pitch):  # type: ignore[no-untyped-def]
    """Return where the first of a vector of channels begins, with places `pitch` apart."""
    area = x.shape[2] * x.shape[3]
    return (image * x.shape[1] + channel // pitch * pitch) * area + channel % pitch


@device
def _plane_to_tiles(  # type: ignore[no-untyped-def]
    x, start, pitch, valid, block, shift, patch, kind, plane, v, v_start, v_frequency,
    sums, sums_start, summed,
):  # fmt: skip
    """Transform the tiles of a block of `valid` planes of x, one a lane."""
    lanes = lanes_of(x)
    _, _, tile_row, down, tile_column, across, outputs = block
    row, rows, top, bottom = _patches(tile_row, down, outputs, patch, shift[0], x.shape[2])
    column, columns, left, right = _patches(
        tile_column, across, outputs, patch, shift[1], x.shape[3]
    )
    start += (row * x.shape[3] + column + left) * pitch
    if _is_whole(rows, columns, top, bottom, left, right) and pitch == lanes:
        stride = x.shape[3] * lanes
    else:
        stride = columns * lanes
        fill_zero(plane, 0, top * columns)
        for r in range(top, bottom):
            fill_zero(plane, r * stride, left)
            source, target = start + r * x.shape[3] * pitch, r * stride + left * lanes
            if pitch == 1:
                area = x.shape[2] * x.shape[3]
                to_lanes(x, source, area, valid, plane, target, right - left)
            else:
                copy_vectors(x, source, pitch, plane, target, lanes, right - left)
            fill_zero(plane, r * stride + right * lanes, columns - right)
        fill_zero(plane, bottom * stride, (rows - bottom) * columns)
        start = -1
    add_vectors(plane, x, start, stride, rows * summed, columns, sums, sums_start * summed)
    for d in range(down):
        tiles_from_plane(
            plane, x, start, d * outputs * stride, stride,
            v, v_start + d * across * lanes, v_frequency, across, kind,
        )  # fmt: skip


@device
def _is_whole(rows, columns, top, bottom, left, right):  # type: ignore[no-untyped-def]
    """Tell whether all places that some tiles cover exist."""
    return top == 0 and bottom == rows and left == 0 and right == columns


@device
def _tiles_to_image(  # type: ignore[no-untyped-def]
    m, m_start, m_block, m_frequency, channel, channels, block, shift, patch, kind, plane,
    bias, has_bias, y, pitch,
):  # fmt: skip
    """Set the part of y that the products of a block give."""
    lanes = lanes_of(y)
    image, images, _, down, _, across, _ = block
    for first in range(0, channels, lanes):
        valid = min(lanes, channels - first)
        for i in range(images):
            _tiles_to_plane(
                m, m_start + first // lanes * m_block + i * down * across * lanes, m_frequency,
                block, shift, patch, kind, plane, bias, channel + first, valid * has_bias,
                y, _plane_at(y, image + i, channel + first, pitch), pitch, valid,
            )  # fmt: skip


@device
def _tiles_to_plane(  # type: ignore[no-untyped-def]
    m, m_start, m_frequency, block, shift, patch, kind, plane, bias, bias_start, biases,
    y, start, pitch, valid,
):  # fmt: skip
    """Set a block of `valid` planes of y, one from each lane."""
    lanes = lanes_of(y)
    _, _, tile_row, down, tile_column, across, outputs = block
    row, rows, top, bottom = _patches(tile_row, down, outputs, patch, shift[0], y.shape[2])
    column, columns, left, right = _patches(
        tile_column, across, outputs, patch, shift[1], y.shape[3]
    )
    start += (row * y.shape[3] + column + left) * pitch
    in_place = pitch == lanes and patch == outputs
    if in_place and _is_whole(rows, columns, top, bottom, left, right):
        stride, place = y.shape[3] * lanes, start
    else:
        stride, place = columns * lanes, -1
    if patch > outputs:
        fill_zero(plane, 0, rows * columns)
    for d in range(down):
        tiles_to_plane(
            m, m_start + d * across * lanes, m_frequency, across,
            plane, y, place, d * outputs * stride, stride, bias, bias_start, biases, kind,
        )  # fmt: skip
    if place < 0:
        for r in range(top, bottom):
            source, target = r * stride + left * lanes, start + r * y.shape[3] * pitch
            if pitch == 1:
                area = y.shape[2] * y.shape[3]
                from_lanes(plane, source, y, target, area, valid, right - left, 0)
            else:
                copy_vectors(plane, source, lanes, y, target, pitch, right - left)


@device
def _covered(x, pitch, channel, channels, block, shift, patch):  # type: ignore[no-untyped-def]
    """Return the pieces of memory with the rows that a block covers of x.

    The first place of the first one, how many there are, their distance and length.
    """
    image, images, tile_row, down, _, _, outputs = block
    row, _, top, bottom = _patches(tile_row, down, outputs, patch, shift[0], x.shape[2])
    area, width = x.shape[2] * x.shape[3], x.shape[3]
    start = _plane_at(x, image, channel, pitch) + (row + top) * width * pitch
    if bottom - top < x.shape[2]:
        return start, channels // pitch, area * pitch, (bottom - top) * width * pitch
    if channels < x.shape[1]:
        return start, images, x.shape[1] * area, channels * area
    return start, 1, 0, images * channels * area


@device
def _shares(pieces, parts):  # type: ignore[no-untyped-def]
    """Return how to share pieces of memory among so many products, which bring them near.

    The first place, products for a piece, pieces for a product, distance and length of a share.
    """
    start, count, distance, length = pieces
    if count > parts:
        return start, 1, (count + parts - 1) // parts, distance, length
    each = parts // max(count, 1)
    return start, each, 1, distance, (length + each - 1) // each


@device
def _share_of(shares, part):  # type: ignore[no-untyped-def]
    """Return a share as `multiply_blocks` takes it: its start, its length and the next one."""
    start, each, many, distance, length = shares
    piece = part // each
    start += piece * many * distance + (part - piece * each) * length
    return start, length, distance if many > 1 else 0


@kernel(array(4), array(4), INT, INT, INT, INT, scratch(1), INT, INT)
def winograd_filters(w, u, outputs, group, columns, form, plane, begin, end):  # type: ignore[no-untyped-def]
    """Make the units [begin, end) of U, the transformed filters.

    Parameters
    ----------
    w : array (Co, C / group, taps, taps)
    u : array (filters_shape(outputs, taps, group, depth, columns))
    outputs, group : int
    columns : int
        Filters of a group, where `form` is FORWARD, and `depth` the channels of a group; the other
        way round where it is FLIPPED or TRANSPOSED.
    form : int
    plane : array (filters_scratch(taps),)
    """
    for unit in range(begin, end):
        _transform_filters(
            w, variant_of(outputs, w.shape[2]), group, columns, form, unit, u.shape[3],
            0, u.shape[2] - 1,
            plane, u, unit * u.shape[1] * u.shape[2] * u.shape[3], u.shape[2] * u.shape[3],
        )  # fmt: skip


@device
def _transform_filters(  # type: ignore[no-untyped-def]
    w, variant, group, columns, form, unit, width, k_begin, k_end, plane, u, u_start, u_frequency
):
    """Make the rows [k_begin, k_end) of a unit of U, whose rows are `width` apart."""
    lanes = lanes_of(w)
    area = w.shape[2] * w.shape[3]
    filters, channels = w.shape[0] // group, w.shape[1]
    g, left = _unit_at(unit, columns, width)
    first, step = 0, lanes
    if form == FLIPPED:
        first, step = (area - 1) * lanes, -lanes
    blocks = (min(width, columns - left) + lanes - 1) // lanes
    chunks = (k_end - k_begin + lanes - 1) // lanes
    for index in range(blocks * chunks):  # as w lies in memory
        if form == FORWARD:
            block, chunk = index // chunks, index % chunks
        else:
            block, chunk = index % blocks, index // blocks
        column, k = left + block * lanes, k_begin + chunk * lanes
        valid, count = min(lanes, columns - column), min(lanes, k_end - k)
        if form == FORWARD:
            source = ((g * filters + column) * channels + k) * area
            for i in range(valid):
                prefetch_run(w, source + i * channels * area + lanes * area, lanes * area)
            to_lanes(w, source, channels * area, valid, plane, 0, count * area)
        else:
            for i in range(count):
                source = ((g * filters + k + i) * channels + column) * area
                prefetch_run(w, source + lanes * channels * area, valid * area)
                to_lanes(w, source, area, valid, plane, i * area * lanes, area)
        filters_to_panel(
            plane, first, step, count,
            u, u_start + (k - k_begin) * width + column - left, width, u_frequency, variant,
        )  # fmt: skip


@device
def _unit_at(unit, columns, width):  # type: ignore[no-untyped-def]
    """Return the group of a unit and its first column there."""
    units = (columns + width - 1) // width
    g = unit // units
    return g, (unit - g * units) * width


@kernel(
    array(4), INT, array(4), array(1), INT, array(4), INT, INT, INT, INT, INT, INT, INT, INT, INT,
    INT, scratch(1), scratch(1), scratch(1), INT, INT,
)  # fmt: skip
def conv_winograd(  # type: ignore[no-untyped-def]
    x, x_pitch, u, b, has_bias, y, y_pitch, group, outputs, taps, transposed, pad_h, pad_w,
    images, down, across, plane, v, m, begin, end,
):  # fmt: skip
    """Set y for some images: the forward pass, or with another U the data gradient.

    Parameters
    ----------
    x : array (N, C, H, W)
        dy for a data gradient.
    x_pitch, y_pitch : int
        What places of a plane are apart: 1; or L where the values lie as [N][C / L][H][W][L], for
        channels of a group that L divides.
    u : array (filters_shape(outputs, taps, group, C / group, Co / group))
    b : array (Co,)
        Not read unless `has_bias`.
    y : array (N, Co, R, OW)
        dx for a data gradient.
    group, outputs, taps : int
    transposed : int
        1 for the transposed algorithm, where a block must hold whole images, else 0.
    pad_h, pad_w : int
        Zeros around x, or around y where `transposed`.
    images, down, across : int
        The blocking, of the grid of tiles of x where `transposed`, else of y.
    plane, v, m : arrays
        Scratch; see `Blocking`.
    begin, end : int
        Range of groups of `images` images.
    """
    lanes = lanes_of(x)
    channels, filters = x.shape[1] // group, y.shape[1] // group
    v_block = _tile_rows(images * down * across) * lanes
    v_frequency = (channels + lanes - 1) // lanes * v_block + _PADDING * lanes
    m_frequency = (filters + lanes - 1) // lanes * v_block + _PADDING * lanes
    kind, x_shift, x_patch, y_shift, y_patch = sides(outputs, taps, transposed, pad_h, pad_w)
    covered = (x.shape[2], x.shape[3]) if transposed else (y.shape[2], y.shape[3])
    blocking = (images, down, across, outputs)
    count = _block_count(covered, blocking, begin, end)
    # Who has computed these groups often goes on with the next ones: their first block is brought
    # near, too.
    last = _block_count(covered, blocking, begin, x.shape[0] // images) * group - 1
    frequencies, size, width = u.shape[1], u.shape[2] * u.shape[3], u.shape[3]
    units = (filters + width - 1) // width
    calls = frequencies * units * ((channels + _DEPTH - 1) // _DEPTH)
    # What y holds is read before it is written, but would be gone again behind large V and M.
    y_calls = calls // 2 if frequencies * (v_frequency + m_frequency) <= _FETCHED else 0
    for unit in range(count * group):
        g = unit % group
        block = _block_at(unit // group, covered, blocking, begin)
        tiles = block[1] * block[3] * block[5]
        _image_to_tiles(
            x, x_pitch, g * channels, channels, block, x_shift, x_patch, kind,
            plane, v, 0, v_block, v_frequency, plane, 0,
        )  # fmt: skip
        y_shares = _shares(
            _covered(y, y_pitch, g * filters, filters, block, y_shift, y_patch), max(1, y_calls)
        )
        after = min(unit + 1, last)
        ahead = _block_at(after // group, covered, blocking, begin)
        x_shares = _shares(
            _covered(x, x_pitch, after % group * channels, channels, ahead, x_shift, x_patch),
            calls - y_calls,
        )  # fmt: skip
        call = 0
        for frequency in range(frequencies):
            after = frequency + 1 if frequency + 1 < frequencies else 0
            for column in range(units):
                u_start = ((g * units + column) * frequencies + frequency) * size
                u_next = u_start + frequencies * size
                if column + 1 == units:
                    u_next = (g * units * frequencies + after) * size
                for k in range(0, channels, _DEPTH):
                    if call < y_calls:
                        near, share = y, _share_of(y_shares, call)
                    else:
                        near, share = x, _share_of(x_shares, call - y_calls)
                    call += 1
                    _multiply(
                        v, frequency * v_frequency + k // lanes * v_block, tiles,
                        min(_DEPTH, channels - k),
                        u, u_start + k * width, width, min(width, filters - column * width),
                        m, frequency * m_frequency + column * width // lanes * v_block, v_block, k,
                        u_start + (k + _DEPTH) * width if k + _DEPTH < channels else u_next,
                        near, share,
                    )  # fmt: skip
        _tiles_to_image(
            m, 0, v_block, m_frequency, g * filters, filters, block, y_shift, y_patch, kind,
            plane, b, has_bias, y, y_pitch,
        )  # fmt: skip


@device
def _multiply(  # type: ignore[no-untyped-def]
    v, v_start, tiles, depth, u, u_start, width, columns, m, m_start, v_block, keep, ahead,
    near, share,
):  # fmt: skip
    """M (+)= V U for one frequency, one unit of filters and some channels.

    The rows of U that are needed next begin at `ahead`. Meanwhile a share of `near` is brought
    near, too.
    """
    lanes = lanes_of(v)
    panel = panel_columns(v)
    for column in range(0, columns, panel):
        multiply_blocks(
            v, v_start, lanes, lanes * lanes, 1, v_block, tiles, depth,
            u, u_start + column, width, lanes, (min(panel, columns - column) + lanes - 1) // lanes,
            m, m_start + column // lanes * v_block, lanes, lanes * lanes, v_block, keep,
            ahead + column, near, share[0], share[1], share[2],
        )  # fmt: skip


@kernel(array(4), INT, array(3), INT, INT, INT, INT, INT, INT, INT, scratch(1), INT, INT)
def winograd_inputs(  # type: ignore[no-untyped-def]
    x, x_pitch, v, group, outputs, taps, transposed, pad_h, pad_w, images, plane, begin, end
):
    """Transform the groups [begin, end) of `images` images to V.

    With `winograd_products` and `winograd_outputs` this does what `winograd_filters` and
    `conv_winograd` do, for layers with few tiles and many weights: V and M lie in memory as a
    whole, and U only exists part by part in scratch.

    Parameters
    ----------
    x : array (N, C, H, W)
    v : array (N / images, group, Blocking.tiles_scratch(C / group))
    x_pitch, group, outputs, taps, transposed, pad_h, pad_w, images
        As in `conv_winograd`; a block holds whole images.
    plane : array
        Scratch; see `Blocking`.
    """
    lanes = lanes_of(x)
    channels = x.shape[1] // group
    kind, shift, patch, _, _ = sides(outputs, taps, transposed, pad_h, pad_w)
    rows, columns = x.shape[2], x.shape[3]
    if not transposed:
        rows, columns = rows + 2 * pad_h - taps + 1, columns + 2 * pad_w - taps + 1
    down, across = grid_of(outputs, rows, columns)
    v_block = _tile_rows(images * down * across) * lanes
    v_frequency = (channels + lanes - 1) // lanes * v_block + _PADDING * lanes
    for index in range(begin, end):
        for g in range(group):
            _image_to_tiles(
                x, x_pitch, g * channels, channels,
                (index * images, images, 0, down, 0, across, outputs),
                shift, patch, kind,
                plane, v, (index * group + g) * v.shape[2], v_block, v_frequency, plane, 0,
            )  # fmt: skip


@kernel(array(3), array(4), array(3), INT, INT, INT, INT, INT, scratch(1), scratch(3), INT, INT)
def winograd_products(  # type: ignore[no-untyped-def]
    v, w, m, outputs, group, columns, form, tiles, plane, u, begin, end
):
    """Compute the units [begin, end) of M, the products of V and the transformed filters.

    Parameters
    ----------
    v : array (blocks, group, Blocking.tiles_scratch(depth))
    w : array (Co, C / group, taps, taps)
    m : array (units, blocks, Blocking.tiles_scratch(columns of a unit))
    outputs, group, columns, form
        As in `winograd_filters`, of whose units M has as many.
    tiles : int
        Tiles in a block.
    plane : array (filters_scratch(taps),)
    u : array (n * n, rows + 1, columns of a unit)
        A part of U.
    """
    lanes = lanes_of(v)
    frequencies, rows, width = u.shape[0], u.shape[1] - 1, u.shape[2]
    depth = w.shape[1] if form == FORWARD else w.shape[0] // group
    block = _tile_rows(tiles) * lanes
    v_frequency = (depth + lanes - 1) // lanes * block + _PADDING * lanes
    m_frequency = (width + lanes - 1) // lanes * block + _PADDING * lanes
    for unit in range(begin, end):
        g, left = _unit_at(unit, columns, width)
        for k in range(0, depth, rows):
            k_end = min(k + rows, depth)
            _transform_filters(
                w, variant_of(outputs, w.shape[2]), group, columns, form, unit, width, k, k_end,
                plane, u, 0, (rows + 1) * width,
            )  # fmt: skip
            for frequency in range(frequencies):
                for index in range(v.shape[0]):
                    v_start = (index * group + g) * v.shape[2] + frequency * v_frequency
                    for i in range(k, k_end, _DEPTH):
                        _multiply(
                            v, v_start + i // lanes * block, tiles, min(_DEPTH, k_end - i),
                            u, (frequency * (rows + 1) + i - k) * width, width,
                            min(width, columns - left),
                            m, (unit * v.shape[0] + index) * m.shape[2] + frequency * m_frequency,
                            block, i, ((frequency + 1) % frequencies * (rows + 1) + i - k) * width,
                            v, (0, 0, 0),
                        )  # fmt: skip


@kernel(
    array(3), array(1), INT, array(4), INT, INT, INT, INT, INT, INT, INT, INT, INT, scratch(1),
    INT, INT,
)  # fmt: skip
def winograd_outputs(  # type: ignore[no-untyped-def]
    m, b, has_bias, y, y_pitch, group, outputs, taps, transposed, pad_h, pad_w, images, width,
    plane, begin, end,
):  # fmt: skip
    """Transform M back to the groups [begin, end) of `images` images.

    Parameters
    ----------
    m : array (units, N / images, Blocking.tiles_scratch(width))
    b, has_bias, y, y_pitch, group, outputs, taps, transposed, pad_h, pad_w, images
        As in `conv_winograd`; a block holds whole images.
    width : int
        Columns of a unit.
    plane : array
        Scratch; see `Blocking`.
    """
    lanes = lanes_of(y)
    filters = y.shape[1] // group
    kind, _, _, shift, patch = sides(outputs, taps, transposed, pad_h, pad_w)
    rows, columns = y.shape[2], y.shape[3]
    if transposed:
        rows, columns = rows + 2 * pad_h - taps + 1, columns + 2 * pad_w - taps + 1
    down, across = grid_of(outputs, rows, columns)
    block = _tile_rows(images * down * across) * lanes
    m_frequency = (width + lanes - 1) // lanes * block + _PADDING * lanes
    for index in range(begin, end):
        for unit in range(m.shape[0]):
            g, left = _unit_at(unit, filters, width)
            _tiles_to_image(
                m, (unit * m.shape[1] + index) * m.shape[2], block, m_frequency,
                g * filters + left, min(width, filters - left),
                (index * images, images, 0, down, 0, across, outputs), shift, patch, kind, plane,
                b, has_bias, y, y_pitch,
            )  # fmt: skip


@kernel(
    array(4), INT, array(4), INT, array(2), array(2), INT, INT, INT, INT, INT, INT, INT, INT, INT,
    INT, scratch(1), scratch(1), scratch(1), scratch(1), scratch(1),
    INT, REAL, REAL, INT, INT, INT, INT, INT,
)  # fmt: skip
def conv_backward_weights_winograd(  # type: ignore[no-untyped-def]
    x, x_pitch, dy, dy_pitch, dw, db, has_bias, group, outputs, taps, pad_h, pad_w, images, down,
    across, together, plane, v, m, du, sums, piece, keep_w, keep_b, unit_begin, unit_end, span,
    begin, end,
):  # fmt: skip
    """Set or add to the gradients of some filters from some images.

    Parameters
    ----------
    x : array (N, C, H, W)
    dy : array (N, Co, R, OW)
    x_pitch, dy_pitch : int
        As in `conv_winograd`; L divides `together`, too, where dy lies so.
    dw : array (pieces, Co * C / group * taps * taps)
        Row `piece` is written.
    db : array (pieces, Co)
        Likewise; not touched unless `has_bias`.
    group, outputs, taps : int
    pad_h, pad_w : int
        Zeros around x.
    images, down, across : int
        The blocking of the grid of tiles of dy.
    together : int
        Filters in a unit, whose dU is kept at a time: a divisor of those in a group.
    plane, v, m, du : arrays
        Scratch; see `Blocking`.
    sums : array (`together` rounded up to whole vectors,)
    keep_w, keep_b : real
        Where 0, what dw or db holds is overwritten, else added to.
    unit_begin, unit_end : int
        Range of units of filters.
    span, begin, end : int
        Range of spans of so many groups of `images` images.
    """
    lanes = lanes_of(x)
    channels, filters = x.shape[1] // group, dy.shape[1] // group
    channel_blocks, filter_blocks = (channels + lanes - 1) // lanes, (together + lanes - 1) // lanes
    v_block = _tile_rows(images * down * across) * lanes
    v_frequency = channel_blocks * v_block + _PADDING * lanes
    m_frequency = filter_blocks * v_block + _PADDING * lanes
    variant, patch = variant_of(outputs, taps), taps + outputs - 1
    around, nothing = (-pad_h, -pad_w), (0, 0)
    width = min(panel_columns(x), filter_blocks * lanes)
    du_panel = (channel_blocks * lanes + 1) * width
    du_frequency = (together + width - 1) // width * du_panel
    frequencies = frequencies_of(outputs, taps)
    calls = frequencies * ((together + width - 1) // width)
    blocking, covered = (images, down, across, outputs), (dy.shape[2], dy.shape[3])
    first = begin * span
    blocks = _block_count(covered, blocking, first, end * span)
    last = _block_count(covered, blocking, first, x.shape[0] // images) - 1
    for o in range(unit_begin * together, unit_end * together, together):
        g = o // filters
        fill_zero(sums, 0, filter_blocks)
        for index in range(blocks):
            block = _block_at(index, covered, blocking, first)
            _image_to_tiles(
                dy, dy_pitch, o, together, block, nothing, outputs, 2 * variant + 1,
                plane, m, 0, v_block, m_frequency, sums, has_bias,
            )  # fmt: skip
            _image_to_tiles(
                x, x_pitch, g * channels, channels, block, around, patch, 2 * variant,
                plane, v, 0, v_block, v_frequency, sums, 0,
            )  # fmt: skip
            tiles = block[1] * block[3] * block[5]
            ahead = _block_at(min(index + 1, last), covered, blocking, first)
            dy_shares = _shares(
                _covered(dy, dy_pitch, o, together, ahead, nothing, outputs), calls // 2
            )
            x_shares = _shares(
                _covered(x, x_pitch, g * channels, channels, ahead, around, patch),
                calls - calls // 2,
            )  # fmt: skip
            call = 0
            for frequency in range(frequencies):
                for left in range(0, together, width):
                    if call < calls // 2:
                        near, share = dy, _share_of(dy_shares, call)
                    else:
                        near, share = x, _share_of(x_shares, call - calls // 2)
                    call += 1
                    multiply_blocks(
                        v, frequency * v_frequency, 1, v_block, lanes, lanes * lanes,
                        channels, tiles,
                        m, frequency * m_frequency + left // lanes * v_block, lanes, v_block,
                        (min(width, together - left) + lanes - 1) // lanes,
                        du, frequency * du_frequency + left // width * du_panel,
                        width, lanes * width, lanes, index,
                        frequency * m_frequency, near, share[0], share[1], share[2],
                    )  # fmt: skip
        finish_filters(
            du, width, du_panel, du_frequency, variant, plane, o, together, channels, taps,
            dw, piece, 1 if keep_w != 0 else 0,
        )  # fmt: skip
        if has_bias:
            for i in range(together):
                if keep_b == 0:
                    db[piece, o + i] = sums[i]
                else:
                    db[piece, o + i] += sums[i]


@device
def finish_filters(  # type: ignore[no-untyped-def]
    du, width, du_panel, du_frequency, variant, plane, o, count, channels, taps, dw, piece, keep
):  # fmt: skip
    """Set or add to the gradients of the filters [o, o + count) from dU."""
    lanes = lanes_of(du)
    area = taps * taps
    for left in range(0, count, lanes):
        panel = left // width
        start = panel * du_panel + left - panel * width
        for c in range(0, channels, lanes):
            some = min(lanes, channels - c)
            panel_to_filters(du, start + c * width, width, du_frequency, some, plane, 0, variant)
            from_lanes(
                plane, 0,
                dw, piece * dw.shape[1] + ((o + left) * channels + c) * area, channels * area,
                min(lanes, count - left), some * area, keep,
            )  # fmt: skip
