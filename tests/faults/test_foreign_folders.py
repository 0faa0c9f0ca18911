"""Directories that are not a cache: nothing in them is read, written or deleted."""

import hashlib
import io
import logging
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb
import pytest
from cli.test_wrong_environment import CHANGES, LOOKS
from core.helpers import command, entry, key, snapshot
from faults.places import NAMES, make_socket

import kcache
from kcache import (
    BackendError,
    CompileOptions,
    ConfigError,
    CorruptEntryError,
    Entry,
    KernelCache,
    open_engine,
)
from kcache.directory import MARKER as NAME
from kcache.directory import open_directory
from kcache_backends.file import FileBackend
from kcache_backends.zstd import zstd_file

TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# somebody else's\n"
BACKENDS = ("file", "zstd", "lmdb", "zstd+lmdb")


def write(path: Path, content: bytes | str = b"precious") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def home(place: Path) -> None:
    write(place / ".bashrc", "alias ls='ls -l'\n")
    write(place / "Documents" / "thesis.tex", "a" * 10_000)
    write(place / ".cache" / "thing")


def bazel(place: Path) -> None:
    for number in range(20):
        name = hashlib.sha256(str(number).encode()).hexdigest()
        write(place / "cas" / name[:2] / name)
        write(place / "file" / name[:2] / name)


def database(place: Path) -> None:
    (place / "lmdb").mkdir(parents=True)
    for folder in (place, place / "lmdb"):
        env = lmdb.open(str(folder))
        with env.begin(write=True) as transaction:
            transaction.put(b"theirs", b"precious")
        env.close()
    write(place / "lmdb" / "new" / "data.mdb")
    write(place / "lmdb" / "old" / "notes")


def same_place(place: Path) -> None:
    """A foreign database exactly where kcache would have its own, and nothing else."""
    (place / "lmdb" / "db").mkdir(parents=True)
    with lmdb.open(str(place / "lmdb" / "db")) as env, env.begin(write=True) as transaction:
        transaction.put(b"theirs", b"precious")


def namesakes(place: Path) -> None:
    """Foreign files with every name that kcache uses."""
    for name in ("stats", "flight", "journal", "journal.1", "counters", "slots"):
        write(place / name, f"{name} of another program\n" * 40)
    for name in BACKENDS:
        write(place / name / "counters", "their counters\n")
        write(place / name / "lock")
        write(place / name / "3f" / ("3f" + "0" * 62))
    write(place / "lmdb" / "db" / "data.mdb")
    write(place / "CACHEDIR.TAG", TAG)


def almost(place: Path) -> None:
    """Files of a cache without its marker, as if a user had copied them into another folder."""
    with open_engine(place, backend="file") as engine:
        engine.put(key(1), entry())
        engine.get(key(1))
    (place / NAME).unlink()
    write(place / "file" / "notes.txt")


def forged(place: Path) -> None:
    write(place / NAME, '{"format": "somebody/1"}')
    write(place / "data")


def links(place: Path) -> None:
    """Links with the names of kcache's files, which lead to foreign files."""
    for name in ("stats", "slots", "flight", "journal", "CACHEDIR.TAG", NAME):
        write(place / "real" / name)
        (place / name).symlink_to(place / "real" / name)
    write(place / "real" / "folder" / "photo")
    for name in BACKENDS:
        (place / name).symlink_to(place / "real" / "folder")


def special(place: Path) -> None:
    place.mkdir()
    for name in ("stats", "slots", "flight", "journal"):
        os.mkfifo(place / name)
    make_socket(place / "counters")


FOLDERS = (*(home, bazel, database, same_place, namesakes, almost, forged), *(links, special))
EACH = pytest.mark.parametrize("make", FOLDERS)


