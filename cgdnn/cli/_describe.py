"""What `plan` and `summary` share: options that select a net, its shapes and its program."""

from __future__ import annotations

import argparse

from cgdnn.cli._tuning import add_exact_option
from cgdnn.errors import UsageError
from cgdnn.kernels.update import sgd_update
from cgdnn.layers._base import DataLayer, Shape
from cgdnn.netdef.graph import Graph, build_graph
from cgdnn.netdef.read import read_net
from cgdnn.plan.lower import Lowering
from cgdnn.plan.shapes import Assembly, assemble
from cgdnn.plan.tasks import Program
from cgdnn.plan.update import UpdateRule, plan_update


def add_net_options(parser: argparse.ArgumentParser) -> None:
    """Add FILE and the options that say how it is seen."""
    parser.add_argument("file", metavar="FILE", help="a network description")
    parser.add_argument("--phase", choices=("TRAIN", "TEST"), default="TRAIN")
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--stage", action="append", default=[], help="may be given several times")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="BLOB=C,H,W",
        help="shape of one sample of a data layer's top, where the description does not tell",
    )
    add_exact_option(parser)


def read_shapes(texts: list[str]) -> dict[str, Shape]:
    """Read options such as ``data=3,227,227``.

    Raises
    ------
    UsageError
        An option has another form.
    """
    shapes = {}
    for text in texts:
        name, equals, numbers = text.partition("=")
        parts = numbers.split(",")
        if not (name and equals and all(part.isdigit() and int(part) > 0 for part in parts)):
            raise UsageError(
                f"--shape: got {text!r}, expected a blob and the sizes of one sample. "
                "Write it as data=3,227,227."
            )
        shapes[name] = tuple(map(int, parts))
    return shapes


def assemble_net(args: argparse.Namespace) -> Assembly:
    """Return the net of the options with all shapes known; no data is read.

    Raises
    ------
    UsageError
        ``--shape`` names no top of a data layer.
    DescriptionError
        The description is wrong, or a shape is not known without data.
    """
    shapes = read_shapes(args.shape)
    graph = build_graph(read_net(args.file), args.phase, args.level, args.stage)
    assembly = assemble(graph, shape_hints=shapes, without_data=True, exact=args.exact)
    known = {
        assembly.blobs[top].name
        for planned in assembly.layers
        if isinstance(planned.layer, DataLayer)
        for top in planned.node.tops
    }
    for name in shapes:
        if name not in known:
            raise UsageError(
                f'--shape: no data layer makes a blob "{name}"; they make: '
                f"{', '.join(sorted(known)) or 'none'}. Name one of these."
            )
    return assembly


def plan_iteration(lowering: Lowering) -> Program:
    """Return the program that `train` runs in every iteration of SGD, or `test` in TEST."""
    assembly = lowering.assembly
    training = assembly.graph.phase == "TRAIN"
    update = plan_update(assembly, UpdateRule(sgd_update, 1, ("momentum",)), clip=-1)
    lendable = assembly.lendable()
    values = {entry for entry in lendable if entry[1] == "data"}
    return lowering.program(
        ("forward", "backward", "update") if training else ("forward",),
        0,
        len(assembly.layers),
        update=update.works,
        lent=lendable if lowering.lends_values else lendable - values,
        carried=values,
    )


def heading(graph: Graph, args: argparse.Namespace) -> str:
    """Return the line that says which net this is, and which shapes the user gave."""
    given = f", shapes given: {' '.join(args.shape)}" if args.shape else ""
    return f'{graph.filename}: net "{graph.name}", phase {graph.phase}{given}'
