"""CacheDirectory: decides whether a directory may be used as a cache, and names its files."""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import suppress

from kcache.errors import BackendError, ConfigError
from kcache.util.marker import NAME, is_empty, is_marked, mark, marker_problem
from kcache.util.open_file import NotOursError, open_own
from kcache.util.safe_path import make_private, present_user, trust, unsafe_part

__all__ = ["CacheDirectory", "is_cache", "prepare", "prepare_layer"]

#: How often kcache looks at a directory that seems to belong to somebody else, and the seconds in
#: between.
_LOOKS, _PAUSE = 3, 0.01

#: Tells backup programs that they can leave out the directory. See https://bford.info/cachedir/.
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This file is a cache directory tag created by kcache.
# For information about cache directory tags, see https://bford.info/cachedir/
"""


class CacheDirectory:
    """The names of all files in a cache's directory. No other module joins such a path.

    Immutable. Only the backend knows the files in its own folder.

    Args:
        path: of the directory, as it is to be shown.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def stats(self) -> str:
        """The counts of all processes; see `engine.stats.StatsFile`."""
        return f"{self.path}/stats"

    @property
    def history(self) -> str:
        """The counts of each hour; see `engine.history.History`."""
        return f"{self.path}/history"

    @property
    def journal(self) -> str:
        """Why entries left the cache; see `engine.journal.Journal`."""
        return f"{self.path}/journal"

    @property
    def old_journal(self) -> str:
        """The journal before the present one."""
        return f"{self.path}/journal.1"

    @property
    def flight(self) -> str:
        """Its bytes are the locks of processes that compile; see `engine.key_locks`."""
        return f"{self.path}/flight"

    @property
    def slots(self) -> str:
        """Its bytes are locks that bound the compiles at a time; see `nvrtc.workers.slots`."""
        return f"{self.path}/slots"

    @property
    def settings(self) -> str:
        """The settings that stay with the cache; see `saved_settings`."""
        return f"{self.path}/settings.json"

    @property
    def settings_draft(self) -> str:
        """The new settings, while they are written and before they replace `settings`."""
        return f"{self.path}/.settings.json.new"

    @property
    def tag(self) -> str:
        """The file that tells backup programs that the directory can be left out."""
        return f"{self.path}/CACHEDIR.TAG"

    @property
    def marker(self) -> str:
        """The file by which a directory is known to be a cache; `util.marker` writes it."""
        return f"{self.path}/{NAME}"

    def backend(self, name: str) -> str:
        """Return the folder of the backend called `name`."""
        return f"{self.path}/{name}"


