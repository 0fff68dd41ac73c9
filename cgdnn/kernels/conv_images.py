"""Direct convolution with images in the lanes of vectors.

Blobs lie in groups of L images, (N / L, C, H, W, L): a vector holds the same place of L images. So
weights are scalars that meet whole vectors, nothing is transposed, and any count of channels and
filters is as good as another. For one group, stride 1 and dilation 1.

Kernels are generated for a window: sizes of tiles, and what of them meets padding, are constants,
so that nothing is multiplied that lies outside. Where the run is in float64, L images are two
vectors.

* Outputs: a tile is a few neighbouring pixels times a few filters. The data gradient is a forward
  pass over dy with its taps in reverse, padded by what the kernel has beyond the padding.
* Outputs behind which maximum pooling stands (`forward_pooled`): only the maxima are written.
* Weight gradients: a tile is as many taps as registers hold, all of one channel, of one filter or
  a few. It runs over the outputs of all images of a piece, some neighbours at a time: each vector
  of x meets all of them that it is a tap of. Lanes are added at the end.
* Weight gradients behind max pooling (`backward_weights_routed`): of a window of 2 x 2 outputs only
  the maximum has a gradient. Two masks, made once for all channels, select for each lane the
  vectors of x that it meets, so that a tap takes one product instead of four.
* Data gradients behind max pooling (`backward_data_routed`): the masks select for each lane the
  weight through which a place of dx meets the maximum. A tile is some of the places that the
  outputs of a window meet, of one channel, and runs over the filters. With 5 x 5 taps, 36 products
  and 44 selections take the place of 100 products; a cycle has room for four of them, but for two
  products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, reduce
from itertools import product
from math import prod
from typing import Any

from llvmlite import ir

from cgdnn import machine
from cgdnn.kernels._jit import INT, Kernel, array, kernel, scratch
from cgdnn.kernels.pool_lanes import store_maximum
from cgdnn.kernels.reorder import PLACE
from cgdnn.kernels.stencil import Side, Window
from cgdnn.kernels.vector import Emitter, emitted, lanes_of

_MOST_PIXELS, _MOST_FILTERS = 8, 8
"""Largest tiles of outputs that are considered."""
_MOST_TOGETHER = 4
"""Most neighbouring outputs, and filters, of a tile of the weight gradient."""
_HELD_ELEMENTS = 96 << 10
"""Values of the rows that a band of outputs reads: with the weights they stay in a second cache."""
_HELD_FILTERS = 8
"""Filters whose weight gradients are computed together, channel by channel."""
_LATENCY = 4
"""Cycles from a product to the next one of the same sum."""
_POOLED = 2
"""Rows and columns of the windows that are pooled, or whose gradients are routed, and their
distance."""
_GATHERED_FILTERS = 64
"""Filters whose routed gradients are gathered in the first cache for all channels of dx."""
_MASKS = 2
"""Masks of a place in a window: whether it is in the second row, and in the second column."""
_MOST_COLUMNS = 64
"""Most outputs of a row that are pooled in the first cache."""
_PRODUCT, _ROUTED_PRODUCT = 0.128, 0.3
"""Nanoseconds of a product of vectors, measured at each width; of one behind selections."""
_A_CYCLE = 5
"""Vectors that are multiplied, selected or loaded in a cycle where a maximum has the gradient."""
_MAXIMUM = 1.1
"""Nanoseconds of a vector of maxima of values in the first cache."""
_FETCH = 0.5
"""Nanoseconds in which a vector comes from the second cache."""


def _registers() -> int:
    """Return the vectors that a tile has room for: of 16 registers LLVM takes one for copies."""
    return 32 if machine.vector_bytes() == 64 else 15


def _shares(count: int, most: int) -> list[int]:
    """Return nearly equal parts, of at most `most`, of a count; larger ones first."""
    parts = -(-count // most)
    return [count // parts + (part < count % parts) for part in range(parts)]


def _counted(parts: list[int]) -> list[tuple[int, int, int]]:
    """Return where parts of each size begin, the size, and how many they are."""
    sizes = sorted(set(parts), reverse=True)
    return [(sum(p for p in parts if p > size), size, parts.count(size)) for size in sizes]


def _combined(shares: Iterable[list[int]]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield each combination of sizes, one of every axis, and how often it comes."""
    for sizes in product(*map(_counted, shares)):
        yield tuple(size for _, size, _ in sizes), prod(count for _, _, count in sizes)


@dataclass(frozen=True)
class _Run:
    """Neighbouring tiles along an axis that meet the same taps.

    Attributes
    ----------
    first : int
        Where the first one begins.
    size, count : int
        Outputs of a tile, and tiles.
    meets : tuple of tuple of int
        All (output of the tile, tap) that meet the input, not the padding.
    """

    first: int
    size: int
    count: int
    meets: tuple[tuple[int, int], ...]

    def of_tap(self, tap: int) -> list[int]:
        """Return the outputs that have this tap."""
        return [place for place, other in self.meets if other == tap]


def _runs(side: Side, sizes: Sequence[int], taps: range) -> list[_Run]:
    """Return the runs of tiles of these sizes along an axis, with what they meet of some taps."""
    runs: list[_Run] = []
    first = 0
    for size in sizes:
        meets = tuple(
            (place, tap)
            for place, tap in product(range(size), taps)
            if 0 <= first + place + tap - side.pad < side.size
        )
        last = runs[-1] if runs else None
        if last and (last.size, last.meets) == (size, meets):
            runs[-1] = _Run(last.first, size, last.count + 1, meets)
        else:
            runs.append(_Run(first, size, 1, meets))
        first += size
    return runs


