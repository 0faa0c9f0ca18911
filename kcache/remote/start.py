"""Start: how a program finds or starts its agent."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from kcache.remote.protocol import MAX_MESSAGE, STATS
from kcache.remote.remote_client import RemoteError
from kcache.util.child_process import children_are_elsewhere
from kcache.util.open_file import identity
from kcache.util.private_socket import MOST_PATH, bound, is_same_user, private_folder
from kcache.util.safe_path import present_user, unsafe_part
from kcache.util.wire import WireError, receive, send

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kcache.remote.agent_setup import Setup

__all__ = ["asked_if_running", "connected", "socket_identity", "socket_path"]

#: As for workers: no variable and no file in the working directory changes what is imported.
_FLAGS = ("-I", "-S", "-B", "-c")
#: It forks at once, so that the program does not wait for imports, and gets no child process that
#: it does not know of.
_CODE = (
    "import os, sys; os.fork() and os._exit(0); os.setsid(); sys.path[:] = sys.argv[1:]; "
    "from kcache.remote.agent import main; main()"
)
#: The folder that holds kcache. Another installation has an agent of its own.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: Seconds for an agent's answer about itself.
ASK_TIMEOUT = 5.0
#: Seconds that the new interpreter may take until it has detached itself.
START_TIMEOUT = 20.0
#: Seconds to wait for another program that starts an agent. It may be a stopped one.
TURN_TIMEOUT = 5.0
#: Seconds between two attempts to take the lock of programs that start an agent.
_PAUSE = 0.01


def socket_path(folders: Sequence[str], setup: Setup) -> str:
    """Return the socket's path of the agent with this setup.

    Raises:
        RemoteError: there is no private folder for it.
    """
    if sys.platform == "win32":
        raise RemoteError("the agent that asks remotes needs Linux; layers do without")
    name = setup.digest(sys.executable, _ROOT)
    for folder in folders:
        private = os.path.join(folder, f"kcache-agent-{present_user()}")
        path = os.path.join(private, f"{name}.socket")
        if len(os.fsencode(path)) <= MOST_PATH:
            with suppress(OSError):
                if not unsafe_part(private):  # nobody can replace it meanwhile
                    private_folder(private)
                    return path
    raise RemoteError("no private folder for a socket")


def connected(path: str, setup: Setup, environment: Mapping[str, str]) -> socket.socket:
    """Return a connection to the agent at a path, and start the agent if there is none.

    Raises:
        RemoteError: there is no agent, and none can be started.
    """
    connection = _connect(path)
    if connection is not None:
        return connection
    try:
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _take_turn(folder)
            connection = _connect(path)  # another program may have been faster
            if connection is None:
                _start(path, setup, environment)
                connection = _connect(path)
        finally:
            os.close(folder)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # an interpreter may end
        raise RemoteError(f"no agent can be started: {error}") from error
    if connection is None:
        raise RemoteError("no agent can be started")
    return connection


def socket_identity(path: str) -> tuple[int, int] | None:
    """Return what tells the socket at a path from others that were there; None if there is none."""
    try:
        return identity(os.lstat(path))
    except OSError:
        return None


def asked_if_running(path: str) -> dict[str, Any] | None:
    """Return the status of the agent at a path, or None if none answers."""
    connection = _connect(path)
    if connection is None:
        return None
    with connection:
        limit = struct.pack("ll", int(ASK_TIMEOUT), 0)
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            send(connection.fileno(), [STATS, b"0"])
            found: object = json.loads(receive(connection.fileno(), most=MAX_MESSAGE)[1])
        except (OSError, WireError, ValueError, IndexError):
            return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _connect(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)  # so that a full backlog does not block, either
    try:
        connection.connect(path)
        if is_same_user(connection):
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _take_turn(folder: int) -> None:
    """Lock a folder, so that only one of the programs that find no agent starts it.

    Raises:
        OSError: another program has held the lock for longer than a start may take.
    """
    import fcntl

    end = time.monotonic() + TURN_TIMEOUT
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                reason = "another program has begun to start it, and was stopped"
                raise OSError(errno.EBUSY, reason) from None
        else:
            return
        time.sleep(_PAUSE)


def _start(path: str, setup: Setup, environment: Mapping[str, str]) -> None:
    """Start an agent that serves a new socket at `path`.

    Raises:
        OSError, subprocess.SubprocessError: it can't be started.
    """
    if children_are_elsewhere():
        raise OSError("this program's children are in another PID namespace")
    with suppress(FileNotFoundError):  # that of an agent that was killed
        os.unlink(path)
    listener = bound(path)
    try:
        about = [listener, path, setup.pack().decode()]
        subprocess.run(
            [sys.executable, *_FLAGS, _CODE, *_search_path()],
            input=json.dumps(about).encode(),
            check=True,
            pass_fds=[listener],
            env=dict(environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=START_TIMEOUT,
        )
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(listener)


def _search_path() -> list[str]:
    """Return the paths of the agent's modules, without the working directory."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        here = ""
    found = [path for path in sys.path if os.path.isabs(path) and path != here]
    return found if _ROOT in found else [*found, _ROOT]
