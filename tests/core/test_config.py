"""Config: argument, else environment, else default; a bad value is named with what is allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from core.helpers import python

from kcache import ConfigError, KernelCache, UnknownBackendError
from kcache.config import VARIABLES, Config
from kcache.remote.address import parse_addresses
from kcache.util.units import parse_age, parse_size

# -- sizes ---------------------------------------------------------------------------------------

SIZES: dict[str | int, int] = {
    0: 0,
    10**30: 10**30,
    "512": 512,
    "512B": 512,
    "1K": 1000,
    "1KB": 1000,
    "1KiB": 1024,
    "512MB": 512_000_000,
    "2gb": 2 * 10**9,
    "1TiB": 1 << 40,
    "1.5GiB": 3 << 29,
    " 10 MB ": 10_000_000,
    "007": 7,
}
NO_SIZES: list[Any] = [
    "", " ", "MB", "-1", "+1", "1e9", "0x10", "1_000", "1,5GB", "1.GB", ".5GB", "1.2.3GB", "10 M B",
    "10XB", "10iB", "10bytes", "inf", "nan", "infGB", "½GB", "1GB;", "٣", "²", "1\n2",
    "9" * 5000, "9" * 400 + ".5", None, 1.5, True, b"512", [1],
]  # fmt: skip


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", NO_SIZES, ids=lambda text: repr(text)[:12])
def test_what_is_no_size_is_refused_with_what_is_allowed(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)max_size=.*not allowed; allowed:.*512MB"):
        parse_size(text, name="max_size")


#: The words of ages: "s", "m", "h", "d" and "w".
AGES = {"0s": 0, "5m": 300, "1.5h": 5400, "30d": 30 * 86400, " 2 W ": 14 * 86400, 0.5: 0.5}


@pytest.mark.parametrize(("text", "seconds"), AGES.items())
def test_ages(text: str | float, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "1y", "1,5h", "1" * 5000 + "d", -1, float("nan"), True])
def test_what_is_no_age_is_refused_by_name(text: str | float) -> None:
    with pytest.raises(ConfigError, match=r"^older_than=.*allowed: a number with a unit"):
        parse_age(text, name="older_than")


# -- where a value comes from --------------------------------------------------------------------

#: For every variable: a valid text with its value, and texts that are not allowed.
VALUES: dict[str, tuple[str, Any, list[str]]] = {
    "KCACHE_BACKEND": ("zstd", "zstd", [" "]),
    "KCACHE_DIR": ("/somewhere/kcache", "/somewhere/kcache", [" ", "a\0b", "~nobody-knows/kcache"]),
    "KCACHE_MAX_SIZE": ("2GiB", 2 << 30, ["0", "-1", "lots", "1.5"[:0] + "1XB"]),
    "KCACHE_MEMORY_SIZE": ("0", 0, ["-1", "lots"]),
    "KCACHE_READ_ONLY": ("yes", True, ["2", "maybe", "tru"]),
    "KCACHE_DISABLE": ("1", True, ["2", "never"]),
    "KCACHE_RECACHE": ("On", True, ["2", "again"]),
    "KCACHE_HEADER_CHECK": ("once", "once", ["never", "1"]),
    "KCACHE_RELOCATION": ("eager", "eager", ["never", "1"]),
    "KCACHE_WAIT": ("2.5", 2.5, ["-1", "nan", "inf", "1e9", "soon"]),
    "KCACHE_WORKERS": ("3", 3, ["-1", "1.5", "many", "99999"]),
    "KCACHE_ON_MISS": ("Error", "error", ["fail", "1"]),
    "KCACHE_COMPILE_TIMEOUT": ("90", 90.0, ["0", "-1", "nan", "inf", "soon"]),
    "KCACHE_SIGNING_KEY_FILE": ("/some/keys.pem", "/some/keys.pem", []),
    "KCACHE_REMOTE": (
        "redis://host?ro",
        parse_addresses("redis://host?ro", name="x"),
        ["host", "ftp://host", "redis://", "redis://host?rw=maybe", "file://relative"],
    ),
    "KCACHE_RECORD": ("/some/kernels.jsonl", "/some/kernels.jsonl", ["  "]),
    "KCACHE_LOG": ("Debug", "debug", ["loud", "7"]),
}
ARGUMENTS: dict[str, Any] = {
    "backend": "lmdb",
    "directory": "/argument",
    "max_size": 123,
    "memory_size": "1KB",
    "read_only": False,
    "disable": False,
    "recache": False,
    "header_check": "always",
    "relocation": "lazy",
    "wait": 7,
    "workers": 2,
    "compile_timeout": 60,
    "on_miss": "compile",
    "signing_key_file": "/argument.pem",
    "remote": "file:///opt/kernels",
    "record": "/argument.jsonl",
    "log": "error",
}


def test_the_tables_here_know_every_variable_and_setting() -> None:
    assert {variable.name for variable in VARIABLES} == set(VALUES)
    assert {variable.setting for variable in VARIABLES} == set(ARGUMENTS)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_argument_beats_environment_beats_default(variable: Any) -> None:
    text, value, _ = VALUES[variable.name]
    argument = ARGUMENTS[variable.setting]

    default = getattr(Config.load(environ={}), variable.setting)
    assert default == (variable.default, "default")
    from_environment = getattr(Config.load(environ={variable.name: text}), variable.setting)
    assert from_environment == (value, variable.name)
    assert from_environment.value != default.value
    given = Config.load({variable.setting: argument}, environ={variable.name: text})
    assert getattr(given, variable.setting).source == "argument"
    assert getattr(given, variable.setting).value != value


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, (_, _, bad) in VALUES.items() for text in bad]
)
def test_a_bad_value_names_the_variable_the_value_and_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(environ={name: text})
    message = str(caught.value)
    if name == "KCACHE_REMOTE":  # not its options and credentials
        assert name in message
    else:
        assert f"{name}={text!r}" in message
    assert "allowed:" in message


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("backend", 5), ("backend", ""), ("directory", 5), ("directory", b"/x"), ("directory", ""),
        ("max_size", 0), ("max_size", 1.5), ("max_size", True), ("memory_size", -1),
        ("read_only", "perhaps"), ("read_only", 2), ("header_check", 1), ("header_check", ""),
        ("disable", []), ("recache", "2"), ("log", 10),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named_with_what_is_allowed(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}=.*allowed:"):
        Config.load({setting: value}, environ={})


@pytest.mark.parametrize("name", VALUES)
def test_an_empty_variable_counts_as_unset(name: str) -> None:
    assert Config.load(environ={name: ""}) == Config.load(environ={})


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'colour'.*backend"):
        Config.load({"colour": "red"}, environ={})


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert Config.load(environ={"KCACHE_DIR": "~/kc"}).directory.value == "/home/me/kc"
    assert Config.load({"directory": Path("~/kc")}, environ={}).directory.value == "/home/me/kc"


COMPILES_TWICE = """
import kcache
entry = kcache.Entry({"a": b"x"})
for number in range(2):
    with kcache.KernelCache() as cache:
        cache.engine.put("0" * 64, entry)
        assert cache.engine.get("0" * 64) is not None
        print(cache.directory, cache.config.backend.value, cache.engine.max_size)
