"""Shared by the tests of faults: backends by name, looks at their medium, values that tell damage.

Nothing here uses a method under test: what a medium holds is read by another process, or by `os`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from core.helpers import fork, key, look, wait

from backends import raw
from kcache import CacheEngine, Entry
from kcache.util.locks import is_locked
from kcache.util.open_file import open_own
from kcache_backends._lmdb_records import stored_size

#: One backend for each medium: files, and LMDB, that below Zstandard. The contract suite has all.
NAMES = ("file", "zstd+lmdb")

#: The largest size of the directories, the statistics, the counters and the tag on disk, in bytes.
FIXED = 64 << 10
#: The most bytes that a file system adds to an entry's file, or takes for a shard's directory.
BLOCK = 4096
SHARDS = 256
#: LMDB: the smallest map, and the table of readers.
SMALLEST_MAP = 1 << 20
READERS = 128 << 10


def is_lmdb(name: str) -> bool:
    return name.endswith("lmdb")


# -- what a medium holds ---------------------------------------------------------------------------


def truth(place: Path, name: str) -> dict[str, int]:
    """Returns the stored size of every entry in a cache's directory, looked at from outside."""
    if is_lmdb(name):
        return {found: stored_size(size) for found, size in raw.look(place / name).items()}
    return look(place / name).entries


def agrees(engine: CacheEngine, place: Path, name: str) -> None:
    """Asserts that the usage which a backend tells is the truth."""
    sizes = truth(place, name)
    assert engine.backend.usage() == (sum(sizes.values()), len(sizes))


def leftovers(place: Path, name: str) -> list[Path]:
    """Returns what interrupted writers have left, or what writers are working on."""
    if is_lmdb(name):
        return [path for path in (place / name / "old",) if path.exists()]
    return look(place / name).temporary


def disk_usage(place: Path) -> int:
    """Returns what `du` says: the blocks of all that is below a directory, each file once."""
    blocks: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(place):
        for path in (folder, *(os.path.join(folder, file) for file in files)):
            with suppress(FileNotFoundError):
                status = os.lstat(path)
                blocks[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(blocks.values())


def disk_bound(name: str, cap: int, *, writers: int, largest: int, entries: int) -> int:
    """Returns the documented bound of `disk_usage`: of files or of the map, and what is fixed."""
    if is_lmdb(name):
        return max(2 * cap, SMALLEST_MAP) + READERS + FIXED
    files = int((cap + writers * largest) * 1.02)
    return files + BLOCK * (entries + SHARDS) + FIXED


def held_locks(place: Path, name: str) -> int:
    """Returns how many of a cache's locks somebody holds."""
    ranges = [(number, 1) for number in range(2)]
    path = place / name / "lock"
    if not is_lmdb(name):
        ranges = [(32 * shard, 32) for shard in range(SHARDS)] + [(32 * SHARDS, 1)]
        path = place / name / "counters"
    with open_own(str(path), os.O_RDWR) as file:
        return sum(is_locked(file, start, length) for start, length in ranges)


# -- entries that tell damage ----------------------------------------------------------------------


def sealed(number: int, version: int, size: int) -> Entry:
    """Returns an entry that `is_whole` can tell from any other; half of it can't be compressed."""
    return Entry(
        {"cubin": _body(number, version, size)},
        {"number": number, "version": version, "size": size},
    )


def is_whole(number: int, found: Entry) -> bool:
    """Tells whether `found` is an entry that `sealed` made for this number, and all of it."""
    about = found.metadata
    version, size = about.get("version"), about.get("size")
    return (
        about.get("number") == number
        and isinstance(version, int)
        and isinstance(size, int)
        and found.payload == {"cubin": _body(number, version, size)}
    )


def has(engine: CacheEngine, number: int) -> bool:
    """Tells whether there is an entry for this number, which must be whole then."""
    found = engine.get(key(number))
    assert found is None or is_whole(number, found), f"entry {number} is wrong"
    return found is not None


def _body(number: int, version: int, size: int) -> bytes:
    noise = Random(zlib.crc32(f"{number} {version} {size}".encode())).randbytes(size // 2)
    text = f"{number} {version} ".encode()
    rest = size - len(noise)
    return noise + (text * (rest // len(text) + 1))[:rest]


# -- disks -----------------------------------------------------------------------------------------


def mount(place: Path, *options: str) -> None:
    try:
        done = subprocess.run(
            ["mount", *options, str(place)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """Mounts at `place`, for the block; skips the test where that is not possible."""
    place.mkdir(exist_ok=True)
    mount(place, *options)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def put_all(engine: CacheEngine, numbers: Iterable[int], version: int, size: int) -> None:
    """Puts an entry for each of these numbers."""
    for number in numbers:
        assert engine.put(key(number), sealed(number, version, size))


# -- processes -------------------------------------------------------------------------------------


@contextmanager
def stopped(
    work: Callable[[Callable[[], None]], object], then: signal.Signals = signal.SIGCONT
) -> Iterator[int]:
    """Runs `work` in a child, which stops where it calls its argument.

    After the block it goes on to its end, or is killed.
    """
    pid = fork(lambda: work(lambda: os.kill(os.getpid(), signal.SIGSTOP)), limit=600)
    try:
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"it ended instead: {status}"
        yield pid
    finally:
        os.kill(pid, then)
        assert wait(pid) == (0 if then == signal.SIGCONT else -then)


def make_socket(path: Path) -> None:
    """Leaves the file of a socket, whose own path has to be short."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """Fills a file system but for `leave` bytes; returns the file that does."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert os.statvfs(disk).f_bavail == 0
        file.truncate(max(0, file.tell() - leave))
    return ballast
