"""Automatic precompiled headers: they don't change the code, so the drop-in need not use them."""

import json
import sys
from pathlib import Path

import pytest
from dropin.conftest import CLIENTS, Dropin

FORMS = [
    ["--pch"],
    [" -pch ", "--pch-messages=false"],
    ["--pch", "--pch-dir=pre"],
    ["-pch", "-pch-dir=pre", "--instantiate-templates-in-pch=true", "-pch-messages=true"],
]
#: Options that NVRTC refuses, or with which it does something that the drop-in does not.
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


@pytest.mark.slow
def test_no_other_code(real: Path, nvrtc: tuple[int, int], dropin: Dropin, long: bool) -> None:
    """In NVRTC itself, creating or using a precompiled header does not change any output."""
    if nvrtc < (12, 8):
        pytest.skip(f"NVRTC {nvrtc} has no precompiled headers")
    command = (sys.executable, CLIENTS / "precompiled.py", real, 1, 200 if long else 8)
    # NVRTC 13.0 does not find its builtins library if it is loaded by its path.
    told = dropin.bare(*command, LD_LIBRARY_PATH=str(real.parent))
    assert told.code == 0, told.errors
    rows = json.loads(told.output)
    assert [row for row in rows if row[-1]] == []
    statuses = {(turn, status) for _, turn, status, _, _ in rows}
    assert {("create", 0), ("use", 13)} <= statuses  # created, and used
    assert {result for *_, result, _ in rows} == {0}


def _compile(include: Path, real: Path, *sets: list[str]) -> tuple[object, ...]:
    options = [word for each in sets for word in ("/", *(each or [""]))][1:]
    return (sys.executable, CLIENTS / "forms.py", include, real, *options)


def test_programs_that_ask_for_them_are_answered(
    nvrtc: tuple[int, int], real: Path, dropin: Dropin, include: Path
) -> None:
    """All options for precompiled headers, and none, lead to the same kernel in the cache."""
    if nvrtc < (12, 8):
        pytest.skip(f"NVRTC {nvrtc} has no precompiled headers")
    (dropin.folder / "pre").mkdir()
    command, plain = _compile(include, real, *FORMS, []), _compile(include, real, [])
    last: dict[int, str] = {}
    for scale in (2, 2, 3):
        (include / "scale.h").write_text(f"#define SCALE {scale}\n")
        told = dropin.run(*command)
        assert set(told.output.splitlines()) == set(dropin.bare(*plain).output.splitlines())
        misses = scale not in last
        assert (told.hits, told.misses) == (len(FORMS) + 1 - misses, misses), told.line
        assert "uncacheable 0" in told.line
        last[scale] = told.output
    assert last[2] != last[3]
    assert list((dropin.folder / "pre").iterdir()) == []


def test_other_forms_are_left_to_nvrtc(real: Path, dropin: Dropin, include: Path) -> None:
    (dropin.folder / "pre").mkdir()
    told = dropin.same(*_compile(include, real, *OTHERS))
    assert (told.hits, told.misses) == (0, 0), told.line
    assert f"uncacheable {len(OTHERS)}" in told.line
