"""DaemonClient: a program's connection to the daemon that asks the remotes.

Each wait has a limit. The program imports no client of HTTP, Redis or an object store. The first
question starts the daemon.
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

#: Seconds that the daemon may take beyond the time-outs of the remotes. It starts within a second,
#: but a loaded machine is slow.
PATIENCE = 5.0
#: Seconds without questions after the daemon has failed.
PAUSE = 30.0
#: Connections that are kept for the next question.
_KEPT = 8


class Lease:
    """The right to be the only process, on all machines, that compiles a kernel.

    It lasts until it is released. The daemon renews it while the connection is open, so it ends
    with this process.
    """

    def __init__(self, connection: Channel, key: str, token: bytes) -> None:
        self.connection = connection
        self.key = key
        self.token = token
        #: Whether it was released, or passed to the daemon with an upload.
        self.ended = False


class DaemonClient:
    """Asks the daemon of one `Setup`, and starts it if it does not run.

    A failure of the daemon costs one bounded wait; then no question is asked for a while. The
    socket of a daemon that does not answer in time is removed, so that the next program starts
    another one. The user gets the daemon's warnings about remotes that fail.

    Threads: may share it; each question has a connection of its own. Fork: the child makes new
    connections. Crash: the daemon notices that the connections are closed.

    Args:
        setup: the configuration of the daemon.
        path: returns the path of its socket; raises OSError.
        environment: the variables of a daemon that is started.
        warn: called with each sentence for the user.

    Attributes:
        path: returns the path of the daemon's socket.
        nothing_until: the monotonic time until which no question is asked, because the daemon has
            failed, or the breakers of all remotes are open.
        group: the process group that is warned, once about each remote.
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
        #: The socket of the last connection.
        self._socket: tuple[str, tuple[int, int] | None] = "", None
        after_fork(self)

    # -- questions -----------------------------------------------------------------------------

    @property
    def worth_asking(self) -> bool:
        """Whether a remote may be asked now."""
        return time.monotonic() >= self.nothing_until

    def get(self, *keys: str, first: int = 0) -> GetReply | None:
        """Ask the remotes from index `first` on, in order, for the first of the keys that one has.

        All keys are sent in one question. The result is None if the daemon does not answer.
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
        """Yield what each remote has, in order, under the first of the keys that it has.

        Raises:
            RemoteError: at the end, if a remote or the daemon did not answer.
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
        """Queue an upload; return whether the daemon has accepted it."""
        if lease is None:
            return self._ask(protocol.PUT, *upload.pack()) is not None
        lease.ended = True
        return self._ask(protocol.PUT, *upload.pack(), on=lease.connection) is not None

    def lease(self, key: str) -> Lease | bool:
        """Acquire the lease of `key`; if that fails, return whether another program has it.

        False means that there are no leases, so every program compiles by itself.
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
        """Release a lease under which nothing was uploaded."""
        lease.ended = True
        self._ask(protocol.RELEASE, lease.key.encode(), lease.token, on=lease.connection)

    def flush(self, seconds: float) -> bool:
        """Wait until all uploads have ended; return whether they have."""
        return self._ask(protocol.FLUSH, b"%d" % (seconds * 1000), more=seconds) == [b"1"]

    # -- connections -----------------------------------------------------------------------------

    def _ask(
        self, kind: bytes, *arguments: bytes, on: Channel | None = None, more: float = 0.0
    ) -> list[bytes] | None:
        """Return the answer without the daemon's warnings, which are shown to the user.

        The result is None if there is no answer; then no question is asked for a while. The
        connection is kept for other questions, unless a lease may belong to it.

        Args:
            kind, arguments: the question.
            on: the connection; by default any.
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
        """Return a new connection, or None if the daemon can't be reached."""
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
        """Keep a connection for the next question, or close it if there are enough."""
        with self._lock:
            if len(self._kept) < _KEPT:
                self._kept.append(connection)
                return
        connection.close()

    def _failed(self, error: Exception) -> None:
        """Ask no question for a while."""
        self.nothing_until = time.monotonic() + PAUSE
        self._warn(f"remotes are not used for a while: {error}; kcache works without them")

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
