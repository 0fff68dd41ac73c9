"""The part of an iteration that moves the weights: check, clip, update, as steps of the plan.

A gate stands before it: no weight changes before the whole backward pass has succeeded and the
loss is finite, so an iteration that fails leaves the weights as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod

from cgdnn.errors import CgdnnError, NonFiniteError
from cgdnn.kernels._jit import Kernel
from cgdnn.kernels.reduce import reduce_rows
from cgdnn.kernels.update import check_finite, check_zero, clip_factor, sum_squares
from cgdnn.layers._base import (
    BEGIN,
    END,
    PIECE,
    Argument,
    Buffer,
    Slot,
    Step,
    read,
    read_all,
    row,
    rows,
    update,
    write_all,
)
from cgdnn.plan.lower import Work
from cgdnn.plan.shapes import Assembly, PlannedParam

_DECAYS = ("L2", "L1")
"""Kinds of decay, in the order of the kernels' arguments."""


@dataclass(frozen=True)
class UpdateRule:
    """How a solver moves one parameter.

    Attributes
    ----------
    kernel : Kernel
        Takes (w, dw, one array for each history, factor, bad, rate, the scalars, decay_l2,
        decay_l1, piece, begin, end).
    histories : int
        Arrays of the parameter's size that the rule keeps.
    scalars : tuple of str
        Names of the numbers that the solver sets, such as "momentum".
    """

    kernel: Kernel
    histories: int
    scalars: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Update:
    """The update part of a net's plan, and the buffers that a snapshot keeps.

    Attributes
    ----------
    works : list of Work
    history : list of Buffer
        All parameters' first history, then all second ones, as in Caffe's solver states; one that
        does not learn has its place there too.
    rates : dict
        Slot of a rate -> the multiplier of the parameters that have it.
    decays : dict
        Kind of decay ("L1", "L2") -> slot -> multiplier, likewise.
    """

    works: list[Work]
    history: list[Buffer]
    rates: dict[str, float]
    decays: dict[str, dict[str, float]]


def plan_update(assembly: Assembly, rule: UpdateRule, clip: float) -> Update:
    """Return the steps that update every learned parameter by `rule`.

    The solver patches ``average`` (one over iter_size), the slots of `Update.rates` and
    `Update.decays`, which parameters with the same multiplier share, and the rule's scalars.

    Parameters
    ----------
    clip : float
        ``clip_gradients``; negative for no clipping.
    """
    works = _check_works(assembly)
    factor = Buffer("update.factor", (1,), kind="temporary")
    works += _factor_works(assembly, clip, factor)
    histories: list[list[Buffer]] = [[] for _ in range(rule.histories)]
    for param in assembly.params:
        flat = (prod(param.declared.shape),)
        own = [
            Buffer(f"{param.label}.history{number}", param.declared.shape, kind="history")
            for number in range(rule.histories)
        ]
        for buffers, buffer in zip(histories, own, strict=True):
            buffers.append(buffer)
        if not param.learns:
            continue
        bad = Buffer(f"{param.label}.bad", (1,), kind="partial")
        arguments: list[Argument] = [
            update(param.data, flat),
            read(param.diff, flat),
            *(update(buffer, flat) for buffer in own),
            read_all(factor),
            row(bad),
            Slot(_rate(param)),
            *(Slot(name) for name in rule.scalars),
            *(Slot(_decay(kind, param)) for kind in _DECAYS),
            PIECE,
            BEGIN,
            END,
        ]
        works.append(
            Work(f"{param.label}.update", -1, Step(rule.kernel, arguments, flat[0], cost=0.6))
        )
        explain = _non_finite(f"the gradient of {param.label}, and now the weights,")
        works.append(
            Work(f"{param.label}.check", -1, Step(check_zero, [rows(bad)], explain=explain))
        )
    learned = [assembly.params[index] for index in assembly.learned]
    return Update(
        works,
        [buffer for buffers in histories for buffer in buffers],
        {_rate(param): param.lr_mult for param in learned},
        {kind: {_decay(kind, param): param.decay_mult for param in learned} for kind in _DECAYS},
    )


def _rate(param: PlannedParam) -> str:
    """Return the slot of a parameter's rate."""
    return f"rate.{param.lr_mult}"


def _decay(kind: str, param: PlannedParam) -> str:
    """Return the slot of a parameter's decay of a kind."""
    return f"decay_{kind}.{param.decay_mult}"


def _non_finite(what: str) -> Callable[[int], CgdnnError]:
    return lambda _status: NonFiniteError(f"{what} is not finite")


def _check_works(assembly: Assembly) -> list[Work]:
    """Return the steps that fail where a loss is not finite; the last is the gate."""
    losses = [
        assembly.blobs[top]
        for planned in assembly.layers
        for top, weight in zip(planned.node.tops, planned.loss_weights, strict=True)
        if weight
    ]
    works = []
    for loss in losses:
        explain = _non_finite(f'the loss "{loss.name}"')
        step = Step(check_finite, [read_all(loss.data, (prod(loss.shape),))], explain=explain)
        works.append(Work(f"{loss.name}.check", -1, step, gate=loss is losses[-1]))
    return works


def _factor_works(assembly: Assembly, clip: float, factor: Buffer) -> list[Work]:
    """Return the steps that compute what gradients are multiplied by."""
    total = Buffer("update.squares", (1,), kind="state")  # stays zero where nothing is clipped
    works = []
    for position, index in enumerate(assembly.learned if clip >= 0 else ()):
        param = assembly.params[index]
        size = prod(param.declared.shape)
        part = Buffer(f"{param.label}.squares", (1,), kind="partial")
        squares = Step(
            sum_squares,
            [read(param.diff, (size,)), row(part), PIECE, BEGIN, END],
            extent=size,
            cost=0.2,
        )
        add = Step(reduce_rows, [rows(part), update(total), float(position > 0), BEGIN, END])
        works += [Work(f"{param.label}.squares", -1, step) for step in (squares, add)]
    limit = clip if clip >= 0 else inf
    step = Step(clip_factor, [read_all(total, (1, 1)), write_all(factor), limit, Slot("average")])
    return [*works, Work("update.factor", -1, step)]
