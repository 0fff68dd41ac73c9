"""Winograd's algorithm on blobs with images in the lanes of vectors.

A blob is an array (G, C, H, W, L): group g holds the images g * L to g * L + L - 1, and each place
of a plane is one vector of float32, or two of float64. Any count of channels is as good as another.
Patches are read from x and written to y where they lie; of those at the edges, what lies outside is
taken for zero or left out. Some tiles are taken at a time, of one group or, where a plane has
fewer, of a span of groups, with all channels of x and some of y. V and M of the small tiles then
stay in the second cache; what the next plane needs is brought near meanwhile.

* forward: M = U V, scalars times vectors of images;
* backward_data, by the transposed algorithm: dV = U^T dM;
* backward_weights: dU += V dM^T is a sum over images. For filters that fill vectors, dy is re-laid
  to have filters in the lanes, and each element of V is a scalar. If up to 3/8 of a vector is left,
  both factors keep images in the lanes, which are summed for each block of tiles.

See `cgdnn.kernels.conv_winograd` for the algorithm and its rounding, and `SERVED` for the tiles.

Nanoseconds on one core (Zen 5, 16 lanes of float32), for a cost estimate: 0.0041 for a flop of the
products; for an element of V and of M, forward 0.062 and 0.055; of dM and of dV, backward_data
0.052 and 0.084; of V and of dM, backward_weights 0.11 and 0.092, with `filters_computed`. That was
within 10 % of the time of fourteen shapes. Of tiles larger than `OUTPUTS`, whose U, V and M pass
through the third cache: 0.08 and 0.09, 0.09 and 0.09, 0.14 and 0.16.
"""

from __future__ import annotations

from cgdnn.kernels._jit import INT, array, device, kernel, scratch
from cgdnn.kernels.conv_winograd import filters_scratch as gradient_scratch
from cgdnn.kernels.conv_winograd import (
    finish_filters,
    frequencies_of,
    grid_of,
    padded,
    sides,
    variant_of,
)
from cgdnn.kernels.relay import fill_zero, to_lanes
from cgdnn.kernels.vector import add_sum, lanes_of
from cgdnn.kernels.winograd_images_tiles import (
    fetch_places,
    multiply_lanes,
    multiply_places,
    tiles_from_places,
    tiles_to_places,
)
from cgdnn.kernels.winograd_points import OUTPUTS
from cgdnn.kernels.winograd_tiles import filters_to_panel

_PADDING = 5
"""Vectors between frequencies, as in `cgdnn.kernels.conv_winograd`."""
_NEAR_BYTES = 800 << 10
"""Part of the second cache that U, V and M may fill, in bytes of float32."""
_MOST_BYTES = 1 << 20
"""Bytes that U of tiles larger than `OUTPUTS` may have."""
_GRADIENT_BYTES = 600 << 10
"""Part of the second cache that dM may fill in backward_weights, in bytes of float32."""
_FAR = 128 << 10
"""Elements of x and y of a group beyond which the next planes are brought near; below that, they
are, and it would only take time."""
_LEAST_TILES, _MOST_TILES = 2, 8
_LEAST_FILTERS, _WHOLE_ROWS, _MOST_FILTERS = 8, 10, 64
"""Channels of y at a time, at least; a number of them that fills tiles of a product; and at most,
with tiles larger than `OUTPUTS`."""
_MOST_VECTORS = 2
"""Vectors of filters that backward_weights takes at a time."""


def filters_shape(outputs: int, taps: int, filters: int, channels: int) -> tuple[int, int]:
    """Return the shape of U: (n * n, Co * C rounded up to an odd number of vectors).

    With any other number frequencies may all fall into the same sets of a cache.
    """
    vectors = padded(filters * channels) // padded(1)
    return frequencies_of(outputs, taps), (vectors | 1) * padded(1)


def filters_scratch(taps: int) -> int:
    """Return the elements of scratch for `winograd_images_filters`."""
    return (taps**2 + padded(1)) * padded(1)


