"""The option `--tune` of the commands that run a net."""

from __future__ import annotations

import argparse

from cgdnn.plan.tune import TuningTable, default_path


def add_tune_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--tune``."""
    parser.add_argument(
        "--tune",
        choices=("on", "off"),
        default="on",
        help="off: let shapes alone choose the kernels, not the table that `cgdnn tune` wrote",
    )


def tuning_of(args: argparse.Namespace) -> TuningTable | None:
    """Return the table of this machine, or None where the command is to ignore it.

    Raises
    ------
    DataError
        The file is no tuning table.
    """
    return TuningTable.read(default_path()) if args.tune == "on" else None
