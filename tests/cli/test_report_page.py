"""`kcache report`: what the page says, that it is small and harmless, and how it looks."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from cli.browser import Tab
from cli.helpers import age, damage, fill, kernel, key, manifest, recency
from core.helpers import QUICK
from hypothesis import given
from hypothesis import strategies as st

from kcache import KernelCache, Stats
from kcache.cli.html_report.page import page
from kcache.cli.html_report.remarks import NOTE, WARNING, remarks
from kcache.cli.html_report.shares import lengths, spans
from kcache.cli.html_report.snapshot import Snapshot, gather
from kcache.engine.stats import FIELDS, StatsFile
from kcache.entry import encode
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.inventory import KERNEL, Item
from kcache.testing import MemoryBackend

#: Sunday, 22 November 2026, 12:30 UTC.
NOW = datetime(2026, 11, 22, 12, 30, tzinfo=UTC).timestamp()
DAY = 86400
HOSTILE = [
    "</svg><script>alert(1)</script>",
    "</style><script src=//example.com/x></script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "<!-- <![CDATA[ &lt;b&gt; &#x3c; {{ 7 * 7 }}",
    "\u202egnp.exe\x1b[31m\x00\ud800\n",
]


class Found(HTMLParser):
    """What a page holds: its tags, attributes, text, and the rows of its tables by caption."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._rows: list[list[str]] = []
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta" and not self.get_starttag_text().endswith("/>"):
            self._inside.append(tag)
        if tag == "table":
            self._rows = []
        if tag == "tr":
            self._rows.append([])
        if tag in ("th", "td"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "circle", "line"):
            assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._inside:
            return
        self.text.append(data)
        if "caption" in self._inside:
            self.tables[data] = self._rows
        elif self._rows and {"th", "td"} & {*self._inside}:
            cell = self._rows[-1]
            cell[-1] = f"{cell[-1]} {data}".strip()

    def table(self, caption: str) -> list[list[str]]:
        """Returns the rows of the table whose caption begins so, without its head."""
        (rows,) = (rows for title, rows in self.tables.items() if title.startswith(caption))
        return rows[1:]


def snapshot(**changes: Any) -> Snapshot:
    """Returns a snapshot of an empty cache, with changes."""
    about = {"Directory": "/somewhere"}
    return Snapshot(NOW, about, 1 << 20, 0, Stats(), ())._replace(**changes)


def made(created: float, size: int = 10, **more: Any) -> Item:
    """Returns a kernel that was compiled in a second."""
    return Item(key(str(created)), size, NOW, KERNEL, created=created, compile_seconds=1.0, **more)


def full(*names: str) -> Snapshot:
    """Returns a snapshot in which every text that comes from outside is one of these."""
    items = tuple(
        made(NOW - n * DAY, source_name=name, names=(name, name), arch=name)
        for n, name in enumerate(names)
    )
    stats = Stats(**dict.fromkeys(FIELDS, 3))
    return snapshot(about={"Directory": "".join(names)}, items=items, size=60, stats=stats)


# -- the command -----------------------------------------------------------------------------------


def make(directory: Path, backend: str = "file") -> None:
    """Makes a cache of 12 kernels for 3 targets, some of them alike, and 2 manifests."""
    entries = {
        key(n): kernel(
            10_000 * (n + 1),
            source=f"source{n % 4}.cu",
            names=[f"kernel{n % 4}<float>"],
            arch=f"sm_{(80, 90, 100)[n % 3]}",
            seconds=0.5,
        )
        for n in range(12)
    }
    fill(directory, {**entries, key("m1"): manifest(), key("m2"): manifest()}, backend)


