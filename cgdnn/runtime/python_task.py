"""Tasks that run Python functions: data layers, and whatever a user plugs in.

They share the ABI of the compiled tasks through one ctypes callback, which takes the GIL by
itself. An exception cannot cross compiled code, so it is stored and a status returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cgdnn.kernels._jit import ENTRY_TYPE
from cgdnn.layers._base import Slot

FAILED = -1
"""Status of a Python task that raised."""


class PythonTasks:
    """The Python functions of one program, and the exceptions that they raised."""

    def __init__(self) -> None:
        self.raised: dict[int, BaseException] = {}
        self.numbers: dict[str, float] = {}
        """What the slots among the arguments stand for, by name."""
        self._calls: dict[int, tuple[Callable[..., None], Sequence[Any]]] = {}
        # No method of this object, and no `ctypes.cast`, which lets the callback refer to itself:
        # in a cycle, what the arguments are parts of, such as an arena, would stay in memory until
        # the collector comes.
        self._callback = ENTRY_TYPE(partial(_run, self._calls, self.numbers, self.raised))

    def add(self, task: int, function: Callable[..., None], arguments: Sequence[Any]) -> int:
        """Register the function of task number `task`; return the entry address."""
        self._calls[task] = (function, arguments)
        address = ctypes.c_void_p.from_buffer(self._callback).value
        assert address is not None, "a callback has an address"
        return address


def _run(
    calls: Mapping[int, tuple[Callable[..., None], Sequence[Any]]],
    numbers: Mapping[str, float],
    raised: dict[int, BaseException],
    slots: int,
    _worker: int,
) -> int:
    task = ctypes.c_int64.from_address(slots).value
    function, arguments = calls[task]
    try:
        function(*(numbers[a.name] if isinstance(a, Slot) else a for a in arguments))
    except BaseException as error:  # noqa: BLE001  it is raised again by the caller of the run
        raised[task] = error
        return FAILED
    return 0
