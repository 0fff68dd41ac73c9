"""What `test` and `time` share: options that select a net and how often it runs."""

from __future__ import annotations

import argparse

from cgdnn.errors import UsageError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add FILE and the options, in Caffe's spellings too."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="a net")
    parser.add_argument("--model", "-model", metavar="FILE", help="the same as FILE")
    parser.add_argument("--iterations", "-iterations", type=int, default=50, metavar="N")
    parser.add_argument("--level", "-level", type=int, default=0, metavar="N")
    parser.add_argument("--stage", "-stage", default="", metavar="NAME[,NAME]")
    parser.add_argument("--threads", type=int, metavar="N", help="workers; all cores by default")
    parser.add_argument("--gpu", "-gpu", metavar="IDS", help="accepted and ignored")


def check_options(args: argparse.Namespace) -> str:
    """Return the path of the net.

    Raises
    ------
    UsageError
        No net is named, or two are; or there is nothing to run.
    """
    files = [name for name in (args.file, args.model) if name is not None]
    if len(files) != 1:
        raise UsageError(
            f"got {len(files)} nets ({', '.join(files) or 'none'}), expected one. "
            "Name it with --model=lenet_train_test.prototxt."
        )
    if args.iterations < 1:
        raise UsageError(
            f"--iterations: got {args.iterations}, expected at least 1. Give a larger number."
        )
    return str(files[0])


def stages(args: argparse.Namespace) -> list[str]:
    """Return the stages; none for an empty text (Caffe makes that a stage "")."""
    return [stage for stage in args.stage.split(",") if stage]
