"""Every block of every page runs, and prints what the page shows.

The blocks of a page run in order, in a folder of the page's own, as if a reader typed them into one
terminal: variables and the working directory are kept from block to block. `HOME` and
`XDG_CACHE_HOME` are empty folders, no variable of kcache's is set, and `kcache` and
`.venv/bin/kcache` are the command that is tested.

| block | is |
|---|---|
| `python` | a script, in a new process |
| `{doctest}` | doctests, in one interpreter for the whole page |
| `sh` | run by `bash -euo pipefail` |
| `console` | commands after `$ `, and below each its output; `...` matches anything |
| `text` directly after one of these | the output of that block, including standard error |
| `json`, `toml`, `yaml` | parsed |
| anything else | refused, unless a mark says how it is tested |

A mark is an HTML comment on a line before the block:

| mark | meaning |
|---|---|
| `<!-- file: NAME -->` | the block is written to that file, which the text before the block names |
| `<!-- test: exit N -->` | the block (of `console`: its last command) ends with that exit status |
| `<!-- test: gpu -->` | runs only where there is a GPU |
| `<!-- test: slow -->` | runs only in the test that is marked `slow` |
| `<!-- test: by tests/x.py::name -->` | that test runs the block; its module names this page |
| `<!-- test: dockerfile -->`, `<!-- test: workflow -->` | run as `reader.py` describes |
| `<!-- test: none REASON -->` | not run; only the blocks in `NOT_RUN` may have this mark |

`test_installing.py` runs the blocks that call pip, in a copy of the checkout with an environment of
its own.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from core.helpers import output_of, run
from docs.pages import ROOT, Block, blocks, named, pages
from docs.reader import Reader, follow

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="the pages are for a POSIX shell"),
    pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing"),
]

PAGES = {named(path): path for path in pages()}

#: Blocks that no test runs: maps the page and the beginning of the block to the reason.
NOT_RUN: dict[tuple[str, str], str] = {
    ("README.md", "python3 -m venv .venv && .venv/bin/pip install -q tox"): "runs this very test",
    ("CONTRIBUTING.md", "python3 -m venv .venv && .venv/bin/pip install -q tox"): "likewise",
    ("CONTRIBUTING.md", ".venv/bin/tox -e cu13 -- "): "likewise, a part of it",
    ("docs/explanation/benchmarks.md", ".venv/bin/tox -e bench"): "takes ten minutes",
    ("docs/explanation/benchmarks.md", ".venv/bin/pytest bench -k"): "takes five minutes",
    ("docs/how-to/nvcc.md", "$ kcache why -- nvcc"): "needs nvcc; see nvcc/test_cache.py",
}

_RUN = {"python", "sh", "bash", "console", "doctest"}
_INSTALLS = re.compile(r"\bpip3? +(-\S+ +)*install\b")


def installs(block: Block) -> bool:
    """Return whether a block installs packages here. A recipe for another machine does not."""
    shell = block.language in ("sh", "bash", "console") and block.file is None
    return shell and not block.marks and _INSTALLS.search(block.text) is not None


def elsewhere(block: Block) -> bool:
    """Return whether another test, or no test, runs the block."""
    return "by" in block.marks or "none" in block.marks or installs(block)


def followed(found: Iterable[Block], also: str) -> Iterator[Block]:
    """Yield the blocks to run and compare. If a block is left out, its output is left out, too."""
    passed_over = False
    for block in found:
        output = block.language == "text" and block.follows and not block.marks
        if not output:
            unmeant = {"gpu", "slow"} & block.marks.keys() - {also}
            passed_over = bool(unmeant) or elsewhere(block)
        if not passed_over:
            yield block


def wanting(word: str) -> list[str]:
    """Return the pages that have a block with the mark `word`."""
    return [name for name, path in PAGES.items() if any(word in b.marks for b in blocks(path))]


def read(page: str, place: Path, request: pytest.FixtureRequest, also: str = "") -> None:
    """Run the blocks of a page. A block with the mark `slow` or `gpu` runs if `also` names it."""
    found = list(followed(blocks(PAGES[page]), also))
    if any(block.language in _RUN or "dockerfile" in block.marks for block in found):
        request.getfixturevalue("nvrtc")
        pytest.importorskip("click", reason="the extra cli is not installed")
    # In an image or on a CI service, everything that a recipe installs is already there.
    lenient = any({"dockerfile", "workflow"} & block.marks.keys() for block in found)
    reader = Reader(place, lenient=lenient)
    try:
        for block in found:
            follow(reader, block)
        left = [name for name in reader.environ if name.startswith("KCACHE_")]
        assert lenient or not left, f"{page} leaves {', '.join(left)} set in the terminal"
    finally:
        reader.close()


@pytest.mark.parametrize("page", PAGES)
def test_each_block_of_a_page(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    read(page, tmp_path / "reader", request)


@pytest.mark.slow
@pytest.mark.parametrize("page", wanting("slow"))
def test_slow_blocks(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    read(page, tmp_path / "reader", request, "slow")


@pytest.mark.gpu
@pytest.mark.parametrize("page", wanting("gpu"))
def test_gpu_blocks(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("cuda.core", reason="the extra launch is not installed")
    read(page, tmp_path / "reader", request, "gpu")


def test_nothing_else_is_left_out() -> None:
    left_out = {
        (name, begin)
        for name, path in PAGES.items()
        for block in blocks(path)
        if "none" in block.marks
        for begin in [next((b for p, b in NOT_RUN if p == name and block.text.startswith(b)), "")]
    }
    assert left_out == set(NOT_RUN)


#: A page may import packages that are not installed here.
_OF_OTHERS = '\n# mypy: disable-error-code="import-not-found"\n'


def test_the_python_of_every_page_is_right_for_strict_mypy(tmp_path: Path) -> None:
    """The Python blocks of all pages pass mypy's strict mode, because users may copy them."""
    pytest.importorskip("mypy")
    where: dict[str, str] = {}
    for page in PAGES.values():
        for block in blocks(page):
            if block.language == "python" and "none" not in block.marks:
                path = tmp_path / f"block_{len(where)}.py"
                where[str(path)] = block.where
                path.write_text(f"{block.text}{_OF_OTHERS}", encoding="utf-8")
    done = run(sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *where, cwd=ROOT)
    told = re.sub(r"^\S*block_\d+\.py", lambda found: where[found[0]], done.stdout, flags=re.M)
    assert done.returncode == 0, told


