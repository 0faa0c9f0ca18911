"""The clock: a kernel that shows the date or time of its compile is not cached; all others are."""

import re
import time
from random import Random

import pytest
from nvrtc.reference import KERNEL, PTX, agreed, compile_fresh, write

from kcache.nvrtc.workers.import_table import ImportTable

pytestmark = pytest.mark.usefixtures("nvrtc")

GLUE = "#define GLUE_(a, b) a##b\n#define GLUE(a, b) GLUE_(a, b)\n"
TEXT = "#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\n#define AGAIN(x) TEXT(x)\n"
#: Uses of the clock: the texts of the headers `a.h` and `b.h`.
USES = {
    "plain": ("#define V __TIME__[7]\n", ""),
    "date": ("#define V __DATE__[1]\n", ""),
    "size": ("#define V sizeof(__DATE__)\n", ""),
    "glued": (GLUE + "#define V GLUE(__TI, ME__)[7]\n", ""),
    "glued by NVRTC's own macro": ("#define V _NV_CONCAT_EVAL(__TI, ME__)[7]\n", ""),
    "another header": ("#define DUNDER(x) __##x##__\n", "#define V DUNDER(TIME)[7]\n"),
    "letters": (
        "#define G(a, b, c, d, e, f, g, h) a##b##c##d##e##f##g##h\n",
        "#define V G(_, _, T, I, M, E, _, _)[7]\n",
    ),
    "a joint over two lines": ("#define G(a, b) a#\\\n#b\n", "#define V G(__TI, ME__)[7]\n"),
    "a text": (TEXT + "#define V TEXT(__TIME__)[8]\n", ""),
    "a text of a text": (TEXT, "#define V AGAIN(TEXT(__TIME__))[12]\n"),
    "a wide literal": (GLUE, "#define V GLUE(L, __TIME__)[7]\n"),
    "not compiled into the kernel": (
        "__device__ inline const char* f() { return __DATE__; }\n#define V 1\n",
        "",
    ),
    "line": ("#line 7 __DATE__\n#define V 1\n", ""),
}
#: Texts that contain the name of a clock macro but do not expand it.
IDLE = {
    "in an unused macro": "#define NOW __DATE__\n#define V 1\n",
    "in a comment": "// at __TIME__\n#define V 1\n",
    "in a text": '#define V sizeof("__TIME__")\n',
    "not taken": "#if 0\n__DATE__\n#endif\n#define V 1\n",
    "defined": "#ifdef __TIME__\n#define V 1\n#endif\n",
    "an argument that is dropped": "#define DROP(x) 1\n#define V DROP(__TIME__)\n",
    "undefined": "#ifdef __TIMESTAMP__\n#define V 2\n#else\n#define V 1\n#endif\n",
}
WHOLE = '__device__ const char* text = V;\nextern "C" __global__ void k() {}\n'


@pytest.mark.parametrize("options", [PTX, PTX.replace(extra_options=("-w",))])
@pytest.mark.parametrize("use", USES)
def test_uses_of_the_clock_are_not_cached(cache, tree, use, options):
    first, second = USES[use]
    write(tree / "a.h", first)
    write(tree / "b.h", second)
    source = '#include "a.h"\n#include "b.h"\n' + KERNEL
    if use == "a text of a text":
        source = source.replace(KERNEL, WHOLE).replace("[12]", "")
        write(tree / "b.h", second.replace("[12]", ""))
    kernel = cache.get_or_compile(source, (), options)
    assert b"u04" not in (kernel.ptx or b"")
    assert "117, 48, 52" not in (kernel.ptx or b"").decode()
    assert "universal character" not in kernel.log
    assert cache.lookup(source, (), options) is None
    assert (cache.stats().uncacheable, cache.entry_count) == (1, 0)


def test_the_true_date_is_in_it(cache):
    source = '__device__ const char* d = __DATE__;\nextern "C" __global__ void k() {}\n'
    days = {time.strftime("%b %e %Y", time.localtime(time.time() + shift)) for shift in (-60, 60)}
    ptx = (cache.get_or_compile(source, (), PTX).ptx or b"").decode()
    assert any(", ".join(str(each) for each in day.encode()) in ptx for day in days)


@pytest.mark.parametrize("idle", IDLE)
def test_unused_clock_macros_are_cached(cache, tree, idle):
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


