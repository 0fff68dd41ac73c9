"""Read nets and solvers from text or binary files, upgraded and, for solvers, checked.

Everything that a solver's text alone shows to be wrong is refused here, before a net is built or
data is opened. The checks of counts are those of Caffe's ``Solver::InitTrainNet`` and
``InitTestNets``, the checks of values those of ``sgd_solver.cpp`` and its siblings.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from cgdnn.errors import DescriptionError
from cgdnn.netdef.text import (
    Located,
    Place,
    did_you_mean,
    is_binary,
    is_repeated,
    parse_text,
    top_level_fields,
)
from cgdnn.netdef.upgrade import upgrade_net, upgrade_solver
from cgdnn.proto import cgdnn_pb2 as pb

SOLVER_TYPES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")

# Policy -> the fields that its formula needs (sgd_solver.cpp, GetLearningRate).
LR_POLICIES: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "step": ("gamma", "stepsize"),
    "exp": ("gamma",),
    "inv": ("gamma", "power"),
    "multistep": ("gamma", "stepvalue"),
    "poly": ("power",),
    "sigmoid": ("gamma", "stepsize"),
}

# Field -> least value that makes sense. Fields without a value here take any.
_LEAST = {
    "base_lr": 0,
    "max_iter": 0,
    "gamma": 0,
    "stepsize": 1,
    "stepvalue": 0,
    "momentum": 0,
    "momentum2": 0,
    "rms_decay": 0,
    "delta": 0,
    "weight_decay": 0,
    "iter_size": 1,
    "average_loss": 1,
    "display": 0,
    "snapshot": 0,
    "test_iter": 0,
    "test_interval": 0,
}
_BELOW_ONE = ("momentum", "momentum2", "rms_decay")
_TRAIN_NET_FIELDS = ("net", "net_param", "train_net", "train_net_param")


def find_file(name: str, base: str | os.PathLike[str] | None) -> Path:
    """Return where the file `name` of a description is: here, else beside the description.

    Parameters
    ----------
    name
        As the description spells it; absolute paths stay.
    base
        The prototxt file that names it, or None.

    Returns
    -------
    Path
        The first that exists of `name` from the working directory and `name` from the folder of
        `base`; `name` itself when neither does, for the caller to report.
    """
    path = Path(name)
    if base is not None and not path.exists():
        beside = Path(base).parent / name
        if beside.exists():
            return beside
    return path


def is_solver_text(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file is a solver's text, by the first field that only a solver or a net has.

    Raises
    ------
    DescriptionError
        The file cannot be read.
    """
    data = _read_bytes(path)
    if is_binary(data):
        return False
    solver, net = (m.DESCRIPTOR.fields_by_name for m in (pb.SolverParameter, pb.NetParameter))
    for name in top_level_fields(_decode(data, os.fspath(path))):
        if (name in solver) != (name in net):
            return name in solver
    return False


def read_net(source: str | os.PathLike[str] | pb.NetParameter | Located) -> Located:
    """Read a net and bring it to today's form.

    Parameters
    ----------
    source
        A file of text or binary form (told by its content), a message, or a message with places
        such as ``solver.part("net_param")``. Messages are copied.

    Raises
    ------
    DescriptionError
        The file cannot be read, is no net, or its old form cannot be upgraded.
    """
    return upgrade_net(_read(source, pb.NetParameter, "net"))


def read_solver(
    source: str | os.PathLike[str] | pb.SolverParameter,
    overrides: Mapping[str, str] | None = None,
) -> Located:
    """Read a solver, replace some of its fields, and check what can be checked without a net.

    Parameters
    ----------
    source
        A text file, or a message, which is copied.
    overrides
        Field -> value as text, as given on a command line: ``{"base_lr": "0.005"}``. Strings need
        no quotes; a list is written with commas.

    Raises
    ------
    DescriptionError
        The file cannot be read, is no solver, or no training can be made of it.
    """
    solver = _read(source, pb.SolverParameter, "solver")
    for name, value in (overrides or {}).items():
        _override(solver, name, value)
    upgrade_solver(solver)
    if not isinstance(source, pb.SolverParameter):
        _complete_snapshot_prefix(solver)
    _check_nets(solver)
    _check_fields(solver)
    _check_policy(solver)
    _check_type(solver)
    if solver.message.HasField("solver_mode") and solver.message.solver_mode == solver.message.GPU:
        solver.warnings.append(
            f"{solver.where('solver_mode')}: solver_mode GPU: cgdnn computes on the CPU."
        )
    return solver


# Files


def _read(source: Any, message_class: type[Message], kind: str) -> Located:
    """Read one `message_class`, a `kind` in messages, from a file or by copying."""
    if isinstance(source, Located):
        copied = message_class()
        copied.CopyFrom(source.message)
        return Located(copied, copy.deepcopy(source.place))
    if isinstance(source, Message):
        copied = message_class()
        copied.CopyFrom(source)
        return Located(copied, Place(kind))
    filename = os.fspath(source)
    data = _read_bytes(filename)
    if not is_binary(data):
        return parse_text(_decode(data, filename), message_class, filename)
    try:
        message = pb.NetParameter.FromString(data)
    except DecodeError:
        message = pb.NetParameter()
    if message_class is not pb.NetParameter or not (message.layer or message.layers):
        binary = " or a binary net" if message_class is pb.NetParameter else ""
        raise DescriptionError(
            f"{filename}: is not the text of a {kind}{binary}, or is damaged. "
            "Check that it is the file you meant, and that text is saved as UTF-8."
        )
    return Located(message, Place(filename))


