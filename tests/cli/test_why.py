"""`kcache why`: each way to miss, made for real, and what is said about it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.helpers import damage, key, recency

import kcache
from kcache.directory import open_directory
from kcache.engine.journal import Journal
from kcache.nvrtc import PRODUCER

pytestmark = pytest.mark.usefixtures("nvrtc")

PLAIN = "template <typename T> __global__ void k(T* x) { x[0] += 1; }\n"
#: Reads a.h, looks for the absent one beside the source, and asks for another.
HEADERS = """#include "a.h"
#if __has_include(<extra.h>)
#define SCALE 2
#endif
__global__ void k(float* x) { x[0] *= SCALE; }
"""

Why = Callable[..., "Told"]


class Told:
    """What `kcache why --json` said."""

    def __init__(self, text: str) -> None:
        self.all: dict[str, Any] = json.loads(text)
        self.hit: bool = self.all["cached"]
        self.causes: list[dict[str, Any]] = self.all["causes"]
        self.kinds = [cause["cause"] for cause in self.causes]

    def the(self, kind: str) -> dict[str, Any]:
        assert self.kinds == [kind], self.all["why"]
        return self.causes[0]


@pytest.fixture
def compile_(here: Callable, work: Path) -> Callable[..., None]:
    """Compile k.cu for sm_90."""

    def compile_(*arguments: str | Path) -> None:
        arch = () if "--arch" in arguments else ("--arch", "sm_90")
        said = here("compile", "k.cu", *arch, "-o", "k.cubin", *arguments)
        assert said.code == 0, said.err

    (work / "k.cu").write_text(PLAIN)
    return compile_


@pytest.fixture
def why(here: Callable, work: Path) -> Why:
    """Ask about the same."""

    def why(*arguments: str | Path) -> Told:
        arch = () if "--arch" in arguments else ("--arch", "sm_90")
        said = here("why", "k.cu", *arch, "-o", "k.cubin", "--json", *arguments)
        assert (said.code, said.err) == (0, "")
        return Told(said.out)

    return why


@pytest.fixture
def headers(work: Path) -> Path:
    """A source with a header that is found in the second of two include directories."""
    for name in ("one", "two"):
        (work / name).mkdir()
    (work / "two" / "a.h").write_text("#define SCALE 3\n")
    (work / "k.cu").write_text(HEADERS)
    return work


PATHS = ("-I", "one", "-I", "two")


# -- what the request tells ------------------------------------------------------------------------


def test_a_name_that_nothing_was_cached_under(
    compile_: Callable, here: Callable, work: Path
) -> None:
    compile_()
    (work / "other.cu").write_text(PLAIN.replace("1", "2"))
    said = here("why", "other.cu", "--arch", "sm_90", "--json")
    assert "remembers no such kernel" in Told(said.out).the("never")["what"]


def test_a_source_from_a_pipe(run: Callable, work: Path) -> None:
    line = ("-", "--arch", "sm_90", "-o", "k.cubin")
    assert run("compile", *line, stdin=PLAIN.encode()).returncode == 0
    said = run("why", *line, stdin=PLAIN.encode())
    assert said.stdout.startswith(b"<stdin> for sm_90 is in the cache")


def test_the_source_changed(compile_: Callable, why: Why, work: Path) -> None:
    compile_()
    cached = why().all["key"]
    (work / "k.cu").write_text(PLAIN + "// more\n")
    told = why()
    assert "text changed" in told.the("source")["what"]
    assert told.all["nearest"]["key"] == cached
    assert told.all["nearest"]["source_name"] == "k.cu"
    assert told.all["nearest"]["created"] > 1.7e9


def test_the_source_was_renamed(compile_: Callable, here: Callable, work: Path) -> None:
    compile_()
    (work / "k.cu").rename(work / "new.cu")
    told = Told(here("why", "new.cu", "--arch", "sm_90", "--json").out)
    assert told.kinds == ["source_name"]
    here("compile", "new.cu", "--arch", "sm_90")  # a proof shows that the name does not matter
    assert here("why", "new.cu", "--arch", "sm_90").out.startswith("new.cu for sm_90 is in the")
    (work / "new.cu").rename(work / "k.cu")
    compile_("--option=-G")
    (work / "k.cu").rename(work / "new.cu")
    told = Told(here("why", "new.cu", "--arch", "sm_90", "--option=-G", "--json").out)
    cause = told.the("source_name")
    assert (cause["before"], cause["after"]) == ("k.cu", "new.cu")


@pytest.mark.parametrize(
    ("before", "after", "kind", "what"),
    [
        ([], ["--fast-math"], "option", "the option --use_fast_math was added"),
        (["--lineinfo"], [], "option", "the option --generate-line-info was removed"),
        (
            ["--std", "c++17"],
            ["--std", "c++20"],
            "option",
            "the option --std changed from c++17 to c++20",
        ),
        (["-O", "1"], ["-O", "3"], "option", "--ptxas-options changed from -O1 to -O3"),
        (
            ["--option=-ftz=true", "--option=-fmad=true"],
            ["--option=-fmad=true", "--option=-ftz=true"],
            "option",
            "the options are in another order",
        ),
        (["-D", "N=1"], ["-D", "N=2"], "define", "the macro N changed from 1 to 2"),
        (["-D", "N"], ["-D", "N=2"], "define", "the macro N changed from no value to 2"),
        ([], ["-D", "N=2"], "define", "the macro N=2 was added"),
        (["-D", "N"], [], "define", "the macro N was removed"),
        (["-I", "."], ["-I", ".", "-I", ".."], "include_path", "(-I) changed from 1 to 2"),
        (
            ["--name", "k<int>"],
            ["--name", "k<float>", "--name", "k<int>"],
            "names",
            "the name expression k<float> was added",
        ),
        (
            ["--name", "k<float>", "--name", "k<int>"],
            ["--name", "k<int>", "--name", "k<float>"],
            "names",
            "the name expressions are in another order",
        ),
        (["--arch", "sm_80"], ["--arch", "sm_90a"], "arch", "changed from sm_80 to sm_90a"),
    ],
)
def test_an_option_changed(
    before: list[str],
    after: list[str],
    kind: str,
    what: str,
    compile_: Callable,
    why: Why,
) -> None:
    compile_(*before)
    assert what in why(*after).the(kind)["what"]
    assert why(*before).hit


def test_all_differences_to_the_nearest_are_told(compile_: Callable, why: Why, work: Path) -> None:
    compile_("--std", "c++17", "-D", "A")
    compile_("--std", "c++14", "--fast-math", "-D", "B", "-D", "C")
    (work / "k.cu").write_text(PLAIN + "// more\n")
    told = why("--std", "c++20", "-D", "A")
    assert told.kinds == ["source", "option"]
    assert "--std=c++17" in told.all["nearest"]["flags"]


def test_another_output_is_another_request(compile_: Callable, why: Why) -> None:
    compile_()
    assert why("--emit", "ptx").hit
    assert "--dlink-time-opt was added" in why("--emit", "ltoir").the("option")["what"]


def test_debug_information_names_the_directory(
    compile_: Callable, here: Callable, work: Path
) -> None:
    compile_("--option=-G")
    (work / "elsewhere").mkdir()
    (work / "k.cu").rename(work / "elsewhere" / "k.cu")
    said = here("why", "elsewhere/k.cu", "--arch", "sm_90", "--option=-G", "--json")
    cause = Told(said.out).the("directory")
    assert (cause["before"], cause["after"]) == (str(work), str(work / "elsewhere"))


# -- the compiler ----------------------------------------------------------------------------------


def test_another_compiler(
    compile_: Callable, why: Why, nvrtc: tuple[int, int], tmp_path: Path, work: Path
) -> None:
    """Another build of NVRTC, found where the environment says, is not what compiled it."""
    compile_()
    code = """
