"""Contenders of a benchmark: processes that wait while another one runs, and run when asked."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Facts = dict[str, Any]
HIDDEN = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that would keep the libraries behind PyTorch from their best."""


class FailedError(Exception):
    """A contender cannot run; the text is what it raised."""


def serve(contend: Callable[[], tuple[Callable[[], float], Callable[[], Facts]]]) -> None:
    """Be a contender: for a number on stdin, run so many steps and print their seconds.

    At the end of stdin, print the facts. What is raised is printed, and ends it.

    Parameters
    ----------
    contend : callable
        Returns a function that runs one step and gives its seconds, and one that gives the facts.
    """
    try:
        step, facts = contend()
        for line in sys.stdin:
            print(json.dumps([step() for _ in range(int(line))]), flush=True)
        print(json.dumps(facts()), flush=True)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}".splitlines()[0]), flush=True)


class Contender:
    """A process that runs steps when asked; it ends with the context.

    Parameters
    ----------
    command : sequence of str
        It calls `serve`.
    steps : int
        Of a round.
    environment : mapping
        Variables to add to this process's.

    Attributes
    ----------
    rounds : list of float
        Median milliseconds of a step, by round.
    """

    def __init__(
        self, command: Sequence[str], steps: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.steps = steps
        self.rounds: list[float] = []
        own = {key: value for key, value in os.environ.items() if key not in HIDDEN}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=own | dict(environment or {}),
        )

    def run(self, steps: int) -> list[float]:
        """Return the milliseconds of so many steps.

        Raises
        ------
        FailedError
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has said why
        answer = json.loads(self.process.stdout.readline() or '"the process died"')
        if isinstance(answer, str):
            raise FailedError(answer)
        return [1e3 * seconds for seconds in answer]

    def run_round(self) -> None:
        """Run the steps of a round."""
        self.rounds.append(statistics.median(self.run(self.steps)))

    @property
    def milliseconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    def end(self) -> Facts:
        """Let the process end; return its facts."""
        output, _ = self.process.communicate()
        facts: Facts = json.loads(output)
        return facts

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def alternate(contenders: Sequence[Contender], rounds: int) -> None:
    """Run the rounds, A B A B."""
    for _ in range(rounds):
        for contender in contenders:
            contender.run_round()


def ratio(over: Contender, under: Contender) -> float:
    """Return the median over the rounds of the first one's time over the other's."""
    pairs = zip(over.rounds, under.rounds, strict=True)
    return statistics.median(a / b for a, b in pairs)
