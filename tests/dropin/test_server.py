"""The server's parts by themselves: what it sends, and the threads that attend its clients."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

from kcache.dropin import known, protocol, server
from kcache.dropin.answering import Answering, standing
from kcache.kernel_cache import KernelCache
from kcache.nvrtc import library
from kcache.nvrtc.workers.pool import shared


@pytest.mark.parametrize("size", [0, 1, 100, 1 << 21])
def test_a_frame_arrives_whole(size: int) -> None:
    """Head and payload are sent at once; what the connection does not take follows."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    client = server._Client(ours)
    sending = threading.Thread(target=client.send, args=(protocol.ANSWER, payload))
    sending.start()
    with theirs:
        wanted = protocol.frame(protocol.ANSWER, payload)
        assert theirs.recv(len(wanted), socket.MSG_WAITALL) == wanted
        sending.join(60)
        client.close()
        assert theirs.recv(1) == b""


def test_a_program_that_does_not_read_keeps_no_other_waiting() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client = server._Client(ours)
    with suppress(BlockingIOError):
        while True:
            ours.send(bytes(16), socket.MSG_DONTWAIT)
    ours.settimeout(server.FRAME_TIMEOUT)  # as while a request is answered
    client.waiting_since = 0.0
    reassuring = threading.Thread(target=client.reassure, args=(time.monotonic(),))
    reassuring.start()
    reassuring.join(20)
    blocked = reassuring.is_alive()
    theirs.close()
    reassuring.join()
    assert not blocked
    client.close()
    client.waiting_since = 0.0
    client.reassure(time.monotonic())  # closed by another thread meanwhile: nothing is raised


def test_a_thread_that_waits_attends_the_next_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_WAITING", 2)
    seen: SimpleQueue[int] = SimpleQueue()
    free = threading.Semaphore(0)
    left: SimpleQueue[int] = SimpleQueue()
    ended: SimpleQueue[int] = SimpleQueue()
    client = server._Client(socket.socket(socket.AF_UNIX))

    def attend(_client: server._Client, _process: int) -> None:
        seen.put(threading.get_ident())
        free.acquire()
        left.put(threading.get_ident())

    attendants = server.Attendants(attend)

    def stay() -> None:
        attendants.stay()
        ended.put(threading.get_ident())

    thread = threading.Thread(target=stay)
    thread.start()
    _until(lambda: attendants._waiting == 1)
    for _ in range(3):
        attendants.give(client, 0)
    first = [seen.get(timeout=60) for _ in range(3)]
    assert thread.ident in first
    assert len(set(first)) == 3
    free.release(3)
    assert {left.get(timeout=60) for _ in range(3)} == set(first)
    _until(lambda: attendants._waiting == 2)  # the third ends: enough wait already
    for _ in range(3):
        attendants.give(client, 0)
    second = [seen.get(timeout=60) for _ in range(3)]
    assert len(set(first) & set(second)) >= 2
    attendants.end()
    free.release(3)
    thread.join(60)
    assert ended.get(timeout=60) == thread.ident
    client.close()


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_getting_ready_counts_nothing(nvrtc: tuple[int, int], tmp_path: Path) -> None:
    found = library.find()
    assert found is not None
    with KernelCache(tmp_path / "cache") as cache:
        answering = Answering(cache, str(tmp_path))
        workers = shared().pids()
        answering.warm_up()
        assert shared().pids() == workers  # most programs never compile
        known.remember(str(tmp_path), found.identity, (nvrtc, (75, 90)))
        answering.warm_up()
        assert answering.about(os.fsencode(found.path), standing()) == (nvrtc, (75, 90))
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.compiles, cache.entry_count) == (0, 0, 0, 0)
