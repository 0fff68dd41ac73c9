from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cgdnn import machine
from cgdnn.errors import UsageError


@pytest.fixture(autouse=True)
def _uncached() -> Iterator[None]:
    machine.vector_bytes.cache_clear()
    yield
    machine.vector_bytes.cache_clear()


@pytest.mark.parametrize(
    ("mask", "quota", "cores"),
    [
        (8, float("inf"), 8),
        (8, 2.0, 2),
        (8, 1.5, 2),  # half a core more is worth a worker
        (2, 4.0, 2),
        (4, 0.2, 1),
    ],
)
def test_cores_are_the_least_of_mask_and_quota(
    mask: int, quota: float, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(mask)))
    monkeypatch.setattr(machine, "_quota_cores", lambda: quota)
    assert machine.cores_allowed() == cores


def test_threads_are_the_cores_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "cores_allowed", lambda: 3)
    monkeypatch.delenv("CGDNN_NUM_THREADS", raising=False)
    assert machine.default_threads() == 3
    monkeypatch.setenv("CGDNN_NUM_THREADS", "5")
    assert machine.default_threads() == 5


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_a_wrong_thread_count_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGDNN_NUM_THREADS", text)
    with pytest.raises(UsageError, match=f"CGDNN_NUM_THREADS: got '{text}', expected"):
        machine.default_threads()


@pytest.mark.parametrize(("floats", "width"), [("16", 64), ("8", 32), ("4", 16)])
def test_vector_width_can_be_forced(
    floats: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CGDNN_VECTOR_WIDTH", floats)
    assert machine.vector_bytes() == width


def test_a_wrong_vector_width_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGDNN_VECTOR_WIDTH", "12")
    with pytest.raises(UsageError, match="CGDNN_VECTOR_WIDTH: got '12', expected 16, 8 or 4"):
        machine.vector_bytes()


@pytest.mark.parametrize(
    ("features", "width"),
    [({"avx512f": True, "avx2": True}, 64), ({"avx2": True}, 32), ({"sse2": True}, 16)],
)
def test_vector_width_follows_the_processor(
    features: dict[str, bool], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CGDNN_VECTOR_WIDTH", raising=False)
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    monkeypatch.setattr(machine, "_cpu_features", lambda: features)
    assert machine.vector_bytes() == width


def test_caches_have_sizes() -> None:
    first, second = machine.cache_bytes()
    assert 4 << 10 <= first <= second
