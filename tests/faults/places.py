"""Places: what the backends have on disk, entries that show damage, small disks, and processes.

Nothing here uses a method under test: another process or `os` reads the contents of the disk.
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

#: One backend that stores files, and one that stores in LMDB, with compression. The contract suite
#: tests all backends.
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
    """Return the stored size of every entry in a cache's directory, without using the backend."""
    if is_lmdb(name):
        return {found: stored_size(size) for found, size in raw.look(place / name).items()}
    return look(place / name).entries


def agrees(engine: CacheEngine, place: Path, name: str) -> None:
    """Assert that the usage that the backend returns equals its contents on disk."""
    sizes = truth(place, name)
    assert engine.backend.usage() == (sum(sizes.values()), len(sizes))


def leftovers(place: Path, name: str) -> list[Path]:
    """Return the temporary files of writers that were interrupted or are still running."""
    if is_lmdb(name):
        return [path for path in (place / name / "old",) if path.exists()]
    return look(place / name).temporary


def disk_usage(place: Path) -> int:
    """Return the bytes on disk of a directory with everything in it, as `du` counts them."""
    blocks: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(place):
        for path in (folder, *(os.path.join(folder, file) for file in files)):
            with suppress(FileNotFoundError):
                status = os.lstat(path)
                blocks[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(blocks.values())


def disk_bound(name: str, cap: int, *, writers: int, largest: int, entries: int) -> int:
    """Return the documented limit of `disk_usage` for a backend: its values and its other files."""
    if is_lmdb(name):
        return max(2 * cap, SMALLEST_MAP) + READERS + FIXED
    files = int((cap + writers * largest) * 1.02)
    return files + BLOCK * (entries + SHARDS) + FIXED


def held_locks(place: Path, name: str) -> int:
    """Return the number of a backend's locks that are held by any process."""
    ranges = [(number, 1) for number in range(2)]
    path = place / name / "lock"
    if not is_lmdb(name):
        ranges = [(32 * shard, 32) for shard in range(SHARDS)] + [(32 * SHARDS, 1)]
        path = place / name / "counters"
    with open_own(str(path), os.O_RDWR) as file:
        return sum(is_locked(file, start, length) for start, length in ranges)


# -- entries that show damage ----------------------------------------------------------------------


def sealed(number: int, version: int, size: int) -> Entry:
    """Return an entry that `is_whole` can distinguish from others; half of it is incompressible."""
    return Entry(
        {"cubin": _body(number, version, size)},
        {"number": number, "version": version, "size": size},
    )


def is_whole(number: int, found: Entry) -> bool:
    """Return whether `found` is an undamaged entry that `sealed` made for `number`."""
    about = found.metadata
    version, size = about.get("version"), about.get("size")
    return (
        about.get("number") == number
        and isinstance(version, int)
        and isinstance(size, int)
        and found.payload == {"cubin": _body(number, version, size)}
    )


def has(engine: CacheEngine, number: int) -> bool:
    """Return whether the engine has an entry for `number`, and assert that it is undamaged."""
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
        pytest.skip("mount is not installed")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """Mount a file system at `place` for the block, or skip the test if that is not possible."""
    place.mkdir(exist_ok=True)
    mount(place, *options)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def put_all(engine: CacheEngine, numbers: Iterable[int], version: int, size: int) -> None:
    """Put an entry from `sealed` for each of `numbers`."""
    for number in numbers:
        assert engine.put(key(number), sealed(number, version, size))


# -- processes -------------------------------------------------------------------------------------


@contextmanager
def stopped(
    work: Callable[[Callable[[], None]], object], then: signal.Signals = signal.SIGCONT
) -> Iterator[int]:
    """Run `work` in a child, and yield the child's pid when the child has stopped.

    `work` gets a function that stops the child. After the block, the signal `then` is sent to the
    child, so that it either continues to its end or is killed.
    """
    pid = fork(lambda: work(lambda: os.kill(os.getpid(), signal.SIGSTOP)), limit=600)
    try:
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"the child ended instead of stopping: {status}"
        yield pid
    finally:
        os.kill(pid, then)
        assert wait(pid) == (0 if then == signal.SIGCONT else -then)


def make_socket(path: Path) -> None:
    """Make a socket at `path`. `bind` gets only the name, because it refuses long paths."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """Fill a file system except for `leave` bytes, and return the file that fills it."""
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
