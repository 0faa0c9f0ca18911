"""What a kernel depends on: an edit causes a miss exactly if it changes what the compiler found."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from nvrtc.edits import Case, check, lay
from nvrtc.reference import (
    KERNEL,
    PTX,
    agreed,
    compile_clean,
    compile_fresh,
    write,
)

import kcache
from kcache.nvrtc import compiler

pytestmark = pytest.mark.usefixtures("nvrtc")

_GUESS = "#if {0}\n#define V 1\n#else\n#define V 2\n#endif\n"


def v(value: int) -> str:
    return f"#undef V\n#define V {value}\n"


_ONCE = "#pragma once\n#ifdef SEEN\n#define TWICE\n#endif\n#define SEEN\n"
_TWICE = _GUESS.format("defined(TWICE)") + KERNEL
_NO_SOURCE_INCLUDE = {"extra_options": ["--no-source-include"]}

CASES = {
    "content": Case(
        '#include "x.h"\n',
        {"inc/x.h": v(1)},
        [
            {"inc/x.h": v(2)},
            {"inc/x.h": None},
            {"inc/x.h": "/"},
            {"x.h": v(3)},
            {"first/x.h": v(4)},
        ],
        hits=[{"inc/y.h": v(5)}, {"first": "/"}, {"inc/x": v(6)}],
    ),
    "a directory that is not there": Case(
        "#include <sub/x.h>\n",
        {"inc/sub/x.h": v(1)},
        [{"first/deep/sub/x.h": v(2)}],
        hits=[{"first": "/"}, {"first/deep": "/"}, {"first/deep/sub": "/"}],
        paths=("first/deep", "inc"),
    ),
    "a directory that is a file": Case(
        "#include <x.h>\n",
        {"first": "no directory", "inc/x.h": v(1)},
        [{"first": None, "first/x.h": v(2)}],
    ),
    "beside the includer": Case(
        "#include <sub/a.h>\n",
        {"inc/sub/a.h": '#include "x.h"\n', "inc/x.h": v(1)},
        [{"inc/sub/x.h": v(2)}, {"first/x.h": v(3)}, {"inc/x.h": v(4)}],
    ),
    **{
        f"beside the source {name}": Case(
            '#include "x.h"\n',
            {"inc/x.h": v(1), "src": "/"},
            [{f"{folder}x.h": v(2)}],
            name=name,
        )
        for name, folder in {"src/k.cu": "src/", "{tree}/src/k.cu": "src/", "./k.cu": ""}.items()
    },
    "no source include": Case(
        "#include <sub/a.h>\n",
        {"inc/sub/a.h": '#include "x.h"\n' + _GUESS.format('__has_include("y.h")'), "inc/x.h": ""},
        [{"inc/y.h": ""}, {"first/x.h": "#error\n"}],
        hits=[{"inc/sub/x.h": "#error\n"}, {"inc/sub/y.h": ""}],
        options=_NO_SOURCE_INCLUDE,
    ),
    "a name in an option": Case(
        "#include HDR\n",
        {"inc/a.h": v(1), "inc/b.h": v(2)},
        [{"inc/b.h": v(3)}],
        hits=[{"inc/a.h": v(4)}],
        options={"extra_options": ["-D", "HDR=<b.h>"]},
    ),
    "a macro of the compiler is in the name": Case(
        "#define HDR <sm/__CUDA_ARCH__/x.h>\n#include HDR\n",
        {"inc/sm/800/x.h": v(1)},
        [{"inc/sm/800/x.h": v(2)}, {"first/sm/800/x.h": v(3)}],
    ),
    # One file with two names.
    **{
        f"a link {link} becomes a file of its own, {skip[:8]}": Case(
            "#include <a/x.h>\n#include <b/x.h>\n",
            {"inc/a/x.h": skip.format("#ifndef V\n#define V 1\n#endif\n"), "inc/b/x.h": link},
            [{"inc/b/x.h": v(2)}, {"inc/a/x.h": v(3)}],
        )
        for link, skip in (
            ("-> ../a/x.h", "#pragma once\n{}"),
            ("= inc/a/x.h", "#ifndef G\n#define G\n{}#endif\n"),
        )
    },
    **{
        f"once {link}": Case(
            "#include <a/x.h>\n#include <b/x.h>\n",
            {"inc/a/x.h": _ONCE, "inc/b/x.h": link},
            [{"inc/b/x.h": _ONCE}],  # the same file counts, not the same text
            kernel=_TWICE,
        )
        for link in ("-> ../a/x.h", "= inc/a/x.h")
    },
    "once, and a copy becomes a link": Case(
        "#include <a/x.h>\n#include <b/x.h>\n",
        {"inc/a/x.h": _ONCE, "inc/b/x.h": _ONCE},
        [{"inc/b/x.h": "-> ../a/x.h"}, {"inc/b/x.h": "= inc/a/x.h"}],
        kernel=_TWICE,
    ),
    "once across linked directories": Case(
        "#include <a/x.h>\n#include <b/x.h>\n",
        {"inc/x.h": _ONCE, "a": "-> inc", "b": "-> inc"},
        [{"b": None, "b/x.h": _ONCE}],
        paths=(".",),
        kernel=_TWICE,
    ),
    "a link swings": Case(
        "#include <x.h>\n",
        {"v1/x.h": v(1), "v2/x.h": v(2), "inc": "-> v1"},
        [{"inc": "-> v2"}],
    ),
    "links that lead nowhere find their targets": Case(
        "#include <sub/x.h>\n#include <y.h>\n",
        {
            "inc/sub/x.h": v(1),
            "first/sub": "-> ../far/away",
            "first/y.h": "-> ../far/y.h",
            "inc/y.h": "",
        },
        [{"far/away/x.h": v(2)}, {"far/y.h": v(3)}],
        hits=[{"far/away": "/"}],
    ),
    "probed": Case(
        "#include <x.h>\n",
        {"inc/x.h": _GUESS.format("__has_include(<y.h>)"), "inc/y.h": "one"},
        [{"inc/y.h": None}, {"inc/y.h": "-> nowhere"}],
        hits=[{"inc/y.h": "two"}, {"inc/y.h": "-> nowhere", "inc/nowhere": ""}],
    ),
    "probed in an option": Case(
        _GUESS.format("HAS(<y.h>)"),
        {"inc": "/"},
        [{"inc/y.h": ""}],
        options={"defines": ["HAS(x)=__has_include(x)"]},
    ),
    # Headers in memory, and headers that are included before the source.
    **{
        f"a header in memory {memory} includes one on disk, from {name}": Case(
            f'#include "{memory}"\n',
            {"inc/x.h": v(1), "src/x.h": v(5), "src/mm/x.h": v(6)},
            [{"inc/x.h": v(2)}, {f"{beside}x.h": v(3)}],
            headers={memory: '#include "x.h"\n'},
            name=name,
        )
        for name, memory, beside in (
            ("src/k.cu", "m.h", ""),
            ("{tree}/src/k.cu", "mm/m.h", "mm/"),
            ("src/k.cu", "{tree}/mm/m.h", "mm/"),
        )
    },
    "a header in memory, and a file that is opened under its name": Case(
        '#include "inc/x.h"\n#include <x.h>\n',
        {"inc/x.h": "#ifdef W\n#define V 1\n#else\n#define V 2\n#endif\n"},
        [],
        headers={"inc/x.h": "#define W 1\n#define V 3\n"},
    ),
    **{
        option: Case(
            "",
            {"inc/pre.h": v(1), "src/pre.h": v(9)},
            [{"inc/pre.h": v(2)}, {"pre.h": v(3)}],
            hits=[{"src/pre.h": v(8)}],
            options={"extra_options": option.split()},
            name="{tree}/src/k.cu",
        )
        for option in ("-include pre.h", "-Xcudafe --preinclude=pre.h")
    },
    # Unusual spellings of paths.
    **{
        f"the directory {path!r}": Case(
            '#include "x.h"\n',
            {"inc/x.h": '#include "sub/y.h"\n', "inc/sub/y.h": v(1)},
            [{"inc/sub/y.h": v(2)}, {"first/x.h": v(3)}],
            paths=("first", path),
        )
        for path in ("./inc//.", " inc", "{tree}/inc")
    },
    **{
        f"the directory by {extra}": Case(
            "#include <x.h>\n",
            {"x.h": '#include "inc/x.h"\n', "inc/x.h": v(1)},
            [{"inc/x.h": v(2)}, {"first/x.h": v(3)}],
            paths=("first",),
            options={"extra_options": extra},
            name="src/k.cu",
        )
        for extra in (["-I=inc"], ["-I", ""])
    },
    **{
        f"the source {name}": Case(
            '#include "sub/y.h"\n',
            {"src": "/", "sub/y.h": '#include "../x.h"\n', "x.h": v(1)},
            [{"x.h": v(2)}],
            name=name,
        )
        for name in ("src/../k.cu", "{tree}//k.cu")
    },
    "an absolute include": Case(
        '#include "{tree}/far/x.h"\n', {"far/x.h": v(1)}, [{"far/x.h": v(2)}]
    ),
    **{
        f"the name {name!r}": Case(
            f"#include <{name}.h>\n",
            {f"{name}/{name}.h": v(1)},
            [{f"{name}/{name}.h": v(2)}, {f"first/{name}.h": v(3)}],
            paths=("first", name),
        )
        for name in ("with ünïcode", "quo'te, semi;colon")
    },
    **{
        f"the folder {raw!r}": Case(
            "#include <x.h>\n",
            {os.fsdecode(raw) + "/x.h": v(1)},
            [{os.fsdecode(raw) + "/x.h": v(2)}, {"first/x.h": v(3)}],
            paths=("first", os.fsdecode(raw)),
        )
        for raw in (b"inc-\xff", b"\xed\xa0\x80")
    },
    # For a `NAME` without a dot, the compiler also looks for `NAME.stdh`.
    "no dot": Case(
        "#include <x>\n",
        {"inc/x": v(1)},
        [{"inc/x": v(2)}, {"first/x.stdh": v(3)}, {"first/x": v(4)}],
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kcache.KernelCache]:
    with kcache.KernelCache(tmp_path_factory.mktemp("cache") / "cache") as cache:
        yield cache


@pytest.mark.parametrize("name", CASES)
def test_an_edit(shared: kcache.KernelCache, tree: Path, name: str) -> None:
    check(shared, tree, name, CASES[name])


#: Ways to ask for h.h, some in macros of their own.
HAS_INCLUDE = [
    '#if __has_include("h.h")',
    "#if ( __has_include ( <h.h> ) )",
    "#if __has_include(<none.h>) || __has_include(<h.h>)",
    '#if __has_include("sub/../h.h")',
    '#if __has_include("../inc/h.h")',
    '#if 0\n#elif __has_include("h.h")',
    '#i\\\nf __has_\\\ninclude(\\\n"h\\\n.h"\\\n)',
    '??=if __has_include("h.h")',
    "#define S@(x) #x\n#define A@(x) S@(x)\n#define N@ h.h\n#if __has_include(A@(N@))",
    "#define A@(x, y) x##y\n#if A@(__has_in, clude)(<h.h>)",
]


def _spelled(number: int) -> str:
    """Return code for a variable v<number> that is 1 if the header h<number>.h exists, else 2."""
    text = HAS_INCLUDE[number].replace("@", str(number))
    text = re.sub(r"(?<!\.)\bh(?=(\\\n)?\.h|, \.h|\)\)?$|, h\)$)", f"h{number}", text, flags=re.M)
    value = f"__device__ int v{number} = "
    return f"{text}\n{value}1;\n#else\n{value}2;\n#endif\n"


def _values(text: bytes | None) -> dict[int, int]:
    found = re.findall(rb"\.u32 v(\d+) = (\d);", text or b"")
    return {int(number): int(value) for number, value in found}


@pytest.mark.parametrize("where", ["source", "header"])
def test_has_include(cache: kcache.KernelCache, tree: Path, where: str) -> None:
    """One compile has all the ways to ask, each of them for its own header."""
    lines = "".join(_spelled(number) for number in range(len(HAS_INCLUDE)))
    base: dict[str, str | None] = {"first/sub": "/", "inc/sub": "/", "inc/x.h": lines}
    source = "#include <x.h>\n" if where == "header" else lines
    options = PTX.replace(include_paths=["first", "inc"], std="c++14")
    lay(tree, {**base, **{f"inc/h{n}.h": "" for n in range(len(HAS_INCLUDE))}})
    there = compile_fresh(source, options.flags())
    lay(tree, base)
    absent = agreed(cache, source, options)
    assert set(_values(absent.ptx).values()) == {2}
    decided = [number for number, value in _values(there.ptx).items() if value == 1]
    assert len(decided) == len(HAS_INCLUDE)
    for number in decided:
        for folder in ("inc", "first"):
            header = write(tree / folder / f"h{number}.h", "")
            is_asked = folder == "inc" or "../inc" not in HAS_INCLUDE[number]
            assert (cache.lookup(source, (), options) is None) is is_asked, HAS_INCLUDE[number]
            header.unlink()
        assert cache.lookup(source, (), options) is not None, HAS_INCLUDE[number]


# -- what is no edit of a tree ---------------------------------------------------------------------


def paths(*folders: Path | str) -> kcache.CompileOptions:
    return PTX.replace(include_paths=[str(folder) for folder in folders])


def test_the_same_size_and_the_old_times(cache, tree):
    header = write(tree / "inc/x.h", "#define V 1\n")
    os.utime(header, (1, 1))
    before = header.stat()
    source = "#include <x.h>\n" + KERNEL
    agreed(cache, source, paths("inc"))
    os.utime(header)
    assert cache.lookup(source, (), paths("inc")) is not None
    header.write_text("#define V 2\n")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not agreed(cache, source, paths("inc")).cached


def test_other_headers_in_another_folder_are_not_stale(cache, tree):
    source = '#include "x.h"\n' + KERNEL
    for folder, value in (("one", 1), ("two", 2)):
        write(tree / folder / "x.h", f"#define V {value}\n")
        assert not agreed(cache, source, paths(tree / folder)).cached
    assert cache.stats().stale == 0
    write(tree / "two/x.h", "#define V 3\n")
    assert not agreed(cache, source, paths(tree / "two")).cached
    assert cache.stats().stale == 1


@pytest.mark.parametrize(
    "text", ["#pragma once\n", "#ifndef A\n#define A\n#else\n#define W\n#endif\n"]
)
def test_names_of_in_memory_headers_become_one_file(cache, tree, text):
    """The compiler treats two in-memory headers as one if their names lead to one file on disk."""
    header = write(tree / "inc/x.h", "#ifndef W\n#define W 3\n#endif\n#define V W\n")
    source = '#include "a.h"\n#include "b.h"\n#include <x.h>\n' + KERNEL
    headers = {"a.h": text, "b.h": text + "#define W 2\n"}
    agreed(cache, source, paths("inc"), headers=headers)
    write(tree / "a.h", "")
    agreed(cache, source, paths("inc"), headers=headers)
    os.link("a.h", "b.h")
    agreed(cache, source, paths("inc"), headers=headers)
    os.unlink("b.h")
    assert agreed(cache, source, paths("inc"), headers=headers).cached
    # The same holds for the source, also under another name.
    source = "#pragma once\n" + source
    agreed(cache, source, paths("inc"), headers=headers)
    for name, other in (("a.h", "kernel.cu"), (header, "other.cu")):
        os.link(name, other)
        agreed(cache, source, paths("inc"), headers=headers, source_name=other)


def test_a_pipe_in_place_of_a_header_is_a_miss(cache, tree):
    """The pipe has no writer, so opening it for reading would block for ever."""
    header = write(tree / "inc/x.h", "#define V 1\n")
    source = "#include <x.h>\n" + KERNEL
    cache.get_or_compile(source, (), paths("inc"))
    header.unlink()
    os.mkfifo(header)
    assert cache.lookup(source, (), paths("inc")) is None
    assert "x.h is gone" in cache.why(source, (), paths("inc")).clauses


# -- while it compiles, and where -------------------------------------------------------------------


def test_another_thread_changes_the_directory_during_compiles(
    cache: kcache.KernelCache, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile uses the working directory that the program had at the time of the call."""
    write(tree / "one/inc/x.h", "#define V 1\n")
    write(tree / "two/inc/x.h", "#define V 2\n")
    source = "#include <x.h>\n" + KERNEL
    os.chdir(tree / "one")

    def change() -> None:
        for folder in ("two", "one", "two") * 10:
            os.chdir(tree / folder)

    real = compiler.compile_request

    def compile_(*args: Any) -> Any:
        with ThreadPoolExecutor() as pool:
            pool.submit(change)
            return real(*args)

    expected = compile_clean(source, paths(tree / "one/inc").flags())
    for number in range(2):
        os.chdir(tree / "one")
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "compile_request", compile_)
            kernel = cache.get_or_compile(f"{source}// {number}", (), paths("inc"))
        assert kernel.ptx == expected.ptx
    for folder in ("one", "two"):
        os.chdir(tree / folder)
        for number in range(2):
            agreed(cache, f"{source}// {number}", paths("inc"))
    os.chdir(tree)


@pytest.mark.parametrize("raw", [b"\xff", b"\xed\xa0\x80"])
def test_unusual_working_directories(cache: kcache.KernelCache, tree: Path, raw: bytes) -> None:
    here = tree / os.fsdecode(raw)
    header = write(here / "inc/x.h", "#define V 1\n")
    os.chdir(here)
    for value, cached in ((1, False), (2, False), (1, True)):
        header.write_text(f"#define V {value}\n")
        assert agreed(cache, "#include <x.h>\n" + KERNEL, paths("inc")).cached is cached
    os.chdir(tree)
