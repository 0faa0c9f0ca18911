"""Slots: bound how many compiles run at a time, over all processes that share a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from kcache.nvrtc.workers.cores import usable_cores
from kcache.util.locks import RangeLocks
from kcache.util.open_file import OpenFile, open_own

__all__ = ["Slots"]

#: Seconds between two looks for a free slot: a twentieth of the time waited, within these limits.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.025


class Slots:
    """One byte of a file for each usable core; each running compile holds one.

    Threads: each takes a slot of its own. Processes: the kernel releases the slots of a killed
    process. Fork: a child holds none of its parent's. If the file can't be opened or has no locks,
    all compile at once, because slots only keep the machine from being overloaded.

    Args:
        path: of the file; it is created, and nothing is ever written to it.
        patience: seconds to wait for a slot at most; then the compile goes on without one.
    """

    def __init__(self, path: str, patience: float) -> None:
        self._path = path
        self._patience = patience

    @contextmanager
    def held(self) -> Generator[None]:
        """Hold a slot while the block runs; wait for one if all are taken."""
        taken = self._take()
        try:
            yield
        finally:
            if taken is not None:
                locks, number = taken
                with suppress(OSError):
                    locks.release(number, 1)

    def _open(self) -> OpenFile | None:
        with suppress(OSError):  # no place to write to, or a file that is not ours
            return open_own(self._path, os.O_RDWR | os.O_CREAT)
        return None

    def _take(self) -> tuple[RangeLocks, int] | None:
        """Take a slot, waiting for one if all are taken; None to go on without."""
        file = self._open()
        if file is None:
            return None
        locks = RangeLocks(file)
        count = usable_cores()
        started = time.monotonic()
        while locks.supported:
            with suppress(OSError):
                for number in range(count):
                    if locks.claim(number, 1):
                        return locks, number
            waited = time.monotonic() - started
            if waited >= self._patience:
                return None
            time.sleep(min(max(waited / 20, _FIRST_PAUSE), _LONGEST_PAUSE))
        return None
