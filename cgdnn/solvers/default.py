"""The solver that a bare net is trained with."""

from __future__ import annotations

import os
from pathlib import Path

from cgdnn.layers._base import DataLayer
from cgdnn.netdef.graph import Graph, build_graph
from cgdnn.netdef.read import read_net
from cgdnn.plan.shapes import assemble
from cgdnn.proto.cgdnn_pb2 import SolverParameter

EPOCHS = 10
ITERATIONS_WITHOUT_RECORDS = 1000
"""Iterations of a net whose data has no end (DummyData)."""
TESTS_WITHOUT_RECORDS = 10


def default_solver(path: str | os.PathLike[str]) -> SolverParameter:
    """Return the solver for the net at `path`: ten epochs, a final test, a snapshot.

    SGD, base_lr 0.01, momentum 0.9, weight_decay 0.0005, lr_policy inv with gamma 0.0001 and power
    0.75; the loss is shown every 100 iterations. The net is tested at the end where it has layers
    for the phase TEST only.

    Raises
    ------
    DescriptionError, DataError
        The net is wrong, or its data cannot be read.
    """
    net = read_net(path)
    train, test = build_graph(net, "TRAIN"), build_graph(net, "TEST")
    iterations = _batches(train, EPOCHS) or ITERATIONS_WITHOUT_RECORDS
    solver = SolverParameter(
        net=os.fspath(path),
        base_lr=0.01,
        momentum=0.9,
        weight_decay=0.0005,
        lr_policy="inv",
        gamma=0.0001,
        power=0.75,
        display=100,
        max_iter=iterations,
        snapshot_prefix=str(Path(path).with_suffix("")),
    )
    if {node.name for node in test.nodes} - {node.name for node in train.nodes} or any(
        rule.HasField("phase")
        for node in test.nodes
        for rule in node.param.include
        if node.type != "Split"
    ):
        solver.test_iter.append(_batches(test, 1) or TESTS_WITHOUT_RECORDS)
        solver.test_interval = iterations
        solver.test_initialization = False
    return solver


def _batches(graph: Graph, epochs: int) -> int:
    """Return the batches that `epochs` epochs of the longest data layer take; 0 without records."""
    assembly = assemble(graph)
    count = 0
    for planned in assembly.layers:
        if isinstance(planned.layer, DataLayer):
            size = planned.layer.batch_size
            count = max(count, -(-epochs * planned.layer.records // size))
            planned.layer.close()
    return count
