"""Stats and their file: the sum of all processes' counts, to which killed processes do no harm."""

import math
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from struct import pack

import pytest
from core.helpers import QUICK, entry, fork, key, output_of, together, wait
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kcache
from kcache import Stats, open_engine
from kcache.directory import open_directory
from kcache.engine.journal import EVENTS, LIMIT, Event, Journal
from kcache.engine.stats import FIELDS, Counters, StatsFile
from kcache.util.locks import lock
from kcache.util.open_file import open_own


def amounts(**counts: float) -> list[float]:
    """Return counts in the order in which the file stores them."""
    return [counts.get(name, 0) for name in FIELDS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stats"


# -- Stats -------------------------------------------------------------------------------------


def test_figures_that_are_derived() -> None:
    stats = Stats(hits=3, misses=1, compiles=2, compile_seconds=0.5, hit_seconds=0.003)
    assert stats.requests == 4
    assert stats.hit_rate == 0.75
    assert stats.avg_compile_time_ms == 250
    assert stats.avg_cache_time_ms == pytest.approx(1)


# -- the file ----------------------------------------------------------------------------------


def test_zero_counts_from_there_on_for_every_process(path: Path) -> None:
    one, two = StatsFile(path), StatsFile(path)
    one.add(amounts(hits=5, compile_seconds=1.5))
    two.add(amounts(hits=5))
    StatsFile(path).zero()
    assert one.total() == Stats()
    one.add(amounts(hits=1))
    two.add(amounts(hits=2, compile_seconds=0.5))
    assert two.total() == Stats(hits=3, compile_seconds=0.5)


def test_a_damaged_record_counts_for_nothing(path: Path) -> None:
    file = StatsFile(path)
    file.add(amounts(hits=3))
    image = path.read_bytes()
    at = image.index(pack("<d", 3.0))
    path.write_bytes(image[:at] + pack("<d", 4.0) + image[at + 8 :])
    assert file.total() == Stats()


def test_counts_wait_for_a_lock_that_a_stopped_process_holds(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        file = StatsFile(tmp_path / "stats")
        file.add(amounts(hits=1))
        with open_own(file.path, os.O_RDWR) as stopped:
            assert lock(stopped, 64, 256)
            assert not file.add(amounts(hits=1), timeout=0.0)
            engine.get(key(1))
            engine.flush(timeout=0.0)
            assert file.total() == Stats(hits=1)
        engine.flush(timeout=0.0)
        assert file.total() == Stats(hits=1, misses=1)
        assert engine.stats().errors == 0


@settings(QUICK, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=2000), st.integers(0, 3000))
def test_a_damaged_file_can_be_added_to(path: Path, junk: bytes, offset: int) -> None:
    open_directory(str(path.parent))
    path.unlink(missing_ok=True)
    file = StatsFile(path)
    file.add(amounts(hits=5))
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(junk)
    for _ in range(2):
        total = file.total()
        assert all(math.isfinite(value) and value >= 0 for value in total.to_dict().values())
        file.add(amounts(misses=1))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_gone_is_made_again(replaced: bool, path: Path) -> None:
    file = StatsFile(path)
    file.add(amounts(hits=1))
    path.unlink()
    if replaced:
        StatsFile(path).add(amounts(hits=100))
    file.add(amounts(hits=1))
    assert StatsFile(path).total().hits == (101 if replaced else 1)


# -- through an engine ---------------------------------------------------------------------------

ONE_HIT_AND_A_MISS = """
import sys, kcache
engine = kcache.open_engine(sys.argv[1])
engine.put("0" * 64, kcache.Entry({}, {"compile_seconds": 0.5}))
engine.get("0" * 64)
engine.get("1" * 64)
"""
ENDINGS: dict[str, str] = {"close": "engine.close()", "exit": "", "let go": "del engine"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_counts_reach_the_file_however_a_process_ends(ending: str, tmp_path: Path) -> None:
    output_of(ONE_HIT_AND_A_MISS + ENDINGS[ending], tmp_path)
    with open_engine(tmp_path) as engine:
        total = engine.total_stats()
    assert (total.hits, total.misses, total.puts, total.saved_seconds) == (1, 1, 1, 0.5)


def test_real_processes_add_up_and_a_killed_one_loses_its_last_seconds_only(tmp_path: Path) -> None:
    def work() -> None:
        with open_engine(tmp_path) as engine:
            for number in range(10):
                engine.put(key(number), entry())
                engine.get(key(number))

    children = [fork(work) for _ in range(4)]
    assert [wait(child) for child in children] == [0] * 4

    def killed() -> None:
        engine = open_engine(tmp_path)
        engine.get(key(1))
        engine.flush()
        engine.get(key(1))
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait(fork(killed)) == -signal.SIGKILL
    with open_engine(tmp_path) as engine:
        assert engine.total_stats().hits == 41
        assert engine.total_stats().puts == 40
        assert engine.stats() == Stats()


def test_a_forked_child_does_not_count_again_what_its_parent_counted(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    engine.put(key(1), entry())
    engine.get(key(1))

    def child() -> None:
        engine.get(key(1))
        engine.close()

    assert wait(fork(child)) == 0
    engine.close()
    total = StatsFile(tmp_path / "stats").total()
    assert (total.hits, total.puts) == (2, 1)


def test_counting_is_exact_over_threads() -> None:
    counters = Counters()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def count() -> None:
        for _ in range(2000):
            counters.add("errors")
            counters.add("compile_seconds", 0.5)
            counters.hit("key", 0.5, 0.25, "memory")

    try:
        together(3, count)
    finally:
        sys.setswitchinterval(interval)
    found = counters.snapshot()
    assert (found.errors, found.compile_seconds) == (6000, 3000)
    assert (found.hits, found.memory_hits, found.hit_seconds) == (6000, 6000, 1500)
    assert found.saved_seconds == 0.5  # it is counted once


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # warns of forks beside threads
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_are_counted(method: str, tmp_path: Path) -> None:
    """The counts of multiprocessing's children are kept, although forked ones run no `atexit`."""
    context = multiprocessing.get_context(method)
    code = f"import kcache; kcache.open_engine({str(tmp_path)!r}).get('0' * 64)"
    with open_engine(tmp_path) as engine:
        children = [context.Process(target=exec, args=(code,)) for _ in range(2)]
        if method == "fork":
            children.append(context.Process(target=engine.get, args=("0" * 64,)))
        for child in children:
            child.start()
            child.join()
            assert child.exitcode == 0
        assert engine.total_stats().misses == len(children)


def test_statistics_that_cannot_be_written_change_nothing_else(tmp_path: Path) -> None:
    open_directory(str(tmp_path))
    (tmp_path / "stats").mkdir()
    with open_engine(tmp_path) as engine:
        engine.put(key(1), entry())
        assert engine.get(key(1)) == entry()
        engine.flush()
        assert engine.stats().errors == 1
        assert engine.total_stats().hits == 1


# -- the journal -----------------------------------------------------------------------------------

KEY = "0123456789abcdef" * 4


def journal(directory: Path, at: float = 1000.5) -> Journal:
    return Journal(str(directory), "file", clock=lambda: at)


def noted(directory: Path) -> list[Event]:
    return list(Journal(str(directory), "file").events())


@QUICK
@given(detail=st.text(), what=st.sampled_from(sorted(EVENTS)))
def test_odd_details(detail: str, what: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("journal")
    journal(directory).note(what, KEY, detail)
    journal(directory).note("evicted", KEY)
    first, second = noted(directory)
    assert (first.what, first.key) == (what, KEY[:32])
    assert len(first.detail) <= 10 * 200
    assert second.what == "evicted"


@settings(max_examples=15)
@given(content=st.binary(max_size=300))
def test_damaged_journals(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("journal")
    open_directory(str(directory))
    (directory / "journal").write_bytes(content)
    (directory / "journal.1").write_bytes(content[::-1])
    noted(directory)
    with open(directory / "journal", "ab") as file:
        file.write(b"\n")
    journal(directory).note("evicted", KEY)
    assert noted(directory)[-1] == Event(1000.5, "evicted", KEY[:32], "")


def test_it_is_bounded_and_remembers_the_last(tmp_path: Path) -> None:
    size = 0
    for number in range(6000):
        journal(tmp_path, at=number).note("evicted", KEY)
        size = max(size, sum(path.stat().st_size for path in tmp_path.glob("journal*")))
    assert size < 2 * LIMIT + 200
    assert {path.name for path in tmp_path.glob("journal*")} == {"journal", "journal.1"}
    times = [event.at for event in noted(tmp_path)]
    assert times == list(range(6000 - len(times), 6000))
    assert len(times) >= 1800


def test_the_engine_journals_refused_entries(tmp_path: Path) -> None:
    """A refused entry is noted in the journal. `cli/test_why.py` tests other removals."""
    with kcache.KernelCache(tmp_path, memory_size=0) as cache:
        engine = cache.engine
        engine.put(KEY, kcache.Entry({"a": b"b"}))
        assert engine.get(KEY) is not None
        assert noted(tmp_path) == []
        engine.backend.put(KEY, b"damage")
        assert engine.get(KEY) is None
    (event,) = noted(tmp_path)
    assert (event.what, event.key) == ("refused", KEY[:32])
    assert "too short" in event.detail
