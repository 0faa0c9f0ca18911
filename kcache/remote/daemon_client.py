"""DaemonClient: a program's connection to the daemon that asks the remotes.

The first question starts the daemon if it does not run. Each wait for the daemon has a time limit.
Only the daemon imports the libraries for HTTP, Redis and object stores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from kcache.daemons.sockets import DONE, Channel, remove_socket, socket_identity
from kcache.daemons.spawn import connect_or_spawn
from kcache.entry import Candidate
from kcache.remote import daemon_protocol as protocol
from kcache.remote.daemon_protocol import GetReply, Setup, Upload
from kcache.remote.storage import RemoteError
from kcache.util import log
from kcache.util.forks import after_fork
from kcache.util.wire import WireError

#: The seconds that an answer of the daemon may take in addition to the time-outs of the remotes.
#: The daemon starts within a second, but takes longer on a loaded machine.
PATIENCE = 5.0
#: After the daemon has failed, no question is sent for this many seconds.
PAUSE = 30.0
#: The largest number of idle connections that are kept for further questions.
_KEPT = 8


class Lease:
    """The right to be the only process, on all machines, that compiles a kernel.

    The daemon renews a lease until it is released or its connection is closed. So a lease ends at
    the latest when the process that holds it exits.
    """

    def __init__(self, connection: Channel, key: str, token: bytes) -> None:
        self.connection = connection
        self.key = key
        self.token = token
        #: Whether the lease was released, or passed to the daemon with an upload.
        self.ended = False


class DaemonClient:
    """Sends questions to the daemon for one `Setup`, and starts the daemon if it does not run.

    If the daemon fails, the program waits for it once, for a limited time, and then sends no
    question for `PAUSE` seconds. If a daemon does not answer in time, its socket is removed, so
    that the next program starts another daemon. The daemon's warnings about failing remotes are
    shown to the user.

    Threads: Several threads may use one object, because each question has a connection of its own.
    Fork: A forked child makes new connections. Crash: The daemon notices that the connections of a
    process are closed, and releases the leases of that process.

    Args:
        setup: the configuration of the daemon.
        path: a function that returns the path of the daemon's socket, or raises OSError.
        environment: the environment variables of the daemon, if this object starts it.
        warn: a function that is called with each warning for the user.

    Attributes:
        path: the function that returns the path of the daemon's socket.
        nothing_until: the monotonic time until which no question is sent, because the daemon has
            failed or no remote can be asked.
        group: the process group of this program. The daemon warns each group once about a remote.
    """

    def __init__(
        self,
        setup: Setup,
        path: Callable[[], str],
        environment: Mapping[str, str],
        *,
        warn: Callable[[str], object] = log.warning_once,
    ) -> None:
        self.addresses = setup.addresses
        self.writable = any(address.writable for address in setup.addresses)
        self.leases = any(address.leases for address in setup.addresses)
        self.timeout = PATIENCE + sum(address.seconds() for address in setup.addresses)
        self.group = log.group()
        self.nothing_until = 0.0
        self._daemon = setup.daemon()
        self.path = path
        self._environment = environment
        self._warn = warn
        self._kept: list[Channel] = []
        self._lock = threading.Lock()
        #: The path and the identity of the socket of the last connection.
        self._socket: tuple[str, tuple[int, int] | None] = "", None
        after_fork(self)

    # -- questions -----------------------------------------------------------------------------

    @property
    def worth_asking(self) -> bool:
        """Whether a question may be sent now (see `nothing_until`)."""
        return time.monotonic() >= self.nothing_until

    def get(self, *keys: str, first: int = 0) -> GetReply | None:
        """Ask the remotes for an entry under one of `keys`; return the daemon's reply.

        The remotes are asked in order, beginning with index `first`. Each is asked for all `keys`
        in their order, until a remote has an entry. The result is None if the daemon does not
        answer, or if no question may be sent now.
        """
        if not self.worth_asking:
            return None
        answer = self._ask(protocol.GET, b"%d" % first, *map(str.encode, keys))
        if answer is None:
            return None
        try:
            found = GetReply.unpack(answer)
            if found.which >= len(keys) or not first <= found.remote <= len(self.addresses):
                raise WireError(f"expected one of {len(keys)} keys, got number {found.which}")
        except WireError as error:
            self._failed(error)
            return None
        if found.wait > 0:
            self.nothing_until = time.monotonic() + found.wait
        return found

    def offers(self, *keys: str) -> Iterator[Candidate]:
        """Yield one entry from each remote that has any of `keys`, in the order of the remotes.

        If a remote has several of `keys`, the entry is the one under the first of them.

        Raises:
            RemoteError: a remote or the daemon did not answer. This is raised after the last entry.
        """
        first = unanswered = 0
        while first < len(self.addresses):
            found = self.get(*keys, first=first)
            unanswered += 1 if found is None else found.unanswered
            if found is None or found.value is None:
                break
            yield Candidate(keys[found.which], found.value, self.addresses[found.remote].keep)
            first = found.remote + 1
        if unanswered:
            raise RemoteError("a remote did not answer")

    def put(self, upload: Upload, lease: Lease | None = None) -> bool:
        """Send `upload` to the daemon, which queues it; return whether the daemon has received it.

        The daemon releases `lease` when the upload has ended. If the queue is full, the daemon
        drops the upload.
        """
        if lease is None:
            return self._ask(protocol.PUT, *upload.pack()) is not None
        lease.ended = True
        return self._ask(protocol.PUT, *upload.pack(), on=lease.connection) is not None

    def lease(self, key: str) -> Lease | bool:
        """Try to acquire the lease of `key`; return the lease, or whether another program holds it.

        False means that no remote can grant leases, so that each program compiles on its own.
        """
        connection = self._connection()
        if connection is None:
            return False
        answer = self._ask(protocol.LEASE, key.encode(), on=connection)
        if answer is not None and len(answer) == 2 and answer[0] == b"taken":
            return Lease(connection, key, answer[1])
        if answer is not None:
            self._keep(connection)
        return answer == [b"busy"]

    def release(self, lease: Lease) -> None:
        """Release a lease that was not passed to `put`."""
        lease.ended = True
        self._ask(protocol.RELEASE, lease.key.encode(), lease.token, on=lease.connection)

    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds` until all uploads have ended; return whether all have ended."""
        return self._ask(protocol.FLUSH, b"%d" % (seconds * 1000), more=seconds) == [b"1"]

    # -- connections -----------------------------------------------------------------------------

    def _ask(
        self, kind: bytes, *arguments: bytes, on: Channel | None = None, more: float = 0.0
    ) -> list[bytes] | None:
        """Send a question to the daemon; return the fields of the answer after its warnings.

        The warnings are shown to the user. The result is None if there is no answer; then no
        question is sent for `PAUSE` seconds. The connection is kept for further questions, except
        after `LEASE`, because a lease may belong to the connection.

        Args:
            kind, arguments: the question.
            on: the connection to use; by default, an idle or a new one.
            more: seconds that the answer may take, in addition to the time-outs of the remotes.
        """
        with self._lock:
            kept = self._kept.pop() if self._kept and on is None else None
        connection = on or kept or self._connection()
        if connection is None:
            return None
        question = [kind, b"%d" % self.group, *arguments]
        try:
            answer = connection.ask(question, self.timeout + more)
            if len(answer) < 2 or answer[0] != DONE:
                raise WireError("the answer of the daemon is malformed")
        except (OSError, WireError) as error:
            connection.close()
            if isinstance(error, TimeoutError):
                remove_socket(*self._socket)
            elif kept is not None:  # the daemon may have exited since
                return self._ask(kind, *arguments, more=more)
            self._failed(error)
            return None
        _, warnings, *result = answer
        for line in warnings.decode("utf-8", "replace").splitlines():
            self._warn(line)
        if kind != protocol.LEASE:
            self._keep(connection)
        return result

    def _connection(self) -> Channel | None:
        """Return a new connection to the daemon, which is started if it does not run.

        The result is None if the daemon can't be reached, or if no question may be sent now.
        """
        if not self.worth_asking:
            return None
        try:
            path = self.path()
            connection = connect_or_spawn(path, self._daemon, self._environment)
            self._socket = path, socket_identity(path)
            return Channel(connection, self.timeout)
        except OSError as error:
            self._failed(error)
            return None

    def _keep(self, connection: Channel) -> None:
        """Keep a connection for the next question, or close it if `_KEPT` are kept already."""
        with self._lock:
            if len(self._kept) < _KEPT:
                self._kept.append(connection)
                return
        connection.close()

    def _failed(self, error: Exception) -> None:
        """Warn the user that the daemon failed with `error`, and send no question for a while."""
        self.nothing_until = time.monotonic() + PAUSE
        self._warn(f"remotes are not used for {PAUSE:g} s: {error}; kcache works without them")

    def close(self) -> None:
        """Close the idle connections. Idempotent. A later question makes a new connection."""
        with self._lock:
            kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()

    def after_fork(self) -> None:
        """In a child process after a fork, forget the connections, which belong to the parent."""
        self._lock = threading.Lock()
        self._kept = []
