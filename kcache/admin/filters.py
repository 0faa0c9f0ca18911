"""Filters: select entries by name, target and last use."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import NamedTuple

from kcache.nvrtc.entries import Item
from kcache.util.units import parse_age


class Filters(NamedTuple):
    """Which entries are wanted; all of them by default.

    Attributes:
        names: a kernel is wanted if its source's name, or a name expression of it, contains one of
            these texts, or matches it as a pattern if that has `*` or `?` in it.
        archs: its target is one of these, such as `"sm_90"`.
        used_within: its last use was at most this many seconds ago.
        older_than: its last use was more than this many seconds ago.
    """

    names: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    used_within: float | None = None
    older_than: float | None = None


def parse_filters(
    names: Iterable[str] = (),
    archs: Iterable[str] = (),
    used_within: float | str | None = None,
    older_than: float | str | None = None,
) -> Filters:
    """Return filters as people write them: `"90"` is `"sm_90"`, and an age is `"30d"`.

    Raises:
        ConfigError: an age is malformed.
    """
    return Filters(
        tuple(names),
        tuple(f"sm_{arch}" if arch[:1].isdigit() else arch for arch in archs),
        None if used_within is None else parse_age(used_within, name="used_within"),
        None if older_than is None else parse_age(older_than, name="older_than"),
    )


def is_wanted(item: Item, filters: Filters, now: float) -> bool:
    """Return whether an item passes all filters; `now` is in seconds since the epoch."""
    if filters.used_within is not None and item.used < now - filters.used_within:
        return False
    if filters.older_than is not None and item.used >= now - filters.older_than:
        return False
    if filters.archs and item.arch not in filters.archs:
        return False
    known = (item.source_name, *item.names)
    return not filters.names or any(_fits(text, name) for text in filters.names for name in known)


def _fits(pattern: str, name: str) -> bool:
    if not set(pattern) & set("*?"):
        return pattern in name
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))  # arrays, not sets of characters
