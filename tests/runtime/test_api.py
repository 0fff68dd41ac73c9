"""What users of the library get wrong: an exception of ours says so; no crash and no guess."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

import cgdnn
from cgdnn.errors import CgdnnError, DescriptionError, UsageError
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net

NET = """
name: "small"
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 dim: 8 dim: 8 } } }
layer { name: "fc" type: "InnerProduct" bottom: "x" top: "h"
  inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "tanh" type: "TanH" bottom: "h" top: "h" }
layer { name: "out" type: "InnerProduct" bottom: "h" top: "s"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
"""
SHAPE = (4, 3, 8, 8)


def message(text: str = NET) -> NetParameter:
    return text_format.Parse(text, NetParameter())


@pytest.fixture
def net() -> Net:
    return cgdnn.Net(message(), threads=2)


def values(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expected(net: Net, x: np.ndarray) -> np.ndarray:
    """Return what the net computes, in plain NumPy."""
    fc, out = ([blob.data for blob in net.params[name]] for name in ("fc", "out"))
    hidden = np.tanh(x.reshape(len(x), -1).astype(np.float64) @ fc[0].T + fc[1])
    return hidden @ out[0].T + out[1]


@pytest.mark.parametrize(
    "shape", [(4, 1, 8, 8), (3, 3, 8, 8), (1, 3, 8, 8), (3, 8, 8), (4, 3, 64), (4, 192), ()]
)
def test_only_the_exact_shape_is_taken(net: Net, shape: tuple[int, ...]) -> None:
    before = net.blobs["x"].data.copy()
    with pytest.raises(UsageError) as caught:
        net.forward(x=np.ones(shape, np.float32))
    assert f'blob "x": got an array of shape {shape}, expected {SHAPE}' in str(caught.value)
    assert "reshape" in str(caught.value)
    np.testing.assert_array_equal(net.blobs["x"].data, before)


def test_another_batch_size_works_after_reshape(net: Net) -> None:
    x = values(shape=(7, 3, 8, 8))
    net.blobs["x"].reshape(7, 3, 8, 8)
    net.reshape()
    np.testing.assert_allclose(net.forward(x=x)["s"], expected(net, x), rtol=1e-5, atol=1e-6)
    assert net.blobs["s"].shape == (7, 5)


def test_forward_reshapes_by_itself(net: Net) -> None:
    x = values(shape=(2, 3, 8, 8))
    net.blobs["x"].reshape(2, 3, 8, 8)
    np.testing.assert_allclose(net.forward(x=x)["s"], expected(net, x), rtol=1e-5, atol=1e-6)


def test_a_shape_that_needs_other_parameters_is_refused_and_undone(net: Net) -> None:
    weights = net.params["fc"][0].data.copy()
    net.blobs["x"].reshape(4, 3, 9, 9)
    with pytest.raises(UsageError) as caught:
        net.reshape()
    assert "fc[0]" in str(caught.value)
    assert "(6, 243)" in str(caught.value)
    assert "(6, 192)" in str(caught.value)
    assert net.blobs["x"].shape == SHAPE
    np.testing.assert_array_equal(net.params["fc"][0].data, weights)
    x = values()
    np.testing.assert_allclose(net.forward(x=x)["s"], expected(net, x), rtol=1e-5, atol=1e-6)


def test_reshape_keeps_and_shares_the_parameters(net: Net) -> None:
    net.params["fc"][0].data[...] = values(1, (6, 192)) / 10
    held = net.params["fc"][0].data
    net.blobs["x"].reshape(2, 3, 8, 8)
    net.reshape()
    assert net.params["fc"][0].data is held
    held *= 2
    x = values(shape=(2, 3, 8, 8))
    np.testing.assert_allclose(net.forward(x=x)["s"], expected(net, x), rtol=1e-5, atol=1e-6)


def test_blobs_that_are_no_input_keep_their_shape(net: Net) -> None:
    net.blobs["h"].reshape(4, 7)
    with pytest.raises(UsageError, match=r'blob "h" is no input.*Reshape one of: x'):
        net.reshape()
    assert net.blobs["h"].shape == (4, 6)
    net.forward(x=values())


def test_negative_dimensions_are_refused(net: Net) -> None:
    with pytest.raises(UsageError, match=r"got shape \(-1, 3, 8, 8\)"):
        net.blobs["x"].reshape(-1, 3, 8, 8)


def test_a_fed_array_may_go_away(net: Net) -> None:
    x = values()
    want = expected(net, x)
    fed = x.copy()
    net.blobs["x"].data = fed
    fed[...] = np.nan
    del fed
    gc.collect()
    np.testing.assert_allclose(net.forward()["s"], want, rtol=1e-5, atol=1e-6)


def test_outputs_are_copies_that_stay(net: Net) -> None:
    first = net.forward(x=values(1))["s"]
    kept = first.copy()
    second = net.forward(x=values(2))["s"]
    np.testing.assert_array_equal(first, kept)
    assert not np.array_equal(first, second)
    first[...] = 7
    np.testing.assert_array_equal(net.blobs["s"].data, second)


def test_outputs_outlive_their_net() -> None:
    net = cgdnn.Net(message(), threads=1)
    out, held = net.forward(x=values())["s"], net.blobs["h"].data
    want, hidden = out.copy(), held.copy()
    del net
    gc.collect()
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(held, hidden)


def test_blobs_are_live_views(net: Net) -> None:
    x = values()
    net.blobs["x"].data[...] = x
    np.testing.assert_allclose(net.forward()["s"], expected(net, x), rtol=1e-5, atol=1e-6)
    net.params["out"][1].data[2] = 10
    np.testing.assert_allclose(net.forward()["s"], expected(net, x), rtol=1e-5, atol=1e-6)
    net.blobs["h"].data[...] = 0
    out = net.forward(start="out")["s"]
    np.testing.assert_array_equal(out, np.tile(net.params["out"][1].data, (4, 1)))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.uint8, np.bool_])
def test_other_types_are_converted(net: Net, dtype: type) -> None:
    x = (values() * 3).astype(np.int32).clip(0, 1).astype(dtype)
    got = net.forward(x=x)["s"]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected(net, x), rtol=1e-5, atol=1e-6)


def test_any_memory_order_is_taken(net: Net) -> None:
    x = values()
    big = np.zeros((4, 3, 16, 24), np.float32)
    big[:, :, ::2, 1::3] = x
    for other in (
        np.asfortranarray(x),
        x[:, :, ::-1].copy()[:, :, ::-1],
        big[:, :, ::2, 1::3],
        x.astype(">f4"),
        x.tolist(),
    ):
        np.testing.assert_allclose(
            net.forward(x=other)["s"], expected(net, x), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("value", ["a text", object()])
def test_what_is_no_array_of_numbers_is_refused(net: Net, value: object) -> None:
    for what in (value, np.full(SHAPE, value)):
        with pytest.raises(UsageError, match='blob "x"'):
            net.forward(x=what)


def test_complex_numbers_are_refused(net: Net) -> None:
    with pytest.raises(UsageError, match=r'blob "x".*complex'):
        net.forward(x=values() * 1j)


def test_ragged_lists_are_refused(net: Net) -> None:
    with pytest.raises(UsageError, match='blob "x"'):
        net.forward(x=[[1, 2], [3]])


def test_unknown_names_are_refused_with_the_known_ones(net: Net) -> None:
    with pytest.raises(UsageError, match=r'no blob "data"\. Its blobs: x, h, s'):
        net.forward(data=values())
    with pytest.raises(UsageError, match=r'no layer "fc1"\. Its layers: in, fc, tanh, out'):
        net.forward(start="fc1")
    with pytest.raises(UsageError, match='no layer "softmax"'):
        net.forward(end="softmax")
    with pytest.raises(UsageError, match='no layer "fc1"'):
        net.backward(end="fc1")
    with pytest.raises(UsageError, match='no blob "t"'):
        net.backward(t=values())


def test_layers_in_the_wrong_order_are_refused(net: Net) -> None:
    with pytest.raises(UsageError, match='layer "out" comes after layer "fc"'):
        net.forward(start="out", end="fc")
    with pytest.raises(UsageError, match='layer "out" comes after layer "fc"'):
        net.backward(start="fc", end="out")


def test_a_gradient_of_the_wrong_shape_is_refused(net: Net) -> None:
    net.forward(x=values())
    with pytest.raises(
        UsageError, match=r'blob "s": got an array of shape \(5,\), expected \(4, 5'
    ):
        net.backward(s=np.ones(5, np.float32))


@pytest.mark.parametrize(
    "text",
    [
        NET + 'layer { name: "l" type: "Nope" bottom: "s" top: "y" }',
        'layer { name: "l" type: "ReLU" bottom: "x" top: "y" }',
        NET + 'layer { name: "l" type: "Convolution" bottom: "s" top: "y" }',
        "layer {",
        "",
    ],
)
def test_a_bad_net_raises_and_nothing_more(text: str, tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(text)
    with pytest.raises(DescriptionError, match=r"net\.prototxt"):
        cgdnn.Net(path)
    cgdnn.Net(message(), threads=1).forward(x=values())


def test_missing_files_raise(tmp_path: Path) -> None:
    for action in (
        lambda: cgdnn.Net(tmp_path / "none.prototxt"),
        lambda: cgdnn.Net(message(), weights=tmp_path / "none.caffemodel"),
        lambda: cgdnn.Solver(tmp_path / "none.prototxt"),
    ):
        with pytest.raises(CgdnnError, match="none"):
            action()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"phase": "train"}, "phase: got 'train', expected"),
        ({"dtype": "float16"}, "dtype: got 'float16', expected"),
        ({"threads": 0}, "got 0 threads, expected 1 to"),
        ({"threads": -1}, "got -1 threads, expected 1 to"),
        ({"threads": 100_000}, "got 100000 threads, expected 1 to"),
    ],
)
def test_wrong_arguments_are_refused(fields: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        cgdnn.Net(message(), **fields)


def test_a_message_is_not_changed() -> None:
    text = NET + 'layer { name: "a" type: "ReLU" bottom: "s" top: "a" }\n'
    text += 'layer { name: "b" type: "ReLU" bottom: "s" top: "b" }'
    given = message(text)
    net = cgdnn.Net(given, threads=1)
    assert any(layer.type == "Split" for layer in net.layers)
    assert given == message(text)
