"""Slots: how many compiles may run at a time, over all processes that share a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from kcache.nvrtc.workers.cores import usable_cores
from kcache.util.forks import after_fork
from kcache.util.locks import RangeLocks

__all__ = ["Slots"]

#: Seconds between two looks for a free slot: a twentieth of the time waited, within these bounds.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.025


class Slots:
    """One byte of a file for each usable core; who compiles holds one.

    Threads: each takes a slot of its own. Processes: the kernel gives back what a killed process
    held. Fork: a child holds none of its parent's. Where the file can't be had or has no locks,
    everybody compiles at once; a slot only keeps the machine from being overcommitted.

    Args:
        path: of the file; it is created, and nothing is ever written to it.
        patience: seconds to wait for a slot at most, then go on without.
    """

    def __init__(self, path: str, patience: float) -> None:
        self._path = path
        self._patience = patience
        after_fork(self)

    def after_fork(self) -> None:
        """Nothing is kept between two compiles."""

    @contextmanager
    def held(self) -> Generator[None]:
        """Hold a slot while the block runs; wait for one if all are taken."""
        fd = self._open()
        try:
            if fd is not None:
                self._take(fd)
            yield
        finally:
            if fd is not None:
                os.close(fd)  # gives the slot back

    def _open(self) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with suppress(OSError):
            return os.open(self._path, flags, 0o600)
        return None

    def _take(self, fd: int) -> None:
        locks = RangeLocks(fd)
        count = usable_cores()
        started = time.monotonic()
        while locks.supported:
            with suppress(OSError):
                if any(locks.claim(number, 1) for number in range(count)):
                    return
            waited = time.monotonic() - started
            if waited >= self._patience:
                return
            time.sleep(min(max(waited / 20, _FIRST_PAUSE), _LONGEST_PAUSE))
