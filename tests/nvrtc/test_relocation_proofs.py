"""The same tree in another folder hits once a compile under told paths gave the same bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, KERNEL, PTX, agree, agreed, working_directory, write

import kcache
from kcache.nvrtc.workers import opaque

pytestmark = pytest.mark.usefixtures("nvrtc")

#: Mentions `__FILE__`, and makes nothing of it.
_MENTIONS = "#define WHERE __FILE__\n#define V 1\n"


def _tree(folder: Path, text: str) -> kcache.CompileOptions:
    write(folder / "inc/x.h", text)
    return PTX.replace(include_paths=[folder / "inc"])


def _asked(tmp_path, source, options, **more):
    """Ask in a cache of its own, whose end waits for the proofs; None if it does not compile."""
    with kcache.KernelCache(tmp_path / "cache", relocation="eager") as cache:
        return agree(cache, source, options, **more)


def test_one_location_that_is_special(tmp_path):
    """Once a proof has failed, none makes another location's kernel good at that one."""
    special = tmp_path / "aa"
    text = (
        "__device__ constexpr bool eq(const char* a, const char* b)"
        " { return *a == *b && (!*a || eq(a + 1, b + 1)); }\n"
        'extern "C" __global__ void k(int* out)'
        f' {{ constexpr bool v = eq(__FILE__, "{special}/inc/x.h"); *out = v; }}\n'
    )
    for folder in ("aa", "bb", "cc", "aa"):
        _asked(tmp_path, "#include <x.h>\n", _tree(tmp_path / folder, text))


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    "way", ["/proc/self/cwd", "/dev/../proc/self/root{}", "/sys/devices/..//..{}"]
)
def test_a_header_by_way_of_the_systems_directories(cache, tmp_path, way):
    """They were taken for the compiler's own files, and not recorded."""
    with working_directory(tmp_path):
        for value in ("1", "2"):
            write(tmp_path / "x.h", f"#define V {value}\n")
            agreed(cache, f'#include "{way.format(tmp_path)}/x.h"\n' + KERNEL)


def test_an_eager_proof_spares_the_second_location_all(tmp_path):
    source = "#include <x.h>\n" + KERNEL
    first, second = (_tree(tmp_path / name, _MENTIONS) for name in ("a", "b"))
    with kcache.KernelCache(tmp_path / "cache", relocation="eager") as cache:
        assert not agreed(cache, source, first).cached
    assert cache.stats().proofs == 1
    shutil.move(tmp_path / "cache", tmp_path / "elsewhere")
    with kcache.KernelCache(tmp_path / "elsewhere") as cache:
        assert agreed(cache, source, second).cached
        assert agreed(cache, source, first).cached
        stats = cache.stats()
    assert (stats.compiles, stats.proofs, stats.misses) == (0, 0, 0)


def test_a_source_without_headers_and_with_a_plain_name_gets_no_proof(tmp_path):
    """Everybody calls it so."""
    with kcache.KernelCache(tmp_path / "cache", relocation="eager") as cache:
        agreed(cache, KERNEL.replace("V", "7"))
    assert cache.stats().proofs == 0


