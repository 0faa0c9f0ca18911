"""Library: finds the NVRTC library of this machine, and identifies its code.

The identity of a compiler consists of the GNU build ids of libnvrtc and of its builtins library.
The version would not suffice, because patch releases generate different code but report the same
version. The build ids are read from the files without loading them, so that a cache hit starts no
compiler.
"""

from __future__ import annotations

import os
import re
import site
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import xxhash

from kcache import environment
from kcache.errors import CompilerNotFoundError
from kcache.util.hints import how_to_install

#: Where the wheels put the library, below a site-packages directory. The newest comes first, as in
#: cuda.pathfinder.
_WHEELS = (
    ("nvidia/cu13/lib", "libnvrtc.so.13"),
    ("nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"),
    ("nvidia/cu13/bin/x86_64", "nvrtc64_130_0.dll"),
    ("nvidia/cuda_nvrtc/bin", "nvrtc64_120_0.dll"),
)
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
#: Matches the first mapping of a file of NVRTC in /proc/self/maps: its start address and its path.
_MAPPED = re.compile(
    rb"^([0-9a-f]+)-[0-9a-f]+ \S+ 0+ \S+ \d+ +(/[^\n]*/libnvrtc[^/\n]*\.so[^/\n]*)\n", re.MULTILINE
)
_BUILTINS = ("libnvrtc-builtins", "nvrtc-builtins64_")
_PT_NOTE = 4
#: The variable that names a conda environment, the variables that name a CUDA toolkit, and the
#: default directory of a toolkit.
CONDA, TOOLKITS, TOOLKIT = "CONDA_PREFIX", ("CUDA_PATH", "CUDA_HOME"), "/usr/local/cuda"
HOW_TO_INSTALL = f"{how_to_install('cu13')} (CUDA 12: cu12)"


class Library(NamedTuple):
    """A libnvrtc file.

    Attributes:
        path: real path of the file.
        identity: text that differs whenever the compiler's code differs.
    """

    path: str
    identity: str


def find() -> Library | None:
    """Return the library that a compile would use, without loading it, or None if none is found.

    The order of the search is that of cuda.pathfinder: a library that this process has loaded,
    wheels, conda, the loader's path, `CUDA_PATH`. In case the file is replaced before a worker
    loads it, the worker reports the identity of the library that it has loaded.
    """
    return loaded() or next(map(at, _candidates()), None)


def require() -> Library:
    """Return the library that a compile would use, without loading it.

    Raises:
        CompilerNotFoundError: NVRTC is not installed.
    """
    found = find()
    if found is None:
        raise CompilerNotFoundError(f"NVRTC was not found: {HOW_TO_INSTALL}")
    return found


def loaded() -> Library | None:
    """Return the NVRTC library that this process has loaded, or None if there is none.

    On other systems than Linux, the result is always None.
    """
    path = _loaded_path()
    return None if path is None else at(path)


def at(path: str) -> Library:
    """Return the path and the identity of the library file at `path`, without loading it."""
    real = os.path.realpath(path)
    folder, builtins = os.path.dirname(real), list[str]()
    with suppress(OSError):
        builtins = sorted(name for name in os.listdir(folder) if name.startswith(_BUILTINS))
    parts = (_part(each) for each in (real, *(os.path.join(folder, name) for name in builtins)))
    return Library(real, "nvrtc " + " ".join(parts))


def mapped() -> dict[str, int]:
    """Return a mapping path -> start address of the NVRTC files that this process has mapped."""
    try:
        with open("/proc/self/maps", "rb") as file:
            maps = file.read()
    except OSError:
        return {}
    return {
        os.fsdecode(match[2].removesuffix(b" (deleted)")): int(match[1], 16)
        for match in _MAPPED.finditer(maps)
    }


def _loaded_path() -> str | None:
    """Return the path of the loaded library that compiles, or None if none is loaded.

    Several may be loaded, because other packages may bring their own NVRTC.
    """
    paths = [path for path in mapped() if not os.path.basename(path).startswith(_BUILTINS)]
    if not paths:
        return None
    pathfinder = sys.modules.get("cuda.pathfinder")
    if len(paths) > 1 and pathfinder is not None and "cuda.bindings.nvrtc" in sys.modules:
        with suppress(Exception):  # its own exceptions, which differ by version
            return str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    for name in _NAMES:  # dlopen finds a loaded library by its name, in this order
        for path in paths:
            if os.path.basename(path).startswith(name):
                return path
    return None


def _candidates() -> Iterator[str]:
    for folder, name in _WHEELS:
        for entry in site_packages():
            path = os.path.join(entry, folder, name)
            if os.path.isfile(path):
                yield path
    yield from _in(os.path.join(prefix, "lib") for prefix in environment.values(CONDA))
    yield from _in(filter(None, (environment.variable("LD_LIBRARY_PATH") or "").split(os.pathsep)))
    yield from _loader_cache()
    for root in (*environment.values(*TOOLKITS), TOOLKIT):
        folders = ("lib64", "lib", "targets/x86_64-linux/lib")
        yield from _in(os.path.join(root, folder) for folder in folders)


def _in(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        for name in _NAMES:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                yield path


def site_packages() -> list[str]:
    """Return the directories that cuda.pathfinder searches for wheels, a part of `sys.path`."""
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        # After the site-packages of the virtual environment, or before all others if there is none.
        folders.insert(int(sys.prefix != sys.base_prefix), site.getusersitepackages())
    return folders


def _loader_cache() -> Iterator[str]:
    """Yield the paths of NVRTC libraries that the dynamic loader's cache has and that exist.

    The strings in this cache are NUL-terminated.
    """
    try:
        with open("/etc/ld.so.cache", "rb") as file:
            cache = file.read()
    except OSError:
        return
    for name in _NAMES:
        for match in re.finditer(rb"(/[^\0]*/" + re.escape(name.encode()) + rb")\0", cache):
            path = os.fsdecode(match[1])
            if os.path.isfile(path):
                yield path


def _part(path: str) -> str:
    """Return the build id of a shared library, or a digest of its content if it has none.

    If the file can't be read, the result is a text that differs from all other identities.
    """
    try:
        status = os.stat(path)
        stamp = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        return _identity(path, *stamp)
    except OSError:  # it was removed
        return f"unknown {os.getpid()} {time.time_ns()}"


@cache
def _identity(path: str, *_: int) -> str:
    found = build_id(path)
    if found is not None:
        return found
    # The builtins library of NVRTC 13.5 for AArch64 has no build id, so a hit reads 7 MB here. XXH3
    # is used, as for headers, because SHA-256 takes several times as long.
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return "xxh3:" + digest.hexdigest()


def build_id(path: str) -> str | None:
    """Return the GNU build id of a 64-bit little-endian ELF file, or None if there is none.

    The build id is in a note segment (ELF gABI, "Note Section"). Its note has the type
    `NT_GNU_BUILD_ID`, which is 3, and the owner `GNU`.
    """
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            return None
        (offset,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        if size < 56:
            return None
        file.seek(offset)
        table = file.read(size * count)
        for at in range(0, len(table) - 55, size):
            kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", table, at)
            if kind == _PT_NOTE:
                file.seek(start)
                found = _note(file.read(min(length, 1 << 16)))
                if found is not None:
                    return found
    return None


def _note(notes: bytes) -> str | None:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name_end = at + 12 + name_size
        start = (name_end + 3) & ~3
        if kind == 3 and notes[at + 12 : name_end] == b"GNU\0":
            return notes[start : start + size].hex()
        at = (start + size + 3) & ~3
    return None
