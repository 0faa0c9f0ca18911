"""Settings that stay with a directory: below arguments and environment, and never an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from core.helpers import python

from kcache import ConfigError, Entry, KernelCache, UnknownBackendError, open_engine
from kcache.cli.open_cache import save
from kcache.config import VARIABLES
from kcache.directory import CacheDirectory, open_directory
from kcache.engine.opening import SAVED

#: A text for each setting that can be saved, the value that it means, and another text.
VALUES: dict[str, tuple[str, object, str]] = {
    "backend": ("zstd", "zstd", "lmdb"),
    "max_size": ("5GiB", 5 << 30, "6GiB"),
    "memory_size": ("1MiB", 1 << 20, "2MiB"),
    "header_check": ("once", "once", "always"),
    "relocation": ("eager", "eager", "lazy"),
    "wait": ("7", 7.0, "8"),
    "workers": ("2", 2, "3"),
    "compile_timeout": ("90", 90.0, "91"),
}
KEY = "0" * 64


@pytest.fixture
def files(tmp_path: Path) -> CacheDirectory:
    """A cache's directory, in which nothing is saved."""
    return open_directory(str(tmp_path / "cache"))


def saved(files: CacheDirectory) -> dict[str, object]:
    """Returns what the file holds."""
    found: dict[str, object] = json.loads(Path(files.marker).read_text())["settings"]
    return found


def write(files: CacheDirectory, settings: object) -> None:
    """Writes as a user with an editor does."""
    about = json.loads(Path(files.marker).read_text())
    Path(files.marker).write_text(json.dumps({**about, "settings": settings}))


# -- precedence ------------------------------------------------------------------------------------


def test_the_table_here_knows_every_setting_that_can_be_saved() -> None:
    assert set(VALUES) == set(SAVED)
    assert set(SAVED) < {variable.setting for variable in VARIABLES}


@pytest.mark.parametrize("name", SAVED)
def test_argument_beats_environment_beats_saved_beats_default(
    name: str, files: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = next(each for each in VARIABLES if each.setting == name)
    monkeypatch.delenv(variable.name, raising=False)

    def found(**arguments: object) -> object:
        with KernelCache(files.path, **arguments) as cache:  # type: ignore[arg-type]
            return getattr(cache.config, name)

    assert found() == (variable.default, "default")
    text, value, other = VALUES[name]
    save(files.path, {name: text})
    assert found() == (value, "kcache.json")
    monkeypatch.setenv(variable.name, other)
    assert found() == (variable.parse(other, name=name), variable.name)
    assert found(**{name: value}) == (value, "argument")
    monkeypatch.delenv(variable.name)
    save(files.path, {}, [name])
    assert found() == (variable.default, "default")
    assert saved(files) == {}


def test_what_is_saved_has_effect(files: CacheDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(files.path, {"backend": "lmdb", "max_size": "3MiB", "memory_size": "0"})
    monkeypatch.setenv("KCACHE_DIR", files.path)
    monkeypatch.setenv("KCACHE_MAX_SIZE", "lots")  # is ignored
    with KernelCache() as cache:
        assert cache.engine.max_size == 3 << 20
        assert cache.engine.memory.max_size == 0
        assert cache.engine.put(KEY, Entry({"a": b"b"}))
        assert "backend='lmdb'" in repr(cache)
    assert os.listdir(f"{files.path}/lmdb")
    assert not os.path.exists(f"{files.path}/file")


# -- what can't be used ----------------------------------------------------------------------------

OPENS_TWICE = """
import sys, kcache
for number in range(2):
    with kcache.KernelCache(sys.argv[1]) as cache:
        cache.engine.put("0" * 64, kcache.Entry({"a": b"x"}))
        assert cache.engine.get("0" * 64) is not None
        print(cache.config.backend, cache.config.max_size)
"""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_size": "lots"}, "max_size='lots' is not allowed; allowed:"),
        ({"max_size": 0}, "max_size=0 is not allowed"),
        ({"max_size": [5]}, "max_size=[5] is not allowed"),
        ({"colour": "red"}, "setting 'colour' can't be saved; allowed: backend,"),
        ({"disable": "1"}, "setting 'disable' can't be saved"),
        ({"remote": "file:///tmp"}, "setting 'remote' can't be saved"),
        ({"backend": "redis"}, "backend='redis' is not known; allowed: file,"),
        ({"backend": "\ud800"}, "backend='\\ud800' is not known"),
    ],
)
def test_a_setting_that_can_not_be_used_is_one_warning_and_the_default(
    settings: dict[str, object], said: str, files: CacheDirectory
) -> None:
    write(files, settings)
    done = python(OPENS_TWICE, files.path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"kcache: warning: {files.marker}: {said}")
    assert done.stderr.count("\n") == 1
    default = f"Setting(value='file', source='default') Setting(value={1 << 30}, source='default')"
    assert done.stdout.splitlines() == [default] * 2
    assert saved(files) == settings
    save(files.path, {"wait": "3"}, settings)
    assert saved(files) == {"wait": "3"}


