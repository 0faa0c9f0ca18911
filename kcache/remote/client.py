"""Client: asks the agent on behalf of a program: short questions, never with a long wait.

It imports no client of HTTP, Redis or an object store. `kcache.remote.start` starts an agent at the
first question.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kcache.remote import protocol
from kcache.remote.channel import Channel
from kcache.remote.protocol import Found, ProtocolError
from kcache.remote.remote_client import RemoteError
from kcache.remote.source import Offer
from kcache.util import log
from kcache.util.forks import after_fork
from kcache.util.wire import WireError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping, Sequence

    from kcache.remote.agent_setup import Setup
    from kcache.remote.protocol import Upload

__all__ = ["Client", "Lease", "client_for"]

#: Seconds that an agent may take beyond the remotes' own time-outs: it starts within one second,
#: but a loaded machine is slow.
PATIENCE = 5.0
#: Seconds without questions after the agent has failed.
PAUSE = 30.0
#: Connections that are kept for the next question.
_KEPT = 8


class Lease:
    """The right to compile one kernel as the only process of all machines, until it is released.

    The agent renews it as long as the connection lives, so it ends with this process.
    """

    def __init__(self, connection: Channel, key: str, token: str) -> None:
        self.connection = connection
        self.key = key
        self.token = token
        #: Whether it was released, or passed to the agent with an upload.
        self.ended = False


class Client:
    """Asks the agent of one `Setup`, which is started if there is none.

    A failure of the agent costs a bounded wait once. Then nobody asks for a while, which costs one
    comparison. An agent that does not answer in time is left, so that the next program starts
    another one. The user is warned of what the agent says about remotes that fail.

    Threads: safe to share; each question has a connection. Fork: the child makes new connections.
    Crash: the agent notices.

    Args:
        setup: what the agent is made with.
        connect: returns a new connection; raises RemoteError.
        leave: called after the agent has not answered in time.
        warn: called with each sentence that the user should see.
        clock: seconds, for tests.

    Attributes:
        nothing_until: time of the clock until which no remote will be asked.
        group: the process group that is warned, once about each remote.
    """

    def __init__(
        self,
        setup: Setup,
        connect: Callable[[], socket.socket],
        *,
        leave: Callable[[], object] = lambda: None,
        warn: Callable[[str], object] = log.warning_once,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.addresses = setup.addresses
        self.writable = any(address.writable for address in setup.addresses)
        self.leases = any(a.kind == "redis" and a.flag("leases") for a in setup.addresses)
        self.timeout = PATIENCE + sum(address.seconds() for address in setup.addresses)
        self.group = os.getpgrp() if hasattr(os, "getpgrp") else 0
        self._connect = connect
        self._leave = leave
        self._warn = warn
        self._clock = clock
        self._kept: list[Channel] = []
        self._lock = threading.Lock()
        #: Until the first time it is useless to ask for a value; until the second the agent is not
        #: asked at all.
        self.nothing_until = 0.0
        self._silent_until = 0.0
        after_fork(self)

    # -- questions -----------------------------------------------------------------------------

    @property
    def worth_asking(self) -> bool:
        """Whether a remote may be asked now."""
        return self._clock() >= self.nothing_until

    def get(self, *keys: str, first: int = 0) -> Found | None:
        """Ask the remotes from index `first` on; return the value of the first key that they have.

        All keys are in one question. The result is None if there is no answer.
        """
        if not self.worth_asking:
            return None
        answer = self._ask(protocol.GET, b"%d" % first, *map(str.encode, keys))
        if answer is None:
            return None
        try:
            found = Found.unpack(answer)
            if found.which >= len(keys) or not first <= found.remote <= len(self.addresses):
                raise ProtocolError("an answer to another question")
        except ProtocolError as error:
            self._failed(error)
            return None
        if found.wait > 0:
            self.nothing_until = self._clock() + found.wait
        return found

    def offers(self, *keys: str) -> Iterator[Offer]:
        """Yield what the remotes have in turn, each under the first of the keys that it has.

        Raises:
            RemoteError: at the end, if a remote or the agent did not answer.
        """
        first = unanswered = 0
        while first < len(self.addresses):
            found = self.get(*keys, first=first)
            unanswered += 1 if found is None else found.unanswered
            if found is None or found.value is None:
                break
            yield Offer(keys[found.which], found.value, self.addresses[found.remote].keep)
            first = found.remote + 1
        if unanswered:
            raise RemoteError("a remote did not answer")

    def put(self, upload: Upload, lease: Lease | None = None) -> bool:
        """Queue an upload; tell whether the agent has it now."""
        if lease is None:
            return self._ask(protocol.PUT, *upload.pack()) is not None
        lease.ended = True
        return self._ask_on(lease.connection, protocol.PUT, *upload.pack()) is not None

    def lease(self, key: str) -> Lease | bool:
        """Take the lease of `key`; return it, or tell whether another program has it.

        It is False if there are no leases. Then every program compiles by itself.
        """
        if not self.worth_asking:
            return False
        connection = self._connection()
        if connection is None:
            return False
        answer = self._ask_on(connection, protocol.LEASE, key.encode(), keeps=False)
        if answer is not None and len(answer) == 2 and answer[0] == b"taken":
            return Lease(connection, key, answer[1].decode("ascii", "replace"))
        if answer is not None:
            self._keep(connection)
        return answer == [b"busy"]

    def release(self, lease: Lease) -> None:
        """Release a lease under which nothing was uploaded."""
        lease.ended = True
        self._ask_on(lease.connection, protocol.RELEASE, lease.key.encode(), lease.token.encode())

    def flush(self, seconds: float) -> bool:
        """Wait until everything is uploaded; tell whether it is."""
        return self._ask(protocol.FLUSH, b"%.3f" % seconds, more=seconds) == [b"1"]

    def status(self) -> dict[str, object] | None:
        """Return the status of the agent and its remotes, or None."""
        import json

        answer = self._ask(protocol.STATS)
        try:
            found: object = json.loads(answer[0]) if answer else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType]

    def stop(self) -> None:
        """Make the agent end."""
        self._ask(protocol.STOP)
        self.close()

    # -- connections -----------------------------------------------------------------------------

    def _ask(self, kind: bytes, *arguments: bytes, more: float = 0.0) -> list[bytes] | None:
        """Return the answer, or None if there is none; then nobody asks for a while."""
        with self._lock:
            kept = self._kept.pop() if self._kept else None
        if kept is not None:
            # The agent may have ended since. That shows at once, and is no failure.
            with suppress(WireError, ConnectionError):
                return self._exchange(kept, kind, arguments, more)
        connection = self._connection()
        return None if connection is None else self._ask_on(connection, kind, *arguments, more=more)

    def _ask_on(
        self,
        connection: Channel,
        kind: bytes,
        *arguments: bytes,
        more: float = 0.0,
        keeps: bool = True,
    ) -> list[bytes] | None:
        """Return the answer on a connection, which is kept for others if `keeps`."""
        try:
            return self._exchange(connection, kind, arguments, more, keeps)
        except (OSError, WireError) as error:
            self._failed(error)
            return None

    def _exchange(
        self,
        connection: Channel,
        kind: bytes,
        arguments: Sequence[bytes],
        more: float,
        keeps: bool = True,
    ) -> list[bytes] | None:
        """Return the answer on a connection without the warnings, which are passed on.

        Raises:
            OSError, WireError: the agent has ended, or the connection failed; it is closed.
        """
        question = [kind, b"%d" % self.group, *arguments]
        try:
            answer = connection.ask(question, self.timeout + more)
            warnings = answer.pop(0)
        except TimeoutError as error:
            connection.close()
            self._leave()
            self._failed(error)
            return None
        except IndexError:
            connection.close()
            raise WireError("an answer without fields") from None
        except BaseException:
            connection.close()
            raise
        for line in warnings.decode("utf-8", "replace").splitlines():
            self._warn(line)
        if keeps:
            self._keep(connection)
        return answer

    def _connection(self) -> Channel | None:
        if self._clock() < self._silent_until:
            return None
        try:
            return Channel(self._connect(), self.timeout)
        except (RemoteError, OSError) as error:
            self._failed(error)
            return None

    def _keep(self, connection: Channel) -> None:
        """Keep a connection for the next question, or close it if there are enough."""
        with self._lock:
            if len(self._kept) < _KEPT:
                self._kept.append(connection)
                return
        connection.close()

    def _failed(self, error: Exception) -> None:
        """Don't ask the agent for a while."""
        self._silent_until = self.nothing_until = self._clock() + PAUSE
        self._warn(f"no remote is asked for a while: {error}; kcache works without them")

    def close(self) -> None:
        """Close the connections. Idempotent; a later question makes a new one."""
        with self._lock:
            kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()

    def after_fork(self) -> None:
        """In a child process, leave the connections to the parent."""
        self._lock = threading.Lock()
        self._kept = []


def client_for(
    setup: Setup,
    folders: Sequence[str],
    environment: Mapping[str, str],
    warn: Callable[[str], object] = log.warning_once,
) -> Client:
    """Return the client of the agent with a setup, whose socket is in one of the folders.

    If none of the folders is private, the client's questions have no answer.
    """
    known: set[object] = set()

    def connect() -> socket.socket:
        from kcache.remote.start import connected, socket_identity, socket_path

        path = socket_path(folders, setup)
        connection = connected(path, setup, environment)
        known.add(socket_identity(path))
        return connection

    def leave() -> None:
        from kcache.remote.start import socket_identity, socket_path

        with suppress(RemoteError, OSError):
            path = socket_path(folders, setup)
            if socket_identity(path) in known:  # it is not the one of another agent
                os.unlink(path)

    return Client(setup, connect, leave=leave, warn=warn)
