"""What a layer is, and the steps that it answers with.

A layer knows shapes and kernels. It answers four questions: which shapes its tops have
(`infer_shapes`), which parameters it learns (`parameters`), and of which steps its three passes
consist (`forward`, `backward_data`, `backward_weights`). A step is one kernel laid over an axis
that may be cut; how it is cut, which thread runs it and where its arrays lie is the plan's
business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Literal

import numpy.typing as npt

from cgdnn.errors import CgdnnError, DescriptionError
from cgdnn.kernels._jit import Kernel
from cgdnn.netdef.graph import Node
from cgdnn.proto.cgdnn_pb2 import FillerParameter

Shape = tuple[int, ...]
Pair = tuple[str, str]
"""The layouts of a layer's bottoms and of its tops."""
Mode = Literal["read", "write", "update"]


@dataclass(eq=False)
class Buffer:
    """A piece of memory that the plan places: a blob, a diff, a parameter, a layer's state.

    Attributes
    ----------
    name : str
        For dumps and messages, such as ``conv1.diff``.
    shape : tuple of int
        Of a partial buffer: the shape of one partial; the plan puts the count of pieces before it.
    dtype : str
        "real" (the net's type), "int32", "int64", "uint8".
    kind : str
        "data", "diff", "param", "param_diff", "history", "state" (kept from forward to backward),
        "partial" (one row for each piece of the step that writes it), "scratch" (one copy for each
        worker, content not kept), "temporary" (not kept after the step that reads it).
    """

    name: str
    shape: Shape
    dtype: str = "real"
    kind: str = "data"
    rows: int = 0  # of a partial: set by the plan when it cuts the step that writes it
    alias: Buffer | None = None  # the buffer whose memory this one is (another shape of it)
    values: npt.NDArray[Any] | None = None  # what it holds from the start (see Operands.constant)

    @property
    def size(self) -> int:
        """Number of elements (of one row, where the buffer is partial)."""
        return prod(self.shape)


@dataclass(frozen=True, eq=False)
class Use:
    """An array argument of a step: a buffer, how it is used, and which part a piece touches.

    `part` is "cut" (axis 0 of `shape` is cut with the step: a piece touches only its range),
    "across" (axis 1 is cut: a piece touches its range at each place of axis 0), "whole", or "row"
    (row number `piece` of a partial). The kernel always receives the whole array; `part` is what
    the dependencies are computed from, so it must not promise too little.
    """

    buffer: Buffer
    mode: Mode
    part: Literal["cut", "across", "whole", "row"]
    shape: Shape | None = None  # the view that the kernel gets; None: the buffer's own shape


def read(buffer: Buffer, shape: Shape | None = None) -> Use:
    """Read only the piece's own range of axis 0."""
    return Use(buffer, "read", "cut", shape)


def read_all(buffer: Buffer, shape: Shape | None = None) -> Use:
    """Read any part of the array."""
    return Use(buffer, "read", "whole", shape)


def write(buffer: Buffer, shape: Shape | None = None) -> Use:
    """Overwrite the piece's own range of axis 0, all of it, without reading it."""
    return Use(buffer, "write", "cut", shape)


def write_across(buffer: Buffer, shape: Shape | None = None) -> Use:
    """Overwrite the piece's own range of axis 1, all of it, without reading it."""
    return Use(buffer, "write", "across", shape)


def write_all(buffer: Buffer, shape: Shape | None = None) -> Use:
    """Overwrite the whole array (only for a step that is not cut)."""
    return Use(buffer, "write", "whole", shape)


def update(buffer: Buffer, shape: Shape | None = None) -> Use:
    """Read and write the piece's own range of axis 0."""
    return Use(buffer, "update", "cut", shape)


def update_all(buffer: Buffer, shape: Shape | None = None) -> Use:
    """Read and write the whole array (only for a step that is not cut)."""
    return Use(buffer, "update", "whole", shape)


def row(buffer: Buffer) -> Use:
    """Overwrite row number `piece` of a partial buffer; the kernel gets (rows, *shape)."""
    return Use(buffer, "write", "row")


