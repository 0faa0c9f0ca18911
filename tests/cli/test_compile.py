"""`kcache compile`, in real processes with the real compiler."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kcache
from kcache.errors import ConfigError
from kcache.nvrtc.device import current_arch

pytestmark = pytest.mark.usefixtures("nvrtc")

SUM = """#include <cub/block/block_reduce.cuh>
template <typename T, int Threads> __global__ void sum(const T* x, T* y) {
    using Reduce = cub::BlockReduce<T, Threads>;
    __shared__ typename Reduce::TempStorage storage;
    T all = Reduce(storage).Sum(x[blockIdx.x * Threads + threadIdx.x]);
    if (threadIdx.x == 0) y[blockIdx.x] = all;
}
"""

#: Runs `kcache` and says what of the compiler is in the process afterwards.
PROBE = """import json, re, sys
from kcache.cli import main
code = main()
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
found = [name for name in sys.modules if name.startswith(("cuda.", "rich"))]
print(json.dumps({"modules": found, "mapped": re.findall("libnvrtc[^/]*$", maps, re.M)}))
sys.exit(code)
"""


def probe(*arguments: str | Path) -> tuple[str, dict[str, list[str]]]:
    """Return what `kcache compile` said, and what of the compiler its process held at the end."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE, "compile", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stderr, json.loads(done.stdout)


def is_hit(done: subprocess.CompletedProcess[bytes]) -> bool:
    assert done.returncode == 0, done.stderr.decode()
    return b"kcache: hit in " in done.stderr


def flags(directory: Path) -> list[str]:
    """Return the compiler's flags of the one kernel in a cache."""
    with kcache.KernelCache(directory) as cache:
        entries = [cache.engine.get(info.key) for info in cache.engine.backend.scan()]
    kernels = [entry for entry in entries if entry and entry.metadata["kind"] == "kernel"]
    (found,) = [kernel.metadata["flags"] for kernel in kernels]
    assert isinstance(found, list)
    return [str(flag) for flag in found]


# -- the spine -------------------------------------------------------------------------------------


def test_neither_process_loads_a_compiler(work: Path, cccl: Path) -> None:
    (work / "sum.cu").write_text(SUM)
    line = ["sum.cu", "--arch", "sm_90", "-I", cccl, "--name", "sum<float, 256>", "-o"]
    first, started = probe(*line, "first.cubin")
    second, held = probe(*line, "second.cubin")
    assert first.startswith("kcache: compiled in ")
    assert started == {"modules": [], "mapped": []}  # a worker did
    assert second.startswith("kcache: hit in ")
    assert held == {"modules": [], "mapped": []}
    assert (work / "first.cubin").read_bytes() == (work / "second.cubin").read_bytes()
    assert (work / "first.cubin").read_bytes().startswith(b"\x7fELF")


def test_one_byte_of_a_header_decides(work: Path, cccl: Path, run: Callable) -> None:
    (work / "sum.cu").write_text(SUM)
    header = work / "copies" / "cub" / "block" / "block_reduce.cuh"
    header.parent.mkdir(parents=True)
    shutil.copyfile(cccl / "cub" / "block" / "block_reduce.cuh", header)
    text = header.read_bytes()
    line = ["compile", "sum.cu", "--arch", "sm_90", "-I", "copies", "-I", cccl]
    assert not is_hit(run(*line))
    assert is_hit(run(*line))
    header.write_bytes(text + b"\n")
    assert not is_hit(run(*line))
    header.write_bytes(text)
    assert is_hit(run(*line))


def test_a_source_and_its_headers_may_be_moved(work: Path, run: Callable) -> None:
    (work / "old").mkdir()
    (work / "old" / "scale.cuh").write_text("#define SCALE 2\n")
    (work / "old" / "k.cu").write_text(
        '#include "scale.cuh"\n__global__ void k(int* x) { *x *= SCALE; }'
    )
    assert not is_hit(run("compile", "old/k.cu", "--arch", "sm_90"))
    shutil.copytree(work / "old", work / "new")
    assert is_hit(run("compile", "new/k.cu", "--arch", "sm_90"))
    assert is_hit(run("compile", work / "new" / "k.cu", "--arch", "sm_90"))
    with contextlib.chdir("new"):
        assert is_hit(run("compile", "k.cu", "--arch", "sm_90"))
    (work / "new" / "scale.cuh").write_text("#define SCALE 3\n")
    assert not is_hit(run("compile", "new/k.cu", "--arch", "sm_90"))


