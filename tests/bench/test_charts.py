"""Charts: drawn twice they are the same bytes, and they say what they show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from report.chart_specs import Chart, all_charts
from report.palette import THEMES

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
