"""The command `kcache`: its entry point, and the modules that its commands share."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command that `sys.argv` names; return its exit code, or raise SystemExit with it."""
    if sys.argv[1:2] == ["run"]:
        from kcache.dropin.run import run_fast

        code = run_fast(sys.argv[2:])
        if code is not None:
            return code
    # Its import takes 3 ms, and a program under `kcache run` does not need it.
    import importlib.util

    missing = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        from kcache.util.hints import how_to_install

        print(
            f"kcache: error: the command line needs {' and '.join(missing)}: "
            f"{how_to_install('cli')}",
            file=sys.stderr,
        )
        return 2
    from kcache.cli.app import app

    return app.run()
