"""`cgdnn summary`: print shapes, parameters, multiply-adds and memory of a net; needs no data."""

from __future__ import annotations

import argparse
from typing import Any

from cgdnn import machine
from cgdnn.cli._describe import add_net_options, assemble_net, heading, plan_iteration
from cgdnn.cli._table import print_table
from cgdnn.plan.lower import Lowering
from cgdnn.plan.shapes import Assembly
from cgdnn.plan.show import Table, bytes_text, shape_text
from cgdnn.plan.summary import REAL_BYTES, memory, summarize

_COLUMNS = ("layer", "type", "output", "#parameters", "#multiply-adds", "#activations")


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "summary",
        help="print shapes, parameters, multiply-adds and memory of a net",
        description=__doc__,
    )
    add_net_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a row for each layer (automatic Splits left out), and the sums."""
    assembly = assemble_net(args)
    layers = summarize(assembly)
    rows = [
        (
            layer.name,
            layer.type,
            " ".join(map(shape_text, layer.shapes)),
            f"{layer.parameters:,}",
            f"{layer.multiply_adds:,}",
            bytes_text(layer.activation_bytes),
        )
        for layer in layers
        if layer.type != "Split"
    ]
    print_table(Table(heading(assembly.graph, args), _COLUMNS, rows))
    parameters = sum(layer.parameters for layer in layers)
    statistics = sum(layer.statistics for layer in layers)
    also = f", and {statistics:,} statistics that are not learned" if statistics else ""
    print(f"parameters     {parameters:,} ({bytes_text(REAL_BYTES * parameters)}){also}")
    print(f"multiply-adds  {sum(layer.multiply_adds for layer in layers):,} a forward pass")
    print(f"activations    {bytes_text(sum(layer.activation_bytes for layer in layers))}")
    print(
        f"gradients      {bytes_text(sum(layer.gradient_bytes for layer in layers))} of activations"
    )
    print_table(_memory(assembly, machine.default_threads()))
    return 0


def _memory(assembly: Assembly, threads: int) -> Table:
    """Return the table of what an iteration of SGD needs, or in the phase TEST a forward pass."""
    lowering = Lowering(assembly, "float32", seed=1)
    found = memory(lowering, plan_iteration(lowering), threads)
    found["together"] = sum(found.values())
    what = "an iteration of SGD" if assembly.graph.phase == "TRAIN" else "a forward pass"
    rows = [(name, bytes_text(size)) for name, size in found.items()]
    return Table(f"Memory of {what} with {threads} workers", ("what", "#bytes"), rows)
