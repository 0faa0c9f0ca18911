"""Settings that stay with a directory: below arguments and environment, and never an error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from core.helpers import fork, python, wait
from core.test_config import ARGUMENTS, VALUES

from kcache import Entry, KernelCache, open_engine
from kcache.cli.open_cache import save
from kcache.config import VARIABLES
from kcache.directory import CacheDirectory, open_directory
from kcache.engine.opening import SAVED


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
    text, value, _ = VALUES[variable.name]
    other = str(ARGUMENTS[name])
    save(files.path, {name: text})
    assert found() == (value, "kcache.json")
    monkeypatch.setenv(variable.name, other)
    assert found() == (variable.parse(other, name=name), variable.name)
    assert found(**{name: value}) == (value, "argument")
    monkeypatch.delenv(variable.name)
    save(files.path, {}, [name])
    assert found() == (variable.default, "default")
    assert saved(files) == {}


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
        ({"max_size": [5]}, "max_size=[5] is not allowed"),
        ({"colour": "red"}, "setting 'colour' can't be saved; allowed: backend,"),
        ({"disable": "1"}, "setting 'disable' can't be saved"),
        ({"backend": "redis"}, "backend='redis' is not known; allowed: file,"),
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


def test_processes_that_save_at_the_same_time_lose_nothing(files: CacheDirectory) -> None:
    def work(name: str) -> None:
        for number in range(60):
            save(files.path, {name: str(number + 1)})
            save(files.path, {}, [name])
        save(files.path, {name: "77"})

    names = ("memory_size", "wait", "workers")
    children = [fork(lambda name=name: work(name)) for name in names]
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not all(os.waitid(os.P_PID, child, ended) for child in children):
        open_directory(files.path)  # raises for a torn file
    assert [wait(child) for child in children] == [0] * len(names)
    assert saved(files) == dict.fromkeys(names, "77")
    assert [name for name in os.listdir(files.path) if name.startswith(".")] == []


# -- entries in another backend --------------------------------------------------------------------

MISSES = """
import sys, kcache
for number in range(2):
    with kcache.KernelCache(sys.argv[1]) as cache:
        for again in range(2):
            cache.lookup("__global__ void k() {}", (), kcache.CompileOptions(arch="sm_80"))
        print(cache.config.backend.value)
"""


@pytest.mark.usefixtures("nvrtc")
def test_an_empty_backend_beside_a_folder_of_another_is_one_warning(files: CacheDirectory) -> None:
    with open_engine(files.path, backend="zstd") as engine:
        engine.put("0" * 64, Entry({"a": b"b"}))
    done = python(MISSES, files.path)
    assert (done.returncode, done.stdout.split()) == (0, ["file"] * 2)  # nothing else is opened
    assert "the backend file (the default) is empty, and there is a folder of zstd. To" in (
        done.stderr
    )
    assert done.stderr.count("\n") == 1
    done = python(MISSES, files.path, environ={"KCACHE_BACKEND": "zstd"})
    assert (done.returncode, done.stderr) == (0, "")
