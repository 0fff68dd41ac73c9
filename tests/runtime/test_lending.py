"""Blobs and diffs that nobody looks at reuse memory; what is looked at is true."""

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.errors import UsageError
from cgdnn.plan.check import check
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net

# Each blob between is larger than what keeps its bytes to the end of a program.
CHAIN = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: [4, 3, 160, 160] } } }
layer { name: "other" type: "Input" top: "y" input_param { shape { dim: [4, 2] } } }
layer { name: "a" type: "Convolution" bottom: "x" top: "a" convolution_param {
  num_output: 4 kernel_size: 1 weight_filler { type: "xavier" } } }
layer { name: "b" type: "ReLU" bottom: "a" top: "a" }
layer { name: "c" type: "TanH" bottom: "a" top: "c" }
layer { name: "d" type: "Eltwise" bottom: "a" bottom: "c" top: "d" eltwise_param {
  operation: MAX } }
layer { name: "e" type: "Concat" bottom: "c" bottom: "d" top: "e" }
layer { name: "n" type: "LRN" bottom: "e" top: "n" lrn_param { local_size: 3 alpha: 0.5 } }
layer { name: "f" type: "Flatten" bottom: "n" top: "f" }
layer { name: "g" type: "Sigmoid" bottom: "f" top: "g" }
layer { name: "h" type: "InnerProduct" bottom: "g" top: "h" inner_product_param {
  num_output: 2 weight_filler { type: "gaussian" std: 0.01 } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "h" bottom: "y" top: "loss" }
"""
BOTH = ("forward", "backward")
BETWEEN = ("a", "c", "d", "e", "n", "f", "g")


def made(phase, **options):
    net = Net(text_format.Parse(CHAIN, NetParameter()), phase, threads=2, **options)
    values = np.random.default_rng(0).standard_normal((4, 3, 160, 160))
    net.blobs["x"].data[...] = values
    return net


def programs(net):
    return [run.program.program for run in net._programs.values()]


def spoil(net):
    """Let the arena hold NaN before the next run, as reused memory could."""
    net._state._shared["arena"].view(np.float32)[...] = np.nan


def params(net):
    return [blob.diff.copy() for blobs in net.params.values() for blob in blobs]


def test_diffs_of_an_iteration_reuse_memory_and_change_no_bit():
    kept, lent = made("TRAIN"), made("TRAIN")
    kept.run(BOTH)
    for _ in range(2):
        lent.run(BOTH, lend=True)
        spoil(lent)
    (program,) = programs(lent)
    check(program)
    assert {"a.diff", "g.diff"} <= {buffer.name for buffer in program.lost}
    total = sum(lent.lowering.size_of(buffer) for buffer in program.lost)
    assert program.arena_bytes < 0.7 * total
    assert kept.loss == lent.loss
    for mine, theirs in zip(params(lent), params(kept), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for name in BETWEEN:  # values are kept for the backward pass
        np.testing.assert_array_equal(lent.blobs[name].data, kept.blobs[name].data)


@pytest.mark.parametrize("name", BETWEEN)
def test_diff_is_true_once_it_has_been_looked_at(name):
    kept, lent = made("TRAIN"), made("TRAIN")
    assert not lent.blobs[name].diff.any()
    kept.run(BOTH)
    for _ in range(2):
        lent.run(BOTH, lend=True)
        spoil(lent)
    np.testing.assert_array_equal(lent.blobs[name].diff, kept.blobs[name].diff)
    assert kept.blobs[name].diff.any()


def test_lost_diff_is_never_shown():
    net = made("TRAIN")
    net.run(BOTH, lend=True)
    with pytest.raises(UsageError, match=r'"c": its diff was not kept.*before'):
        _ = net.blobs["c"].diff
    with pytest.raises(UsageError, match=r"g\.diff was not kept"):
        net.backward(start="g")
    net.backward()  # makes and keeps them all
    assert net.blobs["c"].diff.any()


def test_values_reuse_memory_in_the_phase_test():
    kept, lent = made("TEST"), made("TEST")
    kept.run(("forward",))
    for _ in range(2):
        lent.run(("forward",), lend=True)
        spoil(lent)
    (program,) = programs(lent)
    check(program)
    assert {"a", "c", "d", "e", "d.mask", "g"} <= {buffer.name for buffer in program.lost}
    assert lent.blobs["loss"].data == kept.blobs["loss"].data


@pytest.mark.parametrize("name", BETWEEN)
def test_values_not_kept_are_computed_again_when_looked_at(name):
    kept, lent = made("TEST"), made("TEST")
    kept.run(("forward",))
    lent.run(("forward",), lend=True)
    spoil(lent)
    assert lent.counter == 1
    np.testing.assert_array_equal(lent.blobs[name].data, kept.blobs[name].data)
    assert lent.counter == 1
    lent.run(("forward",), lend=True)
    spoil(lent)  # nothing is lent any more
    for other in BETWEEN:
        np.testing.assert_array_equal(lent.blobs[other].data, kept.blobs[other].data)


def test_partial_pass_begins_from_true_values():
    kept, lent = made("TEST"), made("TEST")
    kept.run(("forward",))
    lent.run(("forward",), lend=True)
    spoil(lent)
    np.testing.assert_array_equal(
        lent.forward(start="d", end="d")["d"], kept.forward(start="d", end="d")["d"]
    )


def test_backward_pass_begins_from_true_values_and_states():
    kept, lent = made("TEST"), made("TEST")
    for net in (kept, lent):
        _ = [net.blobs[name].data for name in BETWEEN]  # these are not lent then
    kept.run(("forward",))
    lent.run(("forward",), lend=True)
    spoil(lent)
    (program,) = (p for p in programs(lent) if p.lost)
    lost = {buffer.name for buffer in program.lost}
    assert {"d.mask", "loss.difference"} <= lost
    assert lost.isdisjoint(BETWEEN)
    kept.backward()
    lent.backward()
    np.testing.assert_array_equal(lent.blobs["a"].diff, kept.blobs["a"].diff)


def test_zeros_are_counted_where_diffs_are_not_kept():
    kept, lent = made("TRAIN"), made("TRAIN")
    kept.run(BOTH)
    lent.watch_zeros()
    lent.run(BOTH, lend=True)
    diff = kept.blobs["a"].diff
    assert lent.count_zeros()["a"] == 1 - np.count_nonzero(diff) / diff.size
    assert 0.1 < lent.count_zeros()["a"] < 0.9
    assert kept.count_zeros() == {}


POOLED = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: [4, 3, 20, 20] } } }
layer { name: "other" type: "Input" top: "y" input_param { shape { dim: [4, 2] } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "conv" convolution_param {
  num_output: 6 kernel_size: 5 pad: 2 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param {
  kernel_size: 3 stride: 2 } }
layer { name: "relu" type: "ReLU" bottom: "pool" top: "pool" }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param {
  num_output: 2 weight_filler { type: "gaussian" std: 0.01 } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "y" top: "loss" }
"""


def made_pooled(kernel):
    net = Net(text_format.Parse(POOLED, NetParameter()), "TRAIN", threads=2)
    net.blobs["x"].data[...] = np.random.default_rng(0).standard_normal((4, 3, 20, 20))
    net.choose_kernels({}, forced={"conv.backward_weights": kernel})
    assert net.lowering.chosen_names()["conv.backward_weights"] == kernel
    return net


def names(net):
    return {task.name.partition("[")[0] for program in programs(net) for task in program.tasks}


def test_gradient_behind_max_pooling_needs_no_diff_in_full():
    plain, lent, seen = map(made_pooled, ("unfold_gemm", "sparse_routed", "sparse_routed"))
    assert not seen.blobs["conv"].diff.any()
    for net in (plain, lent, seen):
        net.run(BOTH, lend=True)
    assert "pool.backward_data" not in names(lent)
    assert "pool.backward_data" in names(seen) & names(plain)
    for mine, same, theirs in zip(params(lent), params(seen), params(plain), strict=True):
        np.testing.assert_array_equal(mine, same)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
    plain.run(BOTH)
    np.testing.assert_array_equal(seen.blobs["conv"].diff, plain.blobs["conv"].diff)
    with pytest.raises(UsageError, match="its diff was not kept"):
        _ = lent.blobs["conv"].diff


def test_zeros_are_counted_in_the_diff_in_full():
    nets = [made_pooled(kernel) for kernel in ("sparse_routed", "unfold_gemm")]
    for net in nets:
        net.watch_zeros()
        net.run(BOTH, lend=True)
    assert nets[0].count_zeros() == nets[1].count_zeros()
    assert nets[0].count_zeros()["conv"] > 0.75
