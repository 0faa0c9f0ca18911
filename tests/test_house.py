"""The length of modules. (Ruff's `banned-api` names the functions that few modules may use.)"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path for top in ("kcache", "backends", "bench", "docs") for path in (ROOT / top).rglob("*.py")
)
#: The C sources of the drop-in.
SOURCES = sorted((ROOT / "kcache").glob("*/native/*.[ch]"))
#: The highest number of lines of a module.
LONGEST = 500


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_module_is_too_long() -> None:
    lines = {named(path): path.read_text("utf-8").count("\n") for path in (*MODULES, *SOURCES)}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}
