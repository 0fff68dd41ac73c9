"""Turn a graph into layers, blobs and parameters with shapes, and decide what backward needs.

This is the first step of planning: nothing is allocated and no data is read beyond what a data
layer needs to know its shapes. The rules of which diffs are wanted are those of Caffe's
``Net::Init`` (net.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from cgdnn.errors import DescriptionError
from cgdnn.layers._base import Buffer, DataLayer, Layer, Parameter, Shape
from cgdnn.layers._fillers import check_filler_fits
from cgdnn.layers._registry import make_layer
from cgdnn.netdef.graph import Graph, Node
from cgdnn.proto.cgdnn_pb2 import ParamSpec


@dataclass(eq=False)
class PlannedBlob:
    """A blob with its shape and its homes: one data and one diff buffer for each layout."""

    name: str
    shape: Shape
    homes: dict[tuple[str, str], Buffer] = field(default_factory=dict)
    wants_diff: bool = False
    """Whether a backward pass writes this blob's diff (or the user gives it, for an output)."""

    @property
    def data(self) -> Buffer:
        """The buffer of the values in N, C, H, W order."""
        return self.homes["data", "nchw"]

    @property
    def diff(self) -> Buffer:
        """The buffer of the gradient in N, C, H, W order."""
        return self.homes["diff", "nchw"]


@dataclass(eq=False)
class PlannedParam:
    """A parameter: the layer that owns it, its buffers and its learning rates."""

    layer: str
    index: int
    name: str
    """Name under which it is shared, or empty."""
    declared: Parameter
    data: Buffer
    diff: Buffer
    spec: ParamSpec
    """Its own copy, with what the layers that share it say."""

    @property
    def lr_mult(self) -> float:
        """What the solver's rate is multiplied by."""
        return self.spec.lr_mult

    @property
    def decay_mult(self) -> float:
        """What the solver's weight decay is multiplied by."""
        return self.spec.decay_mult

    @property
    def label(self) -> str:
        """How messages name it, such as ``conv1[0]``."""
        return f"{self.layer}[{self.index}]"

    @property
    def learns(self) -> bool:
        """Whether the solver updates it."""
        return self.declared.learned and self.lr_mult != 0


@dataclass(eq=False)
class PlannedLayer:
    """A layer in its net: which blobs and parameters it uses and which diffs are wanted of it."""

    layer: Layer
    node: Node
    params: list[int]
    views: list[tuple[Buffer, Buffer]]
    """Data and diff buffer of each parameter, in this layer's own shape of it."""
    loss_weights: list[float]
    propagate: list[bool] = field(default_factory=list)
    needs_backward: bool = False
    states: dict[str, Buffer] = field(default_factory=dict)
    """The layer's own memory, shared by its passes."""
    reader: int | None = None
    """Index of the only layer that reads top 0, where there is just one and not in place."""
    absorbed: list[int] = field(default_factory=list)
    """Indices of the layers whose passes its own can include (see `Layer.absorbs`)."""

    @property
    def learns(self) -> bool:
        """Whether any of its parameters could have a gradient."""
        return bool(self.params) and self.layer.differentiable


@dataclass(eq=False)
class Assembly:
    """A net with all shapes known."""

    graph: Graph
    layers: list[PlannedLayer]
    blobs: list[PlannedBlob]
    params: list[PlannedParam]
    """Every parameter once; a shared one stands where its owner is."""
    warnings: list[str]

    @property
    def learned(self) -> list[int]:
        """Indices of the parameters that a solver updates."""
        return [i for i, param in enumerate(self.params) if param.learns]

    def lendable(self) -> set[tuple[int, str]]:
        """Return the blobs and kinds ("data", "diff") whose memory a program may reuse.

        All but what a net is fed with and asked for: values that no layer computes from others,
        outputs and losses. And, with kind "param_diff", the learned parameters whose gradient need
        not be kept.
        """
        kept = {(blob, kind) for blob in self.graph.outputs for kind in ("data", "diff")}
        for planned in self.layers:
            for top, weight in zip(planned.node.tops, planned.loss_weights, strict=True):
                if weight:
                    kept |= {(top, "data"), (top, "diff")}
                if not planned.node.bottoms:
                    kept.add((top, "data"))
        everything = {(blob, kind) for blob in range(len(self.blobs)) for kind in ("data", "diff")}
        return everything - kept | {(index, "param_diff") for index in self.learned}


