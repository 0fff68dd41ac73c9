"""Convolution over any number of spatial axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd, prod
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from cgdnn.kernels import conv_unfold as kernels
from cgdnn.kernels import stencil
from cgdnn.kernels.conv_sparse import Pooled, Window, most_sums
from cgdnn.kernels.winograd_points import TAPS, VARIANTS
from cgdnn.layers import _parallel_gemm
from cgdnn.layers._axis import canonical_axis
from cgdnn.layers._base import (
    BEGIN,
    END,
    PIECE,
    Argument,
    Buffer,
    Candidate,
    Count,
    Layer,
    Operands,
    Pair,
    Parameter,
    Shape,
    Slower,
    Step,
    Use,
    read,
    read_all,
    row,
    update,
    write,
)
from cgdnn.layers._direct import Direct
from cgdnn.layers._images import DirectImages, WinogradImages
from cgdnn.layers._layout import CHANNEL_LANE, IMAGE_LANE, NCHW, lanes, refuse_few_images
from cgdnn.layers._partial import add_partials
from cgdnn.layers._phases import Phased, Phases
from cgdnn.layers._sparse import Sparse
from cgdnn.layers._winograd import Winograd
from cgdnn.layers.pooling import Pooling

_FLOP_NANOSECONDS = 0.006
_UNFOLD_FLOP, _UNFOLD_ELEMENT, _UNFOLD_VALUE = 0.0048, 0.1, 0.15
"""Nanoseconds that unfolding takes for a flop of its products, for an element of the unfolded
input, and for each channel and filter of a pixel."""
_MOST_PARTIAL = 1 << 20
"""Weights beyond which each piece of the weight gradient computes some filters from all images,
rather than all filters from some images: sixteen partial gradients would take too much memory."""

_FILTERS = 64
"""Filters that are best computed together where they are cut."""
_MOST_NEAR_WEIGHTS = 1 << 16
"""Weights up to which kernels read them again for each row of a group of images."""

_INEXACT = "rounds worse than sums of products, and exact results are asked for"
_WINOGRAD_SIZES = f"serves kernels of {' and '.join(f'{size}x{size}' for size in TAPS)}"
_PHASED_SIZES = f"serves square kernels of up to {max(TAPS)} times the stride"
AnyImages = TypeVar("AnyImages", DirectImages, WinogradImages)


class Axis(stencil.Side):
    """One spatial axis, and which input places its output places read."""

    @property
    def pointwise(self) -> bool:
        """Whether each output place reads its own input place only."""
        return self.kernel == 1 and self.stride == 1 and self.pad == 0

    def places(self) -> npt.NDArray[np.int64]:
        """Return the input place of each (kernel place, output place), -1 in the padding."""
        taps = np.arange(self.kernel)[:, None] * self.dilation - self.pad
        at = taps + np.arange(self.output)[None, :] * self.stride
        return np.where((at >= 0) & (at < self.size), at, -1)


class Convolution(Layer):
    """Correlate each bottom with learned filters: ``y = w * x + b``.

    Bottoms have the shape (..., channels, spatial axes...), and each gives a top
    (..., num_output, spatial axes...) by the same weights. An output axis has the size
    ``(size + 2 pad - dilation (kernel - 1) - 1) / stride + 1``, rounded down.

    Fields of ``convolution_param``:

    * ``num_output``: number of filters, required.
    * ``kernel_size``, required; ``stride`` (default 1), ``pad`` (default 0), ``dilation``
      (default 1): given once for all spatial axes, or once for each. For two axes, ``kernel_h`` and
      ``kernel_w``, ``stride_h`` and ``stride_w``, ``pad_h`` and ``pad_w`` instead.
    * ``group`` (default 1): channels and filters are divided into so many groups; the filters of a
      group see its channels only.
    * ``bias_term`` (default true), ``weight_filler``, ``bias_filler``.
    * ``axis`` (default 1): the channel axis; the axes after it are spatial, the ones before it are
      independent samples.
    * ``force_nd_im2col`` and ``engine`` are accepted and change nothing.

    Blobs: weights (num_output, channels / group, kernel...), bias (num_output). The rules are those
    of Caffe's base_conv_layer.cpp.
    """

    bottoms: ClassVar[Count] = Count(1, None)
    tops: ClassVar[Count] = Count(1, None)

    def setup(self) -> None:
        """Check the fields that need no shapes."""
        param = self.node.param.convolution_param
        if len(self.node.bottoms) != len(self.node.tops):
            raise self.error(
                f"got {len(self.node.bottoms)} bottoms and {len(self.node.tops)} tops, expected as "
                "many tops as bottoms. Name one top for each bottom.",
                "top",
            )
        if param.num_output < 1:
            raise self._field_error(
                f"got num_output {param.num_output}, expected 1 or more. Count the filters",
                "num_output",
            )
        if param.group < 1 or param.num_output % param.group:
            raise self._field_error(
                f"num_output {param.num_output} is not divisible by group {param.group}. "
                f"{_multiples(param.num_output, param.group)}",
                "group",
            )

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return (..., num_output, spatial axes...) for each bottom."""
        param = self.node.param.convolution_param
        shape = bottoms[0]
        channel_axis = canonical_axis(self, param.axis, shape, "convolution_param", "axis")
        for other in bottoms[1:]:
            if other != shape:
                raise self.error(
                    f"bottoms differ in shape; got {other}, expected {shape} as the first. "
                    "Use a layer for each shape.",
                    "bottom",
                )
        channels = shape[channel_axis]
        if channels % param.group:
            raise self._field_error(
                f"{channels} input channels are not divisible by group {param.group}. "
                f"{_multiples(channels, param.group)}",
                "group",
            )
        self._axes = self._read_axes(shape[channel_axis + 1 :])
        self._samples = prod(shape[:channel_axis])
        self._channels = channels
        outputs = [axis.output for axis in self._axes]
        if any(size < 1 for size in outputs):
            kernel = _by(axis.kernel for axis in self._axes)
            extent = _by(axis.dilation * (axis.kernel - 1) + 1 for axis in self._axes)
            dilated = f", dilated to {extent}," if extent != kernel else ""
            pad = _by_one(axis.pad for axis in self._axes)
            raise self._field_error(
                f"kernel {kernel}{dilated} does not fit input "
                f"{_by(axis.size for axis in self._axes)} (+pad {pad}). "
                "Use a smaller kernel, or more padding",
                "kernel_h" if param.HasField("kernel_h") else "kernel_size",
            )
        self._arrange()
        return [(*shape[:channel_axis], param.num_output, *outputs)] * len(bottoms)

    def _read_axes(self, sizes: Shape) -> list[Axis]:
        """Return the spatial axes with their kernels."""
        windows = self._values("kernel_size", len(sizes), None)
        strides = self._values("stride", len(sizes), 1)
        pads = self._values("pad", len(sizes), 0)
        dilations = self._values("dilation", len(sizes), 1)
        for name, values in (
            ("kernel_size", windows),
            ("stride", strides),
            ("dilation", dilations),
        ):
            if any(value < 1 for value in values):
                raise self._field_error(
                    f"got {name} {_by(values)}, expected 1 or more on each axis. Correct it", name
                )
        return [Axis(*of) for of in zip(sizes, windows, strides, pads, dilations, strict=True)]

    def _values(self, name: str, axes: int, default: int | None) -> list[int]:
        """Return a field for each spatial axis, given once, once for each, or as _h and _w."""
        param = self.node.param.convolution_param
        given = [int(value) for value in getattr(param, name)]
        stem = name.removesuffix("_size")
        pair = [f"{stem}_h", f"{stem}_w"] if name != "dilation" else []
        if any(param.HasField(part) for part in pair):
            if axes != 2 or given:
                got = f"together with {name}" if given else f"with {axes} spatial axes"
                raise self._field_error(
                    f"got {pair[0]} or {pair[1]} {got}, expected {name} alone, or {pair[0]} and "
                    f"{pair[1]} for two spatial axes. Keep {name}",
                    next(part for part in pair if param.HasField(part)),
                )
            return [int(getattr(param, part)) for part in pair]
        if not given and default is not None:
            return [default] * axes
        if len(given) not in (1, axes):
            raise self._field_error(
                f"got {name} {len(given)} times, expected once, or once for each of the {axes} "
                f"spatial axes. Give {name}",
                name,
            )
        return given * axes if len(given) == 1 else given

    def _field_error(self, text: str, field: str) -> Exception:
        return self.error(f"{text}.", "convolution_param", field)

    def _arrange(self) -> None:
        """Bring the spatial axes to rows and columns, as `cgdnn.kernels.conv_unfold` wants them."""
        axes = list(self._axes) or [Axis(1, 1, 1, 0, 1)]
        while len(axes) > 1 and axes[-1].pointwise and axes[-2].pointwise:
            axes[-2:] = [Axis(axes[-2].size * axes[-1].size, 1, 1, 0, 1)]
        *leading, self._columns = axes
        table = np.zeros((1, 1), np.int64)
        for axis in leading:
            at = axis.places()[None, :, None, :]
            outer = table[:, None, :, None]
            both = np.where((outer >= 0) & (at >= 0), outer * axis.size + at, -1)
            table = both.reshape(table.shape[0] * axis.kernel, table.shape[1] * axis.output)
        self._rows = table
        inputs = prod(axis.size for axis in leading)
        self._outputs = np.full((len(table), inputs), -1, np.int64)
        tap, output = np.nonzero(table >= 0)
        self._outputs[tap, table[tap, output]] = output
        filters = self.node.param.convolution_param.num_output
        inner = self._channels // self.node.param.convolution_param.group
        self._weight_view = (filters, inner, len(table), self._columns.kernel)
        self._bottom_view = (self._samples, self._channels, inputs, self._columns.size)
        self._top_view = (self._samples, filters, table.shape[1], self._columns.output)

    def parameters(self) -> list[Parameter]:
        """Return the weights, and the bias where there is one."""
        param = self.node.param.convolution_param
        shape = (*self._weight_view[:2], *(axis.kernel for axis in self._axes))
        weights = [Parameter(shape, param.weight_filler)]
        return weights + [Parameter((param.num_output,), param.bias_filler)] * param.bias_term

    def multiply_adds(self) -> int:
        """Return one for each weight that meets each output place."""
        return len(self.node.bottoms) * prod(self._top_view) * prod(self._weight_view[1:])

    @property
    def axes(self) -> list[Axis]:
        """The spatial axes, known after `infer_shapes`."""
        return self._axes

    @property
    def _sample_cost(self) -> float:
        return 2 * _FLOP_NANOSECONDS * prod(self._top_view[1:]) * prod(self._weight_view[1:])

    def candidates(self, which: str) -> list[Candidate]:
        """Return kernels that skip zeros, Winograd's, direct ones, then unfolding and products."""
        sparse = [
            Candidate(
                "sparse",
                lambda layer, operands: getattr(self._sparse(which), which)(operands),
                lambda layer: self._refuse_sparse(which),
            )
        ]
        if which == "backward_weights":
            routed = Candidate(
                "sparse_routed",
                lambda layer, operands: self._sparse_routed().backward_weights(operands),
                lambda layer: self._refuse_routed(),
                self._routed_layouts(),
                routed=True,
            )
            sparse.insert(0, routed)
        dense = [
            *self._images_candidates(which),
            Candidate(
                "winograd",
                lambda layer, operands: getattr(self._winograd(), which)(operands),
                lambda layer: self._refuse_winograd(which),
                self._winograd_layouts(),
            ),
            *self._direct_candidates(which),
            Candidate(
                _parallel_gemm.NAME,
                lambda layer, operands: getattr(self._parallel_gemm(), which)(operands),
                lambda layer: _parallel_gemm.REASON,
            ),
            Candidate("unfold_gemm", lambda layer, operands: getattr(layer, which)(operands)),
        ]
        return dense if which == "forward" else [*sparse, *dense]

    def _sparse(self, which: str) -> Sparse | Phased:
        """Return what skips zeros, over phases of the images where that should be faster."""
        plain = Sparse(self._window, self.node.param.convolution_param.bias_term, self.zeros)
        rows, columns = self._axes
        if not 1 < rows.stride == columns.stride or rows.kernel != columns.kernel:
            return plain
        phases = self._phases(self._phase_taps)
        window = replace(
            plain.window,
            channels=phases.filters[1],
            size=(phases.images[2], phases.images[3]),
            kernel=(phases.taps, phases.taps),
            stride=(1, 1),
            pad=(0, 0),
        )
        ways: list[Sparse | Phased] = [plain, Phased(phases, replace(plain, window=window))]
        return min(ways, key=lambda way: way.cost(which))

    def _sparse_routed(self) -> Sparse:
        window = replace(self._window, pooled=self._pooled())
        return Sparse(window, self.node.param.convolution_param.bias_term, self.zeros)

    @property
    def _window(self) -> Window:
        """The shapes of a convolution over two spatial axes."""
        rows, columns = self._axes
        groups = self.node.param.convolution_param.group
        return Window(
            images=self._samples,
            channels=self._channels // groups,
            filters=self.node.param.convolution_param.num_output // groups,
            size=(rows.size, columns.size),
            output=(rows.output, columns.output),
            kernel=(rows.kernel, columns.kernel),
            stride=(rows.stride, columns.stride),
            pad=(rows.pad, columns.pad),
            groups=groups,
        )

    def _pooled(self) -> Pooled | None:
        """Return the shapes of a maximum pooling that alone reads the top, and has a route."""
        if not isinstance(self.reader, Pooling) or self.reader.route(NCHW) is None:
            return None
        size, stride, pad = (pair[0] for pair in self.reader.window)
        rows, columns = self.reader.top_shapes[0][2:]
        return Pooled((rows, columns), size, stride, pad)

    def _routed_layouts(self) -> tuple[Pair, ...]:
        param = self.node.param.convolution_param
        filled = param.num_output // param.group % lanes() == 0
        return ((NCHW, NCHW), *([(NCHW, CHANNEL_LANE)] if filled else []))

    def _refuse_routed(self) -> str | None:
        if self._pooled() is None:
            return "serves where maximum pooling alone reads the top"
        return self._serves_sparse() or self._slower("backward_weights", self._sparse_routed())

    def _refuse_sparse(self, which: str) -> str | None:
        return self._serves_sparse() or self._slower(which, self._sparse(which))

    def _serves_sparse(self) -> str | None:
        if len(self._axes) != 2 or any(axis.dilation != 1 for axis in self._axes):
            return "serves two spatial axes with dilation 1"
        if self._axes[1].kernel > most_sums():
            return f"serves kernels of up to {most_sums()} columns"
        return None

    def _slower(self, which: str, sparse: Sparse | Phased) -> str | None:
        """Return by how much skipping zeros should be slower than the dense kernels, if it is."""
        dense = [self._sample_cost * self._samples]
        if self._refuse_winograd(which) is None:
            dense.append(self._winograd().cost(which))
        if self._refuse_direct(which, pixel_lanes=False) is None:
            dense.append(self._direct(pixel_lanes=False).cost(which))
        share = sparse.cost(which) / min(dense)
        if share >= 1:
            return Slower(f"would take {share:.1f} times as long at {self.zeros:.0%} zeros in dy")
        return None

    def _winograd(self) -> Winograd | Phased:
        bias = self.node.param.convolution_param.bias_term
        if self._axes[0].stride > 1:
            phases = self._phases(min(t for _, t in VARIANTS if t >= self._phase_taps))
            return Phased(
                phases, Winograd(phases.images, phases.filters, self._top_view, (0, 0), bias)
            )
        pad = (self._axes[0].pad, self._axes[1].pad)
        return Winograd(self._bottom_view, self._weight_view, self._top_view, pad, bias)

    @property
    def _phase_taps(self) -> int:
        """Taps that the longest phase of an axis of the kernel has."""
        return -(-self._weight_view[2] // self._axes[0].stride)

    @property
    def _rows_and_columns(self) -> list[Axis]:
        """Up to two spatial axes as two."""
        return [Axis(1, 1, 1, 0, 1)] * (2 - len(self._axes)) + self._axes

    def _phases(self, taps: int) -> Phases:
        """Return how the spatial axes, with a stride, consist of phases of so many taps."""
        rows, columns = self._rows_and_columns
        stride, pad = (rows.stride, columns.stride), (rows.pad, columns.pad)
        return Phases(self._bottom_view, self._weight_view, self._top_view, stride, pad, taps)

    def _winograd_layouts(self) -> tuple[Pair, ...]:
        """Return the pairs of layouts that Winograd's algorithm serves with channels in lanes."""
        plain = len(self._axes) != 2 or self.bottom_shapes[0] != self._bottom_shape
        if plain or self._misfits_winograd() is not None:
            return ((NCHW, NCHW),)
        whole = self._winograd().whole_vectors
        below, above = ((NCHW, CHANNEL_LANE) if full else (NCHW,) for full in whole)
        return tuple((bottom, top) for bottom in below for top in above)

    @property
    def _bottom_shape(self) -> Shape:
        """The shape of a bottom with two spatial axes behind samples and channels."""
        return (self._samples, self._channels, *(axis.size for axis in self._axes))

    def _refuse_winograd(self, which: str) -> str | None:
        if self.exact:
            return _INEXACT
        reason = self._misfits_winograd()
        if reason is not None:
            return reason
        plain, name = min(
            (self._sample_cost * self._samples, "unfolding"),
            (self._direct(pixel_lanes=False).cost(which), "direct convolution"),
        )
        share = self._winograd().cost(which) / plain
        return Slower(f"would take {share:.1f} times as long as {name}") if share >= 1 else None

    def _misfits_winograd(self) -> str | None:
        """Return why Winograd's algorithm cannot serve, however fast and exact it is."""
        if len(self._axes) != 2 or any(axis.dilation != 1 for axis in self._axes):
            return "serves two spatial axes with dilation 1"
        if self._axes[0].stride != self._axes[1].stride:
            return "serves the same stride on both axes"
        square = self._weight_view[2] == self._weight_view[3]
        if self._axes[0].stride > 1:
            return None if square and self._phase_taps <= max(TAPS) else _PHASED_SIZES
        return None if square and self._weight_view[2] in TAPS else _WINOGRAD_SIZES

    def _images_candidates(self, which: str) -> list[Candidate]:
        """Return the kernels for images in the lanes, the ones that should be faster first."""
        layouts = ((IMAGE_LANE, IMAGE_LANE),)
        candidates = [
            Candidate(
                "winograd_images",
                lambda layer, operands: getattr(self._images(WinogradImages), which)(operands),
                lambda layer: self._refuse_winograd_images(which),
                layouts,
            ),
            Candidate(
                "direct_images",
                lambda layer, operands: getattr(self._images(DirectImages), which)(operands),
                lambda layer: self._refuse_direct_images(),
                layouts,
            ),
        ]
        if which != "forward":
            steps = "routed_data" if which == "backward_data" else "routed_weights"
            routed = Candidate(
                "routed_images",
                lambda layer, operands: getattr(self._images(DirectImages), steps)(operands),
                lambda layer: self._refuse_routed_images(which),
                layouts,
                routed=True,
            )
            candidates.insert(0, routed)
        return candidates

    def _images(self, kind: type[AnyImages]) -> AnyImages:
        rows, columns = self._axes
        filters, channels = self._weight_view[:2]
        window = stencil.Window(1, channels, filters, rows, columns)
        return kind(self._samples, window, self.node.param.convolution_param.bias_term)

    def _refuse_images(self) -> str | None:
        if len(self._axes) != 2 or any(axis.stride * axis.dilation != 1 for axis in self._axes):
            return "serves two spatial axes with stride 1 and dilation 1"
        if self.node.param.convolution_param.group != 1:
            return "serves one group"
        if any(axis.pad >= axis.kernel for axis in self._axes):
            return "serves paddings below the kernel"
        if self.bottom_shapes[0] != self._bottom_shape:
            return "serves one axis of samples"
        return refuse_few_images(self._samples)

    def _refuse_direct_images(self) -> str | None:
        reason = self._refuse_images()
        if reason is None and prod(self._weight_view) > _MOST_NEAR_WEIGHTS:
            return f"serves up to {_MOST_NEAR_WEIGHTS} weights, which stay in the second cache"
        return reason

    def _refuse_winograd_images(self, which: str) -> str | None:
        reason = self._refuse_images()
        if reason is not None:
            return reason
        if self.exact:
            return _INEXACT
        if self._weight_view[2] != self._weight_view[3] or self._weight_view[2] not in TAPS:
            return _WINOGRAD_SIZES
        winograd = self._images(WinogradImages)
        if not winograd.serves:
            return "serves channels whose transforms stay in the second cache"
        share = winograd.cost(which) / self._images(DirectImages).cost(which)
        return Slower(f"would take {share:.1f} times as long as directly") if share >= 1 else None

    def _refuse_routed_images(self, which: str) -> str | None:
        reason = self._refuse_direct_images()
        if reason is not None:
            return reason
        reader = self.reader
        if not isinstance(reader, Pooling) or reader.route(IMAGE_LANE) is None:
            return "serves where maximum pooling alone reads the top"
        if reader.window != ((2, 2), (2, 2), (0, 0)):
            return "serves pooling windows of 2x2 with stride 2 and no padding"
        images = self._images(DirectImages)
        others = [(images.cost(which), "directly")]
        if self._refuse_winograd_images(which) is None:
            winograd = self._images(WinogradImages).cost(which)
            others.append((winograd, "by Winograd's algorithm"))
        least, how = min(others)
        share = images.routed_cost(which) / least
        return Slower(f"would take {share:.1f} times as long as {how}") if share >= 1 else None

    def _direct(self, pixel_lanes: bool) -> Direct | Phased:
        rows, columns = self._rows_and_columns
        param = self.node.param.convolution_param
        channels, filters = self._weight_view[1], self._weight_view[0] // param.group
        window = stencil.Window(param.group, channels, filters, rows, columns)
        direct = Direct(self._samples, window.sampled, param.bias_term, pixel_lanes)
        return direct if window.sampled is window else Phased(self._phases(1), direct)

    def _direct_candidates(self, which: str) -> list[Candidate]:
        """Return the direct kernels, the ones that should be faster first."""
        lanes = [False] if which == "backward_weights" else [False, True]
        if all(self._serves_direct(which, pixel_lanes) is None for pixel_lanes in lanes):
            lanes.sort(key=lambda pixel_lanes: self._direct(pixel_lanes).cost(which))
        return [self._direct_candidate(which, pixel_lanes) for pixel_lanes in lanes]

    def _direct_candidate(self, which: str, pixel_lanes: bool) -> Candidate:
        return Candidate(
            "direct_pixels" if pixel_lanes else "direct",
            lambda layer, operands: getattr(self._direct(pixel_lanes), which)(operands),
            lambda layer: self._refuse_direct(which, pixel_lanes),
        )

    def _serves_direct(self, which: str, pixel_lanes: bool) -> str | None:
        if len(self._axes) > 2:
            return "serves up to two spatial axes"
        if pixel_lanes and which == "backward_data" and any(a.stride > 1 for a in self._axes):
            return "serves stride 1, where neighbours have the same taps"
        return None

    def _refuse_direct(self, which: str, pixel_lanes: bool) -> str | None:
        reason = self._serves_direct(which, pixel_lanes)
        if reason is not None:
            return reason
        taps, pixels = prod(self._weight_view[2:]), prod(self._top_view[2:])
        flops = 2 * prod(self._top_view[1:]) * prod(self._weight_view[1:])
        unfold = _UNFOLD_FLOP * flops + _UNFOLD_ELEMENT * self._channels * taps * pixels
        given = prod(self._bottom_view[2:]) if which == "backward_data" else pixels
        unfold += _UNFOLD_VALUE * (self._channels * given + self._weight_view[0] * pixels)
        share = self._direct(pixel_lanes).cost(which) / (self._samples * unfold)
        if share >= 1:
            return Slower(f"would take {share:.1f} times as long as unfolding")
        return None

    def _parallel_gemm(self) -> _parallel_gemm.ParallelGemm:
        axes = self._axes
        return _parallel_gemm.ParallelGemm(
            (*self._bottom_view[:2], *(axis.size for axis in axes)),
            self.parameters()[0].shape,
            (*self._top_view[:2], *(axis.output for axis in axes)),
            tuple(axis.stride for axis in axes),
            tuple(axis.pad for axis in axes),
            tuple(axis.dilation for axis in axes),
            self.node.param.convolution_param.bias_term,
        )

    def _geometry(self, operands: Operands) -> tuple[Argument, ...]:
        columns = self._columns
        table = read_all(operands.constant("rows", self._rows))
        return (table, columns.stride, columns.pad, columns.dilation)

    def _block(self) -> tuple[int, int, int]:
        """Return the channels of a group, the kernel's places and the output's places."""
        return self._weight_view[1], prod(self._weight_view[2:]), prod(self._top_view[2:])

    def forward(self, operands: Operands) -> list[Step]:
        """Return a step over samples for each bottom."""
        bias = self.node.param.convolution_param.bias_term
        u = operands.scratch("u", (kernels.forward_scratch(*self._block()[:2]),))
        arguments: list[Argument] = [
            read_all(operands.param[0], self._weight_view),
            # Without a bias the kernel does not look at the array in its place.
            read_all(operands.param[-1], (operands.param[-1].size,)),
            int(bias),
        ]
        return [
            Step(
                kernels.conv_forward_unfold,
                [
                    read(bottom, self._bottom_view),
                    *arguments,
                    write(top, self._top_view),
                    *self._geometry(operands),
                    u,
                    BEGIN,
                    END,
                ],
                self._samples,
                self._sample_cost,
            )
            for bottom, top in zip(operands.bottom, operands.top, strict=True)
        ]

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return a step over samples for each bottom whose diff is wanted."""
        du = operands.scratch("du", (kernels.backward_data_scratch(*self._block()),))
        return [
            Step(
                kernels.conv_backward_data_unfold,
                [
                    read(dy, self._top_view),
                    read_all(operands.param[0], self._weight_view),
                    write(dx, self._bottom_view),
                    read_all(operands.constant("outputs", self._outputs)),
                    *self._geometry(operands),
                    du,
                    BEGIN,
                    END,
                ],
                self._samples,
                self._sample_cost,
            )
            for dy, dx, wanted in zip(
                operands.top_diff, operands.bottom_diff, operands.propagate, strict=True
            )
            if wanted
        ]

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that sum the gradients of all bottoms, one bottom after the other."""
        by_filter = prod(self._weight_view) > _MOST_PARTIAL
        steps: list[Step] = []
        for x, dy in zip(operands.bottom, operands.top_diff, strict=True):
            steps += (self._by_filter if by_filter else self._by_sample)(operands, x, dy)
        return steps

    def _by_sample(self, operands: Operands, x: Buffer, dy: Buffer) -> list[Step]:
        """Return a step over samples that writes partial gradients, and the steps that add them."""
        filters, size = self._weight_view[0], prod(self._weight_view)
        sums = [operands.partial("dw", (size,)), operands.partial("db", (filters,))]
        arrays = [read(x, self._bottom_view), read(dy, self._top_view), *map(row, sums)]
        numbers: list[Argument] = [PIECE, 0.0, 0.0, filters, 0, 1, BEGIN, END]
        step = self._weights_step(operands, arrays, numbers, self._samples)
        return [step, *add_partials(operands, sums)]

    def _by_filter(self, operands: Operands, x: Buffer, dy: Buffer) -> list[Step]:
        """Return one step over filters that reads all samples."""
        unit = gcd(self._weight_view[0], _FILTERS)
        diffs = operands.param_diff
        keep = [operands.accumulate(index) for index in range(len(diffs))]
        arrays = [
            read_all(x, self._bottom_view),
            read_all(dy, self._top_view),
            *(update(diff, (1, diff.size)) for diff in (diffs[0], diffs[-1])),
        ]
        numbers: list[Argument] = [0, keep[0], keep[-1], unit, BEGIN, END, 0, self._samples]
        return [self._weights_step(operands, arrays, numbers, self._weight_view[0] // unit)]

    def _weights_step(
        self, operands: Operands, arrays: list[Use], numbers: list[Argument], extent: int
    ) -> Step:
        param = self.node.param.convolution_param
        bias = param.bias_term and operands.learn[1]
        columns = self._columns
        size, places = kernels.backward_weights_scratch(
            *self._block()[:2],
            columns.kernel,
            self._top_view[2:],
            columns.size + 2 * columns.pad,
        )
        return Step(
            kernels.conv_backward_weights_unfold,
            [
                *arrays,
                int(bias),
                param.group,
                columns.kernel,
                *self._geometry(operands),
                operands.scratch("u", (size,)),
                operands.scratch("places", (places,), "int64"),
                *numbers,
            ],
            extent,
            self._sample_cost * self._samples / extent,
        )


def _by(values: Iterable[int]) -> str:
    """Return sizes as people write them: 5x5."""
    return "x".join(map(str, values))


def _by_one(values: Iterable[int]) -> str:
    """Return sizes as one number where they are equal."""
    numbers = list(values)
    return str(numbers[0]) if len(set(numbers)) == 1 else _by(numbers)


def _multiples(count: int, group: int) -> str:
    """Return the remedy for a count that `group` does not divide."""
    if group < 1:
        return "Use group 1 or more"
    below = count // group * group
    near = [str(n) for n in (below, below + group) if n]
    return f"Use a multiple of {group}, such as {' or '.join(near)}"