def test_a_checkout_may_be_moved_with_headers_that_name_themselves(
    work: Path, run: Callable
) -> None:
    """`__FILE__` is in the output: relative include directories keep it the same."""
    tree = work / "one"
    (tree / "src").mkdir(parents=True)
    (tree / "include").mkdir()
    (tree / "include" / "who.cuh").write_text("__device__ const char* who() { return __FILE__; }\n")
    (tree / "src" / "k.cu").write_text(
        "#include <who.cuh>\n__global__ void k(const char** x) { *x = who(); }\n"
    )
    shutil.copytree(tree, work / "two")
    line = ["compile", "src/k.cu", "-I", "include", "--arch", "sm_90"]
    with contextlib.chdir("one"):
        assert not is_hit(run(*line))
    with contextlib.chdir("two"):
        assert is_hit(run(*line))


# -- where headers are found -----------------------------------------------------------------------


@pytest.fixture
def sided(work: Path) -> Path:
    """Two files of one name: one beside the source `sub/k.cu`, one in the working directory."""
    (work / "sub").mkdir()
    (work / "sub" / "side.cuh").write_text("#define SIDE 1111\n")
    (work / "side.cuh").write_text("#define SIDE 2222\n")
    return work


def ptx(run: Callable, *arguments: str) -> bytes:
    done = run("compile", *arguments, "--arch", "compute_90", "-o", "-")
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_quotes_look_beside_the_source_first(sided: Path, run: Callable) -> None:
    (sided / "sub" / "k.cu").write_text(
        '#include "side.cuh"\n__global__ void k(int* x) { *x = SIDE; }'
    )
    assert b"1111" in ptx(run, "sub/k.cu", "-I", ".")
    (sided / "sub" / "side.cuh").unlink()
    assert b"2222" in ptx(run, "sub/k.cu", "-I", ".")
    assert run("compile", "sub/k.cu", "--arch", "sm_90").returncode == 1


def test_angle_brackets_do_not(sided: Path, run: Callable) -> None:
    (sided / "sub" / "k.cu").write_text(
        "#include <side.cuh>\n__global__ void k(int* x) { *x = SIDE; }"
    )
    assert b"2222" in ptx(run, "sub/k.cu", "-I", ".")
    assert run("compile", "sub/k.cu", "--arch", "sm_90").returncode == 1


def test_a_relative_cache_directory_stays_where_it_is(
    sided: Path, run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(sided / "axpy.cu", sided / "sub" / "k.cu")
    monkeypatch.setenv("KCACHE_DIR", "here")
    assert not is_hit(run("compile", "sub/k.cu", "--arch", "sm_90"))
    assert is_hit(run("compile", "sub/k.cu", "--arch", "sm_90"))
    assert (sided / "here").is_dir()
    assert not (sided / "sub" / "here").exists()


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "written", "start"),
    [
        (["--arch", "sm_90"], "axpy.cubin", b"\x7fELF"),
        (["--arch", "sm_90", "--emit", "ptx"], "axpy.ptx", b"//"),
        (["--arch", "compute_90"], "axpy.ptx", b"//"),
        (["--arch", "sm_90", "-o", "out.ptx"], "out.ptx", b"//"),
        (["--arch", "sm_90", "-o", "out.bin"], "out.bin", b"\x7fELF"),
        (["--arch", "sm_90", "--emit", "cubin", "-o", "out.ptx"], "out.ptx", b"\x7fELF"),
        (["--arch", "90a", "--option=--std=c++17"], "axpy.cubin", b"\x7fELF"),
        (["--option=--gpu-architecture=compute_90"], "axpy.ptx", b"//"),
    ],
)
def test_outputs(
    arguments: list[str], written: str, start: bytes, work: Path, run: Callable
) -> None:
    done = run("compile", "axpy.cu", *arguments)
    assert (done.returncode, done.stdout) == (0, b"")
    data = (work / written).read_bytes()
    assert data.startswith(start)
    assert f"-> {written} (".encode() in done.stderr
    assert sorted(os.listdir(work)) == sorted(["axpy.cu", written])


