"""Backward passes of convolution over the non-zero output gradients, one piece on one core.

Max pooling and ReLU leave dy mostly zero; only the non-zero part ("goodput") is multiplied here.
For two spatial axes, any stride and padding, and dilation 1; blobs stay in N, C, H, W order. With
groups, the channels of each are an image of their own. The input channels lie in the lanes of
vectors, so every non-zero is one broadcast that meets whole vectors, and a place of the kernel is a
shift of a base pointer: nothing is unfolded.

* backward_weights: a list for each (image, filter) of the non-zeros and the places in x where
  their windows begin. A tile of dw, some rows of the window, stays in registers while a list is
  gone through: dw += value * x[place + shift].
* backward_data: a list for each (image, pixel) of the non-zeros and the places of their filters in
  w. The sums of a window's columns stay in registers while the window moves along a row: they are
  shifted by one vector where the window moves by one pixel, and what falls out is added to dx.
  Where such lists would hold a few non-zeros or none, there is one for each (image, filter), of the
  non-zeros and the places in dx where their windows begin. Then a tile of w stays in registers, and
  every vector of the window is loaded, added to and stored.

Where maximum pooling alone reads the output, dy is what pooling passes on: each pooled gradient,
at the place of its maximum. backward_weights then lists the pooled gradients ("routed") and needs
no dy; a place that is the maximum of several windows is listed several times.

With few channels a row of the window is a run of elements that begins anywhere in a cache line, and
most vectors would cross into the next, which takes two loads. Where a run fits a line, the runs of
each window are brought to lines of their own first, for a band of rows that stays in the first
cache.

Each list is made by one pass over dy: compare with zero, compress, count. Values and places lie in
two arrays, one list behind the other, with a table of starts, in scratch that fits the caches.
CT-CSR of spg-CNN keeps one form for both passes, from which the data gradient can only scatter,
bound by one store a cycle: a sketch of it ran both passes on 100 images of 32 x 16 x 16 by
5 x 5 x 32 at 1.0, 2.1 and 3.4 times the dense peak of a core at 0.75, 0.9 and 0.95 zeros. With a
list of its own a pass needs one load and no store for a multiply-add, for 3 % more compression. But
no branch predictor foresees where short lists end, so from some 0.93 zeros on scattering is faster:
together 2.0 to 2.2, 3.3 to 3.8 and 4.9 to 5.2 times the peak beside busy neighbours, who take cache
and front end but not the peak. What comes next (of x, dy and dx) is brought near in good time.
Tiling by columns, the T of CT-CSR, is the cut into bands of rows and panels of filters.

A value is listed unless it equals 0: NaN and infinities are, -0.0 is not. Where dy is all zeros
the gradients are exactly 0.

See Rajbhandari et al.: "Optimizing CNNs on multicores for scalability, performance and goodput",
ASPLOS 2017.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from itertools import pairwise, product
from typing import Any, Literal

from llvmlite import ir
from numba.core import cgutils

from cgdnn import machine
from cgdnn.kernels._jit import (
    INT,
    REAL,
    Kernel,
    array,
    device,
    generated_device,
    kernel,
    scratch,
)
from cgdnn.kernels.relay import fill_zero, from_lanes, prefetch_run, to_lanes, to_pixels
from cgdnn.kernels.reorder import PLACE
from cgdnn.kernels.vector import Emitter, add_sum, constant, emitted, lanes_of

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

_MOST_ROWS = 8
"""Rows of a tile."""
_PANEL = 32
"""Filters whose non-zeros share a list of backward_data: a tile of their weights is 50 KB."""
_NEAR_BYTES = 28 << 10
"""Size that a block of channels of a band of x should not exceed, to stay in the first cache."""
_SPREAD_BYTES = 44 << 10
"""Size that a band of spread x should not exceed, likewise."""
_BAND_BYTES = 512 << 10
"""Size that a band of dx, or the lists of a band, should not exceed."""
_LINE_BYTES = 64
"""Bytes of a cache line."""

_AHEAD = 4
"""Planes of pooled gradients that are fetched ahead."""
_PLACES_AHEAD = 64
"""Places of pooled gradients that are fetched ahead."""

Form = Literal["blocks", "runs", "spread"]
"""How x lies for backward_weights: in blocks of channels; pixel by pixel without gaps, so that
vectors span several pixels; or so that what each window meets of a row begins on a cache line."""
Routed = Literal["", "planes", "lanes"]
"""How the pooled gradients lie that are listed: in N, C, H, W or with channels in lanes."""


def most_sums() -> int:
    """Return the most vectors of a tile: they leave room in the registers for a broadcast."""
    return 25 if machine.vector_bytes() == 64 else 12


def _lanes() -> int:
    """Return the lanes of a float32 vector; scratch for as many float64 elements has room."""
    return machine.vector_bytes() // 4


def _most_rows(vectors: int) -> int:
    """Return the most rows of a tile that is so many vectors wide."""
    return max(1, min(_MOST_ROWS, most_sums() // vectors))


@dataclass(frozen=True)
class Pooled:
    """The shapes of a maximum pooling behind a convolution.

    Attributes
    ----------
    size : tuple of int
        Rows and columns that are left of an output image.
    kernel, stride, pad : int
        Of its windows, in rows.
    """

    size: tuple[int, int]
    kernel: int
    stride: int
    pad: int


@dataclass(frozen=True)
class Window:
    """The shapes of a convolution over two spatial axes; pairs are (rows, columns).

    Attributes
    ----------
    images : int
    channels, filters : int
        Of a group.
    size, output, kernel, stride, pad : tuple of int
        Of an input image, an output image, and the window.
    pooled : Pooled, optional
        The pooling whose gradients backward_weights lists in place of those of the output.
    groups : int
    """

    images: int
    channels: int
    filters: int
    size: tuple[int, int]
    output: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    pooled: Pooled | None = None
    groups: int = 1

    @property
    def _blocks(self) -> int:
        return -(-self.channels // _lanes())

    @property
    def _run(self) -> int:
        """Elements that a row of the window meets where x lies pixel by pixel without gaps."""
        return self.kernel[1] * self.channels

    @property
    def form(self) -> Form:
        """How x lies: in runs where fewer vectors cover a row of the window than in blocks.

        So it is with few channels, or odd counts. Runs of up to a cache line are spread.
        """
        vectors = -(-self._run // _lanes())
        if vectors >= self.kernel[1] * self._blocks or vectors > most_sums():
            return "blocks"
        return "spread" if 4 * self._run <= _LINE_BYTES and self.stride[1] == 1 else "runs"

    @property
    def pixel(self) -> int:
        """Channels that lie together in runs; 0 for blocks."""
        return 0 if self.form == "blocks" else self.channels

    @property
    def weights_vectors(self) -> int:
        """Vectors of x that a non-zero meets in backward_weights."""
        if self.form == "blocks":
            return self.kernel[0] * self.kernel[1] * self._blocks
        return self.kernel[0] * -(-self._run // _lanes())

    @property
    def data_vectors(self) -> int:
        """Vectors of w that a non-zero meets in backward_data."""
        return self.kernel[0] * self.kernel[1] * self._blocks

    @property
    def weights_row(self) -> int:
        """Elements of the sums of one filter (see `conv_sparse_sum_weights`)."""
        return _spread(self.weights_vectors * _lanes())

    @property
    def total_scratch(self) -> int:
        """Elements of scratch of `conv_sparse_sum_weights`, which reads whole squares."""
        return self.weights_row + _lanes() ** 2

    @property
    def data_row(self) -> int:
        """Elements of a filter in the order of `conv_sparse_pack_weights`, which writes squares."""
        spare = -(self.kernel[0] * self.kernel[1]) % _lanes()
        return _spread((self.data_vectors + spare) * _lanes())

    @property
    def panels(self) -> int:
        """Lists of each pixel in backward_data."""
        return -(-self.filters // _PANEL)

    @property
    def _line(self) -> int:
        """Columns of a padded image."""
        return self.size[1] + 2 * self.pad[1]

    @property
    def lists(self) -> tuple[int, int]:
        """Rows and columns of the gradients that backward_weights lists."""
        return self.output if self.pooled is None else self.pooled.size

    @property
    def reach(self) -> tuple[int, int, int]:
        """The output rows behind the listed ones: row i has ``i * step - back`` and those below.

        Returns
        -------
        tuple of (step, back, rows)
        """
        if self.pooled is None:
            return 1, 0, 1
        return self.pooled.stride, self.pooled.pad, self.pooled.kernel

    def weights_band(self) -> tuple[int, int]:
        """Return how many listed rows of how many images backward_weights takes at a time.

        All rows, where it is more than one image.
        """
        step, _, rows = self.reach
        near = _SPREAD_BYTES if self.form == "spread" else _NEAR_BYTES
        most = near // (4 * self._near_row)
        outputs = (most - self.kernel[0]) // self.stride[0] + 1
        band = _fewest_bands(self.lists[0], (outputs - rows) // step + 1)
        images = most // self._band_rows(band) if band == self.lists[0] else 1
        return band, max(n for n in range(1, max(1, images) + 1) if self.images % n == 0)

    @property
    def _near_row(self) -> int:
        """Elements of a row of x that tiles of dw meet."""
        if self.form == "spread":  # one more, since rows are an odd number of vectors apart
            return (self.output[1] * -(-self._run // _lanes()) + 1) * _lanes()
        return self._line * (self.channels if self.form == "runs" else _lanes())

    def _band_rows(self, band: int) -> int:
        """Return the input rows that a band of so many listed rows reads."""
        step, _, rows = self.reach
        return ((band - 1) * step + rows - 1) * self.stride[0] + self.kernel[0]

    @property
    def relaid(self) -> float:
        """How many times backward_weights re-lays a row of x: bands of rows overlap."""
        band, _ = self.weights_band()
        return self._band_rows(band) / (band * self.reach[0] * self.stride[0])

    def data_band(self) -> int:
        """Return how many output rows backward_data takes at a time."""
        row = 4 * self._blocks * _lanes() * self._line * self.stride[0]
        lists = 8 * self.filters * self.output[1]
        return _fewest_bands(self.output[0], _BAND_BYTES // max(row, lists))

    @property
    def room(self) -> int:
        """Elements from one list of backward_weights to the next."""
        band, images = self.weights_band()
        return _room(images * band * self.lists[1])

    def weights_scratch(self, filters: int) -> list[tuple[int, str]]:
        """Return length and type of the scratch arrays of backward_weights, in order.

        Parameters
        ----------
        filters : int
            The most filters of a group in a piece.
        """
        band, images = self.weights_band()
        pixels, rows = images * band * self.lists[1], images * self._band_rows(band)
        row = self._near_row * (self._blocks if self.form == "blocks" else 1)
        beyond = -(-self._run // _lanes()) if self.form == "spread" else 1
        return [
            (rows * row + beyond * _lanes() ** 2, "real"),
            (filters * self.room, "real"),
            (filters * self.room, "int32"),
            (pixels + _lanes(), "int32"),
            (filters + self._offsets(), "int64"),
        ]

    @property
    def data_room(self) -> int:
        """Elements from one list of a filter to the next in backward_data."""
        return _room(self.data_band() * self.output[1])

    def data_scratch(self) -> list[tuple[int, str]]:
        """Return length and type of the scratch arrays of backward_data, in order."""
        band = self.data_band()
        rows = band * self.stride[0] + self.kernel[0] - 1
        pixels = band * self.output[1]
        lists = max(self.panels * pixels + 1, self.filters)
        return [
            (rows * self._line * self._blocks * _lanes() + _lanes() ** 2, "real"),
            (self.filters * self.data_room, "real"),
            (self.filters * self.data_room, "int32"),
            (pixels + _lanes(), "int32"),
            (_PANEL * _lanes(), "real"),
            (lists + self._offsets(), "int64"),
        ]

    def _offsets(self) -> int:
        """Return the rows of all windows: float64 has half the lanes, so more blocks."""
        return -(-2 * self.channels // _lanes()) * self.kernel[0]


def _fewest_bands(rows: int, most: int) -> int:
    """Return the rows of the fewest equal bands of at most so many rows."""
    bands = -(-rows // max(1, most))
    return -(-rows // bands)


def _room(elements: int) -> int:
    """Return room for a list and the vector beyond its end.

    An odd number of vectors, so that lists do not begin in the same sets of a cache.
    """
    return (-(-elements // _lanes()) + 1 | 1) * _lanes()


def _spread(elements: int) -> int:
    """Return a stride near `elements` that does not fall into the same sets of a cache."""
    return elements + _lanes() * (elements % 512 == 0)


def _append(e, lists, cursor, value, place):  # type: ignore[no-untyped-def]
    """Append the non-zero lanes of `value`, and the same lanes of `place`, to two lists.

    Up to a vector beyond their end is overwritten.
    """
    build = e.builder
    mask = build.fcmp_unordered("!=", value, e.zero())
    end = build.load(cursor)
    if machine.vector_bytes() == 64:
        for target, vector in zip(lists, (value, place), strict=True):
            e.store(_compressed(e, vector, mask), e.at(target, end))
        count = build.ctpop(build.bitcast(mask, ir.IntType(e.lanes)))
        end = build.add(end, build.zext(count, _I64))
    else:  # without an instruction for it, the way through memory is the shortest
        for lane in range(e.lanes):
            for target, vector in zip(lists, (value, place), strict=True):
                element = build.extract_element(vector, ir.Constant(_I32, lane))
                build.store(element, e.at(target, end))
            listed = build.extract_element(mask, ir.Constant(_I32, lane))
            end = build.add(end, build.zext(listed, _I64))
    build.store(end, cursor)


def _compressed(e, vector, mask):  # type: ignore[no-untyped-def]
    """Return the lanes of `vector` that `mask` turns on, moved to the front."""
    suffix = {"i32": "i32", "float": "f32", "double": "f64"}[str(vector.type.element)]
    name = f"llvm.experimental.vector.compress.v{e.lanes}{suffix}"
    kind = ir.FunctionType(vector.type, [vector.type, mask.type, vector.type])
    function = cgutils.get_or_insert_function(e.builder.module, kind, name)
    return e.builder.call(function, [vector, mask, ir.Constant(vector.type, ir.Undefined)])


@emitted
def list_planes(  # type: ignore[no-untyped-def]
    e, values, places, room, ends, dy, dy_start, plane, planes, image, images, positions,
    position_row, count,
):  # fmt: skip
    """List the non-zeros of the first `count` elements of each plane of dy, in several images.

    The list of plane p is [p * room, ends[p]); the place of element j of image i is
    positions[i * position_row + j].
    """
    build = e.builder
    dy = e.at(dy, dy_start)
    whole = build.sdiv(count, e.integer(e.lanes))
    done = build.mul(whole, e.integer(e.lanes))
    tail = build.sub(count, done)
    mask = e.first_lanes(tail)
    cursor = e.variable(e.integer(0))

    def append(source, table, at, mask):  # type: ignore[no-untyped-def]
        place = e.load_integers(e.at(table, at))
        _append(e, (values, places), cursor, e.load(e.at(source, at), mask), place)

    with e.loop(planes) as p:
        build.store(build.mul(p.index, room), cursor)
        with e.loop(images) as i:
            source = e.at(dy, build.mul(p.index, plane), build.mul(i.index, image))
            table = e.at(positions, build.mul(i.index, position_row))
            with e.loop(whole) as v:
                at = build.mul(v.index, e.integer(e.lanes))
                e.prefetch(e.at(source, at, plane))  # the next plane of this image
                append(source, table, at, None)
            with build.if_then(build.icmp_signed(">", tail, e.integer(0))):
                append(source, table, done, mask)
        build.store(build.load(cursor), e.at(ends, p.index))


class _Route:
    """Where in x the windows of routed gradients begin.

    A gradient that goes to row r and column c of its plane, which is number ``r * width + c``, has
    the place ``first + r * down + c * across``.
    """

    def __init__(self, e, width, first, down, across):  # type: ignore[no-untyped-def]
        build, self._e = e.builder, e

        def number(value):  # type: ignore[no-untyped-def]
            return e.splat(build.trunc(value, _I32))

        one = e.filled(1.0)
        self._part = build.fdiv(one, e.splat(build.sitofp(width, e.vector.element)))
        self._first, self._step = number(first), number(across)
        self._rest = number(build.sub(down, build.mul(width, across)))

    def places(self, target, moved):  # type: ignore[no-untyped-def]
        """Return the places of a vector of numbers, moved."""
        e, build = self._e, self._e.builder
        # The row, exact: a half keeps the quotient away from whole numbers.
        middle = build.fadd(build.sitofp(target, e.vector), e.filled(0.5))
        row = build.fptosi(build.fmul(middle, self._part), target.type)
        place = build.add(build.mul(target, self._step), build.mul(row, self._rest))
        return e.shifted(build.add(place, self._first), moved)


@emitted
def _list_routed(  # type: ignore[no-untyped-def]
    e, values, places, room, ends, dy, route, start, plane, planes, image, images, count,
    width, first, image_place, down, across, has_bias, db, db_start,
):  # fmt: skip
    """List the non-zeros of `count` routed gradients of each plane from `start` on.

    Of several images; the list of plane p is [p * room, ends[p]). For the places see `_Route`;
    those of image i are ``i * image_place`` further. With `has_bias` the sum of each plane's
    gradients is added to db.
    """
    build = e.builder
    dy, route = e.at(dy, start), e.at(route, start)
    whole = build.sdiv(count, e.integer(e.lanes))
    done = build.mul(whole, e.integer(e.lanes))
    tail = build.sub(count, done)
    mask = e.first_lanes(tail)
    cursor, total = e.variable(e.integer(0)), e.variable(e.zero())
    windows = _Route(e, width, first, down, across)
    ahead = build.mul(plane, e.integer(_AHEAD))

    def append(source, targets, moved, mask):  # type: ignore[no-untyped-def]
        place = windows.places(e.load_integers(targets, mask), moved)
        value = e.load(source, mask)
        build.store(build.fadd(build.load(total), value), total)
        _append(e, (values, places), cursor, value, place)

    with e.loop(planes) as p:
        build.store(build.mul(p.index, room), cursor)
        build.store(e.zero(), total)
        with e.loop(images) as i:
            offset = build.add(build.mul(p.index, plane), build.mul(i.index, image))
            moved = build.mul(i.index, image_place)
            source, targets = e.at(dy, offset), e.at(route, offset)
            lanes = e.integer(e.lanes)
            with e.sweep(whole, (source, lanes), (targets, lanes)) as (some, places_of_some):
                for here in (some, places_of_some):
                    e.prefetch(e.at(here, ahead), nearest=False)
                append(some, places_of_some, moved, None)
            with build.if_then(build.icmp_signed(">", tail, e.integer(0))):
                append(e.at(source, done), e.at(targets, done), moved, mask)
        build.store(build.load(cursor), e.at(ends, p.index))
        with build.if_then(build.icmp_signed("!=", has_bias, e.integer(0))):
            bias = e.at(db, db_start, p.index)
            build.store(build.fadd(e.scalar(bias), e.total(build.load(total))), bias)


@emitted
def _list_routed_lanes(  # type: ignore[no-untyped-def]
    e, values, places, room, ends, dy, route, start, plane, planes, image, images, count,
    width, first, image_place, down, across, has_bias, db, db_start,
):  # fmt: skip
    """Do what `_list_routed` does where each place holds the gradients of PLACE filters.

    `plane` is the elements of that many planes; `planes` counts filters, as there.
    """
    build, lanes = e.builder, e.integer(e.lanes)
    groups = build.sdiv(build.add(count, e.integer(e.lanes - 1)), lanes)
    windows = _Route(e, width, first, down, across)
    with e.loop(planes) as p:
        build.store(build.mul(p.index, room), e.at(ends, p.index))
    blocks = build.sdiv(planes, e.integer(PLACE))
    # Near the end of a block what is needed next lies at the beginning of the next one.
    skipped = build.sub(e.integer(_PLACES_AHEAD), count)
    next_block = build.add(plane, build.mul(skipped, e.integer(PLACE)))
    with e.loop(blocks) as block, e.loop(images) as i, e.loop(groups) as group:
        moved = build.mul(i.index, image_place)
        pixel = build.mul(group.index, lanes)
        offset = build.add(build.mul(block.index, plane), build.mul(i.index, image))
        offset = build.add(offset, build.mul(pixel, e.integer(PLACE)))
        last = build.sub(build.sub(count, pixel), e.integer(1))
        beyond = build.icmp_signed("<", last, e.integer(_PLACES_AHEAD))
        ahead = build.select(beyond, next_block, e.integer(_PLACES_AHEAD * PLACE))
        for part in range(0, PLACE, e.lanes):
            at = build.add(build.add(start, offset), e.integer(part))
            given, targets = [], []
            for k in range(e.lanes):
                # Where there are fewer, the last one stands for those beyond it, with zeros.
                number = e.smaller(e.integer(k), last)
                here = build.add(at, build.mul(number, e.integer(PLACE)))
                value, target = e.load(e.at(dy, here)), e.load_integers(e.at(route, here))
                for blob in (dy, route):
                    e.prefetch(e.at(blob, here, ahead))
                exists = build.icmp_signed("==", number, e.integer(k))
                given.append(build.select(exists, value, e.zero()))
                targets.append(target)
            filters = build.add(build.mul(block.index, e.integer(PLACE)), e.integer(part))
            with build.if_then(build.icmp_signed("!=", has_bias, e.integer(0))):
                bias = e.at(db, db_start, filters)
                e.store(reduce(build.fadd, given, e.load(bias)), bias)
            # Neighbours often share a maximum: one entry for both.
            for k, (left, right) in enumerate(pairwise(targets)):
                same = build.icmp_signed("==", left, right)
                passed_on = build.select(same, given[k], e.zero())
                given[k + 1] = build.fadd(given[k + 1], passed_on)
                given[k] = build.select(same, e.zero(), given[k])
            targets = [windows.places(target, moved) for target in targets]
            pairs = zip(e.transposed(given), e.transposed(targets), strict=True)
            for k, (value, place) in enumerate(pairs):
                cursor = e.at(ends, filters, e.integer(k))
                _append(e, (values, places), cursor, value, place)


@emitted
def _list_pixels(  # type: ignore[no-untyped-def]
    e, values, places, starts, first, dy, dy_start, plane, planes, turned, count, w_row
):
    """List the non-zeros of each pixel of `planes` planes of dy, one plane for each filter.

    The list of pixel p is [starts[first + p], starts[first + p + 1]), the first of which is given;
    the place of filter o is o * w_row.
    """
    build = e.builder
    lanes = e.integer(e.lanes)
    dy, starts = e.at(dy, dy_start), e.at(starts, first)
    numbers = ir.Constant(ir.VectorType(_I32, e.lanes), list(range(e.lanes)))
    filter_places = build.mul(numbers, e.splat(build.trunc(w_row, _I32)))
    blocks = build.sdiv(build.add(planes, e.integer(e.lanes - 1)), lanes)
    width = build.mul(blocks, lanes)
    cursor = e.variable(e.scalar(starts))
    groups = build.sdiv(build.add(count, e.integer(e.lanes - 1)), lanes)
    next_panel = build.mul(plane, planes)
    with e.loop(groups) as g:
        pixel = build.mul(g.index, lanes)
        here = e.smaller(build.sub(count, pixel), lanes)
        with e.loop(blocks) as b:
            o = build.mul(b.index, lanes)
            rows = []
            for i in range(e.lanes):
                number = build.add(o, e.integer(i))
                exists = build.icmp_signed("<", number, planes)
                mask = e.first_lanes(build.select(exists, here, e.integer(0)))
                source = e.at(dy, build.mul(number, plane), pixel)
                rows.append(e.load(source, mask))
                e.prefetch(e.at(source, next_panel), nearest=False)
            for i, vector in enumerate(e.transposed(rows)):
                e.store(vector, e.at(turned, build.mul(e.integer(i), width), o))
        with e.loop(here) as p:
            with e.loop(blocks) as b:
                o = build.mul(b.index, lanes)
                value = e.load(e.at(turned, build.mul(p.index, width), o))
                base = e.splat(build.trunc(build.mul(o, w_row), _I32))
                _append(e, (values, places), cursor, value, build.add(base, filter_places))
            build.store(build.load(cursor), e.at(starts, pixel, p.index, e.integer(1)))


@contextmanager
def each_listed(e, values, places, begin, end):  # type: ignore[no-untyped-def]
    """Open a loop over the list [begin, end); yields the value in all lanes, and the place."""
    with cgutils.for_range(e.builder, end, start=begin) as i:
        value = e.splat(e.scalar(e.at(values, i.index)))
        yield value, e.builder.sext(e.scalar(e.at(places, i.index)), _I64)


def _emit_gather(  # type: ignore[no-untyped-def]
    e, rows, vectors, image, offsets, dw, dw_row, filters, values, places, room, ends
):
    """Emit dw[o] += sum over the list of filter o of value * image[place], for a tile of dw."""
    build = e.builder
    lines = [e.scalar(e.at(offsets, e.integer(r))) for r in range(rows)]
    shifts = [e.integer(v * e.lanes) for v in range(vectors)]
    with e.loop(filters) as o:
        target = e.at(dw, build.mul(o.index, dw_row))
        spots = [e.at(target, e.integer(i * e.lanes)) for i in range(rows * vectors)]
        sums = [e.variable(e.load(spot)) for spot in spots]
        begin, end = build.mul(o.index, room), e.scalar(e.at(ends, o.index))
        with each_listed(e, values, places, begin, end) as (value, place):
            pixel = e.at(image, place)
            shifted = [e.at(pixel, line, shift) for line in lines for shift in shifts]
            for x, total in zip(shifted, sums, strict=True):
                build.store(e.multiply_add(value, e.load(x), build.load(total)), total)
        for spot, total in zip(spots, sums, strict=True):
            e.store(build.load(total), spot)


def _emit_window_sums(  # type: ignore[no-untyped-def]
    e, rows, columns, image, line, offsets, w, values, places, starts, height, width, down, across
):
    """Emit image[pixel + shift] += sum over the list of each pixel of value * w[place], for a tile.

    Output pixels are height x width, strides in image are `down` lines and `across` vectors.
    """
    build = e.builder
    lines = [e.scalar(e.at(offsets, e.integer(r))) for r in range(rows)]
    tile = [[e.variable(e.zero()) for _ in range(columns)] for _ in range(rows)]
    flat = [total for sums in tile for total in sums]
    step = build.mul(across, e.integer(e.lanes))
    finished = e.smaller(across, e.integer(columns))

    def finish_column(place):  # type: ignore[no-untyped-def]
        """Add the first column of sums to the image; the others move up."""
        for offset, sums in zip(lines, tile, strict=True):
            target = e.at(place, offset)
            e.store(build.fadd(e.load(target), build.load(sums[0])), target)
            for left, right in pairwise(sums):
                build.store(build.load(right), left)
            build.store(e.zero(), sums[-1])

    with e.loop(height) as i:
        pixels = e.at(image, build.mul(build.mul(i.index, down), line))
        lists = e.at(starts, build.mul(i.index, width))
        for total in flat:
            build.store(e.zero(), total)
        with e.loop(width) as j:
            begin = e.scalar(e.at(lists, j.index))
            end = e.scalar(e.at(lists, j.index, e.integer(1)))
            with each_listed(e, values, places, begin, end) as (value, place):
                for number, total in enumerate(flat):
                    weights = e.load(e.at(w, place, e.integer(number * e.lanes)))
                    build.store(e.multiply_add(value, weights, build.load(total)), total)
            pixel = e.at(pixels, build.mul(j.index, step))
            with e.loop(finished) as k:
                finish_column(e.at(pixel, build.mul(k.index, e.integer(e.lanes))))
        last = e.at(pixels, build.mul(build.sub(width, e.integer(1)), step))
        with cgutils.for_range(build, e.integer(columns), start=finished) as k:
            finish_column(e.at(last, build.mul(k.index, e.integer(e.lanes))))


def _emit_scatter(  # type: ignore[no-untyped-def]
    e, rows, columns, image, offsets, w, w_row, filters, values, places, room, ends
):
    """Emit image[place + shift] += value * w[o] over the list of filter o, for a tile."""
    build = e.builder
    lines = [e.scalar(e.at(offsets, e.integer(r))) for r in range(rows)]
    shifts = [e.integer(c * e.lanes) for c in range(columns)]
    with e.loop(filters) as o:
        source = e.at(w, build.mul(o.index, w_row))
        weights = [e.load(e.at(source, e.integer(i * e.lanes))) for i in range(rows * columns)]
        begin, end = build.mul(o.index, room), e.scalar(e.at(ends, o.index))
        with each_listed(e, values, places, begin, end) as (value, place):
            pixel = e.at(image, place)
            targets = [e.at(pixel, line, shift) for line in lines for shift in shifts]
            for target, weight in zip(targets, weights, strict=True):
                e.store(e.multiply_add(value, weight, e.load(target)), target)


@device
def _set_offsets(offsets, first, blocks, rows, plane, line):  # type: ignore[no-untyped-def]
    """Set the offset of each row of the window in each block of channels of an image."""
    for b in range(blocks):
        for q in range(rows):
            offsets[first + b * rows + q] = b * plane + q * line


@device
def _lay_images(  # type: ignore[no-untyped-def]
    x, n, images, groups, image, blocks, pitch, plane, line, first, rows, pad_w, ahead
):
    """Lay some rows of some images, the first row of which may be outside, in channel blocks.

    The images lie `groups` apart in x. Block b of image i begins at
    ``b * plane + i * rows * line``. From low to high addresses, since what is behind a row may be
    overwritten with zeros; so the columns of the padding stay 0. What is `ahead` in x comes near.
    """
    lanes = lanes_of(x)
    channels, height, width = x.shape[1], x.shape[2], x.shape[3]
    for b in range(blocks):
        for i in range(images * rows):
            h = first + i % rows
            place = b * plane + i * line
            if h < 0 or h >= height:
                fill_zero(image, place, (line + lanes - 1) // lanes)
                continue
            for c in range(b * pitch, min((b + 1) * pitch, channels), lanes):
                source = (((n + i // rows * groups) * channels + c) * height + h) * width
                target = place + pad_w * pitch + c - b * pitch
                some = min(lanes, channels - c)
                for k in range(some):
                    prefetch_run(x, source + k * height * width + ahead, width)
                if pitch == lanes:
                    to_lanes(x, source, height * width, some, image, target, width)
                else:
                    to_pixels(
                        x, source, height * width, some, image, target, pitch, width, 1, 0
                    )  # fmt: skip


@cache
def _spreading(taps: int, channels: int) -> Any:
    """Return what brings a row of an image near, so that each window finds what it meets of it.

    Window j gets vectors with x[c, row, j + q - pad] as element ``q * channels + c``.
    """

    @emitted
    def spread_row(e, x, start, plane, width, pad, y, y_start, columns, ahead):  # type: ignore[no-untyped-def]
        """Write the vectors of `columns` windows; up to L - 1 windows beyond are overwritten."""
        build, lanes = e.builder, e.integer(e.lanes)
        vectors = -(-taps * channels // e.lanes)
        x, y = e.at(x, start), e.at(y, y_start)
        planes = [e.at(x, build.mul(plane, e.integer(c))) for c in range(channels)]
        groups = build.sdiv(build.add(columns, e.integer(e.lanes - 1)), lanes)
        with e.loop(groups) as group:
            first = build.mul(group.index, lanes)
            for each in planes:
                e.prefetch(e.at(each, first, ahead))
            run = []  # pixel by pixel
            for some in range(0, e.lanes + taps - 1, e.lanes):
                left = build.sub(build.add(first, e.integer(some)), pad)
                inside = e.within(e.lane_numbers(left), width)
                run += e.interleaved([e.load(e.at(each, left), inside) for each in planes])
            run.append(e.zero())
            target = e.at(y, build.mul(first, e.integer(vectors * e.lanes)))
            for i, v in product(range(e.lanes), range(vectors)):
                number, lane = divmod(i * channels + v * e.lanes, e.lanes)
                met = e.shuffle(run[number], run[number + 1], range(lane, lane + e.lanes))
                e.store(met, e.at(target, e.integer((i * vectors + v) * e.lanes)))

    def spread(  # type: ignore[no-untyped-def]
        x, n, images, groups, image, row_step, first, rows, columns, pad_w, ahead
    ):
        """Spread some rows of some images, the first row of which may be outside.

        The images lie `groups` apart in x. From low to high addresses, since what is behind a
        row may be overwritten. What is `ahead` in x comes near.
        """
        height, width = x.shape[2], x.shape[3]
        for i in range(images * rows):
            h = first + i % rows
            if 0 <= h < height:
                start = ((n + i // rows * groups) * channels * height + h) * width
                spread_row(
                    x, start, height * width, width, pad_w, image, i * row_step, columns, ahead
                )  # fmt: skip
            else:
                fill_zero(image, i * row_step, row_step // lanes_of(x))

    return generated_device(spread, f"spread_{taps}_{channels}")


_GEOMETRY = (INT,) * 7  # rows of the window, strides, padding, groups, band


@cache
def conv_backward_weights_sparse(
    form: Form, columns: int, pixel: int, routed: Routed = ""
) -> Kernel:
    """Return the kernel that sums the weight gradients of some filters from some images.

    Filters are [o_begin, o_end) in units of `unit`, images [begin, end) in units of `images`.
    With groups, the channels of each make an image, one group after the other.

    Parameters of the kernel, after those of `Window`, whose scratch comes last:

    x : array (N groups, C / groups, H, W)
    dy : array (N groups, Co / groups, R, OW)
        The gradients to list: of the output, or with `routed` those of `Window.pooled`; in lanes
        (N groups, Co / groups / L, PH, PW, L).
    route : int32 array like dy
        With `routed` the place in its plane that each gradient goes to; else not read.
    dw : array (pieces, Co * weights_row)
        Row `piece` is overwritten, as `conv_sparse_sum_weights` reads it.
    db : array (pieces, Co)
        Likewise; not touched unless `has_bias`.
    step, back, reach : int
        See `Window.reach`.
    room : int
        See `Window.room`.

    Parameters
    ----------
    form : Form
    columns : int
        Of the window.
    pixel : int
        See `Window.pixel`.
    routed : Routed
    """
    in_blocks, spreads = form == "blocks", form == "spread"
    in_lanes, is_routed = routed == "lanes", routed != ""
    list_routed = _list_routed_lanes if in_lanes else _list_routed
    together = PLACE if in_lanes else 1

    def vectors_of(e: Emitter) -> int:
        return columns if in_blocks else -(-columns * pixel // e.lanes)

    @constant
    def vectors(e: Emitter, x: Any) -> int:
        return vectors_of(e)

    @constant
    def most_rows(e: Emitter, x: Any) -> int:
        return _most_rows(vectors_of(e))

    @emitted
    def gather(  # type: ignore[no-untyped-def]
        e, image, offsets, first, rows, dw, dw_start, dw_row, filters, values, places, room, ends
    ):
        offsets, dw = e.at(offsets, first), e.at(dw, dw_start)
        number = e.builder.sub(rows, e.integer(1))
        with e.cases(number, _most_rows(vectors_of(e))) as each:
            for case in each:
                _emit_gather(
                    e, case + 1, vectors_of(e), image, offsets, dw, dw_row, filters, values,
                    places, room, ends,
                )  # fmt: skip

    spread = _spreading(columns, pixel)

    def function(  # type: ignore[no-untyped-def]
        x, dy, route, dw, db, has_bias, width, window_rows, stride_h, stride_w, pad_h, pad_w,
        groups, band, images, step, back, reach, room, image, values, places, positions, ends,
        piece, unit, o_begin, o_end, begin, end,
    ):  # fmt: skip
        lanes = lanes_of(x)
        channels, filters = x.shape[1], dy.shape[1] * together
        height, across = dy.shape[2:4]
        gradients = height * across
        pitch = lanes if in_blocks else channels
        blocks = (channels + lanes - 1) // lanes if in_blocks else 1
        # How far rows, and windows, are apart in the image.
        row, move = (x.shape[3] + 2 * pad_w) * pitch, stride_w * pitch
        if spreads:
            row, move = (width * vectors(x) | 1) * lanes, vectors(x) * lanes
        band_rows = ((band - 1) * step + reach - 1) * stride_h + window_rows
        plane = images * band_rows * row
        if not is_routed:
            for i in range(images):
                for r in range(band):
                    for j in range(across):
                        place = (i * band_rows + r * stride_h) * row + j * move
                        positions[(i * band + r) * across + j] = place
        o_first, o_last = o_begin * unit, o_end * unit
        offsets = min(o_last - o_first, filters)
        _set_offsets(ends, offsets, blocks, window_rows, plane, row)
        fill_zero(image, 0, (blocks * plane + lanes - 1) // lanes)
        dw_row = dw.shape[1] // (groups * filters)
        rows = blocks * window_rows
        tiles = (rows + most_rows(x) - 1) // most_rows(x)
        for group in range(o_first // filters, (o_last + filters - 1) // filters):
            low, high = max(o_first, group * filters), min(o_last, (group + 1) * filters)
            count = high - low
            dw_start = piece * dw.shape[1] + low * dw_row
            db_start = piece * db.shape[1] + low
            fill_zero(dw, dw_start, count * dw_row // lanes)
            if has_bias:
                for o in range(low, high):
                    db[piece, o] = 0
            for n in range(begin * images, end * images, images):
                one = n * groups + group
                dy_start = (n * groups * filters + low) * gradients
                for top in range(0, height, band):
                    tall = min(band, height - top)
                    first = top * step - back  # the output row that the first window begins at
                    upper = first * stride_h - pad_h
                    tall_rows = ((tall - 1) * step + reach - 1) * stride_h + window_rows
                    ahead = band * step * stride_h  # rows to the next band, or to the next images
                    if top + band >= height:
                        ahead = images * groups * channels * x.shape[2] - top * step * stride_h
                    if spreads:
                        spread(
                            x, one, images, groups, image, row, upper, tall_rows, width, pad_w,
                            ahead * x.shape[3],
                        )  # fmt: skip
                    else:
                        _lay_images(
                            x, one, images, groups, image, blocks, pitch, plane, row, upper,
                            tall_rows, pad_w, ahead * x.shape[3],
                        )  # fmt: skip
                    start = dy_start + top * across * together
                    if is_routed:
                        list_routed(
                            values, places, room, ends, dy, route, start, gradients * together,
                            count, groups * filters * gradients, images, tall * across,
                            width, -first * stride_h * row, band_rows * row, stride_h * row, move,
                            has_bias, db, db_start,
                        )  # fmt: skip
                    else:
                        list_planes(
                            values, places, room, ends, dy, start, gradients, count,
                            groups * filters * gradients, images, positions, band * across,
                            tall * across,
                        )  # fmt: skip
                        if has_bias:
                            for o in range(count):
                                begun, ended = o * room, ends[o]
                                add_sum(db, db_start + o, values, begun, ended - begun)
                    for tile in range(tiles):
                        above = rows * tile // tiles
                        gather(
                            image, ends, offsets + above, rows * (tile + 1) // tiles - above,
                            dw, dw_start + above * vectors(x) * lanes, dw_row,
                            count, values, places, room, ends,
                        )  # fmt: skip

    names = [
        "conv_backward_weights_sparse",
        f"{form}{columns}x{pixel}",
        *["routed", routed] * is_routed,
    ]
    function.__name__ = "_".join(names)
    gradients = 5 if in_lanes else 4
    return kernel(
        array(4),
        array(gradients),
        array(gradients, "int32"),
        array(2),
        array(2),
        *[INT] * 14,
        scratch(1),
        scratch(1),
        scratch(1, "int32"),
        scratch(1, "int32"),
        scratch(1, "int64"),
        *[INT] * 6,
    )(function)


@device
def _finish_rows(image, plane, line, dx, n, first, rows, pad_w):  # type: ignore[no-untyped-def]
    """Copy rows of an image, the first of which may be outside, to rows of dx from `first` on."""
    lanes = lanes_of(dx)
    channels, height, width = dx.shape[1], dx.shape[2], dx.shape[3]
    for r in range(max(0, -first), min(rows, height - first)):
        start = (n * channels * height + first + r) * width
        for c in range(channels):
            prefetch_run(dx, start + (channels + c) * height * width, width)  # of the next image
        for c in range(0, channels, lanes):
            from_lanes(
                image, c // lanes * plane + r * line + pad_w * lanes,
                dx, start + c * height * width, height * width, min(lanes, channels - c), width, 0,
            )  # fmt: skip


@device
def _move_rows_up(image, blocks, plane, line, done):  # type: ignore[no-untyped-def]
    """Let the rows behind the first `done` ones be the first, and zeros be behind them."""
    kept = plane - done * line
    for b in range(blocks):
        for i in range(b * plane, b * plane + kept):
            image[i] = image[i + done * line]
        fill_zero(image, b * plane + kept, done * line // lanes_of(image))


@cache
def conv_backward_data_sparse(columns: int, by_filter: bool) -> Kernel:
    """Return the kernel that sets dx to the gradient of [begin, end), groups of images.

    Parameters of the kernel, after those of `Window`, whose scratch comes last:

    dy : array (N groups, Co / groups, R, OW)
    w : array (Co, data_row)
        From `conv_sparse_pack_weights`.
    dx : array (N groups, C / groups, H, W)
    room : int
        See `Window.data_room`.

    Parameters
    ----------
    columns : int
        Of the window.
    by_filter : bool
        Whether there is a list for each filter, or for each pixel.
    """
    most_rows = _most_rows(columns)

    @emitted
    def multiply_pixels(  # type: ignore[no-untyped-def]
        e, image, line, offsets, first, rows, w, w_start, values, places, starts, starts_at,
        height, width, down, across,
    ):  # fmt: skip
        offsets, w, starts = e.at(offsets, first), e.at(w, w_start), e.at(starts, starts_at)
        with e.cases(e.builder.sub(rows, e.integer(1)), most_rows) as each:
            for case in each:
                _emit_window_sums(
                    e, case + 1, columns, image, line, offsets, w, values, places, starts,
                    height, width, down, across,
                )  # fmt: skip

    @emitted
    def multiply_filters(  # type: ignore[no-untyped-def]
        e, image, offsets, first, rows, w, w_start, w_row, filters, values, places, room, ends
    ):
        offsets, w = e.at(offsets, first), e.at(w, w_start)
        with e.cases(e.builder.sub(rows, e.integer(1)), most_rows) as each:
            for case in each:
                _emit_scatter(
                    e, case + 1, columns, image, offsets, w, w_row, filters, values, places, room,
                    ends,
                )  # fmt: skip

    def function(  # type: ignore[no-untyped-def]
        dy, w, dx, window_rows, stride_h, stride_w, pad_h, pad_w, groups, band, room,
        image, values, places, positions, turned, starts, begin, end,
    ):  # fmt: skip
        lanes = lanes_of(dx)
        channels, filters = dx.shape[1], dy.shape[1]
        height, width = dy.shape[2], dy.shape[3]
        blocks = (channels + lanes - 1) // lanes
        line = (dx.shape[3] + 2 * pad_w) * lanes
        band_rows = band * stride_h + window_rows - 1
        plane = band_rows * line
        offsets = (filters + _PANEL - 1) // _PANEL * band * width + 1
        if by_filter:
            offsets = filters
            for r in range(band):
                for j in range(width):
                    positions[r * width + j] = r * stride_h * line + j * stride_w * lanes
        _set_offsets(starts, offsets, blocks, window_rows, plane, line)
        rows = blocks * window_rows
        tiles = (rows + most_rows - 1) // most_rows
        for n in range(begin, end):
            fill_zero(image, 0, blocks * plane // lanes)
            w_start = n % groups * filters * w.shape[1]
            for top in range(0, height, band):
                tall = min(band, height - top)
                pixels = tall * width
                start = (n * filters * height + top) * width
                if by_filter:
                    list_planes(
                        values, places, room, starts, dy, start, height * width, filters, 0, 1,
                        positions, 0, pixels,
                    )  # fmt: skip
                else:
                    starts[0] = 0
                    for o in range(0, filters, _PANEL):
                        _list_pixels(
                            values, places, starts, o // _PANEL * pixels, dy,
                            start + o * height * width, height * width, min(_PANEL, filters - o),
                            turned, pixels, w.shape[1],
                        )  # fmt: skip
                for tile in range(tiles):
                    first = rows * tile // tiles
                    count = rows * (tile + 1) // tiles - first
                    tile_start = w_start + first * columns * lanes
                    if by_filter:
                        multiply_filters(
                            image, starts, offsets + first, count, w, tile_start, w.shape[1],
                            filters, values, places, room, starts,
                        )  # fmt: skip
                    else:
                        for o in range(0, filters, _PANEL):
                            multiply_pixels(
                                image, line, starts, offsets + first, count,
                                w, tile_start + o * w.shape[1], values, places,
                                starts, o // _PANEL * pixels, tall, width, stride_h, stride_w,
                            )  # fmt: skip
                above = top * stride_h - pad_h
                if top + band < height:  # the rows that the next band adds to become its first
                    _finish_rows(image, plane, line, dx, n, above, band * stride_h, pad_w)
                    _move_rows_up(image, blocks, plane, line, band * stride_h)
                else:
                    _finish_rows(image, plane, line, dx, n, above, dx.shape[2] - above, pad_w)

    lists = "filters" if by_filter else "pixels"
    function.__name__ = f"conv_backward_data_sparse_{lists}_{columns}"
    return kernel(
        array(4),
        array(2),
        array(4),
        *_GEOMETRY,
        INT,
        scratch(1),
        scratch(1),
        scratch(1, "int32"),
        scratch(1, "int32"),
        scratch(1),
        scratch(1, "int64"),
        INT,
        INT,
    )(function)


@kernel(array(4), array(2), INT, INT)
def conv_sparse_pack_weights(w, packed, begin, end):  # type: ignore[no-untyped-def]
    """Set packed[o] to filter o as [block of channels][row][column][L], for o in [begin, end).

    Parameters
    ----------
    w : array (Co, C, rows, columns)
    packed : array (Co, data_row)
    """
    lanes = lanes_of(w)
    channels, taps = w.shape[1], w.shape[2] * w.shape[3]
    for o in range(begin, end):
        for c in range(0, channels, lanes):
            to_lanes(
                w,
                (o * channels + c) * taps,
                taps,
                min(lanes, channels - c),
                packed,
                o * packed.shape[1] + c * taps,
                taps,
            )


@kernel(array(2), array(4), INT, scratch(1), REAL, INT, INT)
def conv_sparse_sum_weights(  # type: ignore[no-untyped-def]
    partial, dw, pixel, total, accumulate, begin, end
):
    """Set dw[o] = accumulate * dw[o] + sum of its partial sums in order, for o in [begin, end).

    Parameters
    ----------
    partial : array (pieces, Co * weights_row)
        For each filter [block of channels][row][column][L], or with `pixel` [row][run], where a
        run holds the pixels of the row, all channels of each.
    dw : array (Co, C, rows, columns)
        Not read where `accumulate` is 0.
    pixel : int
        See `Window.pixel`.
    total : array (total_scratch,)
    accumulate : real
        0 or 1.
    """
    lanes = lanes_of(dw)
    channels, rows, columns = dw.shape[1], dw.shape[2], dw.shape[3]
    taps = rows * columns
    run = (columns * channels + lanes - 1) // lanes * lanes
    size = partial.shape[1] // dw.shape[0]
    for o in range(begin, end):
        # Views from 0 on: LLVM makes vectors of what cannot be a negative index.
        sums, part = total[:size], partial[0, o * size : (o + 1) * size]
        for i in range(len(sums)):
            sums[i] = part[i]
        for piece in range(1, partial.shape[0]):
            part = partial[piece, o * size : (o + 1) * size]
            for i in range(len(sums)):
                sums[i] += part[i]
        if pixel > 0:
            for c in range(channels):
                for q in range(rows):
                    for j in range(columns):
                        value = total[q * run + j * channels + c]
                        if accumulate != 0:
                            value += accumulate * dw[o, c, q, j]
                        dw[o, c, q, j] = value
        else:
            for c in range(0, channels, lanes):
                from_lanes(
                    total,
                    c * taps,
                    dw,
                    (o * channels + c) * taps,
                    taps,
                    min(lanes, channels - c),
                    taps,
                    accumulate != 0,
                )
