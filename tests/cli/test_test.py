import re

import numpy as np
import pytest

import cgdnn as library
from tests.cli.caffe_logs import LOGS

NET = "logs/train_val.prototxt"


@pytest.fixture
def weights(folder):
    """Weights of the tiny net, as it starts."""
    net = library.Net(NET)
    net.save("start.caffemodel")
    net.close()
    return "start.caffemodel"


def lines(text):
    return [line.partition("] ")[2] for line in text.splitlines()]


def test_batches_then_means(cgdnn, weights):
    code, _, err = cgdnn("test", f"--model={NET}", f"--weights={weights}", "--iterations=3")
    assert code == 0
    numbers = re.compile(r"(?<=[=:] )[\d.]+")
    golden = [
        numbers.sub("", line)
        for line in lines((LOGS / "test.log").read_text())
        if line.startswith(("Batch", "Loss", "accuracy =", "loss ="))
    ]
    own = lines(err)[2:]
    assert [numbers.sub("", line) for line in own] == golden
    losses = [float(line.split(" = ")[1]) for line in own if re.match(r"Batch \d, loss", line)]
    assert float(own[-3].removeprefix("Loss: ")) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(own[-1].split()[2]) == pytest.approx(np.mean(losses), rel=1e-5)


def test_caffes_single_dashes(cgdnn, weights):
    code, _, err = cgdnn("test", "-model", NET, "-weights", weights, "-iterations", "1", "-gpu=0")
    assert code == 0
    assert "--gpu" in err
    assert "Batch 0, accuracy = " in err


def test_a_score_that_is_no_number_is_no_success(cgdnn, folder):
    net = library.Net(NET)
    net.params["ip1"][0].data[0, 0] = np.nan
    net.save("nan.caffemodel")
    net.close()
    code, _, err = cgdnn("test", NET, "--weights", "nan.caffemodel", "--iterations", "2")
    assert code == 4
    assert 'layer "ip1" (InnerProduct), weights' in err
    assert "Batch 1" not in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([NET], 2, "got no weights"),
        (["--weights", "a"], 2, "got 0 nets (none)"),
        ([NET, "--model", NET, "--weights", "a"], 2, "got 2 nets"),
        ([NET, "--weights", "a", "--iterations", "0"], 2, "--iterations: got 0"),
        ([NET, "--weights", "missing.caffemodel"], 3, "missing.caffemodel"),
    ],
)
def test_failures(cgdnn, words, code, said):
    got, _, err = cgdnn("test", *words)
    assert got == code
    assert said in err