def assemble(
    graph: Graph,
    *,
    shape_hints: Mapping[str, Shape] | None = None,
    without_data: bool = False,
    input_shapes: Mapping[str, Shape] | None = None,
    exact: bool = False,
) -> Assembly:
    """Make the layers of `graph`, infer every shape and decide which diffs are wanted.

    Parameters
    ----------
    graph : Graph
    shape_hints : mapping, optional
        Data layer top -> shape of one sample, where the description does not tell.
    without_data : bool
        Read no data; shapes come from the description and the hints.
    input_shapes : mapping, optional
        Blob name -> shape that replaces what an Input layer declares (`Net.reshape`).
    exact : bool
        Forbid kernels that round worse than sums of products.

    Raises
    ------
    DescriptionError
        A layer refuses its fields, bottoms or shapes.
    """
    layers: list[PlannedLayer] = []
    blobs: list[PlannedBlob | None] = [None] * len(graph.blobs)
    params: list[PlannedParam] = []
    shared: dict[str, int] = {}
    warnings = list(graph.warnings)
    for node in graph.nodes:
        layer = make_layer(node, graph.phase)
        layer.exact = exact
        _check_counts(layer, node, graph)
        if isinstance(layer, DataLayer):
            layer.without_data = without_data
            hints = shape_hints or {}
            named = (graph.blobs[top].name for top in node.tops)
            layer.shape_hint = next((hints[name] for name in named if name in hints), None)
        bottoms = [_made(blobs[i]) for i in node.bottoms]
        layer.bottom_shapes = [blob.shape for blob in bottoms]
        layer.top_shapes = layer.infer_shapes(layer.bottom_shapes)
        if node.type == "Input" and input_shapes:
            layer.top_shapes = [
                input_shapes.get(graph.blobs[top].name, shape)
                for top, shape in zip(node.tops, layer.top_shapes, strict=True)
            ]
        for position, (top, shape) in enumerate(zip(node.tops, layer.top_shapes, strict=True)):
            if top in node.bottoms:
                continue
            blobs[top] = _make_blob(graph.blobs[top].name, shape, layer, position, bottoms)
        indices = _add_params(layer, node, params, shared)
        views = [
            _view(params[index], declared.shape)
            for index, declared in zip(indices, layer.parameters(), strict=True)
        ]
        layers.append(PlannedLayer(layer, node, indices, views, _loss_weights(layer, node)))
        warnings += layer.warnings
    assembly = Assembly(graph, layers, [_made(blob) for blob in blobs], params, warnings)
    _decide_backward(assembly)
    _find_readers(assembly)
    _find_absorbed(assembly)
    return assembly


def _made(blob: PlannedBlob | None) -> PlannedBlob:
    assert blob is not None, "graph nodes are in topological order"
    return blob


def _check_counts(layer: Layer, node: Node, graph: Graph) -> None:
    for word, count, given in (
        ("bottom", layer.bottoms, node.bottoms),
        ("top", layer.tops, node.tops),
    ):
        if len(given) < count.least or (count.most is not None and len(given) > count.most):
            needs = (layer.__doc__ or "").partition("\n")[0]
            raise layer.error(
                f"got {len(given)} {word} blob(s), expected {count}. {_wanted(layer, word)}{needs}"
            )
    repeated = [top for top in node.tops if top in node.bottoms]
    if repeated and not layer.in_place:
        raise layer.error(
            f'cannot run in place on "{graph.blobs[repeated[0]].name}": its backward pass needs '
            "the bottom unchanged. Give the top another name."
        )


def _wanted(layer: Layer, word: str) -> str:
    if word == "bottom" and layer.is_loss and layer.no_gradient:
        return "It needs scores, labels. "
    return ""


