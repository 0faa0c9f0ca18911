"""Server: the process of a daemon, which answers programs over a private socket.

The process has a session of its own, so that Ctrl-C and Ctrl-Z in a terminal do not reach it. From
the program that starts it, it inherits no signal handlers and no children, and only the descriptors
that it needs.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from kcache._version import __version__
from kcache.daemons import sockets
from kcache.daemons.sockets import DONE, STATUS, STOP, WAIT, Channel
from kcache.util import log
from kcache.util.child_process import detach
from kcache.util.path_safety import present_user
from kcache.util.wire import WireError, heading, receive

#: The daemon exits this many seconds after the last program has disconnected, or up to `LOOK_EVERY`
#: seconds later. It waits so that the next command in a shell script need not start another daemon.
IDLE = 3.0
#: Seconds that pending work may take after the last program has disconnected, or after `STOP`.
LINGER = 60.0
#: Seconds between two checks whether the daemon is still needed, and can still be found.
LOOK_EVERY = 1.0
#: A program that waits longer than this many seconds for an answer gets a heartbeat every
#: `LOOK_EVERY` seconds or more often. A program stops waiting if it gets none for 5 s.
HEARTBEAT = 0.5
#: The largest number of connections, each with a thread. Further ones are closed at once.
MAX_CONNECTIONS = 4096
#: The time limit in seconds for the rest of a message that has begun, and for a program to receive
#: an answer. A stopped program (Ctrl-Z) occupies a thread until then.
MESSAGE_TIMEOUT = 60.0
#: The limit of open descriptors that the daemon sets for itself, as far as the system permits. Each
#: connection takes one.
_DESCRIPTORS = 1 << 16
#: Seconds to pause if no connection can be accepted because there are no free descriptors.
_PAUSE = 0.05
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: `struct ucred` of unix(7)
_HEARTBEAT = heading([WAIT]) + WAIT


class Handlers(Protocol):
    """Answers the questions to a daemon, except `STATUS` and `STOP`.

    Threads: Several threads may use one object.

    Attributes:
        patient: whether an answer may take long, so that programs get heartbeats while they wait.
    """

    patient: bool

    @property
    def pending(self) -> int:
        """The number of pending tasks, such as uploads, for programs that may have exited."""
        ...

    def answer(self, question: list[bytes], client: Client) -> Sequence[bytes]:
        """Return the answer to `question`, which the program `client` has sent.

        A program sends its next question on a connection only after the answer to the previous one.

        Raises:
            WireError: the question is malformed or unknown. The connection is then closed.
        """
        ...

    def leave(self, client: Client) -> None:
        """Forget the program `client`, which has disconnected."""

    def status(self) -> dict[str, object]:
        """Return what the handlers have done, as JSON values without credentials."""
        ...

    def close(self) -> None:
        """Wait up to `LINGER` seconds for pending tasks, and close all files and connections."""


class Client(Channel):
    """A connected program.

    Threads: One thread receives the program's questions and answers them. Another thread may send
    heartbeats at the same time.

    Attributes:
        process: the id of the program's process.
    """

    def __init__(self, connection: socket.socket, process: int) -> None:
        super().__init__(connection, MESSAGE_TIMEOUT)
        self.process = process
        self._sending = threading.Lock()
        self.waits_since: float | None = None
        #: Set when the program has disconnected and its last message has been handled.
        self.left = threading.Event()

    def answer(self, fields: Sequence[bytes]) -> None:
        """Send the answer for which the program waits."""
        with self._sending:
            self.waits_since = None
            self.send(fields)

    def beat(self, now: float) -> None:
        """Send a heartbeat if, at the time `now`, the program has waited for `HEARTBEAT` seconds.

        This never blocks, even if the program is stopped and does not read.
        """
        since = self.waits_since
        if since is None or now - since < HEARTBEAT or not self._sending.acquire(blocking=False):
            return
        try:
            if self.waits_since is not None:  # so few bytes are sent as a whole or not at all
                os.write(self._socket.fileno(), _HEARTBEAT)  # `send` would wait for room
        except OSError:
            pass  # the thread that answers will notice
        finally:
            self._sending.release()

    def has_ended(self) -> bool:
        """Return whether the program has disconnected. Its last message may still be unread."""
        poll = select.poll()
        with suppress(OSError, ValueError):  # closed by the thread that answers
            poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def end(self) -> None:
        """Shut down the connection. The thread that waits for the program's next message ends."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class Server:
    """Answers programs of this user.

    If a program dies in the middle of a message, sends a malformed message or stops reading, only
    its own connection ends.

    Threads: `serve` runs in one thread, and each connection has a thread of its own. Crash: If the
    daemon is killed, programs continue without it.

    Args:
        listener: a socket that listens.
        path: the path at which programs find the socket.
        handlers: the object that answers the questions.
        owner: if the daemon serves only one program, a descriptor that is readable when that
            program has exited.
    """

    def __init__(
        self, listener: socket.socket, path: str, handlers: Handlers, owner: int | None = None
    ) -> None:
        self._listener = listener
        self._path = path
        self._handlers = handlers
        self._owner = owner
        self._lock = threading.Lock()
        self._clients: set[Client] = set()
        self._is_stopping = False
        self._identity = sockets.socket_identity(path)
        self._started = time.time()

    def serve(self, *, persistent: bool = False) -> None:
        """Answer programs until the daemon is stopped or no longer needed.

        A daemon with an owner is needed until the owner exits. Any other daemon is needed while
        programs are connected, and for `IDLE` seconds after that, unless another daemon has its
        path. Pending tasks can delay the exit up to `LINGER` seconds.

        Args:
            persistent: whether the daemon is also needed while no program is connected, unless
                another daemon has its path.
        """
        needed = time.monotonic()
        while True:
            ready = self._wait(LOOK_EVERY)
            if self._owner in ready or self._is_stopping:
                break
            if self._listener.fileno() in ready:
                self._accept()
            now = time.monotonic()
            for client in self._present():
                client.beat(now)
            if self._clients or self._owner is not None:
                needed = now
            if self._is_over(now - needed, persistent):
                sockets.remove_socket(self._path, self._identity)
                if not self._wait(0):  # no program has connected since
                    break
        self._stop()

    def _wait(self, seconds: float) -> list[int]:
        """Wait up to `seconds` for a program or the owner's exit; return the ready descriptors."""
        poll = select.poll()
        for descriptor in (self._listener.fileno(), self._owner):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll(seconds * 1e3)]

    def _is_over(self, idle: float, persistent: bool) -> bool:
        """Return whether the daemon can exit if no program has needed it for `idle` seconds."""
        if sockets.socket_identity(self._path) is None:
            self._listen_again()
        is_found = sockets.socket_identity(self._path) == self._identity
        if is_found and persistent:
            return False
        enough = IDLE if is_found else 0.0
        return idle > LINGER or (idle > enough and not self._handlers.pending)

    def _listen_again(self) -> None:
        """Listen at a new socket, because a program that timed out has removed the old one."""
        with suppress(OSError):
            again = socket.socket(fileno=sockets.bound(self._path))
            while not self._is_stopping and self._listener.fileno() in self._wait(0):
                self._accept()  # programs that found the old socket before it was removed
            self._listener.close()
            self._listener = again
            self._identity = sockets.socket_identity(self._path)

    def wake(self) -> None:
        """Make `serve` return soon. May be called from any thread."""
        self._is_stopping = True
        with suppress(OSError):  # it has exited
            self._listener.shutdown(socket.SHUT_RDWR)

    def _stop(self) -> None:
        """Remove the socket, finish pending tasks, and close all connections.

        The socket is removed first, so that programs can start another daemon. Connections are
        closed last, because programs may still wait for an answer.
        """
        sockets.remove_socket(self._path, self._identity)
        self._listener.close()
        self._handlers.close()
        for client in self._present():
            client.end()

    # -- connections -------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the program has exited, or no descriptor is left
            log.debug("a connection can't be accepted: %s", error)
            time.sleep(_PAUSE)
            return
        process, user, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != present_user() or len(self._clients) >= MAX_CONNECTIONS:
            connection.close()
            return
        client = Client(connection, process)
        with self._lock:
            self._clients.add(client)
        try:
            threading.Thread(target=self._attend, args=(client,), daemon=True).start()
        except RuntimeError as error:  # the machine has no more threads
            log.warning("a program works without the daemon, which has no more threads: %s", error)
            self._leave(client)

    def _attend(self, client: Client) -> None:
        """Serve one client until it disconnects."""
        try:
            while True:
                question = client.next()
                if question == [STOP]:
                    client.answer([DONE])
                    self.wake()
                elif question == [STATUS]:
                    client.answer([DONE, json.dumps(self.status()).encode()])
                else:
                    client.waits_since = time.monotonic() if self._handlers.patient else None
                    client.answer(self._handlers.answer(question, client))
        except (WireError, OSError):
            pass  # it has disconnected, or its message is malformed
        except Exception as error:
            log.warning("the request of process %d failed: %r", client.process, error)
        finally:
            self._handlers.leave(client)
            self._leave(client)

    def status(self) -> dict[str, object]:
        """Return what the daemon has done, including what it did for programs that have exited.

        This call waits for up to `LOOK_EVERY` seconds until the last messages of these programs
        are handled. A compile for such a program that takes longer is not included.
        """
        until = time.monotonic() + LOOK_EVERY
        for client in filter(Client.has_ended, self._present()):
            client.left.wait(max(0.0, until - time.monotonic()))
        return {
            "version": __version__,
            "process": os.getpid(),
            "started": self._started,
            "connections": len(self._clients),
            **self._handlers.status(),
        }

    def _present(self) -> list[Client]:
        with self._lock:
            return list(self._clients)

    def _leave(self, client: Client) -> None:
        with self._lock:
            self._clients.discard(client)
        client.close()
        client.left.set()


