"""The clock: where a text may use it, a compile at another time decides."""

from __future__ import annotations

import time
from random import Random

import pytest
from nvrtc.reference import KERNEL, PTX, agreed, compile_fresh, write

from kcache.nvrtc.workers.clock import ClockTest, another_time

GLUE = "#define GLUE_(a, b) a##b\n#define GLUE(a, b) GLUE_(a, b)\n"
#: Uses of the clock; the texts are the source and headers `a.h` and `b.h`.
USES = {
    "plain": ("#define V __TIME__[7]\n", ""),
    "date": ("#define V __DATE__[1]\n", ""),
    "glued": (GLUE + "#define V GLUE(__TI, ME__)[7]\n", ""),
    "another header": ("#define DUNDER(x) __##x##__\n", "#define V DUNDER(TIME)[7]\n"),
    "letters": (
        "#define G(a, b, c, d, e, f, g, h) a##b##c##d##e##f##g##h\n",
        "#define V G(_, _, T, I, M, E, _, _)[7]\n",
    ),
    "a letter by a macro": (GLUE, "#define X M\n#define V GLUE(GLUE(__TI, X), E__)[7]\n"),
    "between characters": (GLUE, "#define V (u8'1' * GLUE(__TI, GLUE(M, E__))[7] * 'q')\n"),
    "after a raw literal": (GLUE, '#define V (R"(/*)"[0] * GLUE(__TI, GLUE(M, E__))[7])\n'),
    "a joint over two lines": ("#define G(a, b) a#\\\n#b\n", "#define V G(__TI, ME__)[7]\n"),
    "length": ("#define V (__TIME__[7] & 1)\n", ""),
}
#: Texts with pieces of it, and nothing that uses it.
IDLE = {
    "in an unused macro": "#define NOW __DATE__\n#define V 1\n",
    "in a comment": "// at __TIME__\n#define V 1\n",
    "in a text": '#define V sizeof("__TIME__")\n',
    "template parameter": GLUE + "template <class __T> struct S {};\n#define V 1\n",
    "pieces": GLUE + "#define ME_ 1\n#define DATE_ ME_\n#define V DATE_\n",
    "defined": "#ifdef __TIME__\n#define V 1\n#endif\n",
}


@pytest.mark.parametrize("use", USES)
def test_no_use_of_the_clock_is_overlooked(use):
    files = [(name, text.encode()) for name, text in zip((b"a.h", b"b.h"), USES[use], strict=True)]
    assert ClockTest().may_ask(files, [KERNEL.encode()])


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("use", ["plain", "date", "length"])
def test_what_uses_the_clock_is_never_cached(cache, tree, use):
    first, second = USES[use]
    write(tree / "a.h", first)
    write(tree / "b.h", second)
    source = '#include "a.h"\n#include "b.h"\n' + KERNEL
    assert not cache.get_or_compile(source, (), PTX).cached
    assert cache.lookup(source, (), PTX) is None
    assert (cache.stats().uncacheable, cache.entry_count) == (1, 0)


@pytest.mark.usefixtures("nvrtc")
def test_a_letter_that_an_option_defines(cache, tree):
    write(tree / "a.h", GLUE)
    source = '#include "a.h"\n#define V GLUE(__, GLUE(GLUE(LETTER, A), TE__))[4]\n' + KERNEL
    assert not cache.get_or_compile(source, (), PTX.replace(defines={"LETTER": "D"})).cached
    assert (cache.stats().uncacheable, cache.entry_count) == (1, 0)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("idle", IDLE)
def test_what_only_names_it_is_cached(cache, tree, idle):
    write(tree / "a.h", IDLE[idle])
    for source, headers in (
        (IDLE[idle] + KERNEL, None),
        ('#include "a.h"\n' + KERNEL, None),
        ('#include "a.h"\n' + KERNEL, {"a.h": IDLE[idle]}),
    ):
        cache.get_or_compile(source, (), PTX, headers=headers)
        assert cache.lookup(source, (), PTX, headers=headers) is not None
    assert agreed(cache, '#include "a.h"\n' + KERNEL, PTX).cached
    assert (cache.stats().compiles, cache.stats().uncacheable) == (3, 0)


@pytest.mark.usefixtures("nvrtc")
def test_internal_names_tell_the_time_and_nobody_can_use_them(cache):
    """NVRTC makes them of the clock and the process id; they keep nothing from being cached."""
    source = (
        "// __TIME__\n__device__ static __noinline__ int g(int a) { return a * a; }\n"
        "template <int N> __global__ void k(int* out) { *out = g(N); }\n"
    )
    for cached in (False, True):
        assert cache.get_or_compile(source, "k<3>", PTX).cached is cached


