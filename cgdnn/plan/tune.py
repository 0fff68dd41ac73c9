"""Which candidate runs each pass: the fastest measured one, else the first that does not refuse.

A layer may refuse a candidate because it cannot use it, or because it estimates that another one is
faster; measurements go before estimates.

Measurements are kept in a table, one file for any number of machines, that can be read, shipped
and edited: problem -> candidate -> milliseconds. A problem is a layer with its shapes and fields,
a pass, an element type and, for the backward passes of layers with kernels that skip zeros, the
share of zeros in steps of five hundredths. Measuring happens only when it is asked for
(`cgdnn.runtime.measure`); choosing from a table is free of timing, so the choice, and with it
every bit of a result, depends on the table and the shapes alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cgdnn import machine
from cgdnn.errors import DataError
from cgdnn.files import atomic_write_text
from cgdnn.layers._base import Candidate, Layer
from cgdnn.layers._layout import NCHW
from cgdnn.plan.shapes import PlannedLayer

ZERO_STEPS = 20
"""Steps into which the share of zeros is divided."""


def default_path() -> Path:
    """Return where the table lies: ``$CGDNN_TUNING``, else ``tuning.json`` in the cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = os.environ.get("CGDNN_CACHE_DIR") or os.path.join(home, "cgdnn")
    return Path(os.environ.get("CGDNN_TUNING") or os.path.join(root, "tuning.json"))


@dataclass
class TuningTable:
    """Milliseconds of candidates on this machine.

    Attributes
    ----------
    times : dict
        Problem -> candidate -> milliseconds, for this machine.
    """

    times: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> TuningTable:
        """Return this machine's part of the file; an empty table where there is no file.

        Raises
        ------
        DataError
            The file is no tuning table.
        """
        times = _read_all(path).get(machine.description(), {})
        return cls({problem: dict(found) for problem, found in times.items()})

    def write(self, path: str | os.PathLike[str]) -> None:
        """Put this machine's part into the file; other machines' parts stay."""
        everything = _read_all(path)
        everything[machine.description()] = dict(sorted(self.times.items()))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(everything, indent=1) + "\n")


def _read_all(path: str | os.PathLike[str]) -> dict[str, dict[str, dict[str, float]]]:
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read: {error}. Name another file in CGDNN_TUNING."
        ) from error
    try:
        everything = json.loads(text)
        return {
            name: {
                problem: {candidate: float(time) for candidate, time in times.items()}
                for problem, times in part.items()
            }
            for name, part in everything.items()
        }
    except (ValueError, AttributeError, TypeError):
        raise DataError(
            f"{path}: is no tuning table, expected the JSON that `cgdnn tune` writes. "
            "Remove it, or name another file in CGDNN_TUNING."
        ) from None


def problem(planned: PlannedLayer, which: str, dtype: str) -> str:
    """Return the key of a layer's pass in the table."""
    layer = planned.layer
    bottoms = " ".join("x".join(map(str, shape)) for shape in layer.bottom_shapes)
    text = f"{planned.node.type} {bottoms} {_fields(layer)} {which} {dtype}"
    if which != "forward":
        text += f" zeros {round(layer.zeros * ZERO_STEPS) / ZERO_STEPS:.2f}"
        if layer.reader is not None and layer.reader.route(NCHW):
            text += " routed " + "x".join(map(str, layer.reader.top_shapes[0]))
    return text


def _fields(layer: Layer) -> str:
    """Return the fields of the layer's own parameter message that can matter for speed."""
    parts = []
    for descriptor, value in layer.node.param.ListFields():
        if descriptor.name.endswith("_param") and descriptor.name != "transform_param":
            for inner, content in value.ListFields():
                if not inner.name.endswith("filler") and inner.name != "engine":
                    parts.append(f"{inner.name}={str(content).replace(' ', '')}")
    return " ".join(parts)


def measured(
    planned: PlannedLayer, which: str, dtype: str, table: TuningTable
) -> Mapping[str, float]:
    """Return the milliseconds that the table has for the candidates of a pass."""
    return table.times.get(problem(planned, which, dtype), {})


def choose(
    planned: PlannedLayer,
    which: str,
    dtype: str,
    table: TuningTable,
    forced: Mapping[str, str],
    serving: Sequence[Candidate],
) -> Candidate:
    """Return the candidate that runs a pass.

    Parameters
    ----------
    forced : mapping
        ``<layer>.<pass>`` -> name of the candidate that a resumed run had; it goes before the
        table, where the layer still knows it and can use it.
    serving : sequence of Candidate
        Those to choose from.
    """
    layer = planned.layer
    wanted = forced.get(f"{planned.node.name}.{which}")
    for candidate in serving:
        if candidate.name == wanted:
            return candidate
    times = measured(planned, which, dtype, table)
    able = [candidate for candidate in serving if candidate.refuse(layer) is None] or serving
    if all(candidate.name in times for candidate in able):
        known = [candidate for candidate in serving if candidate.name in times]
        return min(known, key=lambda candidate: times[candidate.name])
    return able[0]