# -- the process -----------------------------------------------------------------------------------


def main() -> None:
    """Run a daemon as the message on standard input, from `kcache.daemons.spawn`, describes it.

    The message names a module, whose function `make` returns the handlers. The arguments of `make`
    are the daemon's configuration, the process group of the program that starts the daemon, and a
    descriptor of that program's standard error, which the handlers have to close. The process group
    is 0 if the daemon may not write to that standard error.
    """
    listener, owner, persistent, group, path, module, config = receive(partial(os.read, 0))
    owner_fd = int(owner) or None
    stderr_fd = os.dup(2)
    kept = [number for number in (int(listener), stderr_fd, owner_fd) if number is not None]
    for number in kept:
        os.set_inheritable(number, False)
    detach(kept)
    limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    make = importlib.import_module(module.decode()).make
    handlers: Handlers = make(config, int(group), stderr_fd)
    place = os.fsdecode(path)
    server = Server(socket.socket(fileno=int(listener)), place, handlers, owner_fd)
    server.serve(persistent=persistent == b"1")
    sockets.sweep(os.path.dirname(place))


def limit(which: int, wanted: int) -> None:
    """Set the soft limit of a resource for this process to `wanted`; see setrlimit(2).

    If the hard limit is lower, the soft limit is set to the hard limit. A failure is ignored.
    """
    hard = resource.getrlimit(which)[1]
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(which, (allowed, hard))
