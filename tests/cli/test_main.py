import logging
import subprocess
import sys

import pytest

from cgdnn import __version__
from cgdnn.cli import plan
from cgdnn.cli.main import COMMANDS
from cgdnn.errors import InternalError


def test_no_command_prints_help(cgdnn):
    code, _, err = cgdnn()
    assert code == 2
    assert all(f"    {command} " in err for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "invalid choice: 'nope'"),
        (["train", "logs/solver.prototxt", "--nope"], "unrecognized arguments: --nope"),
        (["plan", "logs/train_val.prototxt", "--phase", "TEST", "more"], "unrecognized arguments"),
        (["test", "--iterations", "some"], "invalid int value: 'some'"),
    ],
)
def test_wrong_usage_ends_with_2(cgdnn, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        cgdnn(*words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(cgdnn, capsys, command):
    with pytest.raises(SystemExit) as ended:
        cgdnn(command, "--help")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: cgdnn {command}")


def test_version(cgdnn, capsys):
    with pytest.raises(SystemExit) as ended:
        cgdnn("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"cgdnn {__version__}\n"


def test_our_own_fault_shows_a_traceback_and_asks_for_a_report(cgdnn, monkeypatch):
    def fail(_args):
        raise InternalError("a buffer was lost")

    monkeypatch.setattr(plan, "run", fail)
    code, _, err = cgdnn("plan", "logs/train_val.prototxt")
    assert code == 1
    assert err.startswith("Traceback")
    assert "InternalError: a buffer was lost\n" in err
    assert err.endswith("this is a bug in cgdnn; please report it with the lines above.\n")


def test_an_interrupt_before_the_first_iteration_leaves_quietly(cgdnn, monkeypatch):
    def interrupt(_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "run", interrupt)
    assert cgdnn("plan", "logs/train_val.prototxt") == (130, "", "")


def test_a_command_leaves_the_library_log_as_it_was(cgdnn):
    logger = logging.getLogger("cgdnn")
    before = (logger.handlers[:], logger.level, logger.propagate)
    cgdnn("time", "logs/train_val.prototxt", "--iterations=1")
    assert (logger.handlers, logger.level, logger.propagate) == before


def test_a_closed_output_leaves_quietly(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "cgdnn", "plan", "logs/train_val.prototxt", "--shape=data=1,12,12"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141
