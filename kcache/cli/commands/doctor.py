"""`kcache doctor`: says what is wrong with this machine's set-up, and what to do about it."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

import click

from kcache.cli.open_cache import directory_option, json_option
from kcache.cli.terminal import counted, plain, show, width

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kcache.admin.doctor import Finding
    from kcache.admin.machine_facts import Facts

__all__ = ["doctor"]

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
#: Columns before a finding: its level and its topic.
_INDENT = 26


@click.command(short_help="Find problems in the set-up of this machine.")
@json_option("array")
@directory_option
@click.option(
    "--program",
    metavar="FILE",
    help="Say whether `kcache run` would reach this program, and if not, why.",
)
def doctor(*, as_json: bool, directory: str | None, program: str | None) -> None:
    """Check everything that the cache depends on, and say how to fix what is wrong.

    Checks the settings, the directory, the disk, the backend, a sample of the entries, NVRTC, the
    driver, whether `kcache run` reaches programs, and each layer and each remote of KCACHE_REMOTE.
    Changes nothing. Exits with 1 if there is a problem. A warning is not a problem: the cache works
    in spite of it.
    """
    from kcache.admin.doctor import PROBLEM, WARNING, diagnose
    from kcache.admin.machine_facts import gather
    from kcache.dropin import diagnosis

    if program is not None:
        findings = list(diagnosis.diagnose_program(program))
    else:
        facts = gather(directory)
        findings = [*diagnose(facts), *diagnosis.diagnose(), *_tiers(facts)]
    if as_json:
        show(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        show("\n".join(map(_text, findings)))
        levels = [finding.level for finding in findings]
        problems, warnings = levels.count(PROBLEM), levels.count(WARNING)
        show(
            f"\n{counted(problems, 'problem', 'problems')}, "
            f"{counted(warnings, 'warning', 'warnings')}"
        )
    if any(finding.level == PROBLEM for finding in findings):
        raise click.exceptions.Exit(1)


def _tiers(facts: Facts) -> Iterator[Finding]:
    """Yield the findings on layers and remotes, if there are any and if they can be asked."""
    config = facts.config
    if (config.remote.value or config.signing_key_file.value) and not facts.broken:
        from kcache.kernels import tier_diagnosis

        yield from tier_diagnosis.diagnose(config)


def _text(finding: Finding) -> str:
    level = click.style(f"{finding.level:<9}", fg=_COLOURS[finding.level])
    lines = _wrapped(finding.what)
    if finding.do:
        first, *rest = _wrapped(finding.do, 3)
        lines += [f"-> {first}", *(f"   {line}" for line in rest)]
    margin = " " * _INDENT
    return f"{level}{finding.topic:<{_INDENT - 9}}" + f"\n{margin}".join(lines)


def _wrapped(text: str, more: int = 0) -> list[str]:
    """Return the text in lines that fit the terminal, in one line if there is no terminal."""
    columns = width()
    if columns is None:
        return [plain(text)]
    room = max(20, columns - _INDENT - more)
    return textwrap.wrap(plain(text), room, break_long_words=False, break_on_hyphens=False) or [""]