# -- README.md -------------------------------------------------------------------------------------

README = ROOT / "README.md"


def test_it_fits_one_screen() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.usefixtures("nvrtc")
def test_the_code_compiles_once_and_hits_in_the_next_process() -> None:
    code = next(block.text for block in blocks(README) if "import kcache" in block.text)
    runs = [output_of(code) for _ in range(2)]
    assert [run.splitlines()[0].rsplit(maxsplit=1)[-1] for run in runs] == ["False", "True"]


# -- commands that no page may contain -------------------------------------------------------------

_SHELL = ("sh", "bash", "console")
#: Commands that delete or move entries of the reader's own cache, or reset its counts.
_DESTROYS = re.compile(
    r"(?<!READ_ONLY=1 )kcache (clear|trim|rm|migrate|verify --repair|stats --zero)\b"
    r"(?!.*(--dry-run|--directory))"
)
_OWN_CACHE = re.compile(r"^(\$ )?export KCACHE_DIR=", re.MULTILINE)
#: Marks of blocks that do not run on the reader's machine.
_ELSEWHERE = {"dockerfile", "workflow", "by", "none"}


def _destroys(block: Block) -> bool:
    ours = block.language in _SHELL and not _ELSEWHERE & block.marks.keys()
    return ours and _DESTROYS.search(block.text) is not None


def test_no_page_destroys_the_cache_of_its_reader() -> None:
    for page in PAGES.values():
        own = False
        for block in blocks(page):
            own = own or (block.language in _SHELL and _OWN_CACHE.search(block.text) is not None)
            assert own or not _destroys(block), (
                f"{block.where}: a block before this one has to set KCACHE_DIR"
            )
