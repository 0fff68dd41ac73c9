"""Winograd's algorithm on blobs with images in the lanes of vectors.

A blob is an array (G, C, H, W, L): group g holds the images g * L to g * L + L - 1, and each place
of a plane is one vector of float32, or two of float64. Any count of channels is as good as another.
Patches are read from x and written to y where they lie; of those at the edges, what lies outside is
taken for zero or left out. Some tiles are taken at a time, with all channels of x and some of y, so
that V and M stay in the second cache; what the next plane needs is brought near meanwhile.

* forward: M = U V, scalars times vectors of images;
* backward_data, by the transposed algorithm: dV = U^T dM;
* backward_weights: dU += V dM^T is a sum over images. For filters that fill vectors, dy is re-laid
  to have filters in the lanes, and each element of V is a scalar. If up to 3/8 of a vector is left,
  the products are summed lane by lane, and the lanes at the end.

See `cgdnn.kernels.conv_winograd` for the algorithm and its rounding.

Nanoseconds on one core (Zen 5, 16 lanes of float32), for a cost estimate: 0.0041 for a flop of the
products; for an element of V and of M, forward 0.062 and 0.055; of dM and of dV, backward_data
0.052 and 0.084; of V and of dM, backward_weights 0.11 and 0.092, with `filters_computed`. That was
within 10 % of the time of fourteen shapes.
"""

from __future__ import annotations

from cgdnn.kernels._jit import INT, array, device, kernel, scratch
from cgdnn.kernels.conv_winograd import filters_scratch as gradient_scratch
from cgdnn.kernels.conv_winograd import finish_filters, grid_of, padded, sides, variant_of
from cgdnn.kernels.relay import fill_zero, to_lanes
from cgdnn.kernels.vector import add_sum, lanes_of
from cgdnn.kernels.winograd_images_tiles import (
    fetch_places,
    multiply_lanes,
    multiply_places,
    sum_lanes,
    tiles_from_places,
    tiles_to_places,
)
from cgdnn.kernels.winograd_points import OUTPUTS
from cgdnn.kernels.winograd_tiles import filters_to_panel

_PADDING = 5
"""Vectors between frequencies, as in `cgdnn.kernels.conv_winograd`."""
_NEAR_BYTES = 800 << 10
"""Part of the second cache that U, V and M may fill, in bytes of float32."""
_GRADIENT_BYTES = 600 << 10
"""Part of the second cache that dM may fill in backward_weights, in bytes of float32."""
_FAR = 128 << 10
"""Elements of x and y of a group beyond which the next planes are brought near; below that, they
are, and it would only take time."""
_LEAST_TILES, _MOST_TILES = 2, 8
_LEAST_FILTERS, _WHOLE_ROWS = 8, 10
"""Channels of y at a time, and a number of them that fills tiles of a product."""
_MOST_VECTORS = 2
"""Vectors of filters that backward_weights takes at a time."""


def filters_shape(taps: int, filters: int, channels: int) -> tuple[int, int]:
    """Return the shape of U: (n * n, Co * C rounded up to an odd number of vectors).

    With any other number frequencies may all fall into the same sets of a cache.
    """
    vectors = padded(filters * channels) // padded(1)
    return (taps + OUTPUTS - 1) ** 2, (vectors | 1) * padded(1)


def filters_scratch(taps: int) -> int:
    """Return the elements of scratch for `winograd_images_filters`."""
    return (taps**2 + padded(1)) * padded(1)


