"""`kcache doctor`, on installations that are really broken."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.helpers import as_nobody, can_become_nobody, damage, fill, kernel, rows
from core.helpers import NOBODY, key, nobodys_directory, python

import kcache
from kcache.doctor import OK, PROBLEM, WARNING
from kcache.doctor.local_checks import diagnose
from kcache.util.mounts import FileSystem

pytestmark = pytest.mark.usefixtures("nvrtc")


def problems(text: str) -> list[dict[str, object]]:
    """Return the findings that are problems."""
    found = rows(text)
    assert all(set(row) == {"level", "topic", "what", "do"} for row in found)
    return [row for row in found if row["level"] == "problem"]


def of_the_place(text: str) -> list[dict[str, object]]:
    """Return the problems, except those with NVRTC, which `NOBODY` may not be able to read."""
    return [row for row in problems(text) if row["topic"] != "nvrtc"]


def test_a_sound_machine(cache_directory: Path, here: Callable, backend: str) -> None:
    fill(cache_directory, {key(1): kernel()}, backend)
    out = here("doctor").clean()
    *lines, empty, last = out.splitlines()
    assert empty == ""
    assert last.startswith("0 problems, ")
    assert f"{backend} (available: " in out
    assert f"{cache_directory} (KCACHE_DIR)" in out
    assert "1 read, none is damaged" in out
    assert "NVRTC 1" in out
    assert all(line.startswith(("ok  ", "warning  ", "    ")) for line in lines)
    assert problems(here("doctor", "--json").out) == []


@pytest.mark.skipif(not can_become_nobody(), reason="only root can become another user")
def test_directories_without_rights(here: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    with nobodys_directory() as directory:
        monkeypatch.setenv("KCACHE_DIR", str(directory))
        said = here("doctor", "--json")
        assert said.code == 1
        (problem,) = problems(said.out)
        assert f"belongs to user {NOBODY}, and you are user 0" in str(problem["what"])

        directory.chmod(0o500)
        code, out, err = as_nobody("doctor", "--json")
        assert (code, err) == (1, "")
        (problem,) = of_the_place(out)
        assert problem["what"] == f"{directory} can't be written to"

        directory.chmod(0o700)
        _, out, _ = as_nobody("doctor", "--json")
        assert of_the_place(out) == []

        code, out, _ = as_nobody("doctor", "--json", "--directory", directory.parent / "new")
        (problem,) = of_the_place(out)
        assert str(problem["what"]).endswith("new can't be made")


def test_damaged_entries(cache_directory: Path, here: Callable, backend: str) -> None:
    fill(cache_directory, {key(1): kernel(), key(2): kernel()}, backend)
    damage(cache_directory, key(1), backend)
    said = here("doctor")
    assert said.code == 1
    assert "1 damaged and 0 unreadable entries among the 2 that were read" in said.out
    assert "-> Run kcache verify --repair" in said.out
    assert "1 problem, " in said.out


def test_bad_variables_are_findings(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {key(1): kernel()})
    said = here("doctor", "--json", KCACHE_MAX_SIZE="lots", KCACHE_BACKEND="floppy")
    assert (said.code, said.err) == (1, "")
    found = [str(problem["what"]) for problem in problems(said.out)]
    assert [each.partition(" ")[0] for each in found] == ["KCACHE_BACKEND:", "KCACHE_MAX_SIZE:"]


def test_disabling_variables_are_warnings(cache_directory: Path, here: Callable) -> None:
    fill(cache_directory, {key(1): kernel()})
    said = here("doctor", KCACHE_DISABLE="1", KCACHE_READ_ONLY="1", KCACHE_RECACHE="1")
    assert said.code == 0
    for name in ("DISABLE", "READ_ONLY", "RECACHE"):
        assert f"warning  settings         KCACHE_{name} is set: " in said.out
    assert "1 read, none is damaged" in said.out


def test_doctor_reports_an_unusable_directory(cache_directory: Path, here: Callable) -> None:
    cache_directory.mkdir(mode=0o700)
    (cache_directory / "thesis.tex").write_text("precious")
    said = here("doctor", "--json")
    (problem,) = problems(said.out)
    assert "it contains 'thesis.tex'" in str(problem["what"])
    assert not any(row["topic"] in ("entries", "directory") for row in rows(said.out))
    assert [path.name for path in cache_directory.iterdir()] == ["thesis.tex"]


def test_a_backend_that_can_not_be_opened(
    cache_directory: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache_directory, {key(1): kernel()})
    monkeypatch.setenv("KCACHE_BACKEND", "lmdb")
    (cache_directory / "lmdb" / "db" / "data.mdb").mkdir(parents=True)
    (problem,) = problems(here("doctor", "--json").out)
    assert "data.mdb" in str(problem["what"])


def test_nothing_is_changed_and_a_sample_is_read(cache_directory: Path) -> None:
    with kcache.open_engine(cache_directory) as engine:
        for n in range(1001):
            engine.put(key(n), kcache.Entry({"a": b"x"}))
    before = {path: path.stat().st_mtime_ns for path in cache_directory.rglob("*")}
    (found,) = [each for each in diagnose(str(cache_directory)) if each.topic == "entries"]
    assert (found.level, found.what) == (OK, "1000 read, none is damaged")
    assert before == {path: path.stat().st_mtime_ns for path in cache_directory.rglob("*")}


def test_a_network_file_system_is_a_warning(cache_directory: Path) -> None:
    def nfs(path: str) -> FileSystem:
        return FileSystem("nfs4", path)

    (found,) = [each for each in diagnose(system=nfs) if each.topic == "file system"]
    assert found.level == WARNING
    assert f"(nfs4 at {cache_directory.parent})" in found.what


def test_little_room(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    for free, what in ((1 << 20, "almost full (1.0 MiB free)"), (1 << 29, "the cap, 1.0 GiB, is")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        (found,) = [each for each in diagnose() if each.topic == "room"]
        assert found.level == WARNING
        assert what in found.what


@pytest.mark.parametrize(
    ("version", "level", "what"),
    [
        (None, WARNING, "there is no NVIDIA driver: compiling works"),
        ((11, 8), PROBLEM, "the driver is older than the toolkit: the driver supports CUDA 11.8"),
        ((99, 0), OK, "the driver supports CUDA 99.0"),
    ],
)
def test_the_driver(version: tuple[int, int] | None, level: str, what: str) -> None:
    (found,) = [each for each in diagnose(driver=lambda: version) if each.topic == "driver"]
    assert found.level == level
    assert found.what.startswith(what)


def test_variables_that_kcache_does_not_read_are_findings(here: Callable) -> None:
    # `kcache run` sets the last of these variables.
    wrong = {"KCACHE_MAXSIZE": "5GiB", "KCACHE_COLOUR": "red", "KCACHE_DROPIN_SOCKET": "/nowhere"}
    said = here("doctor", "--json", **wrong)
    assert said.code == 1
    found = {problem["what"]: problem["do"] for problem in problems(said.out)}
    assert "kcache has no setting KCACHE_MAXSIZE (did you mean 'KCACHE_MAX_SIZE'?)" in found
    assert "Unset it" in str(found["kcache has no setting KCACHE_COLOUR"])
    assert not any("DROPIN" in str(what) for what in found)


BROKEN = """
import sys
{break_it}
from kcache.cli.app import app
sys.exit(app.run(["doctor", "--json"]))
"""


def broken(break_it: str) -> list[dict[str, object]]:
    """Return the findings of `kcache doctor` after running `break_it` in its process."""
    done = python(BROKEN.format(break_it=break_it))
    assert done.stderr == ""
    return rows(done.stdout)


@pytest.mark.usefixtures("cache_directory")
@pytest.mark.parametrize("name", ["xxhash", "lmdb"])
def test_a_missing_library_is_named(name: str) -> None:
    (problem,) = [row for row in broken(f"sys.modules[{name!r}] = None") if row["level"] == PROBLEM]
    assert f"{name} can't be imported" in str(problem["what"])


@pytest.mark.usefixtures("cache_directory")
@pytest.mark.parametrize("there", [False, True])
def test_a_compiler_that_can_not_be_used(there: bool, tmp_path: Path) -> None:
    """If NVRTC is missing or its file is broken, doctor reports a problem and what to install."""
    path = tmp_path / "libnvrtc.so.13"
    path.write_bytes(b"no library")
    library = f"l.at({str(path)!r})" if there else "None"
    told = broken(f"import kcache.nvrtc.library as l; l.find = lambda: {library}")
    (problem,) = [row for row in told if row["level"] == PROBLEM]
    assert str(problem["what"]).startswith("NVRTC, the compiler, can't be used: ")
    assert "[cu13]'" in str(problem["do"])


@pytest.mark.usefixtures("cache_directory")
def test_without_an_interpreter_nothing_is_recorded() -> None:
    told = broken("sys.executable = '/usr/sbin/uwsgi'")
    (found,) = [row for row in told if row["topic"] == "recording"]
    assert found["level"] == WARNING
    assert "are not cached" in str(found["what"])
    assert "uwsgi" in str(found["what"])
