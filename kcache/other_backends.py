"""Other backends: finds the kernels of a directory that the backend in use does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kcache.errors import KcacheError
from kcache.util import log
from kcache.util.units import counted, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kcache.backend import Backend
    from kcache.config import Setting
    from kcache.directory import CacheDirectory

__all__ = ["Holder", "advice", "amount", "look", "sentence", "warn_if_empty"]


class Holder(NamedTuple):
    """A backend that has entries in a directory."""

    name: str
    entries: int
    bytes: int


def look(names: Iterable[str], opened: Callable[[str], Backend]) -> list[Holder]:
    """Return the backends that have entries, the one with the most first.

    Changes nothing. One that can't be opened is left out.

    Args:
        names: of backends that have a folder.
        opened: opens one for reading only.
    """
    found: list[Holder] = []
    for name in names:
        try:
            backend = opened(name)
            try:
                usage = backend.usage()
            finally:
                backend.close()
        except (KcacheError, OSError) as error:
            log.info("backend %s: %s", name, error)
        else:
            if usage.entries:
                found.append(Holder(name, usage.entries, usage.bytes))
    return sorted(found, key=lambda each: each.entries, reverse=True)


def warn_if_empty(
    backend: Backend, files: CacheDirectory, named: Setting[str], found: Sequence[Holder]
) -> None:
    """Log one warning if a backend has no entries, while others in its directory have.

    It never raises: a backend that can't be opened is not mentioned.

    Args:
        backend: the one in use.
        files: of its directory.
        named: its name, and its source.
        found: the others.
    """
    try:
        entries = backend.usage().entries
    except (KcacheError, OSError):
        return
    if not entries:
        log.warning_once(f"{files.path}: {sentence(named, found)}. {advice(named, found)}")


def sentence(named: Setting[str], found: Sequence[Holder]) -> str:
    """Return a sentence about where the kernels are, and what selected the backend in use."""
    there = " and ".join(f"{each.name} ({amount(each)})" for each in found)
    source = "the default" if named.source == "default" else f"{named.source} names it"
    which = "backend" if len(found) == 1 else "backends"
    return (
        f"this directory's kernels are in the {which} {there}, and not in {named.value} ({source})"
    )


def advice(named: Setting[str], found: Sequence[Holder]) -> str:
    """Return what to do about it."""
    (name, source), other = named, found[0].name
    use = f"kcache config --set backend={other}"
    if source.startswith("KCACHE_"):
        use = f"set {source}={other}"
    elif source == "argument":
        use = f"backend={other!r}"
    return f"To use them: {use}; to move them: kcache migrate --from {other} --to {name}"


def amount(holder: Holder) -> str:
    """Return the number of entries and bytes of a backend, in words."""
    return f"{counted(holder.entries)}, {format_size(holder.bytes)}"
