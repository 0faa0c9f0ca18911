"""Findings: kept in JSON without loss, and shown as tables that say what they say."""

from __future__ import annotations

import json

import pytest
from harness.findings import Findings
from report import tables
from report.evidence import RESULTS, Evidence
from report.matrix import LINES, comparison

from .sample import evidence, findings, ratio


def test_json_loses_nothing() -> None:
    found = findings()
    assert Findings.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_results_file_can_be_read_and_shown(path) -> None:
    read = Evidence.read([path])
    assert Findings.from_json(read.runs[0].to_json()) == read.runs[0]
    assert "### Targets" in tables.whole(read, lambda chart: chart.name)


def test_a_target_is_ours_to_meet() -> None:
    text, rows = tables.targets(evidence())
    assert text == "3 of 4 targets are met."
    assert "truncated entry: kcache" in rows
    assert "diskcache" not in rows, "what a peer does is no target"
    assert "| **1.20** | 1.08 to 1.32 | **no**, but the quartiles differ |" in rows


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
