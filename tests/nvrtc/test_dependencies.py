"""What a kernel depends on: after each edit there is a hit exactly where nothing relevant changed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvrtc.edits import Case, check, lay
from nvrtc.reference import (
    KERNEL,
    PTX,
    agree,
    agreed,
    compile_fresh,
    working_directory,
    write,
)

import kcache

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
    "which headers are included": Case(
        "#include <middle.h>\n",
        {"inc/middle.h": "#include <a.h>\n", "inc/a.h": v(1), "inc/b.h": v(2)},
        [{"inc/middle.h": "#include <b.h>\n"}, {"inc/a.h": v(3)}],
        hits=[{"inc/b.h": v(4)}],
    ),
    "each other": Case(
        "#include <a.h>\n",
        {
            "inc/a.h": "#pragma once\n#include <b.h>\n",
            "inc/b.h": f"#pragma once\n#include <a.h>\n{v(1)}",
        },
        [{"inc/b.h": f"#pragma once\n#include <a.h>\n{v(2)}"}],
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
    "beside the source, and on the path": Case(
        '#include "x.h"\n',
        {"src/x.h": v(1)},
        [{"src/x.h": None}],
        hits=[{"first/x.h": v(2)}],  # never looked at: the one beside comes first
        paths=("first", "src"),
        name="src/k.cu",
    ),
    "directories inside each other": Case(
        '#include "sub/x.h"\n#include <y.h>\n',
        {"inc/sub/x.h": v(1), "inc/sub/y.h": ""},
        [{"sub/x.h": v(2)}, {"inc/y.h": v(3)}],
        paths=("inc", "inc/sub"),
    ),
    "a directory inside a later one": Case(
        "#include <sub/x.h>\n",
        {"first": "/", "inc/sub/x.h": v(1)},
        [{"first/sub/x.h": v(2)}],
        paths=("first", "inc/sub", "inc"),
    ),
    "no source include": Case(
        "#include <sub/a.h>\n",
        {"inc/sub/a.h": '#include "x.h"\n' + _GUESS.format('__has_include("y.h")'), "inc/x.h": ""},
        [{"inc/y.h": ""}, {"first/x.h": "#error\n"}],
        hits=[{"inc/sub/x.h": "#error\n"}, {"inc/sub/y.h": ""}],
        options=_NO_SOURCE_INCLUDE,
    ),
    "include next": Case(
        "#include <x.h>\n",
        {"one/x.h": "#include_next <x.h>\n", "two/x.h": "#include_next <x.h>\n", "three/x.h": v(1)},
        [{"two/x.h": None}, {"three/x.h": v(2)}, {"two/x.h": v(3)}],
        paths=("one", "two", "three"),
    ),
    **{
        f"computed {operand}": Case(
            '#define HDR "x.h"\n#define PICK(x) <x.h>\n#define S(x) #x\n#define T(x) S(x)\n'
            "#include <sub/a.h>\n",
            {"inc/sub/a.h": f"#include {operand}\n", "inc/x.h": v(1)},
            [{"inc/x.h": v(2)}, {"first/x.h": v(4)}, *([{"inc/sub/x.h": v(3)}] * quoted)],
        )
        for operand, quoted in {"HDR": 1, "PICK(x)": 0, "T(x.h)": 1}.items()
    },
    "by its name and by a macro": Case(
        '#include <x.h>\n#define HDR "x.h"\n#include <sub/a.h>\n',
        {"inc/sub/a.h": "#include HDR\n", "inc/x.h": v(1)},
        [{"inc/sub/x.h": v(2)}],
    ),
    "alias": Case(
        '#pragma include_alias("x.h", "y.h")\n#include "x.h"\n',
        {"inc/x.h": v(1), "inc/y.h": v(2)},
        [],
    ),
    **{
        f"a name in an option {extra}": Case(
            "#ifndef HDR\n#define HDR <a.h>\n#endif\n#include HDR\n",
            {"inc/a.h": v(1), "inc/b.h": v(2)},
            [{"inc/b.h": v(3)}],
            hits=[{"inc/a.h": v(4)}],
            options={"extra_options": extra},
        )
        for extra in (["-DHDR=<b.h>"], ["-D", "HDR=<b.h>"], ["--define-macro=HDR=<b.h>"])
    },
    "beyond a computed include": Case(
        "#define GLUE(a, b) <a##b>\n#include GLUE(sub/a, .h)\n",
        {
            "elsewhere/x.h": v(1),
            "inc/sub/a.h": '#include "../b.h"\n',
            "inc/b.h": '#include "../elsewhere/x.h"\n',
        },
        [{"elsewhere/x.h": v(2)}],
        hits=[{"elsewhere/y.h": ""}],
    ),
    **{
        f"a macro leads to {to}": Case(
            lines,
            {"inc": "/", "elsewhere/x.h": v(1)},
            [{"elsewhere/x.h": v(2)}],
            options={"extra_options": ["-DWHERE=" + to]},
        )
        for to, lines in {
            "elsewhere": "#define S(x) #x\n#define TEXT(x) S(x)\n#include TEXT(WHERE/x.h)\n",
            "../elsewhere": "#define GLUE(a) <WHERE/a##.h>\n#include GLUE(x)\n",
        }.items()
    },
    "a macro of the compiler is in the name": Case(
        "#define HDR <sm/__CUDA_ARCH__/x.h>\n#include HDR\n",
        {"inc/sm/800/x.h": v(1)},
        [{"inc/sm/800/x.h": v(2)}, {"first/sm/800/x.h": v(3)}],
    ),
    "skipped by the second name": Case(
        "#define TEXT(...) #__VA_ARGS__\n#include <a.h>\n#include TEXT(b.h)\n"
        + _GUESS.format("defined(B)"),
        {"inc/a.h": "#pragma once\n#define A 1\n", "inc/b.h": "-> a.h"},
        [{"inc/b.h": "#define B 1\n"}],
    ),
    # As few write it.
    **{
        f"{text[:20]!r}": Case(
            "#include <x.h>\n",
            {"first": "/", "inc/x.h": text, "inc/y.h": v(1)},
            [{"inc/y.h": v(2)}, {"first/y.h": v(3)}],
        )
        for text in (
            "\r#include <y.h>\r\n",
            "%:\tinclude/**/<y.h>\n",
            "#/* a\n\n b */include /* c\n */ <y.h> // d\n",
            "#inc\\\nlude <\\\r\ny.\\\nh>\r\n",
            "#/*" + "x" * 100_000 + "*/include <y.h>\n",
            "#define Y /* a */ <y.\\\nh> // b\n#include \\\nY\n",
            "#if 0\nit's \"open\n#endif\n#define Y <y.h>\n#include Y\n// '\n",
            "#if 0\n#include <" + "n/" * 3000 + "n.h>\n#endif\n#include <y.h>\n",
        )
    },
    # One file under two names.
    **{
        f"a link {link} becomes a file of its own, {skip[:8]}": Case(
            "#include <a/x.h>\n#include <b/x.h>\n",
            {"inc/a/x.h": skip.format("#ifndef V\n#define V 1\n#endif\n"), "inc/b/x.h": link},
            [{"inc/b/x.h": v(2)}, {"inc/a/x.h": v(3)}],
        )
        for link in ("-> ../a/x.h", "= inc/a/x.h")
        for skip in ("#pragma once\n{}", "#ifndef G\n#define G\n{}#endif\n")
    },
    **{
        f"once {link}": Case(
            "#include <a/x.h>\n#include <b/x.h>\n",
            {"inc/a/x.h": once, "inc/b/x.h": link},
            [{"inc/b/x.h": once}],  # not whether the text is the same, but whether it is one file
            kernel=_TWICE,
        )
        for link, once in (
            ("-> ../a/x.h", _ONCE),
            ("= inc/a/x.h", _ONCE),
            ("-> {}/../a/x.h".format("../a"), _ONCE.replace("once", "on\\\nce")),
        )
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
    # __has_include: see HAS_INCLUDE, too.
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
    # In memory, and before the source.
    **{
        f"a header in memory {memory} includes one on disk, from {name}": Case(
            f'#include "{memory}"\n',
            {"inc/x.h": v(1), "src/x.h": v(5), "src/mm/x.h": v(6)},
            [{"inc/x.h": v(2)}, {f"{beside}x.h": v(3)}],
            headers={memory: '#include "x.h"\n'},
            name=name,
        )
        for name in ("src/k.cu", "{tree}/src/k.cu")
        for memory, beside in {"m.h": "", "mm/m.h": "mm/", "{tree}/mm/m.h": "mm/"}.items()
    },
    "a header in memory comes first": Case(
        "#include <x.h>\n",
        {"inc/x.h": v(1)},
        [],
        hits=[{"inc/x.h": v(3)}],
        headers={"x.h": v(2)},
    ),
    "a header in memory, and a file that is opened under its name": Case(
        '#include "inc/x.h"\n#include <x.h>\n',
        {"inc/x.h": "#ifdef W\n#define V 1\n#else\n#define V 2\n#endif\n"},
        [],
        headers={"inc/x.h": "#define W 1\n#define V 3\n"},
    ),
    **{
        f"{option} from {name}": Case(
            "",
            {"inc/pre.h": v(1), "src/pre.h": v(9)},
            [{"inc/pre.h": v(2)}, {"pre.h": v(3)}],
            hits=[{"src/pre.h": v(8)}],
            options={"extra_options": option.split()},
            name=name,
        )
        for option, name in {
            "-include pre.h": "{tree}/src/k.cu",
            "--pre-include=pre.h": "k.cu",
            "-Xcudafe --preinclude=pre.h": "{tree}/src/k.cu",
        }.items()
    },
    # Spelling.
    **{
        f"the directory {path!r}": Case(
            '#include "x.h"\n',
            {"inc/x.h": '#include "sub/y.h"\n', "inc/sub/y.h": v(1)},
            [{"inc/sub/y.h": v(2)}, {"first/x.h": v(3)}],
            paths=("first", path),
        )
        for path in ("inc//", "./inc/.", "inc/sub/..", " inc", "inc ", "{tree}/inc")
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
        for extra in (
            ["-I", "inc"],
            ["-I inc"],
            ["-I=inc"],
            ["--include-path", "inc"],
            ["-I="],
            ["-I", ""],
        )
    },
    **{
        f"the source {name}": Case(
            '#include "sub/y.h"\n',
            {"src": "/", "sub/y.h": '#include "../x.h"\n', "x.h": v(1)},
            [{"x.h": v(2)}],
            name=name,
        )
        for name in ("./k.cu", "src/../k.cu", "{tree}/k.cu", "{tree}//k.cu")
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
        for name in ("with space", "quo'te", "comma,", "ünïcode", "semi;colon", "hash#0")
    },
    **{
        f"the folder {raw!r}": Case(
            "#include <x.h>\n",
            {os.fsdecode(raw) + "/x.h": v(1)},
            [{os.fsdecode(raw) + "/x.h": v(2)}, {"first/x.h": v(3)}],
            paths=("first", os.fsdecode(raw)),
        )
        for raw in (b"inc-\xff", b"a\xfe\x80b", b"\xed\xa0\x80")
    },
    "a comment with a glob hides nothing": Case(
        "// see include/*.h\n#include <x.h>\n// and */ this\n",
        {"inc/x.h": v(1)},
        [{"inc/x.h": v(2)}],
    ),
    # `NAME.stdh` is tried beside `NAME` where that has no dot.
    "no dot": Case(
        "#include <x>\n",
        {"inc/x": v(1)},
        [{"inc/x": v(2)}, {"first/x.stdh": v(3)}, {"first/x": v(4)}],
    ),
    # Trigraphs, which C++14 and older standards replace.
    **{
        f"{begin!r} in {where}": Case(
            f"{begin} <x.h>\n" if where == "the source" else "#include <y.h>\n",
            {"inc/x.h": v(1), **({"inc/y.h": f"{begin} <x.h>\n"} if where == "a header" else {})},
            [{"inc/x.h": v(2)}],
            options={"std": "c++14"},
            headers={"y.h": f"{begin} <x.h>\n"} if where == "memory" else None,
        )
        for begin in ("#inc??/\nlude", "??=include")
        for where in ("the source", "a header", "memory")
    },
    # Lines that name another file, or the header itself.
    **{
        f"the line {line!r}": Case(
            '#include "x.h"\n',
            {"inc/x.h": f"{line}\n{v(1)}", "inc/y.h": ""},
            [{"inc/x.h": f"{line}\n{v(2)}"}],
        )
        for line in (
            '#line 1 "{tree}/inc/x.h"',
            '#line 1 "x.h"',
            '# 1 "x.h" 1 3 4',
            '#line 7 "y.h"\n#include "y.h"',
            '#line 1 "kernel.cu"',
        )
    },
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kcache.KernelCache]:
    with kcache.KernelCache(tmp_path_factory.mktemp("cache") / "cache") as cache:
        yield cache


@pytest.mark.parametrize("name", CASES)
def test_an_edit(shared: kcache.KernelCache, tree: Path, name: str) -> None:
    check(shared, tree, name, CASES[name])


#: Ways to ask for h.h; what each asks for by another name is its own.
HAS_INCLUDE = [
    '#if __has_include("h.h")',
    '#if __has_include\t(\t"h.h"\t)',
    "#if ( __has_include ( <h.h> ) )",
    "#if !!__has_include(<h.h>)",
    '#if 0 || __has_include("h.h")',
    "#if defined(NOT) || __has_include(<h.h>)",
    '#if (__has_include("h.h") ? 1 : 0)',
    "#if __has_include(<none.h>) || __has_include(<h.h>)",
    '#if defined(__has_include) && __has_include("h.h")',
    '#if __has_include("sub/../h.h")',
    "#if __has_include(<./h.h>)",
    '#if __has_include("../inc/h.h")',
    '#if 0\n#elif __has_include("h.h")',
    "#if 0\n#elif 0\n#elif __has_include(<h.h>)",
    "#if 1\n#if __has_include(<h.h>)\n#define FOUND@\n#endif\n#endif\n#ifdef FOUND@",
    '#if 0\n#else\n#if __has_include("h.h")\n#define FOUND@\n#endif\n#endif\n#ifdef FOUND@',
    # comments and splices
    '#if __has_include(/**/"h.h"/**/)',
    '/**/#/**/if/**/__has_include("h.h") // no',
    "#if /* a\n b */ __has_include(/* > */<h.h>/* < */) /* open\n */",
    '#i\\\nf __has_\\\ninclude(\\\n"h\\\n.h"\\\n)',
    '#if __has_include \\\r\n("h.h")',
    '%:if __has_include("h.h")',
    '??=if __has_include("h.h")',
    '#if __has_??/\ninclude("h.h")',
    # macros that make the operand
    '#define A@ "h.h"\n#define B@ A@\n#if __has_include(B@)',
    "#define A@(x) <x.h>\n#if __has_include(A@(h))",
    "#define S@(x) #x\n#define A@(x) S@(x)\n#define N@ h.h\n#if __has_include(A@(N@))",
    "#define A@(x, y) <x##y>\n#if __has_include(A@(h, .h))",
    '#define E@\n#if __has_include(E@ "h.h" E@)',
    "#define A@(...) __VA_ARGS__\n#if __has_include(A@(<h.h>))",
    # macros that make the whole
    "#define A@ __has_include(<h.h>)\n#if A@",
    "#define A@(x) __has_include(<x.h>)\n#define C@(x) A@(x)\n#if C@(h)",
    "#define A@(d, x) __has_include(<d/x.h>)\n#if A@(., h)",
    "#define A@ __has_include\n#define B@ A@\n#if B@(<h.h>)",
    "#define A@() __has_include\n#if A@()(<h.h>)",
    "#define O@ (\n#define A@ __has_include O@ <h.h>)\n#if A@",
    "#define A@(x, y) x##y\n#if A@(__has_in, clude)(<h.h>)",
    '#define A@(x) __has_##x\n#if A@(include)("h.h")',
    # other words
    '#ifdef __has_include\n#if __has_include("h.h")\n#define FOUND@\n#endif\n#endif\n#ifdef FOUND@',
    "\f\v#if\f__has_include\v(<h.h>)",
    "#if 0\n'\n#endif\n#if __has_include(<h.h>)",
    '#if 0\n"/*\n#endif\n#if __has_include(<h.h>)\n// */',
    '#define Q@ "/*"\n#if __has_include("h.h")\n// */',
    '__device__ const char q@[] = R"x(/*)x";\n#if __has_include("h.h")\n// */',
]


def _spelled(number: int) -> str:
    """Return a variable that tells whether h0.h is there, or h1.h, and so on."""
    text = HAS_INCLUDE[number].replace("@", str(number))
    text = re.sub(r"(?<!\.)\bh(?=(\\\n)?\.h|, \.h|\)\)?$|, h\)$)", f"h{number}", text, flags=re.M)
    value = f"__device__ int v{number} = "
    return f"{text}\n{value}1;\n#else\n{value}2;\n#endif\n"


def _values(text: bytes | None) -> dict[int, int]:
    found = re.findall(rb"\.u32 v(\d+) = (\d);", text or b"")
    return {int(number): int(value) for number, value in found}


@pytest.mark.parametrize("where", ["source", "header"])
def test_has_include_however_it_is_written(
    cache: kcache.KernelCache, tree: Path, where: str
) -> None:
    """All of them in one compile, which asks for a header of its own for each."""
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


def test_a_changed_header_misses_and_changed_back_hits(cache, tree):
    source = '#include "x.h"\n' + KERNEL
    for value, cached in ((1, False), (1, True), (2, False), (2, True), (1, True)):
        write(tree / "inc/x.h", f"#define V {value}\n")
        assert agreed(cache, source, paths(tree / "inc")).cached is cached
    assert cache.stats().stale == 1


def test_nested_here_and_apart_elsewhere(cache, tree):
    """What was one file under two names must not stand for two files."""
    write(tree / "one/inc/sub/x.h", "#define V 1\n")
    source = "#include <sub/x.h>\n" + KERNEL
    agreed(cache, source, paths("one/inc", "one/inc/sub"))
    write(tree / "two/inc/sub/x.h", "#define V 2\n")
    write(tree / "two/sub/x.h", "#define V 1\n")
    agreed(cache, source, paths("two/inc", "two/sub"))


def test_in_memory_headers_are_in_the_key(cache, tree):
    source = '#include "m.h"\n' + KERNEL
    for value, cached in ((1, False), (2, False), (1, True)):
        assert agreed(cache, source, headers={"m.h": f"#define V {value}\n"}).cached is cached


@pytest.mark.parametrize(
    "text", ["#pragma once\n", "#ifndef A\n#define A\n#else\n#define W\n#endif\n"]
)
def test_names_of_in_memory_headers_become_one_file(cache, tree, text):
    """The compiler takes two texts for one, if a file has the names of both."""
    header = write(tree / "inc/x.h", "#ifndef W\n#define W 3\n#endif\n#define V W\n")
    source = '#include "a.h"\n#include "b.h"\n#include <x.h>\n' + KERNEL
    headers = {"a.h": text, "b.h": text + "#define W 2\n"}
    for _ in range(2):
        agreed(cache, source, paths("inc"), headers=headers)
    write(tree / "a.h", "")
    agreed(cache, source, paths("inc"), headers=headers)
    os.link("a.h", "b.h")
    for _ in range(2):
        agreed(cache, source, paths("inc"), headers=headers)
    os.unlink("b.h")
    assert agreed(cache, source, paths("inc"), headers=headers).cached
    # The source takes part, also under another name.
    source = "#pragma once\n" + source
    agreed(cache, source, paths("inc"), headers=headers)
    for name, other in (("a.h", "kernel.cu"), (header, "other.cu")):
        os.link(name, other)
        agreed(cache, source, paths("inc"), headers=headers, source_name=other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["-Ione//"], ["-Itwo"]),
        (["-I./one//sub/.."], ["-Itwo"]),
        (["-I", "one\t"], ["-Itwo"]),
        (["--include-path= one"], ["-I", " one"]),
        (["-I-", "-Ione"], ["-Itwo", "-Ione"]),
        (["-I=one"], ["-Itwo"]),
    ],
)
def test_directories_that_the_compiler_spells_in_its_own_way(cache, tree, one, other):
    for number, folder in enumerate(("one", "two", " one", "one/sub", "=one")):
        write(tree / folder / "x.h", f"#define V {number}\n")
    for extra in (one, other, one):
        agree(cache, "#include <x.h>\n" + KERNEL, PTX.replace(extra_options=extra))


def test_a_source_whose_name_has_two_slashes_in_a_row(cache, tree):
    for folder in ("one", "two"):
        write(tree / folder / "sub/x.h", f"#define V {ord(folder[0])}\n")
    for name in ("one//sub/k.cu", "two//sub/k.cu", "two/sub/k.cu"):
        agreed(cache, '#include "x.h"\n' + KERNEL, source_name=name)


def test_another_working_directory(cache, tree):
    write(tree / "one/inc/x.h", "#define V 1\n")
    write(tree / "two/inc/x.h", "#define V 2\n")
    for _ in range(2):
        for folder in ("one", "two"):
            with working_directory(tree / folder):
                agreed(cache, "#include <x.h>\n" + KERNEL, paths("inc"))


def test_trigraphs_mean_nothing_to_newer_standards(cache, tree):
    source = KERNEL.replace("V", 'sizeof("what??/n")')
    for std in (None, "c++17", "c++20"):
        assert not agreed(cache, source, PTX.replace(std=std)).cached
