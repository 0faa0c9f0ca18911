"""A recorded run: warmed elsewhere, checked beforehand, and then run without any compile."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from dropin.conftest import CLIENTS, KCACHE, Dropin, Told, needs

#: Fails at its first unknown kernel, as the settings say.
STRICT = {"KCACHE_ON_MISS": "error"}


@pytest.fixture(
    params=["cupy", pytest.param("cuda.core", marks=pytest.mark.long), pytest.param(None, id="c")]
)
def command(request: pytest.FixtureRequest, include: Path) -> Sequence[object]:
    """A program of CuPy's compiler, one of cuda.core, and one in C."""
    if request.param is None:
        return request.getfixturevalue("linked"), include
    needs(request.param)
    client = "core.py" if request.param == "cuda.core" else "cupy_compiler.py"
    return sys.executable, CLIENTS / client, include


def test_a_recorded_list_is_all_that_is_needed(
    command: Sequence[object], dropin: Dropin, include: Path
) -> None:
    def kcache(*arguments: str, **more: str) -> Told:
        return dropin.bare(*KCACHE, *arguments, **more)

    recorded = kcache("run", "--record", "list.jsonl", *map(str, command))
    assert recorded.output == dropin.bare(*command).output

    new = {"KCACHE_DIR": str(dropin.folder / "new")}
    check = kcache("warm", "list.jsonl", "--check", "--json", **new)
    assert check.code == 1
    assert json.loads(check.output)["missing"] > 0
    refused = dropin.run(*command, **STRICT, **new)
    assert refused.code != 0
    assert (refused.hits, refused.misses) == (0, 0), refused.line

    assert kcache("warm", "list.jsonl", **new).code == 0
    assert kcache("warm", "list.jsonl", "--check", **new).code == 0
    told = dropin.run(*command, **STRICT, **new)
    assert (told.code, told.output) == (0, recorded.output)

    (include / "scale.h").write_text("#define SCALE 3\n")
    assert kcache("warm", "list.jsonl", "--check", **new).code == 1
    assert dropin.run(*command, **STRICT, **new).code != 0


def test_the_log_of_the_refused_compile_has_the_reason(
    nvrtc: tuple[int, int], dropin: Dropin, include: Path
) -> None:
    needs("cuda.core")
    command = (sys.executable, CLIENTS / "core.py", include)
    dropin.run(*command)
    header = include / "scale.h"
    header.write_text("#define SCALE 3\n")
    told = dropin.run(*command, **STRICT)
    assert "NVRTC_ERROR_COMPILATION" in told.errors
    what = "scale<float> is not in the cache, and KCACHE_ON_MISS=error allows no compile"
    assert f"kcache: {what}: the header {header} changed\n" in told.errors


def test_what_the_cache_can_not_answer_is_not_compiled_either(
    nvrtc: tuple[int, int], dropin: Dropin, include: Path, tmp_path: Path
) -> None:
    """The server leaves a source that is not UTF-8 to NVRTC."""
    needs("cuda.bindings")
    code = (
        "from cuda.bindings import nvrtc\n"
        "_, program = nvrtc.nvrtcCreateProgram(b'// \\xff', b'k.cu', 0, [], [])\n"
        "print(int(nvrtc.nvrtcCompileProgram(program, 0, [])[0]))\n"
        "log = b' ' * nvrtc.nvrtcGetProgramLogSize(program)[1]\n"
        "nvrtc.nvrtcGetProgramLog(program, log); print(log.decode())\n"
    )
    command = (sys.executable, "-c", code)
    assert dropin.run(*command).output.startswith("0\n")
    told = dropin.run(*command, **STRICT)
    assert told.output.startswith("6\nkcache: the cache can't answer this program, and KCACHE_ON")
    assert "not UTF-8" in told.output


def test_each_compile_is_explained(nvrtc: tuple[int, int], dropin: Dropin, include: Path) -> None:
    """By the option as by the variable."""
    needs("cuda.core")
    command = (sys.executable, CLIENTS / "core.py", include)
    header = include / "scale.h"

    def line(*options: str, **variables: str) -> tuple[str, str]:
        told = dropin.bare(*KCACHE, "run", *options, *command, **variables)
        found = re.findall(r"(?im)^kcache: debug: ((?:hit|miss): .*)$", told.errors)
        assert len(found) == 1, told.errors
        return found[0], told.output

    output = dropin.bare(*command).output
    text = "miss: scale<float> is compiled: this cache remembers no such kernel"
    assert line("--why") == (text, output)
    assert line(KCACHE_LOG="debug") == ("hit: scale<float>", output)
    header.write_text("#define SCALE 3\n")
    output = dropin.bare(*command).output
    text = f"miss: scale<float> is compiled: the header {header} changed"
    assert line(KCACHE_LOG="debug") == (text, output)
