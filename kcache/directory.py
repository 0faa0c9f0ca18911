"""CacheDirectory: makes and opens a cache's directory, names its files, rejects other directories.

A directory is a cache if it has the file ``kcache.json``, the marker. The marker holds one JSON
object: its format, a random id, and the settings that are saved in the directory::

    {"format": "kcache-directory/1", "id": "5f0c1be90db5a5f7", "settings": {"max_size": "5GiB"}}

kcache writes the marker before any other file, into a directory that is new or empty. So a
directory that has files but no marker belongs to another program, whatever the names of its files
are. kcache writes and deletes nothing in such a directory.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, cast

from kcache.errors import BackendError, ConfigError
from kcache.util.locks import lock, locked_directory, release
from kcache.util.open_file import NotOursError, OwnFile, open_own, owner_problem, replacing
from kcache.util.path_safety import (
    foreign,
    is_ambiguous,
    make_private,
    trusted,
    unsafe_part,
    why_no_user,
)

#: The name of the marker, the file that makes a directory a cache.
MARKER = "kcache.json"
_FORMAT = "kcache-directory/1"
_KIND = _FORMAT.partition("/")[0] + "/"
#: The largest size of ``kcache.json`` in bytes. Each of the eight settings has less than 100.
_MAX_MARKER = 4096
#: The prefix of the names of drafts of ``kcache.json``. A killed process may leave such a file.
_DRAFT = f".{MARKER}."
#: A directory that a new file system has in its root directory.
_LOST_AND_FOUND = "lost+found"
#: The byte of the file `CacheDirectory.slots` that a process locks while it changes the settings,
#: and how many seconds another process waits for this lock. A change takes 10 ms.
_LOCKED, _PATIENCE = 1 << 20, 10.0
#: How many seconds a process waits for another one that is making the same directory a cache.
_MAKING = 1.0
#: How often a directory is examined before it is regarded as another program's, and the pause
#: between two examinations in seconds.
_LOOKS, _PAUSE = 3, 0.01
#: The byte that a process locks while it renames a damaged file. It lies beyond the content of any
#: file of kcache and beyond the bytes of other locks.
_RENAMING = (1 << 63) - 2
#: How often a damaged file is renamed before the caller gets an error.
_TRIES = 3

#: Lets backup programs leave out the directory. See https://bford.info/cachedir/.
_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This file is a cache directory tag created by kcache.
# For information about cache directory tags, see https://bford.info/cachedir/
"""
_ALLOWED = "expected a directory that is new or empty, or that kcache made"


class CacheDirectory:
    """The paths of all files in a cache's directory, except for those in the folder of the backend.

    A CacheDirectory is immutable. No other module puts such a path together.

    Args:
        path: the path of the directory, as messages show it.
        settings: maps the names of the settings that are saved in the directory to their values, as
            text; empty if the settings were not read.

    Attributes:
        marker: the file that makes the directory a cache and has its settings.
        stats: the file with the counts of all processes; see `engine.stats.StatsFile`.
        journal: the file that records why entries left the cache; see `engine.journal.Journal`.
        old_journal: the name that `journal` gets when it is full and a new journal is begun.
        flight: the file in which a process locks a byte for each key whose value it makes; see
            `engine.single_flight`.
        slots: the file in which a process locks a byte for each compile that it runs, which limits
            the number of concurrent compiles; see `nvrtc.workers.slots`.
        tag: the file that makes backup programs leave out the directory.
    """

    def __init__(self, path: str, settings: Mapping[str, object] | None = None) -> None:
        self.path = path
        self.settings = settings or {}
        self.marker = f"{path}/{MARKER}"
        self.stats = f"{path}/stats"
        self.journal = f"{path}/journal"
        self.old_journal = f"{path}/journal.1"
        self.flight = f"{path}/flight"
        self.slots = f"{path}/slots"
        self.tag = f"{path}/CACHEDIR.TAG"

    def backend(self, name: str) -> str:
        """Return the folder of the backend called `name`."""
        return f"{self.path}/{name}"


# -- opening ---------------------------------------------------------------------------------------


