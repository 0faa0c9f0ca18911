"""`kcache report`: what the page contains, and that no text can become markup."""

import base64
import hashlib
import re
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from cli.helpers import age, damage, fill, kernel, manifest, recency
from core.helpers import key

from kcache import Stats
from kcache.cli.commands.cmd_report import Snapshot, page
from kcache.engine.stats import FIELDS, StatsFile
from kcache.nvrtc.entries import KERNEL, Item

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
    """The tags, the attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        """The text with all white space replaced by single spaces."""
        return " ".join(" ".join(self.text).split())


def snapshot(**changes: Any) -> Snapshot:
    """Return a snapshot of an empty cache, with some fields changed."""
    about = {"Directory": "/somewhere"}
    return Snapshot(NOW, about, 1 << 20, 0, Stats(), ())._replace(**changes)


def made(created: float, size: int = 10, **more: Any) -> Item:
    """Return the item of a kernel whose compile took a second."""
    return Item(key(str(created)), size, NOW, KERNEL, created=created, compile_seconds=1.0, **more)


def full(*names: str) -> Snapshot:
    """Return a snapshot in which each text that comes from users or files is one of `names`."""
    items = tuple(
        made(NOW - n * DAY, source_name=name, names=(name, name), arch=name)
        for n, name in enumerate(names)
    )
    stats = Stats(**dict.fromkeys(FIELDS, 3))
    return snapshot(about={"Directory": "".join(names)}, items=items, size=60, stats=stats)


# -- the command -----------------------------------------------------------------------------------


def make(directory: Path, backend: str = "file") -> None:
    """Create a cache with 2 manifests, and 12 kernels for 3 targets, some with the same name."""
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


def test_the_page_summarizes_the_cache(
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
    for told in (
        *("2.0 h", "400 of 480 requests", "83%", str(cache_directory), backend),
        *(f"sm_{arch} 4 " for arch in (80, 90, 100)),
        *(f"source{n}.cu kernel{n}<float> 3 " for n in range(4)),
        "0 from memory, 393 from the backend, 7 from remotes",
    ):
        assert told in found.words, told
    single = found.words.partition("The entries that take up most space")[2]
    assert re.findall(r" ([0-9a-f]{12}) ", single)[:10] == [key(n)[:12] for n in range(11, 1, -1)]
    assert recency(cache_directory, backend) == before
    assert (cache_directory / "stats").read_bytes() == stats


def test_damaged_entries_are_reported(here: Callable, cache_directory: Path) -> None:
    fill(cache_directory, {key(1): kernel()})
    damage(cache_directory, key(2))
    age(cache_directory, key(2), 1000)
    found = Found(here("report", "-o", "-").out)
    assert "Damaged entries in the cache: 1" in found.words
    assert "kcache verify --repair" in found.words
    assert "which are evicted first Kernel, target and key Size Last use (damaged)" in found.words


def test_the_file_is_replaced_atomically(here: Callable, cache_directory: Path, work: Path) -> None:
    fill(cache_directory, {key(1): kernel()})
    target = work / "target.html"
    target.write_text("old")
    target.chmod(0o604)
    (work / "link.html").symlink_to(target)
    assert here("report", "-o", "link.html").code == 0
    assert (work / "link.html").is_symlink()
    assert target.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(target.stat().st_mode) == 0o604
    assert {path.name for path in work.iterdir()} == {"axpy.cu", "link.html", "target.html"}


# -- the content of the page -----------------------------------------------------------------------


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


def test_the_page_loads_nothing_and_forbids_it() -> None:
    text = page(full("name"), UTC)
    found = Found(text)
    (policy,) = (value for name, value in found.attributes if value.startswith("default-src"))
    style = re.search(r"<style>(.*?)</style>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'sha256-{digest}'"
    assert policy == f"{allowed}; base-uri 'none'; form-action 'none'"
    assert not re.search(r"url\(|@import|https?:|javascript:", text)
    names = {name for name, _ in found.attributes}
    assert not {"src", "href", "style", "onload", "onclick"} & names
    assert not {"script", "img", "iframe", "link", "object", "a"} & {*found.tags}
