"""`kcache why`: causes every kind of miss for real, and checks the explanation."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.helpers import damage, recency
from core.helpers import key, output_of, snapshot

import kcache
from kcache.directory import open_directory
from kcache.engine.journal import Journal

pytestmark = pytest.mark.usefixtures("nvrtc")

PLAIN = "template <typename T> __global__ void k(T* x) { x[0] += 1; }\n"
#: A source that includes a.h, which is not beside the source, and looks for the absent extra.h.
HEADERS = """#include "a.h"
#if __has_include(<extra.h>)
#define SCALE 2
#endif
__global__ void k(float* x) { x[0] *= SCALE; }
"""
PATHS = ("-I", "one", "-I", "two")

Why = Callable[..., "Told"]
Compile = Callable[..., None]


class Told:
    """The output of `kcache why --json`."""

    def __init__(self, text: str) -> None:
        self.all: dict[str, Any] = json.loads(text)
        self.hit: bool = self.all["cached"]
        self.causes: list[dict[str, Any]] = self.all["causes"]
        self.kinds = [cause["cause"] for cause in self.causes]

    def the(self, kind: str) -> dict[str, Any]:
        assert self.kinds == [kind], self.all["why"]
        return self.causes[0]


@pytest.fixture
def line() -> Callable[..., tuple[str, ...]]:
    """A function that returns a command's arguments, by default for k.cu and sm_90."""

    def line(command: str, *more: str | Path, source: str = "k.cu") -> tuple[str, ...]:
        arch = () if "--arch" in more else ("--arch", "sm_90")
        return (command, source, *arch, "-o", "k.cubin", *map(str, more))

    return line


@pytest.fixture
def compile_(here: Callable, work: Path, line: Callable) -> Compile:
    def compile_(*arguments: str | Path, **more: str) -> None:
        said = here(*line("compile", *arguments, **more))
        assert said.code == 0, said.err

    (work / "k.cu").write_text(PLAIN)
    return compile_


@pytest.fixture
def why(here: Callable, work: Path, line: Callable) -> Why:
    """A function that runs `kcache why` for the arguments of `line`."""

    def why(*arguments: str | Path, **more: str) -> Told:
        out = here(*line("why", *arguments, **more), "--json").clean()
        return Told(out)

    return why


@pytest.fixture
def headers(compile_: Compile, work: Path) -> Path:
    """A source that was compiled with a header in the second of two include directories."""
    for name in ("one", "two"):
        (work / name).mkdir()
    (work / "two" / "a.h").write_text("#define SCALE 3\n")
    (work / "k.cu").write_text(HEADERS)
    compile_(*PATHS)
    return work


# -- differences between requests ------------------------------------------------------------------


def test_the_source_changed(compile_: Compile, why: Why, work: Path) -> None:
    compile_()
    cached = why().all["key"]
    (work / "k.cu").write_text(PLAIN + "// more\n")
    told = why()
    assert "text changed" in told.the("source")["what"]
    assert (told.all["nearest"]["key"], told.all["nearest"]["source_name"]) == (cached, "k.cu")
    assert told.all["nearest"]["created"] > 1.7e9


@pytest.mark.parametrize(
    ("before", "after", "kind", "what"),
    [
        ("", "--fast-math", "option", "the option --use_fast_math was added"),
        ("--std c++17", "--std c++20", "option", "--std changed from c++17 to c++20"),
        (
            "--option=-ftz=true --option=-fmad=true",
            "--option=-fmad=true --option=-ftz=true",
            "option",
            "the options are in another order",
        ),
        ("-D N", "-D N=2", "define", "the macro N changed from no value to 2"),
        ("-D N", "", "define", "the macro N was removed"),
        ("-I .", "-I . -I ..", "include_path", "(-I) changed from 1 to 2"),
        (
            "--name k<float> --name k<int>",
            "--name k<int> --name k<float>",
            "names",
            "the name expressions are in another order",
        ),
        ("--arch sm_80", "--arch sm_90a", "arch", "changed from sm_80 to sm_90a"),
    ],
)
def test_an_option_changed(
    before: str, after: str, kind: str, what: str, compile_: Compile, why: Why
) -> None:
    compile_(*before.split())
    assert what in why(*after.split()).the(kind)["what"]
    assert why(*before.split()).hit


#: Runs `kcache why` with the library in its first argument as NVRTC.
ANOTHER_COMPILER = """
import sys
import kcache.nvrtc.library as library
library._WHEELS = ()
path = sys.argv.pop(1)
library._candidates = lambda: iter([path])
from kcache.cli import main
sys.exit(main())
"""


def test_another_compiler(
    compile_: Compile, line: Callable, nvrtc: tuple[int, int], tmp_path: Path
) -> None:
    """If the environment leads to another build of NVRTC, the cause of the miss is the compiler."""
    compile_()
    found = kcache.nvrtc.library.find()  # type: ignore[attr-defined]
    other = tmp_path / "libnvrtc.so.13"
    other.write_bytes(b"\x7fELF")  # not a complete ELF file, so it is identified by its content
    said = output_of(ANOTHER_COMPILER, other, *line("why", "--json"))
    cause = Told(said).the("compiler")
    assert f"it was NVRTC {nvrtc[0]}.{nvrtc[1]}, build" in cause["what"]
    assert cause["before"] == found.identity
    assert cause["after"].startswith("nvrtc xxh3:")


