"""Exact: what the compiler asks for decides, even while it changes, and nothing changes the code.

Where an edit of headers decides, see `test_dependencies.py`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc.reference import KERNEL, PTX, agreed, compile_clean, write

import kcache
from kcache import CompileOptions, KernelCache
from kcache.nvrtc import compiler

pytestmark = pytest.mark.usefixtures("nvrtc")


def paths(*folders: Path | str, **changes: Any) -> CompileOptions:
    return PTX.replace(include_paths=[str(folder) for folder in folders], **changes)


# -- names and assertions --------------------------------------------------------------------------

NAMED = """
#include "cassert"
template <class T> __device__ unsigned sum(T t) {
    unsigned n = 0;
    for (char c : __func__) n = n * 31 + c;
    for (char c : __PRETTY_FUNCTION__) n = n * 31 + c;
    for (char c : __FUNCTION__) n = n * 31 + c;
    assert(t < 7);
    return n;
}
template <class T> __global__ void named(unsigned* o, T t) { *o = sum(t) + __func__[0]; }
"""


def test_function_names_and_assertions_in_templates(cache: KernelCache, tree: Path) -> None:
    """The compiler's time trace, which told the headers before, changed them."""
    write(
        tree / "inc/cassert",
        "#define assert(x) ((x) ? void() : fail(#x, __func__, __LINE__))\n"
        "__device__ void fail(const char*, const char*, int);\n",
    )
    write(tree / "inc/x.h", NAMED)
    options = paths("inc", extra_options=["--relocatable-device-code=true"])
    names = ("named<int>", "named<float>")
    expected = compile_clean("#include <x.h>\n", options.flags(), names=names)
    for cached in (False, True):
        kernel = cache.get_or_compile("#include <x.h>\n", names, options)
        assert kernel.cached is cached
        assert (kernel.ptx, kernel.cubin) == (expected.ptx, expected.cubin)
        assert dict(kernel.lowered_names) == expected.lowered_names


# -- lines -----------------------------------------------------------------------------------------

_NUMBERS = st.sampled_from(
    ["0", "1", "7", "-1", "2147483647", "4294967296", "99999999999999999999", "0x1", "X", ""]
)
_FILES = st.sampled_from(
    [
        *("", '""', '"x.h"', '"y.h"', '"/"', '"a/../x.h"', "<x.h>", '"\\"', '"%s%n"', "NAME"),
        '"' + "n" * 300 + '"',
        "1 2",
    ]
)
_LINES = st.builds(
    lambda word, number, file, flags: f"{word} {number} {file} {flags}\n",
    st.sampled_from(["#line", "#", "# line", "%:line", "#/**/line", "_Pragma"]),
    _NUMBERS,
    _FILES,
    st.sampled_from(["", "1", "2", "3", "1 3 4", "9", "x"]),
)


def test_any_line_directives(cache: KernelCache, tree: Path, long: bool) -> None:
    """None crashes the program; each is followed, or refused by both."""
    write(tree / "inc/y.h", "")
    header = tree / "inc/x.h"
    source = '#define NAME "n.h"\n#include "x.h"\n' + KERNEL

    @settings(deadline=None, max_examples=100 if long else 12)
    @given(st.lists(_LINES, min_size=1, max_size=4))
    def follow(lines: list[str]) -> None:
        header.write_text("".join(lines) + "#define V 1\n")
        try:
            first = cache.get_or_compile(source, (), paths("inc"))
        except kcache.CompileError:
            return
        header.write_text("".join(lines) + "#define V 2\n")
        second = cache.get_or_compile(source, (), paths("inc"))
        assert not second.cached
        assert first.ptx != second.ptx

    follow()


# -- options that name files -----------------------------------------------------------------------


# -- links and directories -------------------------------------------------------------------------


class During:
    """Does something in the middle of each compile: once the worker was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
        compile_request = compiler.compile_request
        self.count = 0

        def compile_(*args: Any) -> Any:
            self.count += 1
            thread = threading.Thread(target=work)
            thread.start()
            try:
                return compile_request(*args)
            finally:
                thread.join()

        monkeypatch.setattr(compiler, "compile_request", compile_)


def test_another_thread_changes_the_directory_during_compiles(
    cache: KernelCache, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile belongs to the directory that the program was in when it asked."""
    write(tree / "one/inc/x.h", "#define V 1\n")
    write(tree / "two/inc/x.h", "#define V 2\n")
    source = "#include <x.h>\n" + KERNEL
    os.chdir(tree / "one")

    def change() -> None:
        for folder in ("two", "one", "two") * 10:
            os.chdir(tree / folder)

    expected = compile_clean(source, paths(tree / "one/inc").flags())
    for number in range(3):
        os.chdir(tree / "one")
        During(monkeypatch, change)
        kernel = cache.get_or_compile(f"{source}// {number}", (), paths("inc"))
        monkeypatch.undo()
        assert kernel.ptx == expected.ptx
    for folder in ("one", "two"):
        os.chdir(tree / folder)
        for number in range(3):
            agreed(cache, f"{source}// {number}", paths("inc"))
    os.chdir(tree)


@pytest.mark.parametrize("raw", [b"\xff", b"\xed\xa0\x80"])
def test_a_working_directory_that_is_not_utf8(cache: KernelCache, tree: Path, raw: bytes) -> None:
    here = tree / os.fsdecode(raw)
    header = write(here / "inc/x.h", "#define V 1\n")
    os.chdir(here)
    for value, cached in ((1, False), (2, False), (1, True)):
        header.write_text(f"#define V {value}\n")
        assert agreed(cache, "#include <x.h>\n" + KERNEL, paths("inc")).cached is cached
    os.chdir(tree)
