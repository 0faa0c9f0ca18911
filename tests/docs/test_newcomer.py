"""What a newcomer would stumble over: a cache that a guide destroys, and two promises."""

from __future__ import annotations

import re

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
