"""Kill training runs, resume each, and print what came of it as one line of JSON a kill.

Run as ``python killing.py FOLDER KILLS`` with a run (`training.write_run`) in FOLDER. The
process compiles everything once and forks a child for every run, so that a run takes milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cgdnn import files
from cgdnn.errors import CgdnnError
from cgdnn.netdef.state import read_state
from cgdnn.netdef.weights import read_weights
from cgdnn.solvers._base import Iterated, Solver
from tests.solvers.training import bits

FOREVER = 600.0
PLACES = ("half written", "written", "on disk", "renamed")
"""Where in the writing of a file a child waits to be killed."""


def newest_state() -> Path | None:
    states = Path().glob("snap_iter_*.solverstate")
    return max(states, key=lambda path: int(path.stem.rpartition("_")[2]), default=None)


def train(during: Callable[[Solver], None] = lambda solver: None) -> str:
    solver = Solver("solver.prototxt", threads=2)
    state = newest_state()
    if state is not None:
        solver.restore(state)
    during(solver)
    solver.solve()
    solver.close()
    return bits(solver)


def fork(action: Callable[[int], None]) -> tuple[int, int]:
    """Run `action` in a child, with a pipe to write to; return its number and the other end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            action(writing)
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(writing)
    return child, reading


def wait_at(place: str, write_number: int, pipe: int) -> None:
    """Let this process say so on the pipe, and wait, at `place` of its n-th file write."""
    writes = 0

    def here(now: str) -> None:
        if now == place and writes == write_number:
            os.write(pipe, b"!")
            time.sleep(FOREVER)

    def write_bytes(path: Path, data: bytes) -> int:
        nonlocal writes
        writes += 1
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            here("half written")
            file.write(data[len(data) // 2 :])
        here("written")
        return len(data)

    def replace(path: Path, target: Any) -> Path:
        here("on disk")
        os.replace(path, target)
        here("renamed")
        return Path(target)

    files.Path.write_bytes = write_bytes
    files.Path.replace = replace


def kill_inside_snapshot(place: str, write_number: int) -> None:
    def action(pipe: int) -> None:
        wait_at(place, write_number, pipe)
        train()

    child, pipe = fork(action)
    assert os.read(pipe, 1) == b"!", f"no {place} in write {write_number}"
    end(child, pipe)


def kill_after(iteration: int, seconds: float) -> None:
    def action(pipe: int) -> None:
        def announce(solver: Solver) -> None:
            solver.callbacks.append(
                lambda event: (
                    os.write(pipe, b"!")
                    if isinstance(event, Iterated) and event.iteration == iteration
                    else None
                )
            )

        train(announce)

    child, pipe = fork(action)
    os.read(pipe, 1)
    time.sleep(seconds)
    end(child, pipe)


def end(child: int, pipe: int) -> None:
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(pipe)
    # A child killed late may have been done already.
    assert status in (0, signal.SIGKILL), f"child ended with {status}"


def torn_files() -> list[str]:
    torn = []
    for path in Path().glob("snap_iter_*"):
        try:
            (read_state if path.suffix == ".solverstate" else read_weights)(path)
        except CgdnnError as error:
            torn.append(str(error))
    return torn


def resume() -> str:
    child, pipe = fork(lambda pipe: print(train(), end="", file=os.fdopen(pipe, "w"), flush=True))
    with os.fdopen(pipe) as reading:
        result = reading.read()
    os.waitpid(child, 0)
    return result


def main(folder: str, kills: int) -> None:
    os.chdir(folder)
    expected = train()
    solver = Solver("solver.prototxt", threads=2)
    begin = time.monotonic()
    solver.step(solver.param.max_iter)
    step_seconds = (time.monotonic() - begin) / solver.param.max_iter
    solver.close()
    writes = 2 * len(list(Path().glob("snap_iter_*.solverstate")))
    chance = random.Random(1)
    for number in range(kills):
        for path in (*Path().glob("snap_iter_*"), *Path().glob(".*.tmp")):
            path.unlink()
        if number % 2:
            place = PLACES[number // 2 % len(PLACES)]
            kill_inside_snapshot(place, 1 + number // 2 // len(PLACES) % writes)
        else:
            place = "anywhere"
            kill_after(chance.randint(1, solver.param.max_iter - 1), chance.random() * step_seconds)
        left = len(list(Path().glob(".*.tmp")))
        outcome = {
            "place": place,
            "torn": torn_files(),
            "left by the kill": left,
            "same bits": resume() == expected,
            "left after the resume": [path.name for path in Path().glob(".*.tmp")],
        }
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
