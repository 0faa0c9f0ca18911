"""CacheManager: kcache as the cache of Triton, by one variable or one call.

    TRITON_CACHE_MANAGER=kcache.integrations.triton:CacheManager

Triton stores the files of a kernel one by one, and then names them as a group. kcache stores a
group as one entry. On a hit, its files are written into `TRITON_CACHE_DIR` in Triton's own layout,
where Triton and Inductor read them; see `LocalFiles` for the cap of that directory.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from functools import cache
from typing import cast

from triton.runtime.cache import FileCacheManager

from kcache.integrations.engine_entries import EngineEntries
from kcache.integrations.local_files import MAX_NOTE, LocalFiles, is_name, read
from kcache.util import log

try:
    from triton import knobs
except ImportError:  # before 3.4
    knobs = None

from kcache.entry import Entry

#: Beginnings of the names of two files that list the files of a group: Triton's list, which
#: Inductor reads too, and kcache's list.
_GROUP, _STAMP = "__grp__", "__kcache__"
#: A use of an entry is recorded at most once in this many seconds. The second number is the maximum
#: number of entries whose last recorded use is remembered.
NOTE_AGAIN, _MOST_NOTED = 10.0, 4096
_METHODS = {
    "get_file": ["self", "filename"],
    "put": ["self", "data", "filename", "binary"],
    "get_group": ["self", "filename"],
    "put_group": ["self", "filename", "group"],
}


class _Shared:
    """The cache and the local files, which all managers of a process share."""

    def __init__(self) -> None:
        self.entries = EngineEntries("triton/1")
        self._files: dict[str, LocalFiles] = {}
        self._noted: dict[str, float] = {}

    def files(self, directory: str) -> LocalFiles:
        """Return the `LocalFiles` of a directory, the same object at each call."""
        if directory not in self._files:
            self._files[directory] = LocalFiles(directory, self.entries.engine.max_size)
        return self._files[directory]

    def is_due(self, key: str) -> bool:
        """Return whether to record a use of an entry now; at most once in `NOTE_AGAIN` seconds."""
        now = time.monotonic()
        if now < self._noted.get(key, 0.0):
            return False
        if len(self._noted) >= _MOST_NOTED:
            self._noted.clear()
        self._noted[key] = now + NOTE_AGAIN
        return True


#: Returns what the managers of this process share. Two threads that call it first at the same time
#: may get two objects, which both work.
_open = cache(_Shared)
#: The value of Triton's knob before `install`; None if it was not set.
_before: type[FileCacheManager] | None = None


def _problem() -> str:
    """Return how Triton's interface differs from the supported one, or an empty text."""
    if knobs is None:
        return "it has no triton.knobs"
    for name, wanted in _METHODS.items():
        method = getattr(FileCacheManager, name, None)
        found = [] if method is None else list(inspect.signature(method).parameters)
        if found != wanted:
            given = ", ".join(found) or "none"
            return f"parameters of {name}: expected {', '.join(wanted)}, got {given}"
    return ""


