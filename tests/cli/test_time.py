import re

import pytest
from google.protobuf import text_format

from cgdnn.cli import time
from cgdnn.cli.time import _span, _split
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net, TaskTime
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


CONVOLUTION = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: [2, 3, 6, 6] } } }
layer { name: "t" type: "Input" top: "t" input_param { shape { dim: [2, 4, 4, 4] } } }
layer { name: "c" type: "Convolution" bottom: "x" top: "c"
  convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "loss" type: "EuclideanLoss" bottom: "c" bottom: "t" top: "loss" }
"""


def test_the_rates_of_a_convolution(monkeypatch):
    net = Net(text_format.Parse(CONVOLUTION, NetParameter()), threads=1)
    net.blobs["t"].data[:, 1] = 1  # weights are 0, so one filter of four has a gradient
    net.watch_zeros()
    net.run(("forward", "backward"))
    flops = 2 * (2 * 4 * 16) * (3 * 9)  # 6,912
    monkeypatch.setattr(time, "peak_flops", lambda dtype: flops / 0.5e-6)
    milliseconds = {(2, "forward"): 1e-3, (2, "backward_weights"): 2e-3, (3, "forward"): 5e-3}
    forward, weights = time._rates(net, milliseconds).rows
    chosen = net.lowering.chosen_names()
    # Flops of an image over 108 + 108 + 64 elements of x, w and y, and with 2 x 9 x 108 of x.
    assert forward == (
        *("c", "forward", chosen["c.forward"], "0.001"),
        *("6.9", "6.9", "0.50", "", "12", "2", "4"),
    )
    assert weights == (
        *("", "backward_weights", chosen["c.backward_weights"], "0.002"),
        *("3.5", "0.9", "0.25", "0.750", "12", "2", "5"),
    )


def test_rates_and_what_reading_costs_are_all_that_is_on_standard_output(cgdnn):
    code, out, _ = cgdnn("time", "logs/train_val.prototxt", "--iterations=1")
    assert code == 0
    title, columns, *rows, _, reading = out.strip().splitlines()
    assert re.match(r"GF/s of a core, peak \d+ \(", title)
    assert columns.split()[:3] == ["layer", "pass", "kernel"]
    passes = [re.search(r"forward|backward_\w+", row)[0] for row in rows]
    # The data needs no gradient, so conv1 does not give it one.
    both = ["forward", "backward_weights"]
    assert passes == [*both, *both, "backward_data"]
    assert re.sub(r"\d+\.\d+", "#", reading) == (
        "data: a batch takes read # ms, decode # ms, transform # ms, wait # ms (#% of an iteration)"
    )


def test_there_is_no_rate_where_nothing_multiplies(monkeypatch):
    net = Net(text_format.Parse(CONVOLUTION, NetParameter()), threads=1)
    monkeypatch.setattr(time, "peak_flops", lambda dtype: 1.0)
    assert not time._rates(net, {(3, "forward"): 1.0}).rows
