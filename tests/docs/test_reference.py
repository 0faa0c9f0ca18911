"""The hand-written tables of the reference are complete, and name nothing that does not exist."""

import importlib
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from docs.pages import DOCS, ROOT, named, pages, prose

import kcache
import kcache.errors
import kcache.launch
from kcache.config import VARIABLES
from kcache.directory import MARKER

REFERENCE = DOCS / "reference"


#: The group of entry points, which is not a module.
_GROUP = "kcache.backends"


def names(page: Path, head: str) -> list[str]:
    """Return the names in the column `head`, which is the first column of a table."""
    text = page.read_text(encoding="utf-8")
    table = re.search(rf"^\| {head} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [row.split(" | ")[0].removeprefix("| ") for row in table[1].splitlines()]
    return [name for cell in cells for name in re.findall(r"[^`, ]+", cell)]


@pytest.fixture(scope="module")
def from_code() -> SimpleNamespace:
    """The module `docs/from_code.py`, which writes the parts of pages that come from the code."""
    for extra, needed in (("cli", "click"), ("cli", "rich")):
        pytest.importorskip(needed, reason=f"the extra {extra} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)  # as if it was run as a program
        return SimpleNamespace(**runpy.run_path(str(DOCS / "from_code.py")))


@pytest.mark.parametrize("page", sorted(path.name for path in REFERENCE.glob("*.md")))
def test_generated_parts_are_up_to_date(page: str, from_code: SimpleNamespace) -> None:
    text = (REFERENCE / page).read_text(encoding="utf-8")
    assert from_code.updated(text) == text, "run: python docs/from_code.py"


def test_every_public_name_is_on_the_page_about_python() -> None:
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\.\. auto\w+:: [\w.]+\.(\w+)$", text, re.MULTILINE))
    public = {*kcache.__all__, *kcache.launch.__all__} - {"__version__", *vars(kcache.errors)}
    assert public - told == set()


def test_every_error_is_explained() -> None:
    told = names(REFERENCE / "errors.md", "error")
    errors = {name for name, each in vars(kcache.errors).items() if isinstance(each, type)}
    assert sorted(told) == sorted(errors - {"KcacheError"})


def test_the_exit_codes_are_those_of_the_commands() -> None:
    pytest.importorskip("click", reason="the extra cli is not installed")
    from kcache.cli import app

    codes = {0, app.FAILED, app.USAGE, app.INTERRUPTED, app.PIPE_CLOSED}
    assert {int(code) for code in names(REFERENCE / "command-line.md", "code")} == codes


def test_every_command_has_a_section() -> None:
    click = pytest.importorskip("click", reason="the extra cli is not installed")
    pytest.importorskip("rich", reason="the extra cli is not installed")
    from kcache.cli.app import app

    text = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    listed = app.list_commands(click.Context(app))
    made = re.findall(r"^```\{command\} (\w+)$", text, re.MULTILINE)
    assert sorted(made) == sorted(listed)
    assert re.findall(r"^## kcache (\w+)$", text, re.MULTILINE) == made


def causes() -> set[str]:
    """Return the kinds of causes that occur in the code."""
    found: set[str] = set()
    for module in (
        "kernels/explain",
        "kernels/request_diff",
        "cli/commands/cmd_why",
        "kernel_cache",
        "kernels/request_factory",
    ):
        path = ROOT / "kcache" / f"{module}.py"
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"""\bCause\(\s*"(\w+)\"""", text))
    return found


def test_every_cause_of_a_miss_that_the_code_names_is_in_the_table() -> None:
    found = causes()
    assert len(found) > 5
    assert found <= set(names(REFERENCE / "command-line.md", "cause"))


ALL = {named(path): path for path in (*pages(), ROOT / "CHANGELOG.md")}


def test_every_variable_that_a_page_names_exists() -> None:
    known = {variable.name for variable in VARIABLES} | {
        "KCACHE_MAXSIZE",  # an example of a mistake
        "KCACHE_REMOTE_TOKEN",  # a secret, not a setting
    }
    named = {
        (page, name)
        for page, path in ALL.items()
        for name in re.findall(r"\bKCACHE_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    assert [each for each in named if each[1] not in known] == []


def test_every_module_and_name_of_kcache_that_a_page_names_exists() -> None:
    quoted = [
        (f"{page}:{n}", name)
        for page, path in ALL.items()
        for n, line in prose(path.read_text(encoding="utf-8"))
        for name in re.findall(_DOTTED, line)
    ]
    assert [each for each in quoted if not _is_there(each[1])] == []


_DOTTED = r"`~?(kcache(?:\.\w+)+)[`(]"


def _is_there(path: str) -> bool:
    if path in (_GROUP, MARKER):  # not a module: entry points, and a file of a cache
        return True
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name is not None and not error.name.startswith("kcache"):
                return True  # a dependency that is not installed here
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                fields = getattr(found, "_names", ()) or getattr(found, "__annotations__", ())
                return name in fields or path.endswith((".py", ".md", ".prom"))
            found = getattr(found, name)
        return True
    return False


def test_the_manual_page_is_up_to_date_and_well_formed(
    from_code: SimpleNamespace, tmp_path: Path
) -> None:
    page: Path = from_code.MAN_PAGE
    assert page.read_text(encoding="utf-8") == from_code.man_page()
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", str(page)], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
