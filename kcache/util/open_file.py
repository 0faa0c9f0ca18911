"""OwnFile: a file of ours while it is open; and directories that nobody else can exchange.

A file is checked to be ours when it is opened.

A bare descriptor is a number. If one thread closes it while another is about to write, the number
may then belong to another file, which gets the write. And if a signal's handler raises an exception
before the number is kept anywhere, the file stays open, with its locks, until the process ends. So
kcache keeps no bare number: from the system call on, the number belongs to an object, and Python
closes the file with the object.

A user who can write to a directory above the cache can replace the cache by a directory or a link
of their own, between any check and any use. So the directories above are checked, too.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import contextmanager, suppress
from io import FileIO
from typing import TYPE_CHECKING

from kcache.util.forks import after_fork
from kcache.util.locks import lock, pread, pwrite

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator

#: The file that makes a directory a cache; see `kcache.directory`.
MARKER = "kcache.json"

#: Flags for every open: programs that we start do not inherit it, it follows no link, it never
#: waits (for the other end of a pipe), and it never becomes our terminal.
SAFE = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)
#: What `open` says of a link with O_NOFOLLOW, of a socket, and of a directory.
_NO_FILE = {
    errno.ELOOP: "a link",
    errno.EMLINK: "a link",
    errno.ENXIO: "a socket",
    errno.EISDIR: "a directory",
}
#: Locked while a damaged file is set aside. This byte is far behind the contents of our files, and
#: behind the bytes that other locks use.
_ASIDE = (1 << 63) - 2
_TRIES = 3


class NotOursError(OSError):
    """A file is not one that kcache made: it is of another kind, user or format."""

    def __init__(self, reason: str, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EPERM, reason, os.fspath(path))


def identity(status: os.stat_result) -> tuple[int, int]:
    """Return what identifies a file: device and inode."""
    return status.st_dev, status.st_ino


class OwnFile(FileIO):
    """An open file: closed by `close`, by its `with` block, or with the last reference to it.

    An exception at any point, also one of a signal's handler, leaves no file open whose object is
    gone. A lock on the file ends with it.

    Threads: each opens a file of its own. Fork: a child closes its copy, so that the locks belong
    to the parent alone. A program must not close descriptors that are not its own while a thread
    uses kcache.
    """

    __slots__ = ()
    # A function of Python could be interrupted before it closes the file.
    __del__ = FileIO.close

    @property
    def fd(self) -> int:
        """The descriptor; valid as long as this object is referenced."""
        return self.fileno()

    def is_at(self, path: str) -> bool:
        """Tell whether `path` leads to this file: it was not removed, moved or replaced."""
        try:
            return identity(os.stat(path, follow_symlinks=False)) == identity(os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def after_fork(self) -> None:
        """Close the file in a child process, which releases no lock of its parent."""
        with suppress(OSError):
            self.close()


def opened(path: str, flags: int, mode: int = 0o600) -> OwnFile:
    """Open any file without following a link or waiting; a new one gets `mode`.

    Raises:
        IsADirectoryError: it is a directory. OSError: it can't be opened.
    """
    try:
        # One step for Python, so that no interrupt comes between the number and the object.
        return next(map(OwnFile, map(os.open, (path,), (flags | SAFE,), (mode,))))
    except IsADirectoryError as error:
        if isinstance(error.filename, int):  # FileIO refused the number
            os.close(error.filename)
        raise IsADirectoryError(error.errno, error.strerror, path) from None


def is_own(status: os.stat_result) -> bool:
    """Tell whether a file may be written to: a plain file of the present user, with one name.

    A second name (a hard link) may belong to a file that is not ours.
    """
    return is_plain(status) and status.st_uid == present_user()


def is_plain(status: os.stat_result) -> bool:
    """Tell whether something is a plain file with one name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def _owner_problem(status: os.stat_result) -> str:
    """Return why `is_own` is false, in words that continue "it is"."""
    if not stat.S_ISREG(status.st_mode):
        return "no plain file, and so no file of kcache"
    if status.st_uid != present_user():
        return f"a file of user {status.st_uid}, and you are user {present_user()}"
    return f"a file with {status.st_nlink} names; kcache makes no hard links"


def open_own(path: str, flags: int) -> OwnFile:
    """Open a file that is ours, for writing or reading, without following a link or waiting.

    Args:
        path: the file.
        flags: as for `os.open`; with `O_CREAT` it is made, for the present user alone.

    Raises:
        NotOursError: it is not a plain file of the present user with one name. Nothing was changed.
        OSError: it can't be opened.
    """
    try:
        file = opened(path, flags)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotOursError(f"it is {_NO_FILE[error.errno]}, no file of kcache", path) from error
        raise
    status = os.fstat(file.fd)
    if not is_own(status):
        file.close()
        raise NotOursError(f"it is {_owner_problem(status)}", path)
    after_fork(file)
    return file