"""


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("KCACHE_MAX_SIZE", "5GiGs", "KCACHE_MAX_SIZE='5GiGs' is not allowed; allowed:"),
        ("KCACHE_BACKEND", "redis", "KCACHE_BACKEND='redis' is not known; allowed: file,"),
    ],
)
def test_what_the_environment_says_wrongly_is_one_warning(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    done = python(COMPILES_TWICE, environ={"KCACHE_DIR": str(tmp_path / "cache"), name: text})
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"kcache: warning: {said}")
    assert done.stderr.count("\n") == 1
    assert done.stdout.splitlines() == [f"{tmp_path / 'cache'} file {1 << 30}"] * 2


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
@pytest.mark.parametrize("place", ["writable", "file", "nobody"])
def test_a_directory_of_the_environment_that_is_unsafe_costs_the_disk_tier_alone(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "writable").mkdir()
    (tmp_path / "writable").chmod(0o777)
    text = "~nobody-knows/kcache" if place == "nobody" else str(tmp_path / place)
    done = python(COMPILES_TWICE, environ={"KCACHE_DIR": text})
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("kcache: warning: KCACHE_DIR")
    assert done.stderr.endswith(" caches in memory alone\n")
    assert done.stderr.count("\n") == 1
    assert done.stdout.splitlines() == [f"None file {1 << 30}"] * 2
    assert list((tmp_path / "writable").iterdir()) == []


def test_what_a_program_passes_wrongly_stays_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="max_size='5GiGs' is not allowed"):
        KernelCache(tmp_path / "cache", max_size="5GiGs")
    with pytest.raises(UnknownBackendError, match="backend='redis' is not known"):
        KernelCache(tmp_path / "cache", backend="redis")
    with pytest.raises(ConfigError, match="is a file"):
        KernelCache(tmp_path / "file")


def test_the_log_variable_writes_to_standard_error(tmp_path: Path) -> None:
    code = """
import os, sys, kcache
with kcache.KernelCache() as cache:
    os.makedirs(os.path.join(cache.directory, "file", "00", "0" * 64))
    cache.engine.get("0" * 64)
"""
    for level, expected in (("warning", True), ("error", False), (None, True)):
        place = tmp_path / str(level)
        done = python(code, environ={"KCACHE_DIR": str(place), "KCACHE_LOG": level})
        assert done.returncode == 0, done.stderr
        assert ("cache get failed" in done.stderr) is expected
