"""Stopped: a process that is stopped at any moment delays no other beyond the limits for waits."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from remote import servers

from kcache import open_engine

#: Each program does one operation, writes a dot, and waits for a byte before the next operation.
_BEGIN = """
import os, sys
from random import Random
place, argument, seed = sys.argv[1:]
random = Random(seed)
def done():
    os.write(1, b".")
    os.read(0, 1)
"""
_ENGINE = """
from kcache import Entry, open_engine
with open_engine(place, backend=argument, max_size=200_000) as engine:
    while True:
        number = random.randrange(60)
        key = f"{number:02x}" * 32
        found = engine.get(key)
        if found is None:
            size = random.randrange(200, 20_000)
            engine.put(key, Entry({"cubin": bytes([number]) * size}, {"size": size}))
        else:
            assert found.payload == {"cubin": bytes([number]) * found.metadata["size"]}
        if random.random() < 0.1:
            engine.delete(key)
        done()
"""
_COMPILES = """
import kcache
arch = kcache.CompileOptions(arch="sm_80")
with kcache.KernelCache(place, max_size="60kB", memory_size=0, wait=2, remote=argument) as cache:
    while True:
        number = random.randrange(1000, 1020)
        source = 'extern "C" __global__ void k(int* out) { *out = %d; }' % number
        assert b", %d;" % number in cache.get_or_compile(source, (), arch).ptx
        done()
"""
_RUNS = """
import runpy
def bodies():
    while True:
        yield f"a[1] = {random.randrange(30)};"
        done()
sys.stdin, sys.argv = bodies(), ["", argument]
runpy.run_path(os.environ["CLIENT"])
"""
#: No operation takes longer, even on a busy machine. The limits for waits are 10 s for a lock, 2 s
#: for another compile, 20 s for a worker and 5 s for a server.
_LONG = 120.0
_MARK = "KCACHE_TEST_STOPPED"


class Program:
    """A program that does a given number of operations; it may run under `kcache run`."""

    def __init__(self, command: list[object], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._wanted = 1
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self.pid = self._process.pid
        self.said = bytearray()

    @property
    def done(self) -> int:
        """The number of operations that the program has done."""
        with suppress(BlockingIOError):
            while part := os.read(self._output, 1 << 16):
                self.said += part
        return self.said.count(b".")

    def begins(self, operations: int) -> None:
        self._wanted += operations
        os.write(self._process.stdin.fileno(), bytes(operations))

    def goes_on(self) -> None:
        """Wait until the program has done all operations that it has begun."""
        deadline = time.monotonic() + _LONG
        while self.done < self._wanted:
            assert self._process.poll() is None, "the program has ended"
            assert time.monotonic() < deadline, f"the program was held up for {_LONG:g} s"
            time.sleep(0.002)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def ours(mark: str) -> Iterator[int]:
    """Yield the processes that come from a test: programs, workers and services."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if f"{_MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                yield int(pid)


@contextmanager
def programs(
    libraries: Path, real: Path, redis: servers.Redis, tmp_path: Path
) -> Iterator[dict[str, Program]]:
    remote = f"redis://127.0.0.1:{redis.port}/7?leases=1"
    run = (sys.executable, "-m", "kcache", "run", "--")
    kinds: dict[str, tuple[object, ...]] = {
        "file": (sys.executable, "-c", _BEGIN + _ENGINE, tmp_path / "files", "file"),
        "lmdb": (sys.executable, "-c", _BEGIN + _ENGINE, tmp_path / "lmdb", "lmdb"),
        "compile": (sys.executable, "-c", _BEGIN + _COMPILES, tmp_path / "kernels", ""),
        "lease": (sys.executable, "-c", _BEGIN + _COMPILES, tmp_path / "leased", remote),
        "run": (*run, sys.executable, "-c", _BEGIN + _RUNS, "", real),
    }
    with tempfile.TemporaryDirectory(prefix="ks-", dir="/tmp") as runtime, ExitStack() as stack:
        environment = {
            **os.environ,
            _MARK: str(tmp_path),
            "CLIENT": str(Path(__file__).parents[1] / "dropin/clients/repeated.py"),
            "KCACHE_DIR": str(tmp_path / "run"),
            "KCACHE_DROPIN_LIBRARIES": str(libraries),
            "KCACHE_MAX_SIZE": "60kB",
            "XDG_RUNTIME_DIR": runtime,
        }
        started: dict[str, Program] = {}
        for number in range(2):
            for kind, command in kinds.items():
                program = Program([*command, number], environment)
                stack.callback(program.end)
                started[f"{kind} {number}"] = program
        yield started


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_a_process_that_is_stopped_holds_up_no_other(
    seed: int, nvrtc: tuple[int, int], libraries: Path, redis_server: servers.Redis,
    tmp_path: Path, long: bool,
) -> None:  # fmt: skip
    from kcache.nvrtc import library

    if seed and not long:
        pytest.skip("runs only with --long")
    random, found = Random(seed), library.find()
    with programs(libraries, Path(found.path), redis_server, tmp_path) as running:
        for program in running.values():
            program.goes_on()
        for _ in range(50 if long else 2):
            victim = random.choice(sorted(ours(str(tmp_path))))
            for program in running.values():
                program.begins(20 if long else 3)
            time.sleep(random.random() ** 3 / 5)
            with suppress(ProcessLookupError):  # an idle worker may have ended
                os.kill(victim, signal.SIGSTOP)
            try:
                for program in running.values():
                    if program.pid != victim:
                        program.goes_on()
            finally:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGCONT)
        for program in running.values():
            program.goes_on()
    for number in range(2):
        said = bytes(running[f"run {number}"].said).replace(b".", b"").split(b"\n")
        assert len(set(said)) <= 31
        assert {line[:2] for line in said if len(line) == 66} == {b"0 "}
    for name, folder in (("file", "files"), ("lmdb", "lmdb"), ("file", "kernels")):
        with open_engine(tmp_path / folder, backend=name) as engine:
            list(engine.backend.check(repair=True))
            assert list(engine.backend.check()) == []
