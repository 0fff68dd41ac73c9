"""The best-known classification nets, in our own descriptions, train."""

import hashlib
import math

import pytest

from cgdnn import Solver
from cgdnn.proto.cgdnn_pb2 import SolverParameter
from tests.plan.planning import ROOT


def train(name: str, threads: int) -> tuple[list[float], str]:
    """Return the losses of three iterations, and a digest of the weights after them."""
    solver = Solver(
        SolverParameter(
            net=str(ROOT / "tests" / "nets" / f"{name}.prototxt"),
            base_lr=1e-4,
            lr_policy="fixed",
            momentum=0.9,
            weight_decay=0.0005,
            max_iter=3,
            snapshot_after_train=False,
        ),
        threads=threads,
    )
    losses = []
    for _ in range(3):
        solver.step(1)
        losses.append(solver.net.loss)
    digest = hashlib.sha256()
    for blobs in solver.net.params.values():
        for blob in blobs:
            digest.update(blob.data)
    return losses, digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alexnet", "caffenet", "vgg16", "googlenet", "resnet50"])
def test_three_iterations_are_finite_and_the_same_at_one_and_two_threads(name):
    losses, weights = train(name, 1)
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) == 3
    assert train(name, 2) == (losses, weights)
