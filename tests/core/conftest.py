"""Fixtures of the core's tests: no open file and no thread outlives a test."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcache.nvrtc.workers import pool


def _open_files(below: Path) -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(str(below)):
            found.append(target)
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaves a thread running, or a file below its directory open."""
    pool.shared().close()  # another test may have started its workers
    threads = {*threading.enumerate()}
    yield
    pool.shared().close()
    for thread in {*threading.enumerate()} - threads:
        thread.join(10)  # the thread may be about to end
        assert not thread.is_alive(), f"{thread} was left behind"
    if _open_files(tmp_path):
        gc.collect()  # closes the files of engines and backends that are no longer referenced
        assert _open_files(tmp_path) == []