@pytest.mark.parametrize(
    "arguments",
    [
        {"names": ["k<(__TIME__[7])>"]},
        {"options": ["-DT_=__TIME__[7]"]},
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


@pytest.mark.parametrize("name", ["__DATE__", "__TIME__"])
def test_the_clock_in_ltoir_is_not_cached(cache, name):
    options = PTX.replace(lto=True)
    source = f"{TEXT}__device__ const char* t = AGAIN(TEXT({name}));\n__global__ void k() {{}}\n"
    assert not cache.get_or_compile(source, (), options).cached
    assert cache.lookup(source, (), options) is None
    cache.get_or_compile(KERNEL, (), options.replace(defines={"V": 1}))
    assert cache.get_or_compile(KERNEL, (), options.replace(defines={"V": 1})).cached


def test_an_error_is_that_of_the_true_clock(cache):
    from kcache import CompileError

    for text in (r'const char* t = "\u04";', "const char* t = __DATE__ + ;"):
        with pytest.raises(CompileError) as caught:
            cache.get_or_compile(f"{text}\n{KERNEL}", (), PTX.replace(defines={"V": 1}))
        judge = compile_fresh(f"{text}\n{KERNEL}", PTX.replace(defines={"V": 1}).flags())
        assert caught.value.log.strip() == judge.log.replace("\0", "").strip()


def internal_names(kernel):
    return set(re.findall(rb"_[0-9a-f]{8}_10007", kernel.ptx))


def test_internal_names_are_those_of_the_request(cache, tmp_path):
    """Internal names depend only on the request, not on clock, directory and process."""
    source = (
        "static __device__ __noinline__ int g(int a) { return a * a; }\n"
        "template <int N> __global__ void k(int* out) { out[N] = g(out[0]); }\n"
    )
    first = cache.get_or_compile(source, "k<3>", PTX)
    again = type(cache)(tmp_path / "other").get_or_compile(source, "k<3>", PTX)
    assert again.ptx == first.ptx
    other = cache.get_or_compile(source, "k<4>", PTX)
    assert internal_names(first)
    assert not internal_names(first) & internal_names(other)


def joined(random: Random, text: str, defined: list[str]) -> str:
    """Return a random expression that expands to `text`, mostly by joining parts of it with `##`.

    Macros that the expression needs are appended to `defined`.
    """
    beside = ["", " ", "/* < */", " e ", "z()", "w(<)", "\\\n", "\n", "\t", "// <\n", "w('x')"]
    if len(text) > 1 and (len(text) == 8 or random.random() < 0.7):
        cut = random.randrange(1, len(text))
        parts = (joined(random, each, defined) for each in (text[:cut], text[cut:]))
        return f"GLUE({', '.join(parts)})"
    before, after = random.choices(beside, k=2)
    form = random.choice(["%s", "%s", "I(%s)", "LAST(<, %s)", "CALL(I, (%s))"])
    if random.random() < 0.2:
        defined.append(f"#define m{len(defined)} {text}\n")
        text = f"m{len(defined) - 1}"
    return form % f"{before} {text} {after}"


def test_no_spelling_hides_the_clock(cache, long):
    """A spelling counts if a compile without a cache gives an output with today's date."""
    names = "#define e\n#define z()\n#define w(x)\n#define I(x) x\n#define LAST(x, y) y\n"
    files = {"a.h": GLUE, "b.h": names + "#define CALL(f, x) f x\n"}
    random, found = Random(21), 0
    for _ in range(2000 if long else 10):
        defined: list[str] = []
        text = joined(random, "__DATE__", defined)
        code = f'#include "a.h"\n#include "b.h"\n{"".join(defined)}__device__ const char* d = {text};\n'
        today = ", ".join(str(each) for each in time.strftime("%b %e %Y").encode())
        if today in (compile_fresh(code, PTX.flags(), headers=files).ptx or b"").decode():
            found += 1
            cache.get_or_compile(code, (), PTX, headers=files)
            assert cache.lookup(code, (), PTX, headers=files) is None, code
    assert found >= 5


def test_a_compiler_that_does_not_ask_ctime_caches_nothing(tmp_path, monkeypatch):
    """No release of NVRTC is like this, so the import of `ctime` is hidden from a worker."""
    import os

    from kcache.nvrtc import library
    from kcache.nvrtc.workers.messages import Ask
    from kcache.nvrtc.workers.worker import _Worker

    slots = ImportTable._read_relocations

    def without_ctime(self, *given):
        slots(self, *given)
        self.slots.pop("ctime", None)

    monkeypatch.setattr(ImportTable, "_read_relocations", without_ctime)
    if os.fork() == 0:  # in a child, so that no other test uses this worker
        try:
            worker = _Worker(library.find().path)
            flags, code = PTX.flags(), KERNEL.replace("V", "1")
            reply = worker.answer(Ask(code, "k.cu", flags, (), {}, os.getcwd(), {}, clock="0" * 64))
            os._exit(0 if "ctime" in reply.trace.unfollowed else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
