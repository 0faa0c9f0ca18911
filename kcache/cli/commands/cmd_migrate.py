"""`kcache migrate`: moves every entry to another backend in the same directory."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import click

from kcache.admin.transfer import TOO_LARGE, Moved, move_entries, remove_emptied
from kcache.backend import require_backend
from kcache.cli.open_cache import (
    load_settings,
    may_write,
    named_directory,
    open_cache,
    open_existing,
    save,
)
from kcache.cli.parameters import directory_option, flag, json_option
from kcache.cli.terminal import notify, progress, show
from kcache.directory import CacheDirectory
from kcache.engine.opening import backends_in
from kcache.errors import KcacheError
from kcache.nvrtc.entries import DAMAGED, OTHER, UNREADABLE
from kcache.util.units import counted, format_size

#: The message for entries that are not moved, by kind.
_LEFT_OUT = {
    DAMAGED: "damaged: left out",
    UNREADABLE: "unreadable: left in {}",
    OTHER: "of another version of kcache: left in {}",
    TOO_LARGE: "larger than the cap: left in {}",
}


@click.command(short_help="Move every entry to another backend.")
@click.option(
    "--to", "target", metavar="BACKEND", required=True, help="The new backend, such as zstd."
)
@click.option(
    "--from",
    "origin",
    metavar="BACKEND",
    help="The old backend.  [default: the one in use; if that is BACKEND, another with a folder]",
)
@flag("--keep", help="Copy the entries, and keep the old ones.")
@flag("-n", "--dry-run", help="Show what would be moved; change nothing.")
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
    it, unless an argument or KCACHE_BACKEND names another. If the entries are in the new backend
    already, it changes nothing.
    """
    if origin == target:
        raise click.UsageError(f"--from and --to both name {target}.")
    origin = origin or _origin(directory, target)
    require_backend(origin)
    require_backend(target)
    if not dry_run:
        may_write("migrate", directory)
    about = {"from": origin, "to": target, "keep": keep, "dry_run": dry_run}
    moved, emptied = Moved(0, 0, 0, ()), False
    with open_existing(directory, backend=origin, read_only=dry_run, changes=True) as source:
        files, engine = source.opened.directory, source.engine
        if files is None or origin == target:
            done = f"already in {target}; nothing to migrate" if files else "nothing to move"
        elif dry_run:
            usage = engine.backend.usage()
            moved = Moved(usage.entries, usage.bytes, 0, ())
            what = f"would {'copy' if keep else 'move'} {_amount(moved)}"
            done = f"{what} from {origin} to {target}"
        else:
            with (
                open_cache(files.path, backend=target) as destination,
                progress(f"{origin} to {target}", engine.entry_count) as advance,
            ):
                moved = move_entries(engine, destination.engine, keep=keep, advance=advance)
            if not keep:
                engine.note("moved", detail=f"to {target}")
            emptied = not keep and engine.backend.usage().entries == 0
            done = f"{'copied' if keep else 'moved'} {_amount(moved)}, from {origin} to {target}"
    if files is not None and emptied:
        remove_emptied(files.backend(origin))  # LMDB's file does not shrink
    if moved.evicted:
        notify(f"{format_size(moved.evicted)} evicted first: both backends exceeded the cap")
    kinds = Counter(item.kind for item in moved.left_out)
    left_out = {kind: kinds[kind] for kind in _LEFT_OUT}
    for kind in kinds:
        notify(f"{counted(kinds[kind])} {_LEFT_OUT[kind].format(origin)}")
    amount = {"entries": moved.entries, "size_bytes": moved.size}
    show({**about, **amount, "left_out": left_out} if as_json else done)
    if files is None or dry_run or origin == target:
        return
    if not keep:
        _save(files, target, quiet=as_json)
    elif not as_json:
        show(f"To use them: kcache config --set backend={target}")


def _origin(directory: str | None, target: str) -> str:
    """Return the backend that programs use now; if that is the target, another with a folder."""
    settings, _ = load_settings(directory, changes=True)
    others: list[str] = []
    if settings.backend.value == target:
        with suppress(OSError):  # there is no cache
            others = backends_in(CacheDirectory(named_directory(directory)))
    others = [each for each in others if each != target]
    if len(others) > 1:
        raise click.UsageError(f"Several backends have a folder: name one, --from {others[0]}.")
    return others[0] if others else settings.backend.value


def _amount(moved: Moved) -> str:
    return f"{counted(moved.entries)}, {format_size(moved.size)}"


def _save(files: CacheDirectory, target: str, *, quiet: bool) -> None:
    """Save the backend with the directory, so that programs find the entries."""
    try:
        warnings = save(files.path, {"backend": target})
    except KcacheError as error:
        notify(f"warning: {error}. To use them: export KCACHE_BACKEND={target}")
        return
    if not quiet:
        show(f"Saved with the cache: backend={target}. Programs of this directory find them there.")
    for warning in warnings:
        notify(f"warning: {warning}")
