"""`kcache compile` as people who know nvcc type it: spellings, several files, places of outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

KERNEL = "__global__ void k(int* p) { *p = 1; }\n"


@pytest.fixture
def project(work: Path) -> Path:
    (work / "src").mkdir()
    (work / "src" / "a.cu").write_text(KERNEL)
    (work / "src" / "b.cu").write_text(KERNEL.replace("1", "2"))
    return work


@pytest.mark.parametrize(
    "spelling",
    [
        ["-arch=sm_90", "-std=c++17", "-lineinfo"],
        ["-arch", "sm_90", "-std", "c++17", "--generate-line-info"],
        ["--gpu-architecture=sm_90", "--std=c++17", "--lineinfo"],
    ],
)
def test_nvccs_spellings_mean_the_same(project: Path, here: Callable, spelling: list[str]) -> None:
    first = here("compile", "src/a.cu", "--arch", "sm_90", "--std", "c++17", "--lineinfo")
    assert first.code == 0, first.err
    again = here("compile", "src/a.cu", *spelling)
    assert again.code == 0, again.err
    assert "hit in" in again.err
    told = here("why", "src/a.cu", *spelling)
    assert "is in the cache" in told.out


def test_outputs_go_where_nvcc_puts_them(project: Path, here: Callable) -> None:
    assert here("compile", "-q", "src/a.cu", "-arch=sm_90").code == 0
    assert here("compile", "-q", "src/a.cu", "-arch=sm_90", "-ptx").code == 0
    assert {path.name for path in project.glob("a.*")} == {"a.cubin", "a.ptx"}
    assert not list((project / "src").glob("*.cubin"))


def test_several_files_for_several_architectures(project: Path, here: Callable) -> None:
    (project / "out").mkdir()
    said = here(
        *("compile", "src/a.cu", "src/b.cu", "--arch", "sm_80", "--arch", "sm_90", "-o", "out")
    )
    assert said.code == 0, said.err
    assert said.err.count("compiled in") == 4
    assert sorted(path.name for path in (project / "out").iterdir()) == [
        *("a.sm_80.cubin", "a.sm_90.cubin", "b.sm_80.cubin", "b.sm_90.cubin")
    ]


def test_one_that_does_not_compile_leaves_the_others(project: Path, here: Callable) -> None:
    (project / "src" / "a.cu").write_text("__global__ void k() { foo(); }\n")
    said = here("compile", "src/a.cu", "src/b.cu", "-arch=sm_90")
    assert said.code == 1
    assert "src/a.cu does not compile for sm_90" in said.err
    assert (project / "b.cubin").exists()


def test_several_results_need_several_places(project: Path, here: Callable) -> None:
    said = here("compile", "src/a.cu", "src/b.cu", "-arch=sm_90", "-o", "x.cubin")
    assert (said.code, "x.cubin is no directory" in said.err) == (2, True)
    (project / "a.cu").write_text(KERNEL)
    said = here("compile", "src/a.cu", "a.cu", "-arch=sm_90")
    assert (said.code, "src/a.cu and a.cu both make a.cubin" in said.err) == (2, True)


def test_an_include_directory_that_is_missing_is_warned_about(
    project: Path, here: Callable
) -> None:
    said = here("compile", "src/a.cu", "-arch=sm_90", "-I", "incldue")
    assert said.code == 0
    assert "warning: the include directory incldue does not exist" in said.err


def test_the_log_names_files_as_they_were_typed(project: Path, here: Callable) -> None:
    (project / "inc").mkdir()
    (project / "inc" / "h.h").write_text("int bad = nothing;\n")
    (project / "src" / "a.cu").write_text('#include "h.h"\n__global__ void k() { foo(); }\n')
    said = here("compile", "src/a.cu", "-arch=sm_90", "-I", "inc")
    assert said.code == 1
    lines = said.err.splitlines()
    assert any(line.startswith("inc/h.h(1): error") for line in lines), said.err
    assert any(line.startswith("src/a.cu(2): error") for line in lines), said.err


def test_native_is_this_gpu(project: Path, here: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcache.nvrtc.device.current_arch", lambda: "sm_87")
    said = here("compile", "src/a.cu", "--arch", "native")
    assert said.code == 0, said.err
    assert "for sm_87" in here("why", "src/a.cu", "--arch", "sm_87").out


def test_an_architecture_as_pytorch_reports_it() -> None:
    assert kcache.CompileOptions(arch=(9, 0)) == kcache.CompileOptions(arch="sm_90")
    assert kcache.CompileOptions(arch=(10, 3)).arch == "sm_103"
    for wrong in ((9,), (9, 0, 0), (9, 12), ("9", "0"), (True, 0)):
        with pytest.raises(kcache.ConfigError, match="arch="):
            kcache.CompileOptions(arch=wrong)  # type: ignore[arg-type]