def _read_bytes(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise DescriptionError(
            f"{os.fspath(path)}: no such file in {Path.cwd()}. Check its path."
        ) from None
    except OSError as error:
        raise DescriptionError(f"{os.fspath(path)}: cannot be read: {error.strerror}.") from None


def _decode(data: bytes, filename: str) -> str:
    """Return `data` as text without a byte order mark; bytes that are no UTF-8 stay, escaped."""
    if not data.strip():
        raise DescriptionError(f"{filename}: is empty.")
    return data.decode("utf-8-sig", errors="surrogateescape")


# Solvers


def _override(solver: Located, name: str, value: str) -> None:
    """Replace field `name` of `solver` by the text `value`."""
    given = f"{name}={value}"
    descriptor = pb.SolverParameter.DESCRIPTOR.fields_by_name.get(name)
    if descriptor is not None and descriptor.type == descriptor.TYPE_STRING:
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    elif descriptor is not None and is_repeated(descriptor):
        value = f"[{value}]"
    parsed = parse_text(f"{name}: {value}", pb.SolverParameter, given, numbered=False)
    for replaced in {"type": ("type", "solver_type"), "solver_type": ("type",)}.get(name, (name,)):
        solver.message.ClearField(replaced)
        solver.place.children.pop(replaced, None)
    solver.message.MergeFrom(parsed.message)
    solver.place.children.update(parsed.place.children)


def _complete_snapshot_prefix(solver: Located) -> None:
    """Name snapshots after the solver's file when no prefix, or only a folder, is given.

    Caffe: ``UpgradeSnapshotPrefixProperty`` in upgrade_proto.cpp.
    """
    message = solver.message
    if not message.HasField("snapshot_prefix"):
        message.snapshot_prefix = str(Path(solver.filename).with_suffix(""))
    elif Path(message.snapshot_prefix).is_dir():
        message.snapshot_prefix = str(Path(message.snapshot_prefix) / Path(solver.filename).stem)


def _check_fields(solver: Located) -> None:
    """Check every field by itself."""
    message = solver.message
    for name in ("base_lr", "max_iter"):
        if not message.HasField(name):
            raise DescriptionError(
                f"{solver.filename}: {name} is missing, expected a number. Add it."
            )
    for descriptor, value in message.ListFields():
        name = descriptor.name
        for number in value if name in ("stepvalue", "test_iter") else [value]:
            if not isinstance(number, (int, float)):
                continue
            if not math.isfinite(number):
                expected = "a finite number"
            elif name in _BELOW_ONE and not 0 <= number < 1:
                expected = "at least 0 and below 1"
            elif number < _LEAST.get(name, -math.inf):
                expected = f"at least {_LEAST[name]}"
            else:
                continue
            raise DescriptionError(
                f"{solver.where(name)}: {name} got {number:g}, expected {expected}."
            )
    _check_choice(solver, "regularization_type", ("L1", "L2"))


def _check_choice(solver: Located, name: str, choices: Iterable[str]) -> None:
    value = getattr(solver.message, name)
    if value not in choices:
        raise DescriptionError(
            f'{solver.where(name)}: {name} got "{value}", expected one of '
            f"{', '.join(choices)}{did_you_mean(value, choices) or '.'}"
        )


def _check_policy(solver: Located) -> None:
    message = solver.message
    if not message.HasField("lr_policy"):
        raise DescriptionError(
            f"{solver.filename}: lr_policy is missing, expected one of {', '.join(LR_POLICIES)}. "
            "Add it."
        )
    _check_choice(solver, "lr_policy", LR_POLICIES)
    missing = [
        name
        for name in LR_POLICIES[message.lr_policy]
        if not (message.stepvalue if name == "stepvalue" else message.HasField(name))
    ]
    if missing:
        raise DescriptionError(
            f'{solver.where("lr_policy")}: lr_policy "{message.lr_policy}" needs '
            f"{' and '.join(LR_POLICIES[message.lr_policy])}, "
            f"but {' and '.join(missing)} "
            f"{'is missing. Add it.' if len(missing) == 1 else 'are missing. Add them.'}"
        )


def _check_type(solver: Located) -> None:
    message = solver.message
    _check_choice(solver, "type", SOLVER_TYPES)
    if message.type in ("AdaGrad", "RMSProp") and message.momentum != 0:
        raise DescriptionError(
            f"{solver.where('momentum')}: {message.type} takes no momentum, got "
            f"{message.momentum:g}. Remove it."
        )


def _check_nets(solver: Located) -> None:
    """Check that there is one training net, and a test_iter and state for every test net."""
    message = solver.message
    given = [name for name in _TRAIN_NET_FIELDS if message.HasField(name)]
    if len(given) != 1:
        where = solver.where(given[1]) if given else solver.filename
        raise DescriptionError(
            f"{where}: the training net is given by {' and '.join(given) or 'nothing'}, expected "
            f"exactly one of {', '.join(_TRAIN_NET_FIELDS)}."
        )
    own_tests = len(message.test_net_param) + len(message.test_net)
    shared = given[0] in ("net", "net_param")
    tests = len(message.test_iter)
    if tests < own_tests or (tests > own_tests and not shared):
        name = "test_iter" if tests else "test_net" if message.test_net else "test_net_param"
        raise DescriptionError(
            f"{solver.where(name)}: {tests} test_iter for {own_tests} test nets. "
            "Give one test_iter for each test net."
        )
    if message.test_state and len(message.test_state) != tests:
        raise DescriptionError(
            f"{solver.where('test_state')}: {len(message.test_state)} test_state for {tests} test "
            "nets. Give none, or one for each."
        )
    if tests and message.test_interval == 0:
        raise DescriptionError(
            f"{solver.where('test_iter')}: test_iter without test_interval. "
            "Say after how many iterations to test, such as test_interval: 500."
        )
