"""Counts: the table of bytecode instructions; `python -m guard.counts` in tests/ measures it anew.

A table is for one minor version of Python, since each has its own instructions; patch releases
differ by little, machines not at all.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from guard.child import measuring, output

__all__ = ["VERSION", "counted", "headroom", "table"]

#: By how much an operation may differ from the table: with the Python that measured it, and with
#: another patch release, whose library modules may differ. If an operation takes this much less,
#: measure again. Otherwise the gain could be lost again unseen.
_SAME, _OTHER = 0.02, 0.1
#: The table's name for this interpreter.
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_PYTHON = ".".join(map(str, sys.version_info[:3]))

_FILE = Path(__file__).with_name("instructions.json")
#: Depends on how deep the directory lies, and on what is mounted on this machine.
_ELSEWHERE = ("lmdb: open and close", "zstd+lmdb: open and close")


def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return tables


def table() -> dict[str, int] | None:
    """Returns scenario -> instructions for this minor version of Python; None if there is none."""
    found = _tables().get(VERSION)
    return None if found is None else found["instructions"]


def headroom() -> float:
    """Returns by which share a count may differ from the table's."""
    return _SAME if _tables()[VERSION]["python"] == _PYTHON else _OTHER


def counted(folder: Path, *, compiler: bool) -> dict[str, int]:
    """Counts instructions in a fresh interpreter, which works in an empty folder."""
    found: dict[str, int] = json.loads(
        output(measuring("instructions", folder, compiler=compiler), folder)
    )
    return {name: count for name, count in found.items() if name not in _ELSEWHERE}


def main() -> None:
    """Writes the table of this interpreter; needs NVRTC, or half of it would be missing."""
    with TemporaryDirectory() as folder:
        counts = counted(Path(folder), compiler=True)
    tables = _tables()
    before = tables.get(VERSION, {}).get("instructions", {})
    tables[VERSION] = {
        "python": _PYTHON,
        "measured": f"{datetime.now(UTC):%Y-%m-%d}",
        "instructions": counts,
    }
    text = json.dumps(dict(sorted(tables.items())), indent=1)
    _FILE.write_text(f"{text}\n", encoding="utf-8")
    for name, count in counts.items():
        print(f"{count:6} {count - before.get(name, count):+6}  {name}")


if __name__ == "__main__":
    main()
