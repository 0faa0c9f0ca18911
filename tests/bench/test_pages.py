"""Pages: generated parts are replaced as a whole, name their source, and nothing else is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from report import pages

from .sample import evidence

PAGE = """# Title

12 words before.

<!-- figures: {} -->
old
<!-- end figures -->

After.
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README and a folder of pages in place of the real ones."""
    docs = tmp_path / "docs"
    (docs / "how-to").mkdir(parents=True)
    (docs / "explanation").mkdir()
    monkeypatch.setattr(pages, "README", tmp_path / "README.md")
    monkeypatch.setattr(pages, "DOCS", docs)
    monkeypatch.setattr(pages, "CHARTS", docs / "explanation" / "charts")
    (tmp_path / "README.md").write_text("# No part\n", encoding="utf-8")
    return tmp_path


def write(page: Path, name: str) -> str:
    page.write_text(PAGE.format(name), encoding="utf-8")
    pages.write_pages(evidence())
    return page.read_text(encoding="utf-8")


def test_only_what_is_between_the_marks_changes(site: Path) -> None:
    text = write(site / "docs" / "page.md", "targets")
    before, after = PAGE.format("targets").split("old")
    assert text.startswith(before)
    assert text.endswith(after)
    assert "old" not in text
    assert "3 of 4 targets are met." in text
    assert "Measured on 2026-11-22 by `python bench/ratios.py`" in text
    assert (site / "README.md").read_text(encoding="utf-8") == "# No part\n"


def test_a_part_knows_its_results(site: Path) -> None:
    write(site / "docs" / "page.md", "targets")
    (part,) = pages.parts_of(site / "docs" / "page.md")
    assert (part.name, part.files) == ("targets", ["2026-11-22.json"])


@pytest.mark.parametrize("name", ["ratios nothing", "chapter nothing"])
def test_what_was_not_measured_is_said(site: Path, name: str) -> None:
    page = site / "docs" / "page.md"
    page.write_text(PAGE.format(name), encoding="utf-8")
    (part,) = pages.write_pages(evidence())
    assert (part.page, part.name) == (page, name)
    assert pages.NOTHING in page.read_text(encoding="utf-8")


def test_an_unknown_name_is_refused(site: Path) -> None:
    with pytest.raises(ValueError, match=r"page\.md: no part is named 'tabels'"):
        write(site / "docs" / "page.md", "tabels")
