"""Safe paths: directories that nobody but their owner can exchange for something else.

A user who can write to a directory above the cache can replace the cache by a directory or a link
of their own, between any check and any use. So the directories above are checked, too.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress

__all__ = ["make_private", "present_user", "trust", "trusted", "unsafe_part"]

_MOST_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0

#: Paths that were found to be safe, with the user for whom they are. Since then, only that user or
#: root can have changed them.
_known: set[tuple[str, int]] = set()


#: Owners of the layers that the user has named. The user trusts them with kernels. They matter only
#: for reading: what kcache writes to belongs to the present user alone.
trusted: set[int] = set()


def present_user() -> int:
    """Return the present user's id; 0 on Windows, which says 0 of every file's owner."""
    if sys.platform == "win32":
        return 0
    return os.geteuid()


def trust(owner: int) -> None:
    """Trust the files of a user as kernels, in this process."""
    trusted.add(owner)


def unsafe_part(path: str, owner: int | None = None) -> str:
    """Return what makes the way to an absolute path unsafe, in words; empty if nothing does.

    Each directory above `path` must belong to the present user, to `owner` (a user who is trusted,
    too) or to root, and nobody else may be able to write to it, unless its sticky bit keeps them
    from renaming files of others (as in `/tmp`). Links on the way, `path` itself included, must
    belong to one of the three. A missing part can be created safely. The result is always empty on
    Windows.

    Raises:
        OSError: a part can't be examined, or links lead in circles.
    """
    if sys.platform == "win32":
        return ""
    user = os.geteuid()
    if (path, user) in _known:
        return ""
    owner = user if owner is None else owner
    current, links = "/", 0
    problem = _problem(current, os.lstat(current), user, owner)
    left = [part for part in reversed(path.split("/")) if part]
    while left and not problem:
        name = left.pop()
        if name in (".", ".."):  # of a link: the path itself is absolute and has none
            current = os.path.dirname(current) if name == ".." else current
            continue
        here = os.path.join(current, name)
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            return ""
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if not _trusted(status.st_uid, user, owner):
                return f"{here} is a link that user {status.st_uid} made"
            target = os.readlink(here)
            current = "/" if target.startswith("/") else current
            left += [part for part in reversed(target.split("/")) if part]
            continue
        if not stat.S_ISDIR(status.st_mode):
            return ""  # the caller has a better message
        if left:
            problem = _problem(here, status, user, owner)
        current = here
    if not problem and owner == user:
        _known.add((path, user))
    return problem


def _problem(path: str, status: os.stat_result, user: int, owner: int) -> str:
    """Return why a directory above the cache is unsafe."""
    if not _trusted(status.st_uid, user, owner):
        return f"{path} belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        alone = not status.st_mode & stat.S_IWOTH and _is_private_group(status.st_gid, user)
        if not alone:
            return f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _trusted(found: int, user: int, owner: int) -> bool:
    return found in (user, owner, _ROOT) or _is_unknown(found)


def _is_unknown(owner: int) -> bool:
    """Tell whether an owner is one that a container can't name, such as the machine's root.

    In a user namespace that maps a few users only (Apptainer, `unshare -r`) every other owner is
    shown as the overflow user, root too, to whom `/` and `/home` belong. See user_namespaces(7).
    """
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            unknown = int(file.read())
        with open("/proc/self/uid_map", encoding="ascii") as file:
            mapped = [int(line.split()[2]) for line in file]
    except (OSError, ValueError, IndexError):
        return False
    return owner == unknown and sum(mapped) < unknown


def _is_private_group(group: int, user: int) -> bool:
    """Tell whether a group has no member but the user, by the machine's list of groups.

    On Debian, Ubuntu and Fedora, each user has a group of the same name, and may make everything
    writable for it (umask 002). The group of root counts as root.
    """
    if group == _ROOT:
        return True
    if sys.platform == "win32":
        return False
    import grp
    import pwd

    try:
        known, owner = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    return known.gr_name == owner.pw_name and set(known.gr_mem) <= {owner.pw_name}


def make_private(directory: str) -> bool:
    """Make a directory and its parents, all 0700; `os.makedirs` leaves parents to the umask.

    It tells whether it made the directory, which is then empty.
    """
    missing: list[str] = []
    parent = directory
    while parent != os.path.dirname(parent) and not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    if len(missing) > 1:
        with suppress(FileNotFoundError):
            os.lstat(directory)  # raises if the path is too long: nothing is created
    made = False
    for each in reversed(missing):
        made = False
        with suppress(FileExistsError):
            os.mkdir(each, 0o700)
            made = True
    return made
