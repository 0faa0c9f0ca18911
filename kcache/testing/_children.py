"""Other processes of the contract suite: forked ones, and killed ones."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from random import Random

import pytest

__all__ = ["PATIENCE", "Writers", "run_forked", "start", "wait"]

#: A child or thread that takes longer than this many seconds hangs. No test here takes this long.
PATIENCE = 60


def start(work: Callable[[], object], report: int | None = None) -> int:
    """Run `work` in a forked child, which exits without cleaning up; return its process id.

    Its exception is written to the file descriptor `report`.
    """
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks beside threads, in 3.12
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent's handler may raise an exception
        signal.alarm(PATIENCE)
        work()
        status = 0
    except BaseException:
        if report is not None:
            os.write(report, traceback.format_exc().encode()[-60_000:])
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_forked(work: Callable[[], object], meanwhile: Callable[[], object] | None = None) -> None:
    """Run `work` in a forked child, and `meanwhile` here; both have to succeed."""
    reading, writing = os.pipe()
    with open(reading, "rb") as report:
        try:
            pid = start(work, writing)
        finally:
            os.close(writing)
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            text = report.read().decode()
            status = wait(pid)
    assert status != -signal.SIGALRM, "the child hangs"
    assert status == 0, f"the child ended with {status}:\n{text}"


class Writers:
    """Processes that write without end, to be killed.

    Args:
        work: called in each child with a seed and a function to call after every operation.
        seed: of the kills and of the children's seeds.
    """

    def __init__(
        self, work: Callable[[int, Callable[[], object]], object], *, count: int, seed: int
    ) -> None:
        self._work = work
        self._count = count
        self._random = Random(seed)

    def kill_some(self) -> None:
        """Start them, let them do a random number of operations, and kill them all."""
        reading, writing = os.pipe()
        children: list[int] = []
        try:
            for _ in range(self._count):
                seed = self._random.getrandbits(32)
                children.append(start(partial(self._run, seed, reading, writing), 2))
            os.close(writing)
            writing = -1
            for _ in range(self._random.randrange(1, 60)):
                assert os.read(reading, 1), "every writer has failed"
            for _ in range(self._random.randrange(20_000)):
                pass  # ... so that the signal comes anywhere within an operation
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            ends = [wait(child) for child in children]
            for end in (reading, writing):
                if end >= 0:
                    os.close(end)
        assert ends == [-signal.SIGKILL] * self._count, f"a writer failed: {ends}"

    def _run(self, seed: int, reading: int, writing: int) -> None:
        os.close(reading)
        self._work(seed, lambda: os.write(writing, b"."))
