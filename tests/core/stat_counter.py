"""Stat counter: counts files that are looked at, by stat or while a directory is listed."""

import os
from collections.abc import Callable, Iterator
from typing import Any, Self


class Looks:
    """In its block, counts calls of `os.stat` and `os.lstat`, and of `stat` on listed entries.

    Replaces functions of `os` while the block runs, so nothing else may be measured meanwhile.
    """

    def __init__(self) -> None:
        self.count = 0
        self._replaced: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        self._replaced = {name: getattr(os, name) for name in ("stat", "lstat", "scandir")}
        scandir = self._replaced["scandir"]
        os.stat = self._counting(self._replaced["stat"])
        os.lstat = self._counting(self._replaced["lstat"])
        os.scandir = lambda *path: _Listing(self, scandir(*path))  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._replaced.items():
            setattr(os, name, function)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return counted


class _Listing:
    """What `os.scandir` returns, as a context manager and an iterable."""

    def __init__(self, looks: Looks, items: Any) -> None:
        self._looks, self._items = looks, items

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._items.close()

    def __iter__(self) -> Iterator["_Item"]:
        return (_Item(self._looks, item) for item in self._items)


class _Item:
    """An entry of a listing, whose `stat` is counted."""

    def __init__(self, looks: Looks, item: os.DirEntry[str]) -> None:
        self.name, self.path, self._looks, self._item = item.name, item.path, looks, item

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        self._looks.count += 1
        return self._item.stat(follow_symlinks=follow_symlinks)
