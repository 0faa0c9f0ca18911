"""Server: answers programs over a Unix socket, until the process that it serves has ended."""

from __future__ import annotations

import json
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kcache.dropin import protocol
from kcache.dropin.counts import REMOTE_COUNTS, Counts
from kcache.dropin.protocol import ProtocolError
from kcache.util import log

if TYPE_CHECKING:
    from kcache.dropin.answering import Answering

__all__ = ["Server"]

#: Most connections at the same time, each with a thread. Further programs are refused, and compile
#: by themselves.
MAX_CONNECTIONS = 4096
#: Bytes that a connection takes before the program reads, so that a kernel of 100 KiB with its PTX
#: is sent at once. The system doubles this. Its default limit is 208 KiB before the doubling.
SEND_BUFFER = 208 << 10
#: Threads that wait for clients: as many as the programs that a `make` starts at a time.
MAX_WAITING = 8
#: Seconds between two signs of life to a program that waits; it waits at most 5 s for one.
HEARTBEAT = 0.5
#: Seconds for the rest of a frame that has begun, and for a program to receive an answer. A program
#: that was stopped (Ctrl-Z) may take long, and costs a thread meanwhile.
FRAME_TIMEOUT = 60.0
#: Seconds after which a connection without questions is closed; the program then makes another.
IDLE_TIMEOUT = 300.0
#: Seconds to pause if no connection can be accepted because there are no free descriptors.
PAUSE = 0.05
#: Seconds after which a server without new programs sees whether it can still be reached.
LOOK_AROUND = 30.0
_CHUNK = 1 << 18
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: `struct ucred` of unix(7)


