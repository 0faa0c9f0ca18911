"""Config: arguments override the environment and the defaults; errors name the allowed values."""

import json
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from core.helpers import fork, python, wait

from kcache import ConfigError, Entry, KernelCache, UnknownBackendError, environment, open_engine
from kcache.admin.info import Kinds, kinds_in_words
from kcache.cli.commands.cmd_config import save
from kcache.config import SAVED, VARIABLES, Config
from kcache.directory import CacheDirectory, open_directory
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
def test_an_invalid_size_is_refused_with_an_example(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"(?s)max_size: expected.*512MB"):
        parse_size(text, name="max_size")


def test_a_number_has_its_noun() -> None:
    with pytest.raises(ConfigError, match="expected at least 1 byte, as"):
        parse_size(0, least=1)
    assert (
        kinds_in_words(Kinds(1, 0, 1, 1))
        == "1 kernel, 0 manifests, 1 other, estimated from 1 entry"
    )


#: The words of ages: "s", "m", "h", "d" and "w".
AGES = {"0s": 0, "5m": 300, "1.5h": 5400, "30d": 30 * 86400, " 2 W ": 14 * 86400, 0.5: 0.5}


@pytest.mark.parametrize(("text", "seconds"), AGES.items())
def test_ages(text: str | float, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "1y", "1,5h", "1" * 5000 + "d", -1, float("nan"), True])
def test_an_invalid_age_is_refused_by_name(text: str | float) -> None:
    with pytest.raises(ConfigError, match=r"^older_than: expected a number with a unit"):
        parse_age(text, name="older_than")


# -- where a value comes from --------------------------------------------------------------------

#: For every variable: a valid text and its value, a different value for the argument, and texts
#: that are not allowed.
VALUES: dict[str, tuple[str, Any, Any, list[str]]] = {
    "KCACHE_BACKEND": ("zstd", "zstd", "lmdb", [" "]),
    "KCACHE_DIR": ("/some/cache", "/some/cache", "/argument", [" ", "a\0b", "~nobody-knows/kc"]),
    "KCACHE_MAX_SIZE": ("2GiB", 2 << 30, 123, ["0", "-1", "lots", "1XB"]),
    "KCACHE_MEMORY_SIZE": ("0", 0, "1KB", ["-1", "lots"]),
    "KCACHE_READ_ONLY": ("yes", True, False, ["2", "maybe", "tru"]),
    "KCACHE_DISABLE": ("1", True, False, ["2", "never"]),
    "KCACHE_RECACHE": ("On", True, False, ["2", "again"]),
    "KCACHE_HEADER_CHECK": ("once", "once", "always", ["never", "1"]),
    "KCACHE_RELOCATION": ("off", "off", "on", ["never", "lazy"]),
    "KCACHE_WAIT": ("2.5", 2.5, 7, ["-1", "nan", "inf", "1e9", "soon"]),
    "KCACHE_WORKERS": ("3", 3, 2, ["-1", "1.5", "many", "99999"]),
    "KCACHE_ON_MISS": ("Error", "error", "compile", ["fail", "1"]),
    "KCACHE_COMPILE_TIMEOUT": ("90", 90.0, 60, ["0", "-1", "nan", "inf", "soon"]),
    "KCACHE_SIGNING_KEY_FILE": ("/some/keys.pem", "/some/keys.pem", "/argument.pem", []),
    "KCACHE_REMOTE": (
        "redis://host?ro",
        parse_addresses("redis://host?ro", name="x"),
        "file:///opt/kernels",
        ["host", "ftp://host", "redis://", "redis://host?rw=maybe", "file://relative"],
    ),
    "KCACHE_RECORD": ("/some/list.jsonl", "/some/list.jsonl", "/argument.jsonl", ["  "]),
    "KCACHE_LOG": ("Debug", "debug", "error", ["loud", "7"]),
}


