"""Interrupts: an exception at any point of any operation leaves no lock, place or descriptor taken."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from core.helpers import entry, key, python
from faults.stepper import Interrupt, Stepper

from kcache import CacheEngine, CompileOptions, KernelCache, open_engine
from kcache.nvrtc.workers import pool as pools

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/locks"), reason="/proc tells which locks there are"
)

CAP = 20_000


@pytest.fixture(autouse=True)
def _python_swallows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised while an object goes; pytest would keep it, with its frames."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


LONG = 60.0


def locks_in(place: Path) -> list[str]:
    """Return the system's lines about locks on the files in a directory, whoever has them."""
    files = {path.stat().st_ino for path in place.rglob("*") if path.is_file()}
    lines = Path("/proc/locks").read_text().splitlines()
    return [line for line in lines if int(line.split()[-3].rsplit(":", 1)[1]) in files]


def descriptors() -> set[str]:
    found: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return {each for each in found if "/proc/" not in each}


def put(engine: CacheEngine, name: str, size: int = 500) -> bool:
    return engine.put(key(name), entry(size))


OPERATIONS: dict[str, Callable[[CacheEngine], object]] = {
    "make": lambda engine: engine.get_or_create(key(os.urandom(4).hex()), lambda: entry(500)),
    "put": lambda engine: put(engine, os.urandom(4).hex()),
    "replace": lambda engine: put(engine, "same"),
    "get": lambda engine: engine.get(key("same")),
    "delete": lambda engine: engine.delete(key("same")),
    "evict": lambda engine: put(engine, os.urandom(4).hex(), CAP // 2),
    "trim": lambda engine: engine.trim(CAP // 2),
    "flush": lambda engine: (engine.counters.add("misses"), engine.flush()),
    "scan": lambda engine: list(engine.backend.scan()),
    "check": lambda engine: list(engine.backend.check()),
}
#: How many points of an operation are tried in the short form; all of them in the long one.
POINTS = 6
#: ... and of these, which look at each of 256 shards.
LONG_ONES = {"scan": 2, "check": 2}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CacheEngine]:
    with open_engine(tmp_path / "cache", max_size=CAP) as opened:
        put(opened, "same")
        opened.flush()
        yield opened


def count(run: Callable[[], object], *, signals: bool) -> int:
    stepper = Stepper(-1, signals=signals)
    stepper.run(run)
    return stepper.points


def require_nothing_left(engine: CacheEngine, before: set[str], what: str) -> None:
    assert engine.lock_file is not None
    place = Path(engine.lock_file).parent
    assert not locks_in(place), what
    assert descriptors() <= before, what

    def go_on() -> None:
        put(engine, "same")
        engine.delete(key("gone"))

    done = threading.Thread(target=go_on, daemon=True)
    done.start()
    done.join(LONG)
    assert not done.is_alive(), what


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("signals", [False, True], ids=["at each line", "where signals come"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_point_leaves_nothing_taken(
    name: str, signals: bool, engine: CacheEngine, long: bool
) -> None:
    def run() -> object:
        return OPERATIONS[name](engine)

    run()
    points = count(run, signals=signals)
    before = descriptors()
    for number in range(0, points, 1 if long else max(1, points // LONG_ONES.get(name, POINTS))):
        Stepper(number, signals=signals).run(run)
        require_nothing_left(engine, before, f"{name}, point {number} of {points}")
    assert list(engine.backend.check(repair=True)) is not None
    assert list(engine.backend.check()) == []
    assert engine.stats().errors == engine.stats().corrupt == 0


def test_what_an_interrupt_left_locked_in_logging_holds_up_no_put(engine: CacheEngine) -> None:
    before = descriptors()
    with logging._lock:  # type: ignore[attr-defined]  # for ever, where a signal came in getLogger
        for name in "evict", "trim":
            done = threading.Thread(target=OPERATIONS[name], args=[engine], daemon=True)
            done.start()
            done.join(LONG)
            assert not done.is_alive()
    require_nothing_left(engine, before, "at the end")


def real_signals(place: str, count: str) -> None:
    """Put beside a timer whose signals, as Ctrl-C, raise an exception in whatever runs then.

    What operations import is imported before: CPython's lock of imports stays taken if an exception
    comes within `_get_module_lock`, whoever imports.
    """

    def handler(*_: object) -> None:
        raise Interrupt

    random, hit = Random(1), 0
    signal.signal(signal.SIGALRM, handler)
    with open_engine(place, max_size=CAP) as engine:
        for operation in OPERATIONS.values():
            operation(engine)
        put(engine, "same")
        before = descriptors()
        for number in range(int(count)):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 2e-3))
                for _ in range(10):
                    put(engine, f"{number % 30}")
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                hit += 1
            if number % 50 == 0:
                signal.setitimer(signal.ITIMER_REAL, 0)
                require_nothing_left(engine, before, f"signal {number}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert hit > int(count) // 5
        require_nothing_left(engine, before, "at the end")


def test_real_signals_at_random_instants(tmp_path: Path, long: bool) -> None:
    """In a process of its own: the run of the tests has a hook of Python within calls of C."""
    code = (
        "import sys; from faults.test_interrupts import real_signals; real_signals(*sys.argv[1:])"
    )
    where = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = python(code, str(tmp_path / "cache"), str(20_000 if long else 200), environ=where)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("signals", [False, True], ids=["at each line", "where signals come"])
def test_an_interrupt_of_a_compile_leaves_no_lock_slot_or_worker_taken(
    signals: bool, tmp_path: Path, long: bool
) -> None:
    """With one worker, every later compile waited for the place that was lost."""
    shared, numbers = pools.shared(), iter(range(10**6))
    most = shared.most
    with KernelCache(tmp_path / "cache", workers=1) as cache:

        def run() -> None:
            source = f'extern "C" __global__ void k() {{}} // {next(numbers)}'
            cache.get_or_compile(source, (), CompileOptions(arch="sm_80"))

        run()
        points = count(run, signals=signals)
        run()
        before = len(descriptors())
        for number in range(0, points, max(1, points // (1500 if long else 4))):
            Stepper(number, signals=signals).run(run)
            what = f"point {number} of {points}"
            assert not locks_in(tmp_path), what
            done = threading.Thread(target=run, daemon=True)
            done.start()
            done.join(LONG)
            assert not done.is_alive(), what
            assert len(shared.pids()) <= 1, what
            assert len(descriptors()) <= before, what
    shared.most = most
    shared.close()
