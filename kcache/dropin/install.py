"""Install: `kcache.install`, which replaces NVRTC by the drop-in in a running program."""

from __future__ import annotations

import ctypes
import os
import re
import threading

from kcache.daemons import spawn
from kcache.dropin import libraries
from kcache.dropin import run_environment as env
from kcache.dropin.build import name
from kcache.errors import CompilerNotFoundError, DropinError
from kcache.nvrtc import library

_installing = threading.Lock()
#: Empty, or the path of the NVRTC that was replaced in this process.
_installed: list[str] = []


def install() -> None:
    """Answer all calls of NVRTC in this process from the cache, for CuPy, torch and others.

    Call this before the first use of NVRTC. Most packages that use NVRTC may be imported before. A
    second call, or a call under `kcache run`, does nothing. Some packages open NVRTC by an absolute
    path, even if another NVRTC is loaded. Only `kcache run` can answer the calls of these packages.

    Threads: any thread may call this. Fork: a child process uses the same daemon. The daemon exits
    when this process exits; from then on, the child process uses the real NVRTC.

    Raises:
        DropinError: NVRTC is already loaded, this is not Linux, the interface library is missing
            and can't be built, or kcache's server can't be started.
        CompilerNotFoundError: NVRTC is not installed.
    """
    with _installing:
        environment = env.current()
        if _installed or environment.get(env.SOCKET):
            return
        try:
            folder = libraries.find(environment)
        except libraries.MissingError as error:
            raise DropinError(str(error)) from error
        found = _library()
        _load(folder, found)
        _installed.append(found.path)


def _library() -> library.Library:
    """Return the NVRTC that this program would use.

    Raises:
        DropinError: NVRTC is already loaded; CompilerNotFoundError: NVRTC is not installed.
    """
    loaded = library.loaded()
    if loaded is not None:
        raise DropinError(
            f"kcache.install() comes too late: {loaded.path} is already loaded; call "
            "kcache.install() before anything uses NVRTC, or start the program with `kcache run`"
        )
    found = library.find()
    if found is None:
        raise CompilerNotFoundError("NVRTC is not installed, so there is nothing to replace")
    return found


def _load(folder: str, found: library.Library) -> None:
    match = re.match(r"libnvrtc\.so\.(\d+)", os.path.basename(found.path))
    path = os.path.join(folder, name(int(match[1]))) if match else ""
    if not os.path.isfile(path):
        raise DropinError(f"kcache has no library that can replace {found.path}")
    try:
        interface = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        # This comes first: the program's calls go to the interface library from now on, which must
        # know the real NVRTC even if a later step fails.
        interface.kcache_dropin_set_real(os.fsencode(found.path))
        variables = env.of_service(env.current())
        logs = bool(env.settings(variables))
        socket = spawn.spawn_own(env.service(variables), variables, logs=logs)
    except (OSError, ValueError) as error:
        raise DropinError(f"kcache's server can't be started: {error}") from error
    interface.kcache_dropin_set_server(os.fsencode(socket))
