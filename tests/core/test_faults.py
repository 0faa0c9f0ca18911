"""What fails below the engine is survived, counted, and loses nothing: backends, disks, rights."""

from __future__ import annotations

import errno
import math
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from core.helpers import entry, fork, key, look, path_of, stored_size, wait

from kcache import BackendError, CacheEngine, CorruptEntryError, open_engine
from kcache.backend import NoBackend
from kcache.testing import FaultyBackend
from kcache_backends.file import FileBackend

SIZE = stored_size(100)

# -- any backend ---------------------------------------------------------------------------------

ERRORS: dict[str, Callable[[], BaseException]] = {
    "BackendError": lambda: BackendError("no"),
    "CorruptEntryError": lambda: CorruptEntryError("no"),
    "EIO": lambda: OSError(errno.EIO, "no"),
    "EACCES": lambda: PermissionError(errno.EACCES, "no"),
    "MemoryError": MemoryError,
}
METHODS = ["use", "put", "delete", "touch", "usage", "coldest", "scan", "close"]
OPERATIONS: dict[str, Callable[[CacheEngine], object]] = {
    "get": lambda engine: engine.get(key(1)),
    "get nothing": lambda engine: engine.get(key(99)),
    "put": lambda engine: engine.put(key(2), entry()),
    "put at the cap": lambda engine: engine.put(key(3), entry(250)),
    "put too large": lambda engine: engine.put(key(1), entry(10_000)),
    "get_or_create": lambda engine: engine.get_or_create(key(4), entry),
    "delete": lambda engine: engine.delete(key(1)),
    "trim": lambda engine: engine.trim(0),
    "clear": lambda engine: engine.clear(),
    "size": lambda engine: (engine.size_bytes, engine.entry_count),
    "stats": lambda engine: (engine.stats(), engine.total_stats(), engine.flush()),
    "close": lambda engine: engine.close(),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("memory_size", [0, 10**6], ids=["disk", "memory"])
def test_whatever_a_backend_raises_no_operation_does(
    memory_size: int, method: str, error: str
) -> None:
    for name, operation in OPERATIONS.items():
        now = [0.0]
        backend = FaultyBackend()
        engine = CacheEngine(
            backend, max_size=3 * SIZE, memory_size=memory_size, clock=lambda now=now: now[0]
        )
        for number in (0, 1):
            engine.put(key(number), entry())
        backend.faults[method] = ERRORS[error]()
        backend.calls.clear()
        for _ in range(2):
            operation(engine)
            now[0] += 100
        failed = backend.calls.count(method)
        counted = engine.stats().errors + engine.stats().corrupt
        if method == "close":  # no object is left to count it
            failed = counted
        # It looks twice before it creates, and damage is counted once.
        twice = (name, method, error) == ("get_or_create", "use", "CorruptEntryError")
        assert failed == counted * (2 if twice else 1)
        backend.faults.clear()
        assert engine.put(key(5), entry())
        assert engine.get(key(5)) == entry()


def test_a_failed_read_is_a_miss_and_a_failed_write_stores_nothing() -> None:
    backend = FaultyBackend()
    engine = CacheEngine(backend, memory_size=10**6)
    engine.put(key(1), entry())
    engine.memory.clear()
    backend.faults["use"] = BackendError("no")
    assert engine.get(key(1)) is None
    backend.faults = {"put": BackendError("no")}
    assert engine.put(key(2), entry()) is False
    assert engine.get(key(2)) is None
    assert (engine.stats().misses, engine.stats().errors, engine.stats().puts) == (2, 2, 1)


def test_a_failed_put_is_not_answered_from_memory_with_the_old_entry() -> None:
    backend = FaultyBackend()
    engine = CacheEngine(backend, memory_size=10**6)
    engine.put(key(1), entry(10))
    backend.faults["put"] = BackendError("no")
    engine.put(key(1), entry(20))
    assert len(engine.memory) == 0


def test_an_entry_whose_delete_fails_does_not_stop_the_clear() -> None:
    class Stubborn(FaultyBackend):
        def delete(self, key_: str) -> int:
            if key_ == key(1):
                raise BackendError("immutable")
            return super().delete(key_)

    engine = CacheEngine(Stubborn())
    for number in range(4):
        engine.put(key(number), entry())
    engine.clear()
    assert engine.entry_count == 1


def test_an_entry_whose_delete_fails_does_not_stop_the_eviction_of_others() -> None:
    class Stubborn(FaultyBackend):
        def delete(self, key_: str) -> int:
            if key_ == key(0):
                raise BackendError("immutable")
            return super().delete(key_)

    engine = CacheEngine(Stubborn(), max_size=4 * SIZE)
    for number in range(4):
        engine.put(key(number), entry())
    assert engine.put(key(4), entry())
    assert engine.get(key(4)) == entry()


def test_no_put_exceeds_the_cap_where_nothing_can_be_evicted() -> None:
    class Empty(FaultyBackend):
        def coldest(self) -> Iterator[Any]:
            return iter(())

    backend = Empty()
    engine = CacheEngine(backend, max_size=2 * SIZE)
    for number in range(4):
        engine.put(key(number), entry())
        assert backend.usage().bytes <= 2 * SIZE


def test_a_failure_is_logged_as_a_warning_once_per_operation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="kcache")
    backend = FaultyBackend()
    engine = CacheEngine(backend)
    backend.faults = {"use": BackendError("the disk is on fire"), "usage": OSError(5, "no")}
    for _ in range(3):
        engine.get(key(1))
        engine.put(key(1), entry())
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "the disk is on fire" in caplog.text
    assert engine.stats().errors == 6


