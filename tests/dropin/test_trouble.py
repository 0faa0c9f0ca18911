"""Whatever happens to the server, every program gets the right kernel, after a bounded wait."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import pytest
from core.helpers import fork, wait
from dropin.conftest import CLIENTS, KCACHE, Dropin

from kcache.dropin import endpoint as at
from kcache.dropin import environment as env
from kcache.dropin import libraries as lib
from kcache.dropin import protocol

BODIES = [f"a[{n}] = {n};" for n in range(6)]


@pytest.fixture(scope="module")
def wanted(real: Path) -> list[str]:
    """What each body compiles to, by the real NVRTC alone."""
    command = [sys.executable, str(CLIENTS / "repeated.py"), str(real)]
    told = subprocess.run(
        command, input="\n".join(BODIES), capture_output=True, text=True, check=True
    )
    return told.stdout.splitlines()


class Program:
    """`repeated.py` in a process, asked line by line."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, line: str) -> str:
        self._pipe(self.process.stdin).write(line + "\n")
        self._pipe(self.process.stdin).flush()
        return self._pipe(self.process.stdout).readline().strip()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def close(self) -> int:
        self._pipe(self.process.stdin).close()
        code = self.process.wait(60)
        self._pipe(self.process.stdout).close()
        return code


@pytest.fixture
def start(dropin: Dropin, real: Path) -> Iterator[Callable[..., Program]]:
    """Starts the program: under `kcache run`, or with a server at a path."""
    programs: list[Program] = []

    def start(path: str | None = None) -> Program:
        command = [sys.executable, str(CLIENTS / "repeated.py"), str(real)]
        environment = dropin.environment
        if path is None:
            command = [*KCACHE, "run", *command]
        else:
            preloaded = lib.preloaded(environment[env.LIBRARIES])
            environment = env.with_dropin(environment, preloaded, path)
        programs.append(Program(command, environment))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.wait()
        for pipe in (program.process.stdin, program.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


def _socket(dropin: Dropin, but: str = "") -> str:
    (path,) = {str(p) for p in dropin.runtime.glob("kcache-run-*/socket") if p.is_socket()} - {but}
    return path


def _status(path: str) -> dict[str, object]:
    answer = at.ask(path, protocol.STATUS)
    assert answer is not None
    status: dict[str, object] = json.loads(answer)
    return status


def _server(dropin: Dropin, but: str = "") -> int:
    process = _status(_socket(dropin, but))["process"]
    assert isinstance(process, int)
    return process


def _ends(process: int) -> bool:
    """Wait until a process that is not a child has ended."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


# -- the server dies, freezes or is another one ----------------------------------------------------


def test_the_server_is_killed_while_the_program_runs(
    start: Callable[..., Program], dropin: Dropin, wanted: list[str]
) -> None:
    program = start()
    assert program.ask(BODIES[0]) == wanted[0]
    server = _server(dropin)
    os.kill(server, signal.SIGKILL)
    assert _ends(server)
    assert [program.ask(body) for body in BODIES] == wanted
    assert program.close() == 0


def test_the_server_is_frozen(
    start: Callable[..., Program], dropin: Dropin, wanted: list[str]
) -> None:
    program = start()
    assert program.ask(BODIES[0]) == wanted[0]
    server = _server(dropin)
    os.kill(server, signal.SIGSTOP)
    try:
        assert [program.ask(body) for body in BODIES] == wanted
        assert program.close() == 0
    finally:
        os.kill(server, signal.SIGCONT)
    assert _ends(server)


class Fake:
    """Listens, and does with each connection what a test says; counts them."""

    def __init__(self, folder: Path, do: Callable[[socket.socket], object]) -> None:
        self.path = str(folder / "fake")
        self.connections = 0
        self._do = do
        self._kept: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if connection.recv(1, socket.MSG_PEEK) == b"!":
                connection.close()
                return
            self.connections += 1
            self._kept.append(connection)
            self._do(connection)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.path)
            last.sendall(b"!")
            self._thread.join()
        for each in (*self._kept, self._listener):
            each.close()


def _head(version: int, kind: int, size: int) -> bytes:
    return (
        b"KDI1"
        + version.to_bytes(2, "little")
        + kind.to_bytes(2, "little")
        + (size.to_bytes(4, "little") + bytes(4))
    )


OTHER = protocol.VERSION + 1

NONSENSE = {
    "silence": lambda connection: None,
    "garbage": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "another version": lambda connection: connection.sendall(_head(OTHER, protocol.ANSWER, 0)),
    "a huge answer": lambda connection: connection.sendall(
        _head(protocol.VERSION, protocol.ANSWER, 1 << 31)
    ),
    "half an answer": lambda connection: connection.sendall(
        _head(protocol.VERSION, protocol.ANSWER, 99) + b"x"
    ),
    "an answer that lies": lambda connection: connection.sendall(
        protocol.frame(protocol.ANSWER, b"\xff" * 64)
    ),
    "another frame": lambda connection: connection.sendall(protocol.frame(protocol.INFO, b"")),
    "a hang-up": lambda connection: connection.shutdown(socket.SHUT_RDWR),
    "half a head": lambda connection: (connection.sendall(b"KDI1\2"), connection.close()),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_server_that_answers_nonsense(
    kind: str, start: Callable[..., Program], tmp_path: Path, wanted: list[str]
) -> None:
    fake = Fake(tmp_path, NONSENSE[kind])
    try:
        program = start(fake.path)
        assert [program.ask(body) for body in BODIES] == wanted
        assert program.close() == 0
        if kind == "silence":  # nor does another program
            other = start(fake.path)
            assert [other.ask(body) for body in BODIES] == wanted
    finally:
        fake.close()
    if kind in ("silence", "garbage", "another version", "a huge answer", "half an answer"):
        assert fake.connections == 1  # and was not waited for again


@pytest.mark.parametrize("says", [b"nonsense", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_a_server_that_tells_nonsense_of_itself(
    says: bytes, dropin: Dropin, tmp_path: Path
) -> None:
    fake = Fake(tmp_path, lambda each: each.sendall(protocol.frame(protocol.INFO, says)))
    try:
        told = dropin.run("/bin/echo", "hello", KCACHE_DROPIN_SOCKET=fake.path)
    finally:
        fake.close()
    assert fake.connections == 1
    assert (told.code, told.output) == (0, "hello\n")
    assert told.line.startswith("kcache: hits 0"), told.errors


def test_a_program_that_was_stopped_for_long_goes_on_asking(
    start: Callable[..., Program], tmp_path: Path, wanted: list[str], long: bool
) -> None:
    """It is stopped (Ctrl-Z) when it begins to wait, and goes on after the time for that is over."""
    if not long:
        pytest.skip("with --long")
    started = SimpleQueue[int]()

    def stop_and_answer(connection: socket.socket) -> None:
        process = started.get(timeout=60)
        os.kill(process, signal.SIGSTOP)
        time.sleep(6)  # longer than a program waits for a sign of life
        connection.sendall(protocol.frame(protocol.WAIT))
        os.kill(process, signal.SIGCONT)
        connection.sendall(protocol.frame(protocol.DECLINED, b"no"))

    fake = Fake(tmp_path, stop_and_answer)
    try:
        program = start(fake.path)
        started.put(program.process.pid)
        assert program.ask(BODIES[0]) == wanted[0]
        assert program.close() == 0
    finally:
        fake.close()
    assert not Path(f"{fake.path}.silent").exists()


def test_a_note_of_the_future_says_nothing_of_a_server(
    start: Callable[..., Program], dropin: Dropin, tmp_path: Path
) -> None:
    fake = Fake(tmp_path, NONSENSE["a hang-up"])
    Path(f"{fake.path}.silent").touch()
    os.utime(f"{fake.path}.silent", (time.time() + 3600,) * 2)
    try:
        assert start(fake.path).ask(BODIES[0])
    finally:
        fake.close()
    assert fake.connections > 0


@pytest.mark.parametrize("path", ["/nonexistent/socket", "", "x" * 300, "/dev/null"])
def test_there_is_no_server(path: str, start: Callable[..., Program], wanted: list[str]) -> None:
    program = start(path)
    assert [program.ask(body) for body in BODIES] == wanted
    assert program.close() == 0


def test_the_server_comes_back(
    start: Callable[..., Program], dropin: Dropin, wanted: list[str]
) -> None:
    path = at.user_socket(env.runtime_folders(dropin.environment))
    assert dropin.bare(*KCACHE, "server", "start").code == 0
    program = start()
    assert program.ask(BODIES[0]) == wanted[0]
    assert _status(path)["connections"] == 2  # the program's, and this one
    assert dropin.bare(*KCACHE, "server", "stop").code == 0
    assert program.ask(BODIES[1]) == wanted[1]
    assert dropin.bare(*KCACHE, "server", "start").code == 0
    assert program.ask(BODIES[2]) == wanted[2]
    counts = _status(path)["counts"]
    assert isinstance(counts, dict)
    assert (counts["hits"], counts["misses"]) == (0, 1)
    assert dropin.bare(*KCACHE, "server", "stop").code == 0


def test_the_program_has_one_descriptor_left(
    start: Callable[..., Program], dropin: Dropin, wanted: list[str]
) -> None:
    program = start()
    assert program.ask("files 4") == "limited"
    assert program.ask(BODIES[0]) == wanted[0]
    server = _server(dropin)
    os.kill(server, signal.SIGKILL)
    assert _ends(server)
    assert [program.ask(body) for body in BODIES] == wanted  # the real one is loaded only now
    assert program.close() == 0


def test_a_forked_child_asks_by_itself(start: Callable[..., Program], wanted: list[str]) -> None:
    program = start()
    assert program.ask(BODIES[0]) == wanted[0]
    assert program.ask("fork") == wanted[0]
    assert [program.ask(body) for body in BODIES] == wanted
    assert program.close() == 0


# -- the server and its clients ---------------------------------------------------------------------


def test_the_server_ends_with_the_program(start: Callable[..., Program], dropin: Dropin) -> None:
    program = start()
    program.ask(BODIES[0])
    server = _server(dropin)
    assert program.close() == 0
    assert _ends(server)
    assert list(dropin.runtime.iterdir()) == []


@pytest.mark.parametrize("stats", [False, True])
def test_the_server_ends_when_the_launcher_is_killed(stats: bool, dropin: Dropin) -> None:
    flags = ["--stats"] if stats else []
    command = [*KCACHE, "run", *flags, sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dropin.environment,
        cwd=dropin.folder,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        server = _server(dropin)
        launcher.kill()
        assert launcher.stdout.read() == b""  # the program is gone, too
    assert _ends(server)
    assert list(dropin.runtime.iterdir()) == []


def test_what_a_killed_server_left_behind_is_removed(
    start: Callable[..., Program], dropin: Dropin
) -> None:
    """Who is alive has a lock; the names are those of anybody, and of another PID namespace."""
    for name in ("ab", f"{os.getpid()}-cd", "99999999999999999999-x"):
        left = dropin.runtime / f"kcache-run-{name}"
        left.mkdir()
        (left / "socket").touch()
        (left / "socket.silent").touch()
    alive = at.listen([str(dropin.runtime)])
    program = start()
    program.ask(BODIES[0])
    server = _server(dropin, but=alive.path)
    assert program.close() == 0
    assert _ends(server)
    assert list(dropin.runtime.iterdir()) == [Path(alive.path).parent]
    alive.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may do it")
def test_a_server_in_another_pid_namespace_is_left_alone(
    start: Callable[..., Program], dropin: Dropin, wanted: list[str]
) -> None:
    """Containers may share `/tmp`."""
    program = start()
    assert program.ask(BODIES[0]) == wanted[0]
    unshared = ("unshare", "--pid", "--fork", "--mount-proc")
    client = ("sh", "-c", "exit 3")
    told = dropin.bare(*unshared, *KCACHE, "run", "--stats", *client, KCACHE_READ_ONLY="1")
    if not told.line:
        pytest.skip(f"no PID namespace: {told.errors}")
    assert told.code == 3
    assert _status(_socket(dropin))["connections"] == 2
    assert program.close() == 0


def test_a_frozen_server_is_not_replaced(dropin: Dropin) -> None:
    command = (*KCACHE, "server")
    assert dropin.bare(*command, "start").code == 0
    path = at.user_socket(env.runtime_folders(dropin.environment))
    server = _status(path)["process"]
    assert isinstance(server, int)
    os.kill(server, signal.SIGSTOP)
    try:
        started = dropin.bare(*command, "start")
        assert (started.code, "a server is running" in started.errors) == (1, True)
    finally:
        os.kill(server, signal.SIGCONT)
    os.unlink(f"{path}.silent") if os.path.exists(f"{path}.silent") else None
    assert _status(path)["process"] == server
    assert dropin.bare(*command, "stop").code == 0
    assert _ends(server)


def test_links_among_what_servers_left_lead_nowhere(
    start: Callable[..., Program], dropin: Dropin, tmp_path: Path
) -> None:
    """Any user may make one in a directory for all; what it led to was removed."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "socket").write_text("precious")
    (theirs / "socket.silent").write_text("")
    (dropin.runtime / "kcache-run-ab").symlink_to(theirs)
    full = dropin.runtime / "kcache-run-cd"
    full.mkdir()
    (full / "socket").write_text("no socket of ours")
    (full / "socket.silent").symlink_to(theirs / "socket")
    program = start()
    program.ask(BODIES[0])
    server = _server(dropin)
    assert program.close() == 0
    assert _ends(server)
    assert {path.name for path in theirs.iterdir()} == {"socket", "socket.silent"}
    assert {path.name for path in full.iterdir()} == {"socket", "socket.silent"}


@pytest.mark.parametrize("says", ["WAIT", "drops", "nothing"])
def test_a_server_that_keeps_who_asks_waiting_is_given_up(
    says: str, dropin: Dropin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs of life without end kept `kcache run` and `kcache server status` for ever."""
    monkeypatch.setattr(at, "ASK_TIMEOUT", 0.5)
    path = str(dropin.runtime / "socket")
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            sent = {
                "WAIT": protocol.frame(protocol.WAIT),
                "drops": protocol.frame(protocol.INFO, bytes(1000))[:20],
                "nothing": b"",
            }[says]
            while not over.wait(0.02):
                for byte in [sent] if says == "WAIT" else [sent[n : n + 1] for n in range(20)]:
                    with suppress(OSError):
                        connection.sendall(byte)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        assert at.ask(path, protocol.STATUS) is None
        over.set()
        thread.join(60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_server_of_another_user_is_not_asked(dropin: Dropin) -> None:
    path = dropin.runtime / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o666)
        dropin.runtime.chmod(0o755)

        def ask() -> None:
            os.setuid(65534)
            assert at.ask(str(path), protocol.STATUS) is None

        child = fork(ask)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(60)
            assert connection.recv(1) == b""
        assert wait(child) == 0


def test_clients_that_misbehave(
    start: Callable[..., Program], dropin: Dropin, wanted: list[str]
) -> None:
    program = start()
    assert program.ask(BODIES[0]) == wanted[0]
    path, whole = _socket(dropin), protocol.frame(protocol.COMPILE, bytes(1000))
    sent = [
        b"GET / HTTP/1.1\r\n\r\n",
        whole,  # well framed, and nothing in it makes sense
        protocol.frame(99),
        _head(protocol.VERSION, protocol.COMPILE, 1 << 31),
        _head(OTHER, protocol.COMPILE, 0),
        protocol.frame(protocol.QUERY, b"\xff" * 8),
        protocol.frame(protocol.NOTE, b"\xff" * 999),
        *(whole[:length] for length in (1, 15, 16, 17, 500)),
    ]
    kept: list[socket.socket] = []
    for data in sent:
        kept.append(socket.socket(socket.AF_UNIX))
        kept[-1].connect(path)
        kept[-1].sendall(data)
    for each in kept[::2]:
        each.close()
    assert [program.ask(body) for body in BODIES] == wanted
    for each in kept:
        each.close()
    counts = _status(path)["counts"]
    assert isinstance(counts, dict)
    assert counts["misses"] == len(BODIES)
    assert program.close() == 0


def test_a_thousand_clients(
    start: Callable[..., Program], dropin: Dropin, wanted: list[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("1,000 connections need more descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    clients: list[socket.socket] = []
    try:
        program = start()
        assert program.ask(BODIES[0]) == wanted[0]
        for _ in range(1000):
            clients.append(socket.socket(socket.AF_UNIX))
            clients[-1].connect(_socket(dropin))
        assert [program.ask(body) for body in BODIES] == wanted
        for client in clients:
            client.sendall(protocol.frame(protocol.STATUS))
        for client in clients:
            kind = protocol.WAIT  # a busy server says this first
            while kind == protocol.WAIT:
                kind, size = protocol.unpack_head(client.recv(16, socket.MSG_WAITALL))
            assert kind == protocol.INFO
            assert len(client.recv(size, socket.MSG_WAITALL)) == size
        assert program.close() == 0
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_programs_at_once(dropin: Dropin, real: Path, wanted: list[str]) -> None:
    lines = "\\n".join(BODIES)
    client = f"{sys.executable} {CLIENTS / 'repeated.py'} {real}"
    script = f"for n in $(seq 16); do printf '{lines}\\n' | {client} & done; wait"
    told = dropin.run("sh", "-c", script)
    assert sorted(told.output.split("\n")[:-1]) == sorted(wanted * 16), told.errors
    assert (told.misses, told.hits) == (6, 90)
