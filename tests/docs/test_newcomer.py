"""What a newcomer would stumble over: hidden files, a cache that a guide destroys, two promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.pages import ROOT, Block, blocks, named, pages

PAGES = {named(path): path for path in pages()}
_SHELL = ("sh", "bash", "console")
#: Commands that delete, move or forget contents of the reader's own cache.
_DESTROYS = re.compile(
    r"(?<!READ_ONLY=1 )kcache (clear|trim|rm|migrate|verify --repair|stats --zero)\b"
    r"(?!.*(--dry-run|--directory))"
)
_OWN_CACHE = re.compile(r"^(\$ )?export KCACHE_DIR=", re.MULTILINE)
#: Recipes for a machine that is made for them.
_ELSEWHERE = {"dockerfile", "workflow", "by", "none"}

PROMISE = (
    "The stored bytes never exceed the cap; with the backends file and zstd, each concurrent "
    "writer may exceed it by one entry."
)
#: The pages on which readers look for the promise of the cap.
PROMISES = (
    "README.md",
    "docs/index.md",
    "docs/explanation/lru-and-cap.md",
    "docs/reference/environment.md",
    "docs/reference/api.md",
    "kcache/config.py",
    "kcache/kernel_cache.py",
    "kcache/engine/engine.py",
)
_OTHER_PROMISES = re.compile(
    r"strict cap|cap is strict|never beyond the cap|never takes more space|never stores more bytes"
    r"|never more bytes than the cap|never exceeds the cap",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", PAGES)
def test_a_file_that_a_block_is_written_to_is_named_for_the_reader(page: str) -> None:
    lines = PAGES[page].read_text(encoding="utf-8").splitlines()
    before = 0
    for block in blocks(PAGES[page]):
        if block.file is not None:
            said = [line for line in lines[before : block.line] if not line.startswith("<!--")]
            assert Path(block.file).name in "\n".join(said), f"{block.where}: which file is it?"
        before = block.line


def _destroys(block: Block) -> bool:
    ours = block.language in _SHELL and not _ELSEWHERE & block.marks.keys()
    return ours and _DESTROYS.search(block.text) is not None


@pytest.mark.parametrize("page", PAGES)
def test_no_page_destroys_the_cache_of_its_reader(page: str) -> None:
    own = False
    for block in blocks(PAGES[page]):
        own = own or (block.language in _SHELL and _OWN_CACHE.search(block.text) is not None)
        assert own or not _destroys(block), (
            f"{block.where}: a block before this one has to set KCACHE_DIR"
        )


def _plain(text: str) -> str:
    joined = re.sub(r'"\s*\n\s*"', "", text)  # a literal in two lines
    return " ".join(joined.replace("`", "").split())


@pytest.mark.parametrize("place", PROMISES)
def test_the_promise_of_the_cap_is_the_same_everywhere(place: str) -> None:
    assert PROMISE in _plain((ROOT / place).read_text(encoding="utf-8"))


def test_nothing_promises_more_of_the_cap() -> None:
    sources = list((ROOT / "kcache").rglob("*.py"))
    for path in (*PAGES.values(), *sources):
        found = _OTHER_PROMISES.search(_plain(path.read_text(encoding="utf-8")))
        assert found is None, f"{named(path)}: {found and found[0]}"
