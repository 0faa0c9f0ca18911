"""The house: how long a module may be, and what has one place in the code."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path for top in ("kcache", "backends", "bench", "docs") for path in (ROOT / top).rglob("*.py")
)
#: The drop-in's native parts.
SOURCES = sorted((ROOT / "kcache").glob("*/native/*.[ch]"))
#: Lines of a module, at most.
LONGEST = 500


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_module_is_too_long() -> None:
    lines = {named(path): path.read_text("utf-8").count("\n") for path in (*MODULES, *SOURCES)}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> set[str]:
    """Returns what a module imports at any time, in functions too; not what only types need."""
    for_types: set[ast.AST] = set()
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types |= {below for each in node.body for below in ast.walk(each)}
        elif node not in for_types and isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif node not in for_types and isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{each.name}" for each in node.names}
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    arrows = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): imported(path)
        for path in MODULES
        if named(path).startswith("kcache/") and path.name != "__init__.py"
    }
    assert len(arrows) > 100
    TopologicalSorter(arrows).prepare()  # raises with the circle


def test_only_three_modules_read_the_environment() -> None:
    found = {
        named(path)
        for path in MODULES
        if named(path).startswith("kcache/") and "/cli/" not in named(path)
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    }
    assert found == {
        f"kcache/{name}.py" for name in ("config", "environment", "dropin/run_environment")
    }


def test_forks_are_handled_in_one_place() -> None:
    found = {named(path) for path in MODULES if "os.register_at_fork(" in path.read_text("utf-8")}
    assert found == {"kcache/util/forks.py"}
