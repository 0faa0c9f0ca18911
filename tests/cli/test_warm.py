"""`kcache warm`, in real processes with the real compiler, and what a recorded run asked for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kcache
from kcache import CompileOptions
from kcache.nvrtc.workers.messages import Ask, Reply

pytestmark = pytest.mark.usefixtures("nvrtc")

BAD = "__global__ void k() {\n    nonsense;\n}\n"
#: A kernel of each folder includes a header beside it. Both folders have a header of this name.
SCALE = '#include "scale.cuh"\n__global__ void scale(float* x) { *x *= SCALE; }\n'

LIST = """
[defaults]
archs = ["sm_80", "sm_90a"]

[[kernels]]
source = "axpy.cu"
names = ["axpy<float>", "axpy<double>"]

[[kernels]]
source = "src/**/*.cu"
include_paths = ["include"]
"""


@pytest.fixture
def project(work: Path) -> Path:
    """A list of three sources in three folders, for two architectures."""
    for folder, scale in (("one", 2), ("two/deep", 3)):
        place = work / "src" / folder
        place.mkdir(parents=True)
        (place / "scale.cu").write_text(SCALE)
        (place / "scale.cuh").write_text(f"#include <more.cuh>\n#define SCALE ({scale} * MORE)\n")
    (work / "include").mkdir()
    (work / "include" / "more.cuh").write_text("#define MORE 5\n")
    (work / "kernels.toml").write_text(LIST)
    return work


def counts(done: subprocess.CompletedProcess[bytes]) -> tuple[int, int, int]:
    """Returns how many were compiled, were there, and failed."""
    found = json.loads(done.stdout)
    return found["compiled"], found["already_there"], found["failed"]


def missing(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    """Returns what a dry run says is missing."""
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.decode().splitlines()[1:-1]]
    return [f"{arch} {' '.join(what)}" for state, arch, *what in lines if state == "missing"]


# -- the spine -------------------------------------------------------------------------------------


def test_everything_is_compiled_once_and_then_there(project: Path, run: Callable) -> None:
    first = run("warm", "kernels.toml")
    assert (first.returncode, first.stderr) == (0, b"")
    lines = [line.split() for line in first.stdout.decode().splitlines()]
    assert [line[0] for line in lines] == ["compiled", "already", "failed", "total"]
    assert lines[0][1] == lines[3][1] == "6"
    again = run("warm", "kernels.toml", "--json", "-j", "1")
    assert (counts(again), again.returncode) == ((0, 6, 0), 0)
    found = json.loads(again.stdout)
    assert found["compile_seconds"] == 0
    assert found["saved_seconds"] > 0
    assert found["failures"] == []


def test_the_command_and_the_list_share_their_kernels(project: Path, run: Callable) -> None:
    """Each compiles in the folder of its source, whose headers are found first."""
    one = ["compile", "src/one/scale.cu", "-I", "include", "-o", "x.cubin"]
    assert b"compiled in" in run(*one, "--arch", "sm_80").stderr
    assert counts(run("warm", "kernels.toml", "--json", "-j", "8")) == (5, 1, 0)
    for source in ("src/one/scale.cu", "src/two/deep/scale.cu"):
        for arch in ("sm_80", "sm_90a"):
            done = run("compile", source, "-I", "include", "--arch", arch, "-o", "x.cubin")
            assert b"hit in" in done.stderr
    names = ["--name", "axpy<float>", "--name", "axpy<double>"]
    assert b"hit in" in run("compile", "axpy.cu", *names, "--arch", "sm_80").stderr


def test_a_list_may_lie_and_move_anywhere(project: Path, run: Callable, tmp_path: Path) -> None:
    assert counts(run("warm", "kernels.toml", "--json")) == (6, 0, 0)
    moved = tmp_path / "moved"
    shutil.copytree(project, moved)
    assert counts(run("warm", moved / "kernels.toml", "--json")) == (0, 6, 0)
    (moved / "include" / "more.cuh").write_text("#define MORE 7\n")
    assert counts(run("warm", moved / "kernels.toml", "--json")) == (4, 2, 0)


def test_archs_of_the_command_line_replace_those_of_the_list(project: Path, run: Callable) -> None:
    assert counts(run("warm", "kernels.toml", "--arch", "90", "--json")) == (3, 0, 0)
    with kcache.KernelCache() as cache:
        text = (project / "axpy.cu").read_text()
        names = ("axpy<float>", "axpy<double>")
        for arch, there in (("sm_90", True), ("sm_80", False)):
            found = cache.lookup(text, names, CompileOptions(arch), source_name="axpy.cu")
            assert (found is not None) == there


def test_which_calls_hit_what_was_warmed(project: Path, run: Callable) -> None:
    """Those that the page on lists of kernels promises."""
    (project / "kernels.toml").write_text(
        """
        [defaults]
        arch = "sm_90"
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
    # The same kernel under two names, one of them absolute: it is compiled once.
    compiled, there, failed = counts(run("warm", "kernels.toml", "--json"))
    assert (compiled + there, failed) == (5, 0)
    options = CompileOptions(90)
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
        assert not hits(scale, (), relative, source_name="scale.cu")  # its header is beside it
        assert cache.stats().hits == 6


