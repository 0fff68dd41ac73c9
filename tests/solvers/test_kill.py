from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.solvers import killing
from tests.solvers.training import write_run

ROOT = Path(__file__).parents[2]
KILLS = 112


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits(tmp_path: Path) -> None:
    write_run(tmp_path, "snapshot: 2\n")
    run = subprocess.run(
        [sys.executable, killing.__file__, str(tmp_path), str(KILLS)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(outcomes) == KILLS
    assert sum(outcome["place"] != "anywhere" for outcome in outcomes) == KILLS // 2
    for outcome in outcomes:
        assert outcome["torn"] == [], outcome
        assert outcome["same bits"], outcome
        assert outcome["left after the resume"] == [], outcome
        # The kill struck where it was to: these places leave a temporary behind.
        if outcome["place"] in ("half written", "written", "on disk"):
            assert outcome["left by the kill"] == 1, outcome