def test_the_table_here_knows_every_variable() -> None:
    assert {variable.name for variable in VARIABLES} == set(VALUES)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_argument_beats_environment_beats_default(variable: Any) -> None:
    text, value, argument, _ = VALUES[variable.name]
    default = getattr(Config.load(environ={}), variable.setting)
    assert default == (variable.default, "default")
    from_environment = getattr(Config.load(environ={variable.name: text}), variable.setting)
    assert from_environment == (value, variable.name)
    assert from_environment.value != default.value
    given = Config.load({variable.setting: argument}, environ={variable.name: text})
    assert getattr(given, variable.setting).source == "argument"
    assert getattr(given, variable.setting).value != value


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, (*_, bad) in VALUES.items() for text in bad]
)
def test_a_bad_value_names_the_variable_the_value_and_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(environ={name: text})
    message = str(caught.value)
    if name == "KCACHE_REMOTE":  # its options and credentials are not shown
        assert name in message
    else:
        assert f"{name}: " in message
        assert f"got {text!r}" in message
    assert "expected " in message or "it names no host" in message


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
    with pytest.raises(ConfigError, match=rf"{setting}: expected .*, got {re.escape(repr(value))}"):
        Config.load({setting: value}, environ={})


@pytest.mark.parametrize("name", VALUES)
def test_an_empty_variable_counts_as_unset(name: str) -> None:
    assert Config.load(environ={name: ""}) == Config.load(environ={})


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert Config.load(environ={"KCACHE_DIR": "~/kc"}).directory.value == "/home/me/kc"
    assert Config.load({"directory": Path("~/kc")}, environ={}).directory.value == "/home/me/kc"


OPENS_TWICE = """
import kcache
entry = kcache.Entry({"a": b"x"})
for number in range(2):
    with kcache.KernelCache() as cache:
        cache.engine.put("0" * 64, entry)
        assert cache.engine.get("0" * 64) is not None
        print(cache.directory, cache.config.backend.value, cache.engine.max_size)
"""


def one_warning(directory: str, said: str, **environ: str) -> list[str]:
    """Open a cache twice in a new process; assert that it warns once, and return its output."""
    done = python(OPENS_TWICE, environ={"KCACHE_DIR": directory, **environ})
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"kcache: warning: {said}")
    assert done.stderr.count("\n") == 1
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("KCACHE_MAX_SIZE", "5GiGs", "KCACHE_MAX_SIZE: expected"),
        ("KCACHE_BACKEND", "redis", "KCACHE_BACKEND: expected one of file,"),
    ],
)
def test_bad_variables_warn_once(name: str, text: str, said: str, tmp_path: Path) -> None:
    place = str(tmp_path / "cache")
    assert one_warning(place, said, **{name: text}) == [f"{place} file {1 << 30}"] * 2


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
@pytest.mark.parametrize("place", ["writable", "file", "~nobody-knows/kcache"])
def test_an_unsafe_kcache_dir(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("writable").mkdir()
    Path("writable").chmod(0o777)
    assert one_warning(place, "KCACHE_DIR") == [f"None file {1 << 30}"] * 2
    assert os.listdir("writable") == []


def test_invalid_arguments_raise(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="max_size: expected .*, got '5GiGs'"):
        KernelCache(tmp_path / "cache", max_size="5GiGs")
    with pytest.raises(UnknownBackendError, match="backend: expected .*, got 'redis'"):
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
        assert ("cache operation get failed" in done.stderr) is expected


def test_variables_that_another_thread_changes() -> None:
    """A compile can copy the environment while another thread changes variables."""
    done, interval = threading.Event(), sys.getswitchinterval()

    def change() -> None:
        while not done.is_set():
            os.environ["AWS_CHANGED"] = "1"
            del os.environ["AWS_CHANGED"]

    with ThreadPoolExecutor(1) as pool:
        sys.setswitchinterval(1e-5)
        try:
            changing = pool.submit(change)
            for _ in range(3000):
                environment.variables()
                environment.remote_variables()
        finally:
            sys.setswitchinterval(interval)
            done.set()
        changing.result()


# -- settings that are saved in a directory --------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> CacheDirectory:
    """A cache's directory without saved settings."""
    return open_directory(str(tmp_path / "cache"))


def saved(files: CacheDirectory) -> dict[str, object]:
    """Return the settings in the directory's `kcache.json`."""
    return dict(json.loads(Path(files.marker).read_text())["settings"])


def write(files: CacheDirectory, settings: object) -> None:
    """Write settings into the directory's `kcache.json`, as a user with an editor would."""
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
    text, value, other, _ = VALUES[variable.name]
    save(files.path, {name: text})
    assert found() == (value, "kcache.json")
    monkeypatch.setenv(variable.name, str(other))
    assert found() == (variable.parse(str(other), name=name), variable.name)
    assert found(**{name: value}) == (value, "argument")
    monkeypatch.delenv(variable.name)
    save(files.path, {}, [name])
    assert found() == (variable.default, "default")
    assert saved(files) == {}


# -- invalid settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_size": "lots"}, "max_size: expected"),
        ({"max_size": [5]}, "max_size: expected"),
        ({"colour": "red"}, "setting 'colour' can't be saved; expected one of backend,"),
        ({"disable": "1"}, "setting 'disable' can't be saved"),
        ({"backend": "redis"}, "backend: expected one of file,"),
    ],
)
def test_bad_saved_settings(settings: dict[str, object], said: str, files: CacheDirectory) -> None:
    write(files, settings)
    told = one_warning(files.path, f"{files.marker}: {said}")
    assert told == [f"{files.path} file {1 << 30}"] * 2
    assert saved(files) == settings
    save(files.path, {"wait": "3"}, settings)
    assert saved(files) == {"wait": "3"}