def choose_blocking(
    outputs: int, taps: int, depth: int, columns: int, tiles: int, groups: int
) -> tuple[int, int, int]:
    """Return how many groups, tiles of each of them and channels of y are taken at a time.

    The third cache is fast enough for tiles larger than `OUTPUTS` if two of them use what is read
    of U, and all channels of y what is read of V.

    Parameters
    ----------
    outputs, taps : int
    depth, columns : int
        Channels of x and of y; where the algorithm is transposed, of dy and of dx.
    tiles : int
        Tiles of an image.
    groups : int
        Groups of the batch, of which those taken at a time are a divisor.
    """
    together, most = _LEAST_TILES, _MOST_FILTERS
    if outputs == OUTPUTS:
        vector, left = _room(outputs, taps, depth, columns)
        together = _MOST_TILES
        while together > _LEAST_TILES and together * (depth + _LEAST_FILTERS) * vector > left:
            together //= 2
        most = max(_LEAST_FILTERS, left // (vector * min(together, tiles)) - depth)
        most = most // _WHOLE_ROWS * _WHOLE_ROWS or most
    return _span(tiles, groups), min(together, tiles), -(-columns // -(-columns // most))


def _span(tiles: int, groups: int) -> int:
    """Return how many of these groups are taken at a time, for products of two vectors at least."""
    return 2 if tiles == 1 and groups % 2 == 0 else 1


def _room(outputs: int, taps: int, depth: int, columns: int) -> tuple[int, int]:
    """Return the bytes of a tile of one channel, and those that U leaves in the second cache."""
    vector = 4 * padded(1) * frequencies_of(outputs, taps)
    return vector, _NEAR_BYTES - vector * depth * columns // padded(1)


def stays_near(outputs: int, taps: int, channels: int, filters: int) -> bool:
    """Tell whether U and the smallest blocks of V and M of both passes fit the second cache.

    Of tiles larger than `OUTPUTS`, whether U alone does.
    """
    vector, left = _room(outputs, taps, channels, filters)
    if outputs > OUTPUTS:
        return _NEAR_BYTES - left <= _MOST_BYTES
    return _LEAST_TILES * (max(channels, filters) + _LEAST_FILTERS) * vector <= left


def scratch_of(
    outputs: int, taps: int, depth: int, blocking: tuple[int, int, int]
) -> tuple[int, int]:
    """Return the elements of V and M for `conv_winograd_images`."""
    span, tiles, columns = blocking
    v, m = (_tiles_scratch(outputs, taps, each * span * tiles) for each in (depth, columns))
    return v, m


def choose_weights_blocking(
    outputs: int, taps: int, filters: int, tiles: int, groups: int
) -> tuple[int, int, int]:
    """Return how many groups, tiles and vectors of filters backward_weights takes at a time.

    Parameters
    ----------
    outputs, taps, filters : int
    tiles : int
        Tiles of an image.
    groups : int
        Groups of a piece, of which those taken at a time are a divisor.
    """
    vectors = min(_MOST_VECTORS, padded(filters) // padded(1))
    tile = 4 * frequencies_of(outputs, taps) * padded(1) * padded(1) * vectors
    together = _MOST_TILES
    while together > _LEAST_TILES and together * tile > _GRADIENT_BYTES:
        together //= 2
    return _span(tiles, groups), min(together, tiles), vectors


def filters_computed(filters: int) -> int:
    """Return the filters that backward_weights computes, with those that fill a vector up."""
    return filters if _left_over(filters, padded(1)) else padded(filters)


def weights_scratch_of(
    outputs: int, taps: int, channels: int, filters: int, blocking: tuple[int, int, int]
) -> tuple[int, int, int, int, int]:
    """Return the elements of scratch of `conv_backward_weights_winograd_images`.

    Parameters
    ----------
    outputs, taps, channels, filters : int
    blocking : tuple of int
        From `choose_weights_blocking`.
    """
    span, tiles, vectors = blocking
    lanes = padded(1)
    panels = -(-padded(filters) // (vectors * lanes))
    together = span * tiles
    return (
        gradient_scratch(taps),
        outputs**2 * tiles * lanes * lanes,
        _tiles_scratch(outputs, taps, channels * together),
        _tiles_scratch(outputs, taps, lanes * together * vectors),
        _tiles_scratch(outputs, taps, panels * vectors * channels),
    )


def _tiles_scratch(outputs: int, taps: int, vectors: int) -> int:
    """Return the elements of so many vectors for each frequency."""
    count: int = frequencies_of(outputs, taps) * (vectors + _PADDING) * padded(1)
    return count


@device
def _left_over(filters, lanes):  # type: ignore[no-untyped-def]
    """Return the filters whose products sum over the lanes."""
    rest = filters % lanes
    return rest if 8 * rest <= 3 * lanes else 0  # more are faster as a vector


@kernel(array(4), array(2), INT, INT, scratch(1), INT, INT)
def winograd_images_filters(  # type: ignore[no-untyped-def]
    w, u, outputs, together, plane, begin, end
):
    """Set the units [begin, end) of U, each of `together` pairs of a filter and a channel.

    Parameters
    ----------
    w : array (Co, C, taps, taps)
    u : array (filters_shape(outputs, taps, Co, C))
        Element (f, o * C + c) is frequency f of filter o and channel c.
    outputs : int
        Outputs of a tile on an axis.
    together : int
        Those of a vector of float32.
    plane : array (filters_scratch(taps),)
    """
    lanes = lanes_of(w)
    area, count = w.shape[2] * w.shape[3], w.shape[0] * w.shape[1]
    for k in range(begin * together, min(end * together, count), lanes):
        to_lanes(w, k * area, area, min(lanes, count - k), plane, 0, area)
        variant = variant_of(outputs, w.shape[2])
        filters_to_panel(plane, 0, lanes, 1, u, k, 0, u.shape[1], variant)


@kernel(
    array(5), array(2), array(1), INT, array(5), INT, INT, INT, INT, INT, INT, INT, INT,
    scratch(1), scratch(1), INT, INT,
)  # fmt: skip
def conv_winograd_images(  # type: ignore[no-untyped-def]
    x, u, b, has_bias, y, outputs, taps, transposed, pad_h, pad_w, span, tiles, together, v, m,
    begin, end,
):  # fmt: skip
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
    outputs, taps : int
    transposed : int
        1 for a data gradient, else 0.
    pad_h, pad_w : int
        Zeros around x, or around y where `transposed`.
    span, tiles, together : int
        See `choose_blocking`.
    v, m : arrays
        See `scratch_of`.
    begin, end : int
        Range of spans of groups.
    """
    lanes, pitch = lanes_of(x), x.shape[4]
    channels, columns = x.shape[1], y.shape[1]
    u_row, u_k = (1, columns) if transposed else (channels, 1)
    kind, x_shift, x_patch, y_shift, y_patch = sides(outputs, taps, transposed, pad_h, pad_w)
    y_plane = (y.shape[2], y.shape[3], pitch)
    x_size, y_size = x.shape[2] * x.shape[3] * pitch, y.shape[2] * y.shape[3] * pitch
    far = channels * x_size + columns * y_size > _FAR
    tiled = x if transposed else y
    count, across = _grid(outputs, tiled.shape[2], tiled.shape[3])
    row = span * tiles * lanes
    v_frequency, m_frequency = channels * row + _PADDING * lanes, together * row + _PADDING * lanes
    for start in range(begin * span, end * span, span):
        if transposed:  # patches overlap, and are added
            fill_zero(y, start * columns * y_size, span * columns * y_size // lanes)
        for part in range(0, pitch, lanes):
            for first in range(0, count, tiles):
                some = min(tiles, count - first)
                block = (first, some, across, outputs)
                y_start, y_rows, y_run = _covered(y_plane, block, y_shift, y_patch)
                for i in range(span):
                    _group_to_tiles(
                        x, start + i, part, block, x_shift, x_patch, kind, far,
                        v, i * some * lanes, row, v_frequency,
                    )  # fmt: skip
                for o in range(0, columns, together):
                    few = min(together, columns - o)
                    for f in range(u.shape[0]):
                        multiply_places(
                            u, f * u.shape[1] + o * u_row, u_row, u_k, few, channels,
                            v, f * v_frequency, row, span * some, m, f * m_frequency, row, 0,
                        )  # fmt: skip
                    for i in range(span * few):
                        g, k = start + i // few, i % few
                        after = (g * columns + min(o + k + 1, columns - 1)) * y_size
                        fetch_places(y, after + y_start, y.shape[3] * pitch, y_rows * far, y_run)
                        _tiles_to_plane(
                            m, k * row + i // few * some * lanes, m_frequency,
                            b[o + k] if has_bias else x.dtype.type(0),
                            y, (g * columns + o + k) * y_size + part, y_plane, block,
                            y_shift, y_patch, kind,
                        )  # fmt: skip


@device
def _grid(outputs, height, width):  # type: ignore[no-untyped-def]
    """Return the tiles that cover a plane, and how many are side by side."""
    down, across = grid_of(outputs, height, width)
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
    first, count, across, outputs = block
    top, bottom = first // across * outputs, (first + count - 1) // across * outputs
    left, right = 0, width
    if top == bottom:
        column = first % across * outputs + shift[1]
        left, right = max(0, column), min(width, column + (count - 1) * outputs + patch)
    top, bottom = max(0, top + shift[0]), min(height, bottom + shift[0] + patch)
    return (top * width + left) * pitch, bottom - top, (right - left) * pitch


@device
def _group_to_tiles(  # type: ignore[no-untyped-def]
    x, g, part, block, shift, patch, kind, far, v, v_start, v_channel, v_frequency
):
    """Transform a block of tiles of all channels, of L images of a group; see `_plane_to_tiles`.

    Meanwhile the next plane is brought near, if `far` is 1.
    """
    lanes, pitch = lanes_of(x), x.shape[4]
    channels, size = x.shape[1], x.shape[2] * x.shape[3] * pitch
    plane = (x.shape[2], x.shape[3], pitch)
    start, rows, run = _covered(plane, block, shift, patch)
    for c in range(channels):
        after = (g * channels + min(c + 1, channels - 1)) * size
        fetch_places(x, after + start, x.shape[3] * pitch, rows * far, run)
        _plane_to_tiles(
            x, (g * channels + c) * size + part, plane, block, shift, patch, kind,
            v, v_start + c * v_channel, lanes, v_frequency,
        )  # fmt: skip


@device
def _plane_to_tiles(  # type: ignore[no-untyped-def]
    x, start, plane, block, shift, patch, kind, v, v_start, v_tile, v_frequency
):
    """Transform a block of tiles of the plane that begins at `start`.

    Parameters
    ----------
    plane : (height, width, pitch)
        The pitch is what places are apart.
    block : (first, count, across, outputs)
        Numbers of tiles, row by row, and the outputs of a tile on an axis.
    """
    height, width, pitch = plane
    first, count, across, outputs = block
    row, column = first // across, first % across
    for t in range(count):
        i, j = row * outputs + shift[0], column * outputs + shift[1]
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
    first, count, across, outputs = block
    row, column = first // across, first % across
    for t in range(count):
        i, j = row * outputs + shift[0], column * outputs + shift[1]
        top, bottom = _existing(i, patch, height)
        left, right = _existing(j, patch, width)
        tiles_to_places(
            m, m_start + t * lanes, m_frequency, y, start + (i * width + j) * pitch,
            width * pitch, pitch, top, bottom, left, right, bias, kind,
        )  # fmt: skip
        row, column = _after(row, column, across)


@kernel(
    array(5), array(5), array(2), array(2), INT, INT, INT, INT, INT, INT, INT, INT,
    scratch(1), scratch(1), scratch(1), scratch(1), scratch(1), INT, INT, INT, INT,
)  # fmt: skip
def conv_backward_weights_winograd_images(  # type: ignore[no-untyped-def]
    x, dy, dw, db, has_bias, outputs, taps, pad_h, pad_w, span, tiles, vectors,
    plane, lines, v, m, du, piece, groups, begin, end,
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
    outputs, taps : int
    pad_h, pad_w : int
        Zeros around x.
    span, tiles, vectors : int
        See `choose_weights_blocking`.
    plane, lines, v, m, du : arrays
        See `weights_scratch_of`. `lines` holds a rectangle of a vector of channels of dy, as
        [place][image].
    groups, begin, end : int
        Range of pieces of so many groups.
    """
    lanes, pitch = lanes_of(x), x.shape[4]
    channels, filters = x.shape[1], dy.shape[1]
    kind, x_shift, x_patch, dy_shift, dy_patch = sides(outputs, taps, 0, pad_h, pad_w)
    variant, frequencies = variant_of(outputs, taps), frequencies_of(outputs, taps)
    dy_plane = (dy.shape[2], dy.shape[3], pitch)
    x_size, dy_size = x.shape[2] * x.shape[3] * pitch, dy.shape[2] * dy.shape[3] * pitch
    far = channels * x_size + filters * dy_size > _FAR
    _, across = _grid(outputs, dy.shape[2], dy.shape[3])
    height, width = max(1, tiles // across) * outputs, min(tiles, across) * outputs
    rest = _left_over(filters, lanes)
    whole = filters - rest
    blocks, columns, row = (whole + lanes - 1) // lanes, vectors * lanes, span * tiles * lanes
    v_frequency, m_frequency = channels * row + _PADDING * lanes, row * columns + _PADDING * lanes
    du_panel = channels * columns
    du_frequency = (filters + columns - 1) // columns * du_panel + _PADDING * lanes
    rest_frequency = rest * row + _PADDING * lanes
    du_rest = whole // columns * du_panel + whole % columns
    for o in range(filters * has_bias):
        db[piece, o] = 0
    for start in range(begin * groups, end * groups, span):
        for g in range(start, start + span):
            for o in range(filters * has_bias):
                add_sum(db, piece * filters + o, dy, (g * filters + o) * dy_size, dy_size)
        for part in range(0, pitch, lanes):
            for top in range(0, dy.shape[2], height):
                for left in range(0, dy.shape[3], width):
                    area = (
                        top,
                        left,
                        min(height, dy.shape[2] - top),
                        min(width, dy.shape[3] - left),
                    )
                    some, _ = _grid(outputs, area[2], area[3])
                    block = (top // outputs * across + left // outputs, some, across, outputs)
                    for i in range(span):
                        _group_to_tiles(
                            x, start + i, part, block, x_shift, x_patch, kind, far,
                            v, i * some * lanes, row, v_frequency,
                        )  # fmt: skip
                        for k in range(rest):
                            o = (start + i) * filters + whole + k
                            _plane_to_tiles(
                                dy, o * dy_size + part, dy_plane, block, dy_shift, dy_patch,
                                kind + 1, m, k * row + i * some * lanes, lanes, rest_frequency,
                            )  # fmt: skip
                    keep = start - begin * groups + part + top + left
                    for f in range(frequencies if rest else 0):
                        multiply_lanes(
                            v, f * v_frequency, row, channels, span * some,
                            m, f * rest_frequency, row, rest,
                            du, f * du_frequency + du_rest, columns, keep,
                        )  # fmt: skip
                    for first in range(0, blocks, vectors):
                        few = min(vectors, blocks - first)
                        for i in range(span):
                            _filters_to_tiles(
                                dy, start + i, part, area, outputs, kind + 1, first * lanes,
                                min(few * lanes, whole - first * lanes), lines,
                                m, i * some * lanes * columns, columns, m_frequency,
                            )  # fmt: skip
                        for f in range(frequencies):
                            multiply_places(
                                v, f * v_frequency, row, 1, channels, span * some * lanes,
                                m, f * m_frequency, columns, few,
                                du, f * du_frequency + first // vectors * du_panel, columns, keep,
                            )  # fmt: skip
    finish_filters(
        du, columns, du_panel, du_frequency, variant, plane, 0, filters, channels, taps,
        dw, piece, 0,
    )  # fmt: skip


@device
def _filters_to_tiles(  # type: ignore[no-untyped-def]
    dy, g, part, area, outputs, kind, first, count, lines, m, m_start, m_row, m_frequency
):
    """Transform a rectangle of some filters of L images of a group, with filters in the lanes.

    Parameters
    ----------
    area : (top, left, height, width)
    first, count : int
        Range of filters. What is computed of those that fill a vector up is not used.
    m : array
        Image i of tile t is row ``t * L + i``.
    """
    lanes, pitch = lanes_of(dy), dy.shape[4]
    top, left, height, width = area
    size = dy.shape[2] * dy.shape[3] * pitch
    some, across = _grid(outputs, height, width)
    for o in range(0, count, lanes):
        plane = (g * dy.shape[1] + first + o) * size + part
        for i in range(height):
            row = plane + ((top + i) * dy.shape[3] + left) * pitch
            for j in range(width):
                place = (i * width + j) * lanes * lanes
                to_lanes(dy, row + j * pitch, size, min(lanes, count - o), lines, place, lanes)
        for image in range(lanes):
            _plane_to_tiles(
                lines, image * lanes, (height, width, lanes * lanes), (0, some, across, outputs),
                (0, 0), outputs, kind, m, m_start + image * m_row + o, lanes * m_row, m_frequency,
            )  # fmt: skip
