"""`kcache compile` with the real compiler: hits, output files, errors, and nvcc's command line."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import Said
from core.helpers import python

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

KERNEL = "__global__ void k(int* p) { *p = 1; }\n"
BAD = "__global__ void k() {\n    nonsense;\n}\n"


def is_hit(said: Said) -> bool:
    assert said.code == 0, said.err
    return "kcache: hit in " in said.err


def flags(directory: Path) -> list[str]:
    """Return the compiler's flags for the only kernel in a cache."""
    with kcache.KernelCache(directory) as cache:
        entries = [cache.engine.get(info.key) for info in cache.engine.backend.scan()]
    kernels = [entry for entry in entries if entry and entry.metadata["kind"] == "kernel"]
    (found,) = [kernel.metadata["flags"] for kernel in kernels]
    return list(found)


# -- what hits -------------------------------------------------------------------------------------


def test_no_cache_and_recache(work: Path, here: Callable, cache_directory: Path) -> None:
    line = ["compile", "axpy.cu", "--arch", "sm_90"]
    assert not is_hit(here(*line, "--no-cache"))
    assert not cache_directory.exists()
    for more, hit in ((), False), (("--no-cache",), False), (("--recache",), False), ((), True):
        assert is_hit(here(*line, *more)) == hit
    assert here(*line, "--recache", "--no-cache").code == 2
    (work / "when.cu").write_text("__device__ const char* when = __TIME__;\n" + KERNEL)
    for _ in range(2):
        said = here("compile", "when.cu", "--arch", "sm_90")
        assert not is_hit(said)
        assert "not cached" in said.err


# -- where headers are found -----------------------------------------------------------------------


def test_a_missing_cuda_header_is_one_option_away(work: Path, cccl: Path, here: Callable) -> None:
    (work / "half.cu").write_text("#include <cuda/std/version>\n" + KERNEL)
    line = ["compile", "half.cu", "--arch", "sm_90"]
    said = here(*line)
    assert said.code == 1
    assert "--cuda-headers" in said.err.splitlines()[-1]
    assert here(*line, "--cuda-headers").code == 0


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "written", "start"),
    [
        (["--arch", "sm_90"], "axpy.cubin", b"\x7fELF"),
        (["-arch=sm_90", "-ptx"], "axpy.ptx", b"//"),
        (["--arch", "compute_90"], "axpy.ptx", b"//"),
        (["--arch", "sm_90", "-o", "out.ptx"], "out.ptx", b"//"),
        (["--option=--gpu-architecture=compute_90"], "axpy.ptx", b"//"),
        (["--arch", "sm_90", "--emit", "ltoir"], "axpy.ltoir", b""),
    ],
)
def test_outputs(
    arguments: list[str], written: str, start: bytes, work: Path, here: Callable
) -> None:
    said = here("compile", "axpy.cu", *arguments)
    assert (said.code, said.out) == (0, "")
    data = (work / written).read_bytes()
    assert data
    assert data.startswith(start)
    assert f"-> {written} (" in said.err
    assert sorted(os.listdir(work)) == sorted(["axpy.cu", written])


def test_standard_input_and_standard_output(work: Path, run: Callable) -> None:
    source = (work / "axpy.cu").read_bytes()
    first = run("compile", "-", "--arch", "sm_90", "--name", "axpy<float>", stdin=source)
    assert first.stdout.startswith(b"\x7fELF")
    assert b"kcache: axpy<float> is _Z4axpyIfEvT_PKS0_PS0_i\n" in first.stderr
    again = run("compile", "-", "--arch", "sm_90", "--name", "axpy<float>", "-q", stdin=source)
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, b"")


def test_options_reach_the_compiler(work: Path, here: Callable, cache_directory: Path) -> None:
    said = here(
        *("compile", "axpy.cu", "--arch", "sm_90a", "--std", "c++20", "-DONE", "-D", "TWO=2"),
        *("--fast-math", "-O2", "--max-registers", "32", "--lineinfo", "--option=-ftz=true"),
        *("-Iinc", "-I", "/elsewhere"),
    )
    assert said.code == 0, said.err
    assert flags(cache_directory) == [
        *("--gpu-architecture=sm_90a", "--std=c++20", "--use_fast_math", "--ptxas-options=-O2"),
        *("--generate-line-info", "--maxrregcount=32", "-DONE", "-DTWO=2", "-Iinc"),
        *("-I/elsewhere", "-ftz=true"),
    ]
    assert here("clear", "--yes").code == 0
    assert here("compile", "axpy.cu", "--arch", "sm_90", "-G").code == 0
    assert flags(cache_directory) == ["--gpu-architecture=sm_90", "--device-debug"]


