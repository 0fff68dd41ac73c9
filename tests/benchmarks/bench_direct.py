"""Time the direct convolution kernels against unfolding, on one core.

usage: python tests/benchmarks/bench_direct.py [--rounds 5] [--layers lenet1 vgg64 ...]

For each layer and pass: milliseconds, GF/s and share of the peak of each kernel. The peak is that
of a loop of multiply-adds on registers. Contenders take turns; times are medians of this thread's
processor time, without the packing of weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from sys import path

import numpy as np

path.insert(0, str(Path(__file__).resolve().parents[2]))

from cgdnn.kernels import conv_direct as direct
from cgdnn.kernels import conv_unfold as unfold
from cgdnn.kernels import stencil
from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.kernels.vector import emitted
from tests.reference.conv import row_tables

# images, group, channels and filters of a group, (size, kernel, stride, pad, dilation)
LAYERS = {
    "lenet1": (64, 1, 1, 20, (28, 5, 1, 0, 1)),
    "lenet2": (64, 1, 20, 50, (12, 5, 1, 0, 1)),
    "cifar1": (100, 1, 3, 32, (32, 5, 1, 2, 1)),
    "cifar2": (100, 1, 32, 32, (16, 5, 1, 2, 1)),
    "cifar3": (100, 1, 32, 64, (8, 5, 1, 2, 1)),
    "alexnet1": (8, 1, 3, 96, (227, 11, 4, 0, 1)),
    "alexnet2": (8, 2, 48, 128, (27, 5, 1, 2, 1)),
    "alexnet3": (8, 1, 256, 384, (13, 3, 1, 1, 1)),
    "vgg64": (1, 1, 64, 64, (224, 3, 1, 1, 1)),
    "vgg256": (1, 1, 256, 256, (56, 3, 1, 1, 1)),
    "vgg512": (4, 1, 512, 512, (14, 3, 1, 1, 1)),
    "resnet1": (4, 1, 3, 64, (224, 7, 2, 3, 1)),
    "resnet3s2": (4, 1, 128, 128, (56, 3, 2, 1, 1)),
    "point64": (2, 1, 64, 256, (56, 1, 1, 0, 1)),
    "point256": (2, 1, 256, 64, (56, 1, 1, 0, 1)),
    "point2048": (8, 1, 512, 2048, (7, 1, 1, 0, 1)),
    "point_s2": (4, 1, 256, 512, (56, 1, 2, 0, 1)),
    "depthwise": (4, 128, 1, 1, (56, 3, 1, 1, 1)),
    "depthwise_s2": (4, 128, 1, 1, (56, 3, 2, 1, 1)),
}
PEAK_STEPS, PEAK_SUMS = 200_000, 16


@emitted
def multiply_add_registers(e, x, steps):
    """Run as many independent multiply-adds a step as there are sums."""
    place = [e.at(x, e.integer(i * e.lanes)) for i in range(PEAK_SUMS + 1)]
    sums = [e.variable(e.load(pointer)) for pointer in place[1:]]
    factor = e.load(place[0])
    with e.loop(steps):
        for slot in sums:
            e.builder.store(e.multiply_add(factor, e.builder.load(slot), factor), slot)
    for slot, pointer in zip(sums, place[1:], strict=True):
        e.store(e.builder.load(slot), pointer)


@kernel(array(1), INT)
def peak(x, steps):
    """Run at the machine's peak."""
    multiply_add_registers(x, steps)


