"""Places: a kernel that shows no path is used in other places, and equals a bare compile there.

The exception is code that *computes* with the letters of a path: it keeps those of the first place.
"""

import shutil
from contextlib import chdir
from pathlib import Path

import pytest
from nvrtc.reference import (
    KERNEL,
    PTX,
    agree,
    agreed,
    compile_fresh,
    write,
)

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")

INCLUDING = "#include <n.h>\n" + KERNEL
TEXT = "#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\n"
HASH = (
    "__device__ constexpr unsigned hash(const char* s) { return *s ? *s + 31 * hash(s + 1) : 7; }\n"
)

#: What a header may do with its own path, as the body of a function that the kernel calls.
FREE = {
    "nothing": "return x;",
    "a warning": "int unused; return x;",
    "a macro that is not used": "\n#define WHERE __FILE__\nreturn x;",
    "an assertion that holds": "constexpr int y = 3; assert(y > 0); return x + y;",
    "a branch that is never taken": "if (0) printf(__FILE__); return x;",
}
SHOWS = {
    "an assertion": "assert(x > 0); return x;",
    "a printed path": 'printf("%s", __FILE__); return x;',
    "a path in assembly": 'asm volatile("// " __FILE__); return x;',
    "a global array": "static __device__ const char where[] = __FILE__; return where[x];",
    "a table with a pointer": "struct Row { const char* name; char where[sizeof(__FILE__)]; };\n"
    'static __device__ const Row row = {"x", __FILE__}; return row.where[x] + *row.name;',
    "a wide literal": "\n#define WIDE_(x) L##x\n#define WIDE(x) WIDE_(x)\n"
    "const wchar_t* where = WIDE(__FILE__); return where[x];",
}
COMPUTES = {
    "its length": "return x + sizeof(__FILE__);",
    "a hash": "constexpr unsigned h = hash(__FILE__); return x + h;",
    "one letter": "return x + __FILE__[sizeof(__FILE__) / 2];",
    "a comparison": "constexpr bool less = hash(__FILE__) & 1; return less ? x : -x;",
    "a local array": "char name[] = __FILE__; name[1] = x; return name[x & 3] + name[x & 7];",
}
USES = {**FREE, **SHOWS, **COMPUTES}
_FUNCTION = "#ifndef PLACE\n#define PLACE\n%s__device__ inline int place(int x) {\n%s\n}\n#endif\n"


def place(use: str) -> str:
    return _FUNCTION % (HASH, USES[use])


def header(value: int) -> str:
    return f"#define V {value}\n"


def here(folder: Path, text: str) -> kcache.CompileOptions:
    write(folder / "inc/n.h", text)
    return PTX.replace(include_paths=[folder / "inc"])


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "there", [{"cwd": "two"}, {"inc": "../two/inc"}, {"cwd": "two", "inc": "../one/inc"}, {}]
)
def test_each_part_of_the_place_may_differ(cache, tmp_path, there):
    for name in ("one", "two"):
        write(tmp_path / name / "inc/n.h", header(1))
    for number, place in enumerate(({}, there)):
        with chdir(tmp_path / place.get("cwd", "one")):
            options = PTX.replace(include_paths=[place.get("inc", "inc")])
            assert agreed(cache, INCLUDING, options).cached is (number > 0)
    assert cache.stats().compiles == 1


@pytest.mark.parametrize("use", USES)
def test_a_kernel_is_relocated_if_its_outputs_show_no_path(cache, tmp_path, use):
    """A kernel that shows a path is compiled in each place.

    A kernel that computes with a path keeps the path of the first place.
    """
    source = '#include <n.h>\nextern "C" __global__ void k(int* o) { *o = place(*o); }\n'
    folders = [tmp_path / "a", tmp_path / "another", tmp_path / "a"]
    for number, folder in enumerate(folders):
        options = here(folder, place(use))
        kernel = cache.get_or_compile(source, (), options)
        if use not in COMPUTES or folder == folders[0]:
            assert agreed(cache, source, options) == kernel._replace(cached=True)
        assert kernel.cached is (number == 2 or (number == 1 and use not in SHOWS))


@pytest.mark.parametrize("use", COMPUTES)
def test_relocation_off_binds_every_kernel_to_its_place(tmp_path, use):
    source = '#include <n.h>\nextern "C" __global__ void k(int* o) { *o = place(*o); }\n'
    with kcache.KernelCache(tmp_path / "cache", relocation="off") as cache:
        for folder, hit in (("a", False), ("another", False), ("a", True), ("another", True)):
            assert agreed(cache, source, here(tmp_path / folder, place(use))).cached is hit


@pytest.mark.parametrize(
    "change", [{"lto": True}, {"lineinfo": True}, {"debug": True}, {"extra_options": ["-dlto"]}]
)
def test_outputs_with_directories_are_not_relocated(cache, tmp_path, change):
    for folder, hit in (("a", False), ("another", False), ("a", True)):
        options = here(
            tmp_path / folder, "__device__ int f(int i) { return i + 1; }\n#define V f(1)\n"
        )
        with chdir(tmp_path / folder):
            changed = options.replace(arch="sm_80", include_paths=["inc"], **change)
            assert agreed(cache, INCLUDING, changed).cached is hit


@pytest.mark.parametrize(
    "begin", ["#include <n.h>\n", "__device__ int place(int x) { return x; }\n"]
)
def test_a_log_has_the_paths_of_the_caller(cache, tmp_path, begin):
    source = begin + 'extern "C" __global__ void k(int* o) { int none; *o = place(1); }\n'
    for folder in ("a", "bb/b", "ccc"):
        options = here(tmp_path / folder, place("a warning"))
        name = str(tmp_path / folder / "k.cu")
        log = cache.get_or_compile(source, (), options, source_name=name).log
        assert log == compile_fresh(source, options.flags(), source_name=name).log
        assert log.count(str(tmp_path / folder)) == (2 if "n.h" in begin else 1)
    assert cache.stats().compiles == 1


