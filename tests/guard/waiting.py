"""Waiting: a process that waits while its kernel is made by somebody else, held at that point."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from guard.child import code, environment
from nvrtc.reference import working_directory

import kcache
from kcache.engine.single_flight import KeyLocks

__all__ = ["MISSING", "PAUSE", "waiter"]

#: Goes before the code of the waiting process: its first pause lasts until it is told to go on.
PAUSE = """
import sys, time
def pause(seconds):
    print("waiting", flush=True)
    sys.stdin.readline()
time.sleep = pause
"""
#: The waiter's question, the same as the one that `waiter` asks.
MISSING = """
import os
import kcache
def ask(place, source, backend="file"):
    options = kcache.CompileOptions(arch="sm_80", include_paths=[os.path.abspath("inc")])
    with kcache.KernelCache(place, backend=backend) as cache:
        return cache.get_or_compile(source, (), options)
"""


def waiter(text: str, home: Path, source: str, backend: str = "file") -> list[str]:
    """Runs Python code that asks for a kernel, in `home`, while another compiles it; its output.

    The kernel is made here first, and taken away; the process is started while its lock is held,
    and once it waits, the kernel is put back and the lock released.
    """
    place = home / "cache"
    options = kcache.CompileOptions(arch="sm_80", include_paths=[home / "inc"])
    with working_directory(home), kcache.KernelCache(place, backend=backend) as cache:
        assert not cache.get_or_compile(source, (), options).cached
        inner = cache.engine.backend
        taken = {info.key: inner.get(info.key) for info in list(inner.scan())}
        key = cache._requests.make(source, (), options).key
        lock = KeyLocks(str(place / "flight")).acquire(key)
        assert lock is not None
        for name in taken:
            assert inner.delete(name)
        command = code(PAUSE + text, place, source, backend)
        with _started(command, home) as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said == "waiting\n", said
            for name, value in taken.items():
                assert value is not None
                inner.put(name, value)
            lock.close()
            output, _ = process.communicate("go on\n")
        assert process.returncode == 0
        assert cache.total_stats().compiles == 1
        return output.splitlines()


def _started(command: Sequence[str], home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=home,
        env=environment(home),
    )
