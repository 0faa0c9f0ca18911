"""`kcache warm` with the real compiler: lists of kernels, written by hand or recorded by a run."""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import Said
from core.helpers import run

import kcache
from kcache import CompileOptions

pytestmark = pytest.mark.usefixtures("nvrtc")

BAD = "__global__ void k() {\n    nonsense;\n}\n"
#: A kernel that includes a header in its own folder. Each folder has another header of this name.
SCALE = '#include "scale.cuh"\n__global__ void scale(float* x) { *x *= SCALE; }\n'

LIST = """
[defaults]
archs = ["compute_80", "compute_90a"]

[[kernels]]
source = "axpy.cu"
names = ["axpy<float>", "axpy<double>"]

[[kernels]]
source = "src/**/*.cu"
include_paths = ["include"]
"""


@pytest.fixture
def project(work: Path) -> Path:
    """A project with a list of three sources in three folders, for two architectures."""
    for folder, scale in (("one", 2), ("two/deep", 3)):
        place = work / "src" / folder
        place.mkdir(parents=True)
        (place / "scale.cu").write_text(SCALE)
        (place / "scale.cuh").write_text(f"#include <more.cuh>\n#define SCALE ({scale} * MORE)\n")
    (work / "include").mkdir()
    (work / "include" / "more.cuh").write_text("#define MORE 5\n")
    (work / "kernels.toml").write_text(LIST)
    return work


def counts(said: Said) -> tuple[int, int, int]:
    """Return how many kernels were compiled, how many were cached, and how many failed."""
    found = json.loads(said.out)
    return found["compiled"], found["cached"], found["failed"]


def missing(said: Said) -> list[str]:
    """Return the kernels that a dry run reports as missing."""
    assert said.code == 0, said.err
    lines = [line.split() for line in said.out.splitlines()[1:-1]]
    return [f"{arch} {' '.join(what)}" for state, arch, *what in lines if state == "missing"]


# -- lists of kernels ------------------------------------------------------------------------------


