"""Automatic precompiled headers: they change no code, so the drop-in answers without them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dropin.conftest import CLIENTS, Dropin
from harness import corpus

#: Other releases of NVRTC, as `pip install --target FOLDER` leaves them.
SITES = [folder for folder in os.environ.get("TEST_NVRTC_SITES", "").split(os.pathsep) if folder]
FORMS = [
    pytest.param(["--pch"], marks=pytest.mark.long),
    [" -pch ", "--pch-messages=false"],
    pytest.param(["--pch", "--pch-dir=pre"], marks=pytest.mark.long),
    ["-pch", "-pch-dir=pre", "--instantiate-templates-in-pch=true", "-pch-messages=true"],
]
#: NVRTC refuses most of these, or does with them what the drop-in does not.
OTHERS = [
    ["--pch=true"],
    ["--pch", "--pch-dir=missing"],
    ["--pch-dir=missing"],
    ["--pch", "--pch-dir", "pre"],
    ["--pch", "--pch-messages=maybe"],
    ["--pch", "--pch-messages", "false"],
    ["--pch", "-pch"],
    ["--pch", "--pch-messages=true", "--pch-messages=false"],
    ["--pch-dir=pre", "--use-pch=pre/missing.pch"],
    ["--pch", "--create-pch=pre/named.pch"],
    ["--create-pch=pre/named.pch"],
    ["--pch", "--pch-verbose=true"],
]


def _libraries(installed: Path) -> list[Path]:
    found = (Path(site).glob("nvidia/*/lib/libnvrtc.so.*") for site in SITES)
    return [installed, *(path for paths in found for path in paths)]


@pytest.mark.slow
def test_they_change_no_code(
    real: Path, nvrtc: tuple[int, int], dropin: Dropin, long: bool
) -> None:
    """Without the drop-in: every output of a compile that makes or uses one is as without.

    With `--long`: 200 random kernels, those of the benchmarks where their headers are installed, and
    every release in TEST_NVRTC_SITES.
    """
    if nvrtc < (12, 8):
        pytest.skip(f"NVRTC {nvrtc} has no precompiled headers")
    headers = (corpus.CUTLASS, corpus.CCCL, corpus.CCCL_ROOT, corpus.RUNTIME, corpus.CRT)
    folders = [str(found) for each in headers if (found := each.find()) is not None]
    whole = folders if long and len(folders) == len(headers) else []
    for library in _libraries(real) if long else [real]:
        command = (sys.executable, CLIENTS / "precompiled.py", library, 1, 200 if long else 8)
        done = subprocess.run(
            [*map(str, command), *whole],
            cwd=dropin.folder,
            # Loaded by its path, 13.0 does not find its builtins beside it.
            env={**os.environ, "LD_LIBRARY_PATH": str(library.parent)},
            capture_output=True,
            check=True,
        )
        rows = json.loads(done.stdout)["rows"]
        assert [row for row in rows if row[-1]] == []
        statuses = {(turn, status) for _, _, turn, status, _, _ in rows}
        assert {("create", 0), ("use", 13)} <= statuses  # made, and used
        assert {result for *_, result, _ in rows} == {0}


def _compile(include: Path, real: Path, options: list[str]) -> tuple[object, ...]:
    return (sys.executable, CLIENTS / "forms.py", include, real, *options)


@pytest.mark.parametrize("options", FORMS, ids=" ".join)
def test_a_program_that_asks_for_them_is_answered(
    options: list[str], nvrtc: tuple[int, int], real: Path, dropin: Dropin, include: Path
) -> None:
    if nvrtc < (12, 8):
        pytest.skip(f"NVRTC {nvrtc} has no precompiled headers")
    (dropin.folder / "pre").mkdir()
    command, plain = (_compile(include, real, given) for given in (options, []))
    wanted = dropin.bare(*plain)
    assert wanted.code == 0, wanted.errors
    first, second = dropin.run(*command), dropin.run(*command)
    assert first.output == second.output == wanted.output, second.errors
    assert (first.hits, first.misses) == (0, 1), first.line
    assert (second.hits, second.misses, "left to NVRTC 0" in second.line) == (1, 0, True)
    without = dropin.run(*plain)
    assert (without.hits, without.misses) == (1, 0), without.line

    (include / "scale.h").write_text("#define SCALE 3\n")
    third = dropin.run(*command)
    assert third.output == dropin.bare(*plain).output != wanted.output
    assert (third.hits, third.misses) == (0, 1), third.line
    assert list((dropin.folder / "pre").iterdir()) == []


def test_other_forms_are_left_to_nvrtc(real: Path, dropin: Dropin, include: Path) -> None:
    (dropin.folder / "pre").mkdir()
    options = [word for each in OTHERS for word in ("/", *each)][1:]
    told = dropin.same(*_compile(include, real, options))
    assert (told.hits, told.misses) == (0, 0), told.line
    assert f"left to NVRTC {len(OTHERS)}" in told.line
