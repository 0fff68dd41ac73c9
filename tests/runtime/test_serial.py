import pytest

from cgdnn.errors import DataError
from cgdnn.layers._base import BEGIN, END, Step, read
from cgdnn.plan.lower import Work
from cgdnn.runtime.net import Net
from cgdnn.runtime.serial import run_serial
from cgdnn.runtime.state import State
from tests.runtime.programs import bound, counting, message, passes, refuse_marked


def test_tasks_run_in_order():
    order = []
    steps = [Step(lambda i=i: order.append(i), []) for i in range(4)]
    assert run_serial(bound([Work(str(i), -1, step) for i, step in enumerate(steps)])) is None
    assert order == [0, 1, 2, 3]


def test_first_failure_stops_the_run():
    state = State("float32")
    marked, _ = counting("marked", 4)
    counted, work = counting("counted", 2)
    state.array(marked)[...] = [0, -1, 0, 0]
    check = Work("check", -1, Step(refuse_marked, [read(marked), BEGIN, END], 4, 1.0))
    assert run_serial(bound([work, check, work], state=state)) == (2, 2)
    assert state.array(counted).tolist() == [1, 1]


def test_net_can_run_serially():
    net = Net(message(), serial=True)
    assert passes(net, 2) == passes(Net(message(), threads=2), 2)
    net.blobs["label"].data[...] = 99
    with pytest.raises(DataError, match="label 99"):
        net.forward()