def aligned(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Return random numbers, or zeros for integers, at the start of a cache line."""
    memory = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    values = memory[start : start + memory.size - 64].view(dtype).reshape(shape)
    if dtype == "float32":
        values[...] = np.random.default_rng(0).standard_normal(shape, np.float32)
    return values


class Layer:
    """The arrays of one layer, and its passes as functions without arguments."""

    def __init__(self, name: str) -> None:
        self.images, self.group, channels, filters, axis = LAYERS[name]
        side = stencil.Side(*axis)
        self.window = stencil.Window(self.group, channels, filters, side, side)
        self.x = aligned(self.images, self.group * channels, side.size, side.size)
        self.w = aligned(self.group * filters, channels, side.kernel, side.kernel)
        self.b = aligned(self.group * filters)
        self.y = aligned(self.images, self.group * filters, side.output, side.output)
        self.flops = 2 * self.y.size * self.w[0].size
        self.contenders = {
            "forward": {"unfold": self.unfold_forward()},
            "backward_data": {"unfold": self.unfold_backward_data()},
            "backward_weights": {
                "unfold": self.unfold_backward_weights(),
                "direct": self.direct_backward_weights(),
            },
        }
        self.add_direct("forward", stencil.forward, self.x, self.y)
        self.add_direct("backward_data", stencil.backward_data, self.y, self.x)

    def add_direct(self, which: str, describe: Callable, x: np.ndarray, y: np.ndarray) -> None:
        """Add the contenders with filters and with pixels in the lanes."""
        window = self.window.flat
        if window is not self.window:
            shape = (window.rows.size, window.columns.size)
            x, y = (a.reshape(*a.shape[:2], *shape) for a in (x, y))
        for name in ("filters", "pixels"):
            if name == "pixels" and which == "backward_data" and window.columns.stride > 1:
                continue
            plan = describe(window, pixel_lanes=name == "pixels")
            packed = aligned(*plan.weights)
            w = self.w.reshape(*self.w.shape[:2], -1)
            transposed = which == "backward_data"
            direct.conv_direct_pack(
                w, packed, self.group, transposed, name == "filters", 0, len(packed)
            )
            has_bias = which == "forward"
            u, t = aligned(plan.relaid), aligned(plan.chunk)
            args = [x, packed, self.b, has_bias, y, *plan.tables, *plan.numbers, u]
            if name == "filters":
                args += [plan.block, plan.most, t]
            else:
                args.append(plan.width)
            run = getattr(direct, f"conv_direct_{name}")
            self.contenders[which][name] = lambda run=run, args=args: run(*args, 0, self.images)

    def direct_backward_weights(self) -> Callable[[], object]:
        """Return the weight gradient by direct convolution."""
        window = self.window.flat
        plan = stencil.backward_weights(window)
        unit = stencil.unit_filters()
        dw, db = aligned(1, plan.units * plan.depth * unit), aligned(1, plan.units * unit)
        u, v = aligned(plan.relaid), aligned(plan.vectors)
        sides = (window.rows, window.columns)
        x = self.x.reshape(*self.x.shape[:2], *(side.size for side in sides))
        dy = self.y.reshape(*self.y.shape[:2], *(side.output for side in sides))
        return lambda: direct.conv_direct_backward_weights(
            *(x, dy, dw, db, 1, plan.firsts, *plan.numbers, u, v, 0, 0, self.images)
        )

    def geometry(self) -> tuple:
        """Return the sizes and tables that the unfolding kernels take."""
        side = self.window.rows
        rows, outputs = row_tables([(side.size, side.kernel, side.stride, side.pad, side.dilation)])
        return rows, outputs, (side.stride, side.pad, side.dilation)

    def unfold_forward(self) -> Callable[[], object]:
        """Return the forward pass by unfolding."""
        rows, _, axis = self.geometry()
        u = aligned(unfold.forward_scratch(self.window.channels, self.window.taps))
        return lambda: unfold.conv_forward_unfold(
            self.x, self.w, self.b, 1, self.y, rows, *axis, u, 0, self.images
        )

    def unfold_backward_data(self) -> Callable[[], object]:
        """Return the data gradient by unfolding."""
        rows, outputs, axis = self.geometry()
        pixels = self.y[0, 0].size
        du = aligned(unfold.backward_data_scratch(self.window.channels, self.window.taps, pixels))
        return lambda: unfold.conv_backward_data_unfold(
            self.y, self.w, self.x, outputs, rows, *axis, du, 0, self.images
        )

    def unfold_backward_weights(self) -> Callable[[], object]:
        """Return the weight gradient by unfolding."""
        rows, _, axis = self.geometry()
        side = self.window.columns
        u, places = unfold.backward_weights_scratch(
            self.window.channels,
            self.window.taps,
            side.kernel,
            self.y.shape[2:],
            side.size + 2 * side.pad,
        )
        dw, db = aligned(1, self.w.size), aligned(1, self.b.size)
        arrays = (dw, db, 1, self.group, side.kernel, rows, *axis)
        scratch = (aligned(u), aligned(places, dtype="int64"))
        return lambda: unfold.conv_backward_weights_unfold(
            self.x, self.y, *arrays, *scratch, 0, 0.0, 0.0, 1, 0, len(self.b), 0, self.images
        )


def main() -> None:
    """Measure and print a line for each layer, pass and kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument(
        "--passes", nargs="+", default=["forward", "backward_data", "backward_weights"]
    )
    options = parser.parse_args()
    registers = aligned((PEAK_SUMS + 1) * 16)
    peak_flops = 2 * PEAK_STEPS * PEAK_SUMS * stencil.unit_filters()
    for name in options.layers:
        layer = Layer(name)
        for which in options.passes:
            runs = {"peak": lambda: peak(registers, PEAK_STEPS), **layer.contenders[which]}
            times: dict[str, list[float]] = {kind: [] for kind in runs}
            for turn in range(options.rounds + 1):
                for kind, run in runs.items():
                    start = time.thread_time()
                    run()
                    if turn:  # the first one compiles
                        times[kind].append(time.thread_time() - start)
            medians = {kind: statistics.median(values) for kind, values in times.items()}
            top = peak_flops / medians.pop("peak")
            cells = [
                f"{kind} {t * 1e3:7.2f} ms {rate / 1e9:4.0f} GF/s {rate / top:4.2f}"
                for kind, t in medians.items()
                for rate in [layer.flops / t]
            ]
            print(f"{name:12} {which:16} ", "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
