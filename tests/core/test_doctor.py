"""The diagnosis: every finding from facts made up for it, and the facts of real directories."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from core.helpers import key, look, path_of

import kcache
from kcache.admin.doctor import LEAST_VERSIONS, LEVELS, OK, PROBLEM, WARNING, Finding, diagnose
from kcache.admin.machine_facts import (
    CacheLocation,
    Compiler,
    Contents,
    Facts,
    driver_version,
    gather,
)
from kcache.config import Config, Setting
from kcache.engine.stats import Stats
from kcache.util.marker import mark
from kcache.util.mounts import FileSystem, file_system

GIB = 1 << 30
LOCATION = CacheLocation(
    path="/home/me/.cache/kcache",
    source="default",
    exists=True,
    is_directory=True,
    owner=1000,
    mode=0o700,
    obstacle="",
    refused="",
    system=FileSystem("ext4", "/home"),
    free=50 * GIB,
    total=100 * GIB,
)
CONTENTS = Contents(size=1000, sampled=3, stats=Stats(hits=3, misses=1))
COMPILER = Compiler(
    bindings=True, path="/lib/libnvrtc.so.13", builtins=True, version=(13, 0), error=""
)
WELL = Facts(
    python=(3, 12, 1),
    libraries={"lmdb": "3.0.0", "platformdirs": "4.5", "xxhash": "3.4.1", "zstandard": "0.25.0"},
    broken={},
    bad_settings=(),
    config=Config.load(environ={}),
    user=1000,
    location=LOCATION,
    homeless=False,
    backends=("file", "lmdb", "zstd", "zstd+lmdb"),
    contents=CONTENTS,
    compiler=COMPILER,
    driver=(13, 1),
    recording_problem="",
)


def with_(facts: Facts = WELL, **changes: Any) -> Facts:
    """Returns facts with something else; `location_mode=0` changes the field `mode` of `location`."""
    for name, value in list(changes.items()):
        part, _, field = name.partition("_")
        if part in ("location", "contents", "compiler") and field:
            old = changes.get(part, getattr(facts, part))
            changes[part] = dataclasses.replace(old, **{field: value})
            del changes[name]
    return dataclasses.replace(facts, **changes)


def configured(**settings: object) -> Config:
    """Returns settings that come from variables."""
    values = {n: Setting(v, f"KCACHE_{n.upper()}") for n, v in settings.items()}
    return Config.load(environ={}).replace(**values)


def bad(facts: Facts) -> list[Finding]:
    return [finding for finding in diagnose(facts) if finding.level != OK]


def test_where_all_is_well_every_finding_is_ok() -> None:
    findings = diagnose(WELL)
    assert {finding.level for finding in findings} == {OK}
    topics = [finding.topic for finding in findings]
    assert topics == [
        *("python", "libraries", "backend", "directory", "file system", "room", "entries"),
        *("statistics", "nvrtc", "driver"),
    ]
    assert not any(finding.do for finding in findings)


NFS = FileSystem("nfs4", "/home")

#: The fault -> the level and the text of the finding, and its advice.
CASES: dict[str, tuple[Facts, str, str, str]] = {
    "old python": (with_(python=(3, 10, 0)), PROBLEM, "Python 3.10.0 is too old", "3.11"),
    "old library": (
        with_(libraries={"lmdb": "2.9"}),
        PROBLEM,
        "lmdb 2.9 is too old",
        "pip install 'lmdb>=3.0'",
    ),
    "no xxhash": (
        with_(broken={"xxhash": "ImportError: no"}, contents=Contents(error="xxhash")),
        PROBLEM,
        r"xxhash can't be imported \(ImportError: no\)",
        "pip install --force-reinstall xxhash",
    ),
    "bad setting": (
        with_(bad_settings=("KCACHE_MAX_SIZE='x' is not allowed",)),
        PROBLEM,
        "KCACHE_MAX_SIZE='x'",
        "Correct the variable",
    ),
    "disabled": (
        with_(config=configured(disable=True)),
        WARNING,
        "KCACHE_DISABLE is set: nothing is cached",
        "Unset KCACHE_DISABLE",
    ),
    "read only": (with_(config=configured(read_only=True)), WARNING, "READ_ONLY is set", "Unset"),
    "recached": (with_(config=configured(recache=True)), WARNING, "RECACHE is set", "Unset"),
    "unknown backend": (
        with_(config=configured(backend="redis"), contents=Contents(error="not known")),
        PROBLEM,
        "there is no backend 'redis'",
        "Set KCACHE_BACKEND to one of these: file, lmdb",
    ),
    "unwritable": (
        with_(location_obstacle="Permission denied"),
        PROBLEM,
        "can't be written to: Permission denied",
        "KCACHE_DIR",
    ),
    "can't be made": (
        with_(
            location_exists=False,
            location_obstacle="Permission denied",
            location_owner=0,
            contents=None,
        ),
        PROBLEM,
        "can't be made: Permission denied",
        "KCACHE_DIR",
    ),
    "unwritable, but only read": (
        with_(config=configured(read_only=True), location_obstacle="Read-only file system"),
        WARNING,
        "can't be written to: Read-only",
        "",
    ),
    "somebody else's": (
        with_(location_owner=0),
        PROBLEM,
        "belongs to user 0, and you are user 1000",
        "directory of your own",
    ),
    "writable by others": (
        with_(location_mode=0o770),
        PROBLEM,
        r"can be written to by others \(mode 0770\)",
        "chmod go-w /home/me",
    ),
    "a file": (
        with_(location_is_directory=False, contents=None),
        PROBLEM,
        "is a file",
        "Remove it",
    ),
    "a file above": (
        with_(location_is_directory=False, location_exists=False, contents=None),
        PROBLEM,
        "a part of .* is a file",
        "Remove it",
    ),
    "no home": (with_(homeless=True), WARNING, "there is no home directory", "Set KCACHE_DIR"),
    "lmdb on nfs": (
        with_(
            location_system=NFS,
            config=configured(backend="lmdb"),
            contents=Contents(error="on a network file system"),
        ),
        PROBLEM,
        r"network file system \(nfs4 at /home\), where LMDB does not work",
        "KCACHE_BACKEND=file",
    ),
    "zstd over lmdb on nfs": (
        with_(
            location_system=NFS,
            config=configured(backend="zstd+lmdb"),
            contents=Contents(error="x"),
        ),
        PROBLEM,
        "where LMDB does not work",
        "KCACHE_BACKEND=zstd,",
    ),
    "file on nfs": (with_(location_system=NFS), WARNING, "network file system", "local directory"),
    "full disk": (with_(location_free=1 << 20), WARNING, "almost full: 1.0 MiB free", "Free space"),
    "cap too large": (
        with_(location_free=GIB // 2),
        WARNING,
        r"the cap, 1\.0 GiB, is more than the disk has room for \(512\.0 MiB free\)",
        "KCACHE_MAX_SIZE",
    ),
    "backend fails": (
        with_(contents=Contents(error="list: Input/output error", stats=Stats())),
        PROBLEM,
        "can't be used: list: Input/output error",
        "verify --repair",
    ),
    "damaged": (
        with_(contents_damaged=2),
        PROBLEM,
        "2 damaged and 0 unreadable",
        "verify --repair",
    ),
    "unreadable": (with_(contents_unreadable=1), PROBLEM, "1 unreadable", "verify --repair"),
    "damage counted": (with_(contents_stats=Stats(corrupt=4)), WARNING, "damaged.*: 4", "verify"),
    "errors counted": (with_(contents_stats=Stats(errors=5)), WARNING, "failed.*: 5", "LOG=info"),
    "no statistics": (
        with_(contents_stats=None, contents_stats_error="statistics in x: no"),
        WARNING,
        "statistics in x: no",
        "Remove that file",
    ),
    "no nvrtc": (
        with_(compiler=Compiler(True, "", False, None, "can't be loaded")),
        PROBLEM,
        "NVRTC, the compiler, is not installed",
        r"pip install '.*\[cu13\]' \(CUDA 12: cu12\)",
    ),
    "broken nvrtc": (
        with_(compiler_version=None, compiler_error="can't be loaded: x"),
        PROBLEM,
        "can't be loaded: x",
        r"\[cu13\]'",
    ),
    "no builtins": (
        with_(compiler_builtins=False),
        PROBLEM,
        "builtins library is missing beside /lib/libnvrtc.so.13",
        "again",
    ),
    "no driver": (with_(driver=None), WARNING, "no NVIDIA driver: compiling works", "arch|GPU"),
    "old driver": (
        with_(driver=(12, 4)),
        PROBLEM,
        r"older than the toolkit: the driver supports CUDA 12\.4, and NVRTC is of CUDA 13\.0",
        r"Update the driver, or take its NVRTC: pip install '.*\[cu12\]'",
    ),
    "older driver": (
        with_(driver=(13, 0), compiler_version=(13, 2)),
        WARNING,
        "older than the toolkit.*PTX may not load",
        "Update the driver",
    ),
    "no record": (
        with_(recording_problem="no interpreter"),
        WARNING,
        "that include headers are compiled and not cached: no interpreter",
        "recorded on Linux, x86-64 and AArch64",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named_once_with_what_to_do(case: str) -> None:
    facts, level, what, do = CASES[case]
    found = [finding for finding in bad(facts) if re.search(what, finding.what)]
    assert len(found) == 1, bad(facts)
    assert found[0].level == level
    assert re.search(do, found[0].do)
    others = [finding for finding in bad(facts) if finding != found[0]]
    if case != "unwritable, but only read":
        assert others == []


@pytest.mark.parametrize("case", CASES)
def test_findings_are_one_line_of_a_known_level(case: str) -> None:
    for finding in diagnose(CASES[case][0]):
        assert finding.level in LEVELS
        assert "\n" not in finding.what + finding.do
        assert finding.what


def test_what_is_not_known_yields_nothing() -> None:
    unknown = with_(location=None, contents=None, compiler_version=None, user=None)
    topics = {finding.topic for finding in diagnose(unknown)}
    assert not topics & {"directory", "file system", "room", "entries", "statistics"}
    assert bad(with_(driver=(11, 0), compiler_version=None)) == []
    assert (
        bad(with_(location_exists=False, contents=None, location_owner=0, location_mode=0o777))
        == []
    )
    assert bad(with_(user=None, location_owner=5, location_mode=0o777)) == []
    assert (
        bad(with_(libraries={"lmdb": "of unknown version", "xxhash": "3.5rc1", "zstandard": "1"}))
        == []
    )


def test_the_least_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    everywhere = [each for each in project["project"]["dependencies"] if ";" not in each]
    found = dict(re.findall(r"(\w+)>=([\d.]+)", " ".join(everywhere)))
    found["python"] = project["project"]["requires-python"].removeprefix(">=")
    assert {name: tuple(map(int, v.split("."))) for name, v in found.items()} == LEAST_VERSIONS


# -- gathering -------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_gathering_makes_and_changes_nothing(place: Path) -> None:
    facts = gather()
    assert facts.location is not None
    assert (facts.location.path, facts.location.exists, facts.contents) == (str(place), False, None)
    assert facts.location.source == "KCACHE_DIR"
    assert not place.exists()
    with kcache.open_engine(place) as engine:
        engine.put(key(1), kcache.Entry({"a": b"x"}))
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    facts = gather()
    assert facts.contents is not None
    assert (facts.contents.sampled, facts.contents.damaged) == (1, 0)
    assert before == {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    assert facts.location is not None
    assert facts.location.obstacle == ""


def test_the_facts_of_a_directory(place: Path) -> None:
    place.mkdir(mode=0o750)
    facts = gather(system=lambda path: FileSystem("xfs", path))
    assert facts.location is not None
    assert facts.location.mode == 0o750
    assert facts.location.owner == os.geteuid() == facts.user
    assert facts.location.system == ("xfs", str(place))
    assert 0 < facts.location.free <= facts.location.total
    assert [f for f in bad(facts) if f.topic == "directory"] == []
    place.chmod(0o777)
    (finding,) = [f for f in bad(gather()) if f.topic == "directory"]
    assert "mode 0777" in finding.what


def test_a_file_in_the_place_of_the_directory(place: Path) -> None:
    place.write_text("")
    (finding,) = [f for f in bad(gather()) if f.topic == "directory"]
    assert finding.what == f"{place} is a file"
    (finding,) = [f for f in bad(gather(str(place / "below"))) if f.topic == "directory"]
    assert finding.what == f"a part of {place}/below is a file"


@pytest.mark.parametrize("backend", ["lmdb", "zstd+lmdb"])
def test_lmdb_on_a_simulated_network_file_system(
    backend: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_BACKEND", backend)
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"40 22 0:35 / {tmp_path} rw,relatime shared:9 - nfs4 server:/home rw,vers=4.2\n"
    )
    facts = gather(system=lambda path: file_system(path, mounts=str(table)))
    (finding,) = [f for f in bad(facts) if f.topic == "file system"]
    assert finding.level == PROBLEM
    assert f"nfs4 at {tmp_path}" in finding.what


def test_damaged_entries_are_found_in_a_bounded_sample(place: Path) -> None:
    with kcache.open_engine(place) as engine:
        for n in range(1100):
            engine.put(key(n), kcache.Entry({"a": b"x"}))
    for name in look(place / "file").entries:
        path_of(place / "file", name).write_bytes(b"damaged")
    facts = gather()
    assert facts.contents is not None
    assert facts.contents.sampled == facts.contents.damaged == 1000
    (finding,) = [f for f in bad(facts) if f.topic == "entries"]
    assert finding.level == PROBLEM


def test_every_bad_variable_is_a_finding(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCACHE_MAX_SIZE", "lots")
    monkeypatch.setenv("KCACHE_READ_ONLY", "perhaps")
    monkeypatch.setenv("KCACHE_LOG", "loud")
    facts = gather()
    assert [sentence.partition("=")[0] for sentence in facts.bad_settings] == [
        "KCACHE_MAX_SIZE",
        "KCACHE_READ_ONLY",
        "KCACHE_LOG",
    ]
    assert facts.location is not None
    assert facts.location.path == str(place)
    monkeypatch.setenv("KCACHE_DIR", "  ")
    facts = gather()
    assert len(facts.bad_settings) == 4
    assert facts.location is None
    named = gather(str(place))
    assert named.location is not None
    assert (named.location.path, len(named.bad_settings)) == (str(place), 3)


def test_a_directory_of_somebody_else_is_a_problem(place: Path) -> None:
    """It was called sound, and entries and statistics were read in it."""
    place.mkdir(mode=0o700)
    (place / "thesis.tex").write_text("precious")
    facts = gather()
    (finding,) = [f for f in bad(facts) if f.topic == "directory"]
    assert finding.level == PROBLEM
    assert "it has 'thesis.tex' in it" in finding.what
    assert "KCACHE_DIR" in finding.do
    assert facts.contents is None


def test_an_unreadable_statistics_file(place: Path) -> None:
    place.mkdir(mode=0o700)
    mark(str(place))
    (place / "stats").mkdir()
    facts = gather()
    assert facts.contents is not None
    assert facts.contents.stats is None
    (finding,) = [f for f in bad(facts) if f.topic == "statistics"]
    assert str(place / "stats") in finding.what


def test_without_a_home_the_fallback_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *a, **k: "~/.cache/kcache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (finding,) = [f for f in bad(gather()) if f.topic == "directory"]
    assert finding.level == WARNING
    assert str(tmp_path) in finding.what


@pytest.mark.usefixtures("nvrtc")
def test_without_an_interpreter_nothing_is_recorded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/usr/sbin/uwsgi")
    (finding,) = [f for f in bad(gather()) if f.topic == "recording"]
    assert "compiled and not cached" in finding.what
    assert "uwsgi" in finding.what


@pytest.mark.usefixtures("nvrtc")
def test_the_compiler_that_is_installed(place: Path) -> None:
    compiler = gather().compiler
    assert compiler.bindings
    assert compiler.builtins
    assert compiler.error == ""
    assert compiler.version is not None
    assert compiler.version >= (12, 0)
    assert Path(compiler.path).is_file()


@pytest.mark.parametrize("driver", [None, (1, 0), (99, 0)])
def test_the_driver_is_asked_once(driver: tuple[int, int] | None, place: Path) -> None:
    calls: list[int] = []

    def ask() -> tuple[int, int] | None:
        calls.append(1)
        return driver

    assert gather(driver=ask).driver == driver
    assert calls == [1]


def test_the_drivers_version_is_a_version_or_none() -> None:
    found = driver_version()
    assert found is None or (found[0] >= 11 and 0 <= found[1] < 10)


def test_a_backend_that_can_not_be_opened_is_a_finding(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_BACKEND", "lmdb")
    place.mkdir(mode=0o700)
    mark(str(place))
    (place / "lmdb" / "db" / "data.mdb").mkdir(parents=True)
    (finding,) = [f for f in bad(gather()) if f.topic == "entries"]
    assert finding.level == PROBLEM
    assert finding.what.startswith("the backend can't be used: ")
    monkeypatch.setenv("KCACHE_BACKEND", "nothing")
    (finding,) = [f for f in bad(gather()) if f.topic in ("backend", "entries")]
    assert "there is no backend 'nothing'" in finding.what
