from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def golden(monkeypatch):
    """Run in the folder of the golden data, which data layers' cases name files from."""
    folder = Path(__file__).parents[1] / "golden"
    monkeypatch.chdir(folder)
    return folder
