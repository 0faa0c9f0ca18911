"""tests/README.md: every file that it names as the guard of a promise exists, and has tests."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_promise_has_its_guards() -> None:
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [row for row in rows if not row.startswith("| promise ")]
    assert len(rows) > 50
    for row in rows:
        guards = re.findall(r"`([\w/]+\.py)`", row.split(" | ")[-1])
        assert guards, row
        gone = [guard for guard in guards if "\ndef test_" not in _text(guard)]
        assert not gone, f"{row}\nthese files do not exist or have no test: {gone}"


def _text(guard: str) -> str:
    path = TESTS / guard
    return path.read_text(encoding="utf-8") if path.is_file() else ""