def choose_blocking(taps: int, depth: int, columns: int, tiles: int) -> tuple[int, int]:
    """Return how many tiles and how many channels of y are taken at a time.

    Parameters
    ----------
    taps : int
    depth, columns : int
        Channels of x and of y; where the algorithm is transposed, of dy and of dx.
    tiles : int
        Tiles of an image.
    """
    vector, left = _room(taps, depth, columns)
    together = _MOST_TILES
    while together > _LEAST_TILES and together * (depth + _LEAST_FILTERS) * vector > left:
        together //= 2
    together = min(together, tiles)
    most = max(_LEAST_FILTERS, left // (vector * together) - depth)
    most = most // _WHOLE_ROWS * _WHOLE_ROWS or most
    return together, -(-columns // -(-columns // most))


def _room(taps: int, depth: int, columns: int) -> tuple[int, int]:
    """Return the bytes of a tile of one channel, and those that U leaves in the second cache."""
    vector = 4 * padded(1) * (taps + OUTPUTS - 1) ** 2
    return vector, _NEAR_BYTES - vector * depth * columns // padded(1)


def stays_near(taps: int, channels: int, filters: int) -> bool:
    """Tell whether U and the smallest blocks of V and M of both passes fit the second cache."""
    vector, left = _room(taps, channels, filters)
    return _LEAST_TILES * (max(channels, filters) + _LEAST_FILTERS) * vector <= left


def scratch_of(taps: int, depth: int, blocking: tuple[int, int]) -> tuple[int, int]:
    """Return the elements of V and M for `conv_winograd_images`."""
    tiles, columns = blocking
    v, m = (_tiles_scratch(taps, channels * tiles) for channels in (depth, columns))
    return v, m


def choose_weights_blocking(taps: int, filters: int, tiles: int) -> tuple[int, int]:
    """Return how many tiles and how many vectors of filters backward_weights takes at a time."""
    vectors = min(_MOST_VECTORS, padded(filters) // padded(1))
    tile = 4 * (taps + OUTPUTS - 1) ** 2 * padded(1) * padded(1) * vectors
    together = _MOST_TILES
    while together > _LEAST_TILES and together * tile > _GRADIENT_BYTES:
        together //= 2
    return min(together, tiles), vectors


def filters_computed(filters: int) -> int:
    """Return the filters that backward_weights computes, with those that fill a vector up."""
    return filters if _left_over(filters, padded(1)) else padded(filters)


def weights_scratch_of(
    taps: int, channels: int, filters: int, plane: tuple[int, int], blocking: tuple[int, int]
) -> tuple[int, int, int, int, int, int]:
    """Return the elements of scratch of `conv_backward_weights_winograd_images`.

    Parameters
    ----------
    taps, channels, filters : int
    plane : tuple of int
        Rows and columns of dy.
    blocking : tuple of int
        From `choose_weights_blocking`.
    """
    tiles, vectors = blocking
    lanes = padded(1)
    panels = -(-padded(filters) // (vectors * lanes))
    rest = max(_left_over(filters, lanes), _left_over(filters, lanes // 2))  # or in float64
    rows = OUTPUTS * max(1, tiles // grid_of(OUTPUTS, *plane)[1])
    return (
        gradient_scratch(taps),
        padded(filters) * rows * plane[1] * lanes,
        _tiles_scratch(taps, channels * tiles),
        _tiles_scratch(taps, lanes * tiles * vectors),
        _tiles_scratch(taps, panels * vectors * channels),
        _tiles_scratch(taps, rest * channels),
    )


def _tiles_scratch(taps: int, vectors: int) -> int:
    """Return the elements of so many vectors for each frequency."""
    return (taps + OUTPUTS - 1) ** 2 * (vectors + _PADDING) * padded(1)


@device
def _left_over(filters, lanes):  # type: ignore[no-untyped-def]
    """Return the filters whose gradients are summed lane by lane."""
    rest = filters % lanes
    return rest if 8 * rest <= 3 * lanes else 0  # more are faster as a vector


@kernel(array(4), array(2), INT, scratch(1), INT, INT)
def winograd_images_filters(w, u, together, plane, begin, end):  # type: ignore[no-untyped-def]
    """Set the units [begin, end) of U, each of `together` pairs of a filter and a channel.

    Parameters
    ----------
    w : array (Co, C, taps, taps)
    u : array (filters_shape(taps, Co, C))
        Element (f, o * C + c) is frequency f of filter o and channel c.
    together : int
        Those of a vector of float32.
    plane : array (filters_scratch(taps),)
    """
    lanes = lanes_of(w)
    area, count = w.shape[2] * w.shape[3], w.shape[0] * w.shape[1]
    for k in range(begin * together, min(end * together, count), lanes):
        to_lanes(w, k * area, area, min(lanes, count - k), plane, 0, area)
        variant = variant_of(OUTPUTS, w.shape[2])
        filters_to_panel(plane, 0, lanes, 1, u, k, 0, u.shape[1], variant)


@kernel(
    array(5), array(2), array(1), INT, array(5), INT, INT, INT, INT, INT, INT,
    scratch(1), scratch(1), INT, INT,
)  # fmt: skip
def conv_winograd_images(  # type: ignore[no-untyped-def]
    x, u, b, has_bias, y, taps, transposed, pad_h, pad_w, tiles, together, v, m, begin, end
):
    """Set y for some groups of images: the forward pass, or the data gradient.

    Parameters
    ----------
    x : array (G, C, H, W, L)
        dy for a data gradient.
    u : array (filters_shape)
        From `winograd_images_filters`, the same for both passes.
    b : array (Co,)
        Not read unless `has_bias`.
    y : array (G, Co, R, OW, L)
        dx for a data gradient.
    taps : int
    transposed : int
        1 for a data gradient, else 0.
    pad_h, pad_w : int
        Zeros around x, or around y where `transposed`.
    tiles, together : int
        See `choose_blocking`.
    v, m : arrays
        See `scratch_of`.
    begin, end : int
        Range of groups.
    """
    lanes, pitch = lanes_of(x), x.shape[4]
    channels, columns = x.shape[1], y.shape[1]
    u_row, u_k = (1, columns) if transposed else (channels, 1)
    kind, x_shift, x_patch, y_shift, y_patch = sides(OUTPUTS, taps, transposed, pad_h, pad_w)
    x_plane, y_plane = (x.shape[2], x.shape[3], pitch), (y.shape[2], y.shape[3], pitch)
    x_size, y_size = x.shape[2] * x.shape[3] * pitch, y.shape[2] * y.shape[3] * pitch
    far = channels * x_size + columns * y_size > _FAR
    count, across = _grid(x_plane if transposed else y_plane)
    row = tiles * lanes
    v_frequency, m_frequency = channels * row + _PADDING * lanes, together * row + _PADDING * lanes
    for g in range(begin, end):
        if transposed:  # patches overlap, and are added
            fill_zero(y, g * columns * y_size, columns * y_size // lanes)
        for part in range(0, pitch, lanes):
            for first in range(0, count, tiles):
                block = (first, min(tiles, count - first), across)
                x_start, x_rows, x_run = _covered(x_plane, block, x_shift, x_patch)
                y_start, y_rows, y_run = _covered(y_plane, block, y_shift, y_patch)
                for c in range(channels):
                    after = (g * channels + min(c + 1, channels - 1)) * x_size
                    fetch_places(x, after + x_start, x.shape[3] * pitch, x_rows * far, x_run)
                    _plane_to_tiles(
                        x, (g * channels + c) * x_size + part, x_plane, block, x_shift, x_patch,
                        kind, v, c * row, lanes, v_frequency,
                    )  # fmt: skip
                for o in range(0, columns, together):
                    some = min(together, columns - o)
                    for f in range(u.shape[0]):
                        multiply_places(
                            u, f * u.shape[1] + o * u_row, u_row, u_k, some, channels,
                            v, f * v_frequency, row, block[1], m, f * m_frequency, row, 0,
                        )  # fmt: skip
                    for i in range(some):
                        after = (g * columns + min(o + i + 1, columns - 1)) * y_size
                        fetch_places(y, after + y_start, y.shape[3] * pitch, y_rows * far, y_run)
                        _tiles_to_plane(
                            m, i * row, m_frequency, b[o + i] if has_bias else x.dtype.type(0),
                            y, (g * columns + o + i) * y_size + part, y_plane, block,
                            y_shift, y_patch, kind,
                        )  # fmt: skip


@device
def _grid(plane):  # type: ignore[no-untyped-def]
    """Return the tiles that cover a plane, and how many are side by side."""
    down, across = grid_of(OUTPUTS, plane[0], plane[1])
    return down * across, across


@device
def _existing(start, size, extent):  # type: ignore[no-untyped-def]
    """Return the range of [0, `size`) that, moved by `start`, is in [0, `extent`)."""
    begin = min(max(0, -start), size)
    return begin, max(begin, min(size, extent - start))


@device
def _after(row, column, across):  # type: ignore[no-untyped-def]
    """Return row and column of the next tile: a division would take as long as a transform."""
    if column + 1 == across:
        return row + 1, 0
    return row, column + 1


@device
def _covered(plane, block, shift, patch):  # type: ignore[no-untyped-def]
    """Return the first element that a block of tiles covers, the rows, and elements of a row."""
    height, width, pitch = plane
    first, count, across = block
    top, bottom = first // across * OUTPUTS, (first + count - 1) // across * OUTPUTS
    left, right = 0, width
    if top == bottom:
        column = first % across * OUTPUTS + shift[1]
        left, right = max(0, column), min(width, column + (count - 1) * OUTPUTS + patch)
    top, bottom = max(0, top + shift[0]), min(height, bottom + shift[0] + patch)
    return (top * width + left) * pitch, bottom - top, (right - left) * pitch


@device
def _plane_to_tiles(  # type: ignore[no-untyped-def]
    x, start, plane, block, shift, patch, kind, v, v_start, v_tile, v_frequency
):
    """Transform a block of tiles of the plane that begins at `start`.

    Parameters
    ----------
    plane : (height, width, pitch)
        The pitch is what places are apart.
    block : (first, count, across)
        Numbers of tiles, row by row.
    """
    height, width, pitch = plane
    first, count, across = block
    row, column = first // across, first % across
    for t in range(count):
        i, j = row * OUTPUTS + shift[0], column * OUTPUTS + shift[1]
        top, bottom = _existing(i, patch, height)
        left, right = _existing(j, patch, width)
        tiles_from_places(
            x, start + (i * width + j) * pitch, width * pitch, pitch, top, bottom, left, right,
            v, v_start + t * v_tile, v_frequency, kind,
        )  # fmt: skip
        row, column = _after(row, column, across)


@device
def _tiles_to_plane(  # type: ignore[no-untyped-def]
    m, m_start, m_frequency, bias, y, start, plane, block, shift, patch, kind
):
    """Transform a block of products back, likewise."""
    lanes = lanes_of(y)
    height, width, pitch = plane
    first, count, across = block
    row, column = first // across, first % across
    for t in range(count):
        i, j = row * OUTPUTS + shift[0], column * OUTPUTS + shift[1]
        top, bottom = _existing(i, patch, height)
        left, right = _existing(j, patch, width)
        tiles_to_places(
            m, m_start + t * lanes, m_frequency, y, start + (i * width + j) * pitch,
            width * pitch, pitch, top, bottom, left, right, bias, kind,
        )  # fmt: skip
        row, column = _after(row, column, across)


@kernel(
    array(5), array(5), array(2), array(2), INT, INT, INT, INT, INT, INT,
    scratch(1), scratch(1), scratch(1), scratch(1), scratch(1), scratch(1), INT, INT, INT, INT,
)  # fmt: skip
def conv_backward_weights_winograd_images(  # type: ignore[no-untyped-def]
    x, dy, dw, db, has_bias, taps, pad_h, pad_w, tiles, vectors, plane, lines, v, m, du, sums,
    piece, span, begin, end,
):  # fmt: skip
    """Set the gradients that some groups of images give.

    Parameters
    ----------
    x : array (G, C, H, W, L)
    dy : array (G, Co, R, OW, L)
    dw : array (pieces, Co * C * taps * taps)
        Row `piece` is set.
    db : array (pieces, Co)
        Likewise; not touched unless `has_bias`.
    taps : int
    pad_h, pad_w : int
        Zeros around x.
    tiles, vectors : int
        See `choose_weights_blocking`.
    plane, lines, v, m, du, sums : arrays
        See `weights_scratch_of`. `lines` holds some rows of dy of a group, as
        [vector of filters][place][image]; `sums` is dU, lane by lane, of the filters left over.
    span, begin, end : int
        Range of spans of so many groups.
    """
    lanes, pitch = lanes_of(x), x.shape[4]
    channels, filters = x.shape[1], dy.shape[1]
    variant, patch = variant_of(OUTPUTS, taps), taps + OUTPUTS - 1
    x_plane, x_size = (x.shape[2], x.shape[3], pitch), x.shape[2] * x.shape[3] * pitch
    dy_plane, dy_size = (dy.shape[2], dy.shape[3], pitch), dy.shape[2] * dy.shape[3] * pitch
    far = channels * x_size + filters * dy_size > _FAR
    across = (dy.shape[3] + OUTPUTS - 1) // OUTPUTS
    band = max(1, tiles // across)
    rest = _left_over(filters, lanes)
    whole = filters - rest
    blocks, width, row = (whole + lanes - 1) // lanes, vectors * lanes, tiles * lanes
    v_frequency, m_frequency = channels * row + _PADDING * lanes, row * width + _PADDING * lanes
    du_panel = channels * width
    du_frequency = (filters + width - 1) // width * du_panel + _PADDING * lanes
    rest_frequency = rest * row + _PADDING * lanes
    sums_frequency = channels * rest * lanes + _PADDING * lanes
    for o in range(filters * has_bias):
        db[piece, o] = 0
    for g in range(begin * span, end * span):
        for o in range(filters * has_bias):
            add_sum(db, piece * filters + o, dy, (g * filters + o) * dy_size, dy_size)
        for part in range(0, pitch, lanes):
            for top in range(0, dy.shape[2], OUTPUTS * band):
                height = min(OUTPUTS * band, dy.shape[2] - top)
                _filters_to_lanes(dy, g, part, top, height, whole, lines)
                before = top // OUTPUTS * across
                count, _ = _grid((height, dy.shape[3]))
                for first in range(0, count, tiles):
                    some = min(tiles, count - first)
                    block = (before + first, some, across)
                    x_start, x_rows, x_run = _covered(x_plane, block, (-pad_h, -pad_w), patch)
                    for c in range(channels):
                        after = (g * channels + min(c + 1, channels - 1)) * x_size
                        fetch_places(x, after + x_start, x.shape[3] * pitch, x_rows * far, x_run)
                        _plane_to_tiles(
                            x, (g * channels + c) * x_size + part, x_plane, block,
                            (-pad_h, -pad_w), patch, 2 * variant, v, c * row, lanes, v_frequency,
                        )  # fmt: skip
                    keep = g - begin * span + part + before + first
                    for left in range(0, blocks, vectors):
                        few = min(vectors, blocks - left)
                        for i in range(few * lanes):
                            vector, image = i // lanes, i % lanes
                            start = (left + vector) * height * dy.shape[3] * lanes + image
                            _plane_to_tiles(
                                lines, start * lanes, (height, dy.shape[3], lanes * lanes),
                                (first, some, across), (0, 0), OUTPUTS, 2 * variant + 1,
                                m, image * width + vector * lanes, lanes * width, m_frequency,
                            )  # fmt: skip
                        for f in range(patch * patch):
                            multiply_places(
                                v, f * v_frequency, row, 1, channels, some * lanes,
                                m, f * m_frequency, width, few,
                                du, f * du_frequency + left // vectors * du_panel, width, keep,
                            )  # fmt: skip
                    for i in range(rest):
                        _plane_to_tiles(
                            dy, (g * filters + whole + i) * dy_size + part, dy_plane, block,
                            (0, 0), OUTPUTS, 2 * variant + 1, m, i * row, lanes, rest_frequency,
                        )  # fmt: skip
                    for f in range(patch * patch if rest else 0):
                        multiply_lanes(
                            v, f * v_frequency, row, channels, some,
                            m, f * rest_frequency, row, rest,
                            sums, f * sums_frequency, rest * lanes, keep,
                        )  # fmt: skip
    start = whole // width * du_panel + whole % width
    for f in range(patch * patch if rest else 0):
        for c in range(channels):
            sum_lanes(
                sums, f * sums_frequency + c * rest * lanes, rest,
                du, f * du_frequency + start + c * width,
            )  # fmt: skip
    finish_filters(
        du, width, du_panel, du_frequency, variant, plane, 0, filters, channels, taps, dw, piece, 0
    )


@device
def _filters_to_lanes(dy, g, part, top, height, whole, lines):  # type: ignore[no-untyped-def]
    """Bring the first `whole` filters of some rows of L images of a group into lanes."""
    lanes, pitch = lanes_of(dy), dy.shape[4]
    filters, size = dy.shape[1], dy.shape[2] * dy.shape[3] * pitch
    places = height * dy.shape[3]
    for first in range(0, whole, lanes):
        start = (g * filters + first) * size + top * dy.shape[3] * pitch + part
        for place in range(places):
            to_lanes(
                dy, start + place * pitch, size, min(lanes, filters - first),
                lines, (first * places + place * lanes) * lanes, lanes,
            )  # fmt: skip
