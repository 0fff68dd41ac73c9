"""What this machine offers: cores allowed, vector width, cache sizes."""

from __future__ import annotations

import contextlib
import math
import os
import platform
from functools import lru_cache
from pathlib import Path

from cgdnn.errors import UsageError


def _quota_cores() -> float:
    """Return the cores that the control group's CPU quota allows (infinite without one)."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            folder = Path("/sys/fs/cgroup/cpu")
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    return int(quota) / int(period) if quota not in ("max", "-1") else math.inf


def cores_allowed() -> int:
    """Return how many cores this process may keep busy: affinity mask and quota, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota_cores())))


def default_threads() -> int:
    """Return the worker count to use when none is given: ``$CGDNN_NUM_THREADS`` or the cores.

    Raises
    ------
    UsageError
        ``CGDNN_NUM_THREADS`` is not a positive whole number.
    """
    text = os.environ.get("CGDNN_NUM_THREADS", "")
    if not text:
        return cores_allowed()
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"CGDNN_NUM_THREADS: got {text!r}, expected a whole number above 0. "
            f"Set it to {cores_allowed()} to use every core."
        )
    return int(text)


@lru_cache(maxsize=1)
def _cpu_features() -> dict[str, bool]:
    from llvmlite import binding

    return dict(binding.get_host_cpu_features())


@lru_cache(maxsize=1)
def vector_bytes() -> int:
    """Return the width of the vector registers in bytes: 64 (AVX-512), 32 (AVX2) or 16.

    ``CGDNN_VECTOR_WIDTH`` (in floats: 16, 8 or 4) forces a width.

    Raises
    ------
    UsageError
        ``CGDNN_VECTOR_WIDTH`` is none of 16, 8, 4.
    """
    forced = os.environ.get("CGDNN_VECTOR_WIDTH", "")
    if forced:
        if forced not in ("16", "8", "4"):
            raise UsageError(
                f"CGDNN_VECTOR_WIDTH: got {forced!r}, expected 16, 8 or 4. "
                "Leave it unset to use what the processor has."
            )
        return 4 * int(forced)
    if os.environ.get("NUMBA_CPU_NAME") == "haswell":
        return 32
    features = _cpu_features()
    if features.get("avx512f"):
        return 64
    return 32 if features.get("avx2") else 16


def has_fma() -> bool:
    """Tell whether the processor fuses multiply and add (else they are emitted apart)."""
    features = _cpu_features()
    return features.get("fma", False) or features.get("neon", False)


@lru_cache(maxsize=1)
def cache_bytes() -> tuple[int, int]:
    """Return the sizes of one core's first and second level data caches in bytes."""
    sizes = {1: 32 << 10, 2: 512 << 10}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level = int((index / "level").read_text())
            if level in sizes and (index / "type").read_text().strip() != "Instruction":
                sizes[level] = int((index / "size").read_text().strip().rstrip("K")) << 10
        except (OSError, ValueError):
            continue
    return sizes[1], sizes[2]


@lru_cache(maxsize=1)
def description() -> str:
    """Return the processor's name and the vector width, such as ``AMD EPYC, 64-byte vectors``."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {vector_bytes()}-byte vectors"