import re, site, sys
import kcache.nvrtc.library as library
library._WHEELS = ()
path = sys.argv.pop(1)
library._candidates = lambda: iter([path])
from kcache.cli import main
sys.exit(main())
"""
    found = kcache.nvrtc.library.find()  # type: ignore[attr-defined]
    assert found is not None
    other = tmp_path / "libnvrtc.so.13"
    content = bytearray(Path(found.path).read_bytes()[: 1 << 16])
    other.write_bytes(content[:4])  # no ELF file: known by its content
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, other, "why", "k.cu", "--arch", "sm_90", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    cause = Told(done.stdout).the("compiler")
    assert f"it was NVRTC {nvrtc[0]}.{nvrtc[1]}, build" in cause["what"]
    assert cause["before"] == found.identity
    assert cause["after"].startswith("nvrtc sha256:")


# -- headers ---------------------------------------------------------------------------------------


def test_a_header_changed(compile_: Callable, why: Why, headers: Path) -> None:
    compile_(*PATHS)
    assert why(*PATHS).hit
    (headers / "two" / "a.h").write_text("#define SCALE 4\n")
    assert why(*PATHS).the("header_changed")["path"] == str(headers / "two" / "a.h")
    compile_(*PATHS)
    assert why(*PATHS).hit
    (headers / "two" / "a.h").write_text("#define SCALE 3\n")
    assert why(*PATHS).hit  # the first set is still known


def test_a_header_is_gone(compile_: Callable, why: Why, headers: Path) -> None:
    compile_(*PATHS)
    (headers / "two" / "a.h").unlink()
    assert why(*PATHS).the("header_gone")["path"] == str(headers / "two" / "a.h")


@pytest.mark.parametrize("folder", ["one", "."])
def test_a_new_header_shadows_another(
    folder: str, compile_: Callable, why: Why, headers: Path
) -> None:
    compile_(*PATHS)
    (headers / folder / "a.h").write_text("#define SCALE 3\n")
    cause = why(*PATHS).the("header_appeared")
    assert os.path.samefile(cause["path"], headers / folder / "a.h")
    assert cause["before"] == str(headers / "two" / "a.h")
    assert "found before" in cause["what"]


def test_a_has_include_came_true_and_false(compile_: Callable, why: Why, headers: Path) -> None:
    compile_(*PATHS)
    (headers / "two" / "extra.h").write_text("")
    cause = why(*PATHS).the("header_appeared")
    assert cause["path"] == str(headers / "two" / "extra.h")
    assert cause["before"] is None
    (headers / "two" / "a.h").write_text("\n")
    compile_(*PATHS)
    (headers / "two" / "extra.h").unlink()
    cause = why(*PATHS)
    assert {"header_gone", "header_vanished", "header_changed"} >= set(cause.kinds)


def test_the_include_directories_changed_places(
    compile_: Callable, why: Why, headers: Path
) -> None:
    one, two = str(headers / "one"), str(headers / "two")
    (headers / "one" / "a.h").write_text("#define SCALE 5\n")
    compile_(*PATHS)
    told = why("-I", "two", "-I", "one")
    assert told.kinds == ["header_changed", "include_path"]
    cause = told.causes[1]
    assert "in another order" in cause["what"]
    assert (cause["before"], cause["after"]) == ("one, two", "two, one")
    compile_("-I", one, "-I", two)
    told = why("-I", two, "-I", one)  # not inside the source's folder by name: their place counts
    assert told.kinds == ["header_changed", "include_path"]
    assert told.causes[0]["path"] == str(headers / "two" / "a.h")
    assert told.causes[1]["after"] == f"{two}, {one}"


def test_the_nearest_of_several_header_sets(compile_: Callable, why: Why, headers: Path) -> None:
    (headers / "two" / "b.h").write_text("")
    (headers / "k.cu").write_text('#include "b.h"\n' + HEADERS)
    for number in (4, 5):
        (headers / "two" / "a.h").write_text(f"#define SCALE {number}\n")
        (headers / "two" / "b.h").write_text(f"// {number}\n")
        compile_(*PATHS)
    (headers / "two" / "b.h").write_text("// 4\n")
    assert why(*PATHS).the("header_changed")  # one of the two, whichever is nearest


def test_many_headers_are_told_in_short(compile_: Callable, here: Callable, headers: Path) -> None:
    includes = [f"h{number}.h" for number in range(30)]
    for name in includes:
        (headers / "two" / name).write_text("\n")
    text = "".join(f'#include "{name}"\n' for name in includes)
    (headers / "k.cu").write_text(text + HEADERS)
    compile_(*PATHS)
    for name in includes:
        (headers / "two" / name).write_text("// new\n")
    said = here("why", "k.cu", "--arch", "sm_90", *PATHS)
    first, *rest = said.out.splitlines()
    assert "(and 29 more like it)" in first
    assert len(rest) < 30
    assert "and 10 more (--json has all)" in said.out


def test_an_output_that_names_directories_is_for_these_only(
    compile_: Callable, here: Callable, headers: Path
) -> None:
    (headers / "two" / "a.h").write_text(
        "#define SCALE 3\n__device__ const char where[] = __FILE__;\n"
    )
    compile_("-I", headers / "one", "-I", headers / "two")
    (headers / "two").rename(headers / "three")
    line = ("why", "k.cu", "--arch", "sm_90", "--json", "-I", headers / "one")
    told = Told(here(*line, "-I", headers / "three").out)
    assert told.kinds == ["directory", "include_path"]


# -- what left -------------------------------------------------------------------------------------


@pytest.mark.parametrize("paths", [(), PATHS])
def test_evicted_to_stay_under_the_cap(
    paths: tuple[str, ...], compile_: Callable, why: Why, work: Path, headers: Path, monkeypatch
) -> None:
    (work / "k.cu").write_text(HEADERS if paths else PLAIN)
    monkeypatch.setenv("KCACHE_MAX_SIZE", "40kB")
    compile_(*paths)
    assert why(*paths).hit
    with kcache.KernelCache() as cache:
        for number in range(20):
            cache.engine.put(key(number), kcache.Entry({"a": bytes(3000)}))
        assert cache.stats().evictions
    cause = why(*paths).the("evicted")
    assert cause["at"] > 1.7e9
    assert "to stay under the cap" in cause["what"]


def test_the_keys_are_those_that_ls_shows(
    compile_: Callable, why: Why, here: Callable, headers: Path
) -> None:
    """The key of the kernel is what a reader looks for; the manifest's has a word of its own."""

    def shown(*arguments: str) -> dict[str, str]:
        lines = here("why", "k.cu", "--arch", "sm_90", "-o", "k.cubin", *arguments).out.splitlines()
        rows = dict(line.split(None, 1) for line in lines[2:])
        return {name: rows[name] for name in ("kernel", "manifest", "key") if name in rows}

    compile_(*PATHS)
    entries = json.loads(here("ls", "--all", "--json").out)
    keys = {entry["kind"]: entry["key"] for entry in entries}
    assert shown(*PATHS) == {"kernel": keys["kernel"], "manifest": keys["manifest"]}
    assert here("show", shown(*PATHS)["kernel"][:12]).code == 0
    told = why(*PATHS).all
    assert (told["kernel"], told["manifest"]) == (keys["kernel"], keys["manifest"])
    (headers / "two" / "a.h").write_text("#define SCALE 4\n")
    assert shown(*PATHS) == {"manifest": keys["manifest"]}, "nobody knows the kernel's"
    assert why(*PATHS).all["kernel"] is None
    (headers / "k.cu").write_text(PLAIN)
    compile_()
    (plain,) = (e for e in json.loads(here("ls", "--json").out) if e["key"] not in keys.values())
    assert shown() == {"kernel": plain["key"]}
    assert why().all["manifest"] is None