def open_directory(path: str, *, read_only: bool = False) -> CacheDirectory:
    """Return the cache's directory at `path`.

    Unless `read_only`, a missing directory is made, and a new or empty directory becomes a cache.
    Compiled kernels are code: a user who can write to the directory, or replace it, can make every
    program that uses the cache run other code. So a directory that belongs to another user, or that
    other users can write to, is rejected, and so is a directory below such a directory. If kcache
    makes the directory or its parents, only the present user can access them.

    Processes: several processes may make the same directory at the same time. Crash: a killed
    process leaves either an empty directory or a cache.

    Raises:
        ConfigError: `path` is not a directory, is unsafe, or belongs to another user or program.
            Nothing was changed.
        BackendError: the directory can't be examined, or it does not exist and can't be made (for
            example because the file system is read-only), or the present user has no id of their
            own in this user namespace.
    """
    path = os.path.abspath(path)
    if problem := why_no_user():
        raise BackendError(f"directory {path}: {problem}")
    try:
        _require_safe_path(path)
        made = not read_only and make_private(path)
        if not read_only:
            _require_safe_path(path)  # another process may have created it in the meantime
        _require_own(path, os.stat(path))
        about = None if made else _marker_in(path)
        if about is None and not read_only:
            about = _make_cache(path)
            with suppress(OSError):  # only backup programs need it
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with open_own(CacheDirectory(path).tag, flags) as tag:
                    os.write(tag.fd, _TAG)
        return CacheDirectory(path, about and about["settings"])
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"directory: expected a directory, got {path!r}, but either this path or one of its "
            "parents is a file"
        ) from error
    except NotOursError as error:
        raise ConfigError(
            f"directory={path!r} is not a cache: {error.strerror}. Nothing in the directory was "
            f"changed; {_ALLOWED}. Name another directory (KCACHE_DIR, directory=, --directory), "
            f"such as {os.path.join(path, 'kcache')!r}"
        ) from error
    except OSError as error:
        raise BackendError(f"directory {path}: {error.strerror}") from error


def is_usable(path: str) -> bool:
    """Return whether `open_directory` would succeed for `path`. This changes nothing."""
    try:
        open_directory(path, read_only=True)
    except ConfigError:
        return False
    except BackendError:
        if os.path.lexists(path) or why_no_user():
            return False
        above = os.path.dirname(path)
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        effective = os.access in os.supports_effective_ids
        return os.access(above, os.W_OK | os.X_OK, effective_ids=effective)
    return True


def claim(folder: str) -> None:
    """Make a backend's folder, unless it exists, and check that kcache may write to it.

    If the directory of the cache that contained `folder` was removed or emptied, it is made a cache
    again. If `folder` is not in a cache's directory and is empty, it becomes a cache itself.

    Raises:
        NotOursError: other users could change the folder, or it has files of another program.
            Nothing was changed.
        OSError: the folder can't be examined or made.
    """
    if not os.path.isdir(folder):
        around = os.path.dirname(folder)
        if make_private(around) or not _others_in(around):
            _make_cache(around)
        make_private(folder)
    if problem := foreign(os.stat(folder)):
        raise NotOursError(f"it can't be trusted: {problem}", folder)
    if os.path.islink(folder):  # its target is not in the cache, whoever made the link
        folder = os.path.realpath(folder)
    if _marker_in(folder, os.path.dirname(folder)) is None:
        _make_cache(folder)


def open_file_of_cache(path: str, flags: int, is_sound: Callable[[OwnFile], bool]) -> OwnFile:
    """Open the file of a cache at `path` for writing; replace a damaged file by a new one.

    A damaged file is renamed: `.damaged` is appended to its name. It is not deleted, because
    another program may have written it. If the directory was emptied while the cache was open, the
    marker is written again.

    Args:
        path: the path of the file, which is created if it does not exist.
        flags: the same flags as for `os.open`.
        is_sound: returns whether the opened file is new or was written by kcache; otherwise, the
            file is damaged.

    Raises:
        NotOursError: either `path` is not a regular file with one name that the present user owns,
            or the file is damaged and its directory has no marker. In these cases, nothing was
            changed. Or the file is still damaged after several attempts to replace it.
        OSError: the file can't be opened or renamed.
    """
    folder = os.path.dirname(path)
    if not os.path.lexists(path):
        with suppress(OSError):  # the folder does not exist, or can't be marked
            if not _others_in(folder):
                _make_cache(folder)
    for _ in range(_TRIES):
        file = open_own(path, flags | os.O_CREAT)
        if is_sound(file):
            return file
        if not os.path.lexists(os.path.join(folder, MARKER)):
            raise NotOursError(
                f"it is not a file of kcache, and its directory has no {MARKER}", path
            )
        # Several processes may find the damage. One of them renames the file, and the others then
        # open the new file.
        lock(file, _RENAMING, timeout=1.0)
        if file.is_at(path):
            _set_aside(path)
        file.close()
    raise NotOursError(
        f"it is still not a file of kcache after {_TRIES} attempts to replace it", path
    )


