"""Slots: no more compiles run than there are processors, whatever becomes of their processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from core.helpers import fork, wait

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
    """Have a child that holds a slot, and updates its heartbeat `beats` times; yields its pid."""
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
        assert take(path) is not None  # and given back at once, as nothing refers to it


@pytest.mark.skipif(len(ALL) < 2, reason="one processor")
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
    monkeypatch.setattr(slots, "_STOPPED_AFTER", 0.5)
    with another(path, ALL[:1], beats=10**6) as child:
        time.sleep(0.6)
        assert take(path, ALL[:1]) is None  # its heartbeat is recent
        os.kill(child, signal.SIGSTOP)
        with bound(ALL[:1]):
            slot = Slots(str(path), LONG)._wait()
        assert slot is not None
        for _ in range(20):  # without another wait
            slot.release()
            slot = take(path, ALL[:1])
            assert slot is not None
        os.kill(child, signal.SIGCONT)
        slot.release()
        deadline = time.monotonic() + LONG
        while take(path, ALL[:1]) is not None:
            assert time.monotonic() < deadline, "it never counts again"


@pytest.mark.parametrize("kind", ["no directory", "a directory", "a link", "a pipe"])
def test_without_a_file_for_slots_no_compile_waits(kind: str, path: Path, tmp_path: Path) -> None:
    if kind == "no directory":
        path = tmp_path / "missing" / "slots"
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a link":
        path.symlink_to(tmp_path / "victim")
    else:
        os.mkfifo(path)
    with Slots(str(path), LONG).held() as slot:
        assert slot is None
    assert not (tmp_path / "victim").exists()


def test_a_file_of_somebody_else_is_not_written_to(path: Path) -> None:
    path.write_bytes(b"precious")
    with Slots(str(path), LONG).held() as slot:
        assert slot is None
    assert path.read_bytes() == b"precious"


# -- compiles --------------------------------------------------------------------------------------

#: Runs in each worker, before its main function: notes when it waits for a slot, and compiles.
_NOTES = """
import os, time
from kcache.nvrtc.workers import nvrtc, slots
def noting(function, what):
    def noted(*args, **kwargs):
        begun = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            line = f"{what} {os.getpid()} {begun} {time.monotonic()} {sorted(os.sched_getaffinity(0))}"
            with open(LOG, "a") as file:
                file.write(line + chr(10))
    return noted
slots.Slots._wait = noting(slots.Slots._wait, "waits")
nvrtc.Nvrtc.compile = noting(nvrtc.Nvrtc.compile, "compiles")
"""
_PROGRAM = """
import os, sys
import kcache
from kcache.nvrtc.workers import process
from nvrtc.reference import *
place, log, mask, first, count, notes = sys.argv[1:]
if mask:
    os.sched_setaffinity(0, map(int, mask.split(",")))
notes = f"LOG = {log!r}" + notes
process._CODE = process._CODE.replace("main()", f"exec({notes!r}); main()")
sources = [KERNEL.replace("V", str(n)) for n in range(int(first), int(first) + int(count))]
with kcache.KernelCache(place) as cache:
    kernels = cache.compile_many([(source, (), ARCH) for source in sources])
    assert all(isinstance(kernel, kcache.CompiledKernel) for kernel in kernels), kernels
    print(cache.stats().compiles)
"""


class Span:
    """What one worker did for a while."""

    def __init__(self, line: str) -> None:
        self.what, pid, begun, ended, processors = line.split(" ", 4)
        self.pid, self.begun, self.ended = int(pid), float(begun), float(ended)
        self.processors = frozenset(map(int, processors.strip("[]\n").split(",")))


def run(tmp_path: Path, masks: Iterable[str], count: int, *, same: bool) -> tuple[list[Span], int]:
    """Compile in a process for each mask; returns what the workers did, and how much they made."""
    log = tmp_path / "log"
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, (tmp_path / "cache", log, mask)),
             str(0 if same else number * count), str(count), _NOTES],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number, mask in enumerate(masks)
    ]  # fmt: skip
    said = [program.communicate(timeout=600) for program in programs]
    assert all(program.returncode == 0 for program in programs), said
    return [Span(line) for line in log.read_text().splitlines()], sum(int(out) for out, _ in said)


def most_at_once(spans: Iterable[Span]) -> int:
    compiles = [span for span in spans if span.what == "compiles"]
    return max(
        sum(span.begun <= moment.begun < span.ended for span in compiles) for moment in compiles
    )


@pytest.mark.usefixtures("nvrtc")
def test_a_directory_bounds_the_compiles_of_all_processes(tmp_path: Path, long: bool) -> None:
    """Processes want the same six kernels: six compiles, no more at a time than cores."""
    spans, compiles = run(tmp_path, [""] * (8 if long else 3), 6, same=True)
    assert compiles == 6
    assert most_at_once(spans) <= usable_cores()
