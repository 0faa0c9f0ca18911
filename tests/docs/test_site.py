"""The documentation as a site: it builds, every link leads somewhere, and a browser shows it well.

Building needs the extra `docs`, looking at it a Chromium. Nothing here uses a network: where links
to other sites lead is checked by `sphinx-build -b linkcheck docs OUT`, by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from cli.browser import Tab
from docs.pages import DOCS, ROOT, named, prose

click = pytest.importorskip("click", reason="the extra cli is not installed")
for needed in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(needed, reason="the extra docs is not installed")

pytestmark = pytest.mark.timeout(900)

#: Sites that have no https.
_PLAIN = ("www.lmdb.tech",)


class Html(HTMLParser):
    """What a page of the site holds: ids, links, images."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(str(found["id"]))
        if tag == "a" and found.get("name"):
            self.ids.add(str(found["name"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag == "img":
            self.images.append(found)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The site, and what Sphinx had to say about it; unknown references are warnings."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-n", "-q", "-b", "html", DOCS, out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return out, done.stderr


@pytest.fixture(scope="module")
def site(built: tuple[Path, str]) -> Path:
    return built[0]


@pytest.fixture(scope="module")
def html(site: Path) -> dict[Path, Html]:
    """Every page of the site."""
    found = {
        path: Html(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts
    }
    assert len(found) > 20
    return found


def test_it_builds_without_a_warning(built: tuple[Path, str]) -> None:
    assert built[1] == ""


# -- links ---------------------------------------------------------------------------------------


def test_every_page_is_on_the_site(site: Path) -> None:
    sources = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert {path for path in sources if "_build" not in path.parts} <= built


def test_every_link_within_the_site_leads_to_something(html: dict[Path, Html]) -> None:
    broken = []
    for path, page in html.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists() or (
                anchor and target in html and anchor not in html[target].ids
            ):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_every_link_to_another_site_is_well_formed(html: dict[Path, Html]) -> None:
    wrong = {link for page in html.values() for link in page.links if not _is_well_formed(link)}
    assert wrong == set()


def _is_well_formed(link: str) -> bool:
    parts = urlsplit(link)
    if not parts.scheme and not parts.netloc:
        return True
    host = parts.hostname or ""
    secure = parts.scheme == "https" or host in _PLAIN
    return secure and "." in host and not re.search(r"\s", link) and not parts.username


def test_every_image_has_words(html: dict[Path, Html]) -> None:
    silent = [
        (path.name, i) for path, page in html.items() for i in page.images if not i.get("alt")
    ]
    assert silent == []


# -- in a browser --------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "dark"), [(360, False), (1280, True)])
def test_a_browser_shows_every_page_without_a_word(
    width: int, dark: bool, tab: Callable[..., Tab], html: dict[Path, Html]
) -> None:
    told = []
    seen = tab(width, dark=dark)
    for path in html:
        seen.open(path)
        wide = seen.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            told.append(f"{path.name}: {wide} pixels wide")
        told += [f"{path.name}: no size: {src}" for src in seen.evaluate(_EMPTY_IMAGES)]
        back = seen.evaluate("getComputedStyle(document.body).backgroundColor")
        if (sum(map(int, re.findall(r"\d+", back)[:3])) < 200) != dark:
            told.append(f"{path.name}: not {'dark' if dark else 'light'}: {back}")
    heard = seen.heard("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    told += [str(event) for event in heard]
    asked = {e["request"]["url"] for e in seen.heard("Network.requestWillBeSent")}
    told += [url for url in asked if urlsplit(url).scheme not in ("file", "data")]
    assert told == []


#: Images that are shown and have nothing in them.
_EMPTY_IMAGES = """[...document.images]
    .filter(i => i.complete && i.offsetParent !== null && i.loading !== 'lazy' && !i.naturalWidth)
    .map(i => i.src)"""


# -- pages at the root -------------------------------------------------------------------------------

AT_THE_ROOT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def _slug(heading: str) -> str:
    """Returns the anchor that forges give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", AT_THE_ROOT)
def test_every_link_of_a_page_at_the_root_leads_to_something(page: str) -> None:
    wrong = []
    for line, text in prose((ROOT / page).read_text(encoding="utf-8")):
        shown = re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
        for link in (*re.findall(r"\]\(([^)\s]+)\)", text), *shown):
            parts = urlsplit(link)
            target = ROOT / unquote(parts.path) if parts.path else ROOT / page
            anchors = set(_anchors(target)) if parts.fragment and target.suffix == ".md" else ()
            there = target.exists() and (not anchors or parts.fragment in anchors)
            if not (_is_well_formed(link) if parts.scheme else there):
                wrong.append(f"{page}:{line}: {link}")
    assert wrong == []


def _anchors(path: Path) -> Iterator[str]:
    for _, line in prose(path.read_text(encoding="utf-8")):
        if line.startswith("#"):
            yield _slug(line.lstrip("# "))


def test_the_pages_at_the_root_are_those_that_there_are() -> None:
    assert {named(path) for path in ROOT.glob("*.md")} == set(AT_THE_ROOT)
