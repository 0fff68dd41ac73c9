import tracemalloc

import pytest

from cgdnn.plan.buffers import aligned
from cgdnn.plan.lower import Lowering
from cgdnn.plan.summary import LayerSummary, memory, summarize
from tests.plan.planning import LENET, ROOT, assembled

SHARED = """
layer { name: "in" type: "Input" top: "a" top: "b"
  input_param { shape { dim: 2 dim: 3 } } }
layer { name: "one" type: "InnerProduct" bottom: "a" top: "c"
  param { name: "w" } param { name: "v" } inner_product_param { num_output: 4 } }
layer { name: "two" type: "InnerProduct" bottom: "b" top: "d"
  param { name: "w" } param { name: "v" } inner_product_param { num_output: 4 } }
layer { name: "relu" type: "ReLU" bottom: "d" top: "d" }
layer { name: "loss" type: "EuclideanLoss" bottom: "c" bottom: "d" top: "loss" }
"""


def totals(path: str, phase: str) -> tuple[int, int]:
    layers = summarize(assembled(ROOT / "tests" / "nets" / path, phase))
    return sum(layer.parameters for layer in layers), sum(layer.statistics for layer in layers)


def test_lenet_layer_by_layer():
    layers = {layer.name: layer for layer in summarize(assembled(LENET))}
    # 20 maps of 24x24, each number from 25 products; 20 filters of 25 weights and a bias
    assert layers["conv1"] == LayerSummary(
        "conv1",
        "Convolution",
        [(64, 20, 24, 24)],
        520,
        0,
        64 * 20 * 24 * 24 * 25,
        4 * 64 * 20 * 24 * 24,
        4 * 64 * 20 * 24 * 24,
    )
    assert layers["ip1"].parameters == 800 * 500 + 500
    assert layers["ip1"].multiply_adds == 64 * 800 * 500
    assert sum(layer.parameters for layer in layers.values()) == 431080


def test_shared_parameters_and_memory_count_once():
    _, one, two, relu, _ = summarize(assembled(SHARED))
    assert (one.parameters, two.parameters) == (3 * 4 + 4, 0)
    assert (two.activation_bytes, relu.activation_bytes) == (4 * 2 * 4, 0)
    assert (two.gradient_bytes, relu.gradient_bytes) == (4 * 2 * 4, 0)


@pytest.mark.parametrize(
    ("path", "phase", "parameters"),
    [
        ("alexnet.prototxt", "TRAIN", 60_965_224),
        ("caffenet.prototxt", "TRAIN", 60_965_224),
        ("vgg16.prototxt", "TRAIN", 138_357_544),
        ("googlenet.prototxt", "TEST", 6_998_552),  # as deployed
        ("googlenet.prototxt", "TRAIN", 13_378_280),  # with the auxiliary heads
        ("resnet50.prototxt", "TRAIN", 25_557_032),
    ],
)
def test_parameters_of_known_nets(path, phase, parameters):
    assert totals(path, phase)[0] == parameters


def test_statistics_are_not_parameters():
    # 53 BatchNorm layers: mean and variance of 26,560 channels, and a factor each
    assert totals("resnet50.prototxt", "TRAIN")[1] == 2 * 26_560 + 53


def test_nothing_is_allocated():
    tracemalloc.start()
    summarize(assembled(ROOT / "tests" / "nets" / "vgg16.prototxt"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 << 20  # its activations alone take 116 MiB


def test_memory_counts_what_an_iteration_touches():
    assembly = assembled(LENET)
    lowering = Lowering(assembly, "float32", seed=1)
    program = lowering.program(("forward", "backward"), 0, len(assembly.layers))
    found = memory(lowering, program, threads=3)
    weights = [520 - 20, 20, 25000, 50, 400000, 500, 5000, 10]
    assert found["parameters"] == sum(aligned(4 * size) for size in weights)
    assert found["gradients of parameters"] == found["parameters"]
    assert found["solver history"] == 0
    assert found["scratch of all workers"] == 3 * aligned(program.scratch_bytes)
    lent = lowering.program(
        ("forward", "backward"), 0, len(assembly.layers), lent=assembly.lendable()
    )
    less = memory(lowering, lent, threads=3)
    assert less["gradients of blobs"] == aligned(4)  # the loss weight
    assert sum(less.values()) < sum(found.values())