def test_ltoir(work: Path, run: Callable) -> None:
    done = run("compile", "axpy.cu", "--arch", "sm_90", "--emit", "ltoir")
    assert done.returncode == 0
    assert (work / "axpy.ltoir").stat().st_size > 0
    assert is_hit(run("compile", "axpy.cu", "--arch", "sm_90", "-o", "again.ltoir"))
    assert (work / "again.ltoir").read_bytes() == (work / "axpy.ltoir").read_bytes()


def test_standard_output_gets_the_bytes_and_nothing_else(work: Path, run: Callable) -> None:
    run("compile", "axpy.cu", "--arch", "sm_90", "--name", "axpy<float>")
    done = run("compile", "axpy.cu", "--arch", "sm_90", "--name", "axpy<float>", "-o", "-")
    assert is_hit(done)
    assert done.stdout == (work / "axpy.cubin").read_bytes()


def test_standard_input(work: Path, run: Callable) -> None:
    source = (work / "axpy.cu").read_bytes()
    first = run("compile", "-", "--arch", "sm_90", stdin=source)
    again = run("compile", "-", "--arch", "sm_90", "-o", "out.cubin", stdin=source)
    assert first.stdout.startswith(b"\x7fELF")
    assert is_hit(again)
    assert (work / "out.cubin").read_bytes() == first.stdout


def test_lowered_names_are_said(work: Path, run: Callable) -> None:
    done = run(
        "compile", "axpy.cu", "--arch", "sm_90", "--name", "axpy<float>", "--name", "axpy<int>"
    )
    assert b"kcache: axpy<float> is _Z4axpyIfEvT_PKS0_PS0_i\n" in done.stderr
    assert b"kcache: axpy<int> is _Z4axpyIiEvT_PKS0_PS0_i\n" in done.stderr


