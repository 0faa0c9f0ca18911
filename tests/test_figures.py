"""Figures in README.md and docs/ come from the committed results of the benchmarks.

Measured figures are in generated parts only (see `bench/pages.py`). Settings and limits are figures
that are not measured: they are listed here with their meaning, and taken from the code where the
code has them.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pages
import pytest
import ratios
from pages import ROOT

from kcache.engine.engine import DEFAULT_WAIT
from kcache.engine.eviction import LOW_WATER
from kcache.engine.journal import _SHARE as _JOURNAL_SHARE
from kcache.engine.single_flight import _LONGEST_PAUSE
from kcache.nvrtc.files import FRESH_NS
from kcache.nvrtc.workers.pool import IDLE_SECONDS
from kcache.nvrtc.workers.slots import _STOPPED_AFTER
from kcache_backends._lmdb_environment import PATIENCE as LMDB_PATIENCE
from kcache_backends._shards import PATIENCE as FILE_PATIENCE

RESULTS = pages.Results.read()
PARTS = [
    pytest.param(page, part["name"], part["body"], id=f"{page.name}:{part['name']}")
    for page in pages.pages()
    for part in pages.PART.finditer(page.read_text(encoding="utf-8"))
]
MakeChart = Callable[[pages.Results], pages.Chart | None]


@dataclass(frozen=True, slots=True)
class Setting:
    """A figure that is set, not measured. It may occur in sentences about its subject.

    Attributes:
        figures: the texts of the figure, made from the code's own constant.
        about: matches a paragraph, or a row of a table, in which the figure is allowed.
        meaning: what the figure is.
    """

    figures: tuple[str, ...]
    about: str
    meaning: str


def seconds(value: float) -> tuple[str, ...]:
    return (f"{value:g} s", f"{value:g} seconds")


SETTINGS = (
    Setting((f"{LOW_WATER:.0%}", f"{1 - LOW_WATER:.0%}"), "cap|evict", "the low-water mark"),
    Setting(("2%",), "writer", "the bound of the cap for several writers"),
    Setting(seconds(FILE_PATIENCE), "lock|stopped|wait", "the patience for a shard's lock"),
    Setting(seconds(LMDB_PATIENCE), "lock|stopped|wait", "the patience for LMDB's lock"),
    Setting(seconds(DEFAULT_WAIT), "wait|patience", "the patience for another's compile"),
    Setting((f"{_LONGEST_PAUSE * 1e3:g} ms",), "compile|held|ask", "the pause between two looks"),
    Setting(
        seconds(FRESH_NS / 1e9), "hash|status|stat", "how old a file is that is trusted by stat"
    ),
    Setting(seconds(_STOPPED_AFTER), "heartbeat", "after which a worker counts as stopped"),
    Setting(seconds(IDLE_SECONDS), "worker", "how long a worker without work is kept"),
    Setting((f"1/{_JOURNAL_SHARE // 2}",), "journal|two files", "the size of the journal's files"),
)
#: Maps pages to phrases with figures that are examples, and not measurements of kcache.
ALLOWED: dict[str, dict[str, str]] = {
    "README.md": {"about 5 minutes": "how long the tests take, installs included"},
    "docs/explanation/comparison.md": {
        '"with 100% accuracy"': "quoted from ccache's manual",
        "| a hit of `-c` | 8 ms | 73 ms |": "of bench/nvcc_peers.py; its date is above the table",
        "| a hit of `-cubin` | 8 ms |": "likewise",
    },
    "docs/explanation/decisions.md": {"within the last 30 seconds": "how long Triton's files stay"},
    "docs/how-to/use-with.md": {"within the last 30 seconds": "likewise"},
    "docs/how-to/read-the-statistics.md": {"a hit rate of 100 %": "what a hit rate can be"},
    "docs/reference/entry-format.md": {
        "than 256 times its frame": "the bound of what is unpacked",
        "155 bytes, 0.25 seconds": "the entry that the test makes",
    },
}

FIGURE = re.compile(
    r"""(?<![\w.,/-])(?:
        \d[\d,.]*\s(?:ns|us|µs|ms|s|seconds?|minutes?|min)\b
      | \d[\d,.]*(?:ns|us|µs|ms|s)\b
      | \d[\d,.]*\s?%
      | \d[\d,.]*\s?\u00d7
      | \d[\d,.]*(?:\stimes\b|x\b|-fold\b)
      | 1/\d[\d,.]*\b
    )""",
    re.VERBOSE,
)
FENCE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})[^\n]*\n.*?^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)


# -- generated parts -------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "name", "body"), PARTS)
def test_a_generated_part_is_what_the_results_say(page: Path, name: str, body: str) -> None:
    assert pages.NOTHING not in body
    assert body == pages.render(name, page, RESULTS), "run: python bench/pages.py"


def test_every_part_is_on_a_page() -> None:
    assert {part.values[1] for part in PARTS} == pages.PARTS.keys()


@pytest.mark.parametrize("make", [pages.starts, pages.growth])
@pytest.mark.parametrize("theme", pages.THEMES)
def test_a_chart_is_drawn_from_the_results(make: MakeChart, theme: str) -> None:
    chart = make(RESULTS)
    assert chart is not None
    svg = (pages.CHARTS / f"{chart.name}-{theme}.svg").read_text(encoding="utf-8")
    assert f"data: {chart.digest()}" in svg, "the chart has other data"


def test_no_chart_is_left_over() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in pages.pages())
    assert [path.name for path in pages.CHARTS.iterdir() if path.name not in shown] == []


def test_the_results_tell_when_by_what_and_on_what() -> None:
    date.fromisoformat(RESULTS.json["datetime"][:10])
    assert RESULTS.json["command"].startswith("pytest bench")
    machine = RESULTS.json["machine_info"]
    assert {"cpu", "cores", "system", "python", "versions"} == machine.keys()
    assert {"kcache-cuda", "nvidia-cuda-nvrtc"} <= machine["versions"].keys()
    assert not RESULTS.json["benchmarks"][0]["stats"].get("data")


# -- ratios ----------------------------------------------------------------------------------------


def row(group: str, name: str, *laps: float, **more: object) -> dict[str, object]:
    medians = {str(number): value for number, value in enumerate(laps)}
    return {"group": group, "extra_info": {"row": name, "laps": medians, **more}}


def test_a_ratio_is_of_the_same_laps_and_a_missed_target_is_marked() -> None:
    target = {"to": "peer", "most": 0.4, "less": None}
    found = ratios.groups(
        [row("get", "peer", 2.0, 4.0, 8.0), row("get", "kcache", 1.0, 2.0, targets=[target])]
    )
    (checked,) = ratios.targets(found)
    assert checked.ratio == (0.5, 0.5, 0.5)
    assert not checked.met
    assert ratios.reference(found["get"]) == "kcache"
    assert ratios.ratio(row("", "a", 3.0), row("", "b", 2.0), row("", "c", 1.0)) == (2.0, 2.0, 2.0)
    assert ratios.ratio(row("", "a"), row("", "b", 2.0)) is None


# -- figures elsewhere -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_measured_figure_stands_alone(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    text = page.read_text(encoding="utf-8")
    alone = [
        f"{name}:{line}: {figure!r}" for line, figure in figures_alone(text, ALLOWED.get(name, {}))
    ]
    assert not alone, "\n".join(alone)


def test_every_allowed_figure_is_on_its_page() -> None:
    """Each allowed phrase is on its page, so that phrases that a page has lost are removed here."""
    for name, phrases in ALLOWED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for phrase in phrases:
            assert _flexible(phrase).search(text), f"{name} does not contain {phrase!r}"


def figures_alone(text: str, allowed: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each figure without a source."""
    text = pages.PART.sub(_blank, text)
    text = FENCE.sub(_blank, text)
    for phrase in allowed:
        text = _flexible(phrase).sub(_blank, text)
    line = 1
    # A paragraph, or a row of a table.
    for paragraph in re.split(r"(\n\s*\n|\n(?=\|))", text):
        known = _settings(paragraph)
        plain = re.sub(r"`[^`]*`", _blank, paragraph)
        for found in FIGURE.finditer(plain):
            if _normal(found[0]) not in known:
                yield line + plain.count("\n", 0, found.start()), found[0]
        line += paragraph.count("\n")


def _settings(paragraph: str) -> set[str]:
    """Return the figures of the settings that a paragraph is about."""
    return {
        _normal(figure)
        for setting in SETTINGS
        if re.search(setting.about, paragraph)
        for figure in setting.figures
    }


def _normal(figure: str) -> str:
    return re.sub(r"\s", "", figure)


def _blank(found: re.Match[str]) -> str:
    """Return a text of underscores with the same length and the same lines."""
    return re.sub(r"[^\n]", "_", found[0])


def _flexible(phrase: str) -> re.Pattern[str]:
    """Return a pattern that matches the phrase with any line breaks between its words."""
    return re.compile(r"\s+".join(map(re.escape, phrase.split())))
