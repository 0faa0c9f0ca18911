"""Keys: finds the key that somebody typed, any unique prefix of at least four digits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from kcache.backend import KEY_LENGTH
from kcache.cli.listing import what_it_is
from kcache.cli.open_cache import open_existing
from kcache.cli.terminal import plain
from kcache.errors import BackendError
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.inventory import Opened, look_into, matching, unique_length

if TYPE_CHECKING:
    from kcache.backend import Backend, EntryInfo

__all__ = ["SHORT", "complete_keys", "key_argument", "key_prefix", "open_entry", "resolve"]

#: How many digits of a key a message shows.
SHORT = 12
#: How many candidates a message names for an ambiguous prefix.
_NAMED = 8
_LEAST = 4
#: How many keys completion offers, and how many of them it describes, which reads the entries.
_OFFERED, _DESCRIBED = 2000, 50


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


def complete_keys(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the keys that begin with the typed text, the most recently used first.

    If anything is wrong, there are none: a warning would land in the line that is being typed.
    """
    logging.getLogger("kcache").disabled = True
    with suppress(Exception):
        cache = open_existing(ctx.params.get("directory"))
        if cache is not None:
            with cache:
                return list(_completed(cache.engine.backend, incomplete.strip().lower()))
    return []


def _completed(backend: Backend, typed: str) -> Iterator[CompletionItem]:
    fitting = (info for info in backend.scan() if info.key.startswith(typed))
    infos = sorted(islice(fitting, _OFFERED), key=lambda info: -info.used_ns)
    digits = max(unique_length((info.key for info in infos), least=SHORT), len(typed))
    for number, info in enumerate(infos):
        opened = look_into(backend, info, PRODUCER) if number < _DESCRIBED else None
        about = "" if opened is None else plain(f"{opened.item.arch} {what_it_is(opened.item)}")
        # Shells split answers at some characters.
        shown = "".join(" " if char in ":\\$`\"'" else char for char in about)
        yield CompletionItem(info.key[:digits], help=shown[:60].strip() or None)


key_argument = click.argument("key", type=key_prefix, metavar="KEY", shell_complete=complete_keys)


def resolve(backend: Backend | None, prefixes: Iterable[str]) -> list[EntryInfo]:
    """Return the entry that each prefix means, each entry once; without a backend there is none.

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