def test_what_only_another_version_knows_stays(files: CacheDirectory) -> None:
    write(files, {"colour": "red"})
    (warning,) = save(files.path, {"wait": "3"})
    assert "'colour' can't be saved" in warning
    assert saved(files) == {"colour": "red", "wait": "3"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("max_size", "lots", "max_size='lots' is not allowed; allowed:"),
        ("maxsize", "5GiB", r"'maxsize' can't be saved \(did you mean 'max_size'\?\); allowed: b"),
        ("directory", "/x", "'directory' can't be saved"),
        ("backend", "", "backend='' is not allowed"),
        ("backend", "redis", "backend='redis' is not known"),
    ],
)
def test_what_can_not_be_saved_is_refused_with_what_can(
    name: str, text: str, said: str, files: CacheDirectory
) -> None:
    save(files.path, {"wait": "3"})
    with pytest.raises((ConfigError, UnknownBackendError), match=said):
        save(files.path, {"wait": "4", name: text})
    assert saved(files) == {"wait": "3"}


SAVES = """
import sys
from kcache.cli.open_cache import save
print("ready", flush=True)
sys.stdin.readline()
for number in range(60):
    save(sys.argv[1], {sys.argv[2]: str(number + 1)})
    save(sys.argv[1], {}, [sys.argv[2]])
save(sys.argv[1], {sys.argv[2]: "77"})
"""


def test_processes_that_save_at_the_same_time_lose_nothing(files: CacheDirectory) -> None:
    names = ("memory_size", "wait", "workers")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SAVES, files.path, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in names
    ]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    for process in started:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    while any(process.poll() is None for process in started):
        open_directory(files.path)  # raises for a torn file
    for process in started:
        assert process.wait() == 0
        process.communicate()
    assert saved(files) == dict.fromkeys(names, "77")
    assert [name for name in os.listdir(files.path) if name.startswith(".")] == []


# -- entries in another backend --------------------------------------------------------------------


def filled(files: CacheDirectory, *backends: str) -> None:
    for name in backends:
        with open_engine(files.path, backend=name) as engine:
            engine.put(KEY, Entry({"a": b"b"}))


MISSES = """
import sys, kcache
options = kcache.CompileOptions(arch="sm_80")
arguments = {"backend": sys.argv[2]} if len(sys.argv) > 2 else {}
for number in range(2):
    with kcache.KernelCache(sys.argv[1], **arguments) as cache:
        for again in range(2):
            cache.lookup("__global__ void k() {}", (), options)
        print(cache.config.backend.value)
"""


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("by", ["variable", "argument", "saved", "nothing"])
def test_an_empty_backend_beside_a_folder_of_another_is_one_warning(
    by: str, files: CacheDirectory
) -> None:
    name, other = ("file", "zstd") if by == "nothing" else ("zstd", "file")
    filled(files, other)
    if by == "saved":
        save(files.path, {"backend": "zstd"})
    environ = {"KCACHE_BACKEND": "zstd" if by == "variable" else None}
    done = python(MISSES, files.path, *(["zstd"] * (by == "argument")), environ=environ)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    who = {"variable": "KCACHE_BACKEND names it", "argument": "argument names it"}
    who |= {"saved": "kcache.json names it", "nothing": "the default"}
    assert f"the backend {name} ({who[by]}) is empty, and there is a folder of {other}. To" in (
        done.stderr
    )
    assert f"kcache migrate --from {other} --to {name}" in done.stderr
    assert done.stdout.split() == [name] * 2  # nothing else is opened


@pytest.mark.usefixtures("nvrtc")
def test_a_backend_with_entries_and_a_new_cache_are_no_warning(
    files: CacheDirectory, tmp_path: Path
) -> None:
    filled(files, "file", "zstd")
    os.mkdir(f"{tmp_path}/new", 0o700)
    for folder in ("mine", "lost+found"):  # these are no backends
        os.mkdir(f"{open_directory(f'{tmp_path}/new').path}/{folder}", 0o700)
    for place in (files.path, f"{tmp_path}/new"):
        done = python(MISSES, place, environ={"KCACHE_BACKEND": "zstd"})
        assert (done.returncode, done.stderr) == (0, "")
