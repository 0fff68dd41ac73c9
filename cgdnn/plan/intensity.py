"""Arithmetic intensity of convolutions, and the region of the design space that one lies in.

The formulas and the six regions are spg-CNN's (Rajbhandari et al., "Optimizing CNNs on Multicores
for Scalability, Performance and Goodput", ASPLOS 2017); intensities are flops for each element
moved. The bounds between the regions are ours: the paper's six layers lie well inside of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cgdnn.layers.convolution import Convolution

HIGH_UNFOLD_INTENSITY = 512.0
"""From here on unfolding costs little: regions 0 (dense) and 1 (sparse)."""
LOW_UNFOLD_INTENSITY = 64.0
"""Below, unfolding is bound by memory: regions 4 and 5; between the two, 2 and 3."""
SPARSE_SHARE = 0.75
"""Share of zeros in the output's gradient from which a layer counts as sparse."""


@dataclass(frozen=True)
class ConvolutionShape:
    """One image of a convolution, without padding.

    Attributes
    ----------
    inputs, outputs : int
        Channels; those of one group.
    size, kernel, stride, dilation : tuple of int
        Of each spatial axis; `size` is the input's, padding included.
    """

    inputs: int
    outputs: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, layer: Convolution) -> ConvolutionShape:
        """Return the shape of a group of `layer`, whose shapes must be known."""
        filters, inputs, *_ = layer.parameters()[0].shape
        axes = layer.axes
        return cls(
            inputs,
            filters // layer.node.param.convolution_param.group,
            tuple(axis.size + 2 * axis.pad for axis in axes),
            tuple(axis.kernel for axis in axes),
            tuple(axis.stride for axis in axes),
            tuple(axis.dilation for axis in axes),
        )

    @property
    def output_size(self) -> tuple[int, ...]:
        """Output pixels along each spatial axis."""
        axes = zip(self.size, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in axes)

    @property
    def flops(self) -> int:
        """Multiplications and additions of one pass over one image."""
        return 2 * self.outputs * prod(self.output_size) * self.inputs * prod(self.kernel)

    @property
    def _weights_and_output(self) -> int:
        weights = self.outputs * self.inputs * prod(self.kernel)
        return weights + self.outputs * prod(self.output_size)

    @property
    def intrinsic_intensity(self) -> float:
        """Flops for each element of input, weights and output."""
        return self.flops / (self.inputs * prod(self.size) + self._weights_and_output)

    @property
    def unfold_intensity(self) -> float:
        """Flops for each element where the unfolded input is written and read as well.

        As in the paper, the unfolded matrix is counted on the input's extent.
        """
        unfolded = self.inputs * prod(self.size) * prod(self.kernel)
        return self.flops / (2 * unfolded + self._weights_and_output)

    def region(self, zeros: float) -> int:
        """Return the region 0-5 for a share `zeros` of exact zeros in the output's gradient."""
        if self.unfold_intensity >= HIGH_UNFOLD_INTENSITY:
            row = 0
        elif self.unfold_intensity >= LOW_UNFOLD_INTENSITY:
            row = 1
        else:
            row = 2
        return 2 * row + (zeros >= SPARSE_SHARE)
