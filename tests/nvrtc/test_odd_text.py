"""Headers as few write them: what is cached is what a fresh compile gives, and nothing hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nvrtc.reference import ARCH, python, write

import kcache
from kcache.nvrtc.workers.clock import ClockTest

pytestmark = pytest.mark.usefixtures("nvrtc")


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
def test_nothing_hides_the_clock(text: str) -> None:
    assert ClockTest().may_ask([(b"", text.encode())], ())


def test_a_pipe_in_the_place_of_a_header_is_no_header(tmp_path: Path) -> None:
    """Nobody writes into it: whoever opened it for reading would wait for ever."""
    header = write(tmp_path / "x.h", "#define V 1\n")
    code = """
        import os, signal, sys, kcache
        os.chdir(sys.argv[1])
        signal.alarm(60)
        options = kcache.CompileOptions(arch="sm_80")
        source = '#include "x.h"\\n__global__ void k() {}'
        with kcache.KernelCache("cache") as cache:
            if sys.argv[2] == "first":
                cache.get_or_compile(source, (), options)
            else:
                assert cache.lookup(source, (), options) is None
                print(cache.why(source, (), options).clauses)
        """
    python(code, tmp_path, "first")
    header.unlink()
    os.mkfifo(header)
    assert "x.h is gone" in python(code, tmp_path, "second")


@pytest.mark.parametrize(
    "arguments",
    [
        {"names": ["k<(__TIME__[7])>"]},
        {"options": ["-Xcudafe=-DT_=__TIME__[7]"]},
        {"options": ["-Xcudafe", "--define_macro=T_=__TIME__[7]"]},
    ],
)
def test_the_clock_in_a_name_or_an_option(
    cache: kcache.KernelCache, arguments: dict[str, list[str]]
) -> None:
    source = (
        "#ifndef T_\n#define T_ 1\n#endif\ntemplate <int N> __global__ void k(int* o) { *o = N; }"
    )
    options = ARCH.replace(extra_options=arguments.get("options", ()))
    names = arguments.get("names", ["k<T_>"])
    assert not cache.get_or_compile(source, names, options).cached
    assert cache.lookup(source, names, options) is None
