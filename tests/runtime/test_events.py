import json
from itertools import pairwise

import pytest

from cgdnn.runtime.events import write_trace
from cgdnn.runtime.net import Net, TaskTime
from tests.runtime.programs import message


def test_tasks_become_events_of_their_worker(tmp_path):
    times = [
        TaskTime("conv1.forward[0:2]", 1, 5_000, 7_500, 0),
        TaskTime("conv1[0].update", -1, 8_000, 9_000, 2),
    ]
    write_trace(tmp_path / "trace.json", times, ["data", "conv1"])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"] == [
        (0, "worker 0"),
        (2, "worker 2"),
    ]
    first, second = (event for event in events if event["ph"] == "X")
    assert (first["name"], first["cat"], first["tid"]) == ("conv1.forward[0:2]", "conv1", 0)
    assert (first["ts"], first["dur"]) == (0.0, 2.5)
    assert (second["cat"], second["ts"], second["dur"]) == ("update", 3.0, 1.0)


def test_trace_of_a_real_run(tmp_path):
    net = Net(message(), threads=2)
    times = net.run(("forward", "backward"), trace=True)
    write_trace(tmp_path / "trace.json", times, [layer.name for layer in net.layers])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    assert [task["name"] for task in tasks] == [time.name for time in times]
    assert min(task["ts"] for task in tasks) == 0
    by_worker: dict[int, list[tuple[float, float]]] = {}
    for task in tasks:
        by_worker.setdefault(task["tid"], []).append((task["ts"], task["ts"] + task["dur"]))
    for row in by_worker.values():  # one thing at a time on each row
        row.sort()
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(row))


def test_empty_trace(tmp_path):
    write_trace(tmp_path / "trace.json", [], [])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_old_trace_stays_where_the_new_one_cannot_be_written(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_trace(path, [TaskTime(object(), -1, 0, 1, 0)], [])  # no JSON
    assert path.read_text() == "old"
    with pytest.raises(OSError, match="nowhere"):
        write_trace(tmp_path / "nowhere" / "trace.json", [], [])
