"""`kcache rm`: single entries, deleted by their keys."""

from __future__ import annotations

import click

from kcache.cli.keys import SHORT, key_prefix, resolve
from kcache.cli.open_cache import directory_option, may_write, open_existing
from kcache.cli.terminal import counted, say, show
from kcache.engine.journal import DELETED
from kcache.util.units import format_size

__all__ = ["remove"]


@click.command("rm", short_help="Delete single entries.")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True, type=key_prefix)
@click.option("-y", "--yes", is_flag=True, help="Accepted as by `clear`. The command never asks.")
@directory_option
def remove(*, keys: tuple[str, ...], yes: bool, directory: str | None) -> None:
    """Delete the entries KEY. Each KEY is the first digits of a key that `kcache ls` shows.

    If a KEY fits no entry or several entries, nothing is deleted.
    """
    del yes
    may_write("rm")
    cache = open_existing(directory, read_only=False)
    if cache is None:
        resolve(None, keys)
        return
    with cache:
        backend = cache.engine.backend
        found = resolve(backend, keys)
        count = freed = 0
        for info in found:
            size = backend.delete(info.key)
            count += size > 0
            freed += size
            if size:
                cache.engine.journal.note(DELETED, info.key)
            else:
                say(f"{info.key[:SHORT]} was deleted meanwhile")
    show(f"deleted {counted(count)}, {format_size(freed)}")
