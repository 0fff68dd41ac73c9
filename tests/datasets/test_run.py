"""The reproduction scripts, on a handful of drawn pictures."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cgdnn.data.drawn import draw_digits, draw_textures

ROOT = Path(__file__).parents[2]


def write_mnist(folder):
    for name in ("train", "t10k"):
        pictures, labels = draw_digits(name, 100)
        images = struct.pack(">4i", 2051, len(labels), 28, 28) + pictures.tobytes()
        numbers = struct.pack(">2i", 2049, len(labels)) + labels.astype(np.uint8).tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(numbers)


def write_cifar10(folder):
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pictures, labels = draw_textures(name, 20)
        records = np.hstack([labels[:, None].astype(np.uint8), pictures.reshape(20, -1)])
        (folder / f"{name}.bin").write_bytes(records.tobytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "write", "net"),
    [("mnist", write_mnist, "lenet"), ("cifar10", write_cifar10, "cifar10_quick")],
)
def test_a_few_iterations(tmp_path, dataset, write, net):
    (tmp_path / "files").mkdir()
    write(tmp_path / "files")
    script = ROOT / "datasets" / dataset / "run.py"
    done = subprocess.run(
        [sys.executable, script, "--from", "files", "--iterations", "2", "--seeds", "1", "2"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(rf"^ +{net} +(\d) +(\d+) +[\d.]+ +[\d.]+ % +[\d.]+$", done.stdout, re.M)
    assert rows == [("1", "2"), ("2", "2")]
    assert (tmp_path / f"{net}_seed2_iter_2.solverstate").exists()
