import re

import pytest

from cgdnn.cli.time import _span, _split
from cgdnn.runtime.net import TaskTime
from tests.cli.caffe_logs import LOGS


def lines(text):
    """Return the lines after the first pass, without prefixes, with # for every number."""
    bare = [line.partition("] ")[2] for line in text.splitlines() if "Restarting" not in line]
    begin = bare.index("*** Benchmark begins ***")
    return [re.sub(r"(?<= )\d[\d.e+-]*(?= )", "#", line) for line in bare[begin:]]


def test_the_table_is_caffes(cgdnn):
    code, _, err = cgdnn("time", "--model=logs/train_val.prototxt", "--iterations=3")
    assert code == 0
    assert lines(err) == lines((LOGS / "time.log").read_text())


def test_the_net_of_the_phase_is_measured(cgdnn):
    code, _, err = cgdnn("time", "logs/train_val.prototxt", "--iterations=1", "--phase=TEST")
    assert code == 0
    assert re.search(r"accuracy\tforward: \S+ ms\.", err)


def test_it_ends_when_nobody_reads_the_log(start):
    timing = start("time", "logs/train_val.prototxt", "--iterations=1000000000")
    timing.wait_for("Iteration: 2 ")
    timing.process.stderr.close()
    assert timing.process.wait() == 141


def task(name, begin, end):
    return TaskTime(name, 0, begin, end, 0)


def test_tasks_are_sorted_by_the_pass_in_their_name():
    names = ["a.backward.forward[0:2]", "x.forward", "x.backward_weights[0:1]", "x.backward_data"]
    split = _split([task(name, 0, 1) for name in names])
    assert [t.name for t in split["forward"]] == names[:2]
    assert [t.name for t in split["backward"]] == names[2:]


@pytest.mark.parametrize(("times", "span"), [([], 0), ([(3, 5)], 2), ([(3, 5), (4, 9)], 6)])
def test_a_pass_lasts_from_its_first_task_to_its_last(times, span):
    assert _span([task("x.forward", *those) for those in times]) == span
