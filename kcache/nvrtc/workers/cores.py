"""Cores: how many processors this process may use."""

from __future__ import annotations

import os
import time

__all__ = ["usable_cores"]

#: Control groups, version 2, and version 1.
_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max", None),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
#: A container's quota is read again after this many seconds: each compile asks for it, and it
#: seldom changes.
_REMEMBERED = 10.0
_read: tuple[float, int | None] | None = None


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _remembered_quota()
    return cores if quota is None else max(1, min(cores, quota))


def _remembered_quota() -> int | None:
    """Return the container's quota, at most a few seconds old."""
    global _read  # noqa: PLW0603
    now = time.monotonic()
    if _read is None or now >= _read[0] + _REMEMBERED:
        _read = now, _quota()
    return _read[1]


def _quota() -> int | None:
    """Return the container's quota in whole cores, rounded up, or None if there is none."""
    for quota_file, period_file in _QUOTAS:
        try:
            with open(quota_file, encoding="ascii") as file:
                numbers = file.read().split()
            if period_file is not None:
                with open(period_file, encoding="ascii") as file:
                    numbers += file.read().split()
            quota, period = map(int, numbers)
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:
            return -(-quota // period)
    return None