class _Client:
    """One connection.

    Threads: one answers it; another may send signs of life.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pending = bytearray()
        self._sending = threading.Lock()
        self.waiting_since: float | None = None

    def receive(self) -> tuple[int, bytes] | None:
        """Return the next frame's kind and payload, or None at the end.

        Raises:
            ProtocolError: the data is no frame; OSError: the frame did not come in time.
        """
        self._socket.settimeout(IDLE_TIMEOUT)
        if not self._pending and not self._more():
            return None
        self._socket.settimeout(FRAME_TIMEOUT)
        if not self._fill(protocol.HEAD_SIZE):
            return None
        kind, size = protocol.unpack_head(self._pending)
        end = protocol.HEAD_SIZE + size
        if not self._fill(end):
            return None
        payload = bytes(memoryview(self._pending)[protocol.HEAD_SIZE : end])
        del self._pending[:end]
        return kind, payload

    def _fill(self, size: int) -> bool:
        while len(self._pending) < size:
            if not self._more():
                return False
        return True

    def _more(self) -> bool:
        received = self._socket.recv(_CHUNK)
        self._pending += received
        return bool(received)

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Send a frame, which ends the wait of the other end."""
        with self._sending:
            self.waiting_since = None
            self._socket.settimeout(FRAME_TIMEOUT)
            self._send_all(protocol.head(kind, len(payload)), payload)

    def _send_all(self, head: bytes, payload: bytes) -> None:
        """Send both at once, so that the program wakes up once, and then what did not fit."""
        sent = self._socket.sendmsg((head, payload))
        if sent < len(head):
            self._socket.sendall(head[sent:])
            sent = len(head)
        if sent < len(head) + len(payload):
            self._socket.sendall(memoryview(payload)[sent - len(head) :])

    def reassure(self, now: float) -> None:
        """Send a sign of life to a program that waits."""
        since = self.waiting_since
        if since is None or now - since < HEARTBEAT or not self._sending.acquire(blocking=False):
            return
        try:
            # 16 bytes are sent as a whole or not at all: they don't fill the rest of a buffer. If a
            # timeout is set, Python first waits for room. Then all programs would wait for one that
            # was stopped (Ctrl-Z), or does not read.
            if self.waiting_since is not None and self._has_room():
                self._socket.send(protocol.frame(protocol.WAIT), socket.MSG_DONTWAIT)
        except (OSError, ValueError):
            pass  # the thread that answers will notice
        finally:
            self._sending.release()

    def _has_room(self) -> bool:
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        return bool(room.poll(0))

    def close(self) -> None:
        """End the connection; a thread that reads from it wakes up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Attendants:
    """Threads that attend clients. Some wait for the next one: starting a thread takes 0.3 ms.

    Threads: safe to share. Fork: the child has none of them.

    Args:
        attend: attends a client until it leaves, and raises nothing.
    """

    def __init__(self, attend: Callable[[_Client, int], None]) -> None:
        self._attend = attend
        self._lock = threading.Lock()
        self._waiting = 0
        self._ended = False
        self._given: SimpleQueue[tuple[_Client, int] | None] = SimpleQueue()

    def give(self, client: _Client, process: int) -> None:
        """Give a client to a waiting thread, or to a new one.

        Raises:
            RuntimeError: there can be no more threads.
        """
        with self._lock:
            waits = self._waiting > 0
            self._waiting -= waits
        if waits:
            self._given.put((client, process))
        else:
            threading.Thread(target=self._work, args=((client, process),), daemon=True).start()

    def stay(self) -> None:
        """Attend clients in this thread, as they come."""
        self._work(self._next())

    def end(self) -> None:
        """End the threads that have no client; the others end when their client leaves."""
        with self._lock:
            self._ended, waiting, self._waiting = True, self._waiting, 0
        for _ in range(waiting):
            self._given.put(None)

    def _work(self, given: tuple[_Client, int] | None) -> None:
        while given is not None:
            self._attend(*given)
            given = self._next()

    def _next(self) -> tuple[_Client, int] | None:
        """Wait for a client; None if enough threads wait already."""
        with self._lock:
            if self._ended or self._waiting >= MAX_WAITING:
                return None
            self._waiting += 1
        return self._given.get()


class Server:
    """Answers the programs of one user.

    Threads: `serve` runs in one thread; each connection has one of its own. Whatever a client does
    (dies in the middle of a frame, sends nonsense, stops reading), only its own connection ends.

    Args:
        listener: a socket that listens.
        make_answering: makes the `Answering`; called once, after the first client can be accepted.
        about: what the answer to a `STATUS` frame has beside the counts.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_answering: Callable[[], Answering],
        about: Mapping[str, object],
    ) -> None:
        self._listener = listener
        self._make_answering = make_answering
        self._answering: Answering | None = None
        self._making = threading.Lock()
        self._about = about
        self.counts = Counts()
        self._clients: set[_Client] = set()
        self._lock = threading.Lock()
        self._attendants = Attendants(self._attend)
        self._stopped = threading.Event()
        self._wake, self._waker = socket.socketpair()

    def serve(
        self, until: int | None = None, is_reachable: Callable[[], bool] | None = None
    ) -> None:
        """Accept clients until `stop`, or until the descriptor `until` becomes readable.

        If `is_reachable` is given, also until it returns False while there are no clients.
        """
        pause = None if is_reachable is None else LOOK_AROUND
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            for source in (self._listener, self._wake, until):
                if source is not None:
                    selector.register(source, selectors.EVENT_READ)
            threading.Thread(target=self._reassure, daemon=True).start()
            threading.Thread(target=self._begin_attending, daemon=True).start()
            while not self._stopped.is_set():
                ready = [key.fileobj for key, _ in selector.select(pause)]
                if self._listener in ready:
                    self._accept()
                elif ready or not (self._clients or is_reachable is None or is_reachable()):
                    break
        self.stop()

    def stop(self) -> None:
        """End `serve`, and every connection."""
        self._stopped.set()
        with suppress(OSError):
            self._waker.send(b"x")
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.close()
        self._attendants.end()

    # -- connections -------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, most likely
            log.warning("the drop-in's server can't accept a program: %s", error)
            self._stopped.wait(PAUSE)
            return
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        process, user, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid() or len(self._clients) >= MAX_CONNECTIONS:
            connection.close()
            return
        client = _Client(connection)
        with self._lock:
            self._clients.add(client)
        try:
            self._attendants.give(client, process)
        except RuntimeError:  # no more threads
            self._leave(client)

    def _attend(self, client: _Client, process: int) -> None:
        try:
            while (asked := client.receive()) is not None:
                client.waiting_since = time.monotonic()
                self._handle(client, process, *asked)
                client.waiting_since = None
        except ProtocolError as error:
            log.debug("process %d: %s", process, error)
        except OSError as error:
            log.debug("process %d is gone: %s", process, error)
        except Exception as error:
            log.warning("the request of process %d failed: %r", process, error)
        finally:
            self._leave(client)

    def _leave(self, client: _Client) -> None:
        client.close()
        with self._lock:
            self._clients.discard(client)

    def _reassure(self) -> None:
        while not self._stopped.wait(HEARTBEAT / 2):
            with self._lock:
                clients = list(self._clients)
            now = time.monotonic()
            for client in clients:
                client.reassure(now)

    # -- answers -----------------------------------------------------------------------------------

    def _begin_attending(self) -> None:
        """Get ready, and attend the first client in the same thread, whose caches are warm."""
        with suppress(Exception):  # a program that asks is told
            self._answers().warm_up()
        self._attendants.stay()

    def _answers(self) -> Answering:
        with self._making:
            if self._answering is None:
                self._answering = self._make_answering()
            return self._answering

    def _handle(self, client: _Client, process: int, kind: int, payload: bytes) -> None:
        if kind == protocol.COMPILE:
            self.counts.asked(process)
            client.send(*self._compile(payload))
        elif kind == protocol.QUERY:
            self.counts.asked(process)
            client.send(*self._query(payload))
        elif kind == protocol.NOTE:
            self.counts.asked(process)
            self.counts.handed(payload[:80].decode(errors="replace"))
        elif kind == protocol.STATUS:
            client.send(protocol.INFO, json.dumps(self.status()).encode())
        elif kind == protocol.STOP:
            client.send(protocol.INFO)
            self.stop()
        else:
            raise ProtocolError(f"a frame of kind {kind}")

    def _compile(self, payload: bytes) -> tuple[int, bytes]:
        from kcache.dropin.answering import Declined

        program = protocol.unpack_program(payload)
        try:
            answering = self._answers()
        except Exception as error:  # a setting that is not allowed, a directory that is unsafe
            return protocol.DECLINED, f"no cache: {error}".encode()
        answer = answering.answer(program)
        if isinstance(answer, Declined):
            self.counts.handed(answer.reason[:80])
            return protocol.DECLINED, answer.reason.encode()
        saved = answer.seconds if answer.hit else 0.0
        self.counts.answered(hit=answer.hit, failed=answer.result != 0, saved=saved)
        return protocol.ANSWER, protocol.pack_answer(answer)

    def _query(self, payload: bytes) -> tuple[int, bytes]:
        from kcache.dropin.answering import Declined

        path, standing = protocol.unpack_query(payload)
        try:
            about = self._answers().about(path, standing)
        except Exception as error:
            return protocol.DECLINED, f"no cache: {error}".encode()
        if isinstance(about, Declined):
            return protocol.DECLINED, about.reason.encode()
        return protocol.INFO, protocol.pack_info(*about)

    def status(self) -> dict[str, Any]:
        """Return the answer to a `STATUS` frame."""
        answering = self._answering
        remotes = (
            dict.fromkeys(REMOTE_COUNTS, 0) if answering is None else answering.remote_counts()
        )
        counts = {**self.counts.as_dict(), **remotes}
        return {**self._about, "connections": len(self._clients), "counts": counts}

    def close(self) -> None:
        """Close the cache, if one was opened."""
        answering = self._answering
        if answering is not None:
            answering.close()
