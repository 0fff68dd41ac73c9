"""`cgdnn tune`: measure which kernel runs each pass of a net fastest on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from cgdnn import machine
from cgdnn.cli._describe import add_net_options, assemble_net
from cgdnn.plan.tune import TuningTable, default_path
from cgdnn.runtime.measure import tune


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "tune",
        help="measure which kernel runs each pass of a net fastest",
        description=f"{__doc__} The table is kept in a file; `cgdnn train`, `test` and `time` "
        "choose by it unless --tune off is given. Without a table the shapes decide.",
        allow_abbrev=False,
    )
    add_net_options(parser)
    parser.add_argument(
        "--zeros",
        type=float,
        default=0.0,
        help="share of zeros in the gradients that backward kernels are measured with",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure what the table lacks, and write it."""
    path = default_path()
    table = TuningTable.read(path)
    assembly = assemble_net(args)
    for planned in assembly.layers:
        planned.layer.zeros = args.zeros
    print(f"{machine.description()}, one core")
    tune(assembly, "float32", table, print)
    table.write(path)
    print(f"wrote {path}")
    return 0
