"""Tables and sizes from which the kernels of `cgdnn.kernels.conv_direct` work.

Everything follows from the shapes and the vector width, never from the caches or the cores of a
machine: sizes of blocks decide the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cgdnn import machine
from cgdnn.kernels.conv_direct import (
    CHUNK_PIXELS,
    MOST_ROWS,
    most_pixel_vectors,
    most_scalars,
)

_INPUT_ELEMENTS = 96 << 10
"""Re-laid values of the input: with the weights of a tile they share a second cache of 1 MiB."""
_WEIGHT_ELEMENTS = 64 << 10
_SEGMENT_STEPS = 256
"""Entries of a table, at most: it stays in the first cache."""
_GRADIENT_INPUT, _GRADIENT_ELEMENTS = 160 << 10, 64 << 10
"""Values of the input, and of dy, that are re-laid at a time for the weight gradient. The second
cache has room for them, for as much of dy that comes next, and for sums."""
_GRADIENT_PIXELS = 448
"""Pixels of a sum of the weight gradient at a time, where x is read where it lies: those of the
channels of a tile stay in the first cache, while vectors of dy pass by."""
_LEAST_JOINED_FILTERS = 4
"""From so many filters on it pays to copy rows so that vectors go on in the next one."""
_JOINED_CHANNELS = 64
"""Up to so many channels, the taps of a row follow each other where nothing lies between them."""
_CYCLE = 0.265
"""Nanoseconds of a cycle, for estimates; two products of vectors take one."""
_RELAY, _FROM_LANES, _STORE = 0.12, 0.25, 0.1
"""Nanoseconds of a value that is re-laid, that is transposed from lanes, and that is stored as it
is."""
_TRANSPOSE = 0.1
"""Nanoseconds of a value of x or dy that is transposed for the weight gradient."""
_TOGETHER = 8
"""Images that are re-laid at a time, at most."""
_KEPT = 256
"""Answers that are remembered: planning asks for costs and steps apart."""
_FLAT_COLUMNS = 112
"""Longest rows that images of 1x1 convolutions are cut into, where shorter ones fill vectors as
well: outputs are computed in whole rows before they are transposed."""

Table = npt.NDArray[np.int64]


def unit_filters() -> int:
    """Return the filters of a unit where filters are in the lanes: a vector of float32."""
    return machine.vector_bytes() // 4


@dataclass(frozen=True)
class Side:
    """One spatial axis of a convolution: sizes of input and kernel, and how the kernel moves."""

    size: int
    kernel: int
    stride: int
    pad: int
    dilation: int

    @property
    def output(self) -> int:
        """Size of the output."""
        return (self.size + 2 * self.pad - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    @property
    def span(self) -> int:
        """Input places from the first tap to the last."""
        return self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class Window:
    """A convolution of two spatial axes: channels and filters of one group, and its axes."""

    group: int
    channels: int
    filters: int
    rows: Side
    columns: Side

    @property
    def taps(self) -> int:
        """Weights of one channel of a filter."""
        return self.rows.kernel * self.columns.kernel

    @property
    def pointwise(self) -> bool:
        """Whether each output pixel reads its own input pixel only."""
        return all(s.kernel == s.stride == 1 and s.pad == 0 for s in (self.rows, self.columns))

    @property
    def sampled(self) -> Window:
        """The same convolution of what it reads of the input, where each output reads one pixel."""
        axes = (self.rows, self.columns)
        if self.pointwise or any(side.kernel > 1 or side.pad for side in axes):
            return self
        return self._of_rows(*(side.output for side in axes))

    @property
    def flat(self) -> Window:
        """The same convolution with an image cut into rows that fill vectors best.

        Where each output pixel reads its own input pixel only.
        """
        if not self.pointwise:
            return self
        pixels, lanes = self.rows.size * self.columns.size, unit_filters()
        lengths = [n for n in range(1, _GRADIENT_PIXELS + 1) if pixels % n == 0]

        def rank(length: int) -> tuple[float, bool, int]:
            filled = length / (-(-length // lanes) * lanes)
            return filled, length <= _FLAT_COLUMNS, length

        length = max(lengths, key=rank)
        return self._of_rows(pixels // length, length)

    def _of_rows(self, rows: int, columns: int) -> Window:
        sides = Side(rows, 1, 1, 0, 1), Side(columns, 1, 1, 0, 1)
        return Window(self.group, self.channels, self.filters, *sides)


@dataclass(frozen=True)
class _Taps:
    """What the places of an output read along one axis.

    Attributes
    ----------
    inputs, outputs : int
        Sizes of what is read and of what is written.
    step : int
        Input places from one output place to the next of the same remainder.
    meets : list of list of tuple of int
        For each remainder of the output place, the taps that it has: their number, and the input
        place that they meet at the first output place.
    """

    inputs: int
    outputs: int
    step: int
    meets: list[list[tuple[int, int]]]

    @property
    def places(self) -> list[int]:
        """The input places that the first output places read; 0 where they read none."""
        return sorted({at for taps in self.meets for _, at in taps} or {0})

    @property
    def least(self) -> int:
        """The first of them."""
        return self.places[0]

    @property
    def most(self) -> int:
        """The last of them."""
        return self.places[-1]

    @property
    def counts(self) -> list[int]:
        """Output places of each remainder."""
        remainders = len(self.meets)
        return [-(-(self.outputs - r) // remainders) for r in range(remainders)]

    @property
    def count(self) -> int:
        """Output places of the first remainder, which has the most."""
        return self.counts[0]

    @property
    def inside(self) -> bool:
        """Whether nothing outside of the input is read."""
        return self.least >= 0 and (self.count - 1) * self.step + self.most < self.inputs


def _forward_taps(side: Side) -> _Taps:
    meets = [(j, j * side.dilation - side.pad) for j in range(side.kernel)]
    return _Taps(side.size, side.output, side.stride, [meets])


def _backward_taps(side: Side) -> _Taps:
    meets = []
    for remainder in range(min(side.stride, side.size)):
        at = [(j, remainder + side.pad - j * side.dilation) for j in range(side.kernel)]
        meets.append([(j, place // side.stride) for j, place in at if place % side.stride == 0])
    return _Taps(side.output, side.size, 1, meets)


@dataclass(frozen=True)
class Stencil:
    """How to compute one output: the arguments of the kernel, and the sizes of its arrays.

    Attributes
    ----------
    tables : tuple of array of int64
        ``table``, ``fields`` and ``firsts`` of `conv_direct_filters`.
    numbers : tuple of int
        The numbers that follow them.
    block, most, width : int
        Likewise, and the ``width`` of `conv_direct_pixels`.
    relaid, chunk : int
        Elements of the scratch arrays u and t.
    weights : tuple of int
        Shape of the packed weights.
    cost : float
        Estimated nanoseconds of one image on one core.
    """

    tables: tuple[Table, Table, Table]
    numbers: tuple[int, ...]
    block: int
    most: int
    width: int
    relaid: int
    chunk: int
    weights: tuple[int, int, int]
    cost: float


@lru_cache(maxsize=_KEPT)
def forward(window: Window, *, pixel_lanes: bool) -> Stencil:
    """Return how to compute y from x."""
    axes = _forward_taps(window.rows), _forward_taps(window.columns)
    return _stencil(window, window.channels, window.filters, axes, pixel_lanes)


@lru_cache(maxsize=_KEPT)
def backward_data(window: Window, *, pixel_lanes: bool) -> Stencil:
    """Return how to compute dx from dy.

    Raises
    ------
    ValueError
        `pixel_lanes` with a stride: neighbours in dx have different taps.
    """
    if pixel_lanes and (window.rows.stride, window.columns.stride) != (1, 1):
        raise ValueError("pixels in the lanes need stride 1")
    axes = _backward_taps(window.rows), _backward_taps(window.columns)
    return _stencil(window, window.filters, window.channels, axes, pixel_lanes)


@dataclass(frozen=True)
class _Reading:
    """How the input lies that one of the kernels reads.

    Attributes
    ----------
    relays : bool
        Whether it is re-laid.
    row_first, row_stride, row_step, span : int
        As `conv_direct_filters` takes them.
    planes : list of int
        The input columns that the planes begin with.
    columns : int
        Of a plane, or of an image that is read where it lies.
    """

    relays: bool
    row_first: int
    row_stride: int
    row_step: int
    span: int
    planes: list[int]
    columns: int

    @classmethod
    def of(cls, rows: _Taps, columns: _Taps, *, relays: bool) -> _Reading:
        """Return planes of the columns at each remainder, or the images where they lie."""
        relays = relays or columns.step > 1 or not (rows.inside and columns.inside)
        span = rows.most - rows.least + 1
        skips = relays and span == 1  # rows that are not read
        least, step = columns.least, columns.step
        planes = sorted({least + (at - least) % step for at in columns.places})
        width = columns.count + (columns.most - least) // step
        return cls(
            relays,
            rows.least,
            rows.step if skips else 1,
            1 if skips else rows.step,
            span,
            planes,
            width if relays else columns.inputs,
        )

    def joined(self, columns: _Taps, width: int) -> _Reading:
        """Return one plane for each tap instead, each row as long as a row of the output counts."""
        return replace(self, planes=columns.places, columns=width)

    @property
    def copies(self) -> int:
        """Planes of the input that memory is needed for."""
        return len(self.planes) if self.relays else 1

    def height(self, band: int) -> int:
        """Return the input rows of some output rows."""
        return (band - 1) * self.row_step + self.span

    def place(self, row: int, column: int, step: int, plane_pitch: int) -> int:
        """Return the offset of what an output place reads, from that of the first one."""
        if not self.relays:
            return row * self.columns + column
        plane = next(
            i
            for i in reversed(range(len(self.planes)))
            if column >= self.planes[i] and (column - self.planes[i]) % step == 0
        )
        index = (column - self.planes[plane]) // step
        return plane * plane_pitch + (row - self.row_first) * self.columns + index


def _stencil(
    window: Window, channels: int, filters: int, axes: tuple[_Taps, _Taps], pixel_lanes: bool
) -> Stencil:
    """Return how to compute `filters` outputs from `channels` inputs of each group."""
    rows, columns = axes
    lanes, taps, width = unit_filters(), window.taps, columns.count
    reading = _Reading.of(rows, columns, relays=pixel_lanes)
    segments = [s for s in range(1, channels + 1) if channels % s == 0]
    segment = max((s for s in segments if s * taps <= _SEGMENT_STEPS), default=1)
    if pixel_lanes:
        unit, most, block = _tile_rows(filters), 0, channels
        width, joins = _row_width(columns.count, filters, len(columns.places), reading.row_step)
        if joins:
            reading = reading.joined(columns, width)
    else:
        unit, most = lanes, _most_vectors(-(-filters // lanes), columns.count)
        blocks = -(-channels * taps * most * lanes // _WEIGHT_ELEMENTS)
        block = -(-(channels // segment) // blocks) * segment
    row_size = block * reading.columns * reading.copies
    band = (_INPUT_ELEMENTS // row_size - reading.span) // reading.row_step + 1
    bands = -(-rows.count // max(1, min(rows.count, band)))
    band = -(-rows.count // bands)
    height, together = reading.height(band), 1
    if bands == 1:
        together = max(1, min(_TOGETHER, _INPUT_ELEMENTS // (row_size * height)))
    plane_pitch = height * reading.columns
    channel_pitch = rows.inputs * columns.inputs
    if reading.relays:
        channel_pitch = _odd_lines(together * reading.copies * plane_pitch)
    steps: list[tuple[int, int]] = []
    fields = np.zeros((len(rows.meets), len(columns.meets), 2), np.int64)
    for a, b in np.ndindex(*fields.shape[:2]):
        begin = len(steps)
        steps += [
            (
                c * channel_pitch + reading.place(row, column, columns.step, plane_pitch),
                c * taps + q * window.columns.kernel + j,
            )
            for c in range(segment)
            for q, row in rows.meets[a]
            for j, column in columns.meets[b]
        ]
        fields[a, b] = begin, len(steps) - begin
    chunk = max(1, CHUNK_PIXELS // columns.outputs) if len(rows.meets) == 1 else 1
    outputs = rows.outputs * columns.outputs
    if pixel_lanes:
        vectors = most_pixel_vectors()
        tiles = -(-rows.count * width // (vectors * lanes)) * -(-filters // unit)
        cycles = tiles * taps * _step_cost(unit, vectors)
        cost = _STORE * filters * outputs
    else:
        counts = fields[:, :, 1] / segment
        cycles = sum(
            counts[a, b] * row_count * _tiles_cost(-(-filters // lanes), most, column_count)
            for a, row_count in enumerate(rows.counts)
            for b, column_count in enumerate(columns.counts)
        )
        cost = _FROM_LANES * -(-filters // lanes) * lanes * outputs
    cost += _CYCLE * channels * cycles
    if reading.relays:
        cost += _RELAY * channels * reading.copies * bands * plane_pitch
    return Stencil(
        (
            np.ascontiguousarray(np.array(steps or [(0, 0)], np.int64).T),
            fields,
            np.array(reading.planes, np.int64),
        ),
        (
            *(int(reading.relays), window.group, segment, columns.step, reading.columns),
            *(reading.row_first, reading.row_stride, reading.row_step, reading.span),
            *(reading.columns, channel_pitch, band, together),
        ),
        block,
        most,
        width,
        block * channel_pitch + 4 * lanes if reading.relays else 1,
        most * (chunk * columns.outputs + lanes) * lanes,
        (window.group * -(-filters // unit), channels * taps, unit),
        window.group * cost,
    )


def _row_width(pixels: int, filters: int, copies: int, row_step: int) -> tuple[int, bool]:
    """Return as how long rows of pixels count, and whether vectors go on in the next row.

    For the latter each tap of a row needs a copy of the input of its own, and the next row of the
    output the next row of the input.
    """
    half = unit_filters() // 2
    halves, whole = -(-pixels // half) * half, -(-pixels // (2 * half)) * 2 * half
    joins = row_step == 1 and (copies == 1 or filters >= _LEAST_JOINED_FILTERS)
    return (halves, True) if joins and halves < whole else (whole, False)


def _odd_lines(elements: int) -> int:
    """Return at least `elements`, an odd number of cache lines of float32.

    What is read at such a distance spreads over all sets of a cache.
    """
    return (-(-elements // 16) | 1) * 16


def _step_cost(scalars: int, vectors: int) -> float:
    """Return the cycles of a step: two products or loads a cycle, the latency of a product."""
    return max(scalars * vectors / 2, (scalars + vectors) / 2, 4.0) + 0.5


def _most_vectors(blocks: int, pixels: int) -> int:
    """Return how many vectors of filters tiles should have at most."""
    return min(range(1, len(most_scalars()) + 1), key=lambda m: _tiles_cost(blocks, m, pixels))


def _tiles_cost(blocks: int, most: int, scalars: int) -> float:
    """Return the cycles in which some scalars meet some vectors, at most `most` in a tile."""
    total = 0.0
    for vectors in _shares(blocks, most):
        for count in _shares(scalars, most_scalars()[vectors - 1]):
            total += _step_cost(count, vectors)
    return total


def _shares(count: int, most: int) -> list[int]:
    """Return the nearly equal parts, of at most `most`, that the kernels make of a count."""
    parts = -(-count // most)
    return [count * (p + 1) // parts - count * p // parts for p in range(parts)]


def _tile_rows(filters: int) -> int:
    """Return how many filters a tile with pixels in the lanes should have."""
    vectors = most_pixel_vectors()
    return min(
        range(1, MOST_ROWS + 1),
        key=lambda rows: -(-filters // rows) * _step_cost(rows, vectors),
    )


@dataclass(frozen=True)
class WeightStencil:
    """How to compute weight gradients: arguments of `conv_direct_backward_weights` and sizes.

    Attributes
    ----------
    firsts : array of int64
    numbers : tuple of int
        The numbers that follow ``firsts``.
    relaid, vectors : int
        Elements of the scratch arrays u and v.
    units, depth : int
        Units of all groups, and weights of a filter.
    cost : float
        Estimated nanoseconds of one image on one core.
    """

    firsts: Table
    numbers: tuple[int, ...]
    relaid: int
    vectors: int
    units: int
    depth: int
    cost: float


@lru_cache(maxsize=_KEPT)
def backward_weights(window: Window, units: int | None = None) -> WeightStencil:
    """Return how to compute dw from x and dy, at most so many units of filters in a piece."""
    rows, columns, lanes = window.rows, window.columns, unit_filters()
    row_stride, row_step = (rows.stride, 1) if rows.kernel == 1 else (1, rows.stride)
    joins = window.channels <= _JOINED_CHANNELS and (columns.dilation == 1 or columns.kernel == 1)
    pitch = window.channels if joins else _odd_lines(window.channels)
    run = window.channels * columns.kernel if joins else window.channels
    width = (columns.output - 1) * columns.stride + columns.span
    blocks = -(-window.filters // lanes)
    held = min(blocks, units or blocks)
    relays = not window.pointwise

    def fits(band: int, together: int) -> bool:
        height = (band - 1) * row_step + rows.span
        pixels = together * band * columns.output
        if pixels * held * lanes > _GRADIENT_ELEMENTS:
            return False
        if not relays:
            return pixels <= _GRADIENT_PIXELS
        return together * height * width * pitch <= _GRADIENT_INPUT

    band = max((r for r in range(2, rows.output + 1) if fits(r, 1)), default=1)
    band = -(-rows.output // -(-rows.output // band))  # of equal height
    together = 1
    if band == rows.output:
        together = max((n for n in range(2, _TOGETHER + 1) if fits(band, n)), default=1)
    height = (band - 1) * row_step + rows.span
    pixels = together * band * columns.output
    outputs = rows.output * columns.output
    cycles = rows.kernel * (window.channels * columns.kernel // run) * _tiles_cost(blocks, 2, run)
    cost = _CYCLE * outputs * cycles + _TRANSPOSE * outputs * blocks * lanes
    if relays:
        cost += _TRANSPOSE * -(-rows.output // band) * height * width * window.channels
    return WeightStencil(
        np.array([-columns.pad], np.int64),
        (
            *(int(relays), window.group, lanes, rows.kernel, columns.kernel, row_stride, row_step),
            *(rows.dilation, rows.pad, columns.stride, columns.dilation, pitch, run),
            *(band, together),
        ),
        together * height * width * pitch + lanes if relays else 1,
        held * (pixels + lanes) * lanes,
        window.group * blocks,
        window.channels * window.taps,
        window.group * cost,
    )
