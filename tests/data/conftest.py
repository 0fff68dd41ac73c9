from functools import partial
from pathlib import Path

import pytest

from cgdnn.kernels.random import key_of, uniform_u32

TESTS = Path(__file__).parents[1]


@pytest.fixture
def draw():
    return partial(uniform_u32, key_of(1, "data"))


@pytest.fixture
def golden(monkeypatch):
    """The folder of golden values, made the working directory as its file names need."""
    monkeypatch.chdir(TESTS / "golden")
    return TESTS / "golden"


@pytest.fixture
def case(monkeypatch):
    """Enter the folder of a bad-input case."""

    def enter(name):
        monkeypatch.chdir(TESTS / "cases" / "run" / name)

    return enter
