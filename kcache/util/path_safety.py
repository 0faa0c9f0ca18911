"""Path safety: whose files are trusted, and directories that no other user can replace.

A user who can write to a directory above the cache can replace the cache by a directory or a link
of their own, between any check and any use. So the directories above are checked, too.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress

if sys.platform != "win32":
    import grp
    import pwd

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Container

_MAX_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0

#: The owner of no file.
NO_USER = -1
#: The kernel's default for the overflow id. A sandbox may hide the file with the present value.
_DEFAULT_OVERFLOW = 65534
_overflow: int | None = None
#: How many ids there are: all of 32 bits but the last one.
_ALL_USERS = (1 << 32) - 1
_ACL = "system.posix_acl_access"

#: Paths that were found to be safe, each with the user for whom it is safe. Since then, only that
#: user or root can have changed them.
_known: set[tuple[str, int]] = set()
#: Owners of the layers (read-only tiers) that the user has named, and so trusts. They matter only
#: for reading: what kcache writes to belongs to the present user alone.
trusted: set[int] = set()


def present_user() -> int:
    """Return the present user's id, `NO_USER` if it is ambiguous; 0 on Windows, like every owner.

    A file belongs to the present user if its owner is equal to this.
    """
    if sys.platform == "win32":
        return 0
    user = os.geteuid()
    return NO_USER if is_ambiguous(user) else user


def why_no_user() -> str:
    """Return why no file can be known to be the present user's; empty if files can."""
    if sys.platform == "win32" or present_user() != NO_USER:
        return ""
    return (
        f"user {os.geteuid()} stands for every user without an id in this user namespace, so no "
        "files can be known to be yours; map your user into it"
    )


def is_ambiguous(user: int) -> bool:
    """Return whether an id may stand for any of the users that this user namespace does not map.

    In a rootless container and after `unshare -U`, the files of all these users, and their
    processes, have the overflow id. See user_namespaces(7).
    """
    return user == _overflow_user() and not _all_users_are_mapped()


def _overflow_user() -> int:
    """Return the id that stands for users without one; `NO_USER` on systems without namespaces."""
    global _overflow  # noqa: PLW0603  read once: every access to an entry compares with it
    if _overflow is None:
        _overflow = _DEFAULT_OVERFLOW if sys.platform == "linux" else NO_USER
        with suppress(OSError, ValueError), open("/proc/sys/kernel/overflowuid", "rb") as file:
            _overflow = int(file.read())
    return _overflow


def _all_users_are_mapped() -> bool:
    """Return whether each user has an id here; False if Linux does not show that."""
    if sys.platform != "linux":
        return True
    with suppress(OSError, ValueError, IndexError), open("/proc/self/uid_map", "rb") as file:
        return sum(int(line.split()[2]) for line in file) >= _ALL_USERS
    return False


def foreign(status: os.stat_result, layers: Container[int] = trusted) -> str:
    """Return why a file or directory can't be trusted, in words; empty if it can.

    Cached values are code: a user who can write them can make this program run anything. The
    present user is trusted, and so are the owners of layers that this user has named.
    """
    user = present_user()
    if status.st_uid != user and status.st_uid not in layers:
        return f"it belongs to user {status.st_uid}, and you are user {user}"
    if status.st_mode & _OTHERS_WRITE and sys.platform != "win32":
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def unsafe_part(path: str, owner: int | None = None) -> str:
    """Return what makes the way to an absolute path unsafe, in words; empty if nothing does.

    Each directory above `path` must belong to the present user, to `owner` (a user who is trusted,
    too) or to root, and no other user may be able to write to it, unless its sticky bit keeps them
    from renaming files of others (as in `/tmp`). Links on the way, `path` itself included, must
    belong to one of the three. A missing part can be created safely. The result is always empty on
    Windows.

    Where root has no id (`unshare -r`, Apptainer), an ambiguous owner counts as root as long as
    only root, or another such owner, can write to the directories above: as for `/` and `/home`,
    and not for what is in `/tmp`.

    Raises:
        OSError: a part can't be examined, or links lead in circles.
    """
    if sys.platform == "win32":
        return ""
    user = present_user()
    if (path, user) in _known:
        return ""
    owner = user if owner is None else owner
    trusts, roots = {user, owner, _ROOT}, True

    current, links, problem = "", 0, ""
    left = _reversed_parts(path)
    while left and not problem:
        name = left.pop()
        if name in (".", ".."):  # only in a link's target: `path` itself has none
            current = os.path.dirname(current) if name == ".." else current
            continue
        here = os.path.join(current, name)
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            return ""
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if not _is_trusted(status.st_uid, trusts, roots):
                return f"{here} is a link that user {status.st_uid} made"
            left += _reversed_parts(os.readlink(here))
            continue
        if not stat.S_ISDIR(status.st_mode):
            return ""  # the caller has a better message
        if left:
            problem = _problem_above(here, status, user, trusts, roots)
        current, roots = here, roots and _is_roots(status)
    if not problem and owner == user:
        _known.add((path, user))
    return problem


def _reversed_parts(path: str) -> list[str]:
    parts = [part for part in reversed(path.split("/")) if part]
    return [*parts, "/"] if path.startswith("/") else parts


def _problem_above(
    path: str, status: os.stat_result, user: int, trusts: Container[int], roots: bool
) -> str:
    """Return why a directory above the cache is unsafe."""
    if not _is_trusted(status.st_uid, trusts, roots):
        return f"{path} belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        if status.st_mode & stat.S_IWOTH or not _is_private_group(status.st_gid, user):
            return f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o})"
        if _has_acl(path):
            return f"others can write to {path} (by its access control list: getfacl {path})"
    return ""


def _is_trusted(found: int, trusts: Container[int], roots: bool) -> bool:
    return found in trusts or (roots and is_ambiguous(found))


def _is_roots(status: os.stat_result) -> bool:
    """Return whether only root, or a user without an id, can write to a directory."""
    alone = not status.st_mode & _OTHERS_WRITE
    return alone and (status.st_uid == _ROOT or is_ambiguous(status.st_uid))


def _has_acl(path: str) -> bool:
    """Return whether users other than the owner, or other groups, have rights; see acl(5).

    The bits of the group in the mode are then the most that these may have.
    """
    if sys.platform != "linux":
        return False
    try:
        os.getxattr(path, _ACL)
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.EOPNOTSUPP)
    return True


def _is_private_group(group: int, user: int) -> bool:
    """Return whether a group has no member except the user, by the machine's list of groups.

    On Debian, Ubuntu and Fedora, each user has a group of the same name, and may make everything
    writable for it (umask 002). The group of root counts as root. In a user namespace, an id may be
    that of another group (such as `users`) than in the list.
    """
    if sys.platform != "win32" and _all_users_are_mapped():
        if group == _ROOT:
            return True
        with suppress(KeyError):
            known, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
            users = (each.pw_name for each in pwd.getpwall() if each.pw_gid == group)
            return known.gr_name == name and {*known.gr_mem, *users} <= {name}
    return False


def make_directory(path: str) -> None:
    """Make a directory with mode 0700; `os.mkdir` leaves that to the umask.

    Raises:
        OSError: it can't be made (FileExistsError: something is there).
    """
    os.mkdir(path, 0o700)  # noqa: TID251
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(path, mode | stat.S_IRWXU)


def make_private(directory: str) -> bool:
    """Make a directory and its parents, all 0700; `os.makedirs` leaves parents to the umask.

    Return whether it made the directory, which is then empty.
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
            make_directory(each)
            made = True
    return made
