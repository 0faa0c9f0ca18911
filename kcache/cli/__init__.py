"""The command `kcache`: its entry point, and the modules that its commands share."""

from __future__ import annotations

import sys

from kcache.util.hints import how_to_install

__all__ = ["main"]


def main() -> int:
    """Run the command that `sys.argv` names, and return its exit code or raise it as SystemExit."""
    if sys.argv[1:2] == ["run"]:
        from kcache.dropin.run import run_fast  # noqa: PLC0415

        code = run_fast(sys.argv[2:])
        if code is not None:
            return code
    try:
        from kcache.cli.app import app  # noqa: PLC0415  click may be missing

        return app.run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("click", "jinja2", "rich"):
            raise
        needs = f"this command needs the package {package}: {how_to_install('cli')}"
        print(f"kcache: error: {needs}", file=sys.stderr)
        return 2
