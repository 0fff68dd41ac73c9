import os
import shutil
import signal
import subprocess
import sys

import pytest

from cgdnn.cli.main import main
from tests.cli.caffe_logs import LOGS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the tiny net that Caffe's golden logs are of, and its data."""
    (tmp_path / "logs").mkdir()
    for path in LOGS.glob("*.prototxt"):
        shutil.copy(path, tmp_path / "logs")
    (tmp_path / "logs" / "snap").mkdir()
    (tmp_path / "data").symlink_to(LOGS.parent / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cgdnn(folder, capsys):
    """Run a command in `folder`; return exit code, standard output, standard error."""

    def run(*words):
        capsys.readouterr()
        code = main(words)
        return code, *capsys.readouterr()

    return run


class Running:
    """A `cgdnn` process whose standard error is read line by line."""

    def __init__(self, *words):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cgdnn", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(LOGS.parents[2])},
        )
        self.seen = []

    def wait_for(self, text):
        """Read lines until one contains `text`."""
        for line in self.process.stderr:
            self.seen.append(line)
            if text in line:
                return line
        pytest.fail(f"ended ({self.process.wait()}) without {text!r}:\n{''.join(self.seen)}")

    def send(self, number):
        self.process.send_signal(number)

    def end(self):
        """Read to the end; return (exit code, everything on standard error)."""
        self.seen += self.process.stderr.readlines()
        return self.process.wait(), "".join(self.seen)


@pytest.fixture
def start(folder):
    """Start `cgdnn` processes in `folder`; what still runs at the end is killed."""
    running = []

    def begin(*words):
        running.append(Running(*words))
        return running[-1]

    yield begin
    for one in running:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGKILL)
        one.process.stderr.close()
        one.process.wait()