def test_everything_is_compiled_once_and_then_there(
    project: Path, here: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run compiles everything, the second nothing; `--check` fails before, not after."""
    check = ("warm", "kernels.toml", "--check")
    first = here(*check)
    assert (first.code, "6 would be compiled" in first.out) == (1, True)
    monkeypatch.setenv("KCACHE_ON_MISS", "error")  # does not concern `kcache warm`
    lines = [line.split() for line in here("warm", "kernels.toml").clean().splitlines()]
    assert [line[0] for line in lines] == ["compiled", "cached", "failed", "total"]
    assert lines[0][1] == lines[3][1] == "6"
    again = here("warm", "kernels.toml", "--json", "-j", "1")
    assert (counts(again), again.code) == ((0, 6, 0), 0)
    found = json.loads(again.out)
    assert (found["compile_seconds"], found["failures"]) == (0, [])
    assert found["saved_seconds"] > 0
    assert here(*check).code == 0
    assert here(*check, "--arch", "compute_100").code == 1

    assert here("bundle", "export", "-o", "kernels.bundle").code == 0
    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "fresh"))
    assert json.loads(here(*check, "--json").out)["missing"] == 6
    monkeypatch.setenv("KCACHE_REMOTE", f"file://{project}/kernels.bundle")
    there = here(*check, "--json")
    assert (there.code, json.loads(there.out)["missing"]) == (0, 0)
    assert not (tmp_path / "fresh").exists()


def test_calls_that_hit_after_warm(project: Path, here: Callable) -> None:
    """After a warm, the calls hit that the page about lists of kernels promises."""
    (project / "kernels.toml").write_text(
        """
        [defaults]
        arch = "compute_90"
        source_name = "kernel.cu"

        [[kernels]]
        source = "axpy.cu"
        names = "axpy<float>"

        [[kernels]]
        source = "src/one/scale.cu"
        include_paths = ["{folder}/src/one", "{folder}/include"]

        [[kernels]]
        source = "src/**/*.cu"
        source_name = "{path}"
        include_paths = ["include"]

        [[kernels]]
        source = "src/one/scale.cu"
        source_name = "{folder}/{path}"
        include_paths = ["{folder}/include"]
        """
    )
    # A kernel that is listed under a relative and an absolute name is compiled once.
    compiled, there, failed = counts(here("warm", "kernels.toml", "--json"))
    assert (compiled + there, failed) == (5, 0)
    options = CompileOptions("compute_90")
    absolute = options.replace(include_paths=[project / "include"])
    scale = Path("src/one/scale.cu")
    with kcache.KernelCache() as cache:

        def hits(path: Path, *arguments: object, **more: str) -> bool:
            return cache.lookup(path.read_text(), *arguments, **more) is not None  # type: ignore[arg-type]

        assert hits(Path("axpy.cu"), "axpy<float>", options)
        with_both = options.replace(include_paths=[project / "src" / "one", project / "include"])
        assert hits(scale, (), with_both)
        with contextlib.chdir("src"):
            assert hits(project / scale, (), with_both)
            assert hits(project / scale, (), absolute, source_name=str(project / scale))
        relative = options.replace(include_paths=["include"])
        for path in (scale, Path("src/two/deep/scale.cu")):
            assert hits(path, (), relative, source_name=str(path))
        assert not hits(scale, (), relative, source_name="scale.cu")  # not beside its header
        assert cache.stats().hits == 6


def test_dry_run(project: Path, here: Callable, cache_directory: Path) -> None:
    sources = ("axpy.cu: axpy<float>, axpy<double>", "src/one/scale.cu", "src/two/deep/scale.cu")
    everything = [f"{arch} {what}" for what in sources for arch in ("compute_80", "compute_90a")]
    dry = ["warm", "kernels.toml", "--dry-run"]
    done = here(*dry)
    assert missing(done) == everything
    assert done.out.splitlines()[-1] == "6 would be compiled, 0 cached already"
    assert not cache_directory.exists()
    here("warm", "kernels.toml", "--arch", "compute_80")
    before = here("stats", "--json").out
    assert missing(here(*dry)) == everything[1::2]
    assert missing(here(*dry, "--arch", "compute_80")) == []
    (project / "include" / "more.cuh").write_text("#define MORE 6\n")
    assert missing(here(*dry, "--arch", "compute_80")) == [everything[2], everything[4]]
    found = json.loads(here(*dry, "--json").out)
    assert (found["cached"], found["missing"]) == (1, 5)
    assert found["kernels"][0] == {
        "source": "axpy.cu",
        "names": ["axpy<float>", "axpy<double>"],
        "arch": "compute_80",
        "cached": True,
    }
    assert here("stats", "--json").out == before


# -- recorded runs ---------------------------------------------------------------------------------

#: A program that gets kernels in many ways, and prints how many of them were compiled.
PROGRAM = """
import contextlib, os, sys
from pathlib import Path
import kcache

arch = sys.argv[1]
folder = Path(__file__).parent
options = kcache.CompileOptions(arch)
axpy = (folder / "axpy.cu").read_text()
scale = (folder / "src/one/scale.cu").read_text()

def ask(cache):
    yield cache.get_or_compile(axpy, ["axpy<float>", "axpy<int>"], options.replace(std="17"))
    odd = axpy + "/* \\u00e4 \\u2028 \\r\\n\\t\\x07 */"
    many = options.replace(defines={"T2": None, "N": 2}, lineinfo=True)
    yield cache.get_or_compile(odd, (), many, extra_key=b"\\0mine")
    more = {"more.cuh": "#define MORE 9", "scale.cuh": "#include <more.cuh>\\n#define SCALE MORE"}
    yield cache.get_or_compile(scale, (), options, headers=more)
    beside = options.replace(include_paths=["include"])
    yield cache.get_or_compile(scale, (), beside, source_name="src/one/scale.cu")
    absolute = options.replace(include_paths=[folder / "src/one", folder / "include"])
    yield cache.get_or_compile(scale, (), absolute)
    for place in ("src/one", "src/two/deep"):
        with contextlib.chdir(folder / place):
            include = os.path.relpath(folder / "include")
            # A macro of its own: otherwise one kernel would be proven to be good in both places.
            near = options.replace(include_paths=[include], defines=[f"P{len(place)}"])
            yield cache.get_or_compile(scale, (), near)
    yield cache.get_or_compile(axpy, (), kcache.CompileOptions(extra_options=["-arch", arch]))

os.chdir(folder)
with kcache.KernelCache() as cache:
    with cache.record(sys.argv[2]) if len(sys.argv) > 2 else contextlib.nullcontext():
        print([kernel.cached for kernel in ask(cache)].count(False))
"""
ASKED = 8


def program(folder: Path, *arguments: str, **environment: str) -> int:
    """Run the program in `folder`; return how many kernels it compiled."""
    (folder / "program.py").write_text(PROGRAM)
    done = run(sys.executable, "-P", folder / "program.py", *arguments, environ=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_recorded_run_compiles_nothing_once_it_is_warmed(
    project: Path, here: Callable, cache_directory: Path, tmp_path: Path
) -> None:
    variable = {"KCACHE_RECORD": str(project / "kernels.jsonl")}
    assert program(project, "compute_90", **variable) == ASKED
    assert program(project, "compute_90", **variable) == 0  # hits are recorded, too
    # The list also works for another target, and from another folder.
    shutil.rmtree(cache_directory)
    moved = tmp_path / "moved"
    shutil.move(project, moved)
    with contextlib.chdir("/"):
        warmed = here("warm", moved / "kernels.jsonl", "--arch", "compute_80", "--json")
    assert (counts(warmed), "error" in warmed.err) == ((ASKED, 0, 0), False)
    assert program(moved, "compute_80") == 0


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_failing_kernel_stops_no_other(project: Path, here: Callable) -> None:
    (project / "src" / "bad.cu").write_text(BAD)
    (project / "kernels.toml").write_text(LIST.replace("src/**/*.cu", "src/bad.cu"))
    done = here("warm", "kernels.toml")
    assert done.code == 1
    assert done.err == (
        "kcache: error: src/bad.cu (compute_80, compute_90a): "
        'bad.cu(2): error: identifier "nonsense" is undefined\n'
    )
    assert "\nfailed    2\n" in done.out
    again = here("warm", "kernels.toml", "--json")
    assert (counts(again), again.code) == ((0, 2, 2), 1)
    failure = json.loads(again.out)["failures"][0]
    assert (failure["source"], failure["names"], failure["arch"]) == (
        "src/bad.cu",
        [],
        "compute_80",
    )
    assert "1 error detected" in failure["log"]


def test_uncacheable_kernels_are_reported(
    project: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "when.cu").write_text("__device__ const char* t = __TIME__;\n")
    kernels = "".join(f'[[kernels]]\nsource = "{name}.cu"\n' for name in ("when", "axpy"))
    (project / "kernels.toml").write_text(f'defaults.arch = "sm_80"\n{kernels}')
    done = here("warm", "kernels.toml")
    assert done.code == 0
    assert "warning: 1 kernel can't be cached (KCACHE_LOG=debug shows the reasons)" in done.err
    monkeypatch.setenv("KCACHE_MAX_SIZE", "1KB")
    monkeypatch.setenv("KCACHE_BACKEND", "zstd")
    done = here("warm", "kernels.toml")
    assert done.code == 0
    assert "not stored: the cap is 1000 B" in done.err


def test_a_bad_file_is_2_and_one_line(project: Path, here: Callable, cache_directory: Path) -> None:
    (project / "bad.toml").write_text("[[kernels]]\nnmaes = []\n")
    done = here("warm", "bad.toml")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    told = "kcache: error: bad.toml, kernel 1: no key 'nmaes' (did you mean 'names'?); expected "
    assert done.err.startswith(told)
    assert not cache_directory.exists()