# -- headers ---------------------------------------------------------------------------------------


def test_a_header_changed_and_went(compile_: Compile, why: Why, headers: Path) -> None:
    header = headers / "two" / "a.h"
    assert why(*PATHS).hit
    header.write_text("#define SCALE 4\n")
    assert why(*PATHS).the("header_changed")["path"] == str(header)
    compile_(*PATHS)
    assert why(*PATHS).hit
    header.write_text("#define SCALE 3\n")
    assert why(*PATHS).hit  # the first dependency set is still in the manifest
    header.unlink()
    assert why(*PATHS).the("header_gone")["path"] == str(header)


@pytest.mark.parametrize("folder", ["one", "."])
def test_a_new_header_shadows_another(folder: str, why: Why, headers: Path) -> None:
    (headers / folder / "a.h").write_text("#define SCALE 3\n")
    cause = why(*PATHS).the("header_appeared")
    assert os.path.samefile(cause["path"], headers / folder / "a.h")
    assert cause["before"] == str(headers / "two" / "a.h")
    assert "found before" in cause["what"]


def test_outputs_that_name_directories(compile_: Compile, why: Why, headers: Path) -> None:
    (headers / "two" / "a.h").write_text(
        "#define SCALE 3\n__device__ const char where[] = __FILE__;\n"
    )
    compile_("-I", headers / "one", "-I", headers / "two")
    (headers / "two").rename(headers / "three")
    told = why("-I", headers / "one", "-I", headers / "three")
    assert told.kinds == ["directory", "include_path"]


# -- removed entries -------------------------------------------------------------------------------


