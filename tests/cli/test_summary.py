"""What `cgdnn summary` predicts is what a process takes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cgdnn.cli.main import main
from cgdnn.netdef.read import read_net

ROOT = Path(__file__).parents[2]
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
THREADS = 2

# A process that says how much memory importing costs, then runs two iterations.
PROGRAM = """
import sys
from cgdnn import Net, Solver
from cgdnn.cli import train
from cgdnn.cli.main import main
phase, net, threads = sys.argv[1:]
status = open("/proc/self/status").read()
print(status.partition("RssAnon:")[2].split()[0], flush=True)
if phase == "TRAIN":
    sys.exit(main(["train", f"--solver={net}.solver", f"--threads={threads}"]))
net = Net(net, phase, threads=int(threads))
for _ in range(2):
    net.run(("forward",), lend=True)
"""


def write(folder: Path, name: str, batch: int) -> Path:
    """Write the description of a net with this batch size, and a solver."""
    net = read_net(ROOT / "tests" / "nets" / f"{name}.prototxt").message
    for layer in net.layer:
        for shape in layer.dummy_data_param.shape:
            shape.dim[0] = batch
    path = folder / f"{name}.prototxt"
    path.write_text(str(net))
    Path(f"{path}.solver").write_text(
        f'net: "{path}" base_lr: 1e-4 lr_policy: "fixed" momentum: 0.9 weight_decay: 5e-4 '
        "max_iter: 2 snapshot_after_train: false"
    )
    return path


def anonymous(pid: int) -> int:
    """Return the bytes of anonymous resident memory of a process; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * int((status.partition("RssAnon:")[2].split() or ["0"])[0])


def taken(phase: str, net: Path) -> int:
    """Return the peak of anonymous resident memory above what importing costs, in bytes."""
    command = [sys.executable, "-c", PROGRAM, phase, str(net), str(THREADS)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        imported = 1024 * int(process.stdout.readline())
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.002)
    assert process.returncode == 0
    return peak - imported


def predicted(phase: str, net: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """Return the sum of the rows of the table of memory, in bytes."""
    assert main(["summary", str(net), f"--phase={phase}"]) == 0
    table = capsys.readouterr().out.partition(f"with {THREADS} workers")[2]
    rows = [line.rsplit(maxsplit=2) for line in table.splitlines() if line.endswith("B")]
    return sum(float(size) * UNITS[unit] for name, size, unit in rows if name.strip() != "together")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "batch", "phase"),
    [
        ("alexnet", 64, "TRAIN"),
        ("vgg16", 4, "TRAIN"),
        ("googlenet", 32, "TRAIN"),
        ("googlenet", 96, "TEST"),
    ],
)
def test_memory_is_as_predicted(name, batch, phase, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CGDNN_NUM_THREADS", str(THREADS))
    net = write(tmp_path, name, batch)
    expected = predicted(phase, net, capsys)
    assert expected > 500e6
    taken(phase, net)  # compiles the kernels, which takes memory of its own
    assert taken(phase, net) == pytest.approx(expected, rel=0.1)
