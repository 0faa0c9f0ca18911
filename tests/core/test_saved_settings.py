"""Settings that stay with a directory: below arguments and environment, and never an error."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from core.helpers import output_of, python
from hypothesis import given
from hypothesis import strategies as st

from kcache import BackendError, ConfigError, Entry, KernelCache, UnknownBackendError, open_engine
from kcache.admin.saving import save
from kcache.config import VARIABLES, Config
from kcache.directory import CacheDirectory, prepare
from kcache.saved_settings import NAMES, SOURCE, change, read

#: A text for each setting that can be saved, and the value that it means.
VALUES: dict[str, tuple[str, object]] = {
    "backend": ("zstd", "zstd"),
    "max_size": ("5GiB", 5 << 30),
    "memory_size": ("1MiB", 1 << 20),
    "header_check": ("once", "once"),
    "relocation": ("eager", "eager"),
    "wait": ("7", 7.0),
    "workers": ("2", 2),
    "compile_timeout": ("90", 90.0),
}
OTHERS = {
    "backend": "lmdb",
    "max_size": "6GiB",
    "memory_size": "2MiB",
    "header_check": "always",
    "relocation": "lazy",
    "wait": "8",
    "workers": "3",
    "compile_timeout": "91",
}


@pytest.fixture
def files(tmp_path: Path) -> CacheDirectory:
    """A cache's directory, in which nothing is saved."""
    prepare(str(tmp_path / "cache"))
    return CacheDirectory(str(tmp_path / "cache"))


def write(files: CacheDirectory, text: str | bytes) -> None:
    Path(files.settings).write_bytes(text if isinstance(text, bytes) else text.encode())


# -- precedence ------------------------------------------------------------------------------------


def test_the_tables_here_know_every_setting_that_can_be_saved() -> None:
    assert set(VALUES) == set(OTHERS) == set(NAMES)
    assert set(NAMES) < {variable.setting for variable in VARIABLES}


