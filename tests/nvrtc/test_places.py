"""Places: what shows no path is used elsewhere, and is there what a bare compile gives.

What *computes* with the letters of a path keeps those of the first place. The random families know
which of them do that, and nothing else is forgiven.
"""

import random
import re
import shutil
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple, Self

import pytest
from nvrtc.reference import (
    KERNEL,
    PTX,
    Fresh,
    agree,
    agreed,
    compile_fresh,
    write,
)
from nvrtc.trees import World

import kcache
from kcache.nvrtc.options import are_harmless

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
def test_what_a_header_does_with_its_path(cache, tmp_path, use):
    """What shows it is compiled in each place; what computes with it keeps the first place's."""
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
def test_what_names_its_directories_stays_there(cache, tmp_path, change):
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


def test_what_warm_compiles_is_found_in_another_checkout(tmp_path, monkeypatch):
    pytest.importorskip("click", reason="the extra cli is not installed")
    from kcache.cli.app import app

    monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "cache"))
    here(tmp_path / "a", header(1))
    write(tmp_path / "a/k.cu", INCLUDING)
    write(
        tmp_path / "a/list.toml",
        f'[[kernels]]\nsource = "k.cu"\narch = "compute_80"\ninclude_paths = ["{tmp_path}/a/inc"]\n',
    )
    with chdir(tmp_path / "a"):
        assert app.run(["warm", "-q", "list.toml"]) == 0
    shutil.copytree(tmp_path / "a", tmp_path / "checkout/b")
    with chdir(tmp_path / "checkout/b"), kcache.KernelCache() as cache:
        options = PTX.replace(include_paths=[tmp_path / "checkout/b/inc"])
        assert agreed(cache, INCLUDING, options, source_name="k.cu").cached


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


# -- where texts deceived --------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    "way", ["/proc/self/cwd", "/dev/../proc/self/root{}", "/sys/devices/..//..{}"]
)
def test_a_header_by_way_of_the_systems_directories(cache, tmp_path, way):
    """They were taken for the compiler's own files, and not recorded."""
    with chdir(tmp_path):
        for value in (1, 2):
            write(tmp_path / "x.h", header(value))
            agreed(cache, f'#include "{way.format(tmp_path)}/x.h"\n' + KERNEL)


@pytest.mark.parametrize(
    ("how", "folder"), [("plain", "été"), ("option", "with space"), ("text", "x")]
)
def test_an_absolute_path_however_it_is_written(cache, tmp_path, folder, how):
    """It leads to the first place from everywhere."""
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
    """The compiler answers from memory, and asks the system nothing."""
    for number in range(2):  # a file of that name has nothing to say where the source has it
        with kcache.KernelCache(tmp_path / str(number)) as cache:
            for name in ("one.cu", "k.cu", "sub/../k.cu", "third.cu"):
                agree(cache, source, PTX, source_name=name)
                cache.clear_memory()
        write(tree / "k.cu", "#undef V\n#define V 9\n")


def test_threads_under_two_names_that_fail_get_their_own_error(cache):
    """They share one failing compile only where the source has the same name."""
    requests = [
        kcache.CompileRequest("#error no\n", (), PTX, source_name=name)
        for name in ["a.cu", "b.cu"] * 3
    ]
    errors = cache.compile_many(requests, jobs=6)
    assert [error.log[:4] for error in errors] == ["a.cu", "b.cu"] * 3


# -- random families: one tree of headers in three places, and a source under three names ------------

SHORT, LONG, PIECES = 6, 1200, 8
#: Place and name of each request, by number. The third name is the first one, as an absolute path.
ASKED = ((0, 0), (1, 0), (2, 0), (1, 1), (0, 1), (2, 2), (0, 2), (1, 0), (0, 0))
#: The end of an internal name: a hash of the time and the working directory, and the process.
_MADE_UP = re.compile(rb"_[0-9a-f]{8}_\d+")


class Output(NamedTuple):
    """What a request returns, without the made-up part of internal names."""

    ptx: bytes
    cubin: bytes
    lowered_names: dict[str, str]
    log: str

    @classmethod
    def of(cls, made: Fresh | kcache.CompiledKernel) -> Self:
        ptx, cubin = (_MADE_UP.sub(b"", each or b"") for each in (made.ptx, made.cubin))
        return cls(ptx, cubin, dict(made.lowered_names), made.log)


