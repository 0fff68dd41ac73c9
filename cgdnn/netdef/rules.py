"""Choose the layers of a net that take part in one phase, level and set of stages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from cgdnn.errors import DescriptionError
from cgdnn.netdef.text import Located
from cgdnn.proto import cgdnn_pb2 as pb


def merge_state(
    net: pb.NetParameter, phase: str, state: pb.NetState | None = None
) -> tuple[str, int, tuple[str, ...]]:
    """Return the phase, level and stages in which a solver uses `net`.

    Parameters
    ----------
    net
        The net; what its own `state` says goes before `phase`.
    phase
        ``"TRAIN"`` for the training net, ``"TEST"`` for a test net.
    state
        The solver's `train_state` or `test_state` for it, which goes before both.

    Notes
    -----
    Caffe: ``Solver::InitTrainNet`` and ``InitTestNets``. Stages of both states add up.
    """
    merged = pb.NetState(phase=phase)
    merged.MergeFrom(net.state)
    if state is not None:
        merged.MergeFrom(state)
    return pb.Phase.Name(merged.phase), merged.level, tuple(merged.stage)


def select_layers(net: Located, phase: str, level: int, stages: Collection[str]) -> list[int]:
    """Return the indices of the layers that `include` and `exclude` rules let in.

    A layer with `include` rules is in when one of them holds; any other is in unless one of its
    `exclude` rules holds. A rule holds when all that it names holds: the phase, `min_level` and
    `max_level` (inclusive), every `stage` and no `not_stage`. Caffe: ``Net::FilterNet`` and
    ``Net::StateMeetsRule``.

    Raises
    ------
    DescriptionError
        A layer has both kinds of rules.
    """
    selected = []
    for index, layer in enumerate(net.message.layer):
        if layer.include and layer.exclude:
            raise DescriptionError(
                f'{net.where("layer", index, "include")}: layer "{layer.name}" ({layer.type}) has '
                f"include rules and, at {net.where('layer', index, 'exclude')}, exclude rules. "
                "Keep one kind."
            )
        rules = layer.include or layer.exclude
        holds = any(_holds(rule, phase, level, stages) for rule in rules)
        if holds == bool(layer.include):
            selected.append(index)
    return selected


def _holds(rule: Any, phase: str, level: int, stages: Collection[str]) -> bool:
    if rule.HasField("phase") and pb.Phase.Name(rule.phase) != phase:
        return False
    if rule.HasField("min_level") and level < rule.min_level:
        return False
    if rule.HasField("max_level") and level > rule.max_level:
        return False
    return set(stages).issuperset(rule.stage) and set(stages).isdisjoint(rule.not_stage)
