"""The server's parts by themselves: what it sends, and the threads that attend its clients."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

from kcache.dropin import endpoint, known, protocol, server
from kcache.dropin import environment as env
from kcache.dropin.answering import Answering, standing
from kcache.dropin.counts import Counts, since
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


# -- which server serves whom ----------------------------------------------------------------------


def test_a_relative_directory_is_another_one_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, str]] = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        told.append(env.meaning({"KCACHE_DIR": "cache", "KCACHE_SIGNING_KEY_FILE": "key"}))
    assert told[0] != told[1]
    assert told[0] == env.meaning(
        {
            "KCACHE_DIR": str(tmp_path / "one" / "cache"),
            "KCACHE_SIGNING_KEY_FILE": str(tmp_path / "one" / "key"),
            "KCACHE_READ_ONLY": "",
        }
    )


def test_another_home_is_another_cache() -> None:
    one, other = env.meaning({"XDG_CACHE_HOME": "/a"}), env.meaning({"XDG_CACHE_HOME": "/b"})
    assert one != other
    named = {"KCACHE_DIR": "/c"}
    assert env.meaning({**named, "XDG_CACHE_HOME": "/a"}) == env.meaning(named)


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A short path: a socket's has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="kd-", dir="/tmp") as folder:
        yield Path(folder)


def test_nobody_waits_again_for_a_silent_server(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ASK_TIMEOUT", 0.05)
    path = endpoint.user_socket([str(runtime)])
    # No process accepts from it, as if the server was stopped.
    silent = endpoint.listen_for_user(path)
    try:
        assert not endpoint.is_silent(path)
        assert endpoint.status(path) is None
        assert endpoint.is_silent(path)
        past = time.time() - 2 * endpoint.SILENT_FOR
        os.utime(f"{path}.silent", (past, past))
        assert not endpoint.is_silent(path)
        assert endpoint.status(path) is None  # for a new time
        assert endpoint.is_silent(path)
    finally:
        silent.close()
    again = endpoint.listen_for_user(path)  # another server, which is not silent
    again.close()
    assert not endpoint.is_silent(path)


def test_a_server_that_is_gone_is_not_silent(runtime: Path) -> None:
    path = endpoint.user_socket([str(runtime)])
    endpoint.listen_for_user(path).close()
    assert endpoint.status(path) is None
    assert not endpoint.is_silent(path)


SERVE = """
import sys
from kcache.dropin import endpoint, process, server
server.LOOK_AROUND = 0.01
process.serve(endpoint.listen_for_user(sys.argv[1]), None)
"""


@pytest.mark.parametrize("replaced", [False, True])
def test_a_server_that_nobody_can_reach_ends(replaced: bool, runtime: Path, tmp_path: Path) -> None:
    variables = {"KCACHE_DIR": str(tmp_path / "cache"), "XDG_RUNTIME_DIR": str(runtime)}
    path = endpoint.user_socket([str(runtime)])
    with subprocess.Popen([sys.executable, "-c", SERVE, path], env=os.environ | variables) as first:
        _until(lambda: endpoint.status(path) is not None)
        assert first.poll() is None
        shutil.rmtree(os.path.dirname(path))
        second = endpoint.listen_for_user(path) if replaced else None
        assert first.wait(60) == 0
    assert os.path.exists(path) is replaced  # the files of another server there stay
    if second is not None:
        second.close()


def test_settings_show_no_token() -> None:
    one, other = (env.settings({"KCACHE_REMOTE_TOKEN": token}) for token in ("hidden", "other"))
    assert "hidden" not in str(one)
    assert one != other


# -- counts ----------------------------------------------------------------------------------------


def test_counts_of_one_run() -> None:
    counts = Counts()
    counts.answered(hit=False, failed=False)
    counts.handed("pch")
    counts.asked(os.getpid())
    before = counts.as_dict()
    counts.answered(hit=True, failed=False, saved=0.5)
    counts.handed("pch")
    counts.handed("optix-ir")
    told = since(before, counts.as_dict())
    assert (told["hits"], told["misses"], told["saved_seconds"]) == (1, 0, 0.5)
    assert (told["reasons"], told["names"]) == ({"pch": 1, "optix-ir": 1}, {})


def test_more_programs_than_names() -> None:
    counts = Counts()
    for process in range(10**9, 10**9 + 1000):  # beyond any that runs
        counts.asked(process)
        counts.asked(process)
    told = counts.as_dict()
    assert told["programs"] == 1000
    assert told["names"] == {"unknown": 1000}
