from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.errors import DescriptionError
from cgdnn.netdef.weights import read_weights
from cgdnn.proto.cgdnn_pb2 import SolverParameter
from cgdnn.solvers import _base
from cgdnn.solvers._base import Displayed, Event, Iterated, Saved, Solver
from tests.solvers.training import bits, note_tests, write_run

NET = """
layer { name: "in" type: "DummyData" top: "x" top: "y"
  dummy_data_param { shape { dim: 2 dim: 3 } shape { dim: 2 dim: 1 }
    data_filler { type: "constant" value: 1 } data_filler { type: "constant" value: 7 } } }
layer { name: "fc" type: "InnerProduct" bottom: "x" top: "s"
  inner_product_param { num_output: 1 bias_term: false } }
layer { name: "loss" type: "EuclideanLoss" bottom: "s" bottom: "y" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 4 snapshot_prefix: "snap" '


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(NET)


def solver(extra: str = "", net: str = NET) -> Solver:
    Path("net.prototxt").write_text(net)
    Path("solver.prototxt").write_text(SOLVER + extra)
    return Solver("solver.prototxt", threads=1)


def events_of(training: Solver) -> list[Event]:
    events: list[Event] = []
    training.callbacks.append(events.append)
    return events


def text(event: Event) -> str:
    match event:
        case Iterated(iteration, _):
            return f"iterated {iteration}"
        case Displayed(iteration, _, _, rate):
            return f"displayed {iteration} at {rate}"
        case _base.Testing(iteration, net):
            return f"testing {iteration} #{net}"
        case _base.Tested(iteration, net, _, _):
            return f"tested {iteration} #{net}"
        case Saved(iteration, _, _):
            return f"saved {iteration}"


# What an iteration computes: the weights start at 0 and the outputs at s = 3 w, so the loss is
# (s - 7)^2 / 2 and the gradient of each weight s - 7.


def test_iteration_by_hand() -> None:
    training = solver("momentum: 0.5 ")
    events = events_of(training)
    training.step(2)
    first, second = (event.loss for event in events if isinstance(event, Iterated))
    assert first == pytest.approx(24.5)
    # w = 0.7 after the first, so s = 2.1; history 0.5 * -0.7 + 0.1 * (2.1 - 7) = -0.84.
    assert second == pytest.approx((2.1 - 7) ** 2 / 2)
    np.testing.assert_allclose(training.net.params["fc"][0].data, 1.54, rtol=1e-6)


def test_decay_pulls_to_zero() -> None:
    training = solver("weight_decay: 0.5 ")
    training.net.params["fc"][0].data[...] = 2
    training.step(1)
    np.testing.assert_allclose(training.net.params["fc"][0].data, 2 - 0.1 * (-1 + 0.5 * 2))


def test_l1_decay_pulls_by_the_sign() -> None:
    training = solver('weight_decay: 0.5 regularization_type: "L1" ')
    training.net.params["fc"][0].data[...] = 2
    training.step(1)
    np.testing.assert_allclose(training.net.params["fc"][0].data, 2 - 0.1 * (-1 + 0.5))


def test_multipliers_of_rate_and_decay() -> None:
    spec = "param { lr_mult: 2 decay_mult: 0.5 } inner_product_param"
    training = solver("weight_decay: 0.5 ", NET.replace("inner_product_param", spec))
    training.net.params["fc"][0].data[...] = 2
    training.step(1)
    want = 2 - 0.1 * 2 * (-1 + 0.5 * 0.5 * 2)
    np.testing.assert_allclose(training.net.params["fc"][0].data, want, rtol=1e-6)


def test_frozen_parameters_stay() -> None:
    training = solver(
        "weight_decay: 0.5 ", NET.replace("inner_product", "param { lr_mult: 0 } inner_product", 1)
    )
    training.net.params["fc"][0].data[...] = 2
    training.step(2)
    np.testing.assert_array_equal(training.net.params["fc"][0].data, 2)


def test_clipping_by_the_norm_over_all_parameters() -> None:
    training = solver("clip_gradients: 1 ")
    training.step(1)
    # Each of 3 gradients is -7, the norm 7 sqrt(3); clipped to norm 1 each is -1 / sqrt(3).
    np.testing.assert_allclose(training.net.params["fc"][0].data, 0.1 / np.sqrt(3), rtol=1e-6)


def test_sub_iterations_are_clipped_as_a_sum_and_then_averaged() -> None:
    training = solver("clip_gradients: 1 iter_size: 2 ")
    events = events_of(training)
    training.step(1)
    np.testing.assert_allclose(training.net.params["fc"][0].data, 0.1 / np.sqrt(3) / 2, rtol=1e-6)
    assert events == [Iterated(1, pytest.approx(24.5))]


# When what happens


def test_order_of_events() -> None:
    training = solver("display: 2 test_iter: 1 test_interval: 2 snapshot: 3 ")
    events = events_of(training)
    assert training.solve()
    assert list(map(text, events)) == [
        "testing 0 #0",
        "tested 0 #0",
        "displayed 0 at 0.10000000149011612",
        "iterated 1",
        "iterated 2",
        "testing 2 #0",
        "tested 2 #0",
        "displayed 2 at 0.10000000149011612",
        "iterated 3",
        "saved 3",
        "iterated 4",
        "saved 4",
        "displayed 4 at None",
        "testing 4 #0",
        "tested 4 #0",
    ]


def test_no_snapshot_twice_and_none_where_unwanted() -> None:
    for extra, saved in (
        ("snapshot: 2 ", ["saved 2", "saved 4"]),
        ("snapshot_after_train: false ", []),
        ("snapshot: 3 snapshot_after_train: false ", ["saved 3"]),
    ):
        training = solver(extra)
        events = events_of(training)
        training.solve()
        assert [text(event) for event in events if isinstance(event, Saved)] == saved


def test_no_test_at_the_start_where_unwanted() -> None:
    training = solver("test_iter: 1 test_interval: 3 test_initialization: false ")
    scores = note_tests(training)
    training.solve()
    assert [score.iteration for score in scores] == [3]


def test_displayed_loss_is_the_average_of_the_last() -> None:
    training = solver("display: 1 average_loss: 2 ")
    events = events_of(training)
    training.step(3)
    losses = [event.loss for event in events if isinstance(event, Iterated)]
    shown = [event.loss for event in events if isinstance(event, Displayed)]
    assert shown == pytest.approx([losses[0], sum(losses[:2]) / 2, sum(losses[1:]) / 2])


def test_rate_follows_the_policy_from_iteration_to_iteration() -> None:
    solver()
    overrides = {"display": "1", "lr_policy": "step", "gamma": "0.5", "stepsize": "2"}
    training = Solver("solver.prototxt", threads=1, overrides=overrides)
    events = events_of(training)
    training.step(1)
    training.step(3)
    rates = [event.rate for event in events if isinstance(event, Displayed)]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05])


# Requests


@pytest.mark.parametrize(
    ("requests", "saved"), [(["stop"], []), (["snapshot"], [2]), (["snapshot", "stop"], [2])]
)
def test_requests_are_answered_after_the_iteration(requests: list, saved: list[int]) -> None:
    training = solver("snapshot_after_train: false ")

    def ask(event: Event) -> None:
        if isinstance(event, Iterated) and event.iteration == 2:
            for action in requests:
                training.request(action)

    training.callbacks.append(ask)
    events = events_of(training)
    finished = training.solve()
    assert finished == ("stop" not in requests)
    assert training.iter == (4 if finished else 2)
    assert [event.iteration for event in events if isinstance(event, Saved)] == saved


def test_a_stopped_run_saves_and_can_go_on() -> None:
    straight = solver()
    straight.solve()
    training = solver()
    training.request("stop")
    assert not training.solve()
    assert (training.iter, Path("snap_iter_1.solverstate").exists()) == (1, True)
    assert training.solve()
    assert bits(training) == bits(straight)


def test_a_request_during_a_test_is_answered_after_it() -> None:
    training = solver("test_iter: 1 test_interval: 2 snapshot_after_train: false ")

    def ask(event: Event) -> None:
        if event == _base.Testing(2, 0):
            training.request("snapshot")
            training.request("stop")

    training.callbacks.append(ask)
    events = events_of(training)
    assert not training.solve()
    assert training.iter == 2
    assert [text(event) for event in events[-2:]] == ["tested 2 #0", "saved 2"]


def test_no_request_from_another_thread_is_lost() -> None:
    solver()
    training = Solver("solver.prototxt", threads=1, overrides={"max_iter": "1000000"})
    asker = threading.Timer(0.05, training.request, ["stop"])
    asker.start()
    assert not training.solve()
    asker.join()


# Nets


def test_test_nets_share_the_weights(tmp_path: Path) -> None:
    write_run(tmp_path)
    training = Solver(
        "solver.prototxt", overrides={"test_iter": "1,2", "test_interval": "4"}, threads=1
    )
    assert len(training.test_nets) == 2
    training.step(2)
    for net in training.test_nets:
        for name, blobs in net.params.items():
            for ours, theirs in zip(blobs, training.net.params[name], strict=True):
                assert np.shares_memory(ours.data, theirs.data)
    training.close()


def test_a_parameter_shared_by_name_has_another_owner_in_the_test_net() -> None:
    # In training "a" owns the weights; it is left out in the test, where "b" does.
    net = NET.replace('bottom: "x" top: "s"', 'bottom: "h" top: "s"').replace(
        'layer { name: "fc"',
        """layer { name: "pre" type: "Flatten" bottom: "x" top: "h" include { phase: TEST } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "h" include { phase: TRAIN }
  param { name: "w" } inner_product_param { num_output: 3 bias_term: false } }