def test_a_program_that_ends_without_close_abandons_its_proofs(tmp_path):
    """It ends at once, without an error, and the kernels are there."""
    options = _tree(tmp_path / "a", "#define WHERE __FILE__\n#define V N\n")
    code = (
        "import sys, kcache\n"
        f"cache = kcache.KernelCache({str(tmp_path / 'cache')!r}, relocation='eager')\n"
        f"options = kcache.CompileOptions(arch='sm_80', include_paths={[*options.include_paths]!r})\n"
        f"sources = ['#define N %d\\n#include <x.h>\\n{KERNEL.strip()}' % n for n in range(3)]\n"
        "kernels = cache.compile_many([(source, (), options) for source in sources])\n"
        "assert cache.entry_count == 6\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_waits_for_no_proof_of_its_parent(tmp_path):
    with kcache.KernelCache(tmp_path / "cache", relocation="eager") as cache:
        agreed(cache, "#include <x.h>\n" + KERNEL, _tree(tmp_path / "a", _MENTIONS))
        child = os.fork()
        if not child:
            status = 1
            try:
                cache.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


# -- the source's own directory --------------------------------------------------------------------


def _named(tmp_path, place, source, options):
    """Return the kernel of a source that lies in `place`, checked against a bare compile."""
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    kernel = _asked(tmp_path, source, options, source_name=str(tmp_path / place / "k.cu"))
    assert kernel is not None
    return kernel


@pytest.mark.parametrize("internal", [False, True])
def test_a_source_in_another_directory_hits_once_that_is_proven(tmp_path, internal):
    """CuPy writes each source into a new temporary directory."""
    options = _tree(tmp_path, _MENTIONS)
    hidden = "namespace { __device__ int hidden; }\n__device__ int* p = &hidden;\n" * internal
    source = "#include <x.h>\n" + hidden + KERNEL
    assert not _named(tmp_path, "a", source, options).cached
    assert _named(tmp_path, "b/b", source, options).cached
    write(tmp_path / "c/x.h", "#define V 9\n")  # found beside a source with quotes only
    assert _named(tmp_path, "c", source, options).cached


def test_a_header_appears_beside_a_source_in_another_directory(tmp_path):
    options = _tree(tmp_path / "tree", _MENTIONS)
    source = '#include "x.h"\n' + KERNEL
    assert not _named(tmp_path, "a", source, options).cached
    assert _named(tmp_path, "b", source, options).cached
    write(tmp_path / "c/x.h", "#define WHERE __FILE__\n#define V 9\n")
    assert not _named(tmp_path, "c", source, options).cached
    assert not _named(tmp_path, "tree/inc", source, options).cached


#: Uses of a header's name that the first, the second and a made-up location agree on, and the third
#: does not. `{length}` is the size of the third name as a literal, `{name}` is that name.
_CORNERS = {
    "a letter": "__FILE__[{common}] == 'x'",
    "its type": "Same<decltype(__FILE__), const char (&)[{length}]>::value",
    "an assertion as a text": "sizeof(TEXT(assert(1))) == {length} + 87",
    "pushed and popped": "sizeof(__FILE__) == {length}",
    "source location": 'equal(location(), "{name}")',
}
_BEFORE = {
    "its type": (
        "template <class T, class U> struct Same { static constexpr bool value = false; };\n"
        "template <class T> struct Same<T, T> { static constexpr bool value = true; };\n"
    ),
    "pushed and popped": '#pragma push_macro("__FILE__")\n#pragma pop_macro("__FILE__")\n',
    "source location": (
        "__device__ constexpr const char* location(const char* f = __builtin_FILE())"
        " { return f; }\n"
    ),
}
_CORNER = """
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)
__device__ constexpr bool equal(const char* a, const char* b)
{ return *a == *b && (!*a || equal(a + 1, b + 1)); }
"""
_CORNER_KERNEL = """
extern "C" __global__ void k(int* out) { constexpr int v = CORNER; *out = v; }
"""


@pytest.mark.parametrize("corner", _CORNERS)
def test_a_third_location_that_differs(tmp_path, corner):
    """Whatever a header computes of its name, no location gets another's kernel."""
    first, third = tmp_path / "abc" / ("l" * 60), tmp_path / "xc"
    name = str(third / "inc/x.h")
    text = _CORNER + _BEFORE.get(corner, "") + _CORNER_KERNEL.replace("CORNER", _CORNERS[corner])
    values = {"name": name, "length": len(name) + 1, "common": len(str(tmp_path)) + 1}
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", str(value))
    kernels: list[object] = []
    for folder in (first, third):
        options = _tree(folder, text).replace(std="c++20")
        with kcache.KernelCache(tmp_path / "cache", relocation="eager") as cache:
            kernel = cache.get_or_compile("#include <x.h>\n", (), options)
        kernels.append(kernel.ptx)
        assert not kernel.cached  # so it is right
    assert kernels[0] != kernels[1], "the locations do not differ"


#: Headers that mention their name, of which no kernel has anything.
_HARMLESS = {
    "assertions": "inline __device__ int f(int x) { assert(x > 3); return x; }\n"
    "template <class T> constexpr __host__ __device__ T g(T x) { assert(x > 0); return x; }\n"
    "constexpr int G = g(7);\n#define V G\n",
    "an alias": "#define WHERE __FILE__\n#define CHECK(x) ((x) ? 0 : fail(#x, __FILE__))\n#define V 1\n",
    "printed": "inline __device__ void f(int x) {\n"
    'if (x) printf("%s:%d: %s\\n", __FILE__, __LINE__, "x"); else printf("%d %f %s", x, 1., __FILE__); }\n'
    '#define V printf("%d %s", *out, "abc")\n',
}


@pytest.mark.parametrize("harmless", _HARMLESS)
def test_a_name_that_is_not_used(tmp_path, harmless):
    with kcache.KernelCache(tmp_path / "cache") as cache:
        for folder, hit in (("a", False), ("b/b", True)):
            options = _tree(tmp_path / folder, _HARMLESS[harmless])
            assert agreed(cache, "#include <x.h>\n" + KERNEL, options).cached is hit
        assert cache.stats().proofs == 1, "the text was not taken to mention its name"


def test_a_worker_is_as_before_after_a_proof(tmp_path):
    """`__FILE__` is what it was in the next compile, and so are warnings."""
    text = "#define TEXT(x) #x\n#define V sizeof(__FILE__) + sizeof(TEXT(\\u0429))\n"
    source = "#include <x.h>\n" + KERNEL
    with kcache.KernelCache(tmp_path / "cache", workers=1) as cache:
        for folder in ("a", "c"):
            agreed(cache, source, _tree(tmp_path / folder, _MENTIONS))
        assert cache.stats().proofs == 1
        kernel = agreed(cache, source, _tree(tmp_path / "b", text))
        assert "2282-D" in kernel.log


def test_a_compiler_whose_macro_has_no_name_that_can_be_changed():
    with (
        pytest.raises(OSError, match="constants"),
        opaque.renamed("/no/such/library.so", opaque.FILES),
    ):
        pass


def test_a_header_that_changes_before_its_proof(tmp_path):
    """The proof sees another header, and so it says nothing of what was compiled before."""
    constant = "#define WHERE __FILE__\n" + KERNEL.replace("V", "1")
    length = "#define WHERE __FILE__\n" + KERNEL.replace("V", "sizeof(WHERE)")
    for number, (before, after) in enumerate(((constant, length), (length, constant))):
        folder, other = tmp_path / f"a{number}", tmp_path / f"b{number}"
        with kcache.KernelCache(tmp_path / f"cache{number}", relocation="eager") as cache:
            proofs, edited = cache._on_miss().proofs, threading.Event()

            def add(prove, add=proofs.add, edited=edited):
                add(lambda: edited.wait(60) and prove())

            proofs.add = add
            agreed(cache, "#include <x.h>\n", _tree(folder, before))
            options = _tree(folder, after)
            edited.set()
            proofs.finish()
            assert not agreed(cache, "#include <x.h>\n", options).cached
            agreed(cache, "#include <x.h>\n", _tree(other, after))
            agreed(cache, "#include <x.h>\n", _tree(other, before))


# -- whole trees -----------------------------------------------------------------------------------


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
            options = PTX.replace(include_paths=[base / "inc", base / "other"])
            kernel = agreed(cache, source, options, source_name="src/kernel.cu")
            hits.append(kernel.cached)
            assert str(folder / "inc/sub/../w.h") in kernel.dependencies
    assert hits == [False, True]
    # A change in one place is noticed there, and the other place keeps its hit.
    write(there / "inc/w.h", "#define W 2\n")
    for folder in (here, there):
        with working_directory(folder):
            base = folder if absolute else Path()
            options = PTX.replace(include_paths=[base / "inc", base / "other"])
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
