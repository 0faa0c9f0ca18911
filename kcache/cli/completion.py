"""Completion: offers keys to the shell."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from kcache.cli.open_cache import open_existing
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.inventory import Item, look_into, unique_length

if TYPE_CHECKING:
    from kcache.backend import Backend, EntryInfo

__all__ = ["complete_keys", "completed"]

#: The fewest digits of a key that completion offers.
_DIGITS = 12

#: A shell shows nothing while it waits. After this many seconds, completion offers the entries
#: found so far.
_PATIENCE = 0.5
#: How many keys completion looks at. A longer list helps nobody.
_LISTED = 2000
#: How many entries completion describes. For each one it reads the entry.
_DESCRIBED = 50


def complete_keys(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the keys that begin with the typed text, each with a description.

    It never fails and never waits long, because a shell asks at every press of the Tab key.
    """
    return completed(ctx.params.get("directory"), incomplete)


def completed(directory: str | None, incomplete: str) -> list[CompletionItem]:
    """Return the keys in a cache that begin with `incomplete`; none if anything is wrong.

    It takes a bounded time, in a cache of any size and on a file system that hangs. It changes
    nothing and prints nothing.
    """
    log = logging.getLogger("kcache")
    before, log.disabled = log.disabled, True  # a warning would land in the line being typed
    found: list[CompletionItem] = []
    typed = incomplete.strip().lower()
    # Daemon: the process may end while a file system still keeps it waiting.
    job = threading.Thread(
        target=_find, args=(directory, typed, found), name="kcache-complete", daemon=True
    )
    job.start()
    job.join(2 * _PATIENCE)
    if not job.is_alive():
        log.disabled = before
    return list(found)


def _find(directory: str | None, typed: str, found: list[CompletionItem]) -> None:
    with suppress(Exception):  # an unsafe directory, a damaged database, ...: nothing to offer
        cache = open_existing(directory)
        if cache is not None:
            with cache:
                found += _keys(cache.engine.backend, typed, time.monotonic() + _PATIENCE)


def _keys(backend: Backend, typed: str, deadline: float) -> list[CompletionItem]:
    """Return keys, the most recently used one first."""
    infos: list[EntryInfo] = []
    for info in backend.scan():
        if info.key.startswith(typed):
            infos.append(info)
        if len(infos) >= _LISTED or time.monotonic() > deadline:
            break
    infos.sort(key=lambda info: -info.used_ns)
    digits = max(unique_length((info.key for info in infos), least=_DIGITS), len(typed))
    found: list[CompletionItem] = []
    for number, info in enumerate(infos):
        about = ""
        if number < _DESCRIBED and time.monotonic() < deadline:
            opened = look_into(backend, info, PRODUCER)
            about = "" if opened is None else _about(opened.item)
        found.append(CompletionItem(info.key[:digits], help=about or None))
    return found


def _about(item: Item) -> str:
    """Describe an entry in a few plain words, since shells split answers at some characters."""
    from kcache.cli.listing import what_it_is

    text = f"{item.arch} {what_it_is(item)}".strip()
    return "".join(char if char not in ":\\$`\"'" else " " for char in text)[:60]
