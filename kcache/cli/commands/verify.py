"""`kcache verify`: every entry read and checked, and the medium below them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kcache.cli.keys import SHORT
from kcache.cli.open_cache import directory_option, json_option, may_write, open_existing
from kcache.cli.terminal import counted, plain, progress, say, show
from kcache.engine.journal import REFUSED
from kcache.errors import BackendError
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.inventory import DAMAGED, KERNEL, MANIFEST, OTHER, UNREADABLE, Item, look_into
from kcache.util.units import format_size

if TYPE_CHECKING:
    from kcache.backend import Backend, EntryInfo

__all__ = ["verify"]

#: Of 256 shards of a file backend, a busy writer is in the same one at two looks once in 256 times.
_MORE_LOOKS = 2


class _Report:
    """What a pass over a cache has found."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {KERNEL: 0, MANIFEST: 0, OTHER: 0, DAMAGED: 0, UNREADABLE: 0}
        self.bytes = 0
        self.bad: list[Item] = []
        self.deleted = 0
        #: What is wrong with the medium, and of that what a repair has left.
        self.medium: list[str] = []
        self.left: list[str] = []

    def add(self, item: Item) -> None:
        """Count one entry that was read."""
        self.kinds[item.kind] += 1
        self.bytes += item.size
        if item.kind in (DAMAGED, UNREADABLE):
            self.bad.append(item)

    @property
    def entries(self) -> int:
        """Number of entries that were read."""
        return sum(self.kinds.values())

    @property
    def sound(self) -> bool:
        """Whether nothing damaged is there any more."""
        return self.deleted == len(self.bad) and not self.left


@click.command(short_help="Read and check every entry.")
@click.option("--repair", is_flag=True, help="Delete what is damaged, and mend the backend.")
@json_option("object")
@directory_option
def verify(*, repair: bool, as_json: bool, directory: str | None) -> None:
    """Read every entry and check that it is what was stored, then check the backend itself.

    A damaged entry is never used: it is compiled again when it is asked for. So `--repair` only
    frees its space. Exits with 1 if something damaged was found and not repaired. Changes nothing
    without `--repair`.
    """
    if repair:
        may_write("verify --repair")
    cache = open_existing(directory, read_only=not repair)
    if cache is None:
        if as_json:
            _show_json(_Report())
        else:
            show("nothing has been cached yet")
        return
    report = _Report()
    with cache:
        _look(cache.engine.backend, report, repair=repair)
        for item in report.bad if repair else ():
            if item.kind == DAMAGED:
                cache.engine.journal.note(REFUSED, item.key, item.problem)
    if as_json:
        _show_json(report)
    else:
        show("\n".join(_lines(report, repair=repair)))
    if not report.sound:
        raise click.exceptions.Exit(1)


def _look(backend: Backend, report: _Report, *, repair: bool) -> None:
    """Read the entries, then check the medium; a medium that gives none out, the other way round.

    Raises:
        BackendError: the medium can't be checked either.
    """
    failure = _read_all(backend, report, repair=repair)
    report.medium += [*failure, *_check(backend, repair=repair)]
    if not repair:
        report.left += report.medium
    elif report.medium:
        report.left += backend.check()
        if failure:
            report.left += _read_all(backend, report, repair=repair)


def _check(backend: Backend, *, repair: bool) -> list[str]:
    """Return what is wrong with the medium.

    Without `repair` it is looked at without holding anybody up, so that a writer at work can look
    like damage: what not every one of several looks sees is none.
    """
    found = list(backend.check(repair=repair))
    for _ in range(0 if repair else _MORE_LOOKS):
        if found:
            again = set(backend.check())
            found = [problem for problem in found if problem in again]
    return found


def _read_all(backend: Backend, report: _Report, *, repair: bool) -> list[str]:
    """Read every entry; return why that failed, in one sentence, or none."""
    try:
        with progress("verifying", backend.usage().entries) as advance:
            for info in backend.scan():
                opened = look_into(backend, info, PRODUCER)
                advance()
                if opened is not None:
                    report.add(opened.item)
                    if repair and opened.item.kind == DAMAGED:
                        report.deleted += _delete(backend, info)
    except BackendError as error:
        return [str(error)]
    return []


def _delete(backend: Backend, info: EntryInfo) -> bool:
    """Delete a damaged entry, unless it is gone or sound by now; tell whether that is so."""
    opened = look_into(backend, info, PRODUCER)
    if opened is None or opened.item.kind != DAMAGED:
        return opened is None or opened.item.kind != UNREADABLE
    try:
        backend.delete(info.key)
    except BackendError as error:
        say(f"warning: {plain(str(error))}")
        return False
    return True


def _lines(report: _Report, *, repair: bool) -> list[str]:
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
        lines.append(f"{counted(len(report.medium), 'problem', 'problems')} in the backend{done}")
    if not report.sound and not repair:
        lines.append("Damage is never used, only in the way: `kcache verify --repair` removes it.")
    return lines


def _show_json(report: _Report) -> None:
    import json

    found = {
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
    show(json.dumps(found, indent=2))