#: What the preprocessor drops, and tokens that stay as they are.
BESIDE = [" ", "/* < */", " e ", "z()", "w(<)", "\\\n", "\n", "\t", "// <\n", "w('x')", "w(1'0)"]


def joined(random: Random, text: str, defined: list[str]) -> str:
    """Return an expression that `##` makes this text of, in macros that `glue.h` defines."""
    if len(text) > 1 and (len(text) == 8 or random.random() < 0.7):
        cut = random.randrange(1, len(text))
        parts = (joined(random, each, defined) for each in (text[:cut], text[cut:]))
        return f"GLUE({', '.join(parts)})"
    before, after = ("".join(random.choices(["", *BESIDE], k=2)) for _ in range(2))
    form = random.choice(["%s", "%s", "I(%s)", "LAST(<, %s)", "CALL(I, (%s))"])
    if random.random() < 0.2:
        defined.append(f"#define m{len(defined)} {text}\n")
        text = f"m{len(defined) - 1}"
    return form % f"{before} {text} {after}"


@pytest.mark.usefixtures("nvrtc")
def test_no_spelling_hides_the_clock(long):
    """The judge is a compile whose output has today's date."""
    names = "#define e\n#define z()\n#define w(x)\n#define I(x) x\n#define LAST(x, y) y\n"
    files = {"a.h": GLUE, "b.h": names + "#define CALL(f, x) f x\n"}
    random, found = Random(21), 0
    today = ", ".join(str(each) for each in time.strftime("%b %e %Y").encode())
    for _ in range(4000 if long else 40):
        defined: list[str] = []
        text = joined(random, "__DATE__", defined)
        code = f'#include "a.h"\n#include "b.h"\n{"".join(defined)}__device__ const char* d = {text};\n'
        if today in (compile_fresh(code, PTX.flags(), headers=files).ptx or b"").decode():
            found += 1
            known = [(name.encode(), each.encode()) for name, each in files.items()]
            assert ClockTest().may_ask(known, [code.encode()]), code
    assert found > 20


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "arguments",
    [
        {"names": ["k<(__TIME__[7])>"]},
        {"options": ["-Xcudafe=-DT_=__TIME__[7]"]},
        {"options": ["-Xcudafe", "--define_macro=T_=__TIME__[7]"]},
    ],
)
def test_the_clock_in_a_name_or_an_option(cache, arguments):
    source = (
        "#ifndef T_\n#define T_ 1\n#endif\ntemplate <int N> __global__ void k(int* o) { *o = N; }"
    )
    options = PTX.replace(extra_options=arguments.get("options", ()))
    names = arguments.get("names", ["k<T_>"])
    assert not cache.get_or_compile(source, names, options).cached
    assert cache.lookup(source, names, options) is None


@pytest.mark.parametrize(
    "text",
    [
        "#if 0\n#error don't /*\n#endif\nconst char* t = __TIME__; /* */\n",
        '#if 0\n"open /*\n#endif\nconst char* t = __TIME__; /* */\n',
        "int n = 1'000; // '\nconst char* t = __TI\\\nME__;\n",
        "const char* t = __TI??/\nMESTAMP__;\n",
        "#define GLUE(a, b) a##b\nconst char* t = GLUE(__TI, // no trigraph??/\nME__);\n",
        "#define GLUE(a, b) a##b\nconst char* t = GLUE(__TI, // and blanks\\ \nME__);\n",
        "#define GLUE(a, b) a##b\nconst char* t = GLUE(__DA, TE__);\n",
        "#define GLUE(a, b) a##b##a\nconst char* t = GLUE(__, DATE);\n",
    ],
)
def test_nothing_hides_the_clock(text):
    assert ClockTest().may_ask([(b"", text.encode())], ())


def test_the_usual_text_costs_no_second_compile():
    for text in (
        KERNEL,
        "int time; // at this time, update the DATE\n",
        "#define TIMEOUT 3\n",
        "template <class D, class A, class T, class E> void f(_, D, A, T, E);\n",
        "#define ADD(a, b) a##b\nenum { DATE, TIME, MAX_TIME };\n",
    ):
        assert not ClockTest().may_ask([], [text.encode()])


def test_another_time_is_written_otherwise_in_each_place():
    for _ in range(20):
        pairs = zip(time.ctime(), time.ctime(another_time()), strict=True)
        assert all(a != b for a, b in pairs if a.isalnum())
