"""Train cifar10_quick and write the table of sparsity.md and its picture, sparsity.svg.

usage: python docs/plot_sparsity.py DIR [--iterations 2000]

DIR is a folder with the databases and the mean that `cgdnn fetch cifar10 --to DIR` builds. The
shares of zeros are the same bits on every machine of one vector width, and for any number of
threads; rates are measured here, on one core.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

import cgdnn
from cgdnn.proto.cgdnn_pb2 import SolverParameter
from cgdnn.runtime.measure import peak_flops

HERE = Path(__file__).resolve().parent
SOLVER = HERE.parent / "datasets" / "cifar10" / "cifar10_quick_solver.prototxt"
LAYERS = ("conv1", "conv2", "conv3")
TRACED = 10
"""Iterations up to each row whose tasks are timed; the fastest counts."""
BEGIN, END = "<!-- table of plot_sparsity.py -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Backward:
    """Both backward passes of a layer after so many iterations.

    Attributes
    ----------
    zeros : float
        Share of exact zeros in the gradient of the layer's top.
    dense, goodput : float
        GF/s with and without the multiplications by these zeros.
    kernels : str
    """

    zeros: float
    dense: float
    goodput: float
    kernels: str


Row = dict[str, Backward]


def train(folder: Path, iterations: int) -> dict[int, Row]:
    """Return the rows by iteration: after 1, 20, 100 and then every 100."""
    os.chdir(folder)  # the net names its files from here
    param = text_format.Parse(SOLVER.read_text(), SolverParameter())
    param.net = str(SOLVER.parent / param.net)
    for field in ("test_iter", "test_interval", "display", "snapshot"):
        param.ClearField(field)
    param.snapshot_after_train = False
    solver = cgdnn.Solver(param, threads=1)
    rows = {}
    for iteration in (1, 20, *range(100, iterations + 1, 100)):
        solver.step(max(0, iteration - solver.iter - TRACED))
        kernels = solver.net.choose_kernels({})  # changes nothing: names what has been chosen
        seconds = [_step(solver) for _ in range(iteration - solver.iter - 1)]
        solver.net.watch_zeros()
        seconds.append(_step(solver))
        rows[iteration] = _row(solver.net, seconds, kernels)
    return rows


def _step(solver: cgdnn.Solver) -> dict[str, float]:
    """Run an iteration; return the seconds of each layer's backward passes."""
    solver.traced = []
    solver.step(1)
    seconds = dict.fromkeys(LAYERS, 0.0)
    for task in solver.traced:
        name, _, which = task.name.partition("[")[0].rpartition(".")
        if name in LAYERS and which.startswith("backward"):
            seconds[name] += 1e-9 * (task.end - task.begin)
    solver.traced = None
    return seconds


def _row(net: cgdnn.Net, seconds: Sequence[dict[str, float]], kernels: dict[str, str]) -> Row:
    """Return the zeros of the last iteration, and the rates of the fastest."""
    zeros = net.count_zeros()
    row = {}
    for planned in net.assembly.layers:
        name = planned.node.name
        if name in LAYERS:
            passes = ["backward_weights"] + ["backward_data"] * any(planned.propagate)
            flops = 2 * planned.layer.multiply_adds() * len(passes)
            dense = 1e-9 * flops / min(taken[name] for taken in seconds)
            chosen = dict.fromkeys(kernels[f"{name}.{which}"] for which in passes)
            useful = (1 - zeros[name]) * dense
            row[name] = Backward(zeros[name], dense, useful, ", ".join(chosen))
    return row


def table(rows: dict[int, Row]) -> str:
    """Return the rows in Markdown."""
    head = ["iteration"]
    for layer in LAYERS:
        head += [f"{layer} zeros", "dense", "goodput", "kernels"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for iteration, row in rows.items():
        cells = [str(iteration)]
        for layer in LAYERS:
            found = row[layer]
            cells += [f"{found.zeros:.3f}", f"{found.dense:.0f}", f"{found.goodput:.0f}"]
            cells.append(found.kernels)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


WIDTH, HEIGHT, LEFT, TOP, GAP = 640, 190, 56, 28, 64
COLORS = {"conv1": "#1b6ca8", "conv2": "#c8553d", "conv3": "#3b8c4f"}


def _panel(
    top: int, title: str, lines: dict[str, list[tuple[int, float]]], most: float, step: float
) -> list[str]:
    """Return a panel: titled axes from 0 to `most` with a tick each `step`, and a line a layer."""
    last = max(x for points in lines.values() for x, _ in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + WIDTH * x / last, top + HEIGHT * (1 - y / most)

    drawn = [f'<text x="{LEFT}" y="{top - 10}" font-weight="bold">{title}</text>']
    for tick in range(round(most / step) + 1):
        value = tick * step
        x, y = at(0, value)
        drawn.append(f'<path d="M{x:.0f} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        drawn.append(f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for tick in range(0, last + 1, 500):
        x, y = at(tick, 0)
        drawn.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{tick}</text>')
    for place, (layer, points) in enumerate(lines.items()):
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in points)
        color = COLORS[layer]
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        x = LEFT + WIDTH - 180 + 62 * place
        drawn.append(f'<text x="{x}" y="{top - 10}" fill="{color}">{layer}</text>')
    return drawn


def picture(rows: dict[int, Row]) -> str:
    """Return the rows as SVG: shares of zeros above, goodput below."""
    zeros = {layer: [(i, row[layer].zeros) for i, row in rows.items()] for layer in LAYERS}
    rates = {layer: [(i, row[layer].goodput) for i, row in rows.items()] for layer in LAYERS}
    most = max(y for points in rates.values() for _, y in points)
    below = TOP + HEIGHT + GAP
    size = f'width="{LEFT + WIDTH + 24}" height="{below + HEIGHT + 32}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_panel(TOP, "zeros in the top's gradient, by iteration", zeros, 1, 0.25),
        *_panel(below, "goodput of both backward passes, GF/s", rates, -(-most // 50) * 50, 50),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """Train, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--iterations", type=int, default=2000)
    args = parser.parse_args(words)
    page = HERE / "sparsity.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = train(args.folder, args.iterations)
    peak = f"Peak of the core in this run: {1e-9 * peak_flops():.0f} GF/s.\n"
    page.write_text(f"{before}{BEGIN}\n{peak}\n{table(rows)}{END}{after}")
    (HERE / "sparsity.svg").write_text(picture(rows))


if __name__ == "__main__":
    main()
