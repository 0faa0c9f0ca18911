"""What a newcomer would stumble over: a cache that a guide destroys."""

from __future__ import annotations

import re

import pytest
from docs.pages import Block, blocks, named, pages

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
