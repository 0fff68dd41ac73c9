from pathlib import Path

import numpy as np
import pytest

from cgdnn.netdef.state import ResumePoint, SolverSnapshot, read_state, write_state
from cgdnn.proto import cgdnn_pb2 as pb

SNAP = Path(__file__).parents[1] / "golden" / "snap"


@pytest.mark.parametrize(("name", "arrays"), [("sgd", 4), ("adam", 8)])
def test_reads_what_caffe_wrote(name, arrays):
    state = read_state(SNAP / f"{name}_iter_10.solverstate")
    with np.load(SNAP / f"{name}.npz") as expected:
        for i in range(arrays):
            np.testing.assert_array_equal(state.history[i], expected[f"history10/{i}"])
        assert state.current_step == expected["current_step10"]
    assert len(state.history) == arrays
    assert state.iter == 10
    assert state.learned_net == f"snap/{name}_iter_10.caffemodel"
    assert state.extra is None


def test_writes_what_caffe_writes(tmp_path):
    path = tmp_path / "s.solverstate"
    write_state(path, read_state(SNAP / "adam_iter_10.solverstate"))
    assert path.read_bytes() == (SNAP / "adam_iter_10.solverstate").read_bytes()


def test_own_part_survives_and_equal_states_give_equal_bytes(tmp_path):
    cursors = {"train": {"data": 640, "extra": 3}, "test 0": {"data": 100}, "test 1": {}}
    kernels = {"conv1.forward": "direct", "conv1.backward_data": "winograd"}
    extra = ResumePoint(2**63, 2**40, cursors, kernels)
    snapshot = SolverSnapshot(7, "w", 2, [np.ones((2, 2))], extra)
    write_state(tmp_path / "a", snapshot)
    back = read_state(tmp_path / "a")
    assert (back.iter, back.learned_net, back.current_step) == (7, "w", 2)
    assert back.history[0].dtype == np.float64
    assert back.extra == extra
    turned = ResumePoint(
        2**63, 2**40, dict(reversed(cursors.items())), dict(reversed(kernels.items()))
    )
    write_state(tmp_path / "b", SolverSnapshot(7, "w", 2, [np.ones((2, 2))], turned))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_caffe_finds_its_own_fields(tmp_path):
    write_state(tmp_path / "a", SolverSnapshot(7, "w", 2, [], ResumePoint(1)))
    state = pb.SolverState.FromString((tmp_path / "a").read_bytes())
    assert state.Extensions[pb.cgdnn_resume].seed == 1
    state.ClearExtension(pb.cgdnn_resume)
    assert state == pb.SolverState(iter=7, learned_net="w", current_step=2)
