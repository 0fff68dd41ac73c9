"""Caffe's golden logs, and what its tools/extra/parse_log.py makes of a log: written anew."""

import math
import re
from datetime import datetime
from pathlib import Path

LOGS = Path(__file__).parents[1] / "golden" / "logs"

ITERATION = re.compile(r"Iteration (\d+)")
RATE = re.compile(r"lr = ([-+]?[0-9]*\.?[0-9]+([eE]?[-+]?[0-9]+)?)")
OUTPUTS = {
    kind: re.compile(kind + r" net output #(\d+): (\S+) = ([\.\deE+-]+)")
    for kind in ("Train", "Test")
}


def moment(line):
    """Read month, day and time of a classic glog prefix."""
    return datetime.strptime(f"2026{line[1:5]} {line.split()[1]}", "%Y%m%d %H:%M:%S.%f")


def parse_log(text):
    """Return {"Train": rows, "Test": rows}; a row maps column to number."""
    lines = text.splitlines()
    begin = next(moment(line) for line in lines if "Solving" in line)
    iteration, rate = None, math.nan
    tables = {"Train": [], "Test": []}
    for line in lines:
        if found := ITERATION.search(line):
            iteration = float(found[1])
        if iteration is None:
            continue
        seconds = (moment(line) - begin).total_seconds()
        if found := RATE.search(line):
            rate = float(found[1])
        for kind, rows in tables.items():
            if found := OUTPUTS[kind].search(line):
                if not rows or rows[-1]["NumIters"] != iteration:
                    rows.append({"NumIters": iteration, "Seconds": seconds, "LearningRate": rate})
                rows[-1][found[2]] = float(found[3])
    for rows in tables.values():
        if len(rows) > 1:  # a test at iteration 0 precedes the first rate
            rows[0]["LearningRate"] = rows[1]["LearningRate"]
    return tables