def test_the_page_tells_what_is_in_the_cache(
    backend: str, here: Callable, cache_directory: Path, tmp_path: Path
) -> None:
    make(cache_directory, backend)
    file = StatsFile(cache_directory / "stats")
    counts = {"hits": 400, "misses": 80, "compiles": 80, "saved_seconds": 7200, "remote_hits": 7}
    file.add([counts.get(name, 0) for name in FIELDS])
    before = recency(cache_directory, backend)
    stats = (cache_directory / "stats").read_bytes()
    out = tmp_path / "report.html"
    said = here("report", "-o", out)
    assert (said.code, said.out) == (0, "")
    assert re.fullmatch(rf"kcache: report of 14 entries -> {out} \([\d.]+ KiB\)\n", said.err)
    found = Found(out.read_text("utf-8"))
    archs = {row[0]: row[1] for row in found.table("Kernels by the arch")}
    assert archs == {"sm_80": "4", "sm_90": "4", "sm_100": "4"}
    assert [row[:2] for row in found.table("Kernels by source")] == [
        [f"source{n}.cu kernel{n}<float>", "3"] for n in (3, 2, 1, 0)
    ]
    largest = [row[0].split()[-1] for row in found.table("The entries that take")]
    assert largest == [key(n)[:12] for n in range(11, 1, -1)]
    used = {name[:12]: when for name, when in before.items()}
    coldest = [used[row[0].split()[-1]] for row in found.table("The entries that were used")]
    assert coldest == sorted(used[key(n)[:12]] for n in range(12))[:10]
    text = " ".join(found.text)
    for told in ("2.0 h", "400 of 480 requests", "83%", str(cache_directory), backend, "Manifests"):
        assert told in text, told
    assert "0 from memory, 393 from the backend, 7 from remotes" in text
    assert recency(cache_directory, backend) == before
    assert (cache_directory / "stats").read_bytes() == stats


def test_an_empty_cache_is_a_page(here: Callable, cache_directory: Path) -> None:
    fill(cache_directory, {})
    said = here("report", "-o", "-")
    assert (said.code, said.err) == (0, "")
    assert "Nothing saved yet" in said.out
    assert len(said.out) < 20_000


def test_damaged_entries_are_told(here: Callable, cache_directory: Path) -> None:
    fill(cache_directory, {key(1): kernel()})
    damage(cache_directory, key(2))
    age(cache_directory, key(2), 1000)
    found = Found(here("report", "-o", "-").out)
    text = " ".join(found.text)
    assert "Damaged entries in the cache: 1" in text
    assert "kcache verify --repair" in text
    assert found.table("The entries that were used")[0][0].startswith("(damaged)")


def test_the_file_is_replaced_whole_and_keeps_its_permissions(
    here: Callable, cache_directory: Path, work: Path
) -> None:
    fill(cache_directory, {key(1): kernel()})
    old = os.umask(0o027)
    try:
        assert here("report").code == 0
    finally:
        os.umask(old)
    new = work / "kcache-report.html"
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    (work / "pages").mkdir()
    target = work / "pages" / "target.html"
    target.write_text("old")
    target.chmod(0o604)
    (work / "link.html").symlink_to(target)
    assert here("report", "-o", "link.html").code == 0
    assert (work / "link.html").is_symlink()
    assert target.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(target.stat().st_mode) == 0o604
    assert {path.name for path in work.iterdir()} == {"axpy.cu", "pages", "link.html", new.name}
    assert list((work / "pages").iterdir()) == [target]


# -- what the page holds ---------------------------------------------------------------------------


def test_names_cannot_become_markup() -> None:
    text = page(full(*HOSTILE), UTC)
    found = Found(text)
    expected = Found(page(full(*(f"name{n}" for n in range(len(HOSTILE)))), UTC))
    assert found.tags == expected.tags
    assert [name for name, _ in found.attributes] == [name for name, _ in expected.attributes]
    shown = " ".join(found.text)
    assert HOSTILE[0] in shown
    assert "{{ 7 * 7 }}" in shown
    assert "\\u202egnp.exe\\x1b[31m\\x00\\ud800\\n" in shown


@QUICK
@given(st.text())
def test_whatever_is_a_name_comes_out_as_text(name: str) -> None:
    found = Found(page(snapshot(about={"Directory": name}), UTC))
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    after = found.text[found.text.index("Directory") + 1 :]
    assert "".join(after).startswith(printable)


def test_the_page_loads_nothing_and_forbids_it() -> None:
    text = page(full("name"), UTC)
    found = Found(text)
    (policy,) = (value for name, value in found.attributes if value.startswith("default-src"))
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[\w+/=]{44}'; base-uri 'none'; form-action 'none'",
        policy,
    )
    assert not re.search(r"url\(|@import|https?:|javascript:", text)
    names = {name for name, _ in found.attributes}
    assert not {"src", "href", "style", "onload", "onclick"} & names
    assert not {"script", "img", "iframe", "link", "object", "a"} & {*found.tags}


def test_every_chart_has_words_and_every_table_a_caption() -> None:
    text = page(full("name"), UTC)
    for svg in re.findall(r"<svg[^>]*>", text):
        assert ('role="img"' in svg and 'aria-label="' in svg) != ('aria-hidden="true"' in svg), svg
    found = Found(text)
    assert len(found.tables) == found.tags.count("table") == 5


