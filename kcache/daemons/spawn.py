"""Spawn: starts daemons. Programs with the same settings find the same daemon by its name.

The launcher of `kcache run` imports this module before the program starts, so this module imports
little.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from contextlib import suppress

from kcache._version import __version__
from kcache.daemons.sockets import above_standard, bound, connected, folder_in, require_private
from kcache.util.child_process import ISOLATED, children_are_elsewhere
from kcache.util.forks import importing
from kcache.util.locks import locked_directory
from kcache.util.wire import heading

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    import _socket
    from collections.abc import Mapping

    Env = Mapping[str, str]

#: The code of the new interpreter. It forks at once, so that the program does not wait until kcache
#: is imported, and so that the daemon is not a child of the program.
_CODE = (
    "import os, sys; os.fork() and os._exit(0); os.setsid(); sys.path[:] = sys.argv[1:]; "
    "from kcache.daemons.daemon_server import main; main()"
)
#: The folder that contains the package `kcache`. Each installation of kcache has its own daemons.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: How many seconds the new interpreter may take until it has forked.
START_TIMEOUT = 20.0
#: How many seconds a program waits while another program starts a daemon. The wait is limited
#: because that program may be stopped.
LOCK_TIMEOUT = 5.0
#: The largest description of a daemon in bytes: a pipe holds as much before anyone reads from it.
_MAX_CONFIG = 1 << 16


class Daemon:
    """The description of a daemon. Immutable.

    Attributes:
        kind: the first part of the name of the daemon's socket.
        module: the module whose function `make` returns the daemon's handlers.
        config: the first argument of `make`, which may contain credentials.
    """

    __slots__ = ("config", "kind", "module")

    def __init__(self, kind: str, module: str, config: bytes) -> None:
        self.kind = kind
        self.module = module
        self.config = config


def name_of(daemon: Daemon) -> str:
    """Return the name of a daemon, by which all programs with the same settings find it."""
    # One installation has several interpreters (`python`, `python3`) in one folder, which share
    # their daemons.
    folder = os.path.realpath(os.path.dirname(sys.executable or "/"))
    parts = (__version__, folder, str(sys.implementation.cache_tag), _ROOT, daemon.module)
    whole = os.fsencode("\0".join(parts)) + b"\0" + daemon.config
    return f"{daemon.kind}-{hashlib.sha256(whole, usedforsecurity=False).hexdigest()[:16]}"


def path_of(daemon: Daemon, environment: Env) -> str:
    """Return the path of the socket at which programs with the same settings find `daemon`.

    The path is absolute, because programs may change their working directory.

    Args:
        daemon: the description of the daemon.
        environment: may name the folder for the socket (`XDG_RUNTIME_DIR`, `TMPDIR`).

    Raises:
        OSError: no folder can be used for the socket.
    """
    named = (environment.get(name, "") for name in ("XDG_RUNTIME_DIR", "TMPDIR"))
    folder = folder_in([*filter(os.path.isabs, named), "/tmp"])
    return os.path.join(folder, name_of(daemon))


def connect_or_spawn(path: str, daemon: Daemon, environment: Env) -> _socket.socket:
    """Return a connection to the daemon at `path`, and start the daemon if it does not run.

    Raises:
        OSError: no daemon runs, and none can be started.
    """
    connection, folder = connected(path), os.path.dirname(path)
    if connection is None:
        require_private(folder)  # a daemon that exited may have removed it
        with locked_directory(folder, LOCK_TIMEOUT):  # its holder starts a daemon, or is stopped
            connection = connected(path)  # another program may have been faster
            if connection is None:
                spawn(path, daemon, environment)
                connection = connected(path)
    if connection is None:
        raise OSError("the daemon was started, but can't be reached")
    return connection


def spawn_own(daemon: Daemon, environment: Env, *, forks: bool = False, logs: bool) -> str:
    """Start a daemon that only this process can find; return the path of its socket.

    The daemon exits when this process does. The arguments have the same meaning as for `spawn`, and
    the same errors are raised.
    """
    path = f"{path_of(daemon, environment)}-{os.urandom(4).hex()}"
    spawn(path, daemon, environment, owner=os.getpid(), forks=forks, logs=logs)
    return path


def spawn(
    path: str,
    daemon: Daemon,
    environment: Env,
    *,
    owner: int | None = None,
    persistent: bool = False,
    forks: bool = False,
    logs: bool = False,
) -> None:
    """Start a daemon with a new socket at `path`.

    Args:
        path: the path of the socket.
        daemon: the description of the daemon.
        environment: the environment variables of the daemon.
        owner: the id of the only process that the daemon serves; the daemon exits when that process
            does. If it is None, the daemon serves all programs of the user that connect.
        persistent: whether the daemon runs until it is stopped, even if no program is connected.
        forks: whether this process starts the daemon in a fork of itself, so that it need not wait.
            Only a process with one thread may do this.
        logs: whether the daemon may write to this process's standard error.

    Raises:
        OSError: the daemon can't be started.
    """
    if children_are_elsewhere():
        raise OSError("a daemon would be in another PID namespace than this program")
    if not sys.executable:  # a program that embeds Python
        raise OSError("sys.executable is empty, so there is no interpreter for the daemon")
    passed = [_listening(path)]
    try:
        if owner is not None:
            passed.append(above_standard(os.pidfd_open(owner)))
        until = 0 if owner is None else passed[-1]
        logs = logs and _is_open(2)
        group = os.getpgrp() if logs else 0
        numbers = [b"%d" % number for number in (passed[0], until, persistent, group)]
        fields = [*numbers, os.fsencode(path), daemon.module.encode(), daemon.config]
        message = heading(fields) + b"".join(fields)
        if len(message) > _MAX_CONFIG:
            sizes = f"expected at most {_MAX_CONFIG} bytes, got {len(message)}"
            raise OSError(f"the settings of the daemon are too long: {sizes}")
        command = [sys.executable, *ISOLATED, "-c", _CODE, *_search_path()]
        (_fork if forks else _run)(command, message, passed, environment, logs)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        for number in passed:
            os.close(number)


def _listening(path: str) -> int:
    """Return the descriptor of a new socket that listens at `path`, in a private folder.

    Raises:
        OSError: the folder or the socket can't be made, or others have access to the folder.
    """
    require_private(os.path.dirname(path))
    try:
        return bound(path)
    except FileNotFoundError:  # a daemon that exits has just removed the folder
        require_private(os.path.dirname(path))
        return bound(path)


def _run(command: list[str], message: bytes, passed: list[int], env: Env, logs: bool) -> None:
    """Start the process of a daemon, and wait until it has forked. Raises OSError."""
    with importing:
        import subprocess  # noqa: PLC0415  4 ms, for which the launcher does not wait

    try:
        with importing:  # a forked child would inherit the pipe that `run` waits for
            subprocess.run(
                command,
                input=message,
                check=True,
                pass_fds=passed,
                env=dict(env),
                stdout=subprocess.DEVNULL,
                stderr=None if logs else subprocess.DEVNULL,
                timeout=START_TIMEOUT,
            )
    except (subprocess.SubprocessError, RuntimeError) as error:  # the interpreter may exit
        raise OSError(f"the daemon can't be started: {error}") from error


def _fork(command: list[str], message: bytes, passed: list[int], env: Env, logs: bool) -> None:
    """Start the process of a daemon from a fork, so that this launcher need not wait for it."""
    child = os.fork()
    if child:
        with suppress(ChildProcessError):  # SIGCHLD is ignored
            os.waitpid(child, 0)
        # If SIGCHLD is blocked, it is pending now, and the program must not get it.
        signal.sigtimedwait({signal.SIGCHLD}, 0)
        return
    try:
        if os.fork() == 0:
            os.setsid()  # Ctrl-C does not reach it
            _run(command, message, passed, env, logs)
    finally:  # a forked process never returns from here
        os._exit(0)


def _search_path() -> list[str]:
    """Return the paths of the daemon's modules, without the working directory."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        here = ""
    found = [path for path in sys.path if os.path.isabs(path) and path != here]
    return found if _ROOT in found else [*found, _ROOT]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
