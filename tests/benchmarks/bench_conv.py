"""Time each pass of convolution layers on one core, as a net runs it, against the core's peak.

usage: python tests/benchmarks/bench_conv.py [--shapes NAME ...] [--rounds 15]

A rate is the multiply-adds of a pass by its definition, times two, over the time that its tasks
took at best, reductions included. The peak is the rate of a matrix product that lies in the
first cache.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import numpy as np

from cgdnn import Net
from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.kernels.gemm import ZERO, multiply_nn
from cgdnn.proto.cgdnn_pb2 import NetParameter

# images, channels, size, filters, kernel, stride, pad, group
SHAPES = {
    "lenet_conv1": (64, 1, 28, 20, 5, 1, 0, 1),
    "lenet_conv2": (64, 20, 12, 50, 5, 1, 0, 1),
    "quick_conv1": (100, 3, 32, 32, 5, 1, 2, 1),
    "quick_conv2": (100, 32, 16, 32, 5, 1, 2, 1),
    "quick_conv3": (100, 32, 8, 64, 5, 1, 2, 1),
    "alexnet_conv1": (8, 3, 227, 96, 11, 4, 0, 1),
    "alexnet_conv2": (8, 96, 27, 256, 5, 1, 2, 2),
    "alexnet_conv3": (8, 256, 13, 384, 3, 1, 1, 1),
    "vgg_1_2": (1, 64, 224, 64, 3, 1, 1, 1),
    "vgg_5_2": (4, 512, 14, 512, 3, 1, 1, 1),
    "resnet_1x1": (4, 256, 56, 64, 1, 1, 0, 1),
    "resnet_3x3_stride2": (4, 128, 56, 128, 3, 2, 1, 1),
}
PASSES = ("forward", "backward_weights", "backward_data")


@kernel(array(2), array(2), array(2), INT)
def repeated_product(a, b, c, times):
    for _ in range(times):
        multiply_nn(
            *(a, 0, a.shape[1], 1, b, 0, b.shape[1], c, 0, c.shape[1]),
            *(a.shape[0], b.shape[1], a.shape[1], ZERO, a, 0, 0),
        )


def peak(rounds: int) -> float:
    """Return GF/s of a product of matrices in the first cache."""
    a, b = np.ones((48, 128), np.float32), np.ones((128, 64), np.float32)
    c, times = np.empty((48, 64), np.float32), 1000
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        repeated_product(a, b, c, times)
        seconds.append(time.perf_counter() - start)
    return 2e-9 * times * c.size * a.shape[1] / min(seconds[1:])


def measure(name: str, rounds: int) -> tuple[float, dict[str, float]]:
    """Return the multiply-adds of a pass, and the seconds of each at best."""
    images, channels, size, filters, taps, stride, pad, group = SHAPES[name]
    message = NetParameter(name=name, force_backward=True)
    message.layer.add(name="x", type="Input", top=["x"]).input_param.shape.add(
        dim=(images, channels, size, size)
    )
    layer = message.layer.add(name="conv", type="Convolution", bottom=["x"], top=["y"])
    param = layer.convolution_param
    param.num_output, param.group = filters, group
    param.kernel_size[:], param.stride[:], param.pad[:] = [taps], [stride], [pad]
    param.weight_filler.type = "xavier"
    net = Net(message, threads=1)
    rng = np.random.default_rng(0)
    net.blobs["x"].data[...] = rng.standard_normal(net.blobs["x"].shape)
    net.blobs["y"].diff[...] = rng.standard_normal(net.blobs["y"].shape)
    times: dict[str, list[float]] = {which: [] for which in PASSES}
    for _ in range(rounds + 1):
        sums: Counter[str] = Counter()
        for task in net.run(("forward", "backward"), trace=True):
            sums[task.name.partition("[")[0].rpartition(".")[2]] += task.end - task.begin
        for which in PASSES:
            times[which].append(sums[which] * 1e-9)
    work = float(net.assembly.layers[1].layer.multiply_adds())
    return work, {which: min(taken[1:]) for which, taken in times.items()}


def main() -> None:
    """Print one line for each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"peak {peak(options.rounds):.0f} GF/s")
    print(f"{'shape':20s}" + "".join(f"{which + ' ms':>20s}{'GF/s':>6s}" for which in PASSES))
    for name in options.shapes:
        work, seconds = measure(name, options.rounds)
        cells = (f"{1e3 * s:20.3f}{2e-9 * work / s:6.0f}" for s in seconds.values())
        print(f"{name:20s}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
