"""Findings: kept in JSON without loss, and shown as tables that say what they say."""

from __future__ import annotations

import json

import pytest
from harness.findings import Findings
from report import tables
from report.evidence import RESULTS, Evidence
from report.matrix import LINES, comparison, matrix
from report.notation import number, quantity, size, table

from .sample import evidence, findings, ratio


def test_json_loses_nothing() -> None:
    found = findings()
    assert Findings.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_results_file_can_be_read_and_shown(path) -> None:
    read = Evidence.read([path])
    assert Findings.from_json(read.runs[0].to_json()) == read.runs[0]
    assert "### Targets" in tables.whole(read, lambda chart: chart.name)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0531, "s", "53.1 ms"),
        (1.5e-10, "s", "0.150 ns"),
        (2.0, "s", "2 s"),
        (4_190_000, "B", "4.19 MB"),
        (12_345, "1/s", "12.3 k/s"),
        (0.5, "1/s", "0.500 /s"),
        (3, "compiles", "3 compiles"),
        (3, "", "3"),
    ],
)
def test_quantity(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_numbers_and_sizes() -> None:
    assert [number(value) for value in (0.125, 0.5, 1.0, 11.04, 1234.0)] == [
        "1/8",
        "0.500",
        "1",
        "11",
        "1,234",
    ]
    assert [size(value) for value in (512, 100 << 10, 16 << 20)] == ["512 B", "100 KiB", "16 MiB"]


def test_a_figure_is_not_parted_from_its_unit() -> None:
    row = table(("a",), [("53.1 ms",), ("12.3 k/s",), ("1,024 MB",), ("3 kB of it",)])
    assert row.splitlines()[2:] == [
        "| 53.1\u00a0ms |",
        "| 12.3\u00a0k/s |",
        "| 1,024\u00a0MB |",
        "| 3 kB of it |",
    ]


def test_a_target_is_ours_to_meet() -> None:
    text, rows = tables.targets(evidence())
    assert text == "3 of 4 targets are met."
    assert "truncated entry: kcache" in rows
    assert "diskcache" not in rows, "what a peer does is no target"
    assert "| **1.20** | 1.08 to 1.32 | **no**, but the quartiles differ |" in rows


def test_what_each_one_does_is_one_matrix() -> None:
    lines = matrix(findings().facts).splitlines()
    assert lines[0] == "|  | kcache `file` | diskcache |"
    assert lines[2:] == ["| truncated entry | miss | **served** |", "| synchronised |  | never |"]


def test_every_peer_and_every_floor_has_a_table() -> None:
    text = "\n".join(tables.beside(evidence()))
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "#### To cuda.core FileStream",
        "#### To diskcache",
        "#### To the floor: bare NVRTC",
    ]
    assert "an empty one" not in text


def test_what_failed_and_what_is_absent_is_said() -> None:
    text = tables.whole(evidence(), lambda chart: "")
    assert "**This chapter failed**" in text
    assert "OSError: the disk is full" in text
    assert "| CuPy | `kernels` | ImportError: libcuda.so.1 is not found |" in text


def test_a_chapter_is_of_the_newest_run_that_has_it() -> None:
    new = Findings("2026-11-23", "python bench/ratios.py --only sizes", {}, {})
    new.add([ratio("sizes", "a new figure", "diskcache", 0.25)])
    both = evidence(new, findings())
    assert [each.figure for each in both.ratios("sizes")] == ["a new figure"]
    assert not list(both.points("sizes"))
    assert len(list(both.ratios("kernels"))) == 3
    text = tables.whole(both, lambda chart: "")
    assert "`python bench/ratios.py --only kernels`, run 2" in text
    assert "Run 2: measured on 2026-11-22" in text


def test_the_comparison_has_a_column_for_each_peer() -> None:
    text, chapters = comparison(evidence(), LINES)
    assert text.splitlines()[0].startswith("|  | kcache | cuda.core | diskcache |")
    assert "sizes" in chapters
    assert "kernels" not in chapters or "trivial" not in text
    assert comparison(evidence(Findings("2026-11-22", "x", {}, {})), LINES) == ("", [])