def _make_blob(
    name: str, shape: Shape, layer: Layer, position: int, bottoms: list[PlannedBlob]
) -> PlannedBlob:
    blob = PlannedBlob(name, shape)
    for kind in ("data", "diff"):
        alias = bottoms[0].homes[kind, "nchw"] if kind in layer.shares else None
        label = name if kind == "data" else f"{name}.diff"
        blob.homes[kind, "nchw"] = Buffer(label, shape, kind=kind, alias=alias)
    return blob


def _add_params(
    layer: Layer, node: Node, params: list[PlannedParam], shared: dict[str, int]
) -> list[int]:
    declared = layer.parameters()
    if not node.name and (declared or layer.reads_data):
        raise layer.error(
            "has no name, but snapshots keep its weights or its position under one. Give it one."
        )
    specs = list(node.param.param)
    if len(specs) > len(declared):
        raise layer.error(
            f"got {len(specs)} param entries, expected at most {len(declared)}, one for each "
            "parameter blob. Remove the last ones.",
            "param",
        )
    indices = []
    for index, parameter in enumerate(declared):
        spec = ParamSpec()
        if index < len(specs):
            spec.CopyFrom(specs[index])
        if parameter.filler is not None:
            check_filler_fits(node, parameter.filler, parameter.shape)
        if spec.name and spec.name in shared:
            owner = params[shared[spec.name]]
            _check_shared(layer, owner, parameter, spec)
            indices.append(shared[spec.name])
            continue
        label = f"{node.name}[{index}]"
        indices.append(len(params))
        if spec.name:
            shared[spec.name] = len(params)
        params.append(
            PlannedParam(
                node.name,
                index,
                spec.name,
                parameter,
                Buffer(label, parameter.shape, kind="param"),
                Buffer(f"{label}.diff", parameter.shape, kind="param_diff"),
                spec,
            )
        )
    return indices


def _view(param: PlannedParam, shape: Shape) -> tuple[Buffer, Buffer]:
    """Return the buffers of a parameter in `shape`, which permissive sharing may change."""
    if param.declared.shape == shape:
        return param.data, param.diff
    data, diff = (
        Buffer(buffer.name, shape, kind=buffer.kind, alias=buffer)
        for buffer in (param.data, param.diff)
    )
    return data, diff


def _check_shared(layer: Layer, owner: PlannedParam, parameter: Parameter, spec: ParamSpec) -> None:
    permissive = spec.share_mode == ParamSpec.PERMISSIVE
    same = (
        prod(owner.declared.shape) == prod(parameter.shape)
        if permissive
        else owner.declared.shape == parameter.shape
    )
    if not same:
        raise layer.error(
            f'parameter "{spec.name}" is shared with layer "{owner.layer}"; got shape '
            f"{parameter.shape}, expected {owner.declared.shape}. Make both layers alike, or give "
            "the parameter another name.",
            "param",
        )
    for name in ("lr_mult", "decay_mult"):
        if spec.HasField(name):
            mine, theirs = getattr(spec, name), getattr(owner.spec, name)
            if owner.spec.HasField(name) and mine != theirs:
                raise layer.error(
                    f'shared parameter "{spec.name}" has {name} {mine:g}, but {theirs:g} in layer '
                    f'"{owner.layer}". Give it in one place only.',
                    "param",
                )
            setattr(owner.spec, name, mine)


def _loss_weights(layer: Layer, node: Node) -> list[float]:
    given = list(node.param.loss_weight)
    if given and len(given) != len(node.tops):
        raise layer.error(
            f"got {len(given)} loss_weight values, expected one for each of {len(node.tops)} tops. "
            "Give 0 for the tops that are no loss.",
            "loss_weight",
        )
    if given:
        return given
    return [1.0 if layer.is_loss and i == 0 else 0.0 for i in range(len(node.tops))]


