"""Whole builds with ninja and CMake: the same files and the same rebuilds as with nvcc alone."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nvcc.conftest import Service, comparable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(14_400)]

FILES, MANY_FILES = 3, 100
KERNEL = """\
#include "a{odd}.h"
extern "C" __global__ void kernel{number}(int* p) {{ p[threadIdx.x] += {number} * FACTOR; }}
"""
NINJA = """\
rule nvcc
  command = {nvcc} -c -arch=sm_90 -I. -MD -MF $out.d $in -o $out
  depfile = $out.d
  deps = gcc
"""
CMAKE = """\
cmake_minimum_required(VERSION 3.24)
project(many LANGUAGES CUDA)
add_library(many OBJECT {sources})
set_target_properties(many PROPERTIES CUDA_ARCHITECTURES 90)
target_include_directories(many PRIVATE .)
"""


def found(program: str) -> str:
    path = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def write(folder: Path, files: int, nvcc: Path) -> None:
    """Write a project of `files` sources, each of which includes one of two headers."""
    folder.mkdir()
    names = [f"k{number}" for number in range(files)]
    for number, name in enumerate(names):
        (folder / f"{name}.cu").write_text(KERNEL.format(number=number, odd=number % 2))
    for odd in range(2):
        (folder / f"a{odd}.h").write_text(f"#define FACTOR {odd + 2}\n")
    builds = "".join(f"build {name}.o: nvcc {name}.cu\n" for name in names)
    (folder / "build.ninja").write_text(NINJA.format(nvcc=nvcc) + builds)
    sources = " ".join(f"{name}.cu" for name in names)
    (folder / "CMakeLists.txt").write_text(CMAKE.format(sources=sources))


class Build:
    """One project, built by nvcc alone or under `kcache run`.

    Every project is moved to the same path while it is built, because CMake uses absolute paths.
    """

    def __init__(self, folder: Path, service: Service, tool: str, files: int, *prefix: str) -> None:
        self.place, self.kept = (
            folder / "project",
            folder / "-".join(("kept", tool, *prefix[-2:-1])),
        )
        self.service, self.tool, self.prefix = service, tool, prefix
        write(self.kept, files, service.nvcc)

    def run(self, *, clean: bool = False, edit: Callable[[Path], object] | None = None) -> set[str]:
        """Build the project, and return the names of the objects that were made or made again."""
        self.kept.rename(self.place)
        try:
            out = self.place / "build" if self.tool == "cmake" else self.place
            if clean:
                for path in [*self.place.rglob("*.o"), *self.place.glob(".ninja_*")]:
                    path.unlink()
            if edit is not None:
                edit(self.place)
            before = {path: path.stat().st_mtime_ns for path in out.rglob("*.o")}
            if self.tool == "cmake" and not out.exists():
                self._start(
                    found("cmake"), "-S", ".", "-B", "build", "-G", "Ninja",
                    f"-DCMAKE_MAKE_PROGRAM={found('ninja')}",
                    f"-DCMAKE_CUDA_COMPILER={self.service.nvcc}",
                )  # fmt: skip
            self._start(*self.prefix, found("ninja"), "-C", out, "-j32")
            after = {path: path.stat().st_mtime_ns for path in out.rglob("*.o")}
            return {path.name for path, time in after.items() if before.get(path) != time}
        finally:
            self.place.rename(self.kept)

    def _start(self, *command: object) -> None:
        done = self.service.start(*command, cwd=self.place, LANG=None)
        assert done.returncode == 0, done.stdout + done.stderr

    def objects(self) -> dict[str, bytes]:
        return {p.name: comparable(p.read_bytes()) for p in self.kept.rglob("many.dir/*.o")} or {
            p.name: comparable(p.read_bytes()) for p in self.kept.glob("*.o")
        }


@pytest.mark.parametrize("tool", ["ninja", "cmake"])
def test_a_build_is_as_with_nvcc_alone(
    tool: str, service: Service, tmp_path: Path, long: bool
) -> None:
    files = MANY_FILES if long else FILES
    alone = Build(tmp_path, service, tool, files)
    by = Build(tmp_path, service, tool, files, sys.executable, "-m", "kcache", "run", "--")

    def edit(folder: Path) -> None:
        (folder / "a1.h").write_text("#define FACTOR 9\n")

    for step in ({}, {}, {"edit": edit}, {"clean": True}):
        made = alone.run(**step)  # type: ignore[arg-type]
        assert by.run(**step) == made  # type: ignore[arg-type]
        assert by.objects() == alone.objects()
    done = service.kcache("stats", "--json")
    assert f'"hits": {files}' in done.stdout  # the hits of the last build
