"""What `test` and `time` share: options that select a net and how often it runs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from cgdnn.cli._log import log, log_on_stderr, warn_of_gpu
from cgdnn.cli._tuning import add_exact_option, add_tune_option, tuning_of
from cgdnn.errors import UsageError
from cgdnn.runtime.net import Net


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add FILE and the options, in Caffe's spellings too."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="a net")
    parser.add_argument("--model", "-model", metavar="FILE", help="the same as FILE")
    parser.add_argument("--iterations", "-iterations", type=int, default=50, metavar="N")
    parser.add_argument("--level", "-level", type=int, default=0, metavar="N")
    parser.add_argument("--stage", "-stage", default="", metavar="NAME[,NAME]")
    parser.add_argument("--threads", type=int, metavar="N", help="workers; all cores by default")
    add_tune_option(parser)
    add_exact_option(parser)
    parser.add_argument("--gpu", "-gpu", metavar="IDS", help="accepted and ignored")


@contextlib.contextmanager
def net_of(args: argparse.Namespace, phase: str) -> Iterator[Net]:
    """Yield the net of the options; meanwhile messages go to standard error.

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
    stages = [stage for stage in args.stage.split(",") if stage]  # none in an empty text
    with log_on_stderr():
        warn_of_gpu(args)
        net = Net(
            files[0],
            phase,
            args.level,
            stages,
            threads=args.threads,
            tuning=tuning_of(args),
            exact=args.exact,
        )
        with contextlib.closing(net):
            log.info("Use CPU, %d threads.", net.threads)
            yield net
