"""Signals to a training process, in the order in which a user would meet them."""

import os
import signal

import pytest

from cgdnn.netdef.state import read_state

ENDLESS = ("train", "logs/solver.prototxt", "max_iter=10000000", "snapshot=0", "test_interval=0")
ENDLESS += ("test_iter=", "display=1")


def snapshots(folder):
    """Return the iterations of the snapshots, each of which must be whole."""
    files = sorted(os.listdir(folder / "logs" / "snap"))
    states = [name for name in files if name.endswith(".solverstate")]
    read = [read_state(folder / "logs" / "snap" / name) for name in states]
    assert [f"tiny_iter_{state.iter}.solverstate" for state in read] == states
    models = [f"tiny_iter_{state.iter}.caffemodel" for state in read]
    assert sorted(states + models) == files
    return sorted(state.iter for state in read)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_one_stops_with_a_snapshot(start, folder, number, code):
    training = start(*ENDLESS)
    training.wait_for("Iteration 2 ")
    training.send(number)
    got, err = training.end()
    assert got == code
    assert "Optimization stopped early." in err
    assert "Traceback" not in err
    (saved,) = snapshots(folder)
    assert f"] {saved} iterations in " in err


def test_a_stop_saves_even_where_the_end_would_not(start, folder):
    training = start(*ENDLESS, "snapshot_after_train=false")
    training.wait_for("Iteration 2 ")
    training.send(signal.SIGINT)
    assert training.end()[0] == 130
    assert len(snapshots(folder)) == 1


def test_a_second_one_quits_at_once(start, folder):
    training = start("train", "logs/solver.prototxt", "test_iter=1000000000")
    training.wait_for("Testing net (#0)")  # for hours
    training.send(signal.SIGINT)
    training.wait_for("SIGINT: after this iteration")
    training.send(signal.SIGINT)
    got, err = training.end()
    assert got == 130
    assert "Traceback" not in err
    assert os.listdir(folder / "logs" / "snap") == []


def test_sighup_saves_and_goes_on(start, folder):
    training = start(*ENDLESS)
    training.wait_for("Iteration 2 ")
    training.send(signal.SIGHUP)
    training.wait_for("Snapshotting solver state")
    training.wait_for("lr = ")
    training.send(signal.SIGTERM)
    assert training.end()[0] == 143
    first, second = snapshots(folder)
    assert 2 < first < second


def test_a_log_that_nobody_reads_any_more_stops_with_a_snapshot(start, folder):
    training = start(*ENDLESS)
    training.wait_for("Iteration 2 ")
    training.process.stderr.close()
    assert training.process.wait() == 141
    assert len(snapshots(folder)) == 1
