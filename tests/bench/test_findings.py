"""Findings: what is committed can be read, is kept in JSON without loss, and is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.findings import Findings
from report import tables
from report.evidence import RESULTS, Evidence


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_results_file_can_be_read_and_shown(path: Path) -> None:
    read = Evidence.read([path])
    assert Findings.from_json(read.runs[0].to_json()) == read.runs[0]
    assert "### Targets" in tables.whole(read, lambda chart: chart.name)
