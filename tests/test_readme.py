"""The README's example runs as printed."""

import re
import shutil
from pathlib import Path

from cgdnn.cli.main import COMMANDS
from cgdnn.data.dataset import write_database
from cgdnn.data.drawn import draw_digits
from cgdnn.layers._registry import layer_types

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_library_example(tmp_path, monkeypatch, capsys):
    here = tmp_path / "datasets" / "mnist"
    here.mkdir(parents=True)
    for path in (ROOT / "datasets" / "mnist").glob("*.prototxt"):
        shutil.copy(path, here)
    for name, count in (("train", 1000), ("test", 200)):
        write_database(here / f"mnist_{name}_lmdb", draw_digits(name, count))
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.strip().splitlines()) <= 10
    exec(example, {})
    accuracy, loss, *shape = capsys.readouterr().out.split(maxsplit=2)
    assert float(accuracy) > 0.8
    assert float(loss) > 0
    assert shape == ["(20, 1, 5, 5)\n"]


def test_every_command_is_listed():
    assert set(re.findall(r"`cgdnn (\w+)", README)) == set(COMMANDS)


def test_every_layer_is_listed():
    listed = re.search(r"\* Layers: (.*?)\.\n", README, re.DOTALL)[1]
    names = re.sub(r"\(.*?\)", "", listed, flags=re.DOTALL).replace("\n", " ").split(",")
    assert sorted(name.strip() for name in names) == list(layer_types())
