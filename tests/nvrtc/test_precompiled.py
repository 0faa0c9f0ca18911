"""Precompiled headers: faster misses, and never another outcome than a plain compile's."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvrtc.reference import ARCH, KERNEL, agree, agreed, compile_fresh, python, write

import kcache
from kcache.kernels import batch
from kcache.nvrtc import compiler
from kcache.nvrtc.compiler import Run
from kcache.nvrtc.frontend import _header_set
from kcache.nvrtc.headers import HeaderSet
from kcache.nvrtc.preamble import preamble
from kcache.nvrtc.request import Request
from kcache.nvrtc.workers import pool

pytestmark = pytest.mark.usefixtures("nvrtc")

#: Sources that begin alike differ in this.
_number = itertools.count()


class Family:
    """Kernels that begin alike, compiled with precompiled headers by one worker."""

    def __init__(self, siblings: int = 0) -> None:
        self.siblings = siblings

    def request(self, begin: str, options: kcache.CompileOptions, **arguments: Any) -> Request:
        source = f"{begin}__device__ int n{next(_number)};\n{KERNEL}"
        options = options.replace(precompiled_headers=True)
        given: dict[str, Any] = {"source_name": "kernel.cu", "headers": None, **arguments}
        headers = given.pop("headers")
        made = Request.make(source, (), options, headers, b"", compiler="this", **given)
        return made._replace(siblings=self.siblings)

    def plain(self, request: Request) -> Request:
        return request._replace(options=request.options.replace(precompiled_headers=False))

    def run(self, begin: str, options: kcache.CompileOptions, **arguments: Any) -> Run:
        """Compile another kernel, and assert that a plain compile is not to be told from it."""
        request = self.request(begin, options, **arguments)
        run = compiler.compile_request(request)
        expected = compile_fresh(
            request.source,
            options.flags(),
            headers=request.headers,
            source_name=request.source_name,
        )
        assert not expected.failed, expected.log
        compiled = run.compiled
        assert (compiled.ptx, compiled.cubin) == (expected.ptx, expected.cubin), "STALE"
        assert compiled.log == expected.log
        plain = compiler.compile_request(self.plain(request))
        assert self.headers_of(request, run) == self.headers_of(request, plain)
        assert run.problem == plain.problem
        return run

    def headers_of(self, request: Request, run: Run) -> HeaderSet:
        assert run.record is not None
        return _header_set(request, run.record, run.compiled)

    def compile(self, begin: str, options: kcache.CompileOptions, **arguments: Any) -> HeaderSet:
        run = self.run(begin, options, **arguments)
        request = self.request(begin, options, **arguments)
        return self.headers_of(request, run)

    def uses(self, begin: str, options: kcache.CompileOptions, **arguments: Any) -> bool:
        """Tell whether another kernel is compiled with a precompiled header."""
        return self.run(begin, options, **arguments).precompiled


@pytest.fixture
def family(nvrtc: tuple[int, int]) -> Iterator[Family]:
    if nvrtc < (13, 0):
        pytest.skip("headers are precompiled with NVRTC 13 and later")
    pool.shared().close()
    yield Family()
    pool.shared().close()


@pytest.fixture
def many(family: Family) -> Family:
    """A family of which each worker is to compile many."""
    family.siblings = 4
    return family


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two include directories below the working directory, headers in the second."""
    folder = tmp_path / "tree"
    (folder / "first").mkdir(parents=True)
    write(folder / "second/x.h", '#include "y.h"\n#include <z.h>\n#define V (Y + Z)\n')
    write(
        folder / "second/y.h",
        "#if __has_include(<p.h>)\n#define Y 100\n#else\n#define Y 1\n#endif\n",
    )
    write(folder / "second/z.h", "#pragma once\n#ifndef Z\n#define Z 10\n#endif\n")
    monkeypatch.chdir(folder)
    return folder


PATHS = ARCH.replace(include_paths=["first", "second"])
BEGIN = "// A kernel.\n#include <x.h>\n"