def _decide_backward(assembly: Assembly) -> None:
    """Decide for each layer and bottom whether backward is wanted, as Caffe's Net::Init does."""
    graph = assembly.graph
    from_below = [False] * len(assembly.blobs)  # something below has a gradient
    for planned in assembly.layers:
        layer, node = planned.layer, planned.node
        asked = list(node.param.propagate_down)
        if asked and len(asked) != len(node.bottoms):
            raise layer.error(
                f"got {len(asked)} propagate_down values, expected one for each of "
                f"{len(node.bottoms)} bottoms. Give all or none.",
                "propagate_down",
            )
        planned.propagate = [
            layer.differentiable
            and i not in layer.no_gradient
            and (asked[i] if asked else from_below[blob])
            for i, blob in enumerate(node.bottoms)
        ]
        learns = any(assembly.params[i].learns for i in planned.params)
        planned.needs_backward = layer.differentiable and (
            learns or any(from_below[blob] for blob in node.bottoms)
        )
        for top in node.tops:
            from_below[top] = planned.needs_backward
    under_loss: set[int] = set()
    skipped: set[int] = set()
    for planned in reversed(assembly.layers):
        tops, bottoms = planned.node.tops, planned.node.bottoms
        contributes = any(
            weight != 0 or top in under_loss
            for top, weight in zip(tops, planned.loss_weights, strict=True)
        )
        if planned.needs_backward and tops and all(top in skipped for top in tops):
            planned.needs_backward = False
            planned.propagate = [False] * len(bottoms)
        if not contributes:
            planned.needs_backward = False
            planned.propagate = [False] * len(bottoms)
        for bottom, wanted in zip(bottoms, planned.propagate, strict=True):
            if contributes:
                under_loss.add(bottom)
            if not wanted:
                skipped.add(bottom)
    if graph.force_backward:
        for planned in assembly.layers:
            layer = planned.layer
            planned.needs_backward = layer.differentiable
            planned.propagate = [
                layer.differentiable and i not in layer.no_gradient
                for i in range(len(planned.node.bottoms))
            ]
    for planned in assembly.layers:
        for top, weight in zip(planned.node.tops, planned.loss_weights, strict=True):
            if weight != 0 or top in graph.outputs:
                assembly.blobs[top].wants_diff |= planned.needs_backward
        if planned.needs_backward:
            for bottom, wanted in zip(planned.node.bottoms, planned.propagate, strict=True):
                assembly.blobs[bottom].wants_diff |= wanted


def _find_readers(assembly: Assembly) -> None:
    readers: dict[int, list[int]] = {}
    for index, planned in enumerate(assembly.layers):
        for bottom in planned.node.bottoms:
            readers.setdefault(bottom, []).append(index)
    for planned in assembly.layers:
        top = planned.node.tops[0] if planned.node.tops else None
        if top is None or len(readers.get(top, [])) != 1 or planned.loss_weights[0]:
            continue
        reader = assembly.layers[readers[top][0]]
        if top not in reader.node.tops:
            planned.reader, planned.layer.reader = readers[top][0], reader.layer


def _find_absorbed(assembly: Assembly) -> None:
    """Ask each layer which of those behind it, in place one after the other, it absorbs."""
    for index, planned in enumerate(assembly.layers):
        followers: list[int] = []
        for other in range(index + 1, len(assembly.layers)):
            node = assembly.layers[other].node
            if planned.node.tops[:1] != node.bottoms or node.bottoms != node.tops:
                break
            followers.append(other)
        if followers and all(planned.propagate):
            count = planned.layer.absorbs([assembly.layers[other].layer for other in followers])
            planned.absorbed = followers[:count]


def check_gradients_possible(assembly: Assembly) -> None:
    """Refuse a net that cannot be trained: one without a loss.

    Raises
    ------
    DescriptionError
        No top has a loss weight.
    """
    if not any(weight for planned in assembly.layers for weight in planned.loss_weights):
        raise DescriptionError(
            f"{assembly.graph.filename}: the net has no loss to train with. "
            'Add a loss layer such as "SoftmaxWithLoss", or a loss_weight.'
        )
