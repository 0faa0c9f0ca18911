"""Agent: the process that talks to remotes for all programs of a user with one configuration.

A program starts it by exec with its first question. It passes the listening socket to the agent,
and its `Setup` through a pipe. The agent has a session of its own. It continues uploads after the
last program has ended, for at most `LINGER` seconds. It ends if nobody has needed it for `IDLE`
seconds (`LACKING_IDLE` if a package or a file is missing).
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from kcache.remote import protocol
from kcache.remote.agent_setup import Setup
from kcache.remote.breaker import LACKING
from kcache.remote.channel import Channel
from kcache.remote.counts import Counts, save_counts, saved_counts
from kcache.remote.protocol import Found, ProtocolError, Upload, key_in, number_in, seconds_in
from kcache.remote.seal import make_sealer
from kcache.remote.tier import Tier
from kcache.remote.uploads import Uploads
from kcache.util import log
from kcache.util.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["IDLE", "LINGER", "Agent", "main"]

#: Seconds from the disconnect of the last program to the end of the agent. So the next command of a
#: shell script need not start another agent.
IDLE = 60.0
#: The same if this machine lacks something for a remote. Somebody may install the package meanwhile
#: in a folder that this process does not search. The next program's agent searches it.
LACKING_IDLE = 2.0
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
#: Seconds between two saves of the counts.
SAVE_EVERY = 10.0
#: A lease is renewed this many times before it would end.
RENEWALS = 6
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: `struct ucred` of unix(7)


class Agent:
    """Answers programs from remotes.

    Threads: `serve` runs in one thread, and each connection has one of its own. Whatever a program
    does, only its own connection ends. Crash: programs compile without the remotes, and one of them
    starts another agent.

    Args:
        listener: a socket that listens.
        path: the path at which programs find the socket.
        tiers: the remotes, in order.
    """

    def __init__(self, listener: socket.socket, path: str, tiers: Sequence[Tier]) -> None:
        self._listener = listener
        self._path = path
        self._tiers = tiers
        self._uploads = [Uploads(tier, self._uploaded) for tier in tiers]
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._told_to_end = False
        self._stopped = threading.Event()
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: (key, token) -> number of uploads that must end before the lease is released.
        self._leases: dict[tuple[str, str], int] = {}
        self._started = time.time()
        self._inode = _inode(path)

    # -- the socket ------------------------------------------------------------------------------

    def serve(self) -> None:
        """Accept programs until none needs the agent, or the socket is no longer at its path."""
        self._listener.setblocking(False)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._awake, select.POLLIN)
        threading.Thread(target=self._renew_leases, daemon=True).start()
        needed = saved = time.monotonic()
        while not self._told_to_end:
            if poll.poll(LOOK_EVERY * 1e3):
                self._accept()
            now = time.monotonic()
            if self._connections:
                needed = now
            if now - saved > SAVE_EVERY:
                saved = now
                self._save_counts()
            pending = any(uploads.pending for uploads in self._uploads)
            idle = now - needed
            lacking = any(tier.breaker.cause == LACKING for tier in self._tiers)
            enough = LACKING_IDLE if lacking else IDLE
            found = _inode(self._path) == self._inode
            if idle > LINGER + IDLE or (
                not pending and (idle > enough or (idle > 0 and not found))
            ):
                break
        self._stop()

    def wake(self) -> None:
        """End `serve` soon, from any thread."""
        self._told_to_end = True
        with suppress(OSError):  # it has ended
            os.eventfd_write(self._awake, 1)

    def _stop(self) -> None:
        """Close the socket and the remotes.

        Pending uploads are sent before the remotes are closed, because the programs that made them
        may have ended, and others may wait for a kernel under a lease. All leases are released.
        """
        self._unlink()
        self._listener.close()
        self._flush(LINGER)
        self._stopped.set()
        if _inode(self._path) is None:  # no other agent has continued the counts
            save_counts(self._path, [tier.as_dict() for tier in self._tiers])
        with self._lock:
            leases = list(self._leases)
        for lease in leases:
            self._give_back(lease)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for tier in self._tiers:
            with suppress(Exception):
                tier.close()

    def _unlink(self) -> None:
        """Save the counts and remove the socket, so that programs can start another agent."""
        self._save_counts()
        if _inode(self._path) == self._inode:
            with suppress(OSError):
                os.unlink(self._path)

    def _save_counts(self) -> None:
        """Write the counts beside the socket, for the next agent and for commands."""
        if _inode(self._path) == self._inode:
            save_counts(self._path, [tier.as_dict() for tier in self._tiers])

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._awake)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the program is gone already, or no descriptor is left
            self._stopped.wait(0.05)
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
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _attend(self, connection: socket.socket) -> None:
        """Answer one program until it disconnects, and then release its leases."""
        leases: set[tuple[str, str]] = set()
        try:
            channel = Channel(connection, MESSAGE_TIMEOUT, QUESTION)
            while True:
                channel.send(self._answer(channel.next(), leases))
        except (WireError, OSError, ProtocolError) as error:
            log.debug("a program is gone: %s", error)
        except Exception as error:
            log.warning("the request of a program failed: %r", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()
            for lease in leases:
                self._give_back(lease)

    # -- answers -----------------------------------------------------------------------------------

    def _answer(self, question: Sequence[bytes], leases: set[tuple[str, str]]) -> list[bytes]:
        kind = question[0] if question else b""
        arguments = question[1:]
        if kind == protocol.GET and 2 <= len(arguments) <= 1 + protocol.MOST_KEYS:
            keys = [key_in(key) for key in arguments[1:]]
            return self._get(keys, number_in(arguments[0])).pack()
        if kind == protocol.PUT:
            self._put(Upload.unpack(arguments), leases)
            return [b"1"]
        if kind == protocol.LEASE and len(arguments) == 1:
            return self._lease(key_in(arguments[0]), leases)
        if kind == protocol.RELEASE and len(arguments) == 2:
            lease = key_in(arguments[0]), key_in(arguments[1])
            leases.discard(lease)
            self._give_back(lease)
            return [b"1"]
        if kind == protocol.FLUSH and len(arguments) == 1:
            return [b"%d" % self._flush(seconds_in(arguments[0]))]
        simple: dict[bytes, Callable[[], bytes]] = {
            protocol.HELLO: lambda: protocol.VERSION,
            protocol.STATS: lambda: json.dumps(self.status()).encode(),
            protocol.STOP: self._bye,
        }
        if kind in simple and not arguments:
            return [simple[kind]()]
        raise ProtocolError(f"a question {bytes(kind[:20])!r}")

    def _get(self, keys: Sequence[str], first: int) -> Found:
        """Ask the remotes in order, beginning with index `first`."""
        for index in range(first, len(self._tiers)):
            found = self._tiers[index].get(*keys)
            if found is not None:
                which, value = found
                self._keep_above(index, keys[which], value)
                return Found(value, index, 0.0, which)
        waits = [tier.breaker.wait() for tier in self._tiers]
        return Found(None, len(self._tiers), min(waits, default=60.0))

    def _keep_above(self, index: int, key: str, value: bytes) -> None:
        """Put the entry of a remote to those before it, which are asked first.

        A manifest is merged into theirs, and a kernel is stored where they have none.
        """
        if self._tiers[index].address.keep:
            for above in range(index):
                if self._tiers[above].address.writable:
                    self._uploads[above].add(Upload(None, (key, value)))

    def _put(self, upload: Upload, leases: set[tuple[str, str]]) -> None:
        """Queue an upload for every writable remote."""
        writable = [n for n, tier in enumerate(self._tiers) if tier.address.writable]
        if upload.lease is not None:
            leases.discard(upload.lease)
            with self._lock:
                if upload.lease in self._leases:
                    self._leases[upload.lease] = len(writable)
            if not writable:
                self._give_back(upload.lease)
        for index in writable:
            self._uploads[index].add(upload)

    def _uploaded(self, upload: Upload) -> None:
        """Release a lease after the last upload under it."""
        if upload.lease is None:
            return
        with self._lock:
            left = self._leases.get(upload.lease, 0) - 1
            if left > 0:
                self._leases[upload.lease] = left
        if left <= 0:
            self._give_back(upload.lease)

    def _flush(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        return all(uploads.flush(deadline) for uploads in self._uploads)

    def status(self) -> dict[str, object]:
        """Return the status of this agent, without credentials."""
        return {
            "process": os.getpid(),
            "started": self._started,
            "pending": sum(uploads.pending for uploads in self._uploads),
            "tiers": [tier.as_dict() for tier in self._tiers],
        }

    def _bye(self) -> bytes:
        self.wake()
        return protocol.BYE

    # -- leases ------------------------------------------------------------------------------------

    def _lease_tier(self) -> Tier | None:
        return next((tier for tier in self._tiers if tier.leases), None)

    def _lease(self, key: str, leases: set[tuple[str, str]]) -> list[bytes]:
        """Take a lease for a program; the answer has its token, or says `busy` or `none`."""
        tier = self._lease_tier()
        if tier is None:
            return [b"none"]
        token = secrets.token_hex(32)
        taken = tier.lease(key, token, tier.address.lease_seconds)
        if taken is None:
            return [b"none"]
        if not taken:
            return [b"busy"]
        with self._lock:
            self._leases[key, token] = 0
        leases.add((key, token))
        return [b"taken", token.encode()]

    def _give_back(self, lease: tuple[str, str]) -> None:
        with self._lock:
            had = self._leases.pop(lease, None) is not None
        tier = self._lease_tier()
        if had and tier is not None:
            tier.release(*lease)

    def _renew_leases(self) -> None:
        """Renew the leases of programs while they and this process live."""
        tier = self._lease_tier()
        seconds = 0.0 if tier is None else tier.address.lease_seconds
        while tier is not None and not self._stopped.wait(seconds / RENEWALS):
            with self._lock:
                leases = list(self._leases)
            for lease in leases:
                if tier.renew(*lease, seconds) is False:
                    with self._lock:  # lost: at worst, another program compiles the kernel, too
                        self._leases.pop(lease, None)


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def main() -> None:
    """Be an agent: `kcache.remote.start` runs this by exec, with its setup on standard input."""
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_DFL)
    with os.fdopen(0, "rb", closefd=False) as stream:
        listener, path, setup = json.loads(stream.read())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    os.set_inheritable(listener, False)
    run(socket.socket(fileno=listener), path, Setup.unpack(setup.encode()))


def run(listener: socket.socket, path: str, setup: Setup) -> None:
    """Serve with a setup until no program needs the agent."""
    # `cache` keeps no exception. So keys that can't be read now, or that need a package which is
    # missing, are tried again the next time.
    sealer = cache(lambda: make_sealer(setup.settings.get("signing_key_file")))
    past = saved_counts(path)
    tiers = [
        Tier(address, sealer, Counts(past.get(address.redacted()))) for address in setup.addresses
    ]
    Agent(listener, path, tiers).serve()