def test_quiet_says_nothing(work: Path, run: Callable) -> None:
    done = run("compile", "axpy.cu", "--arch", "sm_90", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_options_reach_the_compiler(work: Path, run: Callable, cache_directory: Path) -> None:
    done = run(
        *("compile", "axpy.cu", "--arch", "sm_90a", "--std", "c++20", "-DONE", "-D", "TWO=2"),
        *("--fast-math", "-O2", "--max-registers", "32", "--lineinfo", "--option=-ftz=true"),
        *("-Iinc", "-I", "/elsewhere"),
    )
    assert done.returncode == 0, done.stderr.decode()
    assert flags(cache_directory) == [
        "--gpu-architecture=sm_90a",
        "--std=c++20",
        "--use_fast_math",
        "--ptxas-options=-O2",
        "--generate-line-info",
        "--maxrregcount=32",
        "-DONE",
        "-DTWO=2",
        "-Iinc",
        "-I/elsewhere",
        "-ftz=true",
    ]


def test_debug_reaches_the_compiler(work: Path, run: Callable, cache_directory: Path) -> None:
    assert run("compile", "axpy.cu", "--arch", "sm_90", "-G").returncode == 0
    assert flags(cache_directory) == ["--gpu-architecture=sm_90", "--device-debug"]


def test_no_cache_and_recache(work: Path, run: Callable, cache_directory: Path) -> None:
    line = ["compile", "axpy.cu", "--arch", "sm_90"]
    assert not is_hit(run(*line, "--no-cache"))
    assert not cache_directory.exists()
    assert not is_hit(run(*line))
    assert not is_hit(run(*line, "--no-cache"))
    assert not is_hit(run(*line, "--recache"))
    assert is_hit(run(*line))
    assert run(*line, "--recache", "--no-cache").returncode == 2


def test_what_must_not_be_cached_says_so(work: Path, run: Callable) -> None:
    (work / "when.cu").write_text(
        "__device__ const char* when = __TIME__;\n__global__ void k() {}\n"
    )
    for _ in range(2):
        done = run("compile", "when.cu", "--arch", "sm_90")
        assert not is_hit(done)
        assert b"not cached" in done.stderr


def test_warnings_come_on_a_hit_too(work: Path, run: Callable) -> None:
    (work / "warn.cu").write_text("__global__ void k() { int unused; }\n")
    first = run("compile", "warn.cu", "--arch", "sm_90", "-q")
    again = run("compile", "warn.cu", "--arch", "sm_90", "-q")
    assert b"warn.cu(1): warning" in first.stderr
    assert again.stderr == first.stderr
    assert first.stdout == b""


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_source_that_does_not_compile_shows_the_compilers_log(work: Path, run: Callable) -> None:
    (work / "sub").mkdir()
    (work / "sub" / "bad.cu").write_text("__global__ void k() {\n    nonsense;\n}\n")
    (work / "sub" / "bad.cubin").write_bytes(b"of yesterday")
    for _ in range(2):
        done = run("compile", "sub/bad.cu", "--arch", "sm_90")
        assert (done.returncode, done.stdout) == (1, b"")
        lines = done.stderr.decode().splitlines()
        assert lines[0] == 'sub/bad.cu(2): error: identifier "nonsense" is undefined'
        assert lines[-1] == "kcache: error: sub/bad.cu does not compile"
    with pytest.raises(kcache.CompileError) as caught:
        kcache.compile_to_ptx(
            "__global__ void k() {\n    nonsense;\n}\n", kcache.CompileOptions(90)
        )
    log = caught.value.log.replace("kernel.cu(", "sub/bad.cu(").replace("kernel.cu", "bad.cu")
    assert done.stderr.decode() == f"{log}\n{lines[-1]}\n"
    assert (work / "sub" / "bad.cubin").read_bytes() == b"of yesterday"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["axpy.cu", "--arch", "sm_999"], "arch='sm_999' is not known"),
        (["axpy.cu", "--arch", "gfx90a"], "arch='gfx90a' is not allowed"),
        (["axpy.cu", "--arch", "sm_90", "--std", "c99"], "std='c99' is not allowed"),
        (["axpy.cu", "--arch", "sm_90", "--option=--nonsense"], "--nonsense"),
        (["axpy.cu", "--arch", "compute_90", "--emit", "cubin"], "allowed: ptx"),
        (["axpy.cu", "--arch", "sm_90", "-D", "1x"], "defines: '1x' is not allowed"),
        (["empty.cu", "--arch", "sm_90"], "source is empty"),
        (["binary.cu", "--arch", "sm_90"], "binary.cu is not text: byte 2 is 0xff"),
    ],
)
def test_what_is_not_allowed_is_2(
    arguments: list[str], said: str, work: Path, run: Callable
) -> None:
    (work / "empty.cu").write_text("")
    (work / "binary.cu").write_bytes(b"//\xff")
    done = run("compile", *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert said in done.stderr.decode()
    assert done.stderr.decode().splitlines()[-1].startswith("kcache: error: ")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.cu", "--arch", "sm_90"],
        [".", "--arch", "sm_90"],
        ["axpy.cu", "--arch", "sm_90", "-O", "4"],
        ["axpy.cu", "--arch", "sm_90", "--emit", "sass"],
        ["axpy.cu", "--arch", "sm_90", "-o", "axpy.cu"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], work: Path, run: Callable) -> None:
    done = run("compile", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(b"Usage: kcache compile")
    assert (work / "axpy.cu").read_bytes().startswith(b"template")


def test_without_arch_and_gpu_it_asks_for_one(work: Path, run: Callable) -> None:
    with contextlib.suppress(ConfigError):
        pytest.skip(f"there is a GPU: {current_arch()}")
    done = run("compile", "axpy.cu")
    assert done.returncode == 2
    assert b"--arch sm_90" in done.stderr


@pytest.mark.parametrize("output", ["missing/out.cubin", "folder", "axpy.cu/out"])
def test_an_output_that_can_not_be_written_is_one_line(
    output: str, work: Path, run: Callable
) -> None:
    (work / "folder").mkdir()
    done = run("compile", "axpy.cu", "--arch", "sm_90", "-o", output)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kcache: error: {output}: ".encode())
    assert done.stderr.count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_line_and_devices_stay(work: Path, run: Callable) -> None:
    done = run("compile", "axpy.cu", "--arch", "sm_90", "-o", "/dev/full")
    assert (done.returncode, done.stderr) == (
        1,
        b"kcache: error: /dev/full: No space left on device\n",
    )
    assert Path("/dev/full").exists()


def test_a_half_written_output_is_removed(work: Path, run: Callable) -> None:
    resource = pytest.importorskip("resource")
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1)); "
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-c", limit + "from kcache.cli import main; sys.exit(main())"),
            *("compile", "axpy.cu", "--arch", "sm_90", "--name", "axpy<float>", "--no-cache"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert resource
    assert (done.returncode, done.stderr) == (1, "kcache: error: axpy.cubin: File too large\n")
    assert not (work / "axpy.cubin").exists()
