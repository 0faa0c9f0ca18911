"""Cpus: which processors this process may use, by its affinity and its container's quota."""

from __future__ import annotations

import os
from typing import NamedTuple

#: The files that have the quota and the period of a control group: one file in version 2 of control
#: groups, two files in version 1.
_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Processors(NamedTuple):
    """The processors that a process may use.

    Attributes:
        numbers: the numbers of the processors in the system, ascending. There are not more than the
            container's quota allows.
        owner: bytes that differ between machines, and between containers that have a quota.
    """

    numbers: tuple[int, ...]
    owner: bytes


def usable_processors() -> Processors:
    """Return the processors that this thread and its child processes may use."""
    if hasattr(os, "sched_getaffinity"):
        numbers = sorted(os.sched_getaffinity(0))
    else:
        numbers = list(range(os.cpu_count() or 1))
    quota, group = _quota()
    return Processors(tuple(numbers[:quota]), _read(_BOOT_ID).encode() + group)


def usable_cores() -> int:
    """Return how many processors this thread and its child processes may use."""
    return len(usable_processors().numbers)


def _quota() -> tuple[int | None, bytes]:
    """Return the container's quota of cores, rounded up, and bytes that identify the container.

    If there is no quota, return None and empty bytes.
    """
    for paths in _QUOTAS:
        try:
            quota, period = map(int, " ".join(map(_read, paths)).split())
            group = os.stat(os.path.dirname(paths[0])).st_ino
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:
            return -(-quota // period), b" %d" % group
    return None, b""


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, ValueError):
        return ""