def rows(buffer: Buffer) -> Use:
    """Read all rows of a partial buffer; the kernel gets (rows, *shape)."""
    return Use(buffer, "read", "whole")


@dataclass(frozen=True)
class Slot:
    """A number that the plan or the run fills in.

    ``begin``, ``end``: the piece's half-open range; ``piece``: its number; ``counter``: the number
    of the forward pass, for random numbers; ``accumulate``: 1.0 where the parameter diff `of`
    must be added to, 0.0 where it must be overwritten; any other name: a value of the solver.
    """

    name: str
    of: Buffer | None = None


BEGIN, END, PIECE, COUNTER = Slot("begin"), Slot("end"), Slot("piece"), Slot("counter")

Argument = Use | Slot | int | float


@dataclass(eq=False)
class Step:
    """One kernel laid over an axis of `extent` units, as a list of arguments.

    Attributes
    ----------
    kernel : Kernel or callable
        A compiled kernel, or a Python function that gets the arrays (as NumPy views) and numbers;
        such a step runs as one task that takes the GIL.
    arguments : list
        One for each kernel argument: a `Use`, a `Slot`, an int or a float.
    extent : int
        Length of the axis that may be cut; 1 for a step that must stay whole.
    cost : float
        Estimated nanoseconds a unit on one core; decides how many pieces there are.
    explain : callable, optional
        Turns a non-zero status of the kernel into the error that the user sees.
    merge : callable, optional
        Given the one step that needs what this one writes: returns the one that does both and
        writes only what that one does, if there is one.
    """

    kernel: Kernel | Callable[..., None]
    arguments: Sequence[Argument]
    extent: int = 1
    cost: float = 1e3
    explain: Callable[[int], CgdnnError] | None = None
    merge: Callable[[Step], Step | None] | None = None


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer: its shape, and the filler that starts it (None: zeros).

    One that is not `learned` (BatchNorm's statistics) has no diff and no update, whatever its
    ``lr_mult``.
    """

    shape: Shape
    filler: FillerParameter | None = None
    learned: bool = True


@dataclass(eq=False)
class Operands:
    """The buffers that one layer works on, given to its passes by the plan.

    Attributes
    ----------
    bottom, top, bottom_diff, top_diff : list of Buffer
        In the layouts that the chosen candidate asked for.
    param, param_diff : list of Buffer
    propagate : list of bool
        For each bottom, whether its diff is wanted.
    top_wanted : list of bool
        For each top, whether anything writes its diff (a Split sums only those).
    learn : list of bool
        For each parameter, whether its diff is wanted.
    key : int
        The key of this layer's random numbers (from the seed and the layer's name).
    routed : (Buffer, Buffer), optional
        For a routed candidate: the diff of the reader's top, and its route (see `Layer.reader`).
    followers : sequence of Operands
        Those of the layers whose passes these steps include (see `Layer.absorbs`); none where they
        run on their own.
    """

    bottom: list[Buffer]
    top: list[Buffer]
    bottom_diff: list[Buffer]
    top_diff: list[Buffer]
    param: list[Buffer]
    param_diff: list[Buffer]
    propagate: list[bool]
    top_wanted: list[bool]
    learn: list[bool]
    key: int
    routed: tuple[Buffer, Buffer] | None = None
    followers: Sequence[Operands] = ()
    _states: dict[str, Buffer] = field(default_factory=dict)
    _prefix: str = ""

    def state(self, name: str, shape: Shape, dtype: str = "real") -> Buffer:
        """Return the layer's own memory `name`, which keeps its content from pass to pass."""
        return state_of(self._states, self._prefix, name, shape, dtype)

    def constant(self, name: str, values: npt.NDArray[Any]) -> Buffer:
        """Return memory that holds these values; no step may write it."""
        if name not in self._states:
            self._states[name] = Buffer(
                f"{self._prefix}.{name}", values.shape, str(values.dtype), "state", values=values
            )
        return self._states[name]

    def partial(self, name: str, shape: Shape, dtype: str = "real") -> Buffer:
        """Return memory with one row of `shape` for each piece of the step that writes it."""
        return Buffer(f"{self._prefix}.{name}", shape, dtype, "partial")

    def temporary(self, name: str, shape: Shape, dtype: str = "real") -> Buffer:
        """Return memory that carries values between the steps of one pass."""
        return Buffer(f"{self._prefix}.{name}", shape, dtype, "temporary")

    def scratch(self, name: str, shape: Shape, dtype: str = "real") -> Use:
        """Return memory private to the worker that runs the piece, with undefined content."""
        return Use(Buffer(f"{self._prefix}.{name}", shape, dtype, "scratch"), "write", "whole")

    def accumulate(self, index: int) -> Slot | float:
        """Return 1.0 where the diff of parameter `index` must be added to, 0.0 where replaced.

        A temporary in place of the diff is always replaced.
        """
        diff = self.param_diff[index]
        return 0.0 if diff.kind == "temporary" else Slot("accumulate", diff)

    def gradient(self, index: int, shape: Shape) -> Use:
        """Return the diff of parameter `index`, to be added to or replaced (see `accumulate`)."""
        diff = self.param_diff[index]
        return (write if diff.kind == "temporary" else update)(diff, shape)