def test_json(work: Path, here: Callable) -> None:
    (work / "bad.cu").write_text("int x = ;\n")
    line = ["compile", "axpy.cu", "--arch", "sm_90", "--name", "axpy<float>", "--json"]
    out = here(*line).clean()
    (first,) = json.loads(out)
    assert (first["source"], first["arch"], first["names"]) == ("axpy.cu", "sm_90", ["axpy<float>"])
    assert (first["cached"], first["stored"], first["error"]) == (False, True, None)
    assert (first["output"], first["emit"]) == ("axpy.cubin", "cubin")
    assert first["size_bytes"] == (work / "axpy.cubin").stat().st_size
    assert list(first["lowered_names"]) == ["axpy<float>"]
    (second,) = json.loads(here(*line).out)
    assert second["cached"]
    assert second["compile_seconds"] == first["compile_seconds"]
    assert here(*line, "-o", "-").code == 2
    said = here("compile", "bad.cu", "--arch", "sm_90", "--json")
    assert said.code == 1
    (failed,) = json.loads(said.out)
    assert "error" in failed["log"]
    assert (failed["source"], bool(failed["error"])) == ("bad.cu", True)


# -- nvcc's command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        ["-arch=sm_90", "-std=c++17", "-lineinfo"],
        ["--gpu-architecture=sm_90", "--std=c++17", "--lineinfo"],
    ],
)
def test_nvccs_spellings_mean_the_same(work: Path, here: Callable, spelling: list[str]) -> None:
    line = ["compile", "axpy.cu", "--arch", "sm_90", "--std", "c++17", "--lineinfo"]
    assert here(*line).code == 0
    assert is_hit(here("compile", "axpy.cu", *spelling))
    assert "is in the cache" in here("why", "axpy.cu", *spelling).out


def test_several_files_for_several_architectures(work: Path, here: Callable) -> None:
    (work / "src").mkdir()
    (work / "out").mkdir()
    (work / "src" / "a.cu").write_text(KERNEL)
    (work / "src" / "b.cu").write_text(KERNEL.replace("1", "2"))
    both = ["compile", "src/a.cu", "src/b.cu"]
    said = here(*both, "--arch", "sm_80", "--arch", "sm_90", "-o", "out")
    assert said.code == 0, said.err
    assert said.err.count("compiled in") == 4
    assert sorted(path.name for path in (work / "out").iterdir()) == [
        *("a.sm_80.cubin", "a.sm_90.cubin", "b.sm_80.cubin", "b.sm_90.cubin")
    ]
    (work / "src" / "a.cu").write_text(BAD)  # the other sources are compiled
    said = here(*both, "-arch=sm_90")
    assert said.code == 1
    assert "src/a.cu does not compile for sm_90" in said.err
    assert (work / "b.cubin").exists()  # nvcc would write the same file
    said = here(*both, "-arch=sm_90", "-o", "x.cubin")
    assert (said.code, "expected a directory for several results" in said.err) == (2, True)
    (work / "a.cu").write_text(KERNEL)
    said = here("compile", "src/a.cu", "a.cu", "-arch=sm_90")
    assert (said.code, "src/a.cu and a.cu would both be written to a.cubin" in said.err) == (
        2,
        True,
    )


# -- errors ----------------------------------------------------------------------------------------