def test_evicted_to_stay_under_the_cap(
    compile_: Compile, why: Why, headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KCACHE_MAX_SIZE", "40kB")
    with kcache.KernelCache() as cache:
        for number in range(20):
            cache.engine.put(key(number), kcache.Entry({"a": bytes(3000)}))
        assert cache.stats().evictions
    cause = why(*PATHS).the("evicted")
    assert cause["at"] > 1.7e9
    assert "to stay under the cap" in cause["what"]
    monkeypatch.setenv("KCACHE_MAX_SIZE", "500")
    compile_(*PATHS, "-D", "LARGE")
    assert "no room" in why(*PATHS, "-D", "LARGE").the("rejected")["what"]


def test_the_keys_are_those_that_ls_shows(why: Why, here: Callable, headers: Path) -> None:
    """`kcache why` shows the kernel's and the manifest's key as `kcache ls` does."""
    entries = json.loads(here("ls", "--all", "--json").out)
    keys = {entry["kind"]: entry["key"] for entry in entries}
    told = why(*PATHS).all
    assert (told["kernel"], told["manifest"]) == (keys["kernel"], keys["manifest"])
    (headers / "two" / "a.h").write_text("#define SCALE 4\n")
    assert why(*PATHS).all["kernel"] is None  # no set has this header
    (headers / "two" / "a.h").write_text("#define SCALE 3\n")
    assert here("rm", keys["kernel"]).code == 0
    assert "deleted" in why(*PATHS).the("deleted")["what"]


def test_cleared_trimmed_and_moved(
    compile_: Compile, why: Why, here: Callable, cache_directory: Path, monkeypatch
) -> None:
    compile_()
    assert here("rm", why().all["key"]).code == 0
    compile_()
    assert here("clear", "--yes").code == 0
    assert "was cleared on 2" in why().the("cleared")["what"]  # a clear concerns all keys
    compile_()
    assert here("trim", "--max-size", "0").code == 0
    assert why().the("trimmed")
    compile_()
    assert here("migrate", "--to", "zstd").code == 0
    assert why().kinds == []  # a hit: programs find the entries in the new backend
    assert here("clear", "--yes").code == 0
    shutil.rmtree(cache_directory / "zstd")  # otherwise each command would warn about it
    monkeypatch.setenv("KCACHE_BACKEND", "file")
    assert why().the("moved")
    (cache_directory / "journal").unlink()
    assert "no similar kernel was ever in this cache" in why().the("never")["what"]


def test_removed_by_hand(why: Why, cache_directory: Path, headers: Path) -> None:
    found = why(*PATHS).all["key"]
    (cache_directory / "file" / found[:2] / found).unlink()
    assert "but the list of its headers does not" in why(*PATHS).the("lost")["what"]


def test_damaged(compile_: Compile, why: Why, here: Callable, cache_directory: Path) -> None:
    compile_()
    damage(cache_directory, why().all["key"])
    assert why().the("damaged")
    assert here("verify", "--repair").code == 0
    assert "found damaged" in why().the("refused")["what"]
    compile_()
    assert why().hit


def test_of_another_version(compile_: Compile, why: Why, cache_directory: Path) -> None:
    compile_()
    found = why().all["key"]
    with kcache.KernelCache(cache_directory) as cache:
        raw = kcache.entry.encode(found, kcache.Entry({}), producer=b"kcache-nvrtc/0")
        cache.engine.backend.put(found, raw)
    assert "kcache-nvrtc/0" in why().the("incompatible")["what"]


# -- not cached at all -----------------------------------------------------------------------------


def test_uncacheable_sources_are_explained(compile_: Compile, why: Why, headers: Path) -> None:
    (headers / "two" / "a.h").write_text("#define SCALE (__TIME__[0])\n")
    compile_(*PATHS)
    assert why(*PATHS).kinds == ["header_changed", "uncacheable"]
    compile_(*PATHS, "-D", "N")
    cause = why(*PATHS, "-D", "N").causes[-1]
    assert "depends on the date or the time of its compile" in cause["what"]
    assert cause["at"] > 1.7e9


def test_settings(compile_: Compile, why: Why, here: Callable, monkeypatch) -> None:
    compile_()
    assert "--no-cache" in why("--no-cache").the("disabled")["what"]
    assert "--recache" in why("--recache").the("recache")["what"]
    with monkeypatch.context() as patch:
        patch.setenv("KCACHE_RECACHE", "1")
        assert why("-D", "N").kinds == ["recache", "define"]
    with monkeypatch.context() as patch:
        patch.setenv("KCACHE_DISABLE", "1")
        assert "KCACHE_DISABLE is set" in why().the("disabled")["what"]
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    assert why().hit
    told = here("why", "k.cu", "--arch", "sm_80").out
    assert "KCACHE_READ_ONLY is set: the kernel is not stored" in told


def test_a_cache_that_cannot_be_read(why: Why, work: Path, cache_directory: Path) -> None:
    (work / "k.cu").write_text(PLAIN)
    open_directory(str(cache_directory))
    (cache_directory / "file").write_text("in the way")
    assert "Not a directory" in why().the("unreadable")["what"]


# -- the API ---------------------------------------------------------------------------------------


OPTIONS = kcache.CompileOptions(arch="sm_90")


def test_in_memory_headers_and_extra_keys(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"headers": {"a.h": "1", "b.h": "2"}, "extra_key": b"1"}
    with kcache.KernelCache(tmp_path / "api", memory_size=0) as cache:
        cache.get_or_compile(PLAIN, "k<int>", OPTIONS, **plain)
        assert cache.why(PLAIN, "k<int>", OPTIONS, **plain).hit
        for changed, causes in (
            ({"headers": {"a.h": "3", "b.h": "2"}}, ["the in-memory header a.h changed"]),
            (
                {"headers": {"a.h": "1", "c.h": "2"}},
                ["the in-memory header b.h was removed", "the in-memory header c.h was added"],
            ),
            ({"extra_key": b"2"}, ["extra_key was changed"]),
            ({"extra_key": b""}, ["extra_key was removed"]),
        ):
            told = cache.why(PLAIN, "k<int>", OPTIONS, **{**plain, **changed})
            assert not told.hit
            assert [cause.what for cause in told.causes] == causes


# -- nothing is changed ----------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return a snapshot of a directory without LMDB's tables of readers, which reading changes."""
    return {path: what for path, what in snapshot(directory).items() if "lock.mdb" not in path}


def test_nothing_is_changed_counted_or_recorded(
    backend: str, why: Why, headers: Path, cache_directory: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("KCACHE_RECORD", str(tmp_path / "recorded"))
    before = contents(cache_directory)
    used = recency(cache_directory, backend)
    assert why(*PATHS).hit
    assert why(*PATHS, "--fast-math").kinds == ["option"]
    (headers / "two" / "a.h").write_text("")
    assert why(*PATHS).kinds == ["header_changed"]
    assert contents(cache_directory) == before
    assert recency(cache_directory, backend) == used
    assert not (tmp_path / "recorded").exists()


# -- the log ---------------------------------------------------------------------------------------


def test_the_reason_of_a_miss_is_logged_at_debug_level(
    here: Callable, line: Callable, headers: Path, cache_directory: Path
) -> None:
    def lines(*more: str, level: str = "debug") -> list[str]:
        done = here(*line("compile", *PATHS, *more), KCACHE_LOG=level)
        assert done.code == 0, done.err
        return [each.partition("debug: ")[2] for each in done.err.splitlines() if "debug: " in each]

    assert lines() == ["hit: k.cu: _Z1kPf"]
    header = headers / "two" / "a.h"
    header.write_text("#define SCALE 7\n")
    assert lines() == [f"miss: k.cu: _Z1kPf is compiled: the header {header} changed"]
    header.write_text("#define SCALE 8\n")
    assert lines(level="info") == []
    assert "recache is set" in lines("--recache")[0]
    assert "disable is set" in lines("--no-cache")[0]
    here("trim", "--max-size", "0")
    assert "is compiled: it was evicted by a trim on 2" in lines()[0]
    events = Journal(str(cache_directory), "file").events()
    assert {event.what for event in events} == {"trimmed"}