def state_of(states: dict[str, Buffer], layer: str, name: str, shape: Shape, dtype: str) -> Buffer:
    """Return the memory `name` among a layer's states, made on first use."""
    if name not in states:
        states[name] = Buffer(f"{layer}.{name}", shape, dtype, "state")
    return states[name]


class Slower(str):
    """A reason not to use a candidate that could serve: by estimate, another one is faster.

    A measurement goes before the estimate.
    """


@dataclass(frozen=True)
class Candidate:
    """One way to run a pass: a name, the layouts that it needs, when it cannot serve, its steps.

    Attributes
    ----------
    name : str
        The variant, such as ``unfold_gemm``.
    steps : callable(layer, Operands) -> list of Step
    refuse : callable(layer) -> str or None
        A reason why this layer cannot (or, if it is `Slower`, should not) use the candidate.
    layouts : tuple of (str, str)
        Those that it can work in, each as the layout in which it wants every bottom and the one in
        which it gives every top (and their diffs): "nchw" or another that `cgdnn.plan.layout`
        knows. The plan chooses one.
    routed : bool
        Whether it takes `Operands.routed` in place of the diff of the top.
    """

    name: str
    steps: Callable[[Any, Operands], list[Step]]
    refuse: Callable[[Any], str | None] = lambda layer: None
    layouts: tuple[Pair, ...] = (("nchw", "nchw"),)
    routed: bool = False

    def serves(self, layer: Layer) -> bool:
        """Tell whether this layer can use the candidate, however fast that is."""
        reason = self.refuse(layer)
        return reason is None or isinstance(reason, Slower)


@dataclass(frozen=True)
class Count:
    """How many bottoms or tops a layer takes: from `least` to `most` (None: no limit)."""

    least: int
    most: int | None

    def __str__(self) -> str:
        if self.most is None:
            return f"at least {self.least}"
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


def exactly(count: int) -> Count:
    """Return a count with one value."""
    return Count(count, count)


