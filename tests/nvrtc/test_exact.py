"""Exact: whatever the compiler asks for decides, in whatever way the source makes it ask.

Every case is compared with plain NVRTC in a process of its own, before and after an edit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvrtc.reference import ARCH, KERNEL, agree, agreed, compile_clean, python, write

import kcache
from kcache import CompileOptions, KernelCache
from kcache.nvrtc import compiler

pytestmark = pytest.mark.usefixtures("nvrtc")

GUESS = "#if {0}\n#define V 1\n#else\n#define V 2\n#endif\n"


def paths(*folders: Path | str, **changes: Any) -> CompileOptions:
    return ARCH.replace(include_paths=[str(folder) for folder in folders], **changes)


def clean(
    cache: KernelCache, source: str, options: CompileOptions = ARCH, **arguments: Any
) -> kcache.CompiledKernel:
    """Ask the cache, and assert that a new process gives the same."""
    expected = compile_clean(source, options.flags(), **arguments)
    kernel = cache.get_or_compile(source, arguments.pop("names", ()), options, **arguments)
    assert not expected.failed, expected.log
    assert (kernel.ptx, kernel.cubin) == (expected.ptx, expected.cubin), kernel.cached
    assert dict(kernel.lowered_names) == expected.lowered_names
    return kernel


# -- names and assertions --------------------------------------------------------------------------

NAMED = """
#include <cassert>
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


@pytest.mark.parametrize("names", [(), ("named<int>",), ("named<int>", "named<float>")])
def test_function_names_and_assertions_in_templates(
    cache: KernelCache, tree: Path, names: tuple[str, ...]
) -> None:
    """The compiler's time trace, which told the headers before, changed them."""
    write(
        tree / "inc/cassert",
        "#define assert(x) ((x) ? void() : fail(#x, __func__, __LINE__))\n"
        "__device__ void fail(const char*, const char*, int);\n",
    )
    write(tree / "inc/x.h", NAMED.replace("#include <cassert>", '#include "cassert"'))
    source = "#include <x.h>\n"
    options = paths("inc", extra_options=["--relocatable-device-code=true"])
    assert not clean(cache, source, options, names=names).cached
    assert clean(cache, source, options, names=names).cached


