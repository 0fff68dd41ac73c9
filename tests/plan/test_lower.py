from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf import text_format

from cgdnn.errors import InternalError
from cgdnn.kernels._jit import Kernel
from cgdnn.kernels.activation import relu_backward, relu_forward
from cgdnn.layers import activation, pooling
from cgdnn.layers._base import (
    BEGIN,
    END,
    Buffer,
    Candidate,
    Layer,
    Operands,
    Step,
    Use,
    read,
    read_all,
    write,
    write_across,
)
from cgdnn.layers._layout import lanes, stored_shape
from cgdnn.plan.check import check
from cgdnn.plan.layout import reorder_step
from cgdnn.plan.lower import Lowering
from cgdnn.plan.tasks import Program
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net
from tests.plan.planning import assembled

# data -> pool1 -> relu -> pool2 -> ip -> loss, with a number of channels that fills no lanes
NET = """
layer {
  name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param {
    shape { dim: 4 dim: 5 dim: 12 dim: 12 } shape { dim: 4 }
    data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 2 }
  }
}
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 19 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "TOP" relu_param { negative_slope: 0.25 } }
layer { name: "pool" type: "Pooling" bottom: "TOP" top: "pool"
  pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
APART, IN_PLACE = NET.replace("TOP", "relu"), NET.replace("TOP", "conv")


def message(text: str) -> NetParameter:
    return text_format.Parse(text, NetParameter())


def names(program: Program) -> list[str]:
    """Return the names of the steps in order, pieces and joins left out."""
    found = [task.name.partition("[")[0] for task in program.tasks if task.step is not None]
    return [name for i, name in enumerate(found) if i == 0 or found[i - 1] != name]


def lane_steps(layer: Layer, operands: Operands, which: str) -> list[Step]:
    """Return ReLU's steps over blobs in the channel-lane layout."""

    def view(shape: tuple[int, ...]) -> tuple[int, int]:
        return (shape[0], int(np.prod(shape[1:])))

    shape = operands.bottom[0].shape
    assert len(shape) == 4
    assert shape[3] == lanes(), "the plan gave a blob in another layout"
    slope = layer.node.param.relu_param.negative_slope
    if which == "forward":
        arrays = [read(operands.bottom[0], view(shape)), write(operands.top[0], view(shape))]
        return [Step(relu_forward, [*arrays, slope, BEGIN, END], shape[0])]
    arrays = [
        read(operands.top[0], view(shape)),
        read(operands.top_diff[0], view(shape)),
        write(operands.bottom_diff[0], view(shape)),
    ]
    return [Step(relu_backward, [*arrays, slope, BEGIN, END], shape[0])]


@pytest.fixture
def with_lanes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that puts a candidate in the other layout first in ReLU's list."""
    plain = activation.ReLU.candidates

    def candidates(layer: Layer, which: str) -> list[Candidate]:
        other = Candidate(
            "lanes",
            lambda layer, operands: lane_steps(layer, operands, which),
            layouts=(("nchwc", "nchwc"),),
        )
        return [other, *plain(layer, which)]

    def put() -> None:
        monkeypatch.setattr(activation.ReLU, "candidates", candidates)
        monkeypatch.setattr(activation.ReLU, "cost", 1e9)  # the plain way is not worth it
        monkeypatch.setattr(pooling.Pooling, "candidates", Layer.candidates)  # in N, C, H, W only

    return put


# What a program consists of


def test_iteration_runs_layers_forward_then_backward():
    assembly = assembled(APART)
    program = Lowering(assembly, "float32", 1).program(("forward", "backward"), 0, 6)
    order = [name for name in names(program) if not name.startswith("data")]
    assert order == [
        "conv.forward",
        "relu.forward",
        "pool.forward",
        "ip.forward",
        "loss.forward",
        "loss.backward_data",
        "ip.backward_weights",
        "ip.backward_data",
        "pool.backward_data",
        "relu.backward_data",
        "conv.backward_weights",  # and no backward_data: nothing below learns
    ]
    check(program)


def test_partial_programs():
    assembly = assembled(APART)
    lowering = Lowering(assembly, "float32", 1)
    assert names(lowering.program(("forward",), 2, 4)) == ["relu.forward", "pool.forward"]
    assert names(lowering.program(("backward",), 2, 4)) == [
        "pool.backward_data",
        "relu.backward_data",
    ]
    assert lowering.program(("forward",), 3, 3).tasks == []