class Layer:
    """Base of every layer; a subclass's name is the layer's type string.

    A subclass sets the class attributes, reads and checks its parameters in `setup`, and answers
    with shapes and steps. Its docstring is its documentation page: the formula, the parameter
    fields, what Caffe does, where the rule comes from.
    """

    bottoms: ClassVar[Count] = exactly(1)
    tops: ClassVar[Count] = exactly(1)
    in_place: ClassVar[bool] = False
    """Whether top 0 may be bottom 0 itself."""
    is_loss: ClassVar[bool] = False
    """Whether top 0 has loss weight 1 when none is given."""
    no_gradient: ClassVar[tuple[int, ...]] = ()
    """Bottoms that can have no gradient, such as labels."""
    differentiable: ClassVar[bool] = True
    """Whether the layer has a backward pass at all (Accuracy and data layers have none)."""
    shares: ClassVar[tuple[str, ...]] = ()
    """What the tops share with bottom 0 instead of copying it: "data" (Split), also "diff"
    (Flatten). The plan makes the tops' buffers aliases."""
    reads_data: ClassVar[bool] = False
    """Whether the layer reads records (see `DataLayer`)."""

    exact: bool = False
    """Whether kernels must round no worse than sums of products do (see `cgdnn.Net`)."""
    zeros: float = 0.0
    """Share of exact zeros in the diff of top 0, as last counted; kernels that skip them ask."""
    reader: Layer | None = None
    """The only layer that reads top 0, where there is just one and not in place."""

    def __init__(self, node: Node, phase: str) -> None:
        self.node = node
        self.phase = phase
        self.bottom_shapes: list[Shape] = []
        self.top_shapes: list[Shape] = []
        self.warnings: list[str] = []
        self.setup()

    def setup(self) -> None:
        """Read and check the layer's parameter fields (no shapes are known yet)."""

    def absorbs(self, followers: Sequence[Layer]) -> int:
        """Return how many of the layers behind it, all in place on top 0, its steps can include.

        They then have no steps of their own, unless a program begins or ends between them.
        """
        return 0

    def route(self, layout: str) -> str | None:
        """Return the state that says where each gradient of top 0 goes, to one place of the bottom.

        It is int32 in the shape of the top's memory in this layout, filled by the forward pass: a
        place in the bottom's plane of the same image and channel.
        """
        return None

    def infer_shapes(self, bottoms: list[Shape]) -> list[Shape]:
        """Return the shapes of the tops; check the bottoms and remember what the steps need."""
        raise NotImplementedError

    def parameters(self) -> list[Parameter]:
        """Return the learned parameters (called after `infer_shapes`)."""
        return []

    def doubt(self, params: Sequence[npt.NDArray[Any]]) -> str | None:
        """Return why scores are worth nothing with these parameter values, or None."""
        return None

    def multiply_adds(self) -> int:
        """Return the multiply-adds of one forward pass over the whole batch."""
        return 0

    def forward(self, operands: Operands) -> list[Step]:
        """Return the steps that compute the tops."""
        raise NotImplementedError

    def backward_data(self, operands: Operands) -> list[Step]:
        """Return the steps that write every wanted bottom diff (never add to it)."""
        raise NotImplementedError

    def backward_weights(self, operands: Operands) -> list[Step]:
        """Return the steps that write or add to every wanted parameter diff.

        They run before `backward_data`, which may overwrite an in-place top diff.
        """
        return []

    def candidates(self, which: str) -> list[Candidate]:
        """Return the ways to run pass `which`, fastest first; the last one never refuses."""
        return [Candidate("plain", lambda layer, operands: getattr(layer, which)(operands))]

    def error(self, text: str, *fields: str) -> DescriptionError:
        """Return the error that names the place of `fields` in the file and this layer."""
        return DescriptionError(f"{self.node.at(*fields)}: {self.node.label}: {text}")


class DataLayer(Layer):
    """Base of the layers that read records: they have a position that a snapshot keeps.

    Attributes
    ----------
    without_data : bool
        Set before `infer_shapes` where nothing may be read (`cgdnn summary`, `cgdnn plan`); shapes
        then come from `shape_hint` or from the fields (crop_size, count of mean values).
    shape_hint : tuple of int or None
        Shape of one sample, as given by ``--shape data=3,227,227``.
    position : int
        Records consumed so far; setting it makes the next forward pass begin there.
    """

    bottoms = exactly(0)
    differentiable = False
    reads_data = True
    without_data: bool = False
    shape_hint: Shape | None = None

    @property
    def position(self) -> int:
        """Records consumed by the forward passes so far."""
        raise NotImplementedError

    @property
    def records(self) -> int:
        """Records that the source holds; an epoch."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """Records that one forward pass consumes."""
        raise NotImplementedError

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that records have taken so far, by stage; last "wait", of forward passes."""
        raise NotImplementedError

    def seek(self, position: int) -> None:
        """Let the next forward pass begin after `position` records."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop reading ahead and close the files."""
