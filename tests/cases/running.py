"""Run the command line in this process, in a folder of its own."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from cgdnn.cli.main import main


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, what it wrote, and the files that it made."""

    code: int
    text: str
    made: frozenset[Path] = frozenset()

    @property
    def error(self) -> str:
        """The error message, without the word before it."""
        lines = [line for line in self.text.splitlines() if line.startswith("error: ")]
        return "\n".join(lines).removeprefix("error: ")

    @property
    def warnings(self) -> list[str]:
        """The messages of the warnings."""
        found = re.finditer(r"^W\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] (.*)$", self.text, re.MULTILINE)
        return [match[1] for match in found]


def run(line: str, capture: pytest.CaptureFixture[str]) -> Ended:
    """Run shell commands, divided by ``;``, where ``{caffe}`` stands for the program."""
    ended = Ended(0, "")
    for part in line.split(";"):
        if "{caffe}" in part:
            capture.readouterr()
            before = set(Path().rglob("*"))
            code = main(part.replace("{caffe}", "").split())
            written = capture.readouterr()
            made = frozenset(set(Path().rglob("*")) - before)
            ended = Ended(code, written.out + written.err, made)
        else:
            subprocess.run(part, shell=True, check=True, stdout=subprocess.DEVNULL)
    return ended


def check(ended: Ended, code: int, patterns: list[str]) -> None:
    """Assert the exit code, the patterns (of a warning where the code is 0), and no traceback."""
    assert "Traceback" not in ended.text, ended.text
    assert "HDF5-DIAG" not in ended.text, ended.text
    assert ended.code == code, ended.text
    if code == 0:
        assert ended.error == ""
        assert len(ended.warnings) >= bool(patterns), ended.text
        told = "\n".join(ended.warnings)
    else:
        told = ended.error
        assert "\n" not in told, "one message, one line"
        assert not ended.made
    for pattern in patterns:
        assert re.search(pattern, told), f"{pattern}\n{told}"
