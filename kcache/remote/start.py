"""Start: how a program finds or starts its agent."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from kcache.remote.protocol import MAX_MESSAGE, STATS
from kcache.remote.store import RemoteError
from kcache.util.private_socket import (
    MOST_PATH,
    SILENT_END,
    bound,
    is_same_user,
    private_folder,
    was_silent,
)
from kcache.util.safe_path import present_user, unsafe_part
from kcache.util.wire import WireError, receive, send

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kcache.remote.agent_setup import Setup

__all__ = ["asked_if_running", "connected", "socket_path"]

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
#: For so many seconds after an agent has kept a program waiting in vain, no other program asks it.
SILENT_FOR = 30.0
#: Seconds that the new interpreter may take until it has detached itself.
START_TIMEOUT = 20.0
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
        RemoteError: there is no agent, and none can be started; or it was silent lately.
    """
    connection = _connect(path)
    if connection is not None:
        if was_silent(path, SILENT_FOR):  # and has not ended since
            connection.close()
            raise RemoteError("the agent has not answered another program")
        return connection
    try:
        with open(f"{path}.lock", "ab") as lock:
            _take_turn(lock)
            connection = _connect(path)  # another program may have been faster
            if connection is None:
                _start(path, setup, environment)
                connection = _connect(path)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # an interpreter may end
        raise RemoteError(f"no agent can be started: {error}") from error
    if connection is None:
        raise RemoteError("no agent can be started")
    return connection


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
            send(connection.fileno(), [STATS])
            found: object = json.loads(receive(connection.fileno(), most=MAX_MESSAGE)[0])
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


def _take_turn(lock: BinaryIO) -> None:
    """Lock a file, so that only one of the programs that find no agent starts it.

    Raises:
        RemoteError: another program has held the lock for longer than a start may take.
    """
    import fcntl

    end = time.monotonic() + START_TIMEOUT
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise RemoteError(
                    "another program has begun to start the agent, and was stopped"
                ) from None
        else:
            return
        time.sleep(_PAUSE)


def _start(path: str, setup: Setup, environment: Mapping[str, str]) -> None:
    """Start an agent that serves a new socket at `path`.

    Raises:
        OSError, subprocess.SubprocessError: it can't be started.
    """
    for old in (path, path + SILENT_END):
        with suppress(FileNotFoundError):
            os.unlink(old)
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