def test_the_kernel_alone_was_deleted(
    compile_: Callable, why: Why, here: Callable, headers: Path
) -> None:
    compile_(*PATHS)
    (kernel,) = json.loads(here("ls", "--json").out)
    assert here("rm", kernel["key"]).code == 0
    assert "deleted" in why(*PATHS).the("deleted")["what"]


def test_cleared_trimmed_and_moved(
    compile_: Callable,
    why: Why,
    here: Callable,
    cache_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_()
    assert here("clear", "--yes").code == 0
    assert "was cleared on 2" in why().the("cleared")["what"]
    compile_()
    assert here("trim", "--max-size", "0").code == 0
    assert why().the("trimmed")
    compile_()
    assert here("migrate", "--to", "zstd").code == 0
    assert why().kinds == []  # a hit: programs look where the entries are
    assert here("clear", "--yes").code == 0
    shutil.rmtree(cache_directory / "zstd")  # or each command would warn of it
    monkeypatch.setenv("KCACHE_BACKEND", "file")
    assert why().the("moved")  # whether it came back after the trim or not
    compile_("-D", "B")
    assert here("rm", why("-D", "B").all["key"]).code == 0
    assert why("-D", "C").the("moved")["what"].count("(to zstd)") == 1


def test_what_became_of_all_entries_explains_more_than_what_became_of_one_before(
    compile_: Callable, why: Why, here: Callable
) -> None:
    compile_()
    assert here("rm", why().all["key"]).code == 0
    compile_()
    assert here("clear", "--yes").code == 0
    assert why().the("cleared")
    compile_("-D", "OTHER")
    assert why().the("cleared")
    assert here("rm", why("-D", "OTHER").all["key"]).code == 0
    assert why("-D", "OTHER").the("deleted")


def test_a_journal_that_was_lost_is_not_taken_for_a_proof(
    compile_: Callable, why: Why, here: Callable, cache_directory: Path
) -> None:
    compile_()
    assert here("rm", why().all["key"]).code == 0
    (cache_directory / "journal").unlink()
    assert "remembers no such kernel" in why().the("never")["what"]


def test_an_option_that_is_spelled_differently(compile_: Callable, here: Callable) -> None:
    compile_()
    assert Told(here("why", "k.cu", "--option=\t-arch=sm_90", "-o", "k.cubin", "--json").out).hit


def test_removed_by_hand(
    compile_: Callable, why: Why, cache_directory: Path, headers: Path
) -> None:
    compile_(*PATHS)
    manifest = cache_directory / "file" / why(*PATHS).all["key"][:2] / why(*PATHS).all["key"]
    manifest.unlink()
    assert "the list of its headers is not" in why(*PATHS).the("lost")["what"]


def test_damaged(backend: str, compile_: Callable, why: Why, cache_directory: Path) -> None:
    compile_()
    found = why().all["key"]
    damage(cache_directory, found, backend)
    before = recency(cache_directory, backend)
    assert "too short" in why().the("damaged")["what"] or "checksum" in why().causes[0]["what"]
    assert recency(cache_directory, backend) == before
    compile_()
    assert why().hit


def test_damaged_and_removed_by_verify(
    compile_: Callable, why: Why, here: Callable, cache_directory: Path
) -> None:
    compile_()
    damage(cache_directory, why().all["key"])
    assert here("verify", "--repair").code == 0
    assert "found damaged" in why().the("refused")["what"]


def test_of_another_version(compile_: Callable, why: Why, cache_directory: Path) -> None:
    compile_()
    found = why().all["key"]
    with kcache.KernelCache(cache_directory) as cache:
        raw = kcache.entry.encode(found, kcache.Entry({}), producer=b"kcache-nvrtc/0")
        cache.engine.backend.put(found, raw)
    assert PRODUCER != "kcache-nvrtc/0"
    assert "kcache-nvrtc/0" in why().the("incompatible")["what"]


def test_an_entry_of_an_older_kcache_does_not_tell_its_source(
    compile_: Callable, why: Why, cache_directory: Path
) -> None:
    compile_()
    with kcache.KernelCache(cache_directory) as cache:
        found = cache.engine.get(why().all["key"])
        assert found is not None
        cache.clear()
        old = {name: value for name, value in found.metadata.items() if name != "source_hash"}
        cache.engine.put(key("old"), kcache.Entry(dict(found.payload), old))
    (cause,) = [each for each in why().causes if each["cause"] != "cleared"]
    assert cause["cause"] == "unknown"
    assert why("-D", "N").the("define")


# -- not cached at all -----------------------------------------------------------------------------


def test_a_source_or_an_option_that_must_not_be_cached(
    compile_: Callable, why: Why, work: Path
) -> None:
    (work / "k.cu").write_text(
        PLAIN + 'extern "C" __global__ void t() { const char* s = __TIME__; }'
    )
    compile_()
    assert "time of the compile" in why().the("uncacheable")["what"]


def test_what_the_compile_found_out(compile_: Callable, why: Why, headers: Path) -> None:
    (headers / "two" / "a.h").write_text("#define SCALE (__TIME__[0])\n")
    compile_(*PATHS)
    cause = why(*PATHS).the("uncacheable")
    assert "may depend on the time of the compile" in cause["what"]
    assert cause["at"] > 1.7e9


def test_what_a_compile_found_out_since_the_last_hit(
    compile_: Callable, why: Why, headers: Path
) -> None:
    compile_(*PATHS)
    (headers / "two" / "a.h").write_text("#define SCALE (__TIME__[0])\n")
    compile_(*PATHS)
    assert why(*PATHS).kinds == ["header_changed", "uncacheable"]


@pytest.mark.parametrize("paths", [(), PATHS])
def test_larger_than_the_cap(
    paths: tuple[str, ...], compile_: Callable, why: Why, work: Path, headers: Path, monkeypatch
) -> None:
    (work / "k.cu").write_text(HEADERS if paths else PLAIN)
    monkeypatch.setenv("KCACHE_MAX_SIZE", "500")
    compile_(*paths)
    assert "no room" in why(*paths).the("rejected")["what"]


def test_settings(compile_: Callable, why: Why, here: Callable, monkeypatch) -> None:
    compile_()
    assert "--no-cache" in why("--no-cache").the("disabled")["what"]
    assert "--recache" in why("--recache").the("recache")["what"]
    monkeypatch.setenv("KCACHE_RECACHE", "1")
    assert why("-D", "N").kinds == ["recache", "define"]
    monkeypatch.delenv("KCACHE_RECACHE")
    monkeypatch.setenv("KCACHE_DISABLE", "1")
    assert "KCACHE_DISABLE is set" in why().the("disabled")["what"]
    monkeypatch.delenv("KCACHE_DISABLE")
    monkeypatch.setenv("KCACHE_READ_ONLY", "1")
    assert why().hit
    assert (
        "KCACHE_READ_ONLY is set: what is compiled is not kept"
        in here("why", "k.cu", "--arch", "sm_80").out
    )


def test_a_cache_that_cannot_be_read(why: Why, work: Path, cache_directory: Path) -> None:
    (work / "k.cu").write_text(PLAIN)
    open_directory(str(cache_directory))
    (cache_directory / "file").write_text("in the way")
    assert "Not a directory" in why().the("unreadable")["what"]


def test_an_unsafe_directory_is_no_cache_as_for_compile(
    here: Callable, work: Path, cache_directory: Path
) -> None:
    cache_directory.mkdir()
    cache_directory.chmod(0o777)
    said = here("why", "axpy.cu", "--arch", "sm_90")
    assert said.code == 0
    assert "the cache can't be used: KCACHE_DIR is refused" in said.out
    assert "others" in said.err


# -- the API ---------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Compile a source with these arguments; then return the causes for other arguments."""
    from kcache.admin.explain import explain
    from kcache.kernels.request_factory import Requests

    options = kcache.CompileOptions(arch="sm_90")
    with kcache.KernelCache(tmp_path / "api", memory_size=0) as cache:

        def cached(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
            cache.get_or_compile(PLAIN, "k<int>", options, **before)
            request = Requests(0).make(PLAIN, "k<int>", options, **after)
            told = explain(cache.engine, request)
            assert told.hit == (not told.causes)
            return [cause.what for cause in told.causes]

        yield cached


def test_in_memory_headers_and_extra_keys(cached: Callable[..., list[str]]) -> None:
    plain: dict[str, Any] = {"headers": {"a.h": "1", "b.h": "2"}, "extra_key": b"1"}
    assert cached(plain, plain) == []
    assert cached(plain, {**plain, "headers": {"a.h": "3", "b.h": "2"}}) == [
        "the in-memory header a.h changed"
    ]
    assert cached(plain, {**plain, "headers": {"a.h": "1", "c.h": "2"}}) == [
        "the in-memory header b.h was removed",
        "the in-memory header c.h was added",
    ]
    assert cached(plain, {**plain, "extra_key": b"2"}) == ["extra_key was changed"]
    assert cached(plain, {**plain, "extra_key": b""}) == ["extra_key was removed"]


def test_sources_of_the_default_name_have_nothing_to_do_with_each_other(
    cached: Callable[..., list[str]], tmp_path: Path
) -> None:
    from kcache.admin.explain import explain
    from kcache.kernels.request_factory import Requests

    cached({}, {})
    other = Requests(0).make("__global__ void f() {}", "f", kcache.CompileOptions(arch="sm_90"))
    with kcache.KernelCache(tmp_path / "api") as cache:
        (cause,) = explain(cache.engine, other).causes
    assert cause.kind == "never"


def test_a_backend_that_fails_is_a_cause() -> None:
    from kcache.admin.explain import explain
    from kcache.backend import NoBackend
    from kcache.kernels.request_factory import Requests

    request = Requests(0).make(PLAIN, "k<int>", kcache.CompileOptions(arch="sm_90"))
    with kcache.KernelCache(backend=NoBackend("no room for it")) as cache:
        (cause,) = explain(cache.engine, request).causes
    assert cause.kind == "unusable"
    (cause,) = explain(None, request, unusable="no room for it").causes
    assert (cause.kind, cause.what) == ("unusable", "the cache can't be used: no room for it")


# -- what it does not do ---------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
        for path in directory.rglob("*")
        if path.is_file() and path.name != "lock.mdb"  # readers enter themselves there
    }


def test_nothing_is_changed_counted_or_recorded(
    backend: str,
    compile_: Callable,
    why: Why,
    headers: Path,
    cache_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_(*PATHS)
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


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_compiler_is_loaded(compile_: Callable, headers: Path) -> None:
    compile_(*PATHS)
    code = """
import re, sys
from kcache.cli import main
code = main()
maps = open("/proc/self/maps").read()
print(*sorted(n for n in sys.modules if n.startswith("cuda.")), file=sys.stderr)
print(*re.findall("libnvrtc[^/]*$", maps, re.M), file=sys.stderr)
sys.exit(code)
"""
    for more in ((), ("--fast-math",)):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, "why", "k.cu", "--arch", "sm_90", *PATHS, *more],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr.strip() == ""


# -- the log ---------------------------------------------------------------------------------------


def test_the_reason_of_a_miss_is_logged_at_debug_level(
    run: Callable, headers: Path, cache_directory: Path
) -> None:
    def lines(*more: str, level: str = "debug") -> list[str]:
        line = ("compile", "k.cu", "--arch", "sm_90", "-o", "k.cubin", *PATHS)
        done = run(*line, *more, KCACHE_LOG=level)
        assert done.returncode == 0, done.stderr
        told = done.stderr.decode().splitlines()
        return [each.partition("debug: ")[2] for each in told if "debug: " in each]

    assert lines() == ["miss: k.cu: _Z1kPf is compiled: this cache remembers no such kernel"]
    assert lines() == ["hit: k.cu: _Z1kPf"]
    header = headers / "two" / "a.h"
    header.write_text("#define SCALE 7\n")
    assert lines() == [f"miss: k.cu: _Z1kPf is compiled: the header {header} changed"]
    header.write_text("#define SCALE 8\n")
    assert lines(level="info") == []
    assert "recache is set" in lines("--recache")[0]
    assert "disable is set" in lines("--no-cache")[0]
    run("trim", "--max-size", "0")
    assert "is compiled: it was evicted by a trim on 2" in lines()[0]
    events = Journal(str(cache_directory), "file").events()
    assert {event.what for event in events} == {"trimmed"}
