"""`cgdnn plan`: print the tasks, kernels, layouts and buffers that a net is compiled into."""

from __future__ import annotations

import argparse
from typing import Any

from cgdnn import machine
from cgdnn.cli._describe import add_net_options, assemble_net, heading, plan_iteration
from cgdnn.cli._table import print_table
from cgdnn.cli._tuning import add_tune_option, tuning_of
from cgdnn.errors import UsageError
from cgdnn.plan.check import check
from cgdnn.plan.lower import Lowering
from cgdnn.plan.show import bytes_text, describe, edges


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "plan", help="print the tasks, kernels, layouts and buffers of a net", description=__doc__
    )
    add_net_options(parser)
    parser.add_argument(
        "--threads", type=int, metavar="N", help="workers that scratch memory is counted for"
    )
    add_tune_option(parser)
    parser.add_argument("--tasks", action="store_true", help="list every task with its edges")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan of an iteration of SGD, or in the phase TEST of a forward pass."""
    threads = machine.default_threads() if args.threads is None else args.threads
    if threads < 1:
        raise UsageError(
            f"--threads: got {threads}, expected 1 or more. Leave it out for all cores."
        )
    assembly = assemble_net(args)
    lowering = Lowering(assembly, "float32", seed=1, table=tuning_of(args))
    program = plan_iteration(lowering)
    check(program)
    print(heading(assembly.graph, args) + "\n")
    for table in describe(lowering, program, every_task=args.tasks):
        print_table(table)
    joins = sum(task.step is None for task in program.tasks)
    scratch = bytes_text(program.scratch_bytes)
    print(f"{len(program.tasks)} tasks ({joins} of them joins), {edges(program)} edges")
    print(
        f"arena {bytes_text(program.arena_bytes)}, scratch {scratch} for each of {threads} workers"
    )
    print("check: every order that the edges allow gives the same result")
    return 0
