"""Damage of any kind to any file: no wrong byte, no hang, little memory, other files unchanged."""

import os
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from core.helpers import fork, in_child, key, wait
from faults.places import NAMES, has, make_socket, sealed

from kcache import BackendError, ConfigError, open_engine

CAP = 1_200_000
ENTRIES = 60
#: The most that a process may use: memory in MB, and its own processor time in seconds.
MOST_MEMORY, MOST_TIME = 100, 2
#: Seconds after which an alarm ends a process that hangs.
FOR_EVER = 60


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A cache of each backend, with statistics and a journal, written by other processes."""
    places = {}
    for name in NAMES:
        place = places[name] = tmp_path_factory.mktemp("strange") / "base"

        def work(name: str = name, place: Path = place) -> None:
            with open_engine(place, backend=name, max_size=CAP) as engine:
                for number in range(ENTRIES):
                    assert engine.put(key(number), sealed(number, 1, number * 977 % 20_000 + 10))
                    assert engine.get(key(number))
                engine.total_stats()

        in_child(work)
    return places


# -- damages: the path, and a foreign file ---------------------------------------------------------


def made_folder(path: Path, random: Random) -> None:
    path.mkdir(0o700)
    if random.random() < 0.5:
        (path / "data.mdb").write_bytes(random.randbytes(5000))


def made_sparse(path: Path, random: Random) -> None:
    path.touch(0o600)
    os.truncate(path, random.choice((1, 100, 1 << 20, 5 << 30, 1 << 40)))


def made_device(path: Path, random: Random) -> None:
    if os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, random.choice((3, 5))))  # null, zero


INSTEAD: dict[str, Callable[[Path, Path, Random], object]] = {
    "pipe": lambda path, _other, _random: os.mkfifo(path, 0o600),
    "socket": lambda path, _other, _random: make_socket(path),
    "device": lambda path, _other, random: made_device(path, random),
    "folder": lambda path, _other, random: made_folder(path, random),
    "link": lambda path, other, random: path.symlink_to(
        random.choice((other, other.parent, Path(path.name), Path("/dev/zero")))
    ),
    "hard link": lambda path, other, _random: os.link(other, path),
    "sparse": lambda path, _other, random: made_sparse(path, random),
    "noise": lambda path, _other, random: path.write_bytes(
        random.randbytes(random.randrange(100_000))
    ),
    "zeros": lambda path, _other, random: path.write_bytes(
        bytes(random.choice((0, 1, 64, 8192, 100_000)))
    ),
    "nothing": lambda _path, _other, _random: None,  # the file stays removed
}


def cut(path: Path, random: Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size + 1))


def grown(path: Path, random: Random) -> None:
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + random.choice((1, 4096, 5 << 30)))


def flipped(path: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 8, 100))):
        if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


WITHIN = (cut, grown, flipped)


def damaged(place: Path, other: Path, random: Random) -> tuple[str, str]:
    """Damage one file or folder of the cache; return its path and the kind of damage."""
    paths = sorted(path for path in place.rglob("*") if path.is_dir() or path.is_file())
    # Files of entries are many and alike, so they are damaged less often than the others.
    few = [path for path in paths if len(path.name) < 64]
    path = random.choice(paths if random.random() < 0.3 else few)
    # Damage to single bytes of LMDB's tree may end a process. test_lmdb_damage covers that.
    if path.is_file() and path.name != "data.mdb" and random.random() < 0.4:
        inner = random.choice(WITHIN)
        inner(path, random)
        return str(path.relative_to(place)), inner.__name__
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    outer = random.choice(list(INSTEAD))
    INSTEAD[outer](path, other, random)
    return str(path.relative_to(place)), outer


def peak() -> int:
    """Return the peak memory of this process since the last reset, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


def use(name: str, place: Path) -> None:
    """Use the cache in every way, and assert that time and memory stay within bounds."""
    signal.alarm(FOR_EVER)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_TIME, MOST_TIME + 1))
    with Path("/proc/self/clear_refs").open("w") as file:  # this resets the peak
        file.write("5")
    before = peak()  # memory that was inherited from the test's process
    with suppress(ConfigError), open_engine(place, backend=name, max_size=CAP) as engine:
        for number in range(0, ENTRIES, 3):
            has(engine, number)
            engine.put(key(number), sealed(number, 2, 1000))
            has(engine, number)
        engine.total_stats()
        with suppress(BackendError):
            list(engine.backend.check(repair=True))
        engine.clear()
    assert peak() - before < MOST_MEMORY, (before, peak())


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Path]:
    """A foreign file, which must not be changed."""
    other = tmp_path / "somebodys" / "file"
    other.parent.mkdir()
    other.write_bytes(b"somebody's" * 1000)
    os.utime(other, (1, 1))
    yield other
    assert other.read_bytes() == b"somebody's" * 1000
    assert other.stat().st_mtime == 1
    assert os.listdir(other.parent) == ["file"]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_strange_files_neither_hang_nor_take_memory(
    name: str, bases: dict[str, Path], other: Path, tmp_path: Path, long: bool
) -> None:
    ends = {}
    place = tmp_path / "cache"
    for seed in range(2000 if long else 12):
        random = Random(f"{name} {seed}")
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(bases[name], place)
        did = [damaged(place, other, random)]
        pid = fork(lambda: use(name, place))
        if end := wait(pid):
            ends[seed] = (did, end)
    assert ends == {}
