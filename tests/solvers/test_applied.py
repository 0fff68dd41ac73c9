"""Gradients that are applied as they are computed: the same weights, and no gradient to look at."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.errors import UsageError
from cgdnn.plan import lower
from cgdnn.proto.cgdnn_pb2 import NetParameter, SolverParameter
from cgdnn.runtime.net import Net
from cgdnn.solvers._base import Solver

NET = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: [6, 10] } } }
layer { name: "other" type: "Input" top: "y" input_param { shape { dim: [6, 3] } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" inner_product_param {
  num_output: 20 weight_filler { type: "xavier" } } }
layer { name: "r" type: "ReLU" bottom: "a" top: "a" }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" inner_product_param {
  num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "b" bottom: "y" top: "loss" }
"""
SHARED = (
    NET
    + """
layer { name: "c" type: "InnerProduct" bottom: "x" top: "c" param { name: "w" }
  inner_product_param { num_output: 20 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "d" type: "InnerProduct" bottom: "x" top: "d" param { name: "w" }
  inner_product_param { num_output: 20 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "more" type: "EuclideanLoss" bottom: "c" bottom: "d" top: "more" }
"""
)
CONVOLUTIONS = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: [32, 3, 12, 12] } } }
layer { name: "other" type: "Input" top: "y" input_param { shape { dim: [32, 3] } } }
layer { name: "a" type: "Convolution" bottom: "x" top: "a" convolution_param {
  num_output: 16 kernel_size: 5 pad: 2 weight_filler { type: "xavier" } } }
layer { name: "p" type: "Pooling" bottom: "a" top: "p" pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "b" type: "Convolution" bottom: "p" top: "b" convolution_param {
  num_output: 32 kernel_size: 3 pad: 1 group: 2 weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "b" top: "b" }
layer { name: "s" type: "Scale" bottom: "b" top: "b" scale_param { bias_term: true } }
layer { name: "c" type: "InnerProduct" bottom: "b" top: "c" inner_product_param {
  num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "c" bottom: "y" top: "loss" }
"""
FORCED = {f"{layer}.backward_weights": "sparse" for layer in "abcd"}


def solver(net: str = NET, threads: int = 2, lend: bool = True, **fields: float) -> Solver:
    param = SolverParameter(
        net_param=text_format.Parse(net, NetParameter()),
        **{
            "max_iter": 9,
            "base_lr": 0.1,
            "lr_policy": "fixed",
            "momentum": 0.9,
            "weight_decay": 0.01,
            **fields,
        },
    )
    made = Solver(param, threads=threads, lend=lend)
    generator = np.random.default_rng(0)
    for blob in ("x", "y"):
        values = generator.standard_normal(made.net.blobs[blob].shape)
        made.net.blobs[blob].data[...] = values
    made.net.choose_kernels({}, forced=FORCED)
    return made


def weights(net: Net) -> list[np.ndarray]:
    return [blob.data.copy() for blobs in net.params.values() for blob in blobs]


def histories(made: Solver) -> list[np.ndarray]:
    return [made.net.array(buffer).copy() for buffer in made._update.history]


def exists(made: Solver, layer: int) -> bool:
    """Tell whether the gradient of a parameter has memory."""
    return made.net.assembly.params[layer].diff in made.net._state._arrays


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_and_histories_have_the_same_bits(threads: int) -> None:
    kept, lent = solver(lend=False), solver(threads=threads)
    kept.step(3)
    lent.step(3)
    for mine, theirs in zip(
        weights(lent.net) + histories(lent), weights(kept.net) + histories(kept), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    assert exists(kept, 0)
    assert not exists(lent, 0)


def test_a_gradient_that_has_been_looked_at_is_kept() -> None:
    kept, lent = solver(lend=False), solver()
    assert not lent.net.params["a"][0].diff.any()
    kept.step(1)
    lent.step(1)
    np.testing.assert_array_equal(lent.net.params["a"][0].diff, kept.net.params["a"][0].diff)
    with pytest.raises(UsageError, match=r"b\[0\]: its diff was not kept"):
        _ = lent.net.params["b"][0].diff
    kept.step(1)
    lent.step(1)
    for layer in "ab":
        diff = lent.net.params[layer][0].diff
        np.testing.assert_array_equal(diff, kept.net.params[layer][0].diff)
        assert diff.any()


def test_gradients_are_added_to_nothing_that_was_not_kept() -> None:
    made = solver()
    made.step(1)
    made.net.forward()
    with pytest.raises(UsageError, match=r"a\[0\]\.diff was not kept.*clear_param_diffs"):
        made.net.backward()
    made.net.clear_param_diffs()
    made.net.backward()
    assert made.net.params["a"][0].diff.any()
    made.step(1)
    made.net.run(("forward", "backward"))
    assert made.net.params["b"][0].diff.any()


def test_an_update_by_a_sum_of_gradients_has_all_of_it() -> None:
    kept, lent = solver(), solver()
    for made, lend in ((kept, False), (lent, True)):
        made.net.run(("forward", "backward"))
        parts, works = ("forward", "backward", "update"), made._update.works
        numbers = made._numbers(0.1)
        made.net.run(parts, update=works, numbers=numbers, accumulate=True, lend=lend)
    for mine, theirs in zip(weights(lent.net), weights(kept.net), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(lent.net.params["a"][0].diff, kept.net.params["a"][0].diff)


def test_what_was_not_kept_stays_so_through_a_new_shape() -> None:
    made = solver()
    made.step(1)
    made.net.blobs["x"].reshape(4, 10)
    made.net.blobs["y"].reshape(4, 3)
    made.net.reshape()
    with pytest.raises(UsageError, match=r"a\[0\]: its diff was not kept"):
        _ = made.net.params["a"][0].diff


@pytest.mark.parametrize(
    ("net", "fields"),
    [(NET, {"clip_gradients": 1.0}), (NET, {"iter_size": 2}), (SHARED, {})],
    ids=["clipped", "summed", "shared"],
)
def test_what_others_need_is_not_merged(net: str, fields: dict[str, float]) -> None:
    kept, lent = solver(net, lend=False, **fields), solver(net, **fields)
    layers = list(kept.net.params)
    for _ in range(2):
        kept.step(2)
        lent.step(2)
        for mine, theirs in zip(weights(lent.net), weights(kept.net), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        for layer in layers:  # from now on kept
            with suppress(UsageError):
                _ = lent.net.params[layer][0].diff
    for layer in layers:
        diff = lent.net.params[layer][0].diff
        np.testing.assert_array_equal(diff, kept.net.params[layer][0].diff)


@pytest.mark.parametrize("cached", [64 << 20, 0], ids=["gradients", "values"])
def test_memory_is_reused_whatever_it_holds(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "_CACHED_BYTES", cached)
    kept, lent = solver(CONVOLUTIONS, lend=False), solver(CONVOLUTIONS)
    for made in (kept, lent):
        made.net.choose_kernels({})
    lent.step(1)
    lent.net._state.shared("arena", 0)[...] = 0xFF  # NaN in any type
    lent.step(2)
    kept.step(3)
    for mine, theirs in zip(weights(lent.net), weights(kept.net), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert exists(kept, 0)
    assert not exists(lent, 0)
    values = lent.net.assembly.blobs[lent.net.assembly.layers[-2].node.bottoms[0]].data
    assert (values in lent.net._state._arrays) == (cached > 0)
    kept.net.forward()
    lent.net.forward()
    np.testing.assert_array_equal(lent.net.blobs["b"].data, kept.net.blobs["b"].data)
