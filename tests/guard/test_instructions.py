"""Instructions: how many bytecode instructions an operation executes; the same at every run."""

from __future__ import annotations

from pathlib import Path

import pytest
from guard.counts import HEADROOM, VERSION, counted, table
from guard.scenarios import SCENARIOS

TABLE = table()
REFRESH = "to measure the table anew: `python -m guard.counts` in tests/, once for each Python"

pytestmark = pytest.mark.skipif(TABLE is None, reason=f"no table for Python {VERSION}; {REFRESH}")


@pytest.fixture(scope="module")
def counts(folder: Path, has_compiler: bool) -> dict[str, int]:
    return counted(folder, compiler=has_compiler)


@pytest.mark.parametrize("name", TABLE or {})
def test_within_a_tenth_of_the_table(
    name: str, counts: dict[str, int], request: pytest.FixtureRequest
) -> None:
    if SCENARIOS[name].compiler:
        request.getfixturevalue("nvrtc")
    assert TABLE is not None
    count, told = counts[name], TABLE[name]
    assert count <= told * (1 + HEADROOM), f"{name} takes {count} instructions, not {told}"
    assert count >= told * (1 - HEADROOM), f"{name} takes {count} only, not {told}: {REFRESH}"


def test_the_table_is_complete(counts: dict[str, int], has_compiler: bool) -> None:
    assert TABLE is not None
    assert set(counts) == {n for n in TABLE if has_compiler or not SCENARIOS[n].compiler}


def test_it_counts_the_same_again(counts: dict[str, int], tmp_path: Path) -> None:
    again = counted(tmp_path, compiler=False)
    assert again == {name: counts[name] for name in again}
