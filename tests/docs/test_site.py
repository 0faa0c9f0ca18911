"""The documentation builds as a site without a warning, so every link within it works.

Building needs the dependency group `docs`. Nothing here uses a network. To check the links to other
sites, run `sphinx-build -b linkcheck docs OUT`.
"""

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from core.helpers import run
from docs.pages import DOCS, ROOT, prose

if not all(map(find_spec, ("sphinx", "myst_parser", "furo"))):
    pytest.skip("the dependency group docs is not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)

#: Sites without https.
_PLAIN = ("www.lmdb.tech",)


def test_it_builds_without_a_warning(tmp_path: Path, long: bool) -> None:
    """The site builds without a warning. Without `--long`, no pages are written."""
    builder = "html" if long else "dummy"
    done = run(sys.executable, "-m", "sphinx", "-n", "-q", "-b", builder, DOCS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def _is_well_formed(link: str) -> bool:
    parts = urlsplit(link)
    if not parts.scheme and not parts.netloc:
        return True
    host = parts.hostname or ""
    secure = parts.scheme == "https" or host in _PLAIN
    return secure and "." in host and not re.search(r"\s", link) and not parts.username


# -- pages at the root -------------------------------------------------------------------------------


def _slug(heading: str) -> str:
    """Return the anchor that GitHub and similar sites give to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", sorted(path.name for path in ROOT.glob("*.md")))
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
