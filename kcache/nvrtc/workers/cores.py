"""Cores: which processors this process may use, and how many of them."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

__all__ = ["Processors", "usable_cores", "usable_processors"]

#: Control groups, version 2, and version 1.
_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max", None),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Processors(NamedTuple):
    """The processors that a process may use.

    Attributes:
        numbers: those that it may run on, by the system's numbers.
        most: how many of them its container may use at a time.
        owner: 16 bytes that differ between machines, and between containers that have a quota.
    """

    numbers: frozenset[int]
    most: int
    owner: bytes


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    usable = usable_processors()
    return min(len(usable.numbers), usable.most)


def usable_processors() -> Processors:
    """Return the processors that this thread, and what it starts, may use."""
    if hasattr(os, "sched_getaffinity"):
        numbers = frozenset(os.sched_getaffinity(0))
    else:
        numbers = frozenset(range(os.cpu_count() or 1))
    quota, owner = _quota()
    return Processors(numbers, sys.maxsize if quota is None else quota, owner)


def _quota() -> tuple[int | None, bytes]:
    """Return the container's quota in whole cores, rounded up, or None; and the quota's owner."""
    for quota_file, period_file in _QUOTAS:
        try:
            with open(quota_file, encoding="ascii") as file:
                numbers = file.read().split()
            if period_file is not None:
                with open(period_file, encoding="ascii") as file:
                    numbers += file.read().split()
            quota, period = map(int, numbers)
            group = os.stat(os.path.dirname(quota_file)).st_ino
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:
            return -(-quota // period), _machine() + group.to_bytes(8, "little")
    return None, _machine() + bytes(8)


def _machine() -> bytes:
    """Return 8 bytes that differ between machines, which may share a directory."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return bytes.fromhex(file.read().replace("-", ""))[:8].ljust(8, b"\0")
    except (OSError, ValueError):
        return bytes(8)