def _set_aside(path: str) -> None:
    """Rename a damaged file: append `.damaged` to its name.

    Raises:
        NotOursError: the new name is taken by something other than a regular file of the present
            user.
        OSError: the file can't be renamed.
    """
    aside = f"{path}.damaged"
    with suppress(FileNotFoundError):
        if problem := owner_problem(os.stat(aside, follow_symlinks=False)):
            raise NotOursError(f"it is {problem}", aside)
    os.rename(path, aside)


def _require_safe_path(path: str) -> None:
    problem = unsafe_part(path)
    if problem:
        raise ConfigError(
            f"directory={path!r} is not safe: {problem}. So another user could replace the "
            "directory, and its kernels can't be trusted; expected a directory whose parents "
            "belong to you or to root, and that no other user can write to"
        )


def _require_own(path: str, status: os.stat_result) -> None:
    """Raise an error unless `path` is a directory that only the present user can write to.

    Raises:
        ConfigError: another user owns the directory or can write to it.
        NotADirectoryError: `path` is not a directory.
    """
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError
    if problem := foreign(status, layers=()):
        raise ConfigError(
            f"directory={path!r} is not safe: {problem}, so its kernels can't be trusted; expected "
            f"a directory of your own with mode 0700 or 0755 (chmod go-w {path})"
        )


def require_safe_layer(path: str) -> None:
    """Check that a layer is safe to read; from now on, this process trusts kernels of its owner.

    By naming the layer, the user trusts its owner, for example root, who made a container image, or
    a user who maintains kernels for others. Other users must not be able to write to the layer or
    to replace it.

    Args:
        path: the path of the layer: the directory of a cache, or a bundle.

    Raises:
        ConfigError: users other than the owner can write to the layer or replace it, or `path` is
            neither the directory of a cache nor a file.
        BackendError: the layer does not exist, or can't be examined.
    """
    try:
        status = os.stat(path)
        problem = unsafe_part(path, status.st_uid)
    except OSError as error:
        raise BackendError(f"layer {path}: {error.strerror}") from error
    is_folder = stat.S_ISDIR(status.st_mode)
    if is_ambiguous(status.st_uid):
        problem = f"its owner {status.st_uid} may be any user without an id in this user namespace"
    elif not is_folder and not stat.S_ISREG(status.st_mode):
        problem = "it is neither a directory nor a file"
    elif sys.platform != "win32" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    elif is_folder and not os.path.isfile(CacheDirectory(path).marker):
        problem = f"it is not a cache: it has no {MARKER}"
    if problem:
        raise ConfigError(
            f"layer {path!r} is not allowed: {problem}; expected the directory of a cache, or a "
            "bundle, that only its owner can write to or replace"
        )
    trusted.add(status.st_uid)


# -- kcache.json -----------------------------------------------------------------------------------


