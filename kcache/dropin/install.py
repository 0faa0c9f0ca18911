"""Install: puts the drop-in into a Python program that already runs."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from typing import TYPE_CHECKING

from kcache.dropin import environment as env
from kcache.dropin import libraries
from kcache.errors import CompilerNotFoundError, DropinError
from kcache.util.child_process import without_dropin

if TYPE_CHECKING:
    from kcache.nvrtc.library import Library

_MAJOR = re.compile(r"libnvrtc\.so\.(\d+)")
_lock = threading.Lock()
_installed: list[str] = []


def install() -> None:
    """Answer all calls of NVRTC in this process from the cache, for CuPy, torch and others.

    Call this before the first use of NVRTC. For most packages, you may import them first. A second
    call does nothing, and a call under `kcache run` does nothing, either. Some packages open NVRTC
    by an absolute path, even if it is loaded already. Only `kcache run` reaches these packages.

    Threads: safe. Fork: the child uses the same server, which ends with this process.

    Raises:
        DropinError: it is too late, this is not Linux, or the interface library is missing; the
            message says what to do.
        CompilerNotFoundError: NVRTC is not installed.
    """
    with _lock:
        environment = env.current()
        if _installed or environment.get(env.SOCKET):
            return
        try:
            folder = libraries.find(environment)
        except libraries.MissingError as error:
            raise DropinError(str(error)) from error
        library = _library()
        _load(folder, library)
        _installed.append(library.path)


def _library() -> Library:
    """Return the NVRTC that this program would use.

    Raises:
        DropinError: the program uses NVRTC already; CompilerNotFoundError: there is no NVRTC.
    """
    from kcache.nvrtc import library

    loaded = library.loaded()
    if loaded is not None:
        raise DropinError(
            f"kcache.install() comes too late: {loaded.path} is loaded; call it before anything "
            "uses NVRTC, or start the program with `kcache run`"
        )
    found = library.find()
    if found is None:
        raise CompilerNotFoundError("NVRTC is not installed, so there is nothing to replace")
    return found


def _load(folder: str, library: Library) -> None:
    from kcache.dropin.build import name
    from kcache.service import start

    match = _MAJOR.match(os.path.basename(library.path))
    path = os.path.join(folder, name(int(match[1]))) if match else ""
    if not os.path.isfile(path):
        raise DropinError(f"there is no interface library for {library.path}")
    try:
        interface = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        # First of all: the program's calls go to the interface library from now on, and it must
        # know the real one even if a later step fails.
        interface.kcache_dropin_set_real(os.fsencode(library.path))
        variables = without_dropin(env.current())
        folder = start.folder_in(start.runtime_folders(variables))
        service = env.service(variables)
        speaks = bool(env.settings(variables))
        socket = start.path_for_one(folder, service)
        start.begin(socket, service, variables, watched=os.getpid(), speaks=speaks)
    except (OSError, ValueError) as error:
        raise DropinError(f"the drop-in can't be started: {error}") from error
    interface.kcache_dropin_set_server(os.fsencode(socket))
