"""The same sources and headers in another folder hit, unless the output shows the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, KERNEL, agreed, working_directory, write

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders whose paths differ in length; what is written to the first, the second gets."""
    return tmp_path / "a", tmp_path / "another"


def _moved(folders: tuple[Path, Path]) -> None:
    shutil.copytree(*folders)


@pytest.mark.parametrize("absolute", [True, False])
def test_the_whole_tree_moves(cache, folders, absolute):
    here, there = folders
    write(
        here / "inc/x.h", '#include "sub/y.h"\n#include <z.h>\n#if __has_include(<no.h>)\n#endif\n'
    )
    write(here / "inc/sub/y.h", '#pragma once\n#include "../w.h"\n')
    write(here / "inc/w.h", "#define W 1\n")
    write(here / "other/z.h", "#define V W\n")
    write(here / "src/local.h", "")
    _moved(folders)
    source = '#include "local.h"\n#include "x.h"\n' + KERNEL
    hits = []
    for folder in (here, there):
        with working_directory(folder):
            base = folder if absolute else Path()
            options = ARCH.replace(include_paths=[base / "inc", base / "other"])
            kernel = agreed(cache, source, options, source_name="src/kernel.cu")
            hits.append(kernel.cached)
            assert str(folder / "inc/sub/../w.h") in kernel.dependencies
    assert hits == [False, True]
    # A change in one place is noticed there, and the other place keeps its hit.
    write(there / "inc/w.h", "#define W 2\n")
    for folder in (here, there):
        with working_directory(folder):
            base = folder if absolute else Path()
            options = ARCH.replace(include_paths=[base / "inc", base / "other"])
            kernel = agreed(cache, source, options, source_name="src/kernel.cu")
            assert kernel.cached == (folder == here)


# -- the output shows the folder -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "change"),
    [
        (KERNEL.replace("V", "1"), {"lto": True}),
        ("#include <x.h>\n" + KERNEL, {"extra_options": ["-dlto"]}),
    ],
)
def test_ltoir_is_another_in_each_working_directory(cache, folders, monkeypatch, source, change):
    for folder in folders:
        write(folder / "inc/x.h", "#define V 2\n")
    for folder in folders:
        monkeypatch.chdir(folder)
        options = ARCH.replace(include_paths=["inc"], **change)
        assert not agreed(cache, source, options).cached
        assert cache.lookup(source, (), options) is not None


@pytest.mark.parametrize("change", [{"lineinfo": True}, {"debug": True}])
def test_line_numbers_show_the_folder(cache, folders, change):
    here, _ = folders
    write(here / "inc/x.h", "__device__ int f(int i) { return i + 1; }\n")
    _moved(folders)
    source = '#include <x.h>\nextern "C" __global__ void k(int* o) { *o = f(*o); }\n'
    for folder in folders:
        options = ARCH.replace(include_paths=[folder / "inc"], **change)
        assert not agreed(cache, source, options).cached
        assert cache.lookup(source, (), options) is not None
