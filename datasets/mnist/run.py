"""Fetch MNIST, train LeNet on it, test it, and print a table.

usage: python datasets/mnist/run.py [--from DIR] [--seeds 1 2 3] [--iterations N] [--threads N]
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from reproduce import Recipe, reproduce  # noqa: E402 - found through the line above

from cgdnn.data.fetch import fetch_mnist  # noqa: E402

RECIPES = {
    "lenet": Recipe(
        [HERE / "lenet_solver.prototxt"],
        "98.99, 99.05, 99.10 % (10,000 iterations, three seeds)",
    )
}

if __name__ == "__main__":
    reproduce(__doc__, RECIPES, fetch_mnist)