def change_settings(files: CacheDirectory, change: Callable[[dict[str, object]], None]) -> None:
    """Change the settings that are saved in a cache's directory.

    Processes: if two processes change settings at the same time, both changes are saved. Crash: a
    killed process leaves either the old settings or the new settings.

    Args:
        files: the cache's directory.
        change: is called with the saved settings and changes them in place. If it raises an
            exception, nothing is saved, and the exception is passed on.

    Raises:
        ConfigError: the changed settings are too long to be saved.
        BackendError: ``kcache.json`` can't be written, or is not a marker file of kcache.
    """
    try:
        with open_own(files.slots, os.O_RDWR | os.O_CREAT) as file:
            lock(file, _LOCKED, timeout=_PATIENCE)
            about = _read_marker(files.path)
            if about is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), files.marker)
            change(about["settings"])
            _write_marker(files.path, about)
            release(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BackendError(f"{files.marker} can't be changed: {reason}") from error


def _marker_in(directory: str, around: str | None = None) -> dict[str, Any] | None:
    """Return the content of the marker, or None if the directory is empty.

    Args:
        directory: the directory that should have a marker or be empty.
        around: the parent of the directory. If the parent has a marker, the directory needs none.

    Raises:
        NotOursError: the directory belongs to another program.
        OSError: the directory or its marker can't be read.
    """
    others: list[str] = []
    for _ in range(_LOOKS):
        about = (around and _read_marker(around)) or _read_marker(directory)
        if about or not (others := _others_in(directory)):
            return about
        time.sleep(_PAUSE)  # another process may be writing the marker, or removing the cache
    raise NotOursError(f"it contains {others[0]!r} but no {MARKER!r} of kcache", directory)


def _make_cache(directory: str) -> dict[str, Any]:
    """Write the marker into an empty directory, unless another process has; return its content.

    Raises:
        OSError: the marker can't be written.
    """
    with ExitStack() as stack:
        # After a time-out, continue without the lock: a stopped process may hold it, and has stored
        # nothing yet that could get lost.
        with suppress(OSError):
            stack.enter_context(locked_directory(directory, _MAKING))
        about = _read_marker(directory)
        if about is None:
            about = {"format": _FORMAT, "id": os.urandom(16).hex(), "settings": {}}
            _write_marker(directory, about)
    return about


def _others_in(directory: str) -> list[str]:
    """Return the names of the files in a directory, except `lost+found` and drafts of the marker.

    If no names are left, the directory counts as empty.
    """
    names = os.listdir(directory)
    return [n for n in names if n != _LOST_AND_FOUND and not n.startswith(_DRAFT)]


def _read_marker(directory: str) -> dict[str, Any] | None:
    """Return the content of the marker in a directory, or None if there is no ``kcache.json``.

    The content always has a dictionary under `settings`, which may be empty.

    Raises:
        NotOursError: ``kcache.json`` is not a marker file of this version of kcache.
        OSError: ``kcache.json`` can't be read.
    """
    path = os.path.join(directory, MARKER)
    try:
        with open_own(path, os.O_RDONLY) as file:
            found: object = json.loads(os.read(file.fd, _MAX_MARKER))
    except FileNotFoundError:
        return None
    except NotOursError as error:
        reason = str(error.strerror).removeprefix("it ")
        raise NotOursError(f"its {MARKER!r} {reason}", path) from error
    except (ValueError, RecursionError) as error:
        raise NotOursError(
            f"its {MARKER!r} is not a marker file of kcache (it is not valid JSON)", path
        ) from error
    about = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    form = about.get("format")
    if isinstance(form, str) and form.startswith(_KIND) and form != _FORMAT:
        raise NotOursError(
            f"its {MARKER!r} was written by another version of kcache (format {form[:40]!r})", path
        )
    if form != _FORMAT or not isinstance(about.setdefault("settings", {}), dict):
        raise NotOursError(f"its {MARKER!r} is not a marker file of kcache", path)
    return about


def _write_marker(directory: str, about: Mapping[str, object]) -> None:
    """Write `about` as ``kcache.json`` into a directory, atomically.

    Raises:
        ConfigError: the file would be larger than `_MAX_MARKER` bytes.
        OSError: the file can't be written (because the file system is full, for example).
    """
    data = (json.dumps(about) + "\n").encode()
    if len(data) > _MAX_MARKER:
        raise ConfigError(
            f"the settings are too large to be saved in {MARKER}: expected at most {_MAX_MARKER} "
            f"bytes, got {len(data)}"
        )
    path = os.path.join(directory, MARKER)
    with replacing(path, 0o600) as draft, open_own(draft, os.O_WRONLY) as file:
        if os.write(file.fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), draft)
        os.fsync(file.fd)
