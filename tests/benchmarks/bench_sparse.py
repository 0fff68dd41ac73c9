"""Time the candidates of the backward passes of convolution as dy gets sparser, A B A B.

usage: python tests/benchmarks/bench_sparse.py [--shapes NAME ...] [--zeros Z ...] [--rounds 9]

Rates are dense-equivalent: the multiply-adds of the convolution by its definition, times two, over
the median processor time of a pass on one thread, as multiples of the peak measured in the same
run. A pass includes compression, re-laying, reductions and, for the weights, the bias. The last
lines of a shape name the share of zeros from which skipping them wins.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from cgdnn import Net, machine
from cgdnn.kernels.peak import ACCUMULATORS, peak_multiply_adds
from cgdnn.layers._base import Candidate, Slower
from cgdnn.plan.lower import Lowering
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.state import State, bind
from cgdnn.runtime.threaded import ThreadedRun

# images, channels, size, filters, kernel, stride, pad; dy behind 2x2 max pooling where "pooled"
SHAPES = {
    "quick_conv1": (100, 3, 32, 32, 5, 1, 2),
    "quick_conv2": (100, 32, 16, 32, 5, 1, 2),
    "quick_conv3": (100, 32, 8, 64, 5, 1, 2),
    "lenet_conv1": (64, 1, 28, 20, 5, 1, 0),
    "lenet_conv2": (64, 20, 12, 50, 5, 1, 0),
    "alexnet_conv3": (8, 256, 13, 384, 3, 1, 1),
    "vgg_2_2": (1, 128, 112, 128, 3, 1, 1),
    "resnet_1x1": (4, 256, 56, 64, 1, 1, 0),
    "resnet_3x3_stride2": (4, 128, 56, 128, 3, 2, 1),
}
PASSES = ("backward_weights", "backward_data")
ZEROS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.99)


def description(name: str) -> NetParameter:
    """Return a net of one convolution that needs both gradients."""
    images, channels, size, filters, taps, stride, pad = SHAPES[name]
    message = NetParameter(name=name, force_backward=True)
    message.layer.add(name="x", type="Input", top=["x"]).input_param.shape.add(
        dim=(images, channels, size, size)
    )
    layer = message.layer.add(name="conv", type="Convolution", bottom=["x"], top=["y"])
    param = layer.convolution_param
    param.num_output = filters
    param.kernel_size[:], param.stride[:], param.pad[:] = [taps], [stride], [pad]
    param.weight_filler.type = "xavier"
    return message


def gradient(shape: tuple[int, ...], zeros: float, pooled: bool) -> np.ndarray:
    """Return dy with a share of zeros, or with one non-zero in each window of 2x2."""
    rng = np.random.default_rng(0)
    dy = rng.standard_normal(shape, dtype=np.float32)
    if not pooled:
        dy[rng.random(shape) < zeros] = 0
        return dy
    height, width = shape[2] // 2, shape[3] // 2
    place = rng.integers(4, size=(*shape[:2], height, 1, width, 1))
    windows = dy[:, :, : 2 * height, : 2 * width].reshape(*shape[:2], height, 2, width, 2)
    windows *= place == np.arange(4).reshape(2, 1, 2)
    dy[:, :, 2 * height :] = dy[:, :, :, 2 * width :] = 0
    return dy


def able(net: Net, which: str) -> Iterator[Candidate]:
    """Yield the sparse candidate of a pass of the convolution, and all that should be fast."""
    layer = net.assembly.layers[1].layer
    for candidate in layer.candidates(which):
        reason = candidate.refuse(layer)
        if reason is None or (candidate.name == "sparse" and isinstance(reason, Slower)):
            yield candidate


def peak() -> float:
    """Return the floating-point operations a second of multiply-adds from registers."""
    lanes, rounds, seconds = machine.vector_bytes() // 4, 100_000, []
    x = np.full(2 * ACCUMULATORS * lanes, 0.5, np.float32)
    for _ in range(8):
        x[:] = 0.5
        begin = time.process_time()
        peak_multiply_adds(x, rounds)
        seconds.append(time.process_time() - begin)
    return 2 * lanes * ACCUMULATORS * rounds / statistics.median(seconds[1:])


def prepared(net: Net, which: str, candidate: Candidate, dy: np.ndarray) -> Callable[[], None]:
    """Return a function that runs a pass of the convolution."""
    planned, blobs = net.assembly.layers[1], net.assembly.blobs
    lowering = Lowering(net.assembly, "float32", seed=0)
    lowering.choices[1] = {**lowering.choices[1], which: candidate}
    state = State("float32")
    rng = np.random.default_rng(0)
    for buffer in (blobs[planned.node.bottoms[0]].data, *(data for data, _ in planned.views)):
        array = state.array(buffer)
        array[...] = rng.standard_normal(array.shape, dtype=np.float32)
    state.array(blobs[planned.node.tops[0]].diff)[...] = dy
    run = ThreadedRun(bind(lowering.single_pass(1, which), state, 1), 1)

    def once(kept: State = state) -> None:  # the state holds the memory
        run.run()

    return once


def measure(net: Net, zeros: float, pooled: bool, rounds: int) -> dict[tuple[str, str], float]:
    """Return the median seconds of each candidate of each pass."""
    planned = net.assembly.layers[1]
    shape = net.assembly.blobs[planned.node.tops[0]].shape
    dy = gradient(shape, zeros, pooled)
    planned.layer.zeros = zeros  # as counted in training
    runs = {
        (which, candidate.name): prepared(net, which, candidate, dy)
        for which in PASSES
        for candidate in able(net, which)
    }
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(rounds + 1):
        for key, run in runs.items():
            begin = time.process_time()
            run()
            seconds[key].append(time.process_time() - begin)
    return {key: statistics.median(taken[1:]) for key, taken in seconds.items()}


def report(name: str, zeros: list[float], rounds: int) -> None:
    """Print the lines of one shape."""
    net = Net(description(name), threads=1)
    work = 2.0 * net.assembly.layers[1].layer.multiply_adds()
    keys: list[tuple[str, str]] = []
    winning = dict.fromkeys(PASSES, "none")
    cases = [(f"{share:.2f}", share, False) for share in zeros]
    for label, share, pooled in [*cases, ("pooled", 0.75, True)]:
        taken = measure(net, share, pooled, rounds)
        best = peak()
        if not keys:
            keys = list(taken)
            print(f"\n{name}, peak {1e-9 * best:.0f} GF/s, dense limit {1e3 * work / best:.2f} ms")
            heads = (f"{which.removeprefix('backward_')} {how}"[:18] for which, how in keys)
            print("zeros " + "".join(f"{head:>20s}" for head in heads) + f"{'both sparse':>20s}")
        cells = [taken[key] for key in keys] + [sum(taken[which, "sparse"] for which in PASSES)]
        limits = [work / best] * len(keys) + [2 * work / best]
        print(
            f"{label:6s}"
            + "".join(
                f"{1e3 * cell:11.3f} ms{limit / cell:5.2f}x"
                for cell, limit in zip(cells, limits, strict=True)
            ),
            flush=True,
        )
        for which in PASSES:
            fastest = min((key for key in keys if key[0] == which), key=lambda key: taken[key])
            if pooled:
                continue
            if fastest[1] != "sparse":
                winning[which] = "none"
            elif winning[which] == "none":
                winning[which] = label
    for which, label in winning.items():
        print(f"{which}: sparse wins from {label}")


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--zeros", nargs="+", type=float, default=list(ZEROS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for name in options.shapes:
        report(name, options.zeros, options.rounds)


if __name__ == "__main__":
    main()