layer { name: "b" type: "InnerProduct" bottom: "h" top: "b" param { name: "w" }
  inner_product_param { num_output: 3 bias_term: false } }
layer { name: "end" type: "Silence" bottom: "b" }
layer { name: "fc\"""",
    )
    training = solver("test_iter: 1 test_interval: 4 ", net)
    (test,) = training.test_nets
    assert np.shares_memory(training.net.params["a"][0].data, test.params["b"][0].data)


def test_own_test_nets_with_states() -> None:
    Path("test.prototxt").write_text(NET.replace("value: 7", "value: 8"))
    training = solver(
        'test_net: "test.prototxt" test_iter: 1 test_iter: 1 test_interval: 2 '
        'test_state { stage: "a" } test_state { stage: "b" level: 3 } test_compute_loss: true '
    )
    assert [(net.graph.phase, net.blobs["loss"].shape) for net in training.test_nets] == [
        ("TEST", ()),
        ("TEST", ()),
    ]
    first, second = training.test_all()
    assert (first.loss, second.loss) == (32, 24.5)
    assert [(output.name, output.value, output.weight) for output in first.outputs] == [
        ("loss", 32, 1)
    ]


def test_stages_of_the_training_state_choose_layers() -> None:
    net = NET.replace(
        'layer { name: "loss"',
        'layer { name: "extra" type: "Silence" bottom: "x" include { stage: "more" } }\n'
        'layer { name: "loss"',
    )
    names = [layer.name for layer in solver('train_state { stage: "more" } ', net).net.layers]
    assert "extra" in names
    assert "extra" not in [layer.name for layer in solver("", net).net.layers]


