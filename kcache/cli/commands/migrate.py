"""`kcache migrate`: moves every entry to another backend in the same directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from kcache.admin.migration import Migration, remove_emptied
from kcache.admin.saving import save_backend
from kcache.backend import Usage
from kcache.cli.open_cache import (
    directory_option,
    json_option,
    load_settings,
    may_write,
    named_directory,
    open_cache,
    open_existing,
)
from kcache.cli.terminal import counted, progress, say, show
from kcache.config import Config
from kcache.directory import CacheDirectory
from kcache.engine.journal import MOVED
from kcache.errors import UnknownBackendError
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.inventory import DAMAGED, OTHER, UNREADABLE, coldest_first
from kcache.registry import backend_names, holders
from kcache.util.units import format_size

if TYPE_CHECKING:
    from kcache.engine.engine import CacheEngine

__all__ = ["migrate"]


@click.command(short_help="Move every entry to another backend.")
@click.option(
    "--to", "target", metavar="BACKEND", required=True, help="The new backend, such as zstd."
)
@click.option(
    "--from",
    "origin",
    metavar="BACKEND",
    help="The old backend.  [default: the one in use, or the one that has the entries]",
)
@click.option("--keep", is_flag=True, help="Copy the entries, and keep the old ones.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be moved; change nothing.")
@json_option("object")
@directory_option
def migrate(
    *,
    target: str,
    origin: str | None,
    keep: bool,
    dry_run: bool,
    as_json: bool,
    directory: str | None,
) -> None:
    """Move every entry to another backend in the same directory.

    Each backend has its own folder there. The entries move one at a time, the least recently used
    one first. So the order of use survives, and both backends together stay below the cap. The
    times of use do not: each entry counts as used now. If the command is interrupted, run it again
    and it continues. At the end it saves the new backend with the directory, so that programs use
    it, unless an argument or KCACHE_BACKEND names another. If the entries are there already, it
    says so and changes nothing.
    """
    if origin == target:
        raise click.UsageError(f"--from and --to both name {target}.")
    origin = origin or _origin(directory, target)
    _check_names(origin, target)
    if not dry_run:
        may_write("migrate", directory)
    source = open_existing(directory, backend=origin, read_only=dry_run, changes=True)
    if source is None or origin == target:
        nothing = "nothing to move: nothing has been cached yet"
        if source is not None:
            source.close()
            nothing = f"already in {target}; nothing to migrate"
        show(_json(origin, target, keep, dry_run, Usage(0, 0)) if as_json else nothing)
        return
    with source:
        place = str(source.directory)
        usage = source.engine.backend.usage()
        if dry_run:
            amount = f"{counted(usage.entries)}, {format_size(usage.bytes)}"
            would = f"would {'copy' if keep else 'move'} {amount} from {origin} to {target}"
            show(_json(origin, target, keep, dry_run, usage) if as_json else would)
            return
        with open_cache(place, backend=target) as destination:
            migration = Migration(source.engine, destination.engine, producer=PRODUCER, keep=keep)
            _run(migration, source.engine, f"{origin} to {target}")
        if not keep:
            source.engine.journal.note(MOVED, detail=f"to {target}")
        empty = source.engine.backend.usage().entries == 0
    if empty and not keep:
        remove_emptied(CacheDirectory(place).backend(origin))  # LMDB's file does not shrink
    _tell(migration, origin, target, keep=keep, as_json=as_json)
    _tell_backend(place, target, keep=keep, quiet=as_json)


def _origin(directory: str | None, target: str) -> str:
    """Return the backend that programs use now; if that is the target, the one with entries."""
    settings, _ = load_settings(directory, changes=True)
    name = settings.backend.value
    if name == target:
        for holder in holders(CacheDirectory(named_directory(directory)), besides=target):
            return holder.name
    return name


def _check_names(origin: str, target: str) -> None:
    known = backend_names()
    for name in (origin, target):
        if name not in known:
            raise UnknownBackendError(f"backend={name!r} is not known; allowed: {', '.join(known)}")


def _run(migration: Migration, origin: CacheEngine, title: str) -> None:
    freed = migration.make_room()
    if freed:
        say(f"{format_size(freed)} evicted first: both backends together exceed the cap")
    with progress(title, origin.backend.usage().entries) as advance:
        for info in coldest_first(origin.backend):
            migration.move(info)
            advance()


def _json(
    origin: str, target: str, keep: bool, dry_run: bool, moved: Usage, **left_out: int
) -> str:
    about = {"from": origin, "to": target, "keep": keep, "dry_run": dry_run}
    amount = {"entries": moved.entries, "size_bytes": moved.bytes}
    nothing = dict.fromkeys(("damaged", "unreadable", "other", "too_large"), 0)
    return json.dumps({**about, **amount, "left_out": {**nothing, **left_out}}, indent=2)


def _tell(migration: Migration, origin: str, target: str, *, keep: bool, as_json: bool) -> None:
    left = migration.left_out
    if left[DAMAGED]:
        say(f"{counted(left[DAMAGED])} damaged: left out")
    if left[UNREADABLE]:
        say(f"{counted(left[UNREADABLE])} unreadable: left in {origin}")
    if left[OTHER]:
        say(f"{counted(left[OTHER])} of another version of kcache: left in {origin}")
    if migration.refused:
        say(f"{counted(migration.refused)} larger than the cap: left in {origin}")
    if as_json:
        moved = Usage(bytes=migration.bytes, entries=migration.moved)
        show(_json(origin, target, keep, False, moved, **left, too_large=migration.refused))
        return
    amount = f"{counted(migration.moved)}, {format_size(migration.bytes)}"
    show(f"{'copied' if keep else 'moved'} {amount}, from {origin} to {target}")


def _tell_backend(place: str, target: str, *, keep: bool, quiet: bool) -> None:
    """Save the backend with the directory, and say so, or how to have programs use it."""
    if keep:
        if not quiet:
            show(f"To use them: kcache config --set backend={target}")
        return
    problem = save_backend(place, target)
    if problem:
        say(f"warning: {problem}. To use them: export KCACHE_BACKEND={target}")
        return
    if not quiet:
        show(f"Saved with the cache: backend={target}. Programs of this directory find them there.")
    name, source = Config.load(complain=lambda _: None).backend
    if source != "default" and name != target:
        say(f"warning: {source}={name} is set, and comes before that: unset it")