def test_settings_of_another_version_are_preserved(files: CacheDirectory) -> None:
    write(files, {"colour": "red"})
    (warning,) = save(files.path, {"wait": "3"})
    assert "'colour' can't be saved" in warning
    assert saved(files) == {"colour": "red", "wait": "3"}


def test_processes_that_save_at_the_same_time_lose_nothing(files: CacheDirectory) -> None:
    def work(name: str) -> None:
        for number in range(25):
            save(files.path, {name: str(number + 1)})
            save(files.path, {}, [name])
        save(files.path, {name: "77"})

    names = ("memory_size", "wait", "workers")
    children = [fork(lambda name=name: work(name)) for name in names]
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not all(os.waitid(os.P_PID, child, ended) for child in children):
        open_directory(files.path)  # raises if the file is half written
    assert [wait(child) for child in children] == [0] * len(names)
    assert saved(files) == dict.fromkeys(names, "77")
    assert [name for name in os.listdir(files.path) if name.startswith(".")] == []


def test_a_misspelt_variable_is_one_warning_with_the_name_that_was_meant(tmp_path: Path) -> None:
    code = "import sys, kcache\nfor _ in range(2): kcache.KernelCache(sys.argv[1]).close()"
    wrong = {"KCACHE_MAXSIZE": "5GiB", "KCACHE_COLOUR": "red", "KCACHE_REMOTE_TOKEN": "secret"}
    done = python(code, tmp_path, environ=wrong)
    said = "kcache has no setting KCACHE_MAXSIZE (did you mean 'KCACHE_MAX_SIZE'?)"
    assert done.stderr == f"kcache: warning: {said}\n"


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
def test_an_empty_backend_next_to_another_one_is_one_warning(files: CacheDirectory) -> None:
    with open_engine(files.path, backend="zstd") as engine:
        engine.put("0" * 64, Entry({"a": b"b"}))
    done = python(MISSES, files.path)
    assert (done.returncode, done.stdout.split()) == (0, ["file"] * 2)  # no other backend is opened
    assert "the backend file (the default) is empty, and there is a folder of zstd. To" in (
        done.stderr
    )
    assert done.stderr.count("\n") == 1
    done = python(MISSES, files.path, environ={"KCACHE_BACKEND": "zstd"})
    assert (done.returncode, done.stderr) == (0, "")
