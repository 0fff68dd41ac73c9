"""Fetch CIFAR-10, train cifar10_quick or cifar10_full on it, test it, and print a table.

usage: python datasets/cifar10/run.py [--net cifar10_full] [--from DIR] [--seeds 1 2 3]
           [--iterations N] [--threads N]
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from reproduce import Recipe, reproduce  # noqa: E402 - found through the line above

from cgdnn.data.fetch import fetch_cifar10  # noqa: E402


def stages(name: str, *suffixes: str) -> list[Path]:
    """Return the solvers of a net, in order."""
    return [HERE / f"{name}_solver{suffix}.prototxt" for suffix in suffixes]


RECIPES = {
    "cifar10_quick": Recipe(
        stages("cifar10_quick", "", "_lr1"),
        "about 75 % (5,000 iterations), as its own example says",
    ),
    "cifar10_full": Recipe(
        stages("cifar10_full", "", "_lr1", "_lr2"),
        "about 81 % (70,000 iterations), as its own example says",
    ),
}

if __name__ == "__main__":
    reproduce(__doc__, RECIPES, fetch_cifar10)