def test_a_cache_without_a_backend_answers_every_request_with_a_miss() -> None:
    engine = CacheEngine(NoBackend("no home"), memory_size=0)
    for operation in OPERATIONS.values():
        operation(engine)
    assert engine.get_or_create(key(1), entry) == entry()
    assert engine.stats().errors == 0
    assert engine.stats().hits == 0


# -- full disks ----------------------------------------------------------------------------------


def mount(place: Path, *options: str) -> None:
    done = subprocess.run(
        ["mount", *options, str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mount(place, "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs")
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0
    return ballast


def test_a_full_disk_loses_nothing_and_works_again_when_there_is_room(small_disk: Path) -> None:
    place = small_disk / "cache"
    with open_engine(place, max_size=10**9) as engine:
        engine.put(key(0), entry(1000))
        ballast = fill(small_disk)
        for number in range(1, 5):
            assert engine.put(key(number), entry(20_000)) is False
            assert engine.get(key(number)) is None
        assert engine.put(key(0), entry(20_000)) is False
        assert engine.get(key(0)) == entry(1000)
        assert engine.stats().errors == 5
        tree = look(place / "file")
        assert tree.temporary == []
        assert engine.size_bytes >= tree.bytes
        ballast.unlink()
        assert engine.put(key(1), entry(20_000))
        assert engine.get(key(1)) == entry(20_000)
        tree = look(place / "file")
        assert engine.backend.usage() == (tree.bytes, len(tree.entries))


def test_a_disk_that_becomes_read_only_still_serves(small_disk: Path) -> None:
    place = small_disk / "cache"
    with open_engine(place, max_size=3 * SIZE) as engine:
        for number in range(3):
            engine.put(key(number), entry())
        engine.flush()
        # A file that is open for writing keeps a file system writable, but not a bind mount of it.
        mount(small_disk, "--bind", str(small_disk))
        try:
            mount(small_disk, "-o", "remount,bind,ro")
            with open_engine(place, max_size=3 * SIZE, read_only=True) as reader:
                assert reader.get(key(1)) == entry()
                assert reader.stats().errors == 0
            with open_engine(place, max_size=3 * SIZE) as writer:
                assert writer.get(key(1)) == entry()
                assert writer.put(key(9), entry()) is False
                writer.delete(key(1))
                writer.clear()
                assert writer.get(key(1)) == entry()
        finally:
            subprocess.run(["umount", "-l", str(small_disk)], check=True)
        assert engine.put(key(9), entry())


# -- limits and rights, in a child that gives its own up -------------------------------------------


def in_child(work: Callable[[], object]) -> None:
    assert wait(fork(work)) == 0


@contextmanager
def _file_size(most: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes; a traceback may, which goes to a file of pytest's."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def test_a_file_that_may_not_grow_is_a_failed_put_and_leaks_nothing(tmp_path: Path) -> None:
    def child() -> None:
        with open_engine(tmp_path) as engine:
            engine.put(key(1), entry(1000))
            engine._next_flush = math.inf  # counts go to a file, too, on a slow machine meanwhile
            for limit in (0, 4096, 8192, 9000):
                with _file_size(limit):
                    before = os.listdir("/proc/self/fd")
                    for number in range(5):
                        assert engine.put(key(number), entry(20_000)) is False
                    # The garbage collector may collect objects of other tests in the meantime.
                    assert set(os.listdir("/proc/self/fd")) <= set(before)
                    assert engine.get(key(1)) == entry(1000)
                    assert look(tmp_path / "file").temporary == []
            assert engine.stats().errors == 20
            assert engine.put(key(1), entry(20_000))
            assert engine.get(key(1)) == entry(20_000)
            tree = look(tmp_path / "file")
            assert engine.size_bytes >= tree.bytes

    in_child(child)


def test_no_descriptors_left_is_survived(tmp_path: Path) -> None:
    def child() -> None:
        with open_engine(tmp_path) as engine:
            engine.put(key(1), entry())
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            taken = max(map(int, os.listdir("/proc/self/fd")))
            spare = [os.open("/", os.O_RDONLY) for _ in range(taken)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(spare), limits[1]))
            assert engine.get(key(1)) is None
            assert engine.put(key(2), entry()) is False
            engine.clear()
            engine.flush()
            assert engine.stats().errors >= 3
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert engine.get(key(1)) == entry()
            assert engine.put(key(2), entry())

    in_child(child)


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


@pytest.fixture
def nobodys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that a process without rights owns and can reach."""
    if os.geteuid() == 0:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="kcache-nobody-") as name:
            os.chmod(name, 0o755)
            place = Path(name) / "cache"
            place.mkdir(mode=0o700)
            os.chown(place, 65534, 65534)
            yield place
    else:
        yield tmp_path_factory.mktemp("nobody")


def test_files_that_may_not_be_read_or_written_are_backend_errors(nobodys: Path) -> None:
    def child() -> None:
        become_nobody()
        with closing(FileBackend(nobodys)) as backend:
            backend.put(key(1), b"12345")
            path = path_of(nobodys, key(1))
            path.chmod(0)
            with pytest.raises(BackendError, match="ermission denied"):
                backend.get(key(1))
            path.chmod(0o600)
            path.parent.chmod(0o500)
            for write in (lambda: backend.put(key(1), b"x"), lambda: backend.delete(key(1))):
                with pytest.raises(BackendError, match="ermission denied"):
                    write()
            assert backend.get(key(1)) == b"12345"
            assert backend.usage() == (5, 1)
            path.parent.chmod(0)
            for read in (
                lambda: backend.get(key(1)),
                lambda: list(backend.scan()),
                lambda: list(backend.coldest()),
                lambda: backend.touch(key(1)),
            ):
                with pytest.raises(BackendError, match="ermission denied"):
                    read()
            path.parent.chmod(0o700)
            assert backend.get(key(1)) == b"12345"
            assert list(backend.coldest())

    in_child(child)


def test_a_directory_that_may_not_be_entered_is_survived(nobodys: Path) -> None:
    def child() -> None:
        become_nobody()
        with open_engine(nobodys) as engine:
            engine.put(key(1), entry())
            for mode in (0o600, 0o400, 0):
                nobodys.chmod(mode)
                assert engine.get(key(1)) is None
                assert engine.put(key(2), entry()) is False
            nobodys.chmod(0o500)
            assert engine.get(key(1)) == entry()
            nobodys.chmod(0o700)
            assert engine.put(key(2), entry())

    in_child(child)


@pytest.mark.parametrize("mode", [0o600, 0o500, 0o400, 0])
def test_opening_a_directory_without_rights_is_survived_or_a_backend_error(
    mode: int, nobodys: Path
) -> None:
    def child() -> None:
        become_nobody()
        nobodys.chmod(mode)
        try:
            engine = open_engine(nobodys)
        except BackendError:
            return
        with engine:
            assert engine.get(key(1)) is None
            assert engine.put(key(1), entry()) is False
            assert engine.stats().errors > 0

    in_child(child)
    nobodys.chmod(0o700)
