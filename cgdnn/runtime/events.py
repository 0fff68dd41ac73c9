"""Write when each task ran as a trace that chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from cgdnn.files import atomic_write_text
from cgdnn.runtime.net import TaskTime


def write_trace(
    path: str | os.PathLike[str], times: Sequence[TaskTime], layers: Sequence[str]
) -> None:
    """Write one row for each worker, with the tasks that it ran; never leaves half a file.

    The format is the JSON of the Trace Event Format: complete events ("X"), times in microseconds
    from the first task on.

    Parameters
    ----------
    path : path
    times : sequence of TaskTime
        What `Net.run` with ``trace=True`` returns.
    layers : sequence of str
        Names of the net's layers, by number.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    start = min((time.begin for time in times), default=0)
    names = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 1,
            "tid": worker,
            "args": {"name": f"worker {worker}"},
        }
        for worker in sorted({time.worker for time in times})
    ]
    tasks = [
        {
            "name": time.name,
            "cat": layers[time.layer] if time.layer >= 0 else "update",
            "ph": "X",
            "pid": 1,
            "tid": time.worker,
            "ts": (time.begin - start) / 1e3,
            "dur": (time.end - time.begin) / 1e3,
        }
        for time in times
    ]
    atomic_write_text(path, json.dumps({"traceEvents": names + tasks, "displayTimeUnit": "ns"}))