@pytest.mark.parametrize(
    ("hits", "misses", "told"),
    [(0, 0, "Nothing saved yet"), (0, 5, "0%"), (9999, 1, "99%"), (5, 0, "100%")],
)
def test_the_hit_rate_is_not_rounded_up(hits: int, misses: int, told: str) -> None:
    text = page(snapshot(stats=Stats(hits=hits, misses=misses, hit_seconds=1)), UTC)
    assert f">{told}<" in text


@pytest.mark.slow
def test_a_hundred_thousand_entries_are_a_small_page(tmp_path: Path) -> None:
    backend = MemoryBackend()
    for number in range(100_000):
        name = key(number)
        entry = kernel(
            0, source=f"{'s' * 500}{number}", names=[f"{'n' * 500}{number}"], arch=f"a{number}"
        )
        backend.put(name, encode(name, entry, producer=PRODUCER.encode()))
    seen: list[None] = []
    with KernelCache(tmp_path, backend=backend, max_size="10GiB", read_only=True) as cache:
        found = gather(cache, str(tmp_path), seen=lambda: seen.append(None), clock=lambda: NOW)
    assert len(seen) == len(found.items) == 100_000
    text = page(found, UTC)
    assert len(text) < 120_000
    assert "99,992 others" in text


LEVELS = [WARNING, NOTE].index
NOTED = {
    **dict.fromkeys(("corrupt", "errors", "unlocked", "rejected", "remote_errors"), WARNING),
    **dict.fromkeys(("evictions", "uncacheable", "wait_timeouts", "stale"), NOTE),
}


@pytest.mark.parametrize("name", FIELDS)
def test_counts_deserve_attention_or_not(name: str) -> None:
    told = snapshot(stats=Stats(**{name: 7}))
    expected = [(NOTED[name], 7)] if name in NOTED else []
    assert [(remark.level, remark.number) for remark in remarks(told)] == expected
    assert ("Worth a look" in page(told)) == (name in NOTED)
    together = remarks(snapshot(stats=Stats(**{"evictions": 1, name: 1})))
    assert [each.level for each in together] == sorted(
        (each.level for each in together), key=LEVELS
    )


def test_what_is_small_is_seen_on_a_phone_and_the_whole_stays_whole() -> None:
    for shares in ([0.99, 0.005, 0.003, 0.002], [0.0001], [0.5, 0.0], [1.4, 0.001], [0.2] * 5):
        found = lengths(shares, 1)
        assert sum(found) <= 100.000001
        assert [length > 0 for length in found] == [share > 0 for share in shares]
        # 310 pixels are what a card has on a phone; the gap to the neighbours is 1.5 pixels.
        assert all(length * 3.1 - 1.5 >= 2 for length in found if length)
    assert lengths([2, 1], 4) == [50, 25]


# -- over time -------------------------------------------------------------------------------------


def test_the_chart_begins_where_the_cache_does() -> None:
    assert spans([], NOW, UTC) == ("hour", [])
    assert spans([made(NOW + DAY)], NOW, UTC) == ("hour", [])  # the clock was set back
    unit, young = spans([made(NOW - 5400), made(NOW)], NOW, UTC)
    assert (unit, [span.kernels for span in young]) == ("hour", [1, 1])
    assert young[0].title == "Sunday, 11:00"
    unit, older = spans([made(NOW - 9 * DAY), made(NOW)], NOW, UTC)
    assert (unit, [span.kernels for span in older]) == ("day", [1, *[0] * 8, 1])
    assert older[0].title == "Friday, 13 November 2026"
    assert len(spans([made(0.0), made(1e300), made(NOW)], NOW, UTC)[1]) == 90


def test_days_are_those_of_the_zone() -> None:
    items = [made(NOW - 12 * 3600), made(NOW - 5 * DAY)]  # 0:00 UTC
    found = [
        [span.kernels for span in spans(items, NOW, timezone(timedelta(hours=hours)))[1]][-2:]
        for hours in (0, -5, 13)
    ]
    assert found == [[0, 1], [1, 0], [1, 0]]


@QUICK
@given(st.lists(st.integers(0, 88 * 24), max_size=30), st.integers(-12 * 4, 14 * 4))
def test_no_kernel_is_lost_between_hours_and_days(hours: list[int], quarters: int) -> None:
    zone = timezone(timedelta(minutes=15 * quarters))
    items = [made(NOW - hour * 3600) for hour in hours]
    unit, found = spans(items, NOW, zone)
    assert sum(span.kernels for span in found) == len(items)
    assert unit == ("day" if max(hours, default=0) >= 48 else "hour")


