"""Path safety: checks which users can write to a file or directory, or replace it.

A user who can write to a parent directory of the cache can replace the cache by another directory
or a link, at any time between a check and a use. So the parent directories are checked, too.
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

#: A user id that no file's owner has.
NO_USER = -1
#: The default of the overflow id in the kernel, for sandboxes that hide the file with its value.
_DEFAULT_OVERFLOW = 65534
_overflow: int | None = None
#: How many user ids there are: all numbers of 32 bits except the last one.
_ALL_USERS = (1 << 32) - 1
_ACL = "system.posix_acl_access"

#: Pairs of a path and a user for whom it was found to be safe. They need not be checked again,
#: because only this user or root can have changed them since then.
_known: set[tuple[str, int]] = set()
#: The owners of the layers (read-only tiers) that the user has named, and so trusts. kcache reads
#: files of these owners, but writes only to files of the present user.
trusted: set[int] = set()


def present_user() -> int:
    """Return the id of the present user: a file belongs to the user if its owner has this id.

    Return `NO_USER` if the id is ambiguous. On Windows, return 0, because there the owner of every
    file is reported as 0.
    """
    if sys.platform == "win32":
        return 0
    user = os.geteuid()
    return NO_USER if is_ambiguous(user) else user


def why_no_user() -> str:
    """Return why it can't be known which files belong to the present user; empty if it can."""
    if sys.platform == "win32" or present_user() != NO_USER:
        return ""
    return (
        f"user {os.geteuid()} stands for every user without an id in this user namespace, so it is "
        "unknown which files are yours; map your user into the namespace"
    )


def is_ambiguous(user: int) -> bool:
    """Return whether `user` is the id that stands for all users without an id in this namespace.

    In a rootless container and after `unshare -U`, the user namespace may not have an id for each
    user. The files and processes of all users without an id then have the overflow id. See
    user_namespaces(7).
    """
    return user == _overflow_user() and not _all_users_are_mapped()


def _overflow_user() -> int:
    """Return the overflow id, which stands for users without an id in this user namespace.

    On systems without user namespaces, return `NO_USER`.
    """
    global _overflow  # noqa: PLW0603  read once, because every access to an entry needs it
    if _overflow is None:
        _overflow = _DEFAULT_OVERFLOW if sys.platform == "linux" else NO_USER
        with suppress(OSError, ValueError), open("/proc/sys/kernel/overflowuid", "rb") as file:
            _overflow = int(file.read())
    return _overflow


def _all_users_are_mapped() -> bool:
    """Return whether each user has an id in this user namespace; False if this is unknown."""
    if sys.platform != "linux":
        return True
    with suppress(OSError, ValueError, IndexError), open("/proc/self/uid_map", "rb") as file:
        return sum(int(line.split()[2]) for line in file) >= _ALL_USERS
    return False


def foreign(status: os.stat_result, layers: Container[int] = trusted) -> str:
    """Return why a file or directory with `status` can't be trusted, in words; empty if it can.

    Cached kernels are code: a user who can write them can make this program run any code. So the
    owner must be the present user or in `layers`, the owners of layers that the user has named, and
    no other user may be able to write to the file or directory.
    """
    user = present_user()
    if status.st_uid != user and status.st_uid not in layers:
        return f"it belongs to user {status.st_uid}, and you are user {user}"
    if status.st_mode & _OTHERS_WRITE and sys.platform != "win32":
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def unsafe_part(path: str, owner: int | None = None) -> str:
    """Return why other users could replace an absolute path or a part of it, in words.

    The text is empty if they can't. For this, each parent directory of `path` must belong to
    the present user, to `owner` (another trusted user) or to root. No other user may be able to
    write to it, unless its sticky bit prevents them from renaming files of others, as in `/tmp`. A
    group in which the present user is the only member may write to it.
    Symbolic links in the path, including the last part of `path`, must belong to one of these users
    as well. Parts that do not exist are safe. On Windows, the text is always empty.

    If root has no id in this user namespace (`unshare -r`, Apptainer), an ambiguous owner counts as
    root if only root or ambiguous owners can write to all directories above. So `/` and `/home` are
    safe, but a directory of an ambiguous owner in `/tmp` is not.

    Raises:
        OSError: a part of the path can't be examined, or the links form a loop.
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
        if name in (".", ".."):  # only in a link's target, because callers normalise `path`
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
            return ""  # the caller's own check has a better message
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
    """Return why the parent directory `path` is unsafe, in words; empty if it is safe."""
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
    """Return whether only root or users without an id can write to the directory with `status`."""
    alone = not status.st_mode & _OTHERS_WRITE
    return alone and (status.st_uid == _ROOT or is_ambiguous(status.st_uid))


def _has_acl(path: str) -> bool:
    """Return whether a file has an access control list with more users or groups; see acl(5).

    The bits for the group in the file's mode then do not show the rights of its group, but the
    maximum rights of all users and groups in the list.
    """
    if sys.platform != "linux":
        return False
    try:
        os.getxattr(path, _ACL)
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.EOPNOTSUPP)
    return True


def _is_private_group(group: int, user: int) -> bool:
    """Return whether the group has no member except the user, according to this machine's groups.

    On Debian, Ubuntu and Fedora, each user has a group of the same name, and may make all files
    writable for this group (umask 002). The group of root is treated like root. The result is False
    in a user namespace that does not map all users, because there an id may belong to a different
    group than in the machine's list.
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
    """Make a directory with mode 0700, even if the umask would remove some of these rights.

    Raises:
        FileExistsError: `path` already exists.
        OSError: the directory can't be made.
    """
    os.mkdir(path, 0o700)  # noqa: TID251
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(path, mode | stat.S_IRWXU)


def make_private(directory: str) -> bool:
    """Make a directory and its missing parents, all with mode 0700.

    Return whether the directory was made by this call, and so is empty. `os.makedirs` is not used,
    because the umask decides the mode of the parents that it makes.
    """
    missing: list[str] = []
    parent = directory
    while parent != os.path.dirname(parent) and not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    if len(missing) > 1:
        with suppress(FileNotFoundError):
            os.lstat(directory)  # if the path is too long, this raises before a parent is created
    made = False
    for each in reversed(missing):
        made = False
        with suppress(FileExistsError):
            make_directory(each)
            made = True
    return made
