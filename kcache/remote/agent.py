"""Agent: the process that talks to remotes for all programs of a user with one configuration.

A program starts it by exec with its first question. It passes the listening socket to the agent,
and its `Setup` through a pipe. The agent has a session of its own. It ends `IDLE` seconds after the
last program has disconnected, and leaves no file. Before that, it continues uploads for at most
`LINGER` seconds.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kcache.remote.agent_setup import Setup
from kcache.remote.channel import Channel
from kcache.remote.counts import Counts
from kcache.remote.protocol import ProtocolError
from kcache.remote.remote import Remote
from kcache.remote.remotes import Remotes, Session
from kcache.remote.seal import Sealer, make_sealer
from kcache.remote.start import socket_identity
from kcache.util import log
from kcache.util.child_process import detach
from kcache.util.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["IDLE", "LINGER", "Agent", "main"]

#: Seconds from the disconnect of the last program to the end of the agent. So the next command of a
#: shell script need not start another agent.
IDLE = 5.0
#: Seconds that uploads may take after the last program has ended, or the agent was told to end.
LINGER = 60.0
#: Most connections at the same time, each with a thread. Further ones are closed at once.
MAX_CONNECTIONS = 1024
#: Seconds for the rest of a message that has begun, and for a program to receive an answer.
MESSAGE_TIMEOUT = 60.0
#: Nearly all questions fit into this many bytes; uploads are longer. Each connection has a buffer
#: of this size.
QUESTION = 4096
#: Seconds between two checks whether the agent is still needed, and can still be found.
LOOK_EVERY = 1.0
#: Bytes of memory of the agent, without files that it maps, beside a few of the longest values. The
#: queues and values of a large job need a part of it. A server whose answer has no end gets no
#: more, whatever a client does.
MEMORY = 1 << 30
#: Bytes of a thread's stack, which count in full. No code here recurses.
_STACK = 512 << 10
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: `struct ucred` of unix(7)


class Agent:
    """Answers programs from remotes.

    Threads: `serve` runs in one thread, and each connection has one of its own. Whatever a program
    does, only its own connection ends. Crash: programs compile without the remotes, and one of them
    starts another agent.

    Args:
        listener: a socket that listens.
        path: the path at which programs find the socket.
        remotes: in order.
    """

    def __init__(self, listener: socket.socket, path: str, remotes: Sequence[Remote]) -> None:
        self._listener = listener
        self._path = path
        self._remotes = Remotes(remotes, self.wake)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._told_to_end = False
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._identity = socket_identity(path)

    def serve(self) -> None:
        """Accept programs until none needs the agent, or the socket is no longer at its path."""
        self._listener.setblocking(False)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._awake, select.POLLIN)
        needed = time.monotonic()
        while not self._told_to_end:
            if poll.poll(LOOK_EVERY * 1e3):
                self._accept()
            if self._connections:
                needed = time.monotonic()
            idle = time.monotonic() - needed
            enough = IDLE if socket_identity(self._path) == self._identity else 0.0
            if idle > LINGER or (idle > enough and not self._remotes.pending):
                self._unlink()
                if not poll.poll(0):  # nobody has connected meanwhile
                    break
        self._stop()

    def wake(self) -> None:
        """End `serve` soon, from any thread."""
        self._told_to_end = True
        with suppress(OSError):  # it has ended
            os.eventfd_write(self._awake, 1)

    def _stop(self) -> None:
        """Remove the socket, so that programs can start another agent, and close the remotes.

        Pending uploads are sent before the remotes are closed, because the programs that made them
        may have ended, and others may wait for a kernel under a lease. All leases are released.
        """
        self._unlink()
        self._listener.close()
        self._remotes.flush(LINGER)
        self._remotes.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _unlink(self) -> None:
        if socket_identity(self._path) == self._identity:
            with suppress(OSError):
                os.unlink(self._path)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._awake)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the program is gone already, or no descriptor is left
            time.sleep(0.05)
            return
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid() or (
            len(self._connections) >= MAX_CONNECTIONS
        ):
            connection.close()
            return
        with self._lock:
            self._connections.add(connection)
        try:
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()
        except RuntimeError as error:  # the machine has no more threads
            log.warning("a program has to do without its remotes: %s", error)
            self._leave(connection)

    def _attend(self, connection: socket.socket) -> None:
        """Answer one program until it disconnects."""
        session = Session()
        try:
            channel = Channel(connection, MESSAGE_TIMEOUT, QUESTION)
            while True:
                channel.send(self._remotes.answer(channel.next(), session))
        except (WireError, OSError, ProtocolError) as error:
            log.debug("a program is gone: %s", error)
        except Exception as error:
            log.warning("the request of a program failed: %r", error)
        finally:
            self._leave(connection)
            self._remotes.leave(session)

    def _leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()


def main() -> None:
    """Be an agent: `kcache.remote.start` runs this by exec, with its setup on standard input."""
    os.chdir("/")
    with os.fdopen(0, "rb", closefd=False) as stream:
        listener, path, packed = json.loads(stream.read())
    detach([listener])
    os.set_inheritable(listener, False)
    setup = Setup.unpack(packed.encode())
    _limit_memory(MEMORY + 4 * max(address.max_entry for address in setup.addresses))
    run(socket.socket(fileno=listener), path, setup)


def _limit_memory(most: int) -> None:
    """Limit the memory of this process; it leaves no core dump, because it knows credentials."""
    if sys.platform == "win32":
        return
    import resource

    threading.stack_size(_STACK)
    for which, limit in ((resource.RLIMIT_DATA, most), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(which)[1]
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(which, (allowed, hard))


def run(listener: socket.socket, path: str, setup: Setup) -> None:
    """Serve with a setup until no program needs the agent."""

    def sealer() -> Sealer:
        return make_sealer(setup.settings.get("signing_key_file"))

    remotes = [Remote(address, sealer, Counts()) for address in setup.addresses]
    Agent(listener, path, remotes).serve()