def test_nets_inside_the_solver() -> None:
    param = SolverParameter(base_lr=0.1, lr_policy="fixed", max_iter=1, snapshot_prefix="snap")
    text_format.Parse(NET, param.net_param)
    training = Solver(param, threads=1)
    assert training.solve()
    np.testing.assert_allclose(training.net.params["fc"][0].data, 0.7, rtol=1e-6)


def test_net_beside_the_solver_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solver()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = Solver(tmp_path / "solver.prototxt", threads=1)
    found.step(1)
    assert found.iter == 1


def test_weights_to_start_from_come_in_order() -> None:
    training = solver()
    for name, value in (("one", 1), ("two", 2)):
        training.net.params["fc"][0].data[...] = value
        training.net.save(f"{name}.caffemodel")
    both = Solver("solver.prototxt", threads=1, weights="one.caffemodel,two.caffemodel")
    np.testing.assert_array_equal(both.net.params["fc"][0].data, 2)


def test_overrides_replace_fields() -> None:
    solver()
    training = Solver(
        "solver.prototxt", threads=1, overrides={"base_lr": "0.2", "max_iter": "1", "display": "1"}
    )
    training.solve()
    assert training.iter == 1
    np.testing.assert_allclose(training.net.params["fc"][0].data, 1.4, rtol=1e-6)


def test_float64_trains_in_float64() -> None:
    solver()
    training = Solver("solver.prototxt", threads=1, dtype="float64")
    training.solve()
    assert read_weights("snap_iter_4.caffemodel")["fc"][0].dtype == np.float64
    # s - 7 shrinks by 1 - 3 * 0.1 in each iteration.
    base = training.param.base_lr  # a float32 in the file
    want = 7 / 3 * (1 - (1 - 3 * base) ** 4)
    np.testing.assert_allclose(training.net.params["fc"][0].data, want, rtol=1e-12)


# What is not there yet


@pytest.mark.parametrize("field", ['type: "Adam"', "snapshot_format: HDF5"])
def test_what_is_not_there_yet_is_refused(field: str) -> None:
    with pytest.raises(DescriptionError, match=r"solver\.prototxt:1:\d+: .*not available yet"):
        solver(field)


@pytest.mark.parametrize("field", ["debug_info", "snapshot_diff"])
def test_what_has_no_effect_yet_is_warned_of(field: str, caplog: pytest.LogCaptureFixture) -> None:
    solver(f"{field}: true")
    assert f"{field} is not available yet and has no effect" in caplog.text


def test_a_net_without_a_loss_is_refused() -> None:
    with pytest.raises(DescriptionError, match=r"net\.prototxt: the net has no loss"):
        solver("", NET[: NET.index('layer { name: "loss"')])