def test_pieces_do_not_depend_on_anything_but_shapes():
    tasks = [
        [
            task.name
            for task in Lowering(assembled(APART), "float32", seed)
            .program(("forward", "backward"), 0, 6)
            .tasks
        ]
        for seed in (1, 2)
    ]
    assert tasks[0] == tasks[1]


def test_first_candidate_that_does_not_refuse_is_taken(monkeypatch):
    plain = activation.ReLU.candidates

    def candidates(layer, which):
        (last,) = plain(layer, which)
        never = Candidate("never", last.steps, refuse=lambda layer: "not today")
        return [never, Candidate("second", last.steps), last]

    monkeypatch.setattr(activation.ReLU, "candidates", candidates)
    lowering = Lowering(assembled(APART), "float32", 1)
    assert lowering.choices[2]["forward"].name == "second"


def test_step_that_cannot_be_cut_evenly_is_refused(monkeypatch):
    def steps(layer, operands):
        return [Step(relu_forward, [read(operands.bottom[0], (4, 1900)), 0.0], extent=7)]

    monkeypatch.setattr(activation.ReLU, "candidates", lambda layer, which: [Candidate("x", steps)])
    with pytest.raises(InternalError, match=r"relu.forward.*: conv of shape .* 7 equal parts"):
        Lowering(assembled(APART), "float32", 1).program(("forward",), 0, 6)


def test_pieces_across_a_blob(monkeypatch):
    """Those of axis 1 touch their own range at each place of axis 0."""

    def steps(layer, operands):
        whole = write_across(operands.top[0], (4, 5, 380))
        return [Step(relu_forward, [read_all(operands.bottom[0]), whole], extent=5, cost=1e9)]

    monkeypatch.setattr(activation.ReLU, "candidates", lambda layer, which: [Candidate("x", steps)])
    program = Lowering(assembled(APART), "float32", 1).program(("forward",), 0, 6)
    check(program)
    (third,) = [task for task in program.tasks if task.name == "relu.forward[2:3]"]
    ranges = [(access.start, access.stop) for access in third.accesses if access.writes]
    assert ranges == [(4 * 380 * (5 * n + 2), 4 * 380 * (5 * n + 3)) for n in range(4)]


# Layouts


def test_stored_shape():
    assert stored_shape("nchw", (2, 3, 4, 5)) == (2, 3, 4, 5)
    assert stored_shape("nchwc", (2, lanes() + 1, 4, 5)) == (2, 2, 20, lanes())
    assert stored_shape("nchwn", (3 * lanes(), 2, 4, 5)) == (3, 2, 20, lanes())
    for layout, shape in (
        ("nhwc", (2, 3, 4, 5)),
        ("nchwc", (7,)),
        ("nchwn", (lanes(),)),
        ("nchwn", (lanes() + 1, 3, 4, 5)),
    ):
        with pytest.raises(InternalError, match=f"no layout {layout!r} for a blob of shape"):
            stored_shape(layout, shape)


@pytest.mark.parametrize("layout", ["nchwc", "nchwn"])
def test_reorder_steps_undo_each_other(layout):
    shape = (2 * lanes(), lanes() + 3, 3, 7)
    plain, other = Buffer("plain", shape), Buffer("other", stored_shape(layout, shape))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    lane, back = np.full(other.shape, 7, np.float32), np.zeros_like(x)
    _run(reorder_step(plain, "nchw", other, layout, shape), x, lane)
    if layout == "nchwc":
        np.testing.assert_array_equal(lane[:, 0, :, 1].reshape(x[:, 1].shape), x[:, 1])
        np.testing.assert_array_equal(lane[:, 1, :, 3:], 0)  # beyond the last channel
    else:
        np.testing.assert_array_equal(lane[1, :, :, 2].reshape(shape[1:]), x[lanes() + 2])
    _run(reorder_step(other, layout, plain, "nchw", shape), lane, back)
    np.testing.assert_array_equal(back, x)


def _run(step: Step, *arrays: npt.NDArray[Any]) -> None:
    """Run a step of whole arrays in two pieces."""
    uses = [use for use in step.arguments if isinstance(use, Use)]
    views = [array.reshape(use.shape) for array, use in zip(arrays, uses, strict=True)]
    assert all(len(view) == step.extent for view in views)
    assert isinstance(step.kernel, Kernel)
    for begin, end in ((1, step.extent), (0, 1)):
        step.kernel(*views, begin, end)


