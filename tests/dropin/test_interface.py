"""Random calls on NVRTC's interface: the drop-in returns what the real library returns."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dropin.conftest import CLIENTS, Dropin

from kcache.dropin import build

CALLS = Path(__file__).parent / "calls.py"


@pytest.mark.parametrize(
    ("mode", "count", "seed"),
    [
        ([], 160, 14),
        (["threads"], 80, 12),
        pytest.param([], 6000, 11, marks=pytest.mark.long),
    ],
)
def test_random_calls(mode: list[str], count: int, seed: int, real: Path, dropin: Dropin) -> None:
    command = (sys.executable, CALLS, real, seed, count, *mode)
    wanted, told = dropin.bare(*command), dropin.run(*command)
    assert wanted.code == told.code == 0, told.errors
    assert told.misses > 2
    assert _first_difference(told.output, wanted.output) is None
    again = dropin.run(*command)
    assert _first_difference(again.output, wanted.output) is None
    assert again.misses == 0


def _first_difference(ours: str, theirs: str) -> object:
    """Return the first pair of results that differ, or None.

    Functions that `theirs` lacks are ignored: the interface library has the functions of the newest
    NVRTC, but an older NVRTC lacks some.
    """
    pairs = zip(json.loads(ours), json.loads(theirs), strict=True)
    differ = (pair for pair in pairs if pair[0] != pair[1] and "absent" not in pair[1])
    return next(differ, None)


ALONE = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
program = ctypes.c_void_p()
texts = sys.argv[2].split(" ")
options = (ctypes.c_char_p * len(texts))(*map(str.encode, texts))
if len(sys.argv) > 3:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
library.nvrtcCreateProgram(ctypes.byref(program), b"// alone", None, 0, None, None)
print(library.nvrtcCompileProgram(program, len(texts), options))
"""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--pch-verbose=true"], "option --pch-verbose"),
        (["--ptxas-options=-optf=x"], "option --ptxas-options"),
        (["--fdevice-time-trace=x"], "option --fdevice-time-trace"),
        (["-w", "gone"], "no working directory, or no NVRTC"),
    ],
)
def test_uncacheable_is_counted(
    arguments: list[str], reason: str, real: Path, dropin: Dropin
) -> None:
    command = (sys.executable, "-c", ALONE, real, *arguments)
    told = dropin.same(*command)
    assert f"uncacheable 1 ({reason}: 1); " in told.line
    assert "programs: python" in told.line


def test_a_directory_named_like_such_an_option(real: Path, dropin: Dropin) -> None:
    told = dropin.run(sys.executable, "-c", ALONE, real, "-I pch/time")
    assert (told.output, "uncacheable 1" in told.line) == ("0\n", False), told.line


def test_nvrtcs_own_headers_are_installed_and_then_it_hits(
    nvrtc: tuple[int, int], real: Path, dropin: Dropin, include: Path
) -> None:
    if nvrtc < (13, 3):
        pytest.skip(f"NVRTC {nvrtc} has no headers")
    option = "--use-bundled-headers=own"
    command = (sys.executable, CLIENTS / "forms.py", include, real, option)
    first, second = dropin.run(*command), dropin.same(*command)
    assert (first.hits, first.misses, second.hits, second.misses) == (0, 1, 1, 0)
    assert first.output == second.output
    odd = dropin.same(*command[:-1], f"{option}/")
    assert "uncacheable 1 (option --use-bundled-headers: 1); " in odd.line


# -- the table of exports --------------------------------------------------------------------------


def test_the_table_has_every_function_of_the_installed_nvrtc(real: Path) -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", real], capture_output=True, text=True, check=True
    )
    ours = set(re.findall(r"^\w+ [TWi] ((?:__)?nvrtc\w+)", symbols.stdout, re.MULTILINE))
    table = Path(build.SOURCES, "table.h").read_text()
    assert ours <= set(re.findall(r"X\((\w+)\)", table))
    assert len(ours) > 20


def test_a_newer_nvrtc_loses_nothing(real: Path, dropin: Dropin, tmp_path: Path) -> None:
    """A program that loads an NVRTC with a function that is new to the drop-in gets that NVRTC."""
    compiler = build.compiler()
    assert compiler is not None
    newer = tmp_path / real.name
    source = "int nvrtcNewest(long a, long b, long c, long d, long e, long f, long g, long h)"
    (tmp_path / "newer.c").write_text(source + "{ return a + b + c + d + e + f + g * h; }")
    command = [compiler, "-shared", "-fPIC", tmp_path / "newer.c", "-o", newer, real]
    subprocess.run([*map(str, command), f"-Wl,-soname,{real.name}"], check=True)
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); "
        "print(library.nvrtcNewest(*map(ctypes.c_long, (1, 2, 3, 4, 5, 6, 7, 8))), "
        "hasattr(library, 'kcache_dropin_load'))"
    )
    assert dropin.run(sys.executable, "-c", code, newer).output == "77 False\n"
