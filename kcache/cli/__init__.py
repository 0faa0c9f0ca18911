"""Commands for a terminal: the shared pieces, and the entry point `kcache`."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command that `sys.argv` names; return its exit code, or raise SystemExit with it."""
    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"kcache: error: the command line needs {' and '.join(missing)}: "
            "pip install 'kcache-cuda[cli]'",
            file=sys.stderr,
        )
        return 2
    from kcache.cli.app import app

    return app.run()
