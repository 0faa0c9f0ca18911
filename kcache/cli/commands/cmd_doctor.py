"""`kcache doctor`: finds problems in the set-up of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kcache.cli.parameters import directory_option, flag, json_option
from kcache.cli.terminal import show
from kcache.config import Config
from kcache.doctor import OK, PROBLEM, WARNING, Finding, local_checks, program_checks
from kcache.util.units import counted, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table


_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command(short_help="Find problems in the set-up of this machine.")
@json_option("array")
@directory_option
@click.option(
    "--program",
    metavar="FILE",
    help="Show whether `kcache run` would reach this program, and if not, why.",
)
@flag("--remotes", help="Check only the remotes of KCACHE_REMOTE.")
def doctor(*, as_json: bool, directory: str | None, program: str | None, remotes: bool) -> None:
    """Check everything that the cache depends on, and name a remedy for each problem.

    Checks the settings, the directory, the disk, the backend, a sample of the entries, NVRTC, the
    driver, whether `kcache run` reaches programs, and each layer and each remote of KCACHE_REMOTE.
    Changes nothing. Exits with 1 if there is a problem. A warning is not a problem: the cache works
    in spite of it. A remote that does not answer is a problem.
    """
    if program is not None:
        findings = list(program_checks.diagnose_program(program))
    elif remotes:
        findings = list(_only_remotes(directory))
    else:
        findings = [*local_checks.diagnose(directory), *program_checks.diagnose()]
        if not any(finding.topic == "libraries" for finding in findings):
            from kcache.doctor import remote_checks

            config = Config.load({"directory": directory}, complain=lambda _: None)
            findings += remote_checks.diagnose(config)
    if as_json:
        show([finding._asdict() for finding in findings])
    else:
        show(_table(findings))
        levels = [finding.level for finding in findings]
        problems, warnings = levels.count(PROBLEM), levels.count(WARNING)
        show(f"\n{counted(problems, 'problem')}, {counted(warnings, 'warning')}")
    if any(finding.level == PROBLEM for finding in findings):
        raise click.exceptions.Exit(1)


def _only_remotes(directory: str | None) -> Iterator[Finding]:
    """Yield a finding for each remote, and a problem for each setting that is not allowed."""
    from kcache.cli.open_cache import load_settings  # `kcache doctor` runs without xxhash
    from kcache.doctor.remote_checks import diagnose_remotes

    warnings: list[str] = []
    config, _ = load_settings(directory, complain=warnings.append)
    findings = [Finding(PROBLEM, "settings", sentence) for sentence in warnings]
    findings += diagnose_remotes(config)
    yield from findings or [Finding(OK, "remote", "KCACHE_REMOTE names no remote")]


def _table(findings: list[Finding]) -> Table:
    """Return the findings, as wide as the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for least in (7, 15, 20):
        table.add_column(min_width=least, overflow="fold")
    for finding in findings:
        what = Text(plain(finding.what))
        table.add_row(Text(finding.level, _COLOURS[finding.level]), finding.topic, what)
        if finding.do:
            table.add_row("", "", Text(f"-> {plain(finding.do)}"))
    return table
