"""Computed includes: names that macros make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, KERNEL, agreed, write

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")


def _follows(
    cache: kcache.KernelCache, header: Path, source: str, options: kcache.CompileOptions
) -> None:
    """Assert that a change of `header` shows."""
    header.write_text("#define V 1\n")
    agreed(cache, source, options, source_name="src/kernel.cu")
    header.write_text("#define V 2\n")
    agreed(cache, source, options, source_name="src/kernel.cu")


def test_beyond_a_computed_include(cache, tree):
    """What it names includes a header outside of all directories."""
    header = write(tree / "elsewhere/x.h", "")
    write(tree / "inc/sub/a.h", '#include "../b.h"\n')
    write(tree / "inc/b.h", '#include "../elsewhere/x.h"\n')
    source = "#define GLUE(a, b) <a##b>\n#include GLUE(sub/a, .h)\n" + KERNEL
    _follows(cache, header, source, ARCH.replace(include_paths=["inc"]))


@pytest.mark.parametrize("to", ["../elsewhere", "{}/elsewhere"], ids=["up", "absolute"])
@pytest.mark.parametrize(
    "lines",
    [
        "#define SHOW(x) #x\n#define TEXT(x) SHOW(x)\n#include TEXT(WHERE/x.h)\n",
        "#define NAME WHERE/x.h\n#define SHOW(x) #x\n#define TEXT(x) SHOW(x)\n#include TEXT(NAME)\n",
        "#define GLUE(a) <WHERE/a##.h>\n#include GLUE(x)\n",
    ],
    ids=["text", "two macros", "glued"],
)
def test_a_macro_leads_out(cache, tree, to, lines):
    header = write(tree / "elsewhere/x.h", "")
    (tree / "inc").mkdir()
    options = ARCH.replace(include_paths=["inc"], defines={"WHERE": to.format(tree)})
    _follows(cache, header, lines + KERNEL, options)


@pytest.mark.parametrize(
    "define",
    ["", "#ifndef __CUDA_ARCH__\n#define __CUDA_ARCH__ 1\n#endif\n"],
    ids=["built in", "defined where it is not"],
)
def test_a_macro_of_the_compiler_is_in_the_name(cache, tree, define):
    header = write(tree / "inc/sm/800/x.h", "")
    source = f"{define}#define HDR <sm/__CUDA_ARCH__/x.h>\n#include HDR\n" + KERNEL
    _follows(cache, header, source, ARCH.replace(include_paths=["new", "inc"]))
    write(tree / "new/sm/800/x.h", "#define V 3\n")
    agreed(cache, source, ARCH.replace(include_paths=["new", "inc"]), source_name="src/kernel.cu")


def test_a_glued_name_hits(cache, tree):
    write(tree / "inc/x.h", "#define V 1\n")
    source = "#define GLUE(a, b) <a##b>\n#include GLUE(x, .h)\n" + KERNEL
    options = ARCH.replace(include_paths=["inc"])
    assert not agreed(cache, source, options).cached
    assert agreed(cache, source, options).cached


@pytest.mark.parametrize(
    "text", ["#define TEXT(x) #x\n", "#define TEXT(...) #__VA_ARGS__\n"], ids=["told", "not told"]
)
@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("first", ["#pragma once\n", "#ifndef G\n#define G\n"])
def test_a_link_that_was_skipped_becomes_a_file_of_its_own(cache, tree, text, link, first):
    """The compiler does not say that it looked at a header again under another name."""
    end = "#endif\n" if "G" in first else ""
    write(tree / "inc/a.h", f"{first}#define A 1\n{end}")
    link(tree / "inc/a.h", tree / "inc/b.h")
    source = (
        text
        + "#include <a.h>\n#include TEXT(b.h)\n#ifdef B\n#define V 2\n#else\n#define V 1\n#endif\n"
        + KERNEL
    )
    options = ARCH.replace(include_paths=["inc"])
    agreed(cache, source, options)
    assert agreed(cache, source, options).cached
    (tree / "inc/b.h").unlink()
    write(tree / "inc/b.h", "#define B 1\n")
    agreed(cache, source, options)


@pytest.mark.parametrize(
    ("macros", "operand"),
    [
        ("#define TEXT(x) #x\n", "TEXT(x.h)"),
        ("#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\n#define NAME x.h\n", "TEXT(NAME)"),
        ("#define GLUE(x, y) <x ## y>\n", "GLUE(x, .h)"),
        ("#define HDR_1 <x.h>\n#define HDR(n) HDR_ ## n\n", "HDR(1)"),
    ],
)
def test_quoted_and_glued(cache, tree, macros, operand):
    """Told exactly: what is not included does not matter."""
    header = write(tree / "x.h", "#define V 1\n")
    other = write(tree / "y.h", "")
    source = f"{macros}#include {operand}\n{KERNEL}"
    options = ARCH.replace(include_paths=[tree])
    agreed(cache, source, options)
    other.write_text("// another\n")
    assert agreed(cache, source, options).cached
    header.write_text("#define V 2\n")
    assert not agreed(cache, source, options).cached