COPY = """
#include <x.h>
struct alignas(16) F { float x, y, z, w; };
template <int N> __device__ void copy(F* __restrict__ o, const F* __restrict__ i) {
#pragma unroll
    for (int n = 0; n < N; n++) o[n * blockDim.x + threadIdx.x] = i[n * blockDim.x + threadIdx.x];
}
extern "C" __global__ void k(F* o, const F* i) { copy<4>(o, i); }
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_a_copy_of_vectors(
    cache: KernelCache, tree: Path, arch: str, nvrtc: tuple[int, int]
) -> None:
    if arch == "sm_120" and nvrtc < (12, 8):
        pytest.skip("sm_120 is known since CUDA 12.8")
    write(tree / "inc/x.h", "\n")
    clean(cache, COPY, paths("inc", arch=arch))


# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        '#line 1 "{inc}/x.h"',
        '#line 1 "x.h"',
        '#line 1 "inc/x.h"',
        '# 1 "x.h" 1',
        '# 1 "x.h" 2',
        '# 1 "x.h" 1 3 4',
        '#line 4294967295 "x.h"',
        '#line 0 ""',
        '#line 7 "y.h"\n#include "y.h"',
        '#line 1 "kernel.cu"',
        '#line 1 "\\xff\\0\\n"',
    ],
)
def test_a_header_that_names_itself_in_a_line_directive(
    cache: KernelCache, tree: Path, line: str
) -> None:
    write(tree / "inc/y.h", "// nothing\n")
    text = line.format(inc=tree / "inc") + "\n#define V {}\n"
    header = write(tree / "inc/x.h", text.format(1))
    source = '#include "x.h"\n' + KERNEL
    if agree(cache, source, paths("inc")) is None:
        return
    assert agreed(cache, source, paths("inc")).cached
    header.write_text(text.format(2))
    assert not agreed(cache, source, paths("inc")).cached
    write(tree / "inc/y.h", "#undef V\n#define V 5\n")
    agreed(cache, source, paths("inc"))


_NUMBERS = st.sampled_from(
    ["0", "1", "7", "-1", "2147483647", "4294967296", "99999999999999999999", "0x1", "X", ""]
)
_FILES = st.sampled_from(
    [
        "",
        '""',
        '"x.h"',
        '"y.h"',
        '"/"',
        '"a/../x.h"',
        "<x.h>",
        '"\\"',
        '"%s%n"',
        '"' + "n" * 300 + '"',
        "NAME",
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


@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(_LINES, min_size=1, max_size=4))
def test_any_line_directives(cache: KernelCache, tree: Path, lines: list[str]) -> None:
    """None crashes the program; each is followed, or refused by both."""
    write(tree / "inc/y.h", "")
    header = write(tree / "inc/x.h", "".join(lines) + "#define V 1\n")
    source = '#define NAME "n.h"\n#include "x.h"\n' + KERNEL
    options = paths("inc")

    def ask() -> kcache.CompiledKernel | None:
        try:
            return cache.get_or_compile(source, (), options)
        except kcache.CompileError:
            return None

    first = ask()
    header.write_text("".join(lines) + "#define V 2\n")
    second = ask()
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert not second.cached
        assert first.cubin != second.cubin


# -- text that hides directives from whoever reads it as text --------------------------------------


def test_a_comment_with_a_glob_hides_nothing(cache: KernelCache, tree: Path) -> None:
    header = write(tree / "inc/x.h", "#define V 1\n")
    source = "// see include/*.h\n#include <x.h>\n// and */ this\n" + KERNEL
    agreed(cache, source, paths("inc"))
    assert agreed(cache, source, paths("inc")).cached
    header.write_text("#define V 2\n")
    assert not agreed(cache, source, paths("inc")).cached


def test_no_dot_and_stdh(cache: KernelCache, tree: Path) -> None:
    """`NAME.stdh` is tried beside `NAME` where that has no dot."""
    write(tree / "inc/x", "#define V 1\n")
    source = "#include <x>\n" + KERNEL
    agreed(cache, source, paths("first", "inc"))
    assert agreed(cache, source, paths("first", "inc")).cached
    for folder, value in (("inc", 2), ("first", 3)):
        write(tree / folder / "x.stdh", f"#define V {value}\n")
        agreed(cache, source, paths("first", "inc"))
    (tree / "inc/x").unlink()
    agree(cache, source, paths("first", "inc"))
    (tree / "first/x.stdh").write_text("#define V 4\n")
    agree(cache, source, paths("first", "inc"))


#: Many ways to write it; `@` stands for the name, which leads to h.h.
HAS_INCLUDE = [
    # plain
    '#if __has_include("h.h")',
    "#if __has_include(<h.h>)",
    '#if __has_include ("h.h")',
    '#if __has_include\t(\t"h.h"\t)',
    "#if ( __has_include ( <h.h> ) )",
    '#if !!__has_include("h.h")',
    '#if 1 && __has_include("h.h")',
    '#if 0 || __has_include("h.h")',
    '#if __has_include("h.h") == 1',
    '#if __has_include("h.h") + 0',
    '#if (__has_include("h.h") ? 1 : 0)',
    '#if -__has_include("h.h")',
    '#if __has_include("none.h") || __has_include("h.h")',
    "#if __has_include(<none.h>) || __has_include(<h.h>)",
    '#if defined(__has_include) && __has_include("h.h")',
    '#if __has_include("./h.h")',
    '#if __has_include("sub/../h.h")',
    "#if __has_include(<./h.h>)",
    '#if __has_include("../inc/h.h")',
    "#if __has_include(</h.h>) || __has_include(<h.h>)",
    # elif and nesting
    '#if 0\n#elif __has_include("h.h")',
    "#if 0\n#elif 0\n#elif __has_include(<h.h>)",
    '#if 1\n#if __has_include("h.h")\n#define FOUND\n#endif\n#endif\n#ifdef FOUND',
    "#ifndef NEVER\n#if __has_include(<h.h>)\n#define FOUND\n#endif\n#endif\n#if defined FOUND",
    '#if 0\n#else\n#if __has_include("h.h")\n#define FOUND\n#endif\n#endif\n#ifdef FOUND',
    # comments
    '#if __has_include/**/("h.h")',
    '#if __has_include(/**/"h.h"/**/)',
    '#/**/if/**/__has_include("h.h")',
    '/**/#if __has_include("h.h") // no',
    '#if /* a\n b */ __has_include("h.h")',
    "#if __has_include(/* > */<h.h>/* < */)",
    '#if __has_include("h.h") /* open\n */',
    # splices
    '#if __has_\\\ninclude("h.h")',
    '#if __has_include(\\\n"h.h"\\\n)',
    '#if __has_include("h\\\n.h")',
    "#if __has_include(<h\\\n.h>)",
    '#i\\\nf __has_include("h.h")',
    '#if __has_include \\\r\n("h.h")',
    '#if \\\n\\\n__has_include("h.h")',
    '#if __has_include\\  \n("h.h")',
    # digraphs and trigraphs
    '%:if __has_include("h.h")',
    "%:if __has_include(<h.h>)",
    '??=if __has_include("h.h")',
    '#if __has_??/\ninclude("h.h")',
    # macros that make the operand
    '#define A "h.h"\n#if __has_include(A)',
    "#define A <h.h>\n#if __has_include(A)",
    '#define A "h.h"\n#define B A\n#if __has_include(B)',
    "#define A(x) <x.h>\n#if __has_include(A(h))",
    "#define A(x) #x\n#if __has_include(A(h.h))",
    "#define S(x) #x\n#define A(x) S(x)\n#define N h.h\n#if __has_include(A(N))",
    "#define A(x, y) <x##y>\n#if __has_include(A(h, .h))",
    "#define A <h\n#define B .h>\n#if __has_include(A B) || __has_include(<h.h>)",
    "#define L <\n#define G >\n#if __has_include(L h.h G) || __has_include(<h.h>)",
    "#define N h\n#if __has_include(<N.h>) || __has_include(<h.h>)",
    '#define E\n#if __has_include(E "h.h" E)',
    "#define E\n#if __has_include(E<h.h>E)",
    "#define A(...) __VA_ARGS__\n#if __has_include(A(<h.h>))",
    '#define A() "h.h"\n#if __has_include(A())',
    # macros that make the whole
    '#define A __has_include("h.h")\n#if A',
    "#define A __has_include(<h.h>)\n#if A",
    "#define A(x) __has_include(x)\n#if A(<h.h>)",
    '#define A __has_include\n#if A("h.h")',
    "#define A __has_include\n#define B A\n#if B(<h.h>)",
    '#define A (\n#define B )\n#if __has_include A "h.h" B',
    "#define A(x) x\n#if A(__has_include)(<h.h>)",
    '#define A(x, y) x##y\n#if A(__has_, include)("h.h")',
    "#define A(x, y) x##y\n#if A(__has_in, clude)(<h.h>)",
    '#define A(x) __has_##x\n#if A(include)("h.h")',
    "#define A(x, y) x##y\n#define B A(__has, _include)\n#if B(<h.h>)",
    # other words
    '#if __has_include__("h.h")',
    '#if __has_include_next("h.h")',
    "#if __has_include_next(<h.h>)",
    "#if __has_embed(<h.h>)",
    '#ifdef __has_include\n#if __has_include("h.h")\n#define FOUND\n#endif\n#endif\n#ifdef FOUND',
    '#if defined __has_include && (__has_include("h.h"))',
    "\f\v#if\f__has_include\v(<h.h>)",
    '#if __has_include(u8"h.h") || __has_include("h.h")',
    '#if __has_include(R"(h.h)") || __has_include("h.h")',
    '#if __has_include("h.h"_x) || __has_include("h.h")',
    '#if __has_include("h.h" "x") || __has_include("h.h")',
    "#if 0\n'\n#endif\n#if __has_include(<h.h>)",
    '#if 0\n"/*\n#endif\n#if __has_include(<h.h>)\n// */',
    '#define Q "/*"\n#if __has_include("h.h")\n// */',
    'const char* q = R"x(/*)x";\n#if __has_include("h.h")\n// */',
    "#undef none\n#pragma once\n#if __has_include(<h.h>)",
]


@pytest.mark.parametrize("number", range(len(HAS_INCLUDE)))
def test_has_include_however_it_is_written(cache: KernelCache, tree: Path, number: int) -> None:
    spelled = HAS_INCLUDE[number]
    text = f"{spelled}\n#define V 1\n#else\n#define V 2\n#endif\n"
    write(tree / "inc/x.h", text)
    (tree / "inc/sub").mkdir()
    in_source = text + KERNEL
    in_header = "#include <x.h>\n" + KERNEL
    options = paths("first", "inc")
    older = options.replace(std=14)
    asked = [(in_source, options), (in_header, options)]
    if "??" in spelled:
        asked.append((in_header, older))

    def check() -> list[kcache.CompiledKernel | None]:
        return [agree(cache, source, given) for source, given in asked]

    check()
    header = write(tree / "inc/h.h", "")
    check()
    header.unlink()
    check()
    write(tree / "first/h.h", "")
    check()
    for kernel in check():
        assert kernel is None or kernel.cached


# -- options that name files -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        ["--pre-include", "pre.h"],
        ["--pre-include=pre.h"],
        ["-include", "pre.h"],
        ["-include=pre.h"],
        ["-Xcudafe", "--preinclude=pre.h"],
        ["-Xcudafe", "--preinclude", "-Xcudafe", "pre.h"],
        ["-Xcudafe=--preinclude=pre.h"],
        ["--include_directory=more"],
        ["-Xcudafe", "--include_directory=more"],
        ["-Xcudafe", "-Imore"],
    ],
)
def test_an_option_that_names_a_header(cache: KernelCache, tree: Path, extra: list[str]) -> None:
    header = write(tree / "pre.h", "#define V 1\n")
    more = write(tree / "more/m.h", "#define V 3\n")
    source = "#if __has_include(<m.h>)\n#include <m.h>\n#endif\n" + KERNEL
    options = paths("inc", extra_options=extra)
    if agree(cache, source, options) is None:
        return  # both refuse it
    assert agreed(cache, source, options).cached
    if any("pre.h" in each for each in extra):
        header.write_text("#define V 2\n")
    else:
        more.write_text("#define V 4\n")
    assert not agreed(cache, source, options).cached
    write(tree / "inc/m.h", "#undef V\n#define V 5\n")
    agree(cache, source, options)


@pytest.mark.parametrize(
    "extra",
    [
        ["--ptxas-options=-optf=F"],
        ["--ptxas-options", "-optf=F"],
        ["--ptxas-options=--options-file=F"],
    ],
)
def test_a_file_of_options(cache: KernelCache, tree: Path, extra: list[str]) -> None:
    file = write(tree / "F", "-O0\n")
    options = ARCH.replace(extra_options=extra)
    source = KERNEL.replace("V", "out[1] * out[2] + 3")
    first = agree(cache, source, options)
    if first is None:
        return
    agreed(cache, source, options)
    file.write_text("-O3\n")
    second = agreed(cache, source, options)
    assert first.cubin != second.cubin
    file.unlink()
    agree(cache, source, options)
    write(file, "-O0\n")
    agreed(cache, source, options)


def test_extra_key_does_not_stand_for_absent_files(cache: KernelCache, tree: Path) -> None:
    source = GUESS.format('__has_include("x.h")') + KERNEL
    for number in range(2):
        agreed(cache, source, paths("first", "inc"), extra_key=b"mine")
        assert agreed(cache, source, paths("first", "inc"), extra_key=b"mine").cached
        write(tree / ("inc", "first")[number] / "x.h", "")
        agreed(cache, source, paths("first", "inc"), extra_key=b"mine")


# -- links and directories -------------------------------------------------------------------------


def test_a_link_that_is_switched_and_switched_back(cache: KernelCache, tree: Path) -> None:
    """Within the time in which stamps tell nothing; then another process asks."""
    for number in (1, 2):
        write(tree / f"v{number}/x.h", f"#define V {number}\n")
    link = tree / "inc"
    source = "#include <x.h>\n" + KERNEL
    link.symlink_to("v1")
    agreed(cache, source, paths("inc"))
    for version in ("v2", "v1", "v2"):
        other = tree / "next"
        other.symlink_to(version)
        other.rename(link)
        agreed(cache, source, paths("inc"))
    code = """
    import os, sys
    from nvrtc.reference import *
    os.chdir(sys.argv[1])
    options = ARCH.replace(include_paths=["inc"])
    with kcache.KernelCache(sys.argv[2]) as cache:
        print(agreed(cache, "#include <x.h>\\n" + KERNEL, options).cached)
        os.unlink("inc")
        os.symlink("v1", "inc")
        print(agreed(cache, "#include <x.h>\\n" + KERNEL, options).cached)
    """
    for _ in range(2):
        assert python(code, tree, cache.directory).split() == ["True", "True"]
        link.unlink()
        link.symlink_to("v2")


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


def _slow(tree: Path, count: int) -> str:
    """Write headers that take a while to read, and return a source that includes them all."""
    for number in range(count):
        write(tree / f"a/h{number}.h", f"#define H{number} 1\n" + f"struct x{number};\n" * 200)
        write(tree / f"b/h{number}.h", f"#define H{number} 3\n" + f"struct y{number};\n" * 200)
    includes = "".join(f"#include <h{number}.h>\n" for number in range(count))
    total = " + ".join(f"H{number}" for number in range(count))
    return includes + KERNEL.replace("V", total)


def test_a_directory_that_is_exchanged_during_compiles(
    cache: KernelCache, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes is made of one state or a mixture; what is stored is true."""
    source = _slow(tree, 40)
    link = tree / "inc"
    link.symlink_to("a")

    def exchange() -> None:
        for version in ("b", "a") * 20:
            other = tree / "next"
            other.symlink_to(version)
            other.rename(link)

    during = During(monkeypatch, exchange)
    for number in range(6):
        cache.get_or_compile(f"{source}// {number}", (), paths("inc"))
    assert during.count >= 6
    monkeypatch.undo()
    for version in ("a", "b"):
        link.unlink()
        link.symlink_to(version)
        for number in range(6):
            agreed(cache, f"{source}// {number}", paths("inc"))


