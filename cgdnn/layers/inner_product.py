"""Fully connected layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import ClassVar

from cgdnn.kernels import inner_product as kernels
from cgdnn.kernels import inner_product_sparse as sparse
from cgdnn.kernels._jit import Kernel
from cgdnn.kernels.reduce import reduce_rows
from cgdnn.layers._axis import canonical_axis
from cgdnn.layers._base import (
    BEGIN,
    END,
    Argument,
    Buffer,
    Candidate,
    Count,
    Layer,
    Operands,
    Parameter,
    Shape,
    Slower,
    Step,
    Use,
    exactly,
    read_all,
    update,
    write,
    write_across,
)
from cgdnn.layers._layout import IMAGE_LANE, LEAST_GROUPS, lanes, refuse_few_images

_FLOP_NANOSECONDS, _IMAGES_FLOP_NANOSECONDS = 0.006, 0.0042
_WEIGHT_NANOSECONDS = 0.2
"""Reading one weight from memory."""
_BLOCK = 64
"""Columns of a block: one tile of `cgdnn.kernels.gemm` is no wider."""
_UNIT = 64
"""Most rows that are not cut with images in the lanes: few of them would fill no tiles; or where
zeros are skipped: each piece copies what they meet."""
_DENSE_NANOSECONDS, _NONZERO_NANOSECONDS = 0.009, 0.0106
"""Gradient of a weight: each sample, and each that is not zero."""
_MOVE_NANOSECONDS, _MOVE_LARGE_NANOSECONDS, _APPLY_NANOSECONDS = 0.2, 0.35, 0.3
"""Update of a weight by a gradient in a cache and by one in memory, of more elements than
`kernels.LARGE`; and what is to be added where both are one."""
_LIST_NANOSECONDS, _NEAR_NANOSECONDS, _LISTED_NANOSECONDS = 0.5, 0.11, 0.013
"""Gradient of the bottom: each element of the top's, bringing each weight near, and the product
with each sample that is not zero."""
_SHARE = 0.5
"""Share of zeros that pieces are cut for: how passes are cut must not depend on values."""


class InnerProduct(Layer):
    """Multiply each sample with a learned matrix: ``y = w x + b``.

    The axes of the bottom from ``axis`` on are flattened to a vector of K values; the axes before
    it are kept, and ``num_output`` follows them.

    Fields of ``inner_product_param``: ``num_output``, required; ``axis`` (default 1);
    ``transpose`` (default false): the weights are stored as (K, num_output) instead of
    (num_output, K); ``bias_term`` (default true); ``weight_filler``, ``bias_filler``.

    Blobs: weights, bias (num_output). See Caffe, inner_product_layer.cpp.
    """

    bottoms: ClassVar[Count] = exactly(1)
    tops: ClassVar[Count] = exactly(1)

    def setup(self) -> None:
        """Check the number of outputs."""
        outputs = self.node.param.inner_product_param.num_output
        if outputs < 1:
            raise self.error(
                f"got num_output {outputs}, expected 1 or more. Give the number of outputs.",
                "inner_product_param",
                "num_output",
            )

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the axes before ``axis``, then num_output."""
        param = self.node.param.inner_product_param
        axis = canonical_axis(self, param.axis, bottoms[0], "inner_product_param", "axis")
        self._samples, self._inputs = prod(bottoms[0][:axis]), prod(bottoms[0][axis:])
        return [(*bottoms[0][:axis], param.num_output)]

    def parameters(self) -> list[Parameter]:
        """Return the weights, and the bias where there is one."""
        param = self.node.param.inner_product_param
        shape = (param.num_output, self._inputs)
        weights = [Parameter(shape[::-1] if param.transpose else shape, param.weight_filler)]
        return weights + [Parameter((param.num_output,), param.bias_filler)] * param.bias_term

    def multiply_adds(self) -> int:
        """Return one for each weight and sample."""
        return self._samples * self._inputs * self.node.param.inner_product_param.num_output

    def candidates(self, which: str) -> list[Candidate]:
        """Return what skips zeros, products of rows of samples, and those of vectors of images."""
        found = super().candidates(which)
        if which != "forward":
            nonzeros = Candidate(
                "sparse",
                lambda layer, operands: getattr(layer, f"_{which}_nonzeros")(operands),
                lambda layer: layer._refuse_nonzeros(which),
            )
            found.insert(0, nonzeros)
        if which != "backward_weights":
            images = Candidate(
                "image_lanes",
                lambda layer, operands: getattr(layer, f"_{which}_images")(operands),
                lambda layer: layer._refuse_images(which),
                ((IMAGE_LANE, IMAGE_LANE),),
            )
            found.append(images)
        return found

    def _refuse_images(self, which: str) -> str | None:
        """Return why the layer cannot run a pass with images in the lanes, if so."""
        if self._samples != self.bottom_shapes[0][0]:
            return "serves one axis of samples"
        # Along rows two vectors meet a weight in time. Columns of weights cost a line for each.
        along_rows = (which == "forward") != self.node.param.inner_product_param.transpose
        return refuse_few_images(self._samples, 2 if along_rows else LEAST_GROUPS)

    def forward(self, operands: Operands) -> list[Step]:
        """Return the product with the weights."""
        param = self.node.param.inner_product_param
        kernel = kernels.product_nn if param.transpose else kernels.product_nt
        columns = param.num_output
        source = read_all(operands.bottom[0], (self._samples, self._inputs))
        return self._product(operands, kernel, source, operands.top[0], columns, param.bias_term)

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the product of the top's diff with the weights."""
        param = self.node.param.inner_product_param
        kernel = kernels.product_nt if param.transpose else kernels.product_nn
        columns = self._inputs
        source = read_all(operands.top_diff[0], (self._samples, param.num_output))
        return self._product(operands, kernel, source, operands.bottom_diff[0], columns, False)

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return a step over rows of the weights, and one over the bias."""
        steps = []
        if operands.learn[0]:
            factors = self._samples_of(operands)
            if self.node.param.inner_product_param.transpose:
                factors.reverse()
            diff = operands.param_diff[0]
            steps.append(
                Step(
                    kernels.product_tn,
                    [*factors, update(diff), operands.accumulate(0), BEGIN, END],
                    diff.shape[0],
                    self._cost / diff.shape[0],
                )
            )
        return steps + self._bias_steps(operands)

    def _samples_of(self, operands: Operands) -> list[Argument]:
        """Return the diff of the top and the bottom as rows of samples."""
        outputs = self.node.param.inner_product_param.num_output
        return [
            read_all(operands.top_diff[0], (self._samples, outputs)),
            read_all(operands.bottom[0], (self._samples, self._inputs)),
        ]

    def _bias_steps(self, operands: Operands) -> list[Step]:
        """Return the step over the bias, where that learns."""
        param = self.node.param.inner_product_param
        if not (param.bias_term and operands.learn[1]):
            return []
        # The samples are the rows that are added up.
        dy, _ = self._samples_of(operands)
        diff = update(operands.param_diff[1])
        arguments: list[Argument] = [dy, diff, operands.accumulate(1), BEGIN, END]
        return [Step(reduce_rows, arguments, param.num_output, 0.3 * self._samples)]

    def _refuse_nonzeros(self, which: str) -> str | None:
        """Return why the layer should not go over the non-zeros of the top's diff, if so."""
        if self.node.param.inner_product_param.transpose:
            return "serves weights that are not transposed"
        share = getattr(self, f"_{which}_share")
        if share >= 1:
            return Slower(f"would take {share:.1f} times as long at {self.zeros:.0%} zeros in dy")
        return None

    @property
    def _backward_weights_share(self) -> float:
        """How long skipping zeros takes, with the update, where the product takes 1."""
        move = _MOVE_NANOSECONDS if self._weights <= kernels.LARGE else _MOVE_LARGE_NANOSECONDS
        return self._nonzeros_cost(self.zeros) / (_DENSE_NANOSECONDS * self._samples + move)

    @property
    def _backward_data_share(self) -> float:
        """How long skipping zeros takes where the faster product takes 1."""
        dense = [self._cost]
        if self._refuse_images("backward_data") is None:
            dense.append(self._images_cost(self._weights))
        return self._listed_cost(self.zeros) / min(dense)

    def _nonzeros_cost(self, zeros: float) -> float:
        """Return estimated nanoseconds a weight, for its gradient and its update."""
        return _NONZERO_NANOSECONDS * self._samples * (1 - zeros) + _APPLY_NANOSECONDS

    @staticmethod
    def _unit(rows: int, most: int) -> int:
        """Return how many rows a piece has at least: as many as divide `rows`, up to a limit."""
        return max(size for size in range(1, most + 1) if rows % size == 0)

    def _backward_weights_nonzeros(self, operands: Operands) -> list[Step]:
        """Return the steps over rows of the weights and over the bias, zeros left out."""
        steps = []
        if operands.learn[0]:
            diff = operands.param_diff[0]
            unit = self._unit(diff.shape[0], _UNIT)
            shapes = sparse.weights_scratch(self._samples, lanes())
            factors = [
                *self._samples_of(operands),
                *(operands.scratch(f"nonzeros{i}", *each) for i, each in enumerate(shapes)),
            ]
            steps.append(
                Step(
                    sparse.gradient_over_nonzeros,
                    [*factors, update(diff), operands.accumulate(0), unit, BEGIN, END],
                    diff.shape[0] // unit,
                    self._nonzeros_cost(_SHARE) * unit * diff.shape[1],
                    merge=partial(_applied, factors, diff.shape, unit),
                )
            )
        return steps + self._bias_steps(operands)

    def _forward_images(self, operands: Operands) -> list[Step]:
        """Return the product with the weights, images in the lanes."""
        param = self.node.param.inner_product_param
        source, target = operands.bottom[0], operands.top[0]
        return [self._product_images(operands, source, target, param.transpose, param.bias_term)]

    def _backward_data_images(self, operands: Operands) -> list[Step]:
        """Return the product of the top's diff with the weights, images in the lanes."""
        transposed = not self.node.param.inner_product_param.transpose
        source, target = operands.top_diff[0], operands.bottom_diff[0]
        return [self._product_images(operands, source, target, transposed, False)]

    def _backward_data_nonzeros(self, operands: Operands) -> list[Step]:
        """Return the step that lists the non-zeros of the top's diff, and their product."""
        outputs = self.node.param.inner_product_param.num_output
        blocks, near = ceil(outputs / sparse.ROWS), sparse.most_columns()
        room = sparse.room(self._samples)
        lists = (
            operands.temporary("values", (blocks, room)),
            operands.temporary("places", (blocks, room), "int32"),
            operands.temporary("starts", (blocks, self._samples + 1), "int64"),
        )
        source, _ = self._samples_of(operands)
        positions = operands.scratch("positions", (sparse.ROWS,), "int32")
        unit = self._unit(self._inputs, near)
        return [
            Step(
                sparse.list_outputs,
                [source, *map(write, lists), positions, BEGIN, END],
                blocks,
                _LIST_NANOSECONDS * self._samples * sparse.ROWS,
            ),
            Step(
                sparse.product_listed,
                [
                    read_all(operands.param[0]),
                    *map(read_all, lists),
                    write_across(operands.bottom_diff[0], (self._samples, self._inputs)),
                    unit,
                    operands.scratch("block", (sparse.ROWS * near,)),
                    operands.scratch("sums", (self._samples * near,)),
                    BEGIN,
                    END,
                ],
                self._inputs // unit,
                self._listed_cost(_SHARE) * unit / self._inputs,
            ),
        ]

    def _product_images(
        self, operands: Operands, source: Buffer, target: Buffer, transposed: bool, bias: bool
    ) -> Step:
        """Return the step over values of a sample that sets `target` from all of `source`."""
        groups = self._samples // lanes()
        depth, rows = (buffer.size // self._samples for buffer in (source, target))
        unit = self._unit(rows, _UNIT)
        last = operands.param[-1]
        arguments: list[Argument] = [
            read_all(operands.param[0]),
            int(transposed),
            read_all(source, (groups, depth, lanes())),
            read_all(last, (last.size,)),  # not looked at without a bias
            int(bias),
            write_across(target, (groups, rows, lanes())),
            unit,
            BEGIN,
            END,
        ]
        cost = self._images_cost(depth * unit)
        return Step(kernels.product_images, arguments, rows // unit, cost)

    def _images_cost(self, weights: int) -> float:
        """Return the estimated nanoseconds that so many weights take with images in the lanes."""
        return max(2 * _IMAGES_FLOP_NANOSECONDS * self._samples, _WEIGHT_NANOSECONDS) * weights

    def _listed_cost(self, zeros: float) -> float:
        """Return the estimated nanoseconds of a pass that skips this share of zeros."""
        outputs = self.node.param.inner_product_param.num_output
        meeting = _NEAR_NANOSECONDS + _LISTED_NANOSECONDS * (1 - zeros) * self._samples
        listing = _LIST_NANOSECONDS * self._samples * outputs
        return listing + max(meeting, _WEIGHT_NANOSECONDS) * self._weights

    @property
    def _weights(self) -> int:
        return self._inputs * self.node.param.inner_product_param.num_output

    @property
    def _cost(self) -> float:
        """Estimated nanoseconds of one pass: computing, or reading the weights."""
        return max(2 * _FLOP_NANOSECONDS * self._samples, _WEIGHT_NANOSECONDS) * self._weights

    def _product(
        self,
        operands: Operands,
        kernel: Kernel,
        source: Use,
        target: Buffer,
        columns: int,
        bias: bool,
    ) -> list[Step]:
        """Return the steps that set `target` to the product of `source` and the weights.

        Cut over columns where there are more of them than samples, so that no weight is read
        twice; the columns then pass through a buffer of blocks.
        """
        last = operands.param[-1]
        factors: list[Argument] = [
            source,
            read_all(operands.param[0]),
            read_all(last, (last.size,)),  # not looked at without a bias
            int(bias),
        ]
        if columns <= max(self._samples, _BLOCK):
            whole = write(target, (1, self._samples, columns))
            arguments: list[Argument] = [*factors, whole, 0, 1, BEGIN, END]
            return [Step(kernel, arguments, self._samples, self._cost / self._samples)]
        count = ceil(columns / _BLOCK)
        blocks = operands.temporary("blocks", (count, self._samples, _BLOCK))
        arguments = [*factors, write(blocks), BEGIN, END, 0, self._samples]
        rows = write(target, (self._samples, columns))
        return [
            Step(kernel, arguments, count, self._cost / count),
            Step(
                kernels.join_blocks,
                [read_all(blocks), rows, BEGIN, END],
                self._samples,
                0.3 * columns,
            ),
        ]


def _applied(factors: Sequence[Argument], shape: Shape, unit: int, behind: Step) -> Step | None:
    """Return the step that does an update with the gradient from `factors`, if that is one."""
    kernel = sparse.APPLIED.get(behind.kernel) if isinstance(behind.kernel, Kernel) else None
    if kernel is None:
        return None
    weights, _, *rest = behind.arguments
    arguments = [
        replace(each, shape=shape) if isinstance(each, Use) and each.mode == "update" else each
        for each in (weights, *rest)
    ]
    range_of_piece = arguments[-3:]
    arguments = [*factors, *arguments[:-3], unit, *range_of_piece]
    extent = shape[0] // unit
    return Step(kernel, arguments, extent, behind.cost * behind.extent / extent)
