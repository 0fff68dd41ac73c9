"""Winograd's algorithm with images in the lanes of vectors, for narrow layers.

Where the channels do not fill whole vectors, `cgdnn.kernels.conv_winograd` multiplies zeros: 20
channels take as long as 32. Here a vector holds the same place of L images, and any count of
channels is as good as another; products are sums of scalar weights times such vectors. All tiles of
an image are taken together, and some filters at a time, so that V and M stay in the second cache:
this is for small images and full batches. Blobs stay in N, C, H, W order.

See `cgdnn.kernels.conv_winograd` for the algorithm and its rounding.
"""

from __future__ import annotations

from cgdnn.kernels._jit import INT, array, device, kernel, scratch
from cgdnn.kernels.conv_winograd import grid_of, padded, plane_to_tiles, sides, tiles_to_planes
from cgdnn.kernels.vector import lanes_of
from cgdnn.kernels.winograd_points import OUTPUTS
from cgdnn.kernels.winograd_tiles import multiply_blocks, panel_columns

_PADDING = 5
"""Vectors between frequencies, as in `cgdnn.kernels.conv_winograd`."""


def images_together() -> int:
    """Return the images of a unit, those of a vector of float32: a divisor of the batch."""
    return padded(1)


def scratch_of(taps: int, depth: int, covered: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the elements of the scratch arrays of `conv_winograd_batch`.

    Parameters
    ----------
    taps : int
    depth : int
        Channels that the products sum over.
    covered : tuple of int
        Rows and columns of the plane that is covered with tiles.
    """
    lanes = images_together()
    down, across = grid_of(*covered)
    frequencies, tiles = (taps + OUTPUTS - 1) ** 2, down * across
    rows, columns = (OUTPUTS * count + taps - 1 for count in (down, across))
    return (
        (rows * columns + lanes) * lanes,
        frequencies * (depth * tiles + _PADDING) * lanes,
        frequencies * (lanes * tiles + _PADDING) * lanes,
        lanes,
    )


@kernel(
    array(4), array(4), array(1), INT, array(4), INT, INT, INT, INT, INT,
    scratch(1), scratch(1), scratch(1), scratch(1), INT, INT,
)  # fmt: skip
def conv_winograd_batch(  # type: ignore[no-untyped-def]
    x, u, b, has_bias, y, taps, transposed, pad_h, pad_w, together, plane, v, m, bias, begin, end
):
    """Set y for some images: the forward pass, or with another U the data gradient.

    Parameters
    ----------
    x : array (N, C, H, W)
        dy for a data gradient.
    u : array (units, n * n, C + 1, columns of a unit)
        From `cgdnn.kernels.conv_winograd.winograd_filters`, for one group.
    b : array (Co,)
        Not read unless `has_bias`.
    y : array (N, Co, R, OW)
        dx for a data gradient.
    taps : int
    transposed : int
        1 for the transposed algorithm, else 0.
    pad_h, pad_w : int
        Zeros around x, or around y where `transposed`.
    together : int
        See `images_together`.
    plane, v, m, bias : arrays
        Scratch; see `scratch_of`.
    begin, end : int
        Range of units of images.
    """
    lanes = lanes_of(x)
    channels, filters = x.shape[1], y.shape[1]
    kind, x_shift, x_patch, y_shift, y_patch = sides(taps, transposed, pad_h, pad_w)
    covered = x if transposed else y
    down = (covered.shape[2] + OUTPUTS - 1) // OUTPUTS
    across = (covered.shape[3] + OUTPUTS - 1) // OUTPUTS
    block, row = (0, 1, 0, down, 0, across), down * across * lanes
    v_frequency, m_frequency = channels * row + _PADDING * lanes, (row + _PADDING) * lanes
    x_area, y_area = x.shape[2] * x.shape[3], y.shape[2] * y.shape[3]
    for image in range(begin * together, end * together, lanes):
        for c in range(channels):
            plane_to_tiles(
                x, (image * channels + c) * x_area, channels * x_area, lanes,
                block, x_shift, x_patch, kind, plane, v, c * row, v_frequency, plane, 0, 0,
            )  # fmt: skip
        for o in range(0, filters, lanes):
            some = min(lanes, filters - o)
            _multiply(v, v_frequency, channels, u, o, some, m, m_frequency, row)
            for i in range(some):
                for lane in range(lanes if has_bias else 0):
                    bias[lane] = b[o + i]
                tiles_to_planes(
                    m, i * row, m_frequency, block, y_shift, y_patch, kind, plane,
                    bias, 0, lanes * has_bias,
                    y, (image * filters + o + i) * y_area, filters * y_area, lanes,
                )  # fmt: skip


@device
def _multiply(v, v_frequency, channels, u, o, some, m, m_frequency, row):  # type: ignore[no-untyped-def]
    """M = U^T V for some filters from `o` on, all in one unit of U."""
    lanes = lanes_of(v)
    frequencies, width = u.shape[1], u.shape[3]
    panel = panel_columns(v)
    unit = o // width
    for frequency in range(frequencies):
        u_start = (unit * frequencies + frequency) * u.shape[2] * width + o - unit * width
        for tile in range(0, row, panel):
            multiply_blocks(
                u, u_start, 1, lanes, width, width * lanes, some, channels,
                v, frequency * v_frequency + tile, row, lanes, min(panel, row - tile) // lanes,
                m, frequency * m_frequency + tile, row, row * lanes, lanes, 0,
                (frequency + 1) % frequencies * v_frequency,
            )  # fmt: skip
