"""`kcache verify`: reads and checks every entry, and deletes what is damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kcache.admin.verify import Report
from kcache.admin.verify import verify as examine
from kcache.cli.listing import SHORT
from kcache.cli.open_cache import may_write, open_existing
from kcache.cli.parameters import directory_option, flag, json_option
from kcache.cli.terminal import progress, show
from kcache.nvrtc.entries import DAMAGED, KERNEL, MANIFEST, OTHER, UNREADABLE
from kcache.util.units import counted, format_size, plain

if TYPE_CHECKING:
    pass


@click.command(short_help="Read and check every entry.")
@flag("--repair", help="Delete damaged entries, and repair the files of the backend.")
@json_option("object")
@directory_option
def verify(*, repair: bool, as_json: bool, directory: str | None) -> None:
    """Read and check every entry, then check the files of the backend.

    kcache never uses a damaged entry. It compiles the kernel again when a program asks for it, so
    `--repair` only frees space. Exits with 1 if damage was found and not repaired. Changes nothing
    without `--repair`.
    """
    if repair:
        may_write("verify --repair", directory)
    with open_existing(directory, read_only=not repair, changes=repair) as cache:
        report = examine(cache.engine.backend, repair=repair, progress=progress)
        for item in report.bad if repair else ():
            if item.kind == DAMAGED:
                cache.engine.note("refused", item.key, item.problem)
    show(_json(report) if as_json else "\n".join(_lines(report, repair=repair)))
    if not report.sound:
        raise click.exceptions.Exit(1)


def _lines(report: Report, *, repair: bool) -> list[str]:
    kinds = report.kinds
    lines = [f"{item.kind} {item.key[:SHORT]}: {plain(item.problem)}" for item in report.bad]
    lines += [f"backend: {plain(problem)}" for problem in report.medium]
    lines.append(f"{counted(report.entries)} read, {format_size(report.bytes)}")
    lines.append(f"  {kinds[KERNEL] + kinds[MANIFEST]} sound")
    if kinds[OTHER]:
        lines.append(f"  {kinds[OTHER]} of another version of kcache, or of another program")
    if kinds[DAMAGED]:
        lines.append(f"  {kinds[DAMAGED]} damaged{f', {report.deleted} deleted' if repair else ''}")
    if kinds[UNREADABLE]:
        lines.append(f"  {kinds[UNREADABLE]} unreadable")
    if report.medium:
        done = f", {len(report.left)} left after the repair" if repair else ""
        lines.append(f"{counted(len(report.medium), 'problem')} in the backend{done}")
    if not report.sound and not repair:
        lines.append("What is damaged is never used. `kcache verify --repair` deletes it.")
    return lines


def _json(report: Report) -> dict[str, object]:
    return {
        "entries": report.entries,
        "size_bytes": report.bytes,
        "sound": report.kinds[KERNEL] + report.kinds[MANIFEST],
        "other": report.kinds[OTHER],
        "damaged": report.kinds[DAMAGED],
        "unreadable": report.kinds[UNREADABLE],
        "deleted": report.deleted,
        "problems": [
            {"key": item.key, "kind": item.kind, "problem": item.problem} for item in report.bad
        ],
        "backend_problems": report.medium,
        "backend_problems_left": report.left,
    }