@contextmanager
def _each(e: Emitter, count: int, *pointers: tuple[Any, Any]) -> Iterator[list[Any]]:
    """Yield the pointers of each of `count` tiles: in a loop, where there is more than one."""
    if count == 1:
        e.forget_loads()  # those of the tile before
        yield [pointer for pointer, _ in pointers]
    else:
        with e.sweep(e.integer(count), *pointers) as moving:
            yield moving


def _walk(
    e: Emitter, runs: list[_Run], *pointers: tuple[Any, int, int]
) -> Iterator[tuple[_Run, list[Any]]]:
    """Yield the runs along an axis, each in a loop over its tiles, with pointers to the tile.

    Given are, for each, the pointer at output 0, the elements from one place to the next, and the
    outputs that share a place.
    """
    for run in runs:
        starts = [
            (e.at(start, e.integer(run.first // shared * pitch)), run.size // shared * pitch)
            for start, pitch, shared in pointers
        ]
        with _each(e, run.count, *((start, e.integer(step)) for start, step in starts)) as moving:
            yield run, moving


def _add_product(e: Emitter, a: Any, b: Any, slot: Any) -> None:
    e.builder.store(e.settled(e.multiply_add(a, b, e.builder.load(slot))), slot)


def _turned(window: Window) -> Window:
    """Return the convolution of dy that gives dx: filters and channels change places."""
    rows, columns = (
        Side(side.output, side.kernel, 1, side.kernel - 1 - side.pad, 1)
        for side in (window.rows, window.columns)
    )
    return Window(1, window.filters, window.channels, rows, columns)


def _output_tile(outputs: int, columns: int) -> tuple[int, int]:
    """Return how many pixels and filters a tile should have at most."""

    def cycles(tile: tuple[int, int]) -> float:
        shares = map(_shares, (columns, outputs), tile)
        return sum(
            count * (max(p * f / 2, (p + f) / 2, _LATENCY) + 0.5)
            for (p, f), count in _combined(shares)
        )

    tiles = product(range(1, _MOST_PIXELS + 1), range(1, _MOST_FILTERS + 1))
    # Registers hold the sums, a row of x, and a weight.
    return min((t for t in tiles if t[0] * t[1] + t[0] + 1 <= _registers()), key=cycles)


def _band(window: Window) -> int:
    """Return the rows of outputs that are computed before others, for all filters."""
    row = window.channels * window.columns.size * PLACE
    most = max(1, _HELD_ELEMENTS // row - window.rows.kernel + 1)
    return -(-window.rows.output // -(-window.rows.output // most))


def _outputs(window: Window, step: int, pooled: bool = False) -> Any:
    """Return a function that computes the outputs of a group of images.

    `step` is the distance among the weights from one tap to the next: -1 in a data gradient. Where
    they are `pooled`, two rows of some filters at a time stay in the first cache, and only the
    maxima of windows of 2 x 2, and their places, are written.
    """
    rows, columns, taps = window.rows, window.columns, window.taps
    most_pixels, most_filters = _output_tile(window.filters, columns.output)
    runs = _runs(columns, _shares(columns.output, most_pixels), range(columns.kernel))
    parts = _counted(_shares(window.filters, most_filters))
    together = _POOLED if pooled else 1
    lines, band = rows.output // together, -(-_band(window) // together)
    x_row, y_row = columns.size * PLACE, columns.output * PLACE
    if step > 0:
        first_tap, w_filter, w_channel = 0, window.channels * taps, taps
    else:
        first_tap, w_filter, w_channel = taps - 1, taps, window.filters * taps

    @emitted
    def planes(e, x, x_start, w, b, has_bias, y, places, y_start):  # type: ignore[no-untyped-def]
        build, number, place = e.builder, e.integer, PLACE
        x, w, y = e.at(x, x_start), e.at(w, number(first_tap)), e.at(y, y_start)
        places = e.at(places, y_start)
        w_row = number(step * columns.kernel)

        def add_row(sums, run, x_k, w_k):  # type: ignore[no-untyped-def]
            """Add the products of a row of taps."""
            for tap in range(columns.kernel):
                pixels = run.of_tap(tap)
                right = [e.load(e.at(x_k, number((p + tap) * place))) for p in pixels]
                for f, line in enumerate(sums if pixels else []):
                    left = e.splat(e.scalar(e.at(w_k, number(f * w_filter + step * tap))))
                    for p, vector in zip(pixels, right, strict=True):
                        _add_product(e, left, vector, line[p])

        def add_line(o, count, r, y_r, y_filter):  # type: ignore[no-untyped-def]
            """Compute row r of `count` filters from o on, to rows that are `y_filter` apart."""
            starts = [e.variable(e.zero()) for _ in range(count)]
            with build.if_then(build.icmp_signed("!=", has_bias, number(0))):
                for f, start in enumerate(starts):
                    build.store(e.splat(e.scalar(e.at(b, o, number(f)))), start)
            above = build.sub(number(rows.pad), r)
            first = e.larger(number(0), above)
            last = e.smaller(number(rows.kernel), build.add(number(rows.size), above))
            met = build.sub(last, first)
            w_r = e.at(w, build.mul(o, number(w_filter)), build.mul(first, w_row))
            x_r = e.at(x, build.mul(build.sub(first, above), number(x_row)))
            x_0 = e.at(x_r, number(-columns.pad * place))
            for run, (x_t, y_t) in _walk(e, runs, (x_0, place, 1), (y_r, place, 1)):
                sums = [
                    [e.variable(build.load(start)) for _ in range(run.size)] for start in starts
                ]
                planes = (x_t, number(rows.size * x_row)), (w_r, number(w_channel))
                with (
                    e.sweep(number(window.channels), *planes) as (x_c, w_c),
                    e.sweep(met, (x_c, number(x_row)), (w_c, w_row)) as (x_k, w_k),
                ):
                    add_row(sums, run, x_k, w_k)
                for f, p in product(range(count), range(run.size)):
                    at = number(f * y_filter + p * place)
                    e.store(build.load(sums[f][p]), e.at(y_t, at))

        def pool_lines(o, count, line, near):  # type: ignore[no-untyped-def]
            """Write the maxima of two rows of `count` filters from o on, which are at `near`."""
            across = columns.output // _POOLED
            with e.loop(number(count)) as filter_, e.loop(number(across)) as window_:
                source = build.mul(filter_.index, number(_POOLED * y_row))
                source = e.at(near, source, build.mul(window_.index, number(_POOLED * place)))
                elements = [
                    (e.at(source, number(i * y_row + j * place)), number(i * columns.output + j))
                    for i, j in product(range(_POOLED), repeat=2)
                ]
                row = build.add(build.mul(line, number(columns.output)), window_.index)
                target = build.add(build.mul(build.add(o, filter_.index), number(lines)), line)
                target = build.add(build.mul(target, number(across)), window_.index)
                target = build.mul(target, number(place))
                store_maximum(
                    e, elements, False, build.mul(row, number(_POOLED)),
                    e.at(y, target), e.at(places, target),
                )  # fmt: skip

        def add_lines(o, count, line):  # type: ignore[no-untyped-def]
            """Compute the rows of `count` filters from o on that make up a line of y."""
            if not pooled:
                first = build.add(build.mul(o, number(rows.output)), line)
                y_r = e.at(y, build.mul(first, number(y_row)))
                add_line(o, count, line, y_r, rows.output * y_row)
                return
            vectors = e.vectors(count * _POOLED * y_row // e.lanes)
            near = build.bitcast(vectors, y.type)
            with e.loop(number(_POOLED)) as row:
                r = build.add(build.mul(line, number(_POOLED)), row.index)
                y_r = e.at(near, build.mul(row.index, number(y_row)))
                add_line(o, count, r, y_r, _POOLED * y_row)
            pool_lines(o, count, line, near)

        with e.loop(number(-(-lines // band))) as bands:
            top = build.mul(bands.index, number(band))
            height = e.smaller(number(band), build.sub(number(lines), top))
            for first, count, tiles in parts:
                with e.loop(number(tiles)) as tile, e.loop(height) as line:
                    o = build.add(number(first), build.mul(tile.index, number(count)))
                    add_lines(o, count, build.add(top, line.index))

    return planes


@cache
def forward(window: Window) -> Kernel:
    """Return the kernel that sets y = w * x + b for the groups of images [begin, end).

    Its arguments::

        x : array (N / L, C, H, W, L)
        w : array (Co, C, KH, KW)
        b : array (Co,)         not read unless has_bias
        has_bias : int
        y : array (N / L, Co, OH, OW, L), written
        begin, end : int
    """
    planes = _outputs(window, 1)

    def function(x, w, b, has_bias, y, begin, end):  # type: ignore[no-untyped-def]
        x_group, y_group = x.size // x.shape[0], y.size // y.shape[0]
        for g in range(begin, end):
            for lane in range(0, x.shape[4], lanes_of(x)):
                planes(x, g * x_group + lane, w, b, has_bias, y, y, g * y_group + lane)

    function.__name__ = _name("forward", window)
    return kernel(array(5), array(4), array(1), INT, array(5), INT, INT)(function)


def pools(window: Window) -> bool:
    """Tell whether `forward_pooled` serves: for whole windows, of rows that stay near."""
    sides = window.rows.output, window.columns.output
    return all(size % _POOLED == 0 for size in sides) and sides[1] <= _MOST_COLUMNS


@cache
def forward_pooled(window: Window) -> Kernel:
    """Return the kernel of `forward` that writes only the maxima of windows of 2 x 2.

    They lie at a distance of 2. Its arguments are those of `forward`, but in place of y::

        y : array (N / L, Co, OH / 2, OW / 2, L), written
        places : int32 array of the same shape, written    row * OW + column of each maximum
    """
    planes = _outputs(window, 1, pooled=True)

    def function(x, w, b, has_bias, y, places, begin, end):  # type: ignore[no-untyped-def]
        x_group, y_group = x.size // x.shape[0], y.size // y.shape[0]
        for g in range(begin, end):
            for lane in range(0, x.shape[4], lanes_of(x)):
                planes(x, g * x_group + lane, w, b, has_bias, y, places, g * y_group + lane)

    function.__name__ = _name("forward_pooled", window)
    y = array(5), array(5, "int32")
    return kernel(array(5), array(4), array(1), INT, *y, INT, INT)(function)


@cache
def backward_data(window: Window) -> Kernel:
    """Return the kernel that sets dx from dy for the groups of images [begin, end).

    Its arguments::

        dy : array (N / L, Co, OH, OW, L)
        w : array (Co, C, KH, KW)
        dx : array (N / L, C, H, W, L), written
        begin, end : int
    """
    planes = _outputs(_turned(window), -1)

    def function(dy, w, dx, begin, end):  # type: ignore[no-untyped-def]
        dy_group, dx_group = dy.size // dy.shape[0], dx.size // dx.shape[0]
        for g in range(begin, end):
            for lane in range(0, dy.shape[4], lanes_of(dy)):
                planes(dy, g * dy_group + lane, w, w, 0, dx, dx, g * dx_group + lane)

    function.__name__ = _name("backward_data", window)
    return kernel(array(5), array(4), array(5), INT, INT)(function)


@dataclass(frozen=True)
class _Block:
    """Taps of a tile of the weight gradient."""

    rows: range
    columns: range


def _blocks(window: Window, rows: int, columns: int) -> list[_Block]:
    """Return blocks of taps, at most so many rows and columns, that make up the kernel."""
    return [
        _Block(down, across)
        for down in _ranges(window.rows.kernel, rows)
        for across in _ranges(window.columns.kernel, columns)
    ]


def _ranges(count: int, most: int) -> list[range]:
    """Return the ranges of nearly equal parts of a count."""
    sizes = _shares(count, most)
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]


def _gradient_tile(window: Window) -> tuple[tuple[int, int, int], int]:
    """Return the most filters, rows and columns of taps in a tile, and outputs at a time."""
    rows, columns = window.rows, window.columns

    def cycles(tile: tuple[int, int, int, int]) -> float:
        counts = (window.filters, rows.kernel, columns.kernel, columns.output)
        shares = map(_shares, counts, tile)
        return sum(
            count * (max(f * r * k * q / 2, (f * q + r * (k + q - 1)) / 2, _LATENCY * q) + 0.5)
            for (f, r, k, q), count in _combined(shares)
        )

    tiles = product(
        range(1, _MOST_TOGETHER + 1),
        range(1, rows.kernel + 1),
        range(1, columns.kernel + 1),
        range(1, _MOST_TOGETHER + 1),
    )
    # Registers hold the sums, also that of dy for each filter, vectors of dy, and one of x.
    fit = [(f, r, k, q) for f, r, k, q in tiles if f * (r * k + 1 + q) + 1 <= _registers()]
    *most, together = min(fit, key=cycles)
    return (most[0], most[1], most[2]), together


def _store_totals(e: Emitter, totals: list[tuple[Any, Any]]) -> None:
    """Store the sums over the lanes of vectors; `totals` has (place, slot) of each."""
    for first in range(0, len(totals), e.lanes):
        part = totals[first : first + e.lanes]
        vectors = [e.builder.load(slot) for _, slot in part]
        sums = e.lane_sums(vectors + [e.zero()] * (e.lanes - len(part)))
        for i, (place, _) in enumerate(part):
            e.builder.store(e.builder.extract_element(sums, e.integer(i)), place)


@dataclass(frozen=True)
class _Sums:
    """The registers of a tile of the weight gradient: for each filter its taps, and dy."""

    taps: list[dict[tuple[int, int], Any]]
    outputs: list[Any]


def _mask_steps(e: Emitter, windows: int) -> tuple[int, int, int]:
    """Return how far apart the masks of gathered places lie, in bytes.

    Those of two filters of a panel, of two parts of the lanes, and of two groups of images.
    """
    filter_ = windows * _MASKS * e.mask_bytes
    part = _HELD_FILTERS * filter_
    return filter_, part, part * (PLACE // e.lanes)


def _gradients(
    window: Window, most: tuple[int, int, int], planes: int, add: Any, gather: Any = None
) -> Any:
    """Return a function that computes the gradients from some groups of images.

    Parameters
    ----------
    window : Window
    most : tuple of int
        Filters, and rows and columns of taps, of a tile, at most.
    planes : int
        Vectors in a plane of dy.
    add : function
        Emits what adds to the sums of a tile from the planes of one group of images, and from the
        masks of its filters.
    gather : function, optional
        Emits what sets the masks of some filters of all groups of images.
    """
    filters, depth = window.filters, window.channels * window.taps
    blocks = _blocks(window, *most[1:])
    plane = window.rows.size * window.columns.size

    @emitted
    def gradients(  # type: ignore[no-untyped-def]
        e, x, dy, places, masks, dw, dw_start, db, db_start, has_bias, begin, end
    ):  # fmt: skip
        build, place = e.builder, PLACE
        mask_filter, mask_part, mask_group = _mask_steps(e, planes)
        x_group, dy_group = window.channels * plane * place, filters * planes * place
        x = e.at(x, build.mul(begin, e.integer(x_group)))
        dy = e.at(dy, build.mul(begin, e.integer(dy_group)))
        places = e.at(places, build.mul(begin, e.integer(dy_group)))
        dw, db = e.at(dw, dw_start), e.at(db, db_start)
        groups = build.sub(end, begin)

        def tile(o, within, c, count, block, biased):  # type: ignore[no-untyped-def]
            """Set the gradients of `count` filters from o on, of channel c, and with them db.

            They are the ones from number `within` on of those whose masks are gathered.
            """
            x_c = e.at(x, build.mul(c, e.integer(plane * place)))
            sums = _Sums(
                [
                    {tap: e.variable(e.zero()) for tap in product(block.rows, block.columns)}
                    for _ in range(count)
                ],
                [e.variable(e.zero()) for _ in range(count)] if biased else [],
            )
            e.free_registers()
            dy_o = e.at(dy, build.mul(o, e.integer(planes * place)))
            masks_o = e.at(masks, build.mul(within, e.integer(mask_filter)))
            moving = (x_c, x_group), (dy_o, dy_group), (masks_o, mask_group)
            with e.sweep(groups, *((at, e.integer(step)) for at, step in moving)) as images:
                steps = map(e.integer, (e.lanes, e.lanes, mask_part))
                with _each(e, place // e.lanes, *zip(images, steps, strict=True)) as pointers:
                    add(e, sums, block, *pointers)
            w_c = e.at(dw, build.mul(o, e.integer(depth)), build.mul(c, e.integer(window.taps)))
            totals = [
                (e.at(w_c, e.integer(f * depth + row * window.columns.kernel + column)), slot)
                for f, slots in enumerate(sums.taps)
                for (row, column), slot in slots.items()
            ]
            _store_totals(e, totals)
            if biased:
                with build.if_then(build.icmp_signed("!=", has_bias, e.integer(0))):
                    _store_totals(
                        e, [(e.at(db, o, e.integer(f)), s) for f, s in enumerate(sums.outputs)]
                    )

        def tiles(first, size, count, c, biased):  # type: ignore[no-untyped-def]
            """Set the gradients of `count` tiles of `size` filters, of channel c."""
            with e.loop(count) as t:
                within = build.mul(t.index, e.integer(size))
                for number, block in enumerate(blocks):
                    o = build.add(first, within)
                    tile(o, within, c, size, block, biased and number == 0)

        # Some filters together: what they read of dy stays in the second cache.
        for first, size, count in _counted(_shares(filters, most[0])):
            together = -(-_HELD_FILTERS // size)
            with e.loop(e.integer(-(-count // together))) as panel:
                t = build.mul(panel.index, e.integer(together))
                left = e.smaller(build.sub(e.integer(count), t), e.integer(together))
                o = build.add(e.integer(first), build.mul(t, e.integer(size)))
                if gather is not None:
                    start = build.mul(o, e.integer(planes * place))
                    sources = [(e.at(at, start), dy_group) for at in (dy, places)]
                    gather(e, groups, build.mul(left, e.integer(size)), sources, masks)
                tiles(o, size, left, e.integer(0), True)
                with e.loop(e.integer(window.channels - 1)) as others:
                    c = build.add(others.index, e.integer(1))
                    tiles(o, size, left, c, False)

    return gradients


@cache
def backward_weights(window: Window) -> Kernel:
    """Return the kernel that sets partial gradients from the groups of images [begin, end).

    Its arguments::

        x : array (N / L, C, H, W, L)
        dy : array (N / L, Co, OH, OW, L)
        dw : array (pieces, Co * C * KH * KW)   row `piece` is written
        db : array (pieces, Co)                 likewise; not touched unless has_bias
        has_bias, piece, begin, end : int
    """
    rows, columns = window.rows, window.columns
    most, together = _gradient_tile(window)

    def add(e, sums, block, x, dy, _):  # type: ignore[no-untyped-def]
        build, number, place = e.builder, e.integer, PLACE
        x_row, dy_row = columns.size * place, columns.output * place
        x_0 = e.at(x, number(-rows.pad * x_row - columns.pad * place))
        lines = _runs(rows, [1] * rows.output, block.rows)
        runs = _runs(columns, _shares(columns.output, together), block.columns)
        for line, (x_r, dy_r) in _walk(e, lines, (x_0, x_row, 1), (dy, dy_row, 1)):
            for run, (x_t, dy_t) in _walk(e, runs, (x_r, place, 1), (dy_r, place, 1)):
                outputs = [
                    [
                        e.load(e.at(dy_t, number(f * rows.output * dy_row + q * place)))
                        for q in range(run.size)
                    ]
                    for f in range(len(sums.taps))
                ]
                # Column after column of x: products of the same sum lie far apart.
                for column in range(run.size + columns.kernel - 1):
                    met = [(q, tap) for q, tap in run.meets if q + tap == column]
                    for row in (tap for _, tap in line.meets if met):
                        vector = e.load(e.at(x_t, number(row * x_row + column * place)))
                        for (q, tap), (f, slots) in product(met, enumerate(sums.taps)):
                            _add_product(e, vector, outputs[f][q], slots[row, tap])
                for f, total in enumerate(sums.outputs):
                    for vector in outputs[f]:
                        build.store(build.fadd(build.load(total), vector), total)

    gradients = _gradients(window, most, rows.output * columns.output, add)

    def function(x, dy, dw, db, has_bias, piece, begin, end):  # type: ignore[no-untyped-def]
        gradients(
            x, dy, dy, dy, dw, piece * dw.shape[1], db, piece * db.shape[1], has_bias, begin, end,
        )  # fmt: skip

    function.__name__ = _name("backward_weights", window)
    return kernel(array(5), array(5), array(2), array(2), INT, INT, INT, INT)(function)


def _pooled(outputs: int) -> list[int]:
    """Return the sizes of the windows along an axis: the last one may be cut short."""
    whole, left = divmod(outputs, _POOLED)
    return [_POOLED] * whole + [left] * (left > 0)


def _routed_tile(window: Window) -> tuple[int, int, int]:
    """Return the most filters, rows and columns of taps in a tile of a routed gradient."""
    rows, columns = window.rows.kernel, window.columns.kernel

    def cycles(tile: tuple[int, int, int]) -> float:
        shares = map(_shares, (window.filters, rows, columns), tile)
        total = 0.0
        for (f, r, k), count in _combined(shares):
            # Products, selections from two rows and from two columns, and masks; x and dy.
            operations = f * (2 * r * k + (r + 1) * k + _MASKS)
            loads = (r + 1) * (k + 1) + f * (1 + _MASKS)
            total += count * (operations + loads)
        return total

    tiles = product((1, 2), range(1, rows + 1), range(1, columns + 1))
    # Registers hold for each filter the sums, a row of selected vectors and the gradient, and,
    # where masks have no registers of their own, these; and six more.
    beside = 1 if _registers() == 32 else 1 + _MASKS
    fit = [(f, r, k) for f, r, k in tiles if f * (r * k + k + beside) + 6 <= _registers()]
    return min(fit, key=cycles)


def _every(e: Emitter, value: int) -> Any:
    """Return a vector of int32 with the constant `value` in every lane."""
    return ir.Constant(ir.VectorType(ir.IntType(32), e.lanes), [value] * e.lanes)


def _add_to(e: Emitter, slot: Any, value: Any) -> None:
    e.builder.store(e.builder.add(e.builder.load(slot), value), slot)


def _masks(e: Emitter, places: Any, second: Any, width: int) -> tuple[Any, Any]:
    """Return which of the places in windows are in the second row, and in the second column.

    The second row begins at the place `second`; rows have `width` places.
    """
    is_lower = e.builder.icmp_signed(">=", places, second)
    is_right = e.builder.icmp_signed("!=", e.builder.and_(places, _every(e, 1)), _every(e, 0))
    if width % 2:  # odd places have an odd row or an odd column
        is_right = e.builder.xor(is_right, is_lower)
    return is_lower, is_right


def _selected(e: Emitter, mask: Any, values: list[Any]) -> Any:
    """Return the one value, or the second of two where `mask` is on; None stands for zeros."""
    if all(value is None for value in values):
        return None
    vectors = [e.zero() if value is None else value for value in values]
    return vectors[0] if len(vectors) == 1 else e.builder.select(mask, vectors[1], vectors[0])


def masks_scratch(window: Window, groups: int) -> int:
    """Return the bytes of scratch of `backward_weights_routed` for so many groups of images."""
    windows = len(_pooled(window.rows.output)) * len(_pooled(window.columns.output))
    # Of a place a bit for each image, or, without registers of masks, a vector or two of float64.
    each = PLACE // 8 if machine.vector_bytes() == 64 else 2 * machine.vector_bytes()
    return groups * _HELD_FILTERS * windows * _MASKS * each


@cache
def backward_weights_routed(window: Window) -> Kernel:
    """Return the kernel that sets partial gradients from those behind max pooling.

    The pooling has windows of 2 x 2 at a distance of 2, and no padding. The arguments are those of
    `backward_weights`, but in place of dy::

        dy : array (N / L, Co, PH, PW, L)
        places : int32 array of the same shape    where it goes: row * OW + column, in its window

    and, behind db::

        masks : scratch uint8 array (`masks_scratch`,)
    """
    rows, columns = window.rows, window.columns
    down, across = _pooled(rows.output), _pooled(columns.output)
    windows = len(down) * len(across)

    def gather(e, groups, count, sources, masks):  # type: ignore[no-untyped-def]
        """Set the masks of `count` filters of some groups of images, and bring dy near."""
        number, place = e.integer, PLACE
        steps = _mask_steps(e, windows)
        near = number(place), number(place), number(_MASKS * e.mask_bytes)

        def moving(pointers, *by):  # type: ignore[no-untyped-def]
            return zip(pointers, map(number, by), strict=True)

        pointers = [*sources, (masks, steps[2])]
        with (
            e.sweep(groups, *((at, number(step)) for at, step in pointers)) as images,
            _each(e, place // e.lanes, *moving(images, e.lanes, e.lanes, steps[1])) as parts,
            e.sweep(count, *moving(parts, *[windows * place] * 2, steps[0])) as planes,
        ):
            second = e.variable(_every(e, columns.output))
            line = [width * len(across) for width in (place, place, _MASKS * e.mask_bytes)]
            with e.sweep(number(len(down)), *moving(planes, *line)) as row:
                with e.sweep(number(len(across)), *zip(row, near, strict=True)) as one:
                    dy_t, places_t, masks_t = one
                    e.prefetch(dy_t)
                    found = _masks(
                        e, e.load_integers(places_t), e.builder.load(second), columns.output
                    )
                    for i, mask in enumerate(found):
                        e.store_mask(mask, e.at(masks_t, number(i * e.mask_bytes)))
                _add_to(e, second, _every(e, _POOLED * columns.output))

    def add(e, sums, block, x, dy, masks):  # type: ignore[no-untyped-def]
        build, number, place = e.builder, e.integer, PLACE

        def add_window(line, run, x_t, values, masks):  # type: ignore[no-untyped-def]
            """Add the products of one gradient of each filter in each lane."""
            heights, widths = ({i + tap for i, tap in axis.meets} for axis in (line, run))
            above: dict[tuple[int, int], Any] = {}
            for row in range(block.rows.start, block.rows.stop + line.size - 1):
                tap = row - line.size + 1  # that meets this row and the one above
                for column in block.columns:
                    near = [
                        e.load(e.at(x_t, number((row * columns.size + column + j) * place)))
                        if row in heights and column + j in widths
                        else None
                        for j in range(run.size)
                    ]
                    for f, (value, (is_lower, is_right)) in enumerate(
                        zip(values, masks, strict=True)
                    ):
                        here = _selected(e, is_right, near)
                        if tap in block.rows:
                            pair = [above[f, column], here] if line.size > 1 else [here]
                            met = _selected(e, is_lower, pair)
                            if met is not None:
                                _add_product(e, met, value, sums.taps[f][tap, column])
                        above[f, column] = here

        x_row, dy_row = columns.size * place, len(across) * place
        each = _MASKS * e.mask_bytes
        x_0 = e.at(x, number(-rows.pad * x_row - columns.pad * place))
        lines, runs = _runs(rows, down, block.rows), _runs(columns, across, block.columns)
        whole = (dy, dy_row, _POOLED), (masks, len(across) * each, _POOLED)
        for line, (x_r, dy_r, masks_r) in _walk(e, lines, (x_0, x_row, 1), *whole):
            part = (dy_r, place, _POOLED), (masks_r, each, _POOLED)
            for run, (x_t, dy_t, masks_t) in _walk(e, runs, (x_r, place, 1), *part):
                filters = range(len(sums.taps))
                values = [e.load(e.at(dy_t, number(f * windows * place))) for f in filters]
                found = [
                    [
                        e.load_mask(e.at(masks_t, number(f * windows * each + i * e.mask_bytes)))
                        for i in range(_MASKS)
                    ]
                    for f in filters
                ]
                for total, value in zip(sums.outputs, values, strict=False):
                    build.store(build.fadd(build.load(total), value), total)
                add_window(line, run, x_t, values, found)

    gradients = _gradients(window, _routed_tile(window), windows, add, gather)

    def function(x, dy, places, dw, db, masks, has_bias, piece, begin, end):  # type: ignore[no-untyped-def]
        gradients(
            x, dy, places, masks, dw, piece * dw.shape[1], db, piece * db.shape[1], has_bias,
            begin, end,
        )  # fmt: skip

    function.__name__ = _name("backward_weights_routed", window)
    arrays = array(5), array(5), array(5, "int32"), array(2), array(2), scratch(1, "uint8")
    return kernel(*arrays, INT, INT, INT, INT)(function)


@dataclass(frozen=True)
class _Spot:
    """A row or column of dx that outputs of a window meet.

    Attributes
    ----------
    place : int
        From the first one on.
    taps : tuple of (int or None)
        The tap by which each output of the window meets it.
    """

    place: int
    taps: tuple[int | None, ...]

    @property
    def first_alone(self) -> bool:
        """Whether there are two outputs and only the first one meets it."""
        return self.taps[1:] == (None,)

    @property
    def second_alone(self) -> bool:
        """Whether only the second output meets it."""
        return self.taps[0] is None

    def chosen(self, e: Emitter, is_second: Any, of_tap: Any) -> Any:
        """Return what `of_tap` gives for the tap of each lane; anything where it has none."""
        values = [of_tap(tap) for tap in self.taps if tap is not None]
        return values[0] if len(values) == 1 else e.builder.select(is_second, *reversed(values))


def _spots(run: _Run) -> list[_Spot]:
    """Return the rows, or columns, of dx that the outputs of a window meet."""
    return [
        _Spot(
            place,
            tuple(place - i if (i, place - i) in run.meets else None for i in range(run.size)),
        )
        for place in sorted({i + tap for i, tap in run.meets})
    ]


def _spread_cycles(window: Window, most_rows: int, most_columns: int) -> float:
    """Return the estimated cycles of a routed gradient, in tiles of at most this size."""
    axes = []
    for taps, most in ((window.rows.kernel, most_rows), (window.columns.kernel, most_columns)):
        spots = _spots(_Run(0, _POOLED, 1, tuple(product(range(_POOLED), range(taps)))))
        axes.append([spots[part.start : part.stop] for part in _ranges(len(spots), most)])
    cycles = 0.0
    for tile in product(*axes):
        size = prod(map(len, tile))
        rows, columns = ({tap for spot in spots for tap in spot.taps} - {None} for spots in tile)
        down, across = (sum(None not in spot.taps for spot in spots) for spots in tile)
        # Products, selections from two rows and from two columns; weights, gradients; both masks.
        operations = size + down * len(tile[1]) + len(rows) * across + 2
        loads = len(rows) * len(columns) + 5
        cycles += (operations + loads) / _A_CYCLE
    return cycles


@cache
def _spread_tile(window: Window) -> tuple[int, int]:
    """Return the most rows and columns of dx in a tile of the routed data gradient."""
    tiles = product(range(1, window.rows.kernel + 2), range(1, window.columns.kernel + 2))
    # Registers hold the sums, two rows of selected weights, and six more.
    fit = [(r, k) for r, k in tiles if r * k + 2 * k + 6 <= _registers()]
    return min(fit, key=lambda tile: _spread_cycles(window, *tile))


@cache
def backward_data_routed(window: Window) -> Kernel:
    """Return the kernel that sets dx from the gradients behind max pooling.

    The pooling has windows of 2 x 2 at a distance of 2, and no padding. The arguments are those of
    `backward_data`, but in place of dy::

        dy : array (N / L, Co, PH, PW, L)
        places : int32 array of the same shape    where it goes: row * OW + column, in its window
    """
    rows, columns = window.rows, window.columns
    down, across = _pooled(rows.output), _pooled(columns.output)
    most_rows, most_columns = _spread_tile(window)
    w_filter = window.channels * window.taps
    x_row, y_row = columns.size * PLACE, len(across) * PLACE
    x_plane, y_plane = rows.size * x_row, len(down) * y_row
    panels = _shares(window.filters, _GATHERED_FILTERS)

    @emitted
    def planes(e, dy, places, dy_start, w, dx, dx_start):  # type: ignore[no-untyped-def]
        build, number, place = e.builder, e.integer, PLACE
        dy, places, dx = e.at(dy, dy_start), e.at(places, dy_start), e.at(dx, dx_start)
        # Of each filter the gradients of a window, whole and without those of its second column,
        # twice: whole and without those of its second row. Then the masks of both.
        values = build.bitcast(e.vectors(4 * panels[0]), dy.type)
        mask_vectors = -(-2 * e.mask_bytes * panels[0] // machine.vector_bytes())
        masks = build.bitcast(e.vectors(mask_vectors), ir.IntType(8).as_pointer())
        gathered = (values, number(4 * e.lanes)), (masks, number(2 * e.mask_bytes))

        def gather(count, dy_t, places_t, second):  # type: ignore[no-untyped-def]
            """Gather the gradients of a window of `count` filters."""
            sources = (dy_t, number(y_plane)), (places_t, number(y_plane))
            with e.sweep(count, *sources, *gathered) as (dy_o, places_o, value, mask):
                whole, where = e.load(dy_o), e.load_integers(places_o)
                is_lower, is_right = _masks(e, where, second, columns.output)
                for i, row in enumerate((whole, build.select(is_lower, e.zero(), whole))):
                    for j, part in enumerate((row, build.select(is_right, e.zero(), row))):
                        e.store(part, e.at(value, number((2 * i + j) * e.lanes)))
                e.store_mask(is_lower, mask)
                e.store_mask(is_right, e.at(mask, number(e.mask_bytes)))

        def add_gradients(sums, w_o, value, mask):  # type: ignore[no-untyped-def]
            """Add the products of the gathered gradients of a filter."""
            is_lower, is_right = e.load_mask(mask), e.load_mask(e.at(mask, number(e.mask_bytes)))
            chosen: dict[tuple[int, int], Any] = {}

            def choose(row, spot):  # type: ignore[no-untyped-def]
                """Return for each lane the weight in this row by which it meets a column."""
                if (row, spot.place) not in chosen:

                    def weight(tap):  # type: ignore[no-untyped-def]
                        at = number(row * columns.kernel + tap)
                        return e.splat(e.scalar(e.at(w_o, at)))

                    chosen[row, spot.place] = spot.chosen(e, is_right, weight)
                return chosen[row, spot.place]

            for (line, spot), slot in sums.items():
                weight = line.chosen(e, is_lower, partial(choose, spot=spot))
                part = 2 * line.first_alone + spot.first_alone
                gradient = e.load(e.at(value, number(part * e.lanes)))
                added = e.multiply_add(weight, gradient, build.load(slot))
                # Gradients of the second row or column must not meet others: they may be NaN.
                meets = [m for m, s in ((is_lower, line), (is_right, spot)) if s.second_alone]
                if meets:
                    both = reduce(build.and_, meets)
                    added = build.select(both, added, build.load(slot))
                build.store(added, slot)

        def tile(count, spots, w_c, dx_c):  # type: ignore[no-untyped-def]
            """Add the gradients of `count` filters to some places of a channel of dx."""
            targets = {
                (line, spot): e.at(dx_c, number(line.place * x_row + spot.place * place))
                for line, spot in spots
            }
            sums = {key: e.variable(e.load(target)) for key, target in targets.items()}
            e.free_registers()
            with e.sweep(count, (w_c, number(w_filter)), *gathered) as (w_o, value, mask):
                add_gradients(sums, w_o, value, mask)
            for key, target in targets.items():
                e.store(build.load(sums[key]), target)

        def tiles(count, line, run, w_p, x_t):  # type: ignore[no-untyped-def]
            """Add the gathered gradients of `count` filters to all channels of dx."""
            down, across = _spots(line), _spots(run)
            planes = (w_p, number(window.taps)), (x_t, number(x_plane))
            with e.sweep(number(window.channels), *planes) as (w_c, dx_c):
                for i in _ranges(len(down), most_rows):
                    for j in _ranges(len(across), most_columns):
                        spots = product(down[i.start : i.stop], across[j.start : j.stop])
                        tile(count, list(spots), w_c, dx_c)

        values_of_dx = number(window.channels * rows.size * columns.size)
        with e.sweep(values_of_dx, (dx, number(place))) as (at,):
            e.store(e.zero(), at)
        x_0 = e.at(dx, number(-rows.pad * x_row - columns.pad * place))
        lines = _runs(rows, down, range(rows.kernel))
        runs = _runs(columns, across, range(columns.kernel))
        for first, size, panel_count in _counted(panels):
            starts = [
                (e.at(pointer, number(first * step)), number(size * step))
                for pointer, step in ((dy, y_plane), (places, y_plane), (w, w_filter))
            ]
            with _each(e, panel_count, *starts) as (dy_p, places_p, w_p):
                second = e.variable(_every(e, columns.output))
                whole = [(pointer, y_row, _POOLED) for pointer in (dy_p, places_p)]
                for line, (x_r, *of_line) in _walk(e, lines, (x_0, x_row, 1), *whole):
                    parts = [(pointer, place, _POOLED) for pointer in of_line]
                    for run, (x_t, dy_t, places_t) in _walk(e, runs, (x_r, place, 1), *parts):
                        gather(number(size), dy_t, places_t, build.load(second))
                        tiles(number(size), line, run, w_p, x_t)
                    _add_to(e, second, _every(e, _POOLED * columns.output))

    def function(dy, places, w, dx, begin, end):  # type: ignore[no-untyped-def]
        dy_group, dx_group = dy.size // dy.shape[0], dx.size // dx.shape[0]
        for g in range(begin, end):
            for lane in range(0, dy.shape[4], lanes_of(dy)):
                planes(dy, places, g * dy_group + lane, w, dx, g * dx_group + lane)

    function.__name__ = _name("backward_data_routed", window)
    return kernel(array(5), array(5, "int32"), array(4), array(5), INT, INT)(function)


def _products(window: Window) -> int:
    """Return the multiply-adds of an image: none where a tap meets padding."""
    count = window.channels * window.filters
    for side in (window.rows, window.columns):
        runs = _runs(side, [1] * side.output, range(side.kernel))
        count *= sum(len(run.meets) * run.count for run in runs)
    return count


def outputs_cost(window: Window) -> float:
    """Return the estimated nanoseconds of an image in `forward`, or `backward_data`, on a core."""
    return _PRODUCT * _products(window) / PLACE


def pooled_cost(window: Window) -> float:
    """Return the estimated nanoseconds of an image in `forward_pooled` on one core."""
    maxima = window.filters * window.rows.output * window.columns.output / _POOLED**2
    return outputs_cost(window) + _MAXIMUM * maxima / PLACE


def gradients_cost(window: Window) -> float:
    """Return the estimated nanoseconds of an image in `backward_weights` on one core."""
    outputs = window.rows.output * window.columns.output
    fetched = _FETCH * window.channels * window.filters * outputs
    return max(_PRODUCT * _products(window), fetched) / PLACE


def routed_weights_cost(window: Window) -> float:
    """Return the estimated nanoseconds of an image in `backward_weights_routed` on one core."""
    return _ROUTED_PRODUCT * _products(window) / _POOLED**2 / PLACE


def routed_data_cost(window: Window) -> float:
    """Return the estimated nanoseconds of an image in `backward_data_routed` on one core."""
    windows = len(_pooled(window.rows.output)) * len(_pooled(window.columns.output))
    cycles = _spread_cycles(window, *_spread_tile(window))
    return 2 * _PRODUCT * cycles * window.channels * window.filters * windows / PLACE


def _name(what: str, window: Window) -> str:
    sides = (f"{s.size}_{s.kernel}_{s.pad}" for s in (window.rows, window.columns))
    return f"conv_images_{what}_{window.channels}_{window.filters}_{'_'.join(sides)}"
