"""After a change of anything that a compile depends on, nvcc runs again, with the right result."""

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from nvcc.conftest import Service, comparable, toolkit, write_project, written

OBJECT = ("-c", "-arch=sm_90", "-Ilate", "-Ifirst", "-Iinclude", "k.cu", "-o", "k.o")


class Place(NamedTuple):
    """A project, a toolkit for it, and environment variables for the compile."""

    project: Path
    home: Path
    variables: dict[str, str]


def replace(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace a file by a changed copy. If it is a link, the target stays as it is."""
    content, mode = path.read_bytes(), path.stat().st_mode
    path.unlink()
    path.write_bytes(change(content))
    path.chmod(mode)


def wrap(path: Path, *options: str) -> None:
    """Replace a program by a script that runs it with `options` added."""
    target = path.resolve()
    path.unlink()
    path.write_text(f'#!/bin/sh\nexec {target} {" ".join(options)} "$@"\n')
    path.chmod(0o755)


def edit_header(place: Place) -> None:
    (place.project / "include/header.h").write_text("#define FACTOR 5\n")


def shadow_header(place: Place) -> None:
    (place.project / "first/header.h").write_text("#define FACTOR 5\n")


def shadow_beside_source(place: Place) -> None:
    (place.project / "header.h").write_text("#define FACTOR 5\n")


def optional_header(place: Place) -> None:
    (place.project / "include/optional.h").write_text("#define FACTOR 5\n")


def remove_first_header(place: Place) -> None:
    (place.project / "first/removed.h").unlink()


def switch_link(place: Place) -> None:
    link = place.project / "include/link"
    link.unlink()
    link.symlink_to("two")


def wrap_ptxas(place: Place) -> None:
    wrap(place.home / "bin/ptxas", "-O0")


def wrap_cicc(place: Place) -> None:
    wrap(place.home / "nvvm/bin/cicc", "-ftz=1")


def edit_profile(place: Place) -> None:
    replace(place.home / "bin/nvcc.profile", lambda text: text + b"\nINCLUDES += -DFACTOR2=7\n")


def append_flags(place: Place) -> None:
    place.variables["NVCC_APPEND_FLAGS"] = "-DFACTOR2=7"


def prepend_flags(place: Place) -> None:
    place.variables["NVCC_PREPEND_FLAGS"] = "-DFACTOR2=7"


def ptxas_flags(place: Place) -> None:
    place.variables["PTXAS_FLAGS"] = "-O0"


def compiler_by_variable(place: Place) -> None:
    other = place.project / "tools/g++-other"
    other.parent.mkdir()
    other.write_text('#!/bin/sh\nexec g++ -DFACTOR2=7 "$@"\n')
    other.chmod(0o755)
    place.variables["NVCC_CCBIN"] = str(other)


def compiler_in_path(place: Place) -> None:
    other = place.project / "early/gcc"
    other.write_text('#!/bin/sh\nPATH=$OLD exec gcc -DFACTOR2=7 "$@"\n')
    other.chmod(0o755)


def include_variable(place: Place) -> None:
    folder = place.project / "by_variable"
    folder.mkdir()
    (folder / "optional.h").write_text("#define FACTOR 5\n")
    place.variables["CPATH"] = str(folder)


def response_file(place: Place) -> None:
    (place.project / "options.txt").write_text("-DFACTOR2=7\n")


def library_in_working_directory(place: Place) -> None:
    """nvcc exports a search path for libraries, which ends with the working directory."""
    (place.project / "libmpfr.so.6").write_bytes(b"")


def missing_directory(place: Place) -> None:
    (place.project / "late").mkdir()
    (place.project / "late/header.h").write_text("#define FACTOR 5\n")


def linked_directory(place: Place) -> None:
    (place.project / "other").mkdir()
    (place.project / "other/header.h").write_text("#define FACTOR 5\n")
    (place.project / "late").symlink_to("other")


def same_size_and_time(place: Place) -> None:
    header = place.project / "include/header.h"
    status = header.stat()
    header.write_text("#define FACTOR 5\n")
    os.utime(header, ns=(status.st_atime_ns, status.st_mtime_ns))


def same_size_and_time_by_rename(place: Place) -> None:
    header = place.project / "include/header.h"
    status = header.stat()
    (place.project / "new").write_text("#define FACTOR 5\n")
    os.utime(place.project / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (place.project / "new").rename(header)


def time_of_twin(place: Place) -> None:
    """gcc includes only one of two files with `#pragma once` whose contents and times are equal."""
    os.utime(place.project / "include/twin.h", (2, 2))


def replace_toolkit(place: Place) -> None:
    old = place.home.rename(place.home.with_name("old"))
    shutil.copytree(old, place.home, symlinks=True)
    edit_profile(place)


def rights(place: Place) -> None:
    (place.project / "include/header.h").unlink()
    (place.project / "include/header.h").mkdir()


CHANGES = [
    edit_header, shadow_header, shadow_beside_source, optional_header, remove_first_header,
    switch_link, wrap_ptxas, wrap_cicc, edit_profile, append_flags, prepend_flags, ptxas_flags,
    compiler_by_variable, compiler_in_path, include_variable, response_file,
    library_in_working_directory, rights, missing_directory, linked_directory, same_size_and_time,
    same_size_and_time_by_rename, time_of_twin, replace_toolkit,
]  # fmt: skip

#: A header that defines another value of TWINS if it is included twice.
TWIN = """\
#pragma once
#ifdef TWINS
#undef TWINS
#define TWINS 2
#else
#define TWINS 1
#endif
"""
SOURCE = """\
#include "header.h"
#if __has_include("optional.h")
#undef FACTOR
#include "optional.h"
#endif
#include "removed.h"
#include "link/linked.h"
#include "first/twin.h"
#include "include/twin.h"
#ifndef FACTOR2
#define FACTOR2 1
#endif
extern "C" __global__ void kernel(float* p) {
    p[threadIdx.x] = p[threadIdx.x] * FACTOR / FACTOR2 + REMOVED + LINKED + TWINS;
}
"""


def make_place(folder: Path, wheels: Path) -> Place:
    """Make a project for the functions in `CHANGES`, and a toolkit that only this project uses."""
    project = write_project(folder / "changed")
    (project / "k.cu").write_text(SOURCE)
    for name, text in {
        "first/removed.h": "#define REMOVED 1\n",
        "include/removed.h": "#define REMOVED 2\n",
        "first/twin.h": TWIN,
        "include/twin.h": TWIN,
        "include/one/linked.h": "#define LINKED 1\n",
        "include/two/linked.h": "#define LINKED 2\n",
        "early/nothing": "",
        "options.txt": "-DOTHER=1\n",
    }.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    for name in ("first", "include"):
        os.utime(project / name / "twin.h", (1, 1))
    (project / "include/link").symlink_to("one")
    old = os.environ["PATH"]
    variables = {"OLD": old, "PATH": f"{project}/early:{old}"}
    return Place(project, toolkit(wheels, folder / "cuda"), variables)


@pytest.fixture
def place(tmp_path: Path, wheels: Path) -> Place:
    return make_place(tmp_path, wheels)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_compiles_again(
    change: Callable[[Place], None], service: Service, place: Place
) -> None:
    arguments = (*OBJECT, "-optf", "options.txt")
    nvcc = place.home / "bin/nvcc"

    def start(by: Callable[..., object]) -> tuple[object, bytes]:
        (place.project / "k.o").unlink(missing_ok=True)
        done = by(*arguments, cwd=place.project, program=nvcc, **place.variables)
        found = written(place.project).get("k.o", (0, b""))
        return done.returncode, comparable(found[1])  # type: ignore[attr-defined]

    first = start(service.run)
    assert start(service.run) == first
    assert service.counts["hits"] == 1
    change(place)
    changed = start(service.run)
    assert service.counts["hits"] == 1
    assert changed == start(service.alone)
    assert changed != first


@pytest.mark.slow
def test_a_source_that_asks_for_the_time_is_never_stored(service: Service, project: Path) -> None:
    (project / "include/header.h").write_text("#define FACTOR (int)sizeof(__TIME__)\n")
    for _ in range(2):
        assert service.run(*OBJECT, cwd=project).returncode == 0
    assert service.counts["hits"] == 0


@pytest.mark.slow
def test_a_changed_back_header_is_a_hit_again(service: Service, project: Path) -> None:
    header = project / "include/header.h"
    for factor, hits in ((3, 0), (5, 0), (3, 1), (5, 2)):
        header.write_text(f"#define FACTOR {factor}\n")
        assert service.run(*OBJECT, cwd=project).returncode == 0
        assert service.counts["hits"] == hits


@pytest.mark.slow
@pytest.mark.parametrize("change", [edit_header, shadow_header])
def test_a_change_during_a_compile_is_not_missed(
    change: Callable[[Place], None], service: Service, place: Place
) -> None:
    """A tool that runs late in the compile waits until the file has been changed."""
    tool = place.home / "bin/fatbinary"
    changed = place.project / "changed"
    target = tool.resolve()
    tool.unlink()
    tool.write_text(
        f'#!/bin/sh\n{target} "$@"; status=$?\n'
        f"while [ ! -e {changed} ]; do sleep 0.01; done; exit $status\n"
    )
    tool.chmod(0o755)
    nvcc = place.home / "bin/nvcc"
    started = threading.Thread(
        target=lambda: service.run(*OBJECT, cwd=place.project, program=nvcc, **place.variables)
    )
    started.start()
    while not _runs(tool):
        assert started.is_alive()
    change(place)
    changed.write_text("")
    started.join()
    assert service.run(*OBJECT, cwd=place.project, program=nvcc, **place.variables).returncode == 0
    made = comparable((place.project / "k.o").read_bytes())
    assert (
        service.alone(*OBJECT, cwd=place.project, program=nvcc, **place.variables).returncode == 0
    )
    assert made == comparable((place.project / "k.o").read_bytes())


def _runs(tool: Path) -> bool:
    """Return whether a process is running the script `tool`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(tool).encode() in path.read_bytes().split(b"\0")[:3]:
                return True
    return False


@pytest.mark.slow
def test_a_wrapper_that_asks_for_the_time_is_never_stored(service: Service, place: Place) -> None:
    compiler_by_variable(place)
    wrapper = Path(place.variables["NVCC_CCBIN"])
    wrapper.write_text('#!/bin/sh\nexec g++ -DFACTOR2=$(date +%s) "$@"\n')
    for _ in range(2):
        done = service.run(*OBJECT, cwd=place.project, **place.variables)
        assert done.returncode == 0, done.stderr
    assert service.counts["hits"] == 0
