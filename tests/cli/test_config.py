"""`kcache config` lists every setting and its source; `--set` saves settings in the directory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import fill, kernel
from core.helpers import key

import kcache
from kcache.config import VARIABLES


def saved(directory: Path) -> dict[str, str]:
    """Return the settings that are saved in a cache's directory."""
    return dict(json.loads((directory / "kcache.json").read_text())["settings"])


def settings(here: Callable, *arguments: str | Path, **more: str) -> dict[str, dict[str, object]]:
    said = here("config", "--json", *arguments, **more)
    assert said.code == 0, said.err
    return dict(json.loads(said.out)["settings"])


def test_every_setting_has_its_value_and_its_source(here: Callable, cache_directory: Path) -> None:
    here("config", "--set", "max_size=5GiB", "--set", "workers=3")
    found = settings(here, KCACHE_MAX_SIZE="2MiB")
    assert set(found) == {variable.setting for variable in VARIABLES}
    assert found["max_size"] == {
        "value": 2 << 20,
        "source": "KCACHE_MAX_SIZE",
        "variable": "KCACHE_MAX_SIZE",
        "saved": "5GiB",
    }
    assert (found["directory"]["value"], found["directory"]["source"]) == (
        str(cache_directory),
        "KCACHE_DIR",
    )
    assert (found["workers"]["source"], found["wait"]["source"]) == ("kcache.json", "default")
    said = here("config", KCACHE_MAX_SIZE="2MiB")
    rows = [line.split() for line in said.out.splitlines()]
    assert ["workers", "kcache.json", "3"] in rows
    assert ["max_size", "KCACHE_MAX_SIZE", "2.0", "MiB"] in rows


def test_an_option_is_a_source(here: Callable, tmp_path: Path) -> None:
    found = settings(here, "--directory", tmp_path)["directory"]
    assert (found["value"], found["source"]) == (str(tmp_path), "--directory")


@pytest.mark.usefixtures("nvrtc")
def test_the_compiler_and_its_identity(here: Callable) -> None:
    compiler = json.loads(here("config", "--json").out)["compiler"]
    assert Path(compiler["path"]).is_file()
    assert compiler["identity"].startswith("nvrtc ")
    assert compiler["path"] in here("config").out


def test_saved_settings(cache_directory: Path, here: Callable, run: Callable) -> None:
    out = here("config", "--set", "max_size=5GiB", "--set", "wait = 7").clean()
    rows = [line.split() for line in out.splitlines()[1:]]
    assert rows == [["max_size", "kcache.json", "5.0", "GiB"], ["wait", "kcache.json", "7.0"]]
    with kcache.KernelCache() as cache:
        assert (cache.engine.max_size, cache.config.wait.value) == (5 << 30, 7.0)
    assert b"5.0 GiB" in run("info").stdout  # in another process
    said = here("config", "--set", "max_size=6GiB", KCACHE_MAX_SIZE="2MiB")
    assert "KCACHE_MAX_SIZE is set, and overrides the saved max_size" in said.err
    assert here("config", "--unset", "wait").out.split()[-3:] == ["wait", "default", "300.0"]
    assert saved(cache_directory) == {"max_size": "6GiB"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "max_size"), "expected NAME=VALUE"),
        (("--set", "max_size=lots"), "max_size: expected at least"),
        (("--set", "maxsize=1GiB"), "did you mean 'max_size'?"),
        (("--set", "directory=/x"), "'directory' can't be saved"),
        (("--set", "backend=redis"), "backend: expected one of file"),
        (("--unset", "wat"), "'wat' can't be saved"),
        (("--set", "wait=3", "--unset", "wait"), "name the same setting: wait"),
    ],
)
def test_invalid_settings_are_refused(
    arguments: tuple[str, ...], said: str, cache_directory: Path, here: Callable
) -> None:
    done = here("config", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not cache_directory.exists() or saved(cache_directory) == {}


# -- where the entries are -------------------------------------------------------------------------


def test_commands_use_the_new_backend_after_migrate(cache_directory: Path, here: Callable) -> None:
    target = "zstd+lmdb"
    fill(cache_directory, {key(n): kernel(names=[f"k{n}"]) for n in range(3)})
    said = here("migrate", "--to", target)
    assert f"\nSaved with the cache: backend={target}." in said.out
    about = json.loads(here("info", "--json").out)
    assert (about["backend"], about["backend_source"]) == (target, "kcache.json")
    assert about["entries"] == len(json.loads(here("ls", "--json").out)) == 3
    assert f'backend="{target}"' in here("stats", "--prometheus").out
    assert f"ok       backend          {target} " in here("doctor").out
    assert "3 entries read" in here("verify").out
    with kcache.KernelCache() as cache:
        assert (cache.config.backend.value, cache.entry_count) == (target, 3)
    assert here("rm", key(0)).code == 0
    assert here("trim", "--max-size", "0").out.startswith("evicted 2 entries")
    assert not (cache_directory / "file").exists()


def test_migrate_warns_of_a_variable(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {key(1): kernel()})
    said = here("migrate", "--to", "zstd", KCACHE_BACKEND="file")
    assert said.code == 0
    assert "warning: KCACHE_BACKEND is set, and overrides the saved backend" in said.err
    assert here("migrate", "--to", "file").code == 0  # moves the entries back
    assert saved(cache_directory) == {"backend": "file"}
