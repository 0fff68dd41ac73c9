"""Time the planning of a generated net of 1,000 layers, from the description to bound programs.

usage: python tests/benchmarks/bench_planning.py [--layers 1000]

The net is a chain of residual blocks: convolution, BatchNorm, Scale and ReLU twice, and a sum. The
kernels are compiled before, since that time depends on the kernels and not on the net.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from google.protobuf import text_format

from cgdnn.kernels.update import sgd_update
from cgdnn.netdef.graph import build_graph
from cgdnn.netdef.read import read_net
from cgdnn.plan.check import check
from cgdnn.plan.lower import Lowering
from cgdnn.plan.shapes import assemble
from cgdnn.plan.update import UpdateRule, plan_update
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.state import State, bind

HEAD = """
layer { name: "data" type: "DummyData" top: "sum0" top: "label" dummy_data_param {
  shape { dim: 32 dim: 16 dim: 16 dim: 16 } shape { dim: 32 } } }
"""
BRANCH = """
layer {{ name: "conv{i}" type: "Convolution" bottom: "{bottom}" top: "conv{i}"
  convolution_param {{ num_output: 16 kernel_size: 3 pad: 1 weight_filler {{ type: "msra" }} }} }}
layer {{ name: "norm{i}" type: "BatchNorm" bottom: "conv{i}" top: "conv{i}" }}
layer {{ name: "scale{i}" type: "Scale" bottom: "conv{i}" top: "conv{i}"
  scale_param {{ bias_term: true }} }}
layer {{ name: "relu{i}" type: "ReLU" bottom: "conv{i}" top: "conv{i}" }}
"""
SUM = """
layer {{ name: "sum{i}" type: "Eltwise" bottom: "conv{last}" bottom: "sum{before}" top: "sum{i}" }}
"""
TAIL = """
layer {{ name: "ip" type: "InnerProduct" bottom: "sum{i}" top: "ip"
  inner_product_param {{ num_output: 10 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
"""


def deep(layers: int) -> NetParameter:
    """Return a net of about so many layers."""
    blocks = max(1, (layers - 3) // 9)
    text = [HEAD]
    for i in range(1, blocks + 1):
        text.append(BRANCH.format(i=2 * i - 1, bottom=f"sum{i - 1}"))
        text.append(BRANCH.format(i=2 * i, bottom=f"conv{2 * i - 1}"))
        text.append(SUM.format(i=i, last=2 * i, before=i - 1))
    return text_format.Parse("".join(text) + TAIL.format(i=blocks), NetParameter())


def plan(message: NetParameter) -> None:
    """Plan a whole iteration and print what each part of planning takes."""
    marks = [("", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    graph = build_graph(read_net(message), "TRAIN")
    mark("graph")
    assembly = assemble(graph)
    mark("shapes")
    lowering = Lowering(assembly, "float32", seed=1)
    works = plan_update(assembly, UpdateRule(sgd_update, 1, ("momentum",)), -1).works
    parts = ("forward", "backward", "update")
    program = lowering.program(parts, 0, len(assembly.layers), update=works)
    mark("tasks and edges")
    bind(program, State("float32"), 2)
    mark("addresses")
    planned = time.perf_counter()
    check(program)
    print(
        f"{len(message.layer)} layers, {len(program.tasks)} tasks, "
        f"{sum(map(len, program.successors))} edges: {planned - marks[0][1]:.2f} s"
    )
    for (_, before), (name, after) in pairwise(marks):
        print(f"  {name:16} {after - before:6.2f} s")
    print(f"  (the check takes {time.perf_counter() - planned:.2f} s; only `cgdnn plan` runs it)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1000)
    args = parser.parse_args()
    plan(deep(20))
    plan(deep(args.layers))


if __name__ == "__main__":
    main()
