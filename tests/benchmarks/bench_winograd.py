"""Time Winograd's algorithm against the other dense kernels as nets run them, on one core.

usage: python tests/benchmarks/bench_winograd.py [--shapes NAME ...] [--rounds 7]

All candidates of a pass take turns, A B A B. Rates are dense-equivalent: the multiply-adds of the
convolution by its definition, times two, over the time of a pass: transforms, re-laying,
transformed weights and reductions included. Times are medians of processor time, so that other
processes disturb them less.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from cgdnn.layers._base import Candidate
from cgdnn.netdef.graph import build_graph
from cgdnn.netdef.read import read_net
from cgdnn.plan.lower import PASSES, Lowering
from cgdnn.plan.shapes import Assembly, assemble
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.state import State, bind
from cgdnn.runtime.threaded import ThreadedRun

# channels, filters, size, taps, pad, images, group
SHAPES = {
    "quick_conv2": (32, 32, 16, 5, 2, 100, 1),
    "quick_conv3": (32, 64, 8, 5, 2, 100, 1),
    "lenet_conv2": (20, 50, 12, 5, 0, 64, 1),
    "alexnet_conv2": (96, 256, 27, 5, 2, 32, 2),
    "alexnet_conv3": (256, 384, 13, 3, 1, 32, 1),
    "alexnet_conv4": (384, 384, 13, 3, 1, 32, 2),
    "vgg_1_2": (64, 64, 224, 3, 1, 8, 1),
    "vgg_2_2": (128, 128, 112, 3, 1, 8, 1),
    "vgg_3_2": (256, 256, 56, 3, 1, 8, 1),
    "vgg_4_2": (512, 512, 28, 3, 1, 8, 1),
    "vgg_5_2": (512, 512, 14, 3, 1, 8, 1),
    "resnet_2": (64, 64, 56, 3, 1, 8, 1),
    "resnet_3": (128, 128, 28, 3, 1, 8, 1),
    "resnet_4": (256, 256, 14, 3, 1, 8, 1),
    "resnet_5": (512, 512, 7, 3, 1, 8, 1),
    "googlenet_3a_3x3": (96, 128, 28, 3, 1, 16, 1),
    "googlenet_3a_5x5": (16, 32, 28, 5, 2, 16, 1),
    "googlenet_4a_5x5": (16, 48, 14, 5, 2, 16, 1),
    "googlenet_4e_3x3": (160, 320, 14, 3, 1, 16, 1),
    "googlenet_5b_3x3": (192, 384, 7, 3, 1, 16, 1),
}
LEFT_OUT = ("sparse", "parallel_gemm")
LAYER = 1
TURN_SECONDS = 0.01


def assembly_of(name: str) -> Assembly:
    """Return a net of an Input layer and the convolution, with all passes."""
    channels, filters, size, taps, pad, images, group = SHAPES[name]
    message = NetParameter(name=name, force_backward=True)
    data = message.layer.add(name="x", type="Input", top=["x"])
    data.input_param.shape.add(dim=(images, channels, size, size))
    layer = message.layer.add(name="conv", type="Convolution", bottom=["x"], top=["y"])
    param = layer.convolution_param
    param.num_output, param.group = filters, group
    param.kernel_size[:], param.pad[:] = [taps], [pad]
    return assemble(build_graph(read_net(message), "TRAIN"))


def prepare(assembly: Assembly, which: str, candidate: Candidate) -> tuple[ThreadedRun, State]:
    """Return the pass of the convolution by one candidate, and the memory that it works on."""
    lowering = Lowering(assembly, "float32", seed=1)
    lowering.choices[LAYER] = {**lowering.choices[LAYER], which: candidate}
    state = State("float32")
    planned = assembly.layers[LAYER]
    generator = np.random.default_rng(0)
    buffers = [assembly.blobs[i].data for i in planned.node.bottoms]
    buffers += [assembly.blobs[i].diff for i in planned.node.tops]
    for buffer in [*buffers, *(data for data, _ in planned.views)]:
        array = state.array(buffer)
        array[...] = generator.standard_normal(array.shape, dtype=np.float32)
    return ThreadedRun(bind(lowering.single_pass(LAYER, which), state, 1), 1), state


def turn_seconds(run: ThreadedRun, count: int) -> float:
    """Run so many times; return the mean seconds of processor time."""
    start = time.process_time()
    for _ in range(count):
        run.run()
    return (time.process_time() - start) / count


def main() -> None:
    """Print one line for each shape and pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for name in options.shapes:
        assembly = assembly_of(name)
        layer = assembly.layers[LAYER].layer
        flops = 2 * layer.multiply_adds()
        for which in PASSES:
            able = [
                candidate
                for candidate in layer.candidates(which)
                if candidate.name not in LEFT_OUT and candidate.refuse(layer) is None
            ]
            made = [prepare(assembly, which, candidate) for candidate in able]
            turns = [(run, 1 + int(TURN_SECONDS / turn_seconds(run, 2))) for run, _ in made]
            rounds = [[turn_seconds(*turn) for turn in turns] for _ in range(options.rounds)]
            medians = map(statistics.median, zip(*rounds, strict=True))
            cells = (
                f"{candidate.name} {1e3 * median:.2f} ms {flops / median / 1e9:.0f} GF/s"
                for candidate, median in zip(able, medians, strict=True)
            )
            print(f"{name:18s}{which:18s}" + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