def has_header(file: OwnFile, header: bytes) -> bool:
    """Tell whether a file begins with `header`, which is written if the file is new.

    A file is new if it is empty, or if it has only zeros after a full disk or a power cut.
    """
    found = pread(file.fd, len(header), 0)
    if not any(found):
        return pwrite(file.fd, header, 0) == len(header)
    return found == header


def open_or_replace(path: str, flags: int, is_sound: Callable[[OwnFile], bool]) -> OwnFile:
    """Open a file for writing; an unsound one gets another name, and a new one is made.

    So its content is not lost: it may have been damaged, or it may never have been ours. The other
    name is that of the file with `.damaged` behind it. In a directory that is no cache, the file
    keeps its name, because it is somebody else's.

    Args:
        path: the file, made if it is not there.
        flags: as for `os.open`.
        is_sound: tells whether the opened file is new, or one that kcache wrote.

    Raises:
        NotOursError: it is not a plain file of the present user with one name, or it is not sound
            and lies in a directory that is no cache. Nothing was changed.
        OSError: it can't be opened or renamed.
    """
    for _ in range(_TRIES):
        file = open_own(path, flags | os.O_CREAT)
        if is_sound(file):
            return file
        if not os.path.lexists(os.path.join(os.path.dirname(path), MARKER)):
            raise NotOursError(f"it is no file of kcache, and there is no {MARKER} beside it", path)
        # Several processes may find the damage. One sets the file aside; the others then find the
        # new file.
        lock(file, _ASIDE, timeout=1.0)
        if file.is_at(path):
            _set_aside(path)
        file.close()
    raise NotOursError("it is no file of kcache, time and again", path)


def _set_aside(path: str) -> None:
    """Give a damaged file its own name with `.damaged` behind it.

    Raises:
        NotOursError: something that is not ours has the other name.
        OSError: it can't be renamed.
    """
    aside = f"{path}.damaged"
    with suppress(FileNotFoundError):
        status = os.stat(aside, follow_symlinks=False)
        if not is_own(status):
            raise NotOursError(f"it is {_owner_problem(status)}", aside)
    os.rename(path, aside)


@contextmanager
def replacing(path: str) -> Generator[str]:
    """Yield the path of an empty file, which takes the place of `path` at the end of the block.

    If the block raises, the file is removed. Only a killed process leaves it behind.

    Raises:
        OSError: the file can't be made.
    """
    folder, name = os.path.split(path)
    draft = os.path.join(folder, f".{name}.{os.urandom(8).hex()}.tmp")
    opened(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666).close()
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


# -- safe paths ------------------------------------------------------------------------------------

_MOST_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0

#: The owner of no file.
NO_USER = -1
#: The kernel's default. A sandbox may hide the file with the present value.
_DEFAULT_OVERFLOW = 65534
_overflow: int | None = None
#: How many ids there are: all of 32 bits but the last one.
_ALL_USERS = (1 << 32) - 1
_ACL = "system.posix_acl_access"

#: Paths that were found to be safe, with the user for whom they are. Since then, only that user or
#: root can have changed them.
_known: set[tuple[str, int]] = set()
#: Owners of the layers that the user has named. The user trusts them with kernels. They matter only
#: for reading: what kcache writes to belongs to the present user alone.
trusted: set[int] = set()


def present_user() -> int:
    """Return the present user's id, `NO_USER` if it is ambiguous; 0 on Windows, as for each file.

    A file belongs to the present user if its owner is equal to this.
    """
    if sys.platform == "win32":
        return 0
    user = os.geteuid()
    return NO_USER if is_ambiguous(user) else user


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
    """Return whether each user has an id here; False if the system does not show that."""
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
    too) or to root, and nobody else may be able to write to it, unless its sticky bit keeps them
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

    current, links, status = "/", 0, os.lstat("/")
    problem = _problem_above(current, status, user, trusts, roots)
    roots = _is_roots(status)
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
            if not _is_trusted(status.st_uid, trusts, roots):
                return f"{here} is a link that user {status.st_uid} made"
            target = os.readlink(here)
            current = "/" if target.startswith("/") else current
            left += [part for part in reversed(target.split("/")) if part]
            continue
        if not stat.S_ISDIR(status.st_mode):
            return ""  # the caller has a better message
        if left:
            problem = _problem_above(here, status, user, trusts, roots)
        current, roots = here, roots and _is_roots(status)
    if not problem and owner == user:
        _known.add((path, user))
    return problem


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
    """Return whether users and groups beside owner and group have rights; see acl(5).

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
            make_directory(each)
            made = True
    return made