def test_the_second_kernel_uses_what_the_first_one_left(family: Family, tree: Path) -> None:
    assert not family.uses(BEGIN, PATHS)
    family.compile(BEGIN, PATHS)
    assert family.uses(BEGIN, PATHS)


def test_the_option_is_no_part_of_the_key(cache: kcache.KernelCache, tree: Path) -> None:
    source = BEGIN + KERNEL
    options = PATHS.replace(precompiled_headers=True)
    first = agreed(cache, source, PATHS)
    second = agreed(cache, source, options)
    assert second.cached
    assert second.key == first.key
    another = agreed(cache, source + "// another\n", options)
    assert agreed(cache, source + "// another\n", PATHS).key == another.key
    assert options.flags() == PATHS.flags()


def test_anything_but_true_and_false_is_refused() -> None:
    with pytest.raises(
        kcache.ConfigError, match="precompiled_headers='yes'.*True, False, \"auto\""
    ):
        ARCH.replace(precompiled_headers="yes")


# -- headers that change ---------------------------------------------------------------------------


def edit(path: str, text: str) -> None:
    Path(path).write_text(text)


def edit_keeping_times(path: str, text: str) -> None:
    status = os.stat(path)
    edit(path, text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def exchange_folders() -> None:
    write(Path("third/x.h"), "#define V 7\n")
    os.rename("second", "old")
    os.rename("third", "second")


CHANGES = {
    "edit": lambda: edit("second/y.h", "#define Y 2\n"),
    "edit, old times and size": lambda: edit_keeping_times(
        "second/z.h", Path("second/z.h").read_text().replace("10", "20")
    ),
    "another include": lambda: edit("second/y.h", "#include <w.h>\n"),
    "shadowed": lambda: edit("first/z.h", "#define Z 30\n"),
    "shadowed beside": lambda: edit("second/p.h", ""),
    "probe found": lambda: edit("first/p.h", ""),
    "exchanged folders": exchange_folders,
    "replaced": lambda: os.replace(write(Path("new.h"), "#define V 8\n"), "second/x.h"),
    "a link": lambda: (os.unlink("second/z.h"), os.symlink("../w.h", "second/z.h")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_kernels_is_seen(family: Family, tree: Path, change: str) -> None:
    write(tree / "first/w.h", "#define Y 40\n#define Z 40\n")
    write(tree / "w.h", "#define Z 50\n")
    before = family.compile(BEGIN, PATHS)
    assert family.uses(BEGIN, PATHS)
    CHANGES[change]()
    run = family.run(BEGIN, PATHS)
    assert not run.precompiled
    assert family.headers_of(family.request(BEGIN, PATHS), run) != before
    assert family.uses(BEGIN, PATHS)  # made again


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_where_many_are_to_come(
    many: Family, tree: Path, change: str, long: bool
) -> None:
    if not long and change not in {"edit", "shadowed", "probe found"}:
        pytest.skip("one of many; all run with --long")
    write(tree / "first/w.h", "#define Y 40\n#define Z 40\n")
    write(tree / "w.h", "#define Z 50\n")
    before = many.compile(BEGIN, PATHS)
    assert many.uses(BEGIN, PATHS)
    CHANGES[change]()
    run = many.run(BEGIN, PATHS)
    assert not run.precompiled  # it is made again afterwards
    assert many.headers_of(many.request(BEGIN, PATHS), run) != before
    assert many.uses(BEGIN, PATHS)


def test_a_header_that_is_gone_is_missed(family: Family, tree: Path) -> None:
    family.compile(BEGIN, PATHS)
    (tree / "second/z.h").unlink()
    request = family.request(BEGIN, PATHS)
    with pytest.raises(kcache.CompileError) as caught:
        compiler.compile_request(request)
    assert caught.value.log == compile_fresh(request.source, PATHS.flags()).log


def test_what_only_looks_different_is_used(family: Family, tree: Path) -> None:
    family.compile(BEGIN, PATHS)
    os.utime(tree / "second/y.h")
    assert family.uses(BEGIN, PATHS)
    edit("first/unrelated.h", "")
    assert family.uses(BEGIN, PATHS)


@pytest.mark.parametrize(
    ("begin", "options", "arguments"),
    [
        ("// Another comment.\n#include <x.h>\n", PATHS, {}),
        ("#define Z 5\n" + BEGIN, PATHS, {}),
        (BEGIN + "#undef V\n#define V 9\n", PATHS, {}),
        (BEGIN, PATHS.replace(defines={"Z": 6}), {}),
        (BEGIN, PATHS.replace(arch="sm_90"), {}),
        (BEGIN, PATHS.replace(std="c++20"), {}),
        (BEGIN, PATHS.replace(include_paths=["second", "first"]), {}),
        (BEGIN, PATHS, {"source_name": "second/kernel.cu"}),
        (BEGIN, PATHS, {"headers": {"z.h": "#define Z 3\n"}}),
    ],
)
def test_what_decides_the_headers_keeps_them_apart(
    family: Family, tree: Path, begin: str, options: kcache.CompileOptions, arguments: Any
) -> None:
    family.compile(BEGIN, PATHS)
    assert not family.uses(begin, options, **arguments)
    family.compile(begin, options, **arguments)
    assert family.uses(begin, options, **arguments)


def test_in_memory_headers_that_change(family: Family, tree: Path) -> None:
    for value in (1, 2, 1):
        family.compile('#include "m.h"\n', ARCH, headers={"m.h": f"#define V {value}\n"})


def test_another_working_directory(family: Family, tree: Path) -> None:
    family.compile(BEGIN, PATHS)
    write(tree / "other/second/x.h", "#define V 6\n")
    os.chdir(tree / "other")
    family.compile(BEGIN, PATHS)


def test_a_probe_in_the_code_is_the_codes_own(family: Family, tree: Path) -> None:
    edit("second/x.h", "#define HAS(x) __has_include(x)\n#define V 1\n")
    probing = "#if HAS(<q.h>)\n#undef V\n#define V 2\n#endif\n"
    family.compile(BEGIN, PATHS)
    code = f"{BEGIN}__device__ int before;\n{probing}"
    missing = family.compile(code, PATHS)
    edit("second/q.h", "")
    assert family.uses(code, PATHS)
    found = family.compile(code, PATHS)
    assert missing != found


# -- what the compiler says ------------------------------------------------------------------------

WARNING = "#warning in the header\n__device__ inline int f() { int unused; return 1; }\n"
LATE = "template<class T> __device__ int g(T t) { int late; return 1; }\n#define V g(1)\n"


@pytest.mark.parametrize("rest", ["", "__device__ int h() { int mine; return 1; }\n"])
@pytest.mark.parametrize(
    "header", ["#define V 1\n", WARNING + "#define V 1\n", WARNING + LATE, LATE]
)
def test_the_log_is_a_plain_compiles(family: Family, tree: Path, header: str, rest: str) -> None:
    edit("second/x.h", header)
    for _ in range(2):
        family.compile(BEGIN + rest, PATHS)
    assert family.uses(BEGIN + rest, PATHS)


def test_a_kernel_that_fails_and_a_good_one(cache: kcache.KernelCache, tree: Path) -> None:
    options = PATHS.replace(precompiled_headers=True)
    agreed(cache, BEGIN + KERNEL, options)
    bad = BEGIN + "junk junk;\n" + KERNEL
    for _ in range(2):
        assert agree(cache, bad, options) is None
        with pytest.raises(kcache.CompileError) as caught:
            cache.get_or_compile(bad, (), options)
        assert caught.value.log == compile_fresh(bad, options.flags()).log
    agreed(cache, BEGIN + "// good\n" + KERNEL, options)
    bad = BEGIN.replace("x.h", "nowhere.h") + KERNEL
    assert agree(cache, bad, options) is None
    agreed(cache, BEGIN + "// better\n" + KERNEL, options)


# -- what can be precompiled -----------------------------------------------------------------------

INCLUDE = "#include <x.h>\n"
#: Preambles, each with what else may stand before or between its includes.
WHOLE = [
    INCLUDE,
    f"// a comment\n/* another\n one */ {INCLUDE}",
    f"// one that goes \\\n on\n{INCLUDE}",
    f'#define A(x) #x // "\n#define B \\\n  2\n#undef A\n{INCLUDE}#include "y.h"\n',
    f"#pragma once\n#pragma nv_diag_suppress 177\n{INCLUDE}",
    f"#ifdef NEVER\n#error never\n#elif defined(A)\n#else\n{INCLUDE}#endif\n#include <z.h>\n",
    f"#if 0\n#include <nowhere.h>\n#if 1\n#define A 1\n#else\n#endif\n#endif\n{INCLUDE}#include <z.h>\n",
    f"#if __has_include(<x.h>)\n{INCLUDE}#endif\n#if !__has_include(<no.h>)\n#include <z.h>\n#endif\n",
    f"#define HERE <z.h>\n{INCLUDE}#include HERE\n",
    "/* a */ # /* b */ define /* c */ A /* d */ 1\n#  include /* e */ <x.h> // f\n",
    "#\\\ninclude <x.h>\n#include <z.h>\n",
    f"%:define A 1\n{INCLUDE}",
    f"#warning early\n{INCLUDE}",
    f"{INCLUDE}\n\n   \t\n#include <z.h>\n\n\n",
]


@pytest.mark.parametrize("text", WHOLE)
def test_what_a_preamble_holds(family: Family, tree: Path, text: str) -> None:
    source = text + KERNEL.replace("V", "1")
    assert source[: preamble(source)].strip() == text.strip()
    family.compile(text + "#undef V\n#define V 1\n", PATHS)
    assert family.uses(text + "#undef V\n#define V 1\n", PATHS)


@pytest.mark.parametrize(
    ("source", "begin"),
    [
        ("__global__ void k() {}\n", None),
        ("#define A 1\n", None),
        (f"int x;\n{INCLUDE}", None),
        (f"{INCLUDE}int x;\n#include <z.h>\n", None),
        (f"{INCLUDE}int x;\n#include HERE\n", None),
        (f"{INCLUDE}int x;\n#embed <z.h>\n", None),
        (f"{INCLUDE}import x;\n", None),
        (f"{INCLUDE}#in??/\nclude <z.h>\n", None),
        (f"#ifndef GUARD\n#define GUARD\n{INCLUDE}int x;\n#endif\n", None),
        (f"#if 0\nint x;\n#endif\n{INCLUDE}", None),
        (f"#\n{INCLUDE}", None),
        (f"#line 7\n{INCLUDE}", None),
        (f"#pragma unroll\n{INCLUDE}", None),
        (f"#endif\n{INCLUDE}", None),
        (f"/* open\n{INCLUDE}", None),
        (f"#in\\\nclude <x.h>\n{INCLUDE}", None),
        (f"{INCLUDE}int x; // included\n", None),  # kcache does not check whether it is a comment
        (f"{INCLUDE}#if 1\nint x;\n#endif\n", INCLUDE),
        (f"{INCLUDE}#define A /* goes\non */ 1\n", INCLUDE),
        (f"{INCLUDE}#pragma unroll\n", INCLUDE),
        ("#include <x.h>", "#include <x.h>"),
        ("#include <x.h>\r\nint x;\r\n", "#include <x.h>\r\n"),
    ],
)
def test_where_a_preamble_ends(source: str, begin: str | None) -> None:
    assert preamble(source) == len(begin or "")


@pytest.mark.parametrize(
    "options",
    [
        PATHS.replace(debug=True),
        PATHS.replace(lto=True),
        PATHS.replace(extra_options=["-G"]),
        PATHS.replace(extra_options=["--pch-messages=false"]),
    ],
)
def test_options_without_precompiled_headers(
    family: Family, tree: Path, options: kcache.CompileOptions
) -> None:
    for _ in range(2):
        assert not compiler.compile_request(family.request(BEGIN, options)).precompiled


@pytest.mark.parametrize(
    "options",
    [
        PATHS.replace(lineinfo=True),
        PATHS.replace(arch="compute_80"),
        PATHS.replace(fast_math=True, optimization=1, max_registers=32),
        PATHS.replace(extra_options=["-rdc=true", "-w"]),
    ],
)
def test_options_with_precompiled_headers(
    family: Family, tree: Path, options: kcache.CompileOptions
) -> None:
    for _ in range(2):
        family.compile(BEGIN, options)
    assert family.uses(BEGIN, options)


@pytest.mark.parametrize(
    "header", ["__device__ inline int f() { return\n", 'extern "C" {\n', "static\n"]
)
def test_a_header_that_ends_amid_a_declaration(family: Family, tree: Path, header: str) -> None:
    edit("second/half.h", header)
    ending = {"s": "__device__ int g;\n", "e": "}\n"}.get(header[0], "1; }\n")
    begin = f"#define V 1\n#include <half.h>\n{ending}"
    for _ in range(2):
        family.compile(begin, PATHS)
    assert not family.uses(begin, PATHS)


@pytest.mark.parametrize(
    "header",
    [
        "#pragma pack(push, 1)\nstruct A { char a; int b; };\n#pragma pack(pop)\n",
        "#pragma pack(1)\n",
        "#pr\\\nagma /* a */ pack(push, 1)\n",
        '_Pragma("pack(1)")\n',
        "#define PRAGMA(x) _Pragma(#x)\nPRAGMA(pack(push, 1))\n",
        "#define T(x) _Pragma(#x)\n#define P(x) T(x)\n#define ONE 1\nP(pack(ONE))\n",
        "#define T(x) _Pragma(#x)\n#define P(x) T(x)\n#define ALIAS pack\nP(ALIAS(1))\n",
    ],
)
def test_a_header_that_packs_structures(family: Family, tree: Path, header: str) -> None:
    """NVRTC does not restore it: the structures of the code would have other sizes."""
    layout = tree / "second/layout.h"
    layout.write_text(header)
    begin = "#include <layout.h>\nstruct B { char a; int b; };\n#define V sizeof(B)\n"
    family.compile(begin, PATHS)
    family.compile(begin, PATHS)
    assert not family.uses(begin, PATHS)
    layout.write_text("// nothing\n")
    family.compile(begin, PATHS)
    family.compile(begin, PATHS)
    assert family.uses(begin, PATHS)


def test_it_takes_two_misses_where_nobody_asks_for_it(family: Family, tree: Path) -> None:
    def uses() -> bool:
        request = family.request(BEGIN, PATHS)
        options = request.options.replace(precompiled_headers="auto")
        return compiler.compile_request(request._replace(options=options)).precompiled

    assert [uses() for _ in range(4)] == [False, False, True, True]


# -- when ------------------------------------------------------------------------------------------


def test_many_that_are_to_come_are_precompiled_before_the_first(many: Family, tree: Path) -> None:
    assert [many.uses(BEGIN, PATHS) for _ in range(3)] == [True, True, True]


def test_few_that_are_to_come_are_not_precompiled_where_nobody_asks(
    family: Family, tree: Path
) -> None:
    for number in (1, 2, 3):
        request = family.request(BEGIN, PATHS)._replace(siblings=number)
        options = request.options.replace(precompiled_headers="auto")
        assert not compiler.compile_request(request._replace(options=options)).precompiled


def test_what_cannot_be_precompiled_is_tried_once_where_many_are_to_come(
    many: Family, tree: Path
) -> None:
    (tree / "second/layout.h").write_text("#pragma pack(1)\n")
    begin = "#include <layout.h>\nstruct B { char a; int b; };\n#define V sizeof(B)\n"
    for _ in range(3):
        assert not many.uses(begin, PATHS)


def test_a_compile_that_may_take_only_so_long_precompiles_nothing(many: Family, tree: Path) -> None:
    limits = compiler.Limits(timeout=100.0)
    for _ in range(3):
        assert not compiler.compile_request(many.request(BEGIN, PATHS), limits).precompiled


def test_a_batch_counts_its_families(family: Family, tree: Path) -> None:
    ours = [family.request(BEGIN, PATHS) for _ in range(9)]
    others = [family.request("#define A 1\n" + BEGIN, PATHS) for _ in range(3)]
    plain = [family.plain(family.request(BEGIN, PATHS)) for _ in range(5)]
    found = batch._with_siblings([*ours, *others, *plain], 2)
    assert [request.siblings for request in found] == [4] * 9 + [1] * 3 + [0] * 5


def test_a_batch_of_a_family(cache: kcache.KernelCache, tree: Path) -> None:
    options = PATHS.replace(precompiled_headers="auto")
    sources = [f"{BEGIN}__device__ int m{number};\n{KERNEL}" for number in range(9)]
    kernels = cache.compile_many([(source, (), options) for source in sources], jobs=2)
    for source, kernel in zip(sources, kernels, strict=True):
        assert isinstance(kernel, kcache.CompiledKernel)
        fresh = compile_fresh(source, PATHS.flags())
        assert (kernel.ptx, kernel.cubin) == (fresh.ptx, fresh.cubin)
    (tree / "second/y.h").write_text("#define Y 2\n")
    for source in sources:
        agreed(cache, source, options)


# -- threads, processes, files ---------------------------------------------------------------------


def test_many_threads_with_two_families(cache: kcache.KernelCache, tree: Path) -> None:
    options = PATHS.replace(precompiled_headers=True)
    failures: list[BaseException] = []

    def go(number: int) -> None:
        try:
            for step in range(6):
                begin = BEGIN if step % 2 else "#define Z 4\n" + BEGIN
                agreed(cache, f"{begin}// {number} {step}\n{KERNEL}", options)
        except BaseException as error:  # told to the test
            failures.append(error)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_forked_child_goes_on(family: Family, tree: Path) -> None:
    code = """
        import os
        from nvrtc.test_precompiled import BEGIN, PATHS, Family

        family = Family()
        family.compile(BEGIN, PATHS)
        pid = os.fork()
        if pid == 0:
            used = [family.uses(BEGIN, PATHS) for _ in range(2)]
            os._exit(0 if used == [False, True] else 3)
        assert os.waitpid(pid, 0)[1] == 0
        print(family.uses(BEGIN, PATHS))
    """
    assert python(code).split() == ["True"]


def test_files_have_no_names(family: Family, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tree))
    before = {*os.listdir(tree)}
    family.compile(BEGIN, PATHS)
    assert family.uses(BEGIN, PATHS)
    assert {*os.listdir(tree)} == before
    folders = [f"/proc/{worker}/fd" for worker in pool.shared().pids()]
    opened = [os.readlink(f"{folder}/{n}") for folder in folders for n in os.listdir(folder)]
    assert [name for name in opened if name.startswith(str(tree))]
    assert all("(deleted)" in name for name in opened if name.startswith(str(tree)))


def test_nowhere_to_put_a_file(family: Family, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tree / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    family.compile(BEGIN, PATHS)
    family.compile(BEGIN, PATHS)


def test_the_heap_leaves_no_file(
    family: Family, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name for name in os.listdir("/tmp") if name.startswith("edg.")}
    family.compile(BEGIN, PATHS)
    assert family.uses(BEGIN, PATHS)
    assert {name for name in os.listdir("/tmp") if name.startswith("edg.")} <= before


# -- real headers ----------------------------------------------------------------------------------

CUB = """\
#include <cub/block/block_reduce.cuh>
template <typename T, int Threads>
__global__ void sum(const T* in, T* out)
{
    using Reduce = cub::BlockReduce<T, Threads>;
    __shared__ typename Reduce::TempStorage storage;
    const T total = Reduce(storage).Sum(in[threadIdx.x]);
    if (threadIdx.x == 0) *out = total;
}
"""


@pytest.mark.slow
def test_cub(cache: kcache.KernelCache, cccl: Path) -> None:
    options = ARCH.replace(
        include_paths=[cccl], extra_options=["--frandom-seed=1"], precompiled_headers=True
    )
    plain = options.replace(precompiled_headers=False)
    for name in ("sum<float, 128>", "sum<int, 256>"):
        kernel = agreed(cache, CUB, options, [name])
        assert len(kernel.dependencies) > 100
        assert agreed(cache, CUB, plain, [name]).cached
