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

#: It forks at once, so that the program does not wait for imports, and gets no unknown child.
_CODE = (
    "import os, sys; os.fork() and os._exit(0); os.setsid(); sys.path[:] = sys.argv[1:]; "
    "from kcache.daemons.daemon_server import main; main()"
)
#: The folder that holds kcache. Another installation has its own daemons.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: Seconds that the new interpreter may take until it has detached itself.
START_TIMEOUT = 20.0
#: Seconds to wait for another program that starts a daemon. That program may be stopped.
LOCK_TIMEOUT = 5.0
#: How many bytes a pipe holds before anyone reads from it.
_MAX_CONFIG = 1 << 16


class Daemon:
    """What a daemon does. Immutable.

    Attributes:
        kind: what its socket's name begins with.
        module: the module whose function `make` makes its handlers.
        config: the argument of `make`, which may contain credentials.
    """

    __slots__ = ("config", "kind", "module")

    def __init__(self, kind: str, module: str, config: bytes) -> None:
        self.kind = kind
        self.module = module
        self.config = config


def name_of(daemon: Daemon) -> str:
    """Return the name of a daemon, by which all programs with the same settings find it."""
    # One installation has several interpreters (`python`, `python3`), and all are in one folder.
    folder = os.path.realpath(os.path.dirname(sys.executable or "/"))
    parts = (__version__, folder, str(sys.implementation.cache_tag), _ROOT, daemon.module)
    whole = os.fsencode("\0".join(parts)) + b"\0" + daemon.config
    return f"{daemon.kind}-{hashlib.sha256(whole, usedforsecurity=False).hexdigest()[:16]}"


def path_of(daemon: Daemon, environment: Env) -> str:
    """Return the path of the socket of a daemon for all programs with its settings.

    Its folder is absolute, because programs change directory.

    Raises:
        OSError: there is no folder for it.
    """
    named = (environment.get(name, "") for name in ("XDG_RUNTIME_DIR", "TMPDIR"))
    folder = folder_in([*filter(os.path.isabs, named), "/tmp"])
    return os.path.join(folder, name_of(daemon))


def connect_or_spawn(path: str, daemon: Daemon, environment: Env) -> _socket.socket:
    """Return a connection to the daemon at a path, and start it if there is none.

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
        raise OSError("the daemon can't be started")
    return connection


def spawn_own(daemon: Daemon, environment: Env, *, forks: bool = False, logs: bool) -> str:
    """Start a daemon that only this process can find; return the path of its socket.

    It exits with this process. The other arguments, and the errors, are those of `spawn`.
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
        path: path of the socket.
        daemon: what it does.
        environment: its variables.
        owner: the id of the only process that it serves; it exits when this process does.
        persistent: whether it serves until it is stopped.
        forks: whether this process forks to start it; only for a process with one thread.
        logs: whether the daemon may write to this process's standard error.

    Raises:
        OSError: it can't be started.
    """
    if children_are_elsewhere():
        raise OSError("this program's children are in another PID namespace")
    if not sys.executable:  # a program that embeds Python
        raise OSError("sys.executable is empty, so the daemon has no interpreter")
    require_private(os.path.dirname(path))
    passed = [bound(path)]
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
            raise OSError(f"expected settings of at most {_MAX_CONFIG} bytes, got {len(message)}")
        command = [sys.executable, *ISOLATED, "-c", _CODE, *_search_path()]
        (_fork if forks else _run)(command, message, passed, environment, logs)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        for number in passed:
            os.close(number)


def _run(command: list[str], message: bytes, passed: list[int], env: Env, logs: bool) -> None:
    """Start the process of a daemon; raise OSError."""
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
    """Start the process of a daemon from a launcher, which does not wait for the interpreter."""
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
