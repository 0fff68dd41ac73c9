import argparse

import pytest

from cgdnn.cli import plan, summary
from cgdnn.errors import UsageError
from cgdnn.layers._layout import lanes
from tests.plan.planning import LENET, ROOT

VGG = str(ROOT / "tests" / "nets" / "vgg16.prototxt")


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    plan.add_parser(subparsers)
    summary.add_parser(subparsers)
    args = parser.parse_args(words)
    return int(args.run(args))


def rows(text: str, title: str) -> list[list[str]]:
    """Return the rows below a title, as words."""
    lines = text.split("\n" + title + "\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [line.split() for line in lines]


def test_plan_prints_kernels_steps_and_buffers(capsys):
    assert run("plan", str(LENET), "--shape", "data=1,28,28", "--threads", "3") == 0
    text = capsys.readouterr().out
    assert f'{LENET}: net "LeNet", phase TRAIN, shapes given: data=1,28,28' in text
    loss = ["loss", "SoftmaxWithLoss", "forward", "plain", "nchw", "to", "nchw"]
    assert loss in rows(text, "Kernels")
    assert ["relu1.forward", "activation.relu_forward", str(64 // lanes())] in [
        row[:3] for row in rows(text, "Steps")
    ]
    assert ["conv1[0]", "param", "20x1x5x5", "2,000", "its", "own"] in rows(text, "Buffers")
    (diff,) = (row for row in rows(text, "Buffers") if row[0] == "ip1.diff")
    assert diff[-3:-1] == ["arena", "+"]  # as `train` runs it
    assert ["conv1[0].history0", "history"] in [row[:2] for row in rows(text, "Buffers")]
    assert "for each of 3 workers" in text
    assert "check: every order that the edges allow gives the same result" in text
    assert "\nTasks\n" not in text


def test_plan_of_the_test_phase_has_no_backward(capsys):
    run("plan", str(LENET), "--shape", "data=1,28,28", "--phase", "TEST", "--tasks")
    text = capsys.readouterr().out
    assert "backward" not in text
    tasks = rows(text, "Tasks")[1:]
    assert [row[0] for row in tasks] == [str(number) for number in range(len(tasks))]
    assert f"{len(tasks)} tasks" in text
    assert tasks[0][1:3] == ["mnist.forward", "0"]


def test_plan_says_why_a_candidate_was_refused(capsys, monkeypatch):
    from cgdnn.layers import activation
    from cgdnn.layers._base import Candidate

    plain = activation.ReLU.candidates

    def candidates(layer, which):
        (last,) = plain(layer, which)
        return [Candidate("fancy", last.steps, refuse=lambda layer: "no such vectors"), last]

    monkeypatch.setattr(activation.ReLU, "candidates", candidates)
    run("plan", VGG)
    assert "fancy: no such vectors" in capsys.readouterr().out


def test_exact_forbids_winograd(capsys):
    run("plan", VGG)
    assert "exact results" not in capsys.readouterr().out
    run("plan", VGG, "--exact")
    text = capsys.readouterr().out
    assert "winograd: rounds worse than sums of products, and exact results are asked for" in text
    assert "conv_winograd" not in text


def test_summary_prints_layers_and_sums(capsys):
    assert run("summary", VGG) == 0
    text = capsys.readouterr().out
    assert "VGG-16" in text
    found: dict[str, list[str]] = {}
    for words in map(str.split, text.splitlines()):
        if words:
            found.setdefault(words[0], words)  # the memory table comes after the sums
    assert found["conv1_1"][1:4] == ["Convolution", "2x64x224x224", "1,792"]
    assert found["relu1_1"][-2:] == ["0", "B"]  # in place
    assert found["parameters"][1:] == ["138,357,544", "(527.8", "MiB)"]
    assert found["multiply-adds"][1] == "30,940,528,640"


def test_shape_is_asked_for_where_nothing_tells_it():
    from cgdnn.errors import DescriptionError

    with pytest.raises(DescriptionError, match=r"--shape data=3,227,227"):
        run("summary", str(LENET))


@pytest.mark.parametrize("text", ["data", "data=", "=1,2", "data=1,x", "data=1,0", "data=1,-2"])
def test_malformed_shape(text):
    with pytest.raises(UsageError, match=r"--shape: got .* Write it as data=3,227,227\."):
        run("summary", str(LENET), "--shape", text)


def test_shape_of_an_unknown_blob():
    with pytest.raises(UsageError, match=r'no data layer makes a blob "dada".* data, label'):
        run("summary", str(LENET), "--shape", "data=1,28,28", "--shape", "dada=1")


def test_number_of_threads():
    with pytest.raises(UsageError, match="--threads: got 0, expected 1 or more"):
        run("plan", VGG, "--threads", "0")


def test_tables_are_drawn_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    run("summary", VGG)
    text = capsys.readouterr().out
    assert "─" in text
    assert "2x64x224x224" in text
    assert "138,357,544" in text