def test_a_dry_run_says_what_is_missing_and_changes_nothing(
    project: Path, run: Callable, cache_directory: Path
) -> None:
    everything = [
        f"{arch} {what}"
        for what in (
            "axpy.cu: axpy<float>, axpy<double>",
            "src/one/scale.cu",
            "src/two/deep/scale.cu",
        )
        for arch in ("sm_80", "sm_90a")
    ]
    dry = ["warm", "kernels.toml", "--dry-run"]
    done = run(*dry)
    assert missing(done) == everything
    assert done.stdout.decode().splitlines()[-1] == "6 would be compiled, 0 already there"
    assert not cache_directory.exists()
    run("warm", "kernels.toml", "--arch", "sm_80")
    before = run("stats", "--json").stdout
    assert missing(run(*dry)) == everything[1::2]
    assert missing(run(*dry, "--arch", "sm_80")) == []
    (project / "include" / "more.cuh").write_text("#define MORE 6\n")
    assert missing(run(*dry, "--arch", "sm_80")) == [everything[2], everything[4]]
    found = json.loads(run(*dry, "--json").stdout)
    assert (found["already_there"], found["missing"]) == (1, 5)
    assert found["kernels"][0] == {
        "source": "axpy.cu",
        "names": ["axpy<float>", "axpy<double>"],
        "arch": "sm_80",
        "there": True,
    }
    assert run("stats", "--json").stdout == before


# -- recorded runs ---------------------------------------------------------------------------------

#: A program that asks for kernels in many ways, and prints how many of them had to be compiled.
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
    yield cache.get_or_compile(axpy, "axpy<float>", options)
    yield cache.get_or_compile(axpy, ["axpy<float>", "axpy<int>"], options.replace(std="17"))
    yield cache.get_or_compile(axpy, (), options.replace(defines={"T2": None, "N": 2}, lineinfo=True))
    yield cache.get_or_compile(axpy, (), options, extra_key=b"\\0mine")
    more = {"more.cuh": "#define MORE 9", "scale.cuh": "#include <more.cuh>\\n#define SCALE MORE"}
    yield cache.get_or_compile(scale, (), options, headers=more)
    beside = options.replace(include_paths=["include"])
    yield cache.get_or_compile(scale, (), beside, source_name="src/one/scale.cu")
    absolute = options.replace(include_paths=[folder / "src/one", folder / "include"])
    yield cache.get_or_compile(scale, (), absolute)
    for place in ("src/one", "src/two/deep"):
        with contextlib.chdir(folder / place):
            near = options.replace(include_paths=[os.path.relpath(folder / "include")])
            yield cache.get_or_compile(scale, (), near)
    yield cache.get_or_compile(axpy, (), kcache.CompileOptions(extra_options=["-arch", arch]))

os.chdir(folder)
with kcache.KernelCache() as cache:
    with cache.record(sys.argv[2]) if len(sys.argv) > 2 else contextlib.nullcontext():
        print([kernel.cached for kernel in ask(cache)].count(False))