class Family:
    """A random tree of headers in three places, one of which may differ, and a source."""

    def __init__(self, chance: random.Random, top: Path) -> None:
        self.places = [top / name for name in ("a", "bb/b", "c" * 40)]
        self.use = chance.choice([*USES])
        self.relocation = chance.choice(("on", "on", "on", "on", "on", "off"))
        self.change = chance.choice([{}] * 5 + [{"arch": "sm_80"}, {"lineinfo": True}])
        while True:
            self.world = world = World(self.places[0], chance)
            for path in map(world.top.joinpath, world.files()):  # the first that is read counts
                path.write_text(place(self.use) + path.read_text())
            source = world.source.replace('extern "C"', place("nothing") + 'extern "C"')
            self.source = source.removesuffix("}\n") + "    o[98] = place(o[99]);\n}\n"
            if not self.fresh(0, 0).failed:
                break
            shutil.rmtree(world.top)
        for other in self.places[1:]:
            shutil.copytree(world.top, other, symlinks=True)
        self.differs = chance.random() < 0.25
        if self.differs:
            world.top = self.places[2]
            while True:
                world.change()
                if not self.fresh(2, 0).failed:
                    break

    def request(self, number: int, name: int) -> tuple[kcache.CompileOptions, str]:
        """Return the options in a place, and the name of the source."""
        self.world.top = self.places[number]
        given = Path(self.world.source_name)
        names = given, given.with_name("other.cu"), self.world.top / given
        return self.world.options().replace(**self.change), str(names[name])

    def fresh(self, number: int, name: int) -> Fresh:
        options, source_name = self.request(number, name)
        with chdir(self.places[number]):
            flags, headers = options.flags(), self.world.headers
            return compile_fresh(self.source, flags, headers=headers, source_name=source_name)

    def ask(self, cache: kcache.KernelCache, number: int, name: int) -> kcache.CompiledKernel:
        options, source_name = self.request(number, name)
        with chdir(self.places[number]):
            return cache.get_or_compile(
                self.source, (), options, headers=self.world.headers, source_name=source_name
            )

    def check(self, folder: Path) -> None:
        """Ask from each place under each name, and compare with bare compiles."""
        bound = self.relocation == "off" or "lineinfo" in self.change
        compiled: dict[tuple[int, int], Output] = {}
        asked: set[tuple[int, int]] = set()
        with kcache.KernelCache(folder, relocation=self.relocation) as cache:
            for where in ASKED:
                kernel = self.ask(cache, *where)
                made, expected = Output.of(kernel), Output.of(self.fresh(*where))
                if not kernel.cached:
                    assert where not in asked, "it is compiled again"
                    compiled[where] = made
                elif where not in compiled:
                    assert not bound, "it is used elsewhere"
                    if self.use in COMPUTES and made != expected:
                        assert made[:2] in [each[:2] for each in compiled.values()]
                        made = made._replace(ptx=expected.ptx, cubin=expected.cubin)
                assert made == expected
                asked.add(where)
        options, _ = self.request(0, 0)
        free = self.use not in SHOWS and are_harmless(options.parsed)
        if free and not bound and not self.differs:
            names = 2 if "/" in self.world.source_name else 3
            assert len(compiled) == names, "one compile for each name is enough"


def check_families(seed: str, count: int, folder: Path) -> None:
    chance = random.Random(seed)
    for number in range(count):
        tree = folder / str(number)
        family = Family(chance, tree)
        told = f"{seed}/{number}: {family.use}, {family.relocation}, {family.change}"
        try:
            family.check(tree / "cache")
        except AssertionError as error:
            raise AssertionError(f"{told}, {vars(family.world)}: {error}") from error
        shutil.rmtree(tree)


def test_three_places_and_three_names(tmp_path: Path) -> None:
    check_families("short", SHORT, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("piece", range(PIECES))
def test_three_places_and_three_names_at_length(tmp_path: Path, piece: int) -> None:
    check_families(f"long {piece}", LONG // PIECES, tmp_path)


def test_a_tree_that_was_moved_while_its_texts_spell_include(tmp_path, cache, monkeypatch):
    """CCCL's headers include `<.../include/...>`; the directory of the project is no part of that."""
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
