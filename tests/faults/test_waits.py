"""Waits that would never end: leaders that hang, and what opens and never reads."""

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from core.helpers import command, entry, key, python, run_all
from faults.places import make_socket

from kcache import BackendError, open_engine
from kcache.engine.journal import Journal
from kcache.engine.single_flight import Flight, lock_key
from kcache.engine.stats import Counters, StatsFile

LONG = 120.0
A = key("a")


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """A test that waits for ever is ended."""
    signal.alarm(100)
    yield
    signal.alarm(0)


# -- leaders that hang -----------------------------------------------------------------------------


class Hanging:
    """A leader that begins and does not end before it is let."""

    def __init__(self, flight: Flight) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: flight.run(A, lambda: None, self._make, str))
        self._thread.start()
        assert self.begun.wait(LONG)

    def _make(self) -> tuple[str, str]:
        self.begun.set()
        assert self.go.wait(LONG)
        return "late", "late"

    def end(self) -> None:
        self.go.set()
        self._thread.join(LONG)


@pytest.mark.parametrize("locked", [False, True])
def test_of_many_threads_that_lose_patience_one_makes_the_value(
    locked: bool, tmp_path: Path
) -> None:
    """All 24 compiled at once."""
    flight = Flight(str(tmp_path / "flight") if locked else None, wait=0.3, counters=Counters())
    hanging = Hanging(flight)
    at_once, most, made = 0, 0, 0
    guard, values = threading.Lock(), []

    def make() -> tuple[str, str]:
        nonlocal at_once, most, made
        with guard:
            made, at_once = made + 1, at_once + 1
            most = max(most, at_once)
        threading.Event().wait(0.1)
        with guard:
            at_once -= 1
        values.append("made")
        return "made", "made"

    def look() -> str | None:
        return values[0] if values else None

    assert run_all(*(lambda: flight.run(A, look, make, str) for _ in range(24))) == ["made"] * 24
    assert (made, most) == (1, 1)
    hanging.end()


def test_of_many_threads_that_wait_for_another_process_one_makes_the_value(tmp_path: Path) -> None:
    """Two did: the one that looked at the lock, and the first of those that waited for it."""
    flight = Flight(str(tmp_path / "flight"), wait=0.3, counters=Counters())
    other = lock_key(str(tmp_path / "flight"), A)  # as another process has it
    assert other is not None
    made: list[int] = []
    values: list[str] = []

    def make() -> tuple[str, str]:
        made.append(1)
        threading.Event().wait(0.1)
        values.append("made")
        return "made", "made"

    def look() -> str | None:
        return values[0] if values else None

    assert run_all(*(lambda: flight.run(A, look, make, str) for _ in range(24))) == ["made"] * 24
    assert len(made) == 1
    other.close()


def test_a_successor_that_hangs_too_is_replaced_in_turn(tmp_path: Path) -> None:
    flight = Flight(None, wait=0.2, counters=Counters())
    hanging = Hanging(flight)
    go, calls, guard = threading.Event(), [], threading.Lock()

    def make() -> tuple[str, str]:
        with guard:
            calls.append(1)
            first = len(calls) == 1
        if first:
            assert go.wait(LONG)
        else:
            go.set()
        return "made", "made"

    def look() -> str | None:
        return "made" if go.is_set() else None

    assert run_all(*(lambda: flight.run(A, look, make, str) for _ in range(6))) == ["made"] * 6
    assert len(calls) == 2
    hanging.end()


IMPATIENT = """
import os, sys, time
from kcache import CacheEngine, Entry
from kcache.backend import open_backend
place, mine = sys.argv[1:]
backend = open_backend("file", place, max_size=10**6)
engine = CacheEngine(backend, max_size=10**6, lock_file=place + "/flight", wait=1.0)
def create():
    with open(place + "/made", "ab", buffering=0) as file:
        file.write(b".")
    time.sleep(0.3)
    return Entry({"a": b"made"})
assert engine.get_or_create(mine, create) == Entry({"a": b"made"})
engine.close()
"""


def test_of_many_processes_that_lose_patience_one_makes_the_value(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    with open_engine(place) as engine:
        flight = Flight(str(place / "flight"), wait=LONG, counters=engine.counters)
        hanging = Hanging(flight)
        codes = run_all(*(lambda: python(IMPATIENT, str(place), A).returncode for _ in range(4)))
        assert codes == [0] * 4
        assert (place / "made").read_bytes() == b"."
        hanging.end()


# -- what is no file -------------------------------------------------------------------------------


def _hard_link(path: Path) -> None:
    other = path.parent.parent / f"theirs-{path.name}"
    other.write_bytes(b"precious")
    os.link(other, path)


THINGS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5)),  # /dev/zero
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("/dev/zero"),
    "hard link": _hard_link,
    "sparse file": lambda path: (path.touch(), os.truncate(path, 5 << 30)),
}
PLACES = ("stats", "slots", "journal", "journal.1", "flight", "CACHEDIR.TAG")
COMMANDS = ("info", "stats", "stats --zero", "doctor", "report", "verify", "verify --repair", "ls")


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("what", [*PLACES, "file/counters"])
def test_whatever_is_in_the_place_of_a_file_nobody_waits_for_it(
    thing: str, what: str, tmp_path: Path, long: bool
) -> None:
    if thing == "device" and os.geteuid() != 0:
        pytest.skip("only root can make devices")
    place = tmp_path / "cache"
    with open_engine(place) as engine:
        engine.put(key(1), entry())
        engine.delete(key(2))
        engine.get_or_create(key(3), entry)
        engine.flush()
    path = place / what
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    THINGS[thing](path)
    with open_engine(place) as engine:
        engine.get(key(1))
        engine.put(key(4), entry())
        engine.get_or_create(key(5), entry)
        engine.delete(key(1))
        engine.trim(0)
        engine.total_stats()
        engine.clear()
    for call in (
        StatsFile(place / "stats").total,
        StatsFile(place / "stats").zero,
        lambda: list(Journal(str(place), "file").events()),
    ):
        with suppress(BackendError):
            call()
    if long or (what == "stats" and thing == "pipe"):
        for line in COMMANDS:
            out = ("-o", tmp_path / "r.html") if line == "report" else ()
            done = command(*line.split(), *out, "--directory", place)
            assert "Traceback" not in done.stderr, (line, done.stderr)
    theirs = tmp_path / f"theirs-{Path(what).name}"
    if theirs.exists():
        assert theirs.read_bytes() == b"precious"
