"""The options `--tune` and `--exact`: how the kernels of a net are chosen."""

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


def add_exact_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--exact``."""
    parser.add_argument(
        "--exact",
        action="store_true",
        help="forbid convolution by Winograd's algorithm, which is faster but rounds worse",
    )


def tuning_of(args: argparse.Namespace) -> TuningTable | None:
    """Return the table of this machine, or None where the command is to ignore it.

    Raises
    ------
    DataError
        The file is no tuning table.
    """
    return TuningTable.read(default_path()) if args.tune == "on" else None