def test_the_log_names_files_as_they_were_typed(work: Path, here: Callable) -> None:
    (work / "sub").mkdir()
    (work / "inc").mkdir()
    (work / "inc" / "h.h").write_text("int bad = nothing;\n")
    source = work / "sub" / "bad.cu"
    source.write_text(f"{BAD}")
    (work / "sub" / "bad.cubin").write_bytes(b"of yesterday")
    for _ in range(2):
        said = here("compile", "sub/bad.cu", "--arch", "sm_90")
        assert (said.code, said.out) == (1, "")
        lines = said.err.splitlines()
        assert lines[0] == 'sub/bad.cu(2): error: identifier "nonsense" is undefined'
        assert lines[-1] == "kcache: error: sub/bad.cu does not compile for sm_90"
    with pytest.raises(kcache.CompileError) as caught:
        kcache.compile_to_ptx(BAD, kcache.CompileOptions(90))
    log = caught.value.log.replace("kernel.cu(", "sub/bad.cu(").replace("kernel.cu", "bad.cu")
    assert said.err == f"{log}\n{lines[-1]}\n"
    assert (work / "sub" / "bad.cubin").read_bytes() == b"of yesterday"
    source.write_text(f'#include "h.h"\n{BAD}')
    lines = here("compile", "sub/bad.cu", "-arch=sm_90", "-I", "inc").err.splitlines()
    assert any(line.startswith("inc/h.h(1): error") for line in lines)
    assert any(line.startswith("sub/bad.cu(3): error") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["axpy.cu", "--arch", "sm_999"], "arch: expected an architecture of this NVRTC (sm_N"),
        (["axpy.cu", "--arch", "sm_90", "--option=--nonsense"], "--nonsense"),
        (["axpy.cu", "--arch", "compute_90", "--emit", "cubin"], "expected ptx"),
        (["binary.cu", "--arch", "sm_90"], "binary.cu is not text: byte 2 is 0xff"),
        (["missing.cu", "--arch", "sm_90"], "Usage: kcache compile"),
        (["--arch", "sm_90", "--", "--use_fast_math"], "'--use_fast_math' does not exist"),
        (["axpy.cu", "--arch", "sm_90", "-o", "axpy.cu"], "would overwrite the source"),
    ],
)
def test_bad_input_exits_with_2(
    arguments: list[str], said: str, work: Path, here: Callable
) -> None:
    (work / "binary.cu").write_bytes(b"//\xff")
    done = here("compile", *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.startswith("Usage: ") or done.err.splitlines()[-1].startswith("kcache: error: ")
    assert (work / "axpy.cu").read_bytes().startswith(b"template")


def test_a_half_written_output_is_removed(work: Path) -> None:
    pytest.importorskip("resource")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1)); "
        "from kcache.cli import main; sys.exit(main())"
    )
    line = ("compile", "axpy.cu", "--arch", "sm_90", "--name", "axpy<float>", "--no-cache")
    done = python(code, *line)
    assert (done.returncode, done.stderr) == (1, "kcache: error: axpy.cubin: File too large\n")
    assert os.listdir(work) == ["axpy.cu"]


# -- `kcache demo` ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiles_in_one_process_and_hits_in_the_next(
    run: Callable, cccl: Path, tmp_path: Path, cache_directory: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    kept = tmp_path / "kept"
    line = ["demo", "--arch", "sm_90", "--directory", kept]
    for _ in range(2):  # the second run compiles, too
        done = run(
            *line, TMPDIR=str(temporary), COLUMNS="60", KCACHE_DISABLE="1", KCACHE_ON_MISS="error"
        )
        assert (done.returncode, done.stderr) == (0, b"")
        text = done.stdout.decode()
        assert re.search(r"\n *process 1 +process 2", text)
        assert re.search(r"\nkernel +\d+\.\d (m?s) +\d+\.\d (us|ms) +[\d,]+ times\n", text)
        headers = re.search(r"\nheaders +(\d+) read +(\d+) verified\n", text)
        assert int(headers[1]) == int(headers[2]) > 100
        assert len(re.findall(r"\n(?:CUBIN|PTX) +\S+ [KM]iB +same bytes\n", text)) >= 1
    assert list(temporary.iterdir()) == []
    assert not cache_directory.exists()


def test_a_target_that_is_not_known_is_one_line(run: Callable, cccl: Path) -> None:
    done = run("demo", "--arch", "sm_999")
    assert done.returncode == 2
    assert done.stderr.startswith(b"kcache: error: arch: expected an architecture of this NVRTC")
    assert done.stderr.count(b"\n") == 1