def test_a_header_that_is_written_during_compiles(
    cache: KernelCache, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _slow(tree, 20)
    header = tree / "a/h7.h"
    before = header.read_text()

    def edit() -> None:
        for value in range(30):
            header.write_text(before.replace("H7 1", f"H7 {value}"))

    During(monkeypatch, edit)
    for number in range(6):
        with suppress(kcache.CompileError):  # it read the header while that was empty
            cache.get_or_compile(f"{source}// {number}", (), paths("a"))
    monkeypatch.undo()
    for text in (header.read_text(), before):
        header.write_text(text)
        for number in range(6):
            agreed(cache, f"{source}// {number}", paths("a"))


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
    for number in range(6):
        os.chdir(tree / "one")
        During(monkeypatch, change)
        kernel = cache.get_or_compile(f"{source}// {number}", (), paths("inc"))
        monkeypatch.undo()
        assert kernel.ptx == expected.ptx
    for folder in ("one", "two"):
        os.chdir(tree / folder)
        for number in range(6):
            agreed(cache, f"{source}// {number}", paths("inc"))
    os.chdir(tree)


# -- names that are not UTF-8 ----------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"\xff", b"a\xfe\x80b", b"\xc3", b"\xed\xa0\x80"])
@pytest.mark.parametrize("where", ["directory", "include", "working directory", "source"])
def test_names_that_are_not_utf8(cache: KernelCache, tree: Path, raw: bytes, where: str) -> None:
    name = os.fsdecode(raw)
    here = tree / name if where == "working directory" else tree
    here.mkdir(exist_ok=True)
    os.chdir(here)
    folder = name if where in ("directory", "include") else "inc"
    header = write(here / folder / "x.h", "#define V 1\n")
    options = paths(folder)
    source = "#include <x.h>\n" + KERNEL
    arguments: dict[str, Any] = {}
    if where == "include":
        options = paths("none", extra_options=[f"-I{name}"])
    try:
        first = cache.get_or_compile(source, (), options, **arguments)
    except kcache.ConfigError:
        return
    assert first.cubin == compile_clean(source, options.flags()).cubin
    for value in (2, 1):
        header.write_text(f"#define V {value}\n")
        agreed(cache, source, options)
    write(here / "none/x.h", "#define V 3\n")
    agreed(cache, source, options)
    os.chdir(tree)
