"""Client: asks the agent on behalf of a program: short questions, never with a long wait.

It imports no client of HTTP, Redis or an object store. `kcache.remote.start` starts an agent at the
first question.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kcache.remote import protocol
from kcache.remote.channel import Channel
from kcache.remote.protocol import Found, ProtocolError
from kcache.remote.store import RemoteError
from kcache.util import log
from kcache.util.forks import after_fork
from kcache.util.wire import WireError

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from kcache.remote.agent_setup import Setup
    from kcache.remote.protocol import Upload

__all__ = ["Client", "Lease", "client_for"]

#: Seconds that an agent may take beyond the remotes' own time-outs: it starts within one second,
#: but a loaded machine is slow.
PATIENCE = 5.0
#: Seconds without questions after the agent has failed. Each further failure doubles them, up to
#: the larger value.
FIRST_PAUSE, LONGEST_PAUSE = 30.0, 600.0
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

    A failure costs a bounded wait once. Then nobody asks for a while, which costs one comparison.

    Threads: safe to share; each question has a connection. Fork: the child makes new connections.
    Crash: the agent notices.

    Args:
        setup: what the agent is made with.
        connect: returns a new connection; raises RemoteError.
        note_silence: called after the agent has not answered in time.
        clock: seconds, for tests.

    Attributes:
        nothing_until: time of the clock until which no remote will be asked.
    """

    def __init__(
        self,
        setup: Setup,
        connect: Callable[[], socket.socket],
        *,
        note_silence: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.addresses = setup.addresses
        self.writable = any(address.writable for address in setup.addresses)
        self.leases = any(a.kind == "redis" and a.flag("leases") for a in setup.addresses)
        self.timeout = PATIENCE + sum(a.connect_timeout + a.timeout for a in setup.addresses)
        self._connect = connect
        self._note_silence = note_silence
        self._clock = clock
        self._kept: list[Channel] = []
        self._lock = threading.Lock()
        #: Until the first time it is useless to ask for a value; until the second the agent is not
        #: asked at all.
        self.nothing_until = 0.0
        self._silent_until = 0.0
        self._pause = FIRST_PAUSE
        self.failures = 0
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
        answer = self._ask([protocol.GET, b"%d" % first, *map(str.encode, keys)])
        if answer is None:
            return None
        try:
            found = Found.unpack(answer)
        except ProtocolError as error:
            self._failed(error)
            return None
        if not found.which < len(keys):
            self._failed(ProtocolError("a key that was not asked for"))
            return None
        if found.wait > 0:
            self.nothing_until = self._clock() + found.wait
        return found

    def put(self, upload: Upload, lease: Lease | None = None) -> bool:
        """Queue an upload; tell whether the agent has it now."""
        question = [protocol.PUT, *upload.pack()]
        if lease is None:
            return self._ask(question) is not None
        lease.ended = True
        answer = self._ask_on(lease.connection, question)
        self._keep(lease.connection, answer)
        return answer is not None

    def lease(self, key: str) -> Lease | bool:
        """Take the lease of `key`; return it, or tell whether another program has it.

        It is False if there are no leases. Then every program compiles by itself.
        """
        if not self.worth_asking:
            return False
        connection = self._connection()
        if connection is None:
            return False
        answer = self._ask_on(connection, [protocol.LEASE, key.encode()])
        if answer is not None and len(answer) == 2 and answer[0] == b"taken":
            return Lease(connection, key, answer[1].decode("ascii", "replace"))
        self._keep(connection, answer)
        return answer == [b"busy"]

    def release(self, lease: Lease) -> None:
        """Release a lease under which nothing was uploaded."""
        lease.ended = True
        question = [protocol.RELEASE, lease.key.encode(), lease.token.encode()]
        self._keep(lease.connection, self._ask_on(lease.connection, question))

    def flush(self, seconds: float) -> bool:
        """Wait until everything is uploaded; tell whether it is."""
        answer = self._ask([protocol.FLUSH, b"%.3f" % seconds], seconds)
        return answer == [b"1"]

    def status(self) -> dict[str, object] | None:
        """Return the status of the agent and its remotes, or None."""
        import json

        answer = self._ask([protocol.STATS])
        try:
            found: object = json.loads(answer[0]) if answer else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType]

    def stop(self) -> None:
        """Make the agent end."""
        self._ask([protocol.STOP])
        self.close()

    # -- connections -----------------------------------------------------------------------------

    def _ask(self, question: Sequence[bytes], more: float = 0.0) -> list[bytes] | None:
        """Return the answer, or None if there is none; then nobody asks for a while."""
        with self._lock:
            kept = self._kept.pop() if self._kept else None
        if kept is not None:
            # The agent may have ended since. That shows at once, and is no failure.
            with suppress(WireError, ConnectionError):
                return self._asked(kept, question, more)
            kept.close()
        connection = self._connection()
        return None if connection is None else self._ask_and_keep(connection, question, more)

    def _ask_and_keep(
        self, connection: Channel, question: Sequence[bytes], more: float
    ) -> list[bytes] | None:
        try:
            return self._asked(connection, question, more)
        except (OSError, WireError) as error:
            self._failed(error)
            return None

    def _asked(
        self, connection: Channel, question: Sequence[bytes], more: float
    ) -> list[bytes] | None:
        try:
            answer = connection.ask(question, self.timeout + more)
        except TimeoutError as error:
            connection.close()
            self._failed(error)
            self._note_silence()
            return None
        except BaseException:
            connection.close()
            raise
        self._keep(connection, answer)
        return answer

    def _ask_on(self, connection: Channel, question: Sequence[bytes]) -> list[bytes] | None:
        """Return the answer on a connection that the caller keeps or closes."""
        try:
            return connection.ask(question, self.timeout)
        except (OSError, WireError) as error:
            self._failed(error)
            if isinstance(error, TimeoutError):
                self._note_silence()
            return None

    def _connection(self) -> Channel | None:
        if self._clock() < self._silent_until:
            return None
        try:
            return Channel(self._connect(), self.timeout)
        except (RemoteError, OSError) as error:
            self._failed(error)
            return None

    def _keep(self, connection: Channel, answer: object) -> None:
        """Keep a connection for the next question, or close it if it had no answer."""
        if answer is not None:
            self._pause = FIRST_PAUSE
            with self._lock:
                if len(self._kept) < _KEPT:
                    self._kept.append(connection)
                    return
        connection.close()

    def _failed(self, error: Exception) -> None:
        """Don't ask the agent for a while."""
        self.failures += 1
        now = self._clock()
        self._silent_until = self.nothing_until = now + self._pause
        log.info("kcache asks no remote for %.0f s: %s", self._pause, error)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def close(self) -> None:
        """Close the connections. Idempotent; a later question makes a new one."""
        with self._lock:
            kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()

    def after_fork(self) -> None:
        """In a child process, leave the connections to the parent."""
        self._lock = threading.Lock()
        self.close()


def client_for(setup: Setup, folders: Sequence[str], environment: Mapping[str, str]) -> Client:
    """Return the client of the agent with a setup, whose socket is in one of the folders.

    If none of the folders is private, the client's questions have no answer.
    """

    def connect() -> socket.socket:
        from kcache.remote.start import connected, socket_path

        return connected(socket_path(folders, setup), setup, environment)

    def note() -> None:
        from kcache.remote.start import socket_path
        from kcache.util.private_socket import note_silence

        with suppress(RemoteError):
            note_silence(socket_path(folders, setup))

    return Client(setup, connect, note_silence=note)