"""
ASKED = 10


def program(folder: Path, *arguments: str, **environment: str) -> int:
    """Runs the program in `folder`; returns how many kernels it had to compile."""
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-P", folder / "program.py", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_recorded_run_compiles_nothing_once_it_is_warmed(
    how: str, project: Path, run: Callable, cache_directory: Path
) -> None:
    given = ["kernels.jsonl"] if how == "argument" else []
    variable = {"KCACHE_RECORD": str(project / "kernels.jsonl")} if how == "variable" else {}
    assert program(project, "sm_90", *given, **variable) == ASKED
    assert program(project, "sm_90", *given, **variable) == 0  # hits are recorded, too
    shutil.rmtree(cache_directory)
    with contextlib.chdir("/"):
        warmed = run("warm", project / "kernels.jsonl", "--json")
    assert (counts(warmed), warmed.stderr) == ((ASKED, 0, 0), b"")
    assert program(project, "sm_90") == 0
    assert counts(run("warm", "kernels.jsonl", "--json")) == (0, ASKED, 0)


def test_a_recorded_run_is_warmed_for_other_archs_and_elsewhere(
    project: Path, run: Callable, cache_directory: Path, tmp_path: Path
) -> None:
    """On a machine that has the project in another folder, but nothing that names its folder."""
    assert program(project, "sm_90", "kernels.jsonl") == ASKED
    shutil.rmtree(cache_directory)
    moved = tmp_path / "moved"
    shutil.move(project, moved)
    os.chdir(moved)
    warmed = run("warm", "kernels.jsonl", "--arch", "sm_80", "--arch", "100a", "--json")
    assert (counts(warmed), warmed.stderr) == ((2 * ASKED, 0, 0), b"")
    assert program(moved, "sm_80") == program(moved, "sm_100a") == 0
    assert program(moved, "sm_90") == ASKED


def test_a_recording_with_a_torn_line_is_warmed_all_the_same(project: Path, run: Callable) -> None:
    program(project, "sm_90", "kernels.jsonl")
    with Path("kernels.jsonl").open("r+b") as stream:
        stream.truncate(os.path.getsize("kernels.jsonl") - 10)
    done = run("warm", "kernels.jsonl", "--json")
    assert (done.returncode, counts(done)) == (0, (0, ASKED - 1, 0))
    assert b"kcache: warning: kernels.jsonl, line 11 is torn: skipped\n" in done.stderr


# -- what goes wrong -------------------------------------------------------------------------------


def test_what_does_not_compile_is_told_and_the_rest_is_compiled(
    project: Path, run: Callable
) -> None:
    (project / "src" / "bad.cu").write_text(BAD)
    done = run("warm", "kernels.toml")
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "kcache: error: src/bad.cu (sm_80, sm_90a): "
        'bad.cu(2): error: identifier "nonsense" is undefined\n'
    )
    assert b"\nfailed         2\n" in done.stdout
    quiet = run("warm", "kernels.toml", "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (1, b"", done.stderr)
    again = run("warm", "kernels.toml", "--json")
    assert (counts(again), again.returncode) == ((0, 6, 2), 1)
    failure = json.loads(again.stdout)["failures"][0]
    assert (failure["source"], failure["names"], failure["arch"]) == ("src/bad.cu", [], "sm_80")
    assert "1 error detected" in failure["log"]


def test_an_arch_that_the_compiler_does_not_know_fails_alone(project: Path, run: Callable) -> None:
    done = run("warm", "kernels.toml", "--arch", "sm_90", "--arch", "sm_999", "--json")
    assert (counts(done), done.returncode) == ((3, 0, 3), 1)
    assert b"sm_999" in done.stderr


def test_what_is_not_kept_is_told(project: Path, run: Callable) -> None:
    (project / "src" / "when.cu").write_text("__device__ const char* t = __TIME__;\n")
    done = run("warm", "kernels.toml")
    assert done.returncode == 0
    assert b"warning: 2 can't be cached (KCACHE_LOG=debug says why)" in done.stderr
    done = run("warm", "kernels.toml", KCACHE_MAX_SIZE="1KB", KCACHE_BACKEND="zstd")
    assert done.returncode == 0
    assert b"not kept: the cap is 1000 B" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bad.toml"], "bad.toml, kernel 1: no key 'nmaes' (did you mean names?); allowed: "),
        (["axpy.cu"], "axpy.cu is no list of kernels; allowed: .toml, .json, or a recording"),
        (["kernels.toml", "--arch", "gfx90a"], "arch='gfx90a' is not allowed"),
    ],
)
def test_a_bad_file_is_2_and_one_line(
    arguments: list[str], said: str, project: Path, run: Callable, cache_directory: Path
) -> None:
    (project / "bad.toml").write_text("[[kernels]]\nnmaes = []\n")
    done = run("warm", *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith(f"kcache: error: {said}")
    assert done.stderr.count(b"\n") == 1
    assert not cache_directory.exists()


@pytest.mark.parametrize(
    "arguments",
    [["missing.toml"], ["."], [], ["kernels.toml", "-j", "0"], ["kernels.toml", "-q", "--json"]],
)
def test_wrong_usage_is_2(arguments: list[str], project: Path, run: Callable) -> None:
    done = run("warm", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(b"Usage: kcache warm")


@pytest.mark.parametrize("name", ["KCACHE_READ_ONLY", "KCACHE_DISABLE"])
def test_a_cache_that_is_not_to_be_written_is_not_warmed(
    name: str, project: Path, run: Callable, cache_directory: Path
) -> None:
    done = run("warm", "kernels.toml", **{name: "1"})
    assert (done.returncode, done.stderr) == (
        2,
        f"kcache: error: {name} is set: warm would write to the cache\n".encode(),
    )
    assert not cache_directory.exists()


def test_an_empty_recording_is_no_failure(work: Path, run: Callable) -> None:
    (work / "kernels.jsonl").write_bytes(b"\n")
    for arguments in ((), ("--dry-run",), ("--json",)):
        done = run("warm", "kernels.jsonl", *arguments)
        assert done.returncode == 0
        assert done.stderr == b"kcache: warning: kernels.jsonl lists no kernels\n"


# -- at a terminal ---------------------------------------------------------------------------------


@pytest.fixture
def slow(work: Path, cccl: Path) -> Path:
    """A list that takes some seconds."""
    (work / "sum.cu").write_text("#include <cub/block/block_reduce.cuh>\n__global__ void k() {}\n")
    kernel = {"source": "sum.cu", "include_paths": [str(cccl)]}
    kernels = [{**kernel, "defines": [f"VERSION={number}"]} for number in range(3)]
    (work / "slow.json").write_text(json.dumps({"defaults": {"arch": "sm_90"}, "kernels": kernels}))
    return work


def test_a_bar_with_count_and_time_left(slow: Path) -> None:
    pytest.importorskip("pty", reason="there are no pseudo-terminals here")
    from cli.test_terminal import Terminal

    with Terminal("warm", "slow.json") as terminal:
        code, output, seen = terminal.end()
    assert code == 0
    assert output.startswith(b"compiled       3  ")
    assert b"warming" in seen
    assert b"/3" in seen
    assert seen.index(b"\x1b[?25l") < seen.index(b"\x1b[?25h")
    assert seen.endswith(b"\x1b[2K")
    with Terminal("warm", "slow.json") as terminal:
        code, output, _ = terminal.end()
    assert code == 0
    assert output.split()[:2] == [b"compiled", b"0"]


def test_an_interrupt_ends_it_at_once(slow: Path, run: Callable) -> None:
    pytest.importorskip("pty", reason="there are no pseudo-terminals here")
    from cli.test_terminal import Terminal

    with Terminal("warm", "slow.json", "-j", "1") as terminal:
        terminal.read_until(b"1/3")
        terminal.process.send_signal(signal.SIGINT)
        code, output, seen = terminal.end()
    assert (code, output) == (130, b"")
    assert b"Traceback" not in seen
    *_, last = seen.rstrip().splitlines()
    told = re.search(rb"kcache: interrupted: (\d) of 3 kernels done; run it again to go on$", last)
    assert told, last
    compiled, there, failed = counts(run("warm", "slow.json", "--json"))
    assert (compiled + there, failed) == (3, 0)
    assert 1 <= int(told[1]) <= there < 3


def test_jobs_bound_the_compilers_that_make_proofs_too(
    work: Path, here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kcache.nvrtc.workers import pool
    from kcache.nvrtc.workers.process import WorkerProcess

    pool.shared().close()
    monkeypatch.setattr(pool.shared(), "most", 2)
    asked = WorkerProcess.ask
    lock = threading.Lock()
    running: list[object] = []
    moved: list[bool] = []
    most = 0

    def ask(self: WorkerProcess, what: Ask, timeout: float | None) -> Reply:
        nonlocal most
        with lock:
            running.append(what)
            most = max(most, len(running))
            moved.append(bool(what.moved))
        try:
            return asked(self, what, timeout)
        finally:
            with lock:
                running.remove(what)

    monkeypatch.setattr(WorkerProcess, "ask", ask)
    (work / "inc").mkdir()
    (work / "inc" / "file.cuh").write_text("#define WHERE sizeof(__FILE__)\n")
    for number in range(4):
        text = f'#include "file.cuh"\n__global__ void k(int* x) {{ *x = {number}; }}\n'
        (work / f"{number}.cu").write_text(text)
    listed = '[[kernels]]\nsource = "[0-9].cu"\narchs = ["sm_80"]\ninclude_paths = ["inc"]\n'
    (work / "kernels.toml").write_text(listed)
    assert here("warm", "kernels.toml", "-j", "1").code == 0
    assert moved == [False] * 4 + [True] * 5  # the worker of the misses can make no proof
    assert most == 1
