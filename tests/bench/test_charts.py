"""Charts: drawn twice they are the same bytes, and they say what they show."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from report.chart_specs import Chart, all_charts
from report.palette import PAPER, THEMES, pens_of

from .sample import evidence

CHARTS = all_charts(evidence())
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def charts():
    pytest.importorskip("matplotlib", reason="drawing needs Matplotlib, of the extra `bench`")
    from report import draw

    return draw


def test_tables_of_times_and_points_have_charts() -> None:
    assert {name: chart.kind for name, chart in CHARTS.items()} == {
        "kernels-kernel": "bars",
        "sizes-get-against-size": "lines",
        "sizes-readers": "lines",
        "why": "bars",
    }
    assert [each.role for each in CHARTS["sizes-readers"].series] == ["ours", "peer", "floor"]


def test_the_words_for_a_chart_have_its_figures() -> None:
    said = CHARTS["sizes-get-against-size"].alternative()
    assert "kcache file: 20.2 us at 1 KiB, 3.38 ms at 16 MiB; diskcache: 60.6 us" in said
    assert "cub, 597 headers 2 s" in CHARTS["why"].alternative()
    assert not {"`", '"'} & set("".join(chart.alternative() for chart in CHARTS.values()))


def test_a_name_has_one_colour_in_every_chart() -> None:
    first, second = CHARTS["sizes-readers"], CHARTS["sizes-get-against-size"]
    reverse = replace(second, series=second.series[::-1])
    for theme in THEMES:
        pens, others = pens_of(first, theme), pens_of(reverse, theme)
        for name in ("kcache `file`", "diskcache"):
            assert pens[name].colour == others[name].colour


@pytest.mark.parametrize("theme", THEMES)
def test_text_can_be_read_on_its_paper(theme: str) -> None:
    paper, ink, faint, _ = PAPER[theme]
    # WCAG 2.2, 1.4.3: 4.5 for text; 1.4.11: 3 for graphics, which the darkest and the lightest
    # line of a chart miss on purpose: they differ in marker and stroke, too.
    assert min(_contrast(ink, paper), _contrast(faint, paper)) >= 4.5
    for chart in CHARTS.values():
        for pen in pens_of(chart, theme).values():
            assert _contrast(pen.colour, paper) >= 2.2


def _contrast(one: str, other: str) -> float:
    """https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS)
@pytest.mark.parametrize("theme", THEMES)
def test_drawn_twice_it_is_the_same(charts, chart: Chart, theme: str) -> None:
    assert charts.draw(chart, theme) == charts.draw(chart, theme)


@pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS)
def test_what_is_in_the_file(charts, chart: Chart) -> None:
    svg = charts.draw(chart, "light")
    assert charts.stamp_of(svg) == chart.digest()
    assert charts.stamp_of(svg.replace("data: ", "")) is None
    root = ElementTree.fromstring(svg)
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == chart.alternative()
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert chart.title.split()[0] in " ".join(filter(None, words)), "text is text"
    for each in chart.series:
        assert each.name.replace("`", "") in words
    assert not re.search(r"<dc:date>|<image", svg)
    assert root.get("width") == "315pt", "420 CSS pixels"
