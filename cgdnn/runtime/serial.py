"""The serial executor: runs a program's tasks one after another in order, for debugging."""

from __future__ import annotations

from cgdnn.kernels._jit import call_entry
from cgdnn.runtime.state import BoundProgram


def run_serial(program: BoundProgram) -> tuple[int, int] | None:
    """Run every task; return (task number, status) of the first that fails, or None."""
    for task, entry in enumerate(program.entries):
        if entry:
            status = call_entry(int(entry), int(program.slots[task]), 0)
            if status:
                return task, status
    return None