def test_an_invalid_marker_is_refused_with_the_reason(tmp_path: Path) -> None:
    """For example, `cp -al` makes a second name for each file of a cache."""
    cache, other = tmp_path / "cache", tmp_path / "other"
    open_engine(cache).close()
    cases: dict[str, Callable[[Path], object]] = {
        "a file with 2 names": lambda at: os.link(cache / NAME, at),
        "a link": lambda at: at.symlink_to(cache / NAME),
        "a directory": lambda at: at.mkdir(),
        "not a marker file of kcache": lambda at: at.write_text("{}"),
    }
    for reason, make in cases.items():
        other.mkdir()
        make(other / NAME)
        write(other / "photo.jpg")
        with pytest.raises(ConfigError, match=f"is not a cache: its '{NAME}' is {reason}"):
            open_directory(str(other))
        shutil.rmtree(other)


#: Command lines that read a cache or change it.
LINES = [
    *(
        f"{name} {' '.join(words)}"
        for name, words in LOOKS.items()
        if name not in ("config", "path")
    ),
    *(f"{name} {' '.join(words)}" for name, lines in CHANGES.items() for words in lines),
    *("doctor", "stats --prometheus", "ls --all", "trim --older-than 1s", "migrate --to lmdb"),
]
KERNEL = 'extern "C" __global__ void k(int* p) { *p = 1; }\n'


@pytest.fixture
def place(make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A foreign folder from `make`, to which `KCACHE_DIR` is set."""
    place = tmp_path / "theirs"
    make(place)
    monkeypatch.setenv("KCACHE_DIR", str(place))
    return place


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a directory with the files that the commands need."""
    folder = tmp_path / "out"
    write(folder / "k.cu", KERNEL)
    write(folder / "kernels.toml", '[[kernels]]\nsource = "k.cu"\narch = "sm_80"\n')
    with KernelCache(tmp_path / "sound") as cache:
        assert cache.engine.put(key(1), Entry({"cubin": b"x"}, {"kind": "kernel"}))
        kcache.export_bundle(cache, folder / "kernels.kcb")
    monkeypatch.chdir(folder)


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("nvrtc", "ours")
@EACH
def test_no_command_changes_a_directory_that_is_not_a_cache(
    make: Callable[[Path], None], place: Path, long: bool
) -> None:
    """The directory is given by the environment or by an option."""
    before = snapshot(place)
    forms = [(line, named) for line in LINES for named in ((), ("--directory", place))]
    if not long:
        forms = [*random.Random(make.__name__).sample(forms, 2), ("clear --yes", ())]
    for line, named in forms:
        done = command(*line.split(), *named)
        assert snapshot(place) == before, line
        said = done.stdout + done.stderr
        assert "Traceback" not in said, said
        assert "expected a directory that is new or empty" in said, (line, said)


@EACH
def test_no_call_changes_a_directory_that_is_not_a_cache(place: Path) -> None:
    before = snapshot(place)
    for backend in NAMES:
        for read_only in (False, True):
            with pytest.raises(ConfigError, match=r"not a cache.*expected a directory that is new"):
                KernelCache(place, backend=backend, read_only=read_only)
            with pytest.raises(ConfigError, match="not a cache"):
                open_engine(place, backend=backend, read_only=read_only)
    assert snapshot(place) == before
    for factory in (FileBackend, zstd_file):
        backend = factory(place)
        for use in (
            lambda b=backend: b.put(key(1), b"x"),
            lambda b=backend: b.delete("3f" + "0" * 62),
            backend.usage,
            lambda b=backend: list(b.coldest()),
            lambda b=backend: list(b.check(repair=True)),
        ):
            with pytest.raises(BackendError):
                use()
        backend.close()
    assert snapshot(place) == before


def test_a_new_file_system_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    open_directory(str(tmp_path))
    assert (tmp_path / NAME).exists()


def test_the_marker_of_another_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path / NAME, '{"format": "kcache-directory/2", "id": "0"}')
    before = snapshot(tmp_path)
    with pytest.raises(
        ConfigError, match=r"by another version of kcache \(format 'kcache-directory/2'\)"
    ):
        open_directory(str(tmp_path))
    assert snapshot(tmp_path) == before


