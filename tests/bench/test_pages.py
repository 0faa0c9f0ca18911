"""Pages: generated parts are replaced as a whole, name their source, and nothing else is touched."""

from __future__ import annotations

import re
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


def test_writing_again_changes_nothing(site: Path) -> None:
    text = write(site / "docs" / "page.md", "chapter sizes")
    pages.write_pages(evidence())
    assert (site / "docs" / "page.md").read_text(encoding="utf-8") == text


def test_a_part_knows_its_results(site: Path) -> None:
    write(site / "docs" / "page.md", "targets")
    (part,) = pages.parts_of(site / "docs" / "page.md")
    assert (part.name, part.files) == ("targets", ["2026-11-22.json"])


def test_several_parts_of_one_page(site: Path) -> None:
    page = site / "docs" / "page.md"
    page.write_text(PAGE.format("targets") + PAGE.format("ratios sizes"), encoding="utf-8")
    pages.write_pages(evidence())
    assert [part.name for part in pages.parts_of(page)] == ["targets", "ratios sizes"]
    assert page.read_text(encoding="utf-8").count("After.") == 2


def test_the_first_page_has_a_picture_for_each_scheme(site: Path) -> None:
    text = write(site / "README.md", "readme")
    assert 'srcset="docs/explanation/charts/why-dark.svg"' in text
    assert 'src="docs/explanation/charts/why-light.svg"' in text
    assert "[All figures](docs/explanation/benchmarks.md)" in text
    assert not re.search("^[|]", text, re.MULTILINE)
    sources = [line for line in text.splitlines() if "Measured on" in line]
    assert len(sources) == 1
    for said in ("`python bench/ratios.py`", "2026-11-22", "Python 3.11.7", "A CPU, 2 cores"):
        assert said in sources[0]


def test_the_summary_has_one_chart_and_ten_rows_at_most(site: Path) -> None:
    text = write(site / "docs" / "explanation" / "benchmarks.md", "summary")
    assert set(re.findall(r'src="([^"]+)"', text)) == {
        "charts/why-light.svg",
        "charts/why-dark.svg",
    }
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert 3 <= len(rows) <= 2 + 10
    assert "Measured on 2026-11-22" in text


def test_a_page_of_the_site_has_an_image_for_each_theme(site: Path) -> None:
    text = write(site / "docs" / "how-to" / "page.md", "summary")
    images = re.findall(r'^<img src="([^"]+)" alt="([^"]+)" class="([^"]+)"', text, re.MULTILINE)
    assert [(source, css) for source, _, css in images] == [
        (f"../explanation/charts/why-{theme}.svg", f"only-{theme}") for theme in ("light", "dark")
    ]
    assert all(said.startswith("Compile a kernel") for _, said, _ in images)
    assert pages.charts_in([site / "docs" / "how-to" / "page.md"]) == {"why"}


def test_ratios_of_a_chapter_or_some_of_them(site: Path) -> None:
    every = write(site / "docs" / "page.md", "ratios kernels")
    some = write(site / "docs" / "page.md", "ratios kernels: miss")
    assert "| `cub`, hit |" in every
    assert "| `cub`, hit |" not in some
    assert "| `cub`, miss |" in some
    assert "Measured on 2026-11-22" in some


def test_a_chapter_as_a_part(site: Path) -> None:
    text = write(site / "docs" / "page.md", "chapter kernels")
    assert "kernels-kernel-dark.svg" in text
    assert "| `cub`, hit |" in text


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
