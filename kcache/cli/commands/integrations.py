"""`kcache integrations`: shows which installed frameworks are covered, and how to switch it on."""

from __future__ import annotations

import click

from kcache.cli.options import json_option
from kcache.cli.terminal import columns, show
from kcache.integrations.frameworks import Installed, installed

__all__ = ["integrations"]


@click.command(short_help="Show which installed frameworks are covered.")
@json_option("array")
def integrations(*, as_json: bool) -> None:
    """Show the installed frameworks that compile kernels at run time, and what covers them.

    "The drop-in" is what `kcache run` and `kcache.install` put in the place of NVRTC. "One line" is
    an adapter for the framework's own hook. The last column switches it on, or says why nothing
    does. Another version than the tested one works if its interface is the same.
    """
    found = installed()
    if as_json:
        show([_described(each) for each in found])
    elif not found:
        show("no framework that compiles kernels at run time is installed here")
    else:
        heads = ("FRAMEWORK", "INSTALLED", "TESTED WITH", "COVERED BY", "SWITCH IT ON")
        show(columns([heads, *map(_row, found)]))


def _row(each: Installed) -> tuple[str, ...]:
    framework = each.framework
    tested = framework.tested or "-"
    return framework.name, each.version, tested, framework.covered, framework.line


def _described(each: Installed) -> dict[str, str]:
    framework = each.framework
    return {
        "framework": framework.name,
        "installed": each.version,
        "tested_with": framework.tested,
        "covered_by": framework.covered,
        "line": framework.line,
    }
