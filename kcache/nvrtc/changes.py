"""Changes: whether files were changed since a moment, told by their status and their folders'."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from kcache.nvrtc.files import Stamp, stamp_of

__all__ = ["changed_since", "stamps"]


def changed_since(paths: Iterable[str], missing: Iterable[str], start_ns: int) -> bool:
    """Tell whether a compile begun at `start_ns` may have seen other files than are there now.

    Args:
        paths: files that exist; one that is gone has changed.
        missing: folders in which some file was looked for and not found. They need not exist.
        start_ns: nanoseconds of the file system's clock.
    """
    paths = list(paths)
    try:
        for path in paths:
            if any(_changed_ns(look(path)) >= start_ns for look in (os.stat, os.lstat)):
                return True
        folders = _upwards(map(os.path.dirname, paths))
        if any(_moved_since(folder, start_ns) for folder in folders):
            return True
        return any(_appeared_since(folder, start_ns) for folder in missing)
    except OSError:  # gone a moment ago
        return True


def stamps(paths: Iterable[str], missing: Iterable[str]) -> list[tuple[str, Stamp | None]]:
    """Return the status of all that `changed_since` looks at; None where there is nothing."""
    found: list[tuple[str, Stamp | None]] = []
    paths = set(paths)
    folders = {*map(os.path.dirname, paths), *missing}
    for path in sorted(paths.union(_upwards(folders))):
        for look in (os.stat, os.lstat):
            try:
                found.append((path, stamp_of(look(path))))
            except OSError:
                found.append((path, None))
    return found


def _appeared_since(folder: str, start_ns: int) -> bool:
    """Tell whether something in a folder may have come, or gone, at or after `start_ns`."""
    above = _upwards([folder])
    there = next((n for n, name in enumerate(above) if os.path.isdir(name)), len(above))
    if above[there:] and _changed_ns(os.stat(above[there])) >= start_ns:
        return True
    return any(_moved_since(name, start_ns) for name in above[there:])


def _upwards(folders: Iterable[str]) -> list[str]:
    """Return the folders and everything above them, each once, deepest first for one folder."""
    found: dict[str, None] = {}
    for start in folders:
        folder = start
        while folder not in found and folder not in ("", "/"):
            found[folder] = None
            folder = os.path.dirname(folder)
    return list(found)


def _moved_since(folder: str, start_ns: int) -> bool:
    """Tell whether a link or directory was made, renamed or exchanged at or after `start_ns`.

    What changes a directory's entries sets both of its times; a rename sets one. Raises OSError
    if it is not there.
    """
    status = os.lstat(folder)
    changed = _changed_ns(status)
    return changed >= start_ns and (stat.S_ISLNK(status.st_mode) or changed != status.st_mtime_ns)


def _changed_ns(status: os.stat_result) -> int:
    """Return when a file was last changed; Windows keeps no such time but mtime."""
    return status.st_mtime_ns if os.name == "nt" else status.st_ctime_ns