def test_migrate_deletes_nothing_that_it_did_not_write(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    with KernelCache(place) as cache:
        assert cache.engine.put(key(1), entry())
    outside = tmp_path / "outside"
    write(outside / "photo")
    write(place / "file" / "notes" / "thesis.tex")
    write(place / "file" / "3f" / "letter")
    (place / "file" / "link").symlink_to(outside)
    done = command("migrate", "--from", "file", "--to", "zstd", "--directory", place)
    assert done.returncode == 0, done.stderr
    assert (outside / "photo").read_bytes() == b"precious"
    assert (place / "file" / "notes" / "thesis.tex").exists()
    assert (place / "file" / "3f" / "letter").exists()
    assert not (place / "file" / "counters").exists()


@pytest.mark.parametrize("backend", ["file", "zstd"])
@pytest.mark.parametrize("what", ["the backend's folder", "shards"])
def test_nothing_is_written_through_a_link(what: str, backend: str, tmp_path: Path) -> None:
    """A put once made directories and files in the folder to which a link in the cache led."""
    place, outside = tmp_path / "cache", tmp_path / "outside"
    with KernelCache(place, backend=backend) as cache:
        for number in range(40):
            assert cache.engine.put(key(number), entry())
    folder = place / backend
    replaced = (
        [folder] if what != "shards" else [path for path in folder.iterdir() if path.is_dir()]
    )
    for path in replaced:
        shutil.rmtree(path)
        path.symlink_to(outside)
    write(outside / "photo")
    write(outside / key(1))  # a file with a name that kcache might have written
    before = snapshot(outside)
    with KernelCache(place, backend=backend) as cache:
        engine = cache.engine
        for number in range(0, 40, 3):
            engine.put(key(number), entry())
            assert engine.get(key(number)) is None or what == "shards"
            engine.delete(key(number))
        engine.delete(key(1))
        cache.trim(0)
        cache.clear()
        with suppress(BackendError):
            list(engine.backend.check(repair=True))
    assert snapshot(outside) == before


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_relative_directories(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if how == "variable":
        monkeypatch.setenv("KCACHE_DIR", "relative")
    with KernelCache("relative" if how == "argument" else None) as cache:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        cache.engine.get_or_create(key(1), entry)
        cache.engine.delete(key(1))
        cache.engine.flush()
        assert cache.directory == tmp_path / "relative"
    assert os.listdir(tmp_path / "elsewhere") == []
    assert {"flight", "journal", "stats"} <= set(os.listdir(tmp_path / "relative"))


# -- public calls, in a program whose environment names such a folder ------------------------------

OPTIONS = CompileOptions(arch="sm_80")


@EACH
def test_a_kcache_dir_that_is_not_a_cache_is_not_changed(
    place: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The cache works in memory only, and logs the reason."""
    with KernelCache(tmp_path / "sound") as sound:
        kcache.export_bundle(sound, tmp_path / "b.kcb")
    before = snapshot(place)
    for backend in NAMES:
        with caplog.at_level(logging.WARNING), KernelCache(backend=backend) as cache:
            engine = cache.engine
            assert engine.get_or_create(key(1), entry) == entry()
            engine.put(key(2), entry())
            engine.delete(key(1))
            engine.refuse(key(2), CorruptEntryError("damaged"))
            engine.note("evicted", key(1))
            assert cache.lookup(KERNEL, (), OPTIONS) is None
            cache.print_info(io.StringIO())
            for call in (cache.total_stats, engine.flush, cache.trim, cache.clear):
                call()
            assert snapshot(place) == before
        assert snapshot(place) == before
    assert "expected a directory that is new or empty" in caplog.text
    with KernelCache() as cache:
        with pytest.raises(BackendError, match=r"nothing can be imported: .*expected a directory"):
            kcache.import_bundle(cache, tmp_path / "b.kcb")
        with pytest.raises(BackendError, match=r"nothing can be exported: .*expected a directory"):
            kcache.export_bundle(cache, tmp_path / "new.kcb")
    with suppress(ConfigError), KernelCache(tmp_path / "sound", remote=f"file://{place}") as cache:
        assert cache.lookup(KERNEL, (), OPTIONS) is None  # a layer is only read
    assert snapshot(place) == before
