"""Pages: the generated parts of README.md and of the documentation, written from results files.

A part stands between two marks, each on a line of its own:

    <!-- figures: NAME -->
    <!-- end figures -->

NAME is one of

    summary                  one chart, and ten rows that compare kcache with the peers
    targets                  how many targets are met, and which are not
    readme                   the chart of `summary`
    chapter CHAPTER          the charts and tables of a chapter
    ratios CHAPTER[: TEXT]   its ratios; with TEXT, those whose figure has it

What is between them is replaced as a whole, and names the results files that it came from, so that
a test can render it again.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from harness.findings import Ratio

from report.chart_specs import Chart, why
from report.evidence import RESULTS, ROOT, Evidence
from report.matrix import LINES, comparison
from report.notation import table
from report.palette import THEMES
from report.tables import (
    RATIO_HEAD,
    chapter,
    ratio_row,
    runs,
    source_line,
    targets,
)

README = ROOT / "README.md"
DOCS = ROOT / "docs"
CHARTS = DOCS / "explanation" / "charts"
PART = re.compile(
    r"^<!-- figures: (?P<name>[^\n]+?) -->\n(?P<body>.*?)^<!-- end figures -->$", re.M | re.S
)
_FROM = re.compile(r"^<!-- from (.+) -->$", re.M)
#: A chart is 420 wide. Shown at this width on a large screen, its letters are as large as the
#: text's.
SHOWN = 560


@dataclass(frozen=True, slots=True)
class Part:
    """A generated part of a page: its name, what is in it, and the files that it came from."""

    page: Path
    name: str
    body: str

    @property
    def files(self) -> list[str]:
        found = _FROM.search(self.body)
        return found[1].split(", ") if found else []

    def evidence(self) -> Evidence:
        """Reads the results files that it came from."""
        return Evidence.read([RESULTS / name for name in self.files])


def pages() -> list[Path]:
    return [README, *sorted(DOCS.rglob("*.md"))]


def parts_of(page: Path) -> Iterator[Part]:
    for found in PART.finditer(page.read_text(encoding="utf-8")):
        yield Part(page, found["name"], found["body"])


def write_pages(evidence: Evidence) -> list[Part]:
    """Writes every part of every page anew; returns those that nothing was measured for.

    Raises ValueError for a part with an unknown name.
    """
    empty: list[Part] = []
    for page in pages():
        before = page.read_text(encoding="utf-8")

        def new(found: re.Match[str], page: Path = page) -> str:
            body = render(found["name"], page, evidence)
            if NOTHING in body:
                empty.append(Part(page, found["name"], body))
            return f"<!-- figures: {found['name']} -->\n{body}<!-- end figures -->"

        after = PART.sub(new, before)
        if after != before:
            page.write_text(after, encoding="utf-8")
    return empty


def charts_in(pages: list[Path]) -> set[str]:
    """Returns the names of the charts that pages show."""
    shown = re.compile(r"charts/([a-z0-9-]+)-(?:light|dark)\.svg")
    return {name for page in pages for name in shown.findall(page.read_text(encoding="utf-8"))}


# -- rendering -------------------------------------------------------------------------------------

NOTHING = "Not measured in these results."


def render(name: str, page: Path, evidence: Evidence) -> str:
    """Returns what stands between the marks. Raises ValueError where the name is unknown."""
    kind, argument = re.fullmatch(r"(\w+)[: ]*(.*)", name, re.S).groups()  # type: ignore[union-attr]
    if kind not in KINDS:
        raise ValueError(f"{page.name}: no part is named {name!r}; there are {', '.join(KINDS)}")
    content = "\n\n".join(KINDS[kind](evidence, argument, page)).strip() or NOTHING
    return f"<!-- from {', '.join(evidence.files)} -->\n\n{content}\n\n"


def _targets(evidence: Evidence, argument: str, page: Path) -> Iterator[str]:
    yield from targets(evidence, missed=True)
    yield from runs(evidence)


def _readme(evidence: Evidence, argument: str, page: Path) -> Iterator[str]:
    link = os.path.relpath(DOCS / "explanation" / "benchmarks.md", page.parent)
    chart = why(evidence)
    if chart is not None:
        yield embed(chart, page)
        yield source_line(evidence, ["kernels"], f"[All figures]({link}).")


def _summary(evidence: Evidence, argument: str, page: Path) -> Iterator[str]:
    chart = why(evidence)
    if chart is not None:
        yield embed(chart, page)
    text, used = comparison(evidence, LINES)
    if text:
        yield text
    if text or chart:
        of = dict.fromkeys([*(["kernels"] if chart else []), *used])
        yield source_line(evidence, of)


def _chapter(evidence: Evidence, argument: str, page: Path) -> Iterator[str]:
    if argument in evidence.chapters():
        ratios = list(evidence.ratios(argument))
        yield from chapter(evidence, argument, lambda chart: embed(chart, page), ratios)
        yield source_line(evidence, [argument])


def _ratios(evidence: Evidence, argument: str, page: Path) -> Iterator[str]:
    name, _, text = (word.strip() for word in argument.partition(":"))
    rows: list[Ratio] = [each for each in evidence.ratios(name) if text in each.figure]
    if rows:
        yield table(RATIO_HEAD, map(ratio_row, rows))
        yield source_line(evidence, [name])


#: The functions that write the parts of a page, by the first word of the part's name.
KINDS: dict[str, Callable[[Evidence, str, Path], Iterator[str]]] = {
    "summary": _summary,
    "targets": _targets,
    "readme": _readme,
    "chapter": _chapter,
    "ratios": _ratios,
}


def embed(chart: Chart, page: Path) -> str:
    """Returns a chart for a page: one image that the reader's theme chooses of two.

    The documentation's theme has a switch, and classes for images. GitHub asks the browser.
    """
    folder = os.path.relpath(CHARTS, page.parent)
    if page.is_relative_to(DOCS):
        return "\n\n".join(_image(chart, folder, theme, f"only-{theme}") for theme in THEMES)
    return picture(chart, folder)


def picture(chart: Chart, folder: str) -> str:
    """Returns a chart in `folder` that follows the reader's colour scheme."""
    dark = f"{folder}/{chart.name}-dark.svg"
    return (
        "<picture>\n"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f"{_image(chart, folder, 'light')}\n"
        "</picture>"
    )


def _image(chart: Chart, folder: str, theme: str, css: str = "") -> str:
    source = f'src="{folder}/{chart.name}-{theme}.svg"'
    css = f' class="{css}"' if css else ""
    return f'<img {source} alt="{escape(chart.alternative())}"{css} width="{SHOWN}">'