def test_reorders_stand_where_layouts_meet(with_lanes):
    with_lanes()
    assembly = assembled(APART)
    program = Lowering(assembly, "float32", 1).program(("forward", "backward"), 0, 6)
    check(program)
    order = names(program)
    assert order[order.index("conv.forward") :][:5] == [
        "conv.forward",
        "conv.data.to_nchwc",
        "relu.forward",
        "relu.data.to_nchw",
        "pool.forward",
    ]
    assert order[order.index("pool.backward_data") :] == [
        "pool.backward_data",
        "relu.diff.to_nchwc",
        "relu.backward_data",
        "conv.diff.to_nchw",
        "conv.backward_weights",
    ]


@pytest.mark.parametrize("text", [APART, IN_PLACE], ids=["apart", "in_place"])
def test_other_layout_gives_the_same_bits(with_lanes, text):
    plain = Net(message(text), threads=1)
    expected_loss = plain.forward()["loss"]
    plain.backward()
    with_lanes()
    net = Net(message(text), threads=2)
    np.testing.assert_array_equal(net.forward()["loss"], expected_loss)
    net.backward()
    for name, blob in net.blobs.items():
        np.testing.assert_array_equal(blob.data, plain.blobs[name].data, err_msg=name)
        np.testing.assert_array_equal(blob.diff, plain.blobs[name].diff, err_msg=name)
    for name, blobs in net.params.items():
        for ours, theirs in zip(blobs, plain.params[name], strict=True):
            np.testing.assert_array_equal(ours.diff, theirs.diff, err_msg=name)


@pytest.mark.parametrize("text", [APART, IN_PLACE], ids=["apart", "in_place"])
def test_user_sees_and_changes_blobs_between_layouts(with_lanes, text):
    plain = Net(message(text), threads=1)
    with_lanes()
    net = Net(message(text), threads=2)
    rng = np.random.default_rng(3)
    for one in (plain, net):
        one.forward()
    top = net.graph.blobs[net.graph.nodes[2].tops[0]].name
    held = net.blobs[top].data
    assert held.shape == (4, 19, 10, 10)
    np.testing.assert_array_equal(held, plain.blobs[top].data)
    # written before the layer, the run begins at it
    value = rng.normal(size=held.shape).astype(np.float32)
    for one in (plain, net):
        one.blobs["conv"].data[...] = value
        one.forward(start="relu")
    np.testing.assert_array_equal(net.blobs["loss"].data, plain.blobs["loss"].data)
    np.testing.assert_array_equal(held, plain.blobs[top].data)  # the same array, brought up to date
    # written behind the layer, the run begins at the next one
    held[...] = value
    plain.blobs[top].data[...] = value
    for one in (plain, net):
        one.forward(start="pool")
    np.testing.assert_array_equal(net.blobs["loss"].data, plain.blobs["loss"].data)
    # a gradient written by hand
    slope = rng.normal(size=held.shape).astype(np.float32)
    for one in (plain, net):
        one.blobs[top].diff[...] = slope
        one.backward(start="relu", end="relu")
    np.testing.assert_array_equal(net.blobs["conv"].diff, plain.blobs["conv"].diff)


def test_run_that_ends_in_the_other_layout_is_continued_there(with_lanes):
    plain = Net(message(APART), threads=1)
    with_lanes()
    net = Net(message(APART), threads=1)
    for one in (plain, net):
        one.forward(end="relu")
        one.forward(start="pool")
    np.testing.assert_array_equal(net.blobs["loss"].data, plain.blobs["loss"].data)


@pytest.mark.parametrize(("samples", "depth_first"), [(16, False), (4096, True)])
def test_values_larger_than_caches_run_depth_first(samples, depth_first):
    assembly = assembled(f"""
    layer {{ name: "in" type: "Input" top: "x"
            input_param {{ shape {{ dim: [{samples}, 8, 16, 16] }} }} }}
    layer {{ name: "a" type: "TanH" bottom: "x" top: "a" }}
    layer {{ name: "b" type: "TanH" bottom: "a" top: "b" }}
    """)
    program = Lowering(assembly, "float32", seed=1).program(("forward",), 0, 3)
    names = [program.tasks[number].name.partition("[")[0] for number in program.order]
    assert names[0] == ("b.forward" if depth_first else "a.forward")
