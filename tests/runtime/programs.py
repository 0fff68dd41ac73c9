"""Nets and programs for the tests of the executors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf import text_format

from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.layers._base import BEGIN, END, Buffer, Step, update
from cgdnn.plan.lower import Lowering, Work
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net
from cgdnn.runtime.state import BoundProgram, State, bind
from tests.plan.planning import ROOT, assembled

CONV_NET = """
name: "small"
layer {
  name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param {
    shape { dim: 32 dim: 3 dim: 14 dim: 14 } shape { dim: 32 }
    data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 2 }
  }
}
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 10 kernel_size: 5 weight_filler { type: "xavier" } } }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
  pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "conv2" type: "Convolution" bottom: "pool1" top: "conv2"
  convolution_param { num_output: 24 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu2" type: "ReLU" bottom: "conv2" top: "conv2" }
layer { name: "drop2" type: "Dropout" bottom: "conv2" top: "conv2" }
layer { name: "ip" type: "InnerProduct" bottom: "conv2" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
DATA_NET = f"""
layer {{ name: "data" type: "Data" top: "data" top: "label"
  transform_param {{ crop_size: 7 mirror: true }}
  data_param {{ source: "{ROOT}/tests/golden/data/tiny_lmdb" batch_size: 5 backend: LMDB }} }}
layer {{ name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param {{ num_output: 6 kernel_size: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param {{ num_output: 10 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
"""
ONLY_INPUT = 'layer { name: "in" type: "Input" top: "in" input_param { shape { dim: 1 dim: 1 } } }'


def message(text: str = CONV_NET) -> NetParameter:
    return text_format.Parse(text, NetParameter())


def passes(net: Net, count: int = 1) -> list[bytes]:
    """Run iterations that change the weights; return the bits of everything that they made."""
    for _ in range(count):
        net.run(("forward", "backward"))
        for blobs in net.params.values():
            for blob in blobs:
                blob.data[...] -= 0.01 * blob.diff
    return bits(net)


def bits(net: Net) -> list[bytes]:
    blobs = [blob for many in net.params.values() for blob in many]
    blobs += [blob for name, blob in net.blobs.items() if "split" not in name]
    return [array.tobytes() for blob in blobs for array in (blob.data, blob.diff)]


def bound(works: Sequence[Work], threads: int = 1, state: State | None = None) -> BoundProgram:
    """Bind a program that consists of these steps."""
    lowering = Lowering(assembled(ONLY_INPUT), "float32", seed=1)
    program = lowering.program(("update",), 0, 0, update=works)
    return bind(program, State("float32") if state is None else state, threads)


@kernel(array(1), INT, INT, INT)
def add_slowly(x, turns, begin, end):  # type: ignore[no-untyped-def]
    """Add 1 to x[begin:end] `turns` times."""
    for _ in range(turns):
        for i in range(begin, end):
            x[i] += 1


@kernel(array(1), INT, INT, status=True)
def refuse_marked(x, begin, end):  # type: ignore[no-untyped-def]
    """Return 1 + the first index at which x is -1."""
    for i in range(begin, end):
        if x[i] == -1:
            return 1 + i
    return 0


def counting(name: str, size: int, turns: int = 1, cost: float = 1e5) -> tuple[Buffer, Work]:
    """Return a buffer, and the step that adds to it, in a piece for each element."""
    buffer = Buffer(name, (size,), kind="state")
    step = Step(add_slowly, [update(buffer), turns, BEGIN, END], size, cost)
    return buffer, Work(name, -1, step)


def rng_like(array: np.ndarray) -> np.ndarray:
    return np.random.default_rng(5).normal(size=array.shape).astype(array.dtype)
