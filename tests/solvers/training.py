"""Small training runs that the tests of this folder share."""

from __future__ import annotations

import hashlib
from pathlib import Path

import h5py
import numpy as np

from cgdnn.data.datum import encode_datum
from cgdnn.data.lmdb import write_lmdb
from cgdnn.solvers._base import Solver, Tested

RECORDS = 40
CLASSES = 4


def write_data(folder: Path) -> None:
    """Write 40 pictures to ``pictures`` (LMDB), 26 rows to ``rows.h5``, and ``rows.txt``."""
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, RECORDS)
    pictures = random.integers(0, 120, (RECORDS, 3, 12, 12)) + 30 * labels[:, None, None, None]
    write_lmdb(
        folder / "pictures",
        (
            encode_datum(picture.astype(np.uint8), int(label))
            for picture, label in zip(pictures, labels, strict=True)
        ),
    )
    with h5py.File(folder / "rows.h5", "w") as rows:
        rows["row"] = random.normal(size=(26, 6)).astype(np.float32)
        rows["target"] = random.normal(size=(26, 2)).astype(np.float32)
    (folder / "rows.txt").write_text("rows.h5\n")


NET = """
name: "everything"
layer { name: "pictures" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { mirror: true crop_size: 10 scale: 0.01 mean_value: 60 }
  data_param { source: "pictures" batch_size: %(batch)d backend: LMDB } }
layer { name: "pictures" type: "Data" top: "data" top: "label" include { phase: TEST }
  transform_param { crop_size: 10 scale: 0.01 mean_value: 60 }
  data_param { source: "pictures" batch_size: 7 backend: LMDB } }
layer { name: "rows" type: "HDF5Data" top: "row" top: "target" include { phase: TRAIN }
  hdf5_data_param { source: "rows.txt" batch_size: %(batch)d shuffle: true } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 6 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "bn" }
layer { name: "scale" type: "Scale" bottom: "bn" top: "bn" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "bn" top: "bn" }
layer { name: "pool" type: "Pooling" bottom: "bn" top: "pool"
  pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "drop" type: "Dropout" bottom: "pool" top: "drop" }
layer { name: "fc" type: "InnerProduct" bottom: "drop" top: "fc"
  param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "fc_row" type: "InnerProduct" bottom: "row" top: "fc_row" include { phase: TRAIN }
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "distance" type: "EuclideanLoss" bottom: "fc_row" bottom: "target" top: "distance"
  include { phase: TRAIN } }
layer { name: "accuracy" type: "Accuracy" bottom: "fc" bottom: "label" top: "accuracy"
  include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""

SOLVER = """
net: "net.prototxt"
base_lr: 0.05
momentum: 0.9
weight_decay: 0.001
lr_policy: "multistep"
gamma: 0.5
stepvalue: 3
stepvalue: 9
max_iter: 13
snapshot_prefix: "snap"
random_seed: 5
"""


def write_run(folder: Path, extra: str = "", batch: int = 9) -> Path:
    """Write data, net and solver into `folder`; return the solver's path."""
    write_data(folder)
    (folder / "net.prototxt").write_text(NET % {"batch": batch})
    solver = folder / "solver.prototxt"
    solver.write_text(SOLVER + extra)
    return solver


def bits(solver: Solver) -> str:
    """Return a digest of every weight and every history, bit by bit."""
    digest = hashlib.sha256()
    for blobs in solver.net.params.values():
        for blob in blobs:
            digest.update(blob.data.tobytes())
    for buffer in solver._update.history:
        digest.update(solver.net.array(buffer).tobytes())
    return digest.hexdigest()


def note_tests(solver: Solver) -> list[Tested]:
    """Return a list that the scores of every test are appended to."""
    scores: list[Tested] = []
    solver.callbacks.append(
        lambda event: scores.append(event) if isinstance(event, Tested) else None
    )
    return scores
