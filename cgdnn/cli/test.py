"""`cgdnn test`: score a trained net over batches of its test data."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from cgdnn.cli import _scored
from cgdnn.cli._log import log, weighted
from cgdnn.errors import NonFiniteError, UsageError
from cgdnn.runtime.net import Net
from cgdnn.solvers._base import Output, outputs_of


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "test", help="score a trained net", description=__doc__, allow_abbrev=False
    )
    _scored.add_options(parser)
    parser.add_argument("--weights", "-weights", metavar="FILE[,FILE]", help=".caffemodel files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Log the outputs of every batch, then their means (Caffe, caffe.cpp, ``test``).

    Raises
    ------
    NonFiniteError
        An output is not finite: no score is reported.
    """
    if args.weights is None:
        raise UsageError(
            "test: got no weights, expected those of a trained net. "
            "Name them with --weights=lenet_iter_10000.caffemodel."
        )
    with _scored.net_of(args, "TEST") as net:
        for path in args.weights.split(","):
            net.copy_from(path)
        for reason in net.doubts():
            log.warning("%s", reason)
        log.info("Running for %d iterations.", args.iterations)
        means, loss = _run_batches(net, args.iterations)
        log.info("Loss: %g", loss)
        for output in means:
            log.info("%s", weighted(output))
    return 0


def _run_batches(net: Net, iterations: int) -> tuple[list[Output], float]:
    """Return the outputs and the loss, averaged over the batches."""
    rows = []
    outputs: list[Output] = []
    loss = 0.0
    for batch in range(iterations):
        net.run(("forward",), lend=True)
        outputs = outputs_of(net)
        loss += net.loss
        for output in outputs:
            log.info("Batch %d, %s = %g", batch, output.name, output.value)
            if not np.isfinite(output.value):
                raise NonFiniteError(
                    f'batch {batch}: output "{output.name}" is {output.value:g}; the first '
                    f"non-finite array is of {net.first_non_finite()}. "
                    "Use weights of a run that stayed finite, or look at the data."
                )
        rows.append([output.value for output in outputs])
    means = np.mean(rows, axis=0)
    return (
        [Output(o.name, float(m), o.weight) for o, m in zip(outputs, means, strict=True)],
        loss / iterations,
    )
