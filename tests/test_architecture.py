"""ARCHITECTURE.md: its table, its picture and the import linter's layers match the code."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
#: Maps each folder to the page's sentence about it.
FOLDERS = {
    match[1]: match[2] for match in re.finditer(r"^\| `([\w/]+)/` \| (.+) \|$", TEXT, re.MULTILINE)
}
#: The package `kcache` itself. Its docstring describes all of kcache, and not a folder.
FACE = "kcache"


def packages() -> set[str]:
    """Return every folder of code, as a path below the root."""
    return {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("kcache", "backends", "bench")
        for path in (ROOT / top).rglob("__init__.py")
    }


def first_sentence(folder: str) -> str:
    tree = ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def layers() -> list[set[str]]:
    """Return the names in each layer of the import linter, without names that do not exist yet."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        each for each in settings["tool"]["importlinter"]["contracts"] if each["id"] == "one-way"
    )
    named = [set(re.findall(r"\w+", line)) for line in contract["layers"]]
    return [there for line in named if (there := {name for name in line if exists(name)})]


def exists(name: str) -> bool:
    return (ROOT / "kcache" / f"{name}.py").is_file() or f"kcache/{name}" in packages()


def picture() -> list[str]:
    drawn = re.search(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return drawn[1].splitlines()


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 52


def test_every_folder_has_its_line() -> None:
    assert set(FOLDERS) == packages()


@pytest.mark.parametrize("folder", sorted(set(FOLDERS) - {FACE}))
def test_a_folder_begins_with_the_sentence_of_the_page(folder: str) -> None:
    assert first_sentence(folder) == FOLDERS[folder]


def test_the_picture_has_the_layers_of_the_import_linter() -> None:
    assert [set(re.findall(r"\w+", line)) for line in picture()] == layers()


def test_every_module_of_the_face_is_in_the_picture() -> None:
    drawn = {name for line in picture() for name in re.findall(r"\w+", line)}
    modules = {path.stem for path in (ROOT / "kcache").glob("*.py")} - {"__init__"}
    rooms = {
        name.split("/")[1]
        for name in packages()
        if name.count("/") == 1 and name.startswith("kcache/")
    }
    assert drawn == modules | rooms


def test_every_file_that_it_names_is_there() -> None:
    for name in re.findall(r"`([\w/]+\.(?:py|c))`", TEXT):
        if name != "__init__.py":
            assert any((top / name).is_file() for top in (ROOT / "kcache", ROOT)), name


def test_every_function_that_it_names_is_there() -> None:
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", TEXT)
    assert named
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "kcache").rglob("*.py"))
    for kind, function in named:
        assert f"class {kind}" in code, kind
        assert re.search(rf"def {function}\b", code), function