@pytest.mark.parametrize("absolute", [True, False])
def test_a_change_in_one_place_leaves_the_other_its_hit(cache, tmp_path, absolute):
    one, two = tmp_path / "a", tmp_path / "another"
    write(
        one / "inc/x.h", '#include "sub/y.h"\n#include <z.h>\n#if __has_include(<no.h>)\n#endif\n'
    )
    write(one / "inc/sub/y.h", '#pragma once\n#include "../w.h"\n')
    write(one / "inc/w.h", "#define W 1\n")
    write(one / "other/z.h", "#define V W\n")
    write(one / "src/local.h", "")
    shutil.copytree(one, two)
    source = '#include "local.h"\n#include "x.h"\n' + KERNEL

    def ask(folder: Path) -> kcache.CompiledKernel:
        with chdir(folder):
            base = folder if absolute else Path()
            options = PTX.replace(include_paths=[base / "inc", base / "other"])
            return agreed(cache, source, options, source_name="src/kernel.cu")

    assert not ask(one).cached
    found = ask(two)
    assert (found.cached, str(two / "inc/sub/../w.h") in found.dependencies) == (True, True)
    write(two / "inc/w.h", "#define W 2\n")
    assert (ask(one).cached, ask(two).cached) == (True, False)


def test_a_header_appears_beside_a_source_in_another_directory(cache, tmp_path):
    options = here(tmp_path, header(1))
    source = INCLUDING.replace("<n.h>", '"n.h"')
    for folder, hit in (("a", False), ("b", True), ("c", False), ("inc", False)):
        if folder == "c":
            write(tmp_path / "c/n.h", header(9))
        (tmp_path / folder).mkdir(exist_ok=True)
        name = str(tmp_path / folder / "k.cu")
        assert agreed(cache, source, options, source_name=name).cached is hit


# -- misleading texts --------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "way", ["/proc/self/cwd", "/dev/../proc/self/root{}", "/sys/devices/..//..{}"]
)
def test_a_header_by_way_of_the_systems_directories(cache, tmp_path, way):
    """Such headers were once mistaken for the compiler's own files, and not recorded."""
    with chdir(tmp_path):
        for value in (1, 2):
            write(tmp_path / "x.h", header(value))
            agreed(cache, f'#include "{way.format(tmp_path)}/x.h"\n' + KERNEL)


@pytest.mark.parametrize(
    ("how", "folder"), [("plain", "été"), ("option", "with space"), ("text", "x")]
)
def test_an_absolute_path_however_it_is_written(cache, tmp_path, folder, how):
    """An absolute path in a source or option leads to the first place, wherever it is used."""
    for name, value in (("a", 1), ("b", 1), ("c", 3)):
        write(tmp_path / folder / name / "y.h", header(value))
    path = tmp_path / folder / "a/y.h"
    before = {
        "plain": f'#include "{path}"\n',
        "text": f"{TEXT}#include TEXT({path})\n",
        "option": "",
    }[how]
    extra = ["-include", str(path)] if how == "option" else []
    for name in ("a", "c", "b", "a"):
        if name == "b":
            path.write_text(header(4))
        options = PTX.replace(include_paths=[tmp_path / folder / name], extra_options=extra)
        agree(cache, before + KERNEL, options)


SELF = (
    '#ifndef ONCE\n#define ONCE\n#define V 1\n#include "k.cu"\n'
    + KERNEL
    + "#else\n#undef V\n#define V 2\n#endif\n"
)


@pytest.mark.parametrize(
    "source",
    [
        SELF,
        '#if __has_include("k.cu")\n#define V 1\n#else\n#define V 2\n#endif\n' + KERNEL,
        'extern "C" __global__ void k(char* o) { *o = __builtin_FILE_NAME()[*o]; }\n',
    ],
)
def test_a_source_that_asks_for_its_own_name(tree, tmp_path, source):
    """The compiler answers from memory, so the trace has no look-up of the name."""
    for number in range(2):  # in the second round, a file k.cu exists; the source k.cu hides it
        with kcache.KernelCache(tmp_path / str(number)) as cache:
            for name in ("one.cu", "k.cu", "sub/../k.cu", "third.cu"):
                agree(cache, source, PTX, source_name=name)
                cache.clear_memory()
        write(tree / "k.cu", "#undef V\n#define V 9\n")


def test_threads_under_two_names_that_fail_get_their_own_error(cache):
    """Threads share a failing compile only if their sources have the same name."""
    requests = [
        kcache.CompileRequest("#error no\n", (), PTX, source_name=name)
        for name in ["a.cu", "b.cu"] * 3
    ]
    errors = cache.compile_many(requests, jobs=6)
    assert [error.log[:4] for error in errors] == ["a.cu", "b.cu"] * 3


def test_a_tree_that_was_moved_while_its_texts_spell_include(tmp_path, cache, monkeypatch):
    """The `include` in `<detail/include/config.h>` is not the project's directory `include`."""
    write(tmp_path / "lib/detail/include/config.h", "#define BASE 1\n")
    source = '#include <detail/include/config.h>\n#include "scale.h"\n' + KERNEL
    options = PTX.replace(include_paths=["include", tmp_path / "lib"])
    for name in ("one", "two"):
        folder = tmp_path / name / "deep"
        write(folder / "include/scale.h", "#define V (BASE + 2)\n")
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PWD", str(folder))
        assert agreed(cache, source, options).cached is (name == "two")
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(tmp_path / name)