def test_the_table_below_the_chart_has_its_figures() -> None:
    items = tuple(made(NOW - n * DAY) for n in (3, 1))
    assert Found(page(snapshot(items=items), UTC)).table("Kernels by day") == [
        ["Thursday, 19 November 2026", "1", "1.0 s"],
        ["Saturday, 21 November 2026", "1", "1.0 s"],
    ]


# -- in a browser ----------------------------------------------------------------------------------

#: The lowest contrast between a text and its background, as in WCAG 2.2, and that text.
CONTRAST = """(() => {
  const parse = text => (text.match(/rgba?\\([^)]*\\)/g) || []).map(
    colour => colour.match(/[\\d.]+/g).map(Number)).map(
    ([r, g, b, a = 1]) => [r, g, b, a]);
  const over = (top, under) => top.slice(0, 3).map((v, n) => v * top[3] + under[n] * (1 - top[3]));
  const light = colour => colour.slice(0, 3).map(v => v / 255).map(
    v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4
    ).reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const style = getComputedStyle(node), stops = parse(style.backgroundImage);
      if (stops.length) return stops;
      const [colour] = parse(style.backgroundColor);
      if (colour && colour[3] === 1) return [colour];
    }
    return [[255, 255, 255, 1]];
  };
  let least = [99, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || node.tagName === "title" || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const [ink] = parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
    let shown = ink[3];
    for (let up = node; up; up = up.parentElement) shown *= getComputedStyle(up).opacity;
    for (const back of behind(node)) {
      const [a, b] = [light(over([...ink.slice(0, 3), shown], back)), light(back)];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < least[0]) least = [ratio, text];
    }
  }
  return least;
})()"""
#: The elements that stick out of the page on either side.
STANDS_OUT = """[...document.querySelectorAll("body *")].filter(node => {
  const box = node.getBoundingClientRect();
  return box.width && (box.left < -0.5 || box.right > innerWidth + 0.5);
}).map(node => node.tagName + "." + node.getAttribute("class") + ": " + node.textContent.slice(0, 60))"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("told", [full(*HOSTILE), snapshot()], ids=["full", "empty"])
def test_a_browser_shows_it_without_a_word_or_a_request(
    told: Snapshot, width: int, dark: bool, tab: Callable[..., Tab], tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(told, UTC), "utf-8")
    seen = tab(width, dark=dark)
    seen.open(path)
    seen.evaluate("document.querySelectorAll('details').forEach(node => node.open = true)")
    assert seen.evaluate("innerWidth") == width
    assert seen.evaluate("document.documentElement.scrollWidth") == width
    assert seen.evaluate(STANDS_OUT) == []
    ratio, text = seen.evaluate(CONTRAST)
    assert ratio >= 4.5, text
    back = seen.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back))) < 200) == dark
    (style,) = seen.evaluate("[...document.styleSheets].map(sheet => sheet.cssRules.length > 50)")
    assert style
    assert seen.evaluate("document.scripts.length + document.images.length") == 0
    requests = seen.heard("Network.requestWillBeSent")
    assert [params["request"]["url"] for params in requests] == [path.as_uri()]
    said = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert seen.heard(*said, "Page.javascriptDialogOpening") == []


def test_a_screen_reader_finds_words_for_every_image_and_table(
    tab: Callable[..., Tab], tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(full(*HOSTILE), UTC), "utf-8")
    seen = tab()
    seen.open(path)
    named: dict[str, list[str]] = {}
    for node in seen.call("Accessibility.getFullAXTree")["nodes"]:
        if not node["ignored"]:
            name = node.get("name", {}).get("value", "")
            named.setdefault(node["role"]["value"], []).append(name)
    assert len(named["image"]) == 3
    assert len(named["table"]) == 4  # one more is folded
    assert all(named["image"] + named["table"] + named["heading"])


def test_it_prints_on_white(tab: Callable[..., Tab], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(full(*HOSTILE), UTC), "utf-8")
    seen = tab(700, dark=True, media="print")
    seen.open(path)
    assert seen.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert seen.evaluate("document.documentElement.scrollWidth") == 700
    ratio, text = seen.evaluate(CONTRAST)
    assert ratio >= 4.5, text