class _Manager(FileCacheManager):  # type: ignore[misc]
    """Finds and stores groups of files in kcache, and other files as Triton does.

    If kcache fails during a call, the call uses Triton's own cache.

    Threads: no manager is shared, because Triton makes one for each compile. Processes: any number
    may share the cache. Crash: after a process was killed, a group is either complete or absent.

    Args:
        key: Triton's key, which covers everything that a compile depends on.
        override, dump: the same arguments as those of `FileCacheManager`.
    """

    def __new__(cls, key: str, override: bool = False, dump: bool = False) -> FileCacheManager:
        """Return Triton's own manager if Triton overrides or dumps, or the cache is disabled."""
        if override or dump or _open().entries.disabled:
            return FileCacheManager(key, override=override, dump=dump)
        return super().__new__(cls)

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._put: dict[str, bytes] = {}
        self._shared = _open()
        self._entries = self._shared.entries
        self._files = self._shared.files(os.path.dirname(self.cache_dir))

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        """Write a file and remember its content for `put_group`; return its path.

        An unchanged file of a complete group is not written again, because other processes may be
        reading it.
        """
        content = data if isinstance(data, bytes) else str(data).encode()
        self._put[filename] = content
        try:
            if not self._replaces() and self._is_stamped(filename):
                return str(self._make_path(filename))
            return self._files.write(self.key, {filename: content})[filename]
        except Exception as error:
            _warn("put", error)
            return str(super().put(data, filename, binary=binary))

    def get_group(self, filename: str) -> object:
        """Return name -> path for the files of a group, all from one compile, or None on a miss."""
        if not self._entries.reads:
            return None
        try:
            return self._stamped(filename) or self._from_cache(filename)
        except Exception as error:
            _warn("get_group", error)
            return super().get_group(filename)

    def put_group(self, filename: str, group: dict[str, str]) -> object:
        """Store the files of a group as one entry; return the path of the file `filename`."""
        try:
            payload = {name: self._content(name, path) for name, path in group.items()}
            key = self._entry_key(filename)
            entry = self._entries.settle(key, payload, "triton", replaces=self._replaces())
            return self._materialise(filename, entry)[filename]
        except Exception as error:
            _warn("put_group", error)
            return super().put_group(filename, group)

    def _replaces(self) -> bool:
        """Return whether a new group replaces a stored one."""
        return bool(knobs.compilation.always_compile) or not self._entries.reads

    def _from_cache(self, filename: str) -> dict[str, str] | None:
        entry = self._entries.get(self._entry_key(filename))
        if entry is None or not all(map(is_name, entry.payload)):
            return None
        return self._materialise(filename, entry)

    def _materialise(self, filename: str, entry: Entry) -> dict[str, str]:
        """Write the files of a group; return name -> path.

        Triton's list of the files is written after them, and kcache's list last.
        """
        paths = self._files.write(self.key, entry.payload)
        note = json.dumps({"child_paths": paths}).encode()
        self._files.write(self.key, {_GROUP + filename: note})
        stamp = {name: _identity(path) for name, path in paths.items()}
        noted = json.dumps({"seconds": entry.cost, "files": stamp}).encode()
        self._files.write(self.key, {_STAMP + filename: noted})
        return paths

    def _stamped(self, filename: str) -> dict[str, str] | None:
        """Return name -> path for a group whose files were not changed after kcache wrote them.

        The group is counted as a hit. If a file is missing or was changed, the result is None.
        """
        seconds, stamp = self._stamp(filename)
        folder = self.cache_dir
        paths = {name: f"{folder}/{name}" for name in stamp}
        if not stamp or any(_identity(paths[name]) != stamp[name] for name in stamp):
            return None
        key = self._entry_key(filename)
        self._entries.count_hit(key, seconds)
        if self._shared.is_due(key):
            self._files.use(self.key)
            self._entries.touch(key)
        return paths

    def _is_stamped(self, filename: str) -> bool:
        """Return whether a file belongs to a complete group and is unchanged."""
        found = _identity(str(self._make_path(filename)))
        stamps = (name for name in os.listdir(self.cache_dir) if name.startswith(_STAMP))
        groups = (self._stamp(name.removeprefix(_STAMP))[1] for name in stamps)
        return found is not None and any(group.get(filename) == found for group in groups)

    def _stamp(self, filename: str) -> tuple[float, dict[str, object]]:
        """Return the seconds that a hit of a group saves, and name -> identity of its files.

        Both are read from kcache's list; without a usable list, they are 0.0 and empty.
        """
        try:
            noted = json.loads(read(str(self._make_path(_STAMP + filename)), MAX_NOTE) or b"")
            return float(noted["seconds"]), dict(noted["files"])
        except (ValueError, KeyError, TypeError):
            return 0.0, {}

    def _entry_key(self, filename: str) -> str:
        return self._entries.key_of(f"{self.key}/{filename}".encode())

    def _content(self, name: str, path: str) -> bytes:
        if name in self._put:
            return self._put[name]
        with open(path, "rb") as file:
            return file.read()


def _identity(path: str) -> list[int] | None:
    """Return inode, size and mtime of a file, which change when it is replaced or written."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _warn(method: str, error: Exception) -> None:
    kind = type(error).__name__
    log.warning_once(
        f"{method} of kcache's CacheManager failed ({kind}: {error}); Triton's own cache is used"
    )


def _choose() -> type[FileCacheManager]:
    """Return `_Manager`, or Triton's own class if its interface is unknown."""
    problem = _problem()
    if not problem:
        return _Manager
    log.warning_once(
        f"this version of Triton is not supported ({problem}); Triton's own cache is used"
    )
    return cast("type[FileCacheManager]", FileCacheManager)


#: The class that `TRITON_CACHE_MANAGER` names.
CacheManager = _choose()


def install() -> None:
    """Make Triton use kcache in this process; `uninstall` undoes it."""
    global _before  # noqa: PLW0603
    if knobs.cache.manager_class is not CacheManager:
        _before = vars(knobs.cache).get("manager_class")
        knobs.cache.manager_class = CacheManager


def uninstall() -> None:
    """Make Triton use the cache that it used before `install`."""
    if vars(knobs.cache).get("manager_class") is CacheManager:
        del knobs.cache.manager_class
        if _before is not None:
            knobs.cache.manager_class = _before
