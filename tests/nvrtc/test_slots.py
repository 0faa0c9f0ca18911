"""Slots: no more compiles run than there are processors, even if a process is killed or stopped."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core.helpers import fork, started, wait

from kcache.nvrtc.workers import slots
from kcache.nvrtc.workers.slots import Slot, Slots
from kcache.util.cpus import usable_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="processes can't be bound to processors here"
)

ALL = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
LONG = 60.0


# -- processes -------------------------------------------------------------------------------------


@contextmanager
def bound(processors: Iterable[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def take(path: Path, processors: Iterable[int] = ALL) -> Slot | None:
    with bound(processors):
        return Slots(str(path), 0.0)._wait()


@contextmanager
def another(path: Path, processors: Iterable[int] = ALL, *, beats: int = 0) -> Iterator[int]:
    """Start a child that holds a slot and updates its heartbeat `beats` times; yield its pid."""
    reading, writing = os.pipe()

    def work() -> None:
        slot = take(path, processors)
        assert slot is not None
        os.write(writing, b"x")
        for _ in range(beats):
            time.sleep(0.05)
            slot.beat()
        signal.pause()

    child = fork(work)
    try:
        assert os.read(reading, 1)
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        wait(child)
        os.close(reading)
        os.close(writing)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slots"


def test_a_slot_for_each_processor(path: Path) -> None:
    taken = [take(path) for _ in ALL]
    assert all(taken)
    assert take(path) is None
    for slot in taken:
        assert slot is not None
        slot.release()
        assert take(path) is not None  # released at once, because no variable refers to it


@pytest.mark.skipif(len(ALL) < 2, reason="needs two processors")
def test_processes_that_are_bound_to_different_processors_do_not_wait_for_each_other(
    path: Path,
) -> None:
    with another(path, ALL[:1]):
        assert take(path, ALL[:1]) is None
        assert take(path, ALL[1:2]) is not None


def test_a_killed_holder_counts_no_more(path: Path) -> None:
    with another(path, ALL[:1]) as child:
        assert take(path, ALL[:1]) is None
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert take(path, ALL[:1]) is not None


def test_a_stopped_holder_holds_up_the_others_once_for_a_few_seconds(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_STOPPED_AFTER", 2.0)  # a beat may be late on a busy machine
    with another(path, ALL[:1], beats=10**6) as child:
        time.sleep(2.2)
        assert take(path, ALL[:1]) is None  # its heartbeat is recent
        os.kill(child, signal.SIGSTOP)
        with bound(ALL[:1]):
            slot = Slots(str(path), LONG)._wait()
        assert slot is not None
        for _ in range(20):  # none of these waits
            slot.release()
            slot = take(path, ALL[:1])
            assert slot is not None
        os.kill(child, signal.SIGCONT)
        slot.release()
        deadline = time.monotonic() + LONG
        while take(path, ALL[:1]) is not None:
            assert time.monotonic() < deadline, "the holder that continued is still ignored"


@pytest.mark.parametrize("kind", ["no directory", "a directory", "a link", "a pipe", "a file"])
def test_without_a_file_for_slots_no_compile_waits(kind: str, path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    if kind == "no directory":
        path = tmp_path / "missing" / "slots"
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a link":
        path.symlink_to(victim)
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"precious")
    with Slots(str(path), LONG).held() as slot:
        assert slot is None
    assert not victim.exists()
    assert kind != "a file" or path.read_bytes() == b"precious"


# -- compiles --------------------------------------------------------------------------------------

#: Runs in each worker before its main function, and makes it log when each compile begins and ends.
_NOTES = """
import time
from kcache.nvrtc.workers import nvrtc
real = nvrtc.Nvrtc.compile
def noted(*args):
    begun = time.monotonic()
    try:
        return real(*args)
    finally:
        with open(LOG, "a") as file:
            file.write(f"{begun} {time.monotonic()}" + chr(10))
nvrtc.Nvrtc.compile = noted
"""
_PROGRAM = """
import sys
import kcache
from kcache.nvrtc.workers import process
from nvrtc.reference import ARCH, KERNEL
place, log, notes = sys.argv[1:]
notes = f"LOG = {log!r}" + notes
process._CODE = process._CODE.replace("main()", f"exec({notes!r}); main()")
with kcache.KernelCache(place) as cache:
    kernels = cache.compile_many([(KERNEL.replace("V", str(n)), (), ARCH) for n in range(6)])
    assert all(isinstance(kernel, kcache.CompiledKernel) for kernel in kernels), kernels
    print(cache.stats().compiles)
"""


@pytest.mark.usefixtures("nvrtc")
def test_a_directory_bounds_the_compiles_of_all_processes(tmp_path: Path, long: bool) -> None:
    """Several processes with the same six kernels make six compiles, at most one per core at once."""
    place, log = tmp_path / "cache", tmp_path / "log"
    programs = [started(_PROGRAM, place, log, _NOTES) for _ in range(8 if long else 3)]
    assert sum(int(program.communicate(timeout=600)[0]) for program in programs) == 6
    spans = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    at_once = [sum(begun <= moment < ended for begun, ended in spans) for moment, _ in spans]
    assert max(at_once) <= usable_cores()
