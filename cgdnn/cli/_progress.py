"""A training run shown as a bar on a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from cgdnn.cli._log import log
from cgdnn.solvers._base import Event, Iterated, Saved, Solver, Tested, Testing


class ProgressBar:
    """Draws a training run as a bar: iteration, loss, last test score, images/s, time left.

    Events come on the thread that trains and only leave their values behind; `refresh` draws
    them on the main thread.
    """

    def __init__(self, solver: Solver, images: int) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[doing]}"),
            BarColumn(None, table_column=Column(ratio=1)),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[score]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            expand=True,
            speed_estimate_period=10,
        )
        self._values: dict[str, Any] = {"doing": "training", "loss": "", "score": "", "rate": ""}
        self._images = images
        self._iteration = solver.iter
        self._first: tuple[int, float] | None = None  # the first iteration and when it ended
        self._bar = self._progress.add_task(
            "", total=solver.param.max_iter, completed=solver.iter, **self._values
        )

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the bar at the bottom of the terminal."""
        with contextlib.suppress(OSError), self._progress:  # the terminal may hang up
            yield
            self.refresh()

    def refresh(self) -> None:
        """Draw the bar anew."""
        if self._first is not None and self._iteration > self._first[0]:
            done, seconds = self._iteration - self._first[0], time.monotonic() - self._first[1]
            self._values["rate"] = f"{done * self._images / seconds:,.0f} images/s"
        with contextlib.suppress(OSError):
            self._progress.update(
                self._bar, completed=self._iteration, refresh=True, **self._values
            )

    def __call__(self, event: Event) -> None:
        """Take what an event tells; called on the thread that trains."""
        match event:
            case Iterated(iteration, loss):
                self._iteration = iteration
                if self._first is None:  # it may have waited for kernels to be compiled
                    self._first = iteration, time.monotonic()
                self._values["loss"] = f"loss {loss:.4g}"
            case Testing():
                self._values["doing"] = "testing"
            case Tested(iteration, net, _, outputs):
                self._values["doing"] = "training"
                score = next((output for output in outputs if not output.weight), None)
                if score is not None:
                    self._values["score"] = f"{score.name} {score.value:.4f}"
                texts = ", ".join(f"{output.name} = {output.value:g}" for output in outputs)
                log.info("Iteration %d, test net #%d: %s", iteration, net, texts)
            case Saved(iteration, model, _):
                log.info("Iteration %d, snapshot: %s", iteration, model)
