"""The directory of a cache is created private, and refused if others could put code into it."""

import itertools
import os
import shutil
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from core.helpers import as_root, fork, in_child, key, output_of, run, umask, wait

from kcache import ConfigError, Entry, KernelCache, default_cache_directory, open_engine
from kcache.daemons.sockets import bound, folder_in
from kcache.directory import claim, open_directory
from kcache.testing._base import as_threads
from kcache.util import path_safety
from kcache.util.open_file import NotOursError
from kcache_backends.file import FileBackend

#: The functions to which a caller passes a directory.
DOORS = (open_directory, open_engine, KernelCache)
SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o177])
def test_it_is_made_with_its_parents_for_the_user_alone(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        open_directory(str(tmp_path / "a" / "b" / "cache"))
    for path in ("a", "a/b", "a/b/cache"):
        assert mode(tmp_path / path) == 0o700


def test_the_cache_directory_tag_is_written_once(tmp_path: Path) -> None:
    open_directory(str(tmp_path))
    tag = tmp_path / "CACHEDIR.TAG"
    assert tag.read_bytes().startswith(SIGNATURE)
    tag.write_bytes(b"changed by the user")
    open_directory(str(tmp_path))
    assert tag.read_bytes() == b"changed by the user"


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("below", ["", "cache", "deep/cache"])
def test_a_file_in_the_path_is_refused(below: str, read_only: bool, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    for opens in DOORS:
        with pytest.raises(
            ConfigError, match=r"directory: expected a directory, got '.*file.*a file"
        ):
            opens(str(file / below), read_only=read_only)
    assert file.read_bytes() == b"precious"


@pytest.mark.parametrize("bits", [0o720, 0o702, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(bits: int, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(bits)
    for opens, read_only in itertools.product(DOORS, (False, True)):
        with pytest.raises(ConfigError, match=rf"{place}.*{bits:04o}.*chmod go-w"):
            opens(str(place), read_only=read_only)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("bits", [0o770, 0o702])
@pytest.mark.parametrize("there", [False, True])
def test_an_unsafe_directory_above_is_refused(there: bool, bits: int, tmp_path: Path) -> None:
    place = tmp_path / "shared" / "mine" / "cache"
    (place if there else tmp_path / "shared").mkdir(parents=True, mode=0o700)
    os.chown(tmp_path / "shared", -1, 12345) if os.geteuid() == 0 else None
    (tmp_path / "shared").chmod(bits)
    for read_only in (False, True):
        with pytest.raises(ConfigError, match=rf"others can write to .*shared \(mode {bits:04o}\)"):
            open_directory(str(place), read_only=read_only)
    assert list(tmp_path.rglob("kcache.json")) == []
    (tmp_path / "shared").chmod(0o1777)
    if there:
        open_directory(str(place))


@as_root
@pytest.mark.parametrize(("below", "said"), [("", ", and you are user 0"), ("cache", "")])
def test_another_users_directory_is_refused(below: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(tmp_path / "theirs", 12345, 12345)
    for read_only in (False, True):
        with pytest.raises(ConfigError, match=f"belongs to user 12345{said}"):
            open_directory(str(tmp_path / "theirs" / below), read_only=read_only)
    assert list((tmp_path / "theirs").iterdir()) == []


@as_root
def test_a_link_made_by_another_user_is_refused(tmp_path: Path) -> None:
    """In a directory like /tmp, any user can create such a link before the cache is created."""
    shared, mine = tmp_path / "tmp", tmp_path / "mine"
    shared.mkdir()
    shared.chmod(0o1777)
    mine.mkdir(mode=0o700)
    (shared / "kcache-0").symlink_to(mine)
    os.chown(shared / "kcache-0", 12345, 12345, follow_symlinks=False)
    for place in (shared / "kcache-0", shared / "kcache-0" / "below"):
        with pytest.raises(ConfigError, match="is a link that user 12345 made"):
            open_directory(str(place))
    assert list(mine.iterdir()) == []


#: An access control list of version 2: (tag, rights, id) for the owner, user 12345, the group, the
#: mask, and others; see `linux/posix_acl_xattr.h`.
_ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *each)
    for each in ((1, 7, 0), (2, 7, 12345), (4, 0, 0), (16, 7, 0), (32, 5, 0))
)


def test_access_control_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_safety, "_is_private_group", lambda group, user: True)
    (tmp_path / "home").mkdir()
    try:
        os.setxattr(tmp_path / "home", "system.posix_acl_access", _ACL)
    except OSError:
        pytest.skip("this file system has no access control lists")
    assert mode(tmp_path / "home") == 0o775  # as if only the user's own group could write
    with pytest.raises(ConfigError, match="others can write to .*home .*getfacl"):
        open_directory(str(tmp_path / "home" / "cache"))


def test_a_private_group_may_write_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's private group may write, as on Debian, Ubuntu and Fedora with umask 002."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o775)
    monkeypatch.setattr(path_safety, "_is_private_group", lambda group, user: True)
    open_directory(str(tmp_path / "home" / "cache"))
    monkeypatch.setattr(path_safety, "_is_private_group", lambda group, user: False)
    with pytest.raises(ConfigError, match="others can write to .*home"):
        open_directory(str(tmp_path / "home" / "other"))


# -- several at once, and killed ones ------------------------------------------------------------


def test_a_kill_while_the_directory_is_made(
    tmp_path: Path,
) -> None:
    """A directory is usable if a process was killed while creating it, before any system call."""

    def make(place: Path, calls: int) -> None:
        left = [calls]

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            path = str(arguments[0]) if arguments else ""
            writes = event in ("os.mkdir", "os.rename") or event == "open"
            if writes and path.startswith(str(place)):
                left[0] -= 1
                if not left[0]:
                    os._exit(9)

        sys.addaudithook(watch)
        open_directory(str(place))

    ended, calls = 9, 0
    while ended:
        calls += 1
        place = tmp_path / str(calls)
        ended = wait(fork(lambda place=place, calls=calls: make(place, calls)))
        assert ended in (0, 9)
        with open_engine(place) as engine:
            assert engine.put("0" * 64, Entry({"a": b"b"}))
    assert calls > 4


def test_backends_that_are_opened_at_once_make_one_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that open a backend in a new folder create one cache, even if the first is slow."""
    writing, slow = threading.Event(), os.fsync

    def sync(fd: int) -> None:
        writing.set()
        time.sleep(0.2)
        slow(fd)

    monkeypatch.setattr(os, "fsync", sync)

    def later() -> None:
        writing.wait(10)
        FileBackend(tmp_path / "folder").usage()

    as_threads(lambda: FileBackend(tmp_path / "folder").usage(), later, later)
    assert (tmp_path / "kcache.json").exists()
    assert not (tmp_path / "folder" / "kcache.json").exists()


def test_a_folder_is_accepted_whose_cache_is_made_during_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = Path(open_directory(str(tmp_path / "other")).marker)
    folder = tmp_path / "cache" / "file"
    folder.mkdir(0o700, parents=True)
    (folder / "counters").touch()
    with pytest.raises(NotOursError, match="it contains 'counters'"):
        claim(str(folder))
    monkeypatch.setattr(time, "sleep", lambda _: shutil.copy(marker, folder.parent))
    claim(str(folder))
    assert [file.name for file in folder.iterdir()] == ["counters"]


# -- the default directory -----------------------------------------------------------------------


WHERE = "import kcache; print(kcache.KernelCache().directory)"


def where(**environ: object) -> str:
    """Return the default directory of a KernelCache in a new process with only these variables."""
    unset = dict.fromkeys(("KCACHE_DIR", "XDG_CACHE_HOME", "HOME"))
    return output_of(WHERE, environ={**unset, **{k: str(v) for k, v in environ.items()}})


def test_the_probe_order(tmp_path: Path) -> None:
    named, xdg, home, file = (tmp_path / name for name in ("named", "xdg", "home", "file"))
    home.mkdir(mode=0o700)
    file.touch()
    private = tmp_path / f"kcache-{os.getuid()}"
    assert where(KCACHE_DIR=named, XDG_CACHE_HOME=xdg, HOME=home) == str(named)
    assert where(XDG_CACHE_HOME=xdg, HOME=home) == str(xdg / "kcache")
    assert where(HOME=home) == str(home / ".cache" / "kcache")
    assert where(XDG_CACHE_HOME=file, TMPDIR=tmp_path) == str(private)
    assert mode(private) == mode(home / ".cache" / "kcache") == 0o700
    # A read-only cache creates no directory; a command prints the one that a program would create.
    assert where(KCACHE_READ_ONLY=1, XDG_CACHE_HOME=tmp_path / "new", TMPDIR=tmp_path) == "None"
    unusable = {"XDG_CACHE_HOME": str(file), "TMPDIR": str(tmp_path), "KCACHE_DIR": ""}
    assert run(sys.executable, "-m", "kcache", "path", environ=unusable).stdout.strip() == str(
        private
    )
    private.rename(tmp_path / "away")
    private.touch()  # a file in the place of the directory
    assert where(XDG_CACHE_HOME=file, TMPDIR=tmp_path) == "None"


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory in which every user may write: the working and the temporary directory."""
    with tempfile.TemporaryDirectory(prefix="kcache-public-") as name:
        os.chmod(name, 0o1777)
        monkeypatch.chdir(name)
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(name)


@as_root
def test_a_user_without_a_home(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as in many containers, gets a cache in the temporary directory."""
    for name in ("KCACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    default_cache_directory()  # imports modules that the child may not be able to read

    def child() -> None:
        os.setuid(54321)
        sockets = folder_in([str(public)])
        os.close(bound(f"{sockets}/socket"))  # as the service of `kcache run` does
        with KernelCache() as cache:
            assert cache.directory == public / "kcache-54321"
        assert {str(each) for each in public.iterdir()} == {sockets, str(cache.directory)}
        assert default_cache_directory().is_absolute()
        with pytest.raises(ConfigError, match="~/kcache"):
            KernelCache("~/kcache")

    in_child(child)


def test_processes_that_make_the_same_directory_at_once_all_use_it(tmp_path: Path) -> None:
    rounds, count = 20, 3
    begins, go = os.pipe()

    def work(number: int) -> None:
        os.close(go)
        os.read(begins, 1)  # until every child has been started
        for place in range(rounds):
            with open_engine(tmp_path / "deep" / str(place)) as engine:
                assert engine.put(key(number), Entry({"a": b"b"}))

    children = [fork(lambda number=number: work(number)) for number in range(count)]
    os.close(begins)
    os.close(go)
    assert [wait(child) for child in children] == [0] * count
    for place in range(rounds):
        with open_engine(tmp_path / "deep" / str(place)) as engine:
            assert engine.entry_count == count