@pytest.mark.parametrize("name", NAMES)
def test_argument_beats_environment_beats_saved_beats_default(
    name: str, files: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = next(each for each in VARIABLES if each.setting == name)
    monkeypatch.delenv(variable.name, raising=False)

    def found(**arguments: object) -> object:
        with KernelCache(files.path, **arguments) as cache:  # type: ignore[arg-type]
            return getattr(cache.config, name)

    assert found() == (variable.default, "default")
    text, value = VALUES[name]
    change(files, {name: text})
    assert found() == (value, SOURCE)
    monkeypatch.setenv(variable.name, OTHERS[name])
    assert found() == (variable.parse(OTHERS[name], name=name), variable.name)
    assert found(**{name: value}) == (value, "argument")
    change(files, {}, [name])
    monkeypatch.delenv(variable.name)
    assert found() == (variable.default, "default")
    assert not os.path.lexists(files.settings)


def test_what_is_saved_has_effect(files: CacheDirectory) -> None:
    change(files, {"backend": "lmdb", "max_size": "3MiB", "memory_size": "0"})
    with KernelCache(files.path) as cache:
        assert cache.engine.max_size == 3 << 20
        assert cache.engine.memory.max_size == 0
        assert cache.engine.put("0" * 64, Entry({"a": b"b"}))
        assert "backend='lmdb'" in repr(cache)
    assert os.listdir(f"{files.path}/lmdb")
    assert not os.path.exists(f"{files.path}/file")


def test_a_backend_that_the_program_made_stays(files: CacheDirectory) -> None:
    from kcache.testing.memory import MemoryBackend

    change(files, {"backend": "lmdb", "max_size": "3MiB"})
    with KernelCache(files.path, backend=MemoryBackend()) as cache:
        assert cache.engine.max_size == 3 << 20
        assert isinstance(cache.engine.backend, MemoryBackend)
    assert not os.path.exists(f"{files.path}/lmdb")


def test_a_directory_of_the_environment_has_its_settings(
    files: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(files, {"max_size": "3MiB"})
    monkeypatch.setenv("KCACHE_DIR", files.path)
    monkeypatch.setenv("KCACHE_MAX_SIZE", "lots")  # does not count
    with KernelCache() as cache:
        assert cache.config.max_size == (3 << 20, SOURCE)


def test_the_engine_alone_takes_its_arguments(files: CacheDirectory) -> None:
    change(files, {"backend": "lmdb", "max_size": "3MiB"})
    with open_engine(files.path) as engine:
        assert engine.max_size == 1 << 30


def test_a_layer_keeps_its_settings_to_itself(files: CacheDirectory, tmp_path: Path) -> None:
    change(files, {"backend": "lmdb", "max_size": "3MiB"})
    with KernelCache(files.path) as cache:
        cache.engine.put("0" * 64, Entry({"a": b"b"}))
    with KernelCache(tmp_path / "front", remote=f"file://{files.path}") as cache:
        assert cache.config.max_size.source == "default"
        assert cache.config.backend == ("file", "default")


# -- damage ----------------------------------------------------------------------------------------

OPENS_TWICE = """
import sys, kcache
for number in range(2):
    with kcache.KernelCache(sys.argv[1]) as cache:
        cache.engine.put("0" * 64, kcache.Entry({"a": b"x"}))
        assert cache.engine.get("0" * 64) is not None
        print(cache.config.backend, cache.config.max_size)
"""

GOOD = '{"format": "kcache-settings/1", "settings": {"max_size": "3MiB"}}\n'
DAMAGE = {
    "empty": b"",
    "zeros": b"\0" * 60,
    "torn": GOOD[:40].encode(),
    "no JSON": b"max_size = 5GiB\n",
    "no object": b"[]",
    "no settings": b'{"format": "kcache-settings/1"}',
    "another format": b'{"format": "kcache-directory/1", "settings": {}}',
    "another version": b'{"format": "kcache-settings/2", "settings": {"max_size": "3MiB"}}',
    "a number": b'{"format": "kcache-settings/1", "settings": {"max_size": 5}}',
    "a list": b'{"format": "kcache-settings/1", "settings": []}',
    "deep": b"[" * 4000,
    "large": GOOD.encode() + b" " * 5000,
    "no text": b"\xff\xfe" * 20,
    "a size that is none": GOOD.replace("3MiB", "lots").encode(),
    "a cap of zero": GOOD.replace("3MiB", "0").encode(),
    "unknown": GOOD.replace("max_size", "colour").encode(),
    "not to be saved": GOOD.replace('"max_size": "3MiB"', '"disable": "1"').encode(),
    "whom to trust": GOOD.replace('"max_size": "3MiB"', '"remote": "file:///tmp"').encode(),
    "no backend": GOOD.replace('"max_size": "3MiB"', '"backend": "redis"').encode(),
    "surrogates": GOOD.replace('"max_size": "3MiB"', '"backend": "\\ud800"').encode(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_warning_and_the_defaults(kind: str, files: CacheDirectory) -> None:
    write(files, DAMAGE[kind])
    done = python(OPENS_TWICE, files.path)
    assert done.returncode == 0, done.stderr
    assert "settings.json" in done.stderr
    assert done.stderr.count("\n") == 1
    default = f"Setting(value='file', source='default') Setting(value={1 << 30}, source='default')"
    assert done.stdout.splitlines() == [default] * 2
    assert Path(files.settings).read_bytes() == DAMAGE[kind]


@pytest.mark.parametrize("kind", [each for each in DAMAGE if each != "another version"])
def test_damage_is_replaced_by_what_is_saved_next(kind: str, files: CacheDirectory) -> None:
    write(files, DAMAGE[kind])
    gone = set(read(files).texts) - set(NAMES)
    with pytest.raises(ConfigError, match="'wat' can't be saved"):
        change(files, {"max_size": "7MiB"}, ["wat"])
    assert Path(files.settings).read_bytes() == DAMAGE[kind]
    change(files, {"max_size": "7MiB", "backend": "file"}, gone)
    assert read(files).values == {"max_size": 7 << 20, "backend": "file"}
    assert read(files).problems == ()


def test_a_file_of_a_later_version_is_not_overwritten(files: CacheDirectory) -> None:
    write(files, DAMAGE["another version"])
    with pytest.raises(BackendError, match="another version of kcache wrote it"):
        change(files, {"max_size": "7MiB"})
    assert Path(files.settings).read_bytes() == DAMAGE["another version"]


def test_what_only_another_version_knows_stays(files: CacheDirectory) -> None:
    write(files, DAMAGE["unknown"])
    change(files, {"wait": "3"})
    assert read(files).texts == {"colour": "3MiB", "wait": "3"}
    assert len(read(files).problems) == 1
    assert read(files).values == {"wait": 3.0}


@contextmanager
def stranger(kind: str, path: str, aside: Path) -> Iterator[None]:
    """Puts something that is not ours in the place of the file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(os.path.dirname(path))  # the name of a socket may be short only
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(os.path.basename(path))
        os.chdir(here)
    else:
        aside.write_text(GOOD)
        (os.symlink if kind == "link" else os.link)(aside, path)
    yield


@pytest.mark.skipif(sys.platform == "win32", reason="kinds of files of POSIX")
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "link", "second name"])
def test_what_is_not_ours_is_neither_read_nor_waited_for_nor_replaced(
    kind: str, files: CacheDirectory, tmp_path: Path
) -> None:
    with stranger(kind, files.settings, tmp_path / "aside"):
        done = python(OPENS_TWICE, files.path)
        assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
        assert f"value={1 << 30}, source='default'" in done.stdout
        with pytest.raises(BackendError, match="settings.json can't be changed"):
            change(files, {"max_size": "7MiB"})
        assert os.path.lexists(files.settings)
    if kind in ("link", "second name"):
        assert (tmp_path / "aside").read_text() == GOOD


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root gives files")
def test_a_file_of_another_user_does_not_count(files: CacheDirectory) -> None:
    write(files, GOOD)
    os.chown(files.settings, 12345, 12345)
    assert read(files).values == {}
    assert "a file of user 12345" in read(files).problems[0]
    with pytest.raises(BackendError, match="a file of user 12345"):
        change(files, {"max_size": "7MiB"})


def test_reading_is_bounded(files: CacheDirectory) -> None:
    with open(files.settings, "wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    assert "more than 4096 bytes" in read(files).problems[0]


@given(text=st.binary(max_size=200) | st.builds(lambda j: json.dumps(j).encode(), st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=9) | st.just("kcache-settings/1"),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["format", "settings", "max_size", "x"]), inner, max_size=3),
)))  # fmt: skip
def test_any_bytes_are_settings_or_a_problem(
    text: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = CacheDirectory(str(tmp_path_factory.mktemp("any")))
    write(files, text)
    found = read(files)
    assert found.problems or set(found.values) == set(found.texts)
    assert found.below(Config.load(environ={})).directory.value is None


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("max_size", "lots", "max_size='lots' is not allowed; allowed:"),
        ("maxsize", "5GiB", r"'maxsize' can't be saved \(did you mean 'max_size'\?\); allowed: b"),
        ("directory", "/x", "'directory' can't be saved"),
        ("remote", "file:///x", "'remote' can't be saved"),
        ("backend", "", "backend='' is not allowed"),
        ("backend", "x" * 5000, "these settings take 50.. bytes; allowed: 4096"),
    ],
)
def test_what_can_not_be_saved_is_refused_with_what_can(
    name: str, text: str, said: str, files: CacheDirectory
) -> None:
    change(files, {"wait": "3"})
    with pytest.raises(ConfigError, match=said):
        change(files, {"wait": "4", name: text})
    assert read(files).texts == {"wait": "3"}
    assert not os.path.lexists(files.settings_draft)


def test_forgetting_what_is_not_saved_is_no_error(files: CacheDirectory) -> None:
    assert change(files, {}, ["wait"]).texts == {}
    with pytest.raises(ConfigError, match="'wat' can't be saved"):
        change(files, {}, ["wat"])


def test_a_backend_that_is_not_installed_is_refused(files: CacheDirectory) -> None:
    with pytest.raises(UnknownBackendError, match="backend='redis' is not known"):
        save(files.path, {"backend": "redis"})
    assert not os.path.lexists(files.settings)


def test_a_cap_that_the_saved_backend_refuses_is_refused(files: CacheDirectory) -> None:
    assert save(files.path, {"backend": "lmdb"}) == []
    with pytest.raises(ConfigError, match="max_size='17TiB' is not allowed with LMDB"):
        save(files.path, {"max_size": "17TiB"})
    assert save(files.path, {"max_size": "17TiB", "backend": "file"}) == []


SAVES = """
import sys
from kcache.directory import CacheDirectory
from kcache.saved_settings import change
files = CacheDirectory(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(60):
    change(files, {sys.argv[2]: str(number + 1)})
    change(files, {}, [sys.argv[2]])
change(files, {sys.argv[2]: "77"})
"""


def test_two_processes_that_save_at_the_same_time_lose_nothing(files: CacheDirectory) -> None:
    import subprocess

    names = ("max_size", "wait", "workers")
    with_pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, "-c", SAVES, files.path, name], **with_pipes)  # type: ignore[call-overload]
        for name in names
    ]
    for process in started:
        process.stdout.readline()
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    while any(process.poll() is None for process in started):
        assert read(files).problems == ()  # never torn
    for process in started:
        assert process.wait() == 0
        process.stdin.close()
        process.stdout.close()
    assert read(files).texts == dict.fromkeys(names, "77")
    assert not os.path.lexists(files.settings_draft)


def test_what_a_killed_process_left_is_in_nobodys_way(files: CacheDirectory) -> None:
    Path(files.settings_draft).write_text('{"form')
    change(files, {"wait": "3"})
    assert read(files).texts == {"wait": "3"}
    assert not os.path.lexists(files.settings_draft)


@pytest.mark.parametrize("text", [GOOD, GOOD[:5], ""])
def test_the_files_are_known_where_the_marker_is_lost(text: str, files: CacheDirectory) -> None:
    with open_engine(files.path) as engine:
        engine.put("0" * 64, Entry({"a": b"b"}))
    os.unlink(files.marker)
    write(files, GOOD)
    Path(files.settings_draft).write_text(text)
    with KernelCache(files.path) as cache:
        assert cache.engine.max_size == 3 << 20


def test_a_foreign_file_of_that_name_keeps_a_directory_from_being_a_cache(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"theme": "dark"}')
    with pytest.raises(ConfigError, match="is no cache: it has 'settings.json' in it"):
        KernelCache(tmp_path)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_can_not_be_written_to_is_an_error_of_saving_alone(
    files: CacheDirectory,
) -> None:
    change(files, {"max_size": "3MiB"})
    os.chmod(files.path, 0o500)
    try:
        with pytest.raises(BackendError, match="settings.json can't be changed: Permission denied"):
            change(files, {"max_size": "7MiB"})
        with KernelCache(files.path, read_only=True) as cache:
            assert cache.engine.max_size == 3 << 20
    finally:
        os.chmod(files.path, 0o700)


# -- the backend that has the entries --------------------------------------------------------------


def filled(files: CacheDirectory, *backends: str) -> None:
    for count, name in enumerate(backends, start=1):
        with open_engine(files.path, backend=name) as engine:
            for number in range(count):
                engine.put(f"{number:064}", Entry({"a": b"b"}))


@pytest.mark.parametrize("name", ["zstd", "lmdb", "zstd+lmdb"])
@pytest.mark.parametrize("read_only", [False, True])
def test_where_nobody_names_a_backend_it_is_the_one_with_entries(
    name: str, read_only: bool, files: CacheDirectory
) -> None:
    filled(files, name)
    with KernelCache(files.path, read_only=read_only) as cache:
        assert cache.config.backend == (name, "its entries")
        assert cache.entry_count == 1
    assert not os.path.exists(f"{files.path}/file")


def test_of_several_it_is_the_one_with_the_most(files: CacheDirectory) -> None:
    filled(files, "zstd", "lmdb")
    with KernelCache(files.path) as cache:
        assert cache.config.backend.value == "lmdb"


def test_the_default_stays_where_it_has_a_folder(files: CacheDirectory) -> None:
    filled(files, "file", "zstd")
    with KernelCache(files.path) as cache:
        assert cache.config.backend == ("file", "default")


MISSES = """
import sys, kcache
options = kcache.CompileOptions(arch="sm_80")
arguments = {"backend": sys.argv[2]} if len(sys.argv) > 2 else {}
for number in range(2):
    with kcache.KernelCache(sys.argv[1], **arguments) as cache:
        for again in range(2):
            cache.lookup("__global__ void k() {}", (), options)
"""


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("by", ["variable", "argument", "saved"])
def test_a_backend_without_the_kernels_is_one_warning(by: str, files: CacheDirectory) -> None:
    filled(files, "file")
    arguments = ["zstd"] if by == "argument" else []
    if by == "saved":
        change(files, {"backend": "zstd"})
    environ = {"KCACHE_BACKEND": "zstd" if by == "variable" else None}
    for _ in range(2):  # in each process
        done = python(MISSES, files.path, *arguments, environ=environ)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("\n") == 1
        told = "this directory's kernels are in the backend file (1 entry, "
        assert told in done.stderr
        who = {"variable": "KCACHE_BACKEND", "argument": "argument", "saved": "settings.json"}[by]
        assert f"and not in zstd ({who} names it)" in done.stderr
        assert "kcache migrate --from file --to zstd" in done.stderr


@pytest.mark.usefixtures("nvrtc")
def test_a_backend_with_kernels_is_no_warning(files: CacheDirectory) -> None:
    filled(files, "file", "zstd")
    done = python(MISSES, files.path, environ={"KCACHE_BACKEND": "zstd"})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("nvrtc")
def test_a_new_cache_is_no_warning(files: CacheDirectory) -> None:
    for name in ("file", "zstd", "lmdb"):
        done = python(MISSES, files.path, environ={"KCACHE_BACKEND": name})
        assert (done.returncode, done.stderr) == (0, "")


def test_other_folders_are_no_backends(files: CacheDirectory, tmp_path: Path) -> None:
    for name in ("mine", "lost+found", "trace", "zstd"):
        os.mkdir(f"{files.path}/{name}", 0o700)
    with KernelCache(files.path) as cache:
        assert cache.config.backend == ("file", "default")


def test_a_hit_where_nothing_is_saved_does_not_load_the_module(files: CacheDirectory) -> None:
    text = """
import sys, kcache
with kcache.KernelCache(sys.argv[1]) as cache:
    print(sorted(name for name in sys.modules if name in ("kcache.saved_settings", "kcache.other_backends")))
"""
    filled(files, "file")
    assert output_of(text, files.path) == "[]"
    change(files, {"wait": "3"})
    assert output_of(text, files.path) == "['kcache.saved_settings']"
