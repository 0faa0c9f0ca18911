"""LmdbBackend: what is its own beyond the contract: sizes, uses, space given back, refusals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from core.helpers import entry, fork, key, output_of, stored_size, wait

from kcache import BackendError, ConfigError, KernelCache, open_engine
from kcache.backend import NoBackend
from kcache.directory import open_directory
from kcache.entry import encode
from kcache.errors import FullError
from kcache.util.mounts import FileSystem, file_system
from kcache_backends import lmdb as module
from kcache_backends.file import FileBackend
from kcache_backends.lmdb import LmdbBackend

PAGE = 4096
DAY = 86_400 * 10**9


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "lmdb"


@pytest.fixture
def backend(place: Path) -> Iterator[LmdbBackend]:
    made = LmdbBackend(place, max_size=10_000_000)
    yield made
    made.close()


PAGES_IN_USE = """
import sys, lmdb
with lmdb.open(sys.argv[1], readonly=True) as env:
    with env.begin() as txn:
        print(txn.stat(env.open_db(None, txn))["overflow_pages"])
"""


@pytest.mark.parametrize("length", [0, 1, 2000, 3000, 4079, 4080, 4081, 8176, 8177, 100_000])
def test_the_stored_size_is_the_pages_that_lmdb_uses(
    length: int, backend: LmdbBackend, place: Path
) -> None:
    size = backend.put(key(1), bytes(length))
    pages = int(output_of(PAGES_IN_USE, place / "db"))
    assert size == max(1, pages) * PAGE == backend.usage().bytes
    assert size <= length + backend.overhead


def test_uses_that_cannot_be_written_are_forgotten_and_the_value_is_not(
    backend: LmdbBackend, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [key(number) for number in range(20)]
    for name in names:
        backend.put(name, name.encode())
    monkeypatch.setattr(module, "MAX_TOUCHED", 8)

    def stopped_writer() -> None:
        with closing(LmdbBackend(place, max_size=10_000_000)) as other, other.batch():
            os.kill(os.getpid(), signal.SIGSTOP)

    pid = fork(stopped_writer)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    for name in names * 3:
        assert backend.use(name) == name.encode()
    os.kill(pid, signal.SIGCONT)
    assert wait(pid) == 0
    assert backend.use(names[0]) == names[0].encode()
    assert [info.key for info in backend.coldest()][-1] == names[0]


def test_a_cleared_cache_gives_its_space_back(tmp_path: Path) -> None:
    data = tmp_path / "lmdb" / "db" / "data.mdb"
    with open_engine(tmp_path, backend="lmdb", max_size=10_000_000) as engine:
        for number in range(50):
            assert engine.put(key(number), entry(60_000, number))

        def other() -> None:
            """Has the old file open; it sees the new one."""
            os.read(reading, 1)
            assert engine.get(key(49)) is None
            assert engine.get(key("new")) == entry()
            assert engine.put(key("more"), entry())

        reading, writing = os.pipe()
        pid = fork(lambda: (engine.get(key(1)), other()))
        assert data.stat().st_size > 3_000_000
        engine.clear()
        assert engine.put(key("new"), entry())
        os.write(writing, b".")
        assert wait(pid) == 0
        assert data.stat().st_size < 100_000
        assert engine.entry_count == 2
    assert {path.name for path in (tmp_path / "lmdb").iterdir()} == {"db", "lock"}


NETWORK = """\
20 1 8:1 / / rw - ext4 /dev/sda1 rw
30 20 0:40 / /home/shared\\040files rw,relatime shared:7 - {kind} server:/export rw
40 30 0:41 / /home/shared\\040files/scratch rw - xfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("nfs4", True),
        ("cifs", True),
        ("fuse.sshfs", True),
        ("fuse.mergerfs", False),
        ("xfs", False),
    ],
)
def test_a_network_file_system_is_refused_with_the_reason(
    kind: str, shared: bool, tmp_path: Path
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(NETWORK.format(kind=kind))

    def found(path: str) -> FileSystem:
        return file_system("/home/shared files/cache", mounts=str(table))

    assert found("") == FileSystem(kind, "/home/shared files", "server:/export")
    if shared:
        with pytest.raises(BackendError, match=rf"network file system \({kind} at /home/shared"):
            LmdbBackend(tmp_path / "cache", file_system=found)
        assert not (tmp_path / "cache").exists()
    else:
        LmdbBackend(tmp_path / "cache", file_system=found).close()


def test_the_deepest_mount_counts_and_no_table_is_no_answer(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(NETWORK.format(kind="nfs"))
    assert file_system("/home/shared files/scratch/x", mounts=str(table)).kind == "xfs"
    assert file_system("/home/shared", mounts=str(table)).kind == "ext4"
    assert file_system("/", mounts=str(tmp_path / "none")) == FileSystem("", "")
    assert file_system(tmp_path).kind


def test_a_cache_whose_backend_is_refused_still_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvrtc: object
) -> None:
    from kcache import CompileOptions

    monkeypatch.setattr(
        LmdbBackend.__init__,
        "__kwdefaults__",
        {**LmdbBackend.__init__.__kwdefaults__, "file_system": lambda _: FileSystem("nfs4", "/x")},
    )
    with KernelCache(tmp_path, backend="lmdb") as cache:
        for _ in range(2):
            kernel = cache.get_or_compile(
                'extern "C" __global__ void a() {}', (), CompileOptions(arch="sm_90")
            )
            assert kernel.cubin
        assert isinstance(cache.engine.backend, NoBackend)
        assert "network file system" in cache.engine.backend.reason


def test_a_use_that_is_only_noted_saves_an_entry_from_a_trim_by_age(tmp_path: Path) -> None:
    open_directory(str(tmp_path))
    old = LmdbBackend(tmp_path / "lmdb", clock=lambda: time.time_ns() - 40 * DAY)
    for number in range(2):
        old.put(key(number), encode(key(number), entry()))
    old.close()
    with open_engine(tmp_path, backend="lmdb") as engine:
        assert engine.get(key(0)) == entry()
        assert engine.trim(older_than=30 * 86_400) == PAGE
        assert engine.get(key(0)) == entry()
        assert engine.get(key(1)) is None


@pytest.mark.parametrize("name", ["file", "lmdb"])
def test_what_a_wrong_clock_put_into_the_future_goes_first(name: str, tmp_path: Path) -> None:
    open_directory(str(tmp_path))
    factory = {"file": FileBackend, "lmdb": LmdbBackend}[name]
    wrong = factory(tmp_path / name, clock=lambda: time.time_ns() + 3650 * DAY)
    for number in range(8):
        wrong.put(key(number), encode(key(number), entry()))
    wrong.close()
    size = PAGE if name == "lmdb" else stored_size()
    with open_engine(tmp_path, backend=name, max_size=10 * size + 5000) as engine:
        for number in range(100, 108):
            assert engine.put(key(number), entry())
        for number in range(100, 108):
            assert engine.get(key(number)) == entry()


def test_two_caps_in_one_process_make_the_larger_file(tmp_path: Path) -> None:
    with open_engine(tmp_path, backend="lmdb", max_size=1_000_000) as small:
        small.put(key(0), entry())
        with open_engine(tmp_path, backend="lmdb", max_size=20_000_000) as large:
            for number in range(100):
                assert large.put(key(number), entry(60_000, number))
            assert large.entry_count == 100
            assert large.stats().errors == 0


def test_a_path_may_hold_any_bytes(tmp_path: Path) -> None:
    place = os.fsencode(tmp_path) + b"/\xff\xfe \xe4"
    with open_engine(os.fsdecode(place), backend="lmdb") as engine:
        assert engine.put(key(1), entry())
        assert engine.get(key(1)) == entry()


@pytest.mark.parametrize("ask", ["get", "use"])
def test_a_replaced_database_is_noticed_by_who_only_hits(
    ask: str, backend: LmdbBackend, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.put(key(1), b"old")
    assert getattr(backend, ask)(key(1)) == b"old"
    (place / "db").rename(place.parent / "away")

    def other() -> None:
        second = LmdbBackend(place)
        second.put(key(1), b"new")
        second.close()

    assert wait(fork(other)) == 0
    monkeypatch.setattr(module, "_now", lambda: time.monotonic() + 1)
    assert getattr(backend, ask)(key(1)) == b"new"


def test_reading_only_makes_no_table_of_readers(tmp_path: Path) -> None:
    with open_engine(tmp_path, backend="lmdb") as engine:
        engine.put(key(1), entry())
    (tmp_path / "lmdb/db/lock.mdb").unlink()
    with open_engine(tmp_path, backend="lmdb", read_only=True) as engine:
        assert engine.get(key(1)) == entry()
    assert os.listdir(tmp_path / "lmdb/db") == ["data.mdb"]


def _forked(work: Callable[[], object]) -> int:
    """As `fork`, from several threads at once, which filelock refuses where another test loaded it."""
    while True:
        try:
            return fork(work)
        except RuntimeError as error:
            if "filelock" not in str(error):
                raise


def test_threads_that_fork_at_once_leave_no_lock(backend: LmdbBackend) -> None:
    backend.put(key(1), b"1")

    def forks() -> None:
        for _ in range(8):
            assert wait(_forked(lambda: backend.get(key(1)))) == 0

    threads = [threading.Thread(target=forks) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(100):
        backend.put(key(number % 5), b"x")
    for thread in threads:
        thread.join()
    done = threading.Thread(target=lambda: backend.put(key(9), b"9"), daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive()


def test_after_the_room_is_gone_everything_in_the_batch_says_so(place: Path) -> None:
    """So that the engine, which survives a failed delete, evicts and tries once more."""
    backend = LmdbBackend(place, max_size=200_000)
    backend.put(key(1), b"1")

    def overfill() -> None:
        with backend.batch():
            with pytest.raises(FullError):
                backend.put(key(2), bytes(2_000_000))
            with pytest.raises(FullError, match="MDB_MAP_FULL"):
                backend.delete(key(1))

    with pytest.raises(FullError, match="MDB_MAP_FULL"):
        overfill()
    assert backend.get(key(1)) == b"1"
    assert backend.put(key(2), b"2")
    backend.close()


def test_a_cap_of_the_environment_that_lmdb_cannot_map_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KCACHE_MAX_SIZE", "64TiB")
    with KernelCache(tmp_path / "cache", backend="lmdb"):
        assert "KCACHE_MAX_SIZE: max_size='64TiB' is not allowed with LMDB" in caplog.text


@pytest.mark.parametrize("given", [2**63, 17 << 40, "99999999TiB", "17 tib"])
@pytest.mark.parametrize("name", ["lmdb", "zstd+lmdb"])
def test_a_cap_that_lmdb_refuses_is_named_as_it_was_given(
    name: str, given: int | str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^max_size={given!r} is not allowed with LMDB"):
        KernelCache(tmp_path / "cache", backend=name, max_size=given)
