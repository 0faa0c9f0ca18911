"""Keys as people type them: any unique prefix of at least four digits."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from kcache.backend import KEY_LENGTH
from kcache.cli.listing import what_it_is
from kcache.cli.open_cache import open_existing
from kcache.errors import BackendError
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.inventory import Item, Opened, look_into, matching, unique_length

if TYPE_CHECKING:
    from kcache.backend import Backend, EntryInfo

__all__ = ["SHORT", "complete_keys", "key_argument", "key_prefix", "open_entry", "resolve"]

#: Digits of a key that messages show.
SHORT = 12
#: Candidates that are named where a prefix is ambiguous.
_NAMED = 8
_LEAST = 4
#: What a completion may take: a shell waits for it.
_MOST_SECONDS, _MOST_KEYS = 0.5, 20_000


def key_prefix(text: str) -> str:
    """Return the digits of a key or of the beginning of one, in lower case.

    Raises:
        BadParameter: it is neither.
    """
    digits = text.strip().lower()
    if not _LEAST <= len(digits) <= KEY_LENGTH or digits.strip("0123456789abcdef"):
        raise click.BadParameter(
            f"{text!r} is no key: give {_LEAST} to {KEY_LENGTH} hexadecimal digits, the first "
            "ones of a key that `kcache ls` shows."
        )
    return digits


def complete_keys(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the keys that begin so, each with what it is, for a shell's completion.

    Never an error, and never a wait: a shell asks at every press of the key. After a moment the
    keys that were found by then are all there are.
    """
    del param
    logging.disable()  # the shell would print a warning into the line that is being typed
    found: list[CompletionItem] = []
    try:
        found.extend(
            CompletionItem(item.key[:SHORT], help=f"{item.arch} {what_it_is(item)}")
            for item in _items_beginning(ctx.params.get("directory"), incomplete.lower())
        )
    except Exception:  # whatever is wrong, a command that is run says so
        return found
    return found


def _items_beginning(directory: str | None, prefix: str) -> Iterator[Item]:
    end = time.monotonic() + _MOST_SECONDS
    cache = open_existing(directory)
    if cache is None:
        return
    with cache:
        backend = cache.engine.backend
        for count, info in enumerate(backend.scan()):
            if time.monotonic() > end or count > _MOST_KEYS:
                return
            if info.key.startswith(prefix):
                opened = look_into(backend, info, PRODUCER)
                if opened is not None:
                    yield opened.item


key_argument = click.argument("key", type=key_prefix, metavar="KEY", shell_complete=complete_keys)


def resolve(backend: Backend | None, prefixes: Iterable[str]) -> list[EntryInfo]:
    """Return the entry that each prefix means, each entry once; no backend holds none.

    Raises:
        BackendError: a prefix means none or several.
    """
    wanted = list(dict.fromkeys(prefixes))
    found: dict[str, list[EntryInfo]] = {prefix: [] for prefix in wanted}
    if backend is not None:
        found = matching(backend, wanted)
    for prefix, infos in found.items():
        if not infos:
            raise BackendError(f"no entry has a key that begins with {prefix}")
        if len(infos) > 1:
            digits = unique_length((info.key for info in infos), least=SHORT)
            shown = ", ".join(info.key[:digits] for info in infos[:_NAMED])
            more = f" and {len(infos) - _NAMED} more" if len(infos) > _NAMED else ""
            raise BackendError(
                f"{len(infos)} entries have keys that begin with {prefix}: {shown}{more}"
            )
    return list({infos[0].key: infos[0] for infos in found.values()}.values())


def open_entry(directory: str | None, key: str) -> Opened:
    """Return the entry that the beginning of a key means.

    Raises:
        BackendError: it means none or several.
    """
    cache = open_existing(directory)
    if cache is None:
        resolve(None, [key])
    else:
        with cache:
            (info,) = resolve(cache.engine.backend, [key])
            opened = look_into(cache.engine.backend, info, PRODUCER)
        if opened is not None:
            return opened
    raise BackendError(f"the entry {key[:SHORT]} was deleted meanwhile")
