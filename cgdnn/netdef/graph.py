"""Connect the layers of a net by its blobs.

The graph is the one that Caffe builds (``Net::Init`` and ``insert_splits.cpp``): layers in the
order of the file, a Split layer after every blob that has several consumers, so that each blob
has one, and the sum of gradients a place. Shapes and layer types come later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cgdnn.errors import DescriptionError
from cgdnn.netdef.rules import select_layers
from cgdnn.netdef.text import Located, nearest
from cgdnn.proto import cgdnn_pb2 as pb

# A top, or the use of one: (index of the layer among the selected ones, index in its list).
_Slot = tuple[int, int]


@dataclass
class Blob:
    """An array that flows between nodes.

    Attributes
    ----------
    producer
        Index of the node that makes it. Nodes that change it in place are among its consumers.
    consumers
        (node, bottom index) of every reader, in order.
    """

    name: str
    producer: int
    consumers: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Node:
    """A layer in a graph.

    Attributes
    ----------
    param
        The layer's description, its own copy.
    bottoms, tops
        Indices into `Graph.blobs`. A layer that works in place has the same index in both.
    source
        The net that the layer was read from.
    index
        The layer's index in ``source.message.layer``; for a Split that of the layer it follows.
    """

    name: str
    type: str
    param: pb.LayerParameter
    bottoms: tuple[int, ...]
    tops: tuple[int, ...]
    source: Located = field(repr=False)
    index: int

    def at(self, *fields: str | int) -> str:
        """Return ``file:line:col`` of a field of this layer; without `fields`, of the layer."""
        return self.source.where("layer", self.index, *fields)

    @property
    def bottom_names(self) -> list[str]:
        """The bottoms as the description names them; `param` may name tops of Splits instead."""
        return list(self.source.message.layer[self.index].bottom)

    @property
    def label(self) -> str:
        """The layer as messages name it: ``layer "conv1" (Convolution)``."""
        return _label(self.param)


@dataclass
class Graph:
    """A net as one phase, level and set of stages sees it.

    Attributes
    ----------
    nodes
        In an order that can be run.
    blobs
        In the order of their producers.
    inputs
        Indices of the blobs that Input layers make, which the user fills.
    outputs
        Indices of the blobs whose last value no node reads, by name: Caffe's order.
    warnings
        Texts to show to the user.
    """

    name: str
    phase: str
    level: int
    stages: tuple[str, ...]
    filename: str
    nodes: list[Node]
    blobs: list[Blob]
    inputs: list[int]
    outputs: list[int]
    force_backward: bool
    warnings: list[str]

    def message(self) -> pb.NetParameter:
        """Return the net as Caffe stores it with weights: selected layers, Splits included."""
        return pb.NetParameter(name=self.name, layer=[node.param for node in self.nodes])


def build_graph(net: Located, phase: str, level: int = 0, stages: Sequence[str] = ()) -> Graph:
    """Build the graph of `net` for one state.

    Parameters
    ----------
    net
        As `read_net` returns it.
    phase
        ``"TRAIN"`` or ``"TEST"``.
    level, stages
        What rules are compared with; `stages` add to those in the net's own `state`.

    Raises
    ------
    DescriptionError
        A bottom that nothing produces before it, a top that two layers produce, two layers of one
        name (in TRAIN), `propagate_down` or `loss_weight` of a wrong length, a layer without type,
        or rules that contradict each other.
    """
    all_stages = tuple(dict.fromkeys((*net.message.state.stage, *stages)))
    return _Builder(net, phase, level, all_stages).build()


def _label(layer: Any) -> str:
    return f'layer "{layer.name}" ({layer.type})'


class _Builder:
    """The selected layers, and the graph so far; `_available` are the blobs not read yet."""

    def __init__(self, net: Located, phase: str, level: int, stages: tuple[str, ...]) -> None:
        self._net = net
        self._selected = select_layers(net, phase, level, stages)
        self._layers = [net.message.layer[index] for index in self._selected]
        self._blob_of_name: dict[str, int] = {}
        self._available: set[str] = set()
        self._graph = Graph(
            name=net.message.name,
            phase=phase,
            level=level,
            stages=stages,
            filename=net.filename,
            nodes=[],
            blobs=[],
            inputs=[],
            outputs=[],
            force_backward=net.message.force_backward,
            warnings=list(net.warnings),
        )

    def build(self) -> Graph:
        self._check_layers()
        sources, uses = self._connect()
        splits_taken: dict[_Slot, int] = defaultdict(int)
        for i, (index, layer) in enumerate(zip(self._selected, self._layers, strict=True)):
            param = pb.LayerParameter()
            param.CopyFrom(layer)
            for j, name in enumerate(layer.bottom):
                source = sources[i, j]
                if uses[source] > 1:
                    split = _split_name(self._layers[source[0]].name, name, source[1])
                    param.bottom[j] = f"{split}_{splits_taken[source]}"
                    splits_taken[source] += 1
            splits = []
            for j, name in enumerate(layer.top):
                if uses[i, j] > 1:
                    weight = layer.loss_weight[j] if layer.loss_weight else 0.0
                    splits.append(_split_layer(layer.name, name, j, uses[i, j], weight))
                    if weight:
                        # Caffe clears all weights here, so a loss layer's default of 1 comes back
                        # and other tops lose theirs.
                        param.loss_weight[j] = 0
                        splits_taken[i, j] += 1
            self._add_node(param, index)
            for split_param in splits:
                self._add_node(split_param, index)
        outputs = sorted(self._available, key=str.encode)
        self._graph.outputs = [self._blob_of_name[name] for name in outputs]
        return self._graph

    def _check_layers(self) -> None:
        """Check every selected layer by itself, and their names."""
        graph = self._graph
        if not self._layers:
            raise DescriptionError(
                f"{graph.filename}: {self._state()} leaves the net no layers. Check its rules."
            )
        first_of_name: dict[str, int] = {}
        for index, layer in zip(self._selected, self._layers, strict=True):
            where = self._net.where("layer", index)
            if not layer.type:
                raise DescriptionError(f'{where}: layer "{layer.name}" has no type. Add one.')
            tops = 1 if _makes_automatic_top(layer) else len(layer.top)
            for name, expected in (("propagate_down", len(layer.bottom)), ("loss_weight", tops)):
                given = len(getattr(layer, name))
                if given not in (0, expected):
                    raise DescriptionError(
                        f"{self._net.where('layer', index, name)}: {_label(layer)} has {given} "
                        f"{name}, expected none or {expected}, one for each "
                        f"{'bottom' if name == 'propagate_down' else 'top'}."
                    )
            first = first_of_name.setdefault(layer.name, index)
            if first != index and layer.name:
                text = (
                    f"{self._net.where('layer', index, 'name')}: {_label(layer)} has the name of "
                    f"the layer at {self._net.where('layer', first)}; weights are kept by name. "
                    "Rename one."
                )
                if graph.phase == "TRAIN":
                    raise DescriptionError(text)
                graph.warnings.append(text)

    def _connect(self) -> tuple[dict[_Slot, _Slot], dict[_Slot, int]]:
        """Return which top every bottom reads, and how often every top is used.

        A loss weight counts as a use, as it puts a gradient on the top.
        """
        sources: dict[_Slot, _Slot] = {}
        uses: dict[_Slot, int] = defaultdict(int)
        last: dict[str, _Slot] = {}
        for i, layer in enumerate(self._layers):
            for j, name in enumerate(layer.bottom):
                if name not in last:
                    raise self._unknown_bottom(i, j)
                sources[i, j] = last[name]
                uses[last[name]] += 1
            for j, name in enumerate(layer.top):
                in_place = j < len(layer.bottom) and layer.bottom[j] == name
                if name in last and not in_place:
                    raise self._top_error(i, j, last[name])
                last[name] = i, j
                uses[i, j] += j < len(layer.loss_weight) and layer.loss_weight[j] != 0
        for (i, j), source in sources.items():
            layer = self._layers[i]
            if uses[source] > 1 and j < len(layer.top) and layer.top[j] == layer.bottom[j]:
                others = [slot for slot, read in sources.items() if read == source and slot[0] != i]
                raise self._in_place_error(i, j, others)
        return sources, uses

    def _add_node(self, param: pb.LayerParameter, index: int) -> None:
        """Append a node for `param`, the layer at `index` or a Split after it."""
        graph = self._graph
        number = len(graph.nodes)
        if not param.HasField("phase"):
            param.MergeFrom(pb.LayerParameter(phase=graph.phase))
        bottoms = tuple(self._blob_of_name[name] for name in param.bottom)
        for position, blob in enumerate(bottoms):
            graph.blobs[blob].consumers.append((number, position))
        self._available.difference_update(param.bottom)
        tops = []
        for name in param.top:
            if name not in param.bottom:
                self._blob_of_name[name] = len(graph.blobs)
                graph.blobs.append(Blob(name, number))
            tops.append(self._blob_of_name[name])
        self._available.update(param.top)
        if _makes_automatic_top(param):
            tops.append(len(graph.blobs))
            graph.blobs.append(Blob(f"{param.name} (automatic)", number))
        if param.type == "Input":
            graph.inputs.extend(tops)
        graph.nodes.append(
            Node(param.name, param.type, param, bottoms, tuple(tops), self._net, index)
        )

    # Messages

    def _state(self) -> str:
        graph = self._graph
        level = f", level {graph.level}" if graph.level else ""
        stages = f", stages {' '.join(graph.stages)}" if graph.stages else ""
        return f"phase {graph.phase}{level}{stages}"

    def _where(self, i: int, *fields: str | int) -> str:
        return self._net.where("layer", self._selected[i], *fields)

    def _unknown_bottom(self, i: int, j: int) -> DescriptionError:
        name = self._layers[i].bottom[j]
        text = (
            f"{self._where(i, 'bottom', j)}: {_label(self._layers[i])} has the unknown bottom "
            f'"{name}"'
        )
        for later in range(i + 1, len(self._layers)):
            if _makes(self._layers[later], name):
                line = self._net.place.at("layer", self._selected[later]).line
                at = f", line {line}" if line else ""
                return DescriptionError(
                    f"{text}: it is produced later{at}, by {_label(self._layers[later])}. "
                    "Move that layer up."
                )
        for index, layer in enumerate(self._net.message.layer):
            if index not in self._selected and _makes(layer, name):
                return DescriptionError(
                    f"{text} in {self._state()}: it is produced only {_condition(layer)}, by "
                    f"{_label(layer)} at {self._net.where('layer', index)}. Add a layer that "
                    "produces it here, or leave this one out."
                )
        produced = dict.fromkeys(top for layer in self._layers[:i] for top in layer.top)
        guess = nearest(name, produced)
        if guess:
            return DescriptionError(f"{text} - did you mean '{guess}'?")
        known = ", ".join(f'"{top}"' for top in list(produced)[-5:])
        return DescriptionError(f"{text}: no layer produces it. Before it are {known or 'none'}.")

    def _top_error(self, i: int, j: int, first: _Slot) -> DescriptionError:
        layer = self._layers[i]
        return DescriptionError(
            f'{self._where(i, "top", j)}: {_label(layer)} produces "{layer.top[j]}", which '
            f"{_label(self._layers[first[0]])} at {self._where(first[0])} produces already. "
            "Rename one of the tops; in place, a top takes the position of its bottom."
        )

    def _in_place_error(self, i: int, j: int, others: list[_Slot]) -> DescriptionError:
        layer = self._layers[i]
        reader = (
            f"{_label(self._layers[others[0][0]])} at {self._where(others[0][0])} reads it too"
            if others
            else "it is used otherwise too"
        )
        return DescriptionError(
            f"{self._where(i, 'top', j)}: {_label(layer)} works in place on "
            f'"{layer.bottom[j]}", but {reader}. Give it a top of its own.'
        )


def _makes(layer: Any, blob: str) -> bool:
    """Tell whether `blob` can come from `layer`: a top that is no changed bottom."""
    return blob in layer.top and blob not in layer.bottom


def _makes_automatic_top(layer: Any) -> bool:
    """Tell whether the layer gets a top that its description leaves out.

    Losses do (Caffe: ``AutoTopBlobs``); that top is never an output.
    """
    return layer.type.endswith("Loss") and not layer.top


def _condition(layer: Any) -> str:
    """Describe when the rules of `layer` let it in."""
    rules = layer.include or layer.exclude
    phases = {pb.Phase.Name(rule.phase) for rule in rules if rule.HasField("phase")}
    if layer.exclude:
        phases = {"TRAIN", "TEST"} - phases
    if len(phases) == 1:
        return f"in phase {phases.pop()}"
    return "where its rules let it in"


def _split_name(layer: str, blob: str, top: int) -> str:
    return f"{blob}_{layer}_{top}_split"


def _split_layer(
    layer: str, blob: str, top: int, count: int, loss_weight: float
) -> pb.LayerParameter:
    """Return the Split that copies a top `count` times; a loss weight moves to its first top."""
    name = _split_name(layer, blob, top)
    return pb.LayerParameter(
        name=name,
        type="Split",
        bottom=[blob],
        top=[f"{name}_{k}" for k in range(count)],
        loss_weight=[loss_weight, *[0.0] * (count - 1)] if loss_weight else [],
    )
