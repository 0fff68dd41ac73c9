import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cgdnn.data.dataset import Samples, write_database, write_mean
from cgdnn.data.fetch import fetch_cifar10, fetch_mnist

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "datasets"


def generate(folder, name, shape, mean):
    """Write databases in the form of a real data set: noise, brighter for higher classes."""
    random = np.random.default_rng(0)
    for part, count in (("train", 2000), ("test", 1000)):
        labels = random.integers(0, 10, count)
        noise = random.integers(0, 60, (count, *shape)) * (random.random((count, *shape)) < 0.5)
        pictures = (noise + 19 * labels[:, None, None, None]).astype(np.uint8)
        write_database(folder / f"{name}_{part}_lmdb", Samples(pictures, labels.astype(np.uint8)))
        if mean and part == "train":
            write_mean(folder / "mean.binaryproto", pictures)


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """Return a folder with the databases of MNIST, or of noise where MNIST is not at hand."""
    folder = tmp_path_factory.mktemp("mnist")
    if REAL.is_dir():
        fetch_mnist(folder, REAL / "mnist")
    else:
        generate(folder, "mnist", (1, 28, 28), False)
    return folder


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory):
    """Return a folder with databases and mean of CIFAR-10, or of noise where it is not at hand."""
    folder = tmp_path_factory.mktemp("cifar10")
    if REAL.is_dir():
        files = tmp_path_factory.mktemp("cifar10_files")
        subprocess.run([sys.executable, str(REAL / "unpack_cifar10.py"), str(files)], check=True)
        fetch_cifar10(folder, files)
    else:
        generate(folder, "cifar10", (3, 32, 32), True)
    return folder