def prepare(directory: str, *, read_only: bool = False) -> None:
    """Make `directory`, with its parents, for the present user alone, and check that it is safe.

    Compiled kernels are code: a user who can write to the directory, or exchange it, can make every
    program that uses it run their code. So a directory that belongs to somebody else, or that
    others can write to, is refused, and so is one below such a directory. kcache only uses a
    directory that it made or found empty. It writes nothing into any other, because the files there
    are not its own.

    Raises:
        ConfigError: it is not a directory, is unsafe, or is no cache.
        BackendError: it is not there and can't be made (read-only or full file system, ...).
    """
    directory = os.path.abspath(directory)
    made = False
    try:
        _require_safe_path(directory)
        if not read_only:
            made = make_private(directory)
            _require_safe_path(directory)  # somebody created it in the meantime: who?
        status = os.stat(directory)
    except FileExistsError as error:
        raise ConfigError(f"directory={directory!r} is a file; allowed: a directory") from error
    except NotADirectoryError as error:
        raise ConfigError(
            f"directory={directory!r} is not allowed: a part of its path is a file"
        ) from error
    except OSError as error:
        raise BackendError(f"directory {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"directory={directory!r} is a file; allowed: a directory")
    if sys.platform != "win32":
        _check_owner(directory, status)
    try:
        marked = not made and _is_marked_cache(directory)
    except OSError as error:
        raise BackendError(f"directory {directory}: {error.strerror}") from error
    if not read_only and not marked:
        with suppress(OSError):  # full now, but that may change: the next process does it then
            mark(directory)
            _tag(directory)


def is_cache(directory: str) -> bool:
    """Tell whether a safe directory is a cache, rather than one that is empty.

    Raises:
        ConfigError, BackendError: as `prepare`.
    """
    prepare(directory, read_only=True)
    try:
        return not is_empty(directory)
    except OSError as error:
        raise BackendError(f"directory {directory}: {error.strerror}") from error


def prepare_layer(path: str) -> None:
    """Check that a layer is safe to read, and trust its owner with kernels in this process.

    The user has named the layer, and so trusts its owner, whoever that is: root, who made the
    image, or a user who looks after kernels for others. Nobody else may be able to write to it or
    to replace it.

    Args:
        path: the directory of a cache, or a bundle.

    Raises:
        ConfigError: others can write to it or exchange it, or it is neither.
        BackendError: it is not there, or can't be examined.
    """
    try:
        status = os.stat(path)
        problem = unsafe_part(path, status.st_uid)
    except OSError as error:
        raise BackendError(f"layer {path}: {error.strerror}") from error
    is_file = stat.S_ISREG(status.st_mode)
    if not is_file and not stat.S_ISDIR(status.st_mode):
        problem = "it is neither a directory nor a file"
    elif sys.platform != "win32" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    elif is_file and not _is_bundle(path):
        problem = "it is no bundle"
    elif not is_file and not os.path.isfile(CacheDirectory(path).marker):
        problem = f"it is no cache: it has no {NAME}"
    if problem:
        raise ConfigError(
            f"layer {path!r} is not allowed: {problem}; allowed: the directory of a cache, or a "
            "bundle, that only its owner can write to or exchange"
        )
    trust(status.st_uid)


def _is_bundle(path: str) -> bool:
    from kcache.bundle.reader import is_bundle

    try:
        return is_bundle(path)
    except OSError as error:
        raise BackendError(f"layer {path}: {error.strerror}") from error


def _require_safe_path(directory: str) -> None:
    problem = unsafe_part(directory)
    if problem:
        raise ConfigError(
            f"directory={directory!r} is not safe: {problem}, and could put something else in its "
            "place, so its kernels can't be trusted; allowed: a directory below directories that "
            "belong to you or to root, and that nobody else can write to"
        )


def _is_marked_cache(directory: str) -> bool:
    """Tell whether a directory is marked; one that is neither empty nor a cache is refused.

    Raises:
        ConfigError: it is none of ours.
        OSError: it can't be looked at.
    """
    try:
        if is_marked(directory):
            return True
        if not is_empty(directory):
            name = _stranger(directory)
            if name:
                problem = marker_problem(directory)
                reason = (
                    f"its {NAME!r} is {problem}"
                    if problem
                    else (f"it has {name!r} in it, and no {NAME!r} of kcache's")
                )
                raise ConfigError(
                    f"directory={directory!r} is no cache: {reason}. Nothing in it was changed; "
                    "allowed: a directory that is new or empty, or that kcache made. Name another "
                    f"(KCACHE_DIR, directory=, --directory), such as "
                    f"{os.path.join(directory, 'kcache')!r}"
                )
    except NotOursError as error:
        raise ConfigError(f"directory={directory!r} is not allowed: {error.strerror}") from error
    return False


def _stranger(directory: str) -> str:
    """Return the name of something that is not ours; empty if nothing is.

    It looks more than once before it refuses the directory, because another process may be making
    the cache at the same time, or writing into one that somebody removes.
    """
    from kcache.adoption import stranger  # few calls need it

    name = stranger(directory, _TAG)
    for _ in range(_LOOKS):
        if not name or is_marked(directory):
            return ""
        time.sleep(_PAUSE)
        name = stranger(directory, _TAG)
    return name


def _check_owner(directory: str, status: os.stat_result) -> None:
    user = present_user()
    if status.st_uid != user:
        raise ConfigError(
            f"directory={directory!r} belongs to user {status.st_uid}, and you are user {user}: "
            "its kernels can't be trusted; allowed: a directory of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"directory={directory!r} can be written to by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}), so its kernels can't be trusted; "
            f"allowed: mode 0700 or 0755 (chmod go-w {directory})"
        )


def _tag(directory: str) -> None:
    """Tell backup programs to skip the directory; a failure does not matter."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    file = open_own(CacheDirectory(directory).tag, flags)
    os.write(file.fd, _TAG)
