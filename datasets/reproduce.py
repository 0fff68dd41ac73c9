"""What `mnist/run.py` and `cifar10/run.py` share: fetch, train, test, print a table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cgdnn import Solver
from cgdnn.data.fetch import FetchResult
from cgdnn.netdef.read import read_solver
from cgdnn.solvers._base import Event, Saved, Tested


@dataclass(frozen=True)
class Recipe:
    """A net's training: its solvers, each of which goes on from the snapshot of the one before.

    Attributes
    ----------
    stages : sequence of path
    reference : str
        What Caffe reaches on the real data.
    """

    stages: Sequence[Path]
    reference: str


def reproduce(
    description: str,
    recipes: dict[str, Recipe],
    fetch: Callable[[str, str | None], FetchResult],
) -> None:
    """Run the recipes that the command line asks for; databases and snapshots go to ``.``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--from", dest="source", metavar="DIR", help="see `cgdnn fetch --help`")
    parser.add_argument("--net", choices=tuple(recipes), default=next(iter(recipes)))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N")
    parser.add_argument("--iterations", type=int, metavar="N", help="stop after N")
    parser.add_argument("--threads", type=int, metavar="N", help="workers; all cores by default")
    args = parser.parse_args()
    fetched = fetch(".", args.source)
    recipe = recipes[args.net]
    rows = [("net", "seed", "iterations", "seconds", "accuracy", "loss")]
    for seed in args.seeds:
        begin = time.monotonic()
        tested = _train(args.net, recipe, seed, args.iterations, args.threads)
        scores = {output.name: output.value for output in tested.outputs}
        numbers = f"{time.monotonic() - begin:.1f}", f"{100 * scores['accuracy']:.2f} %"
        loss = f"{scores['loss']:.4f}"
        rows.append((args.net, str(seed), str(tested.iteration), *numbers, loss))
    print(f"\ndata: {fetched.source}")
    for row in rows:
        print("  ".join(f"{cell:>14}" for cell in row))
    print(f"Caffe on the real data: {recipe.reference}")


def _train(name: str, recipe: Recipe, seed: int, limit: int | None, threads: int | None) -> Tested:
    """Train through the stages; return the test of the final weights."""
    state = None
    for stage in recipe.stages:
        end = read_solver(stage).message.max_iter
        if limit is not None:
            end = min(end, limit)
        overrides = {
            "random_seed": str(seed),
            "snapshot_prefix": f"{name}_seed{seed}",
            "max_iter": str(end),
        }
        solver = Solver(stage, overrides=overrides, threads=threads)
        last = _Last()
        solver.callbacks.append(last)
        if state is not None:
            solver.restore(state)
        solver.solve()
        if last.tested is None or last.tested.iteration != solver.iter:
            solver.test_all()
        solver.close()
        assert last.tested is not None, "every test reports its end"
        assert last.saved is not None, "a run ends with a snapshot"
        state = last.saved.state
        if end == limit:
            break
    return last.tested


class _Last:
    """Prints each test, and remembers the last one and the last snapshot."""

    def __init__(self) -> None:
        self.tested: Tested | None = None
        self.saved: Saved | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Tested):
            self.tested = event
            scores = ", ".join(f"{output.name} = {output.value:g}" for output in event.outputs)
            print(f"iteration {event.iteration}: {scores}", flush=True)
        elif isinstance(event, Saved):
            self.saved = event
