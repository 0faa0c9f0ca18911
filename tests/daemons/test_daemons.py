"""Services are found, started, asked and stopped, whatever programs and other users do."""

import fcntl
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from core.helpers import as_root, has_ended, in_child, umask
from remote.fakes import addresses, until

from kcache.daemons import daemon_server as server_module
from kcache.daemons import sockets, spawn
from kcache.daemons.daemon_server import Client, Server
from kcache.daemons.sockets import DONE, STATUS, STOP, WAIT, Channel, ask, bound, connected
from kcache.daemons.spawn import Daemon
from kcache.remote.daemon_protocol import Setup
from kcache.util.wire import WireError, heading

DAEMON = Daemon("echo", "daemons.echo", b"")


class Echo:
    """Handlers that answer with the question itself, as soon as the event `go_on` is set."""

    def __init__(self) -> None:
        self.patient = False
        self.pending = 0
        self.ended = self.answered = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def answer(self, question: list[bytes], client: Client) -> Sequence[bytes]:
        if question[0] == b"raise":
            raise ZeroDivisionError
        if question[0] == b"wire":
            raise WireError("no such question")
        self.go_on.wait(60)
        self.answered += 1
        return [DONE, *question]

    def leave(self, client: Client) -> None:
        self.ended += 1

    def status(self) -> dict[str, object]:
        return {"what": "echo", "answered": self.answered}

    def close(self) -> None:
        pass


@contextmanager
def serving(
    path: Path,
    handlers: Echo | None = None,
    *,
    persistent: bool = True,
    before: Callable[[], object] = int,
) -> Iterator[Server]:
    """Call `before`, and then run a service in a thread. It has ended when the block is left."""
    listener = socket.socket(fileno=bound(str(path)))
    served = Server(listener, str(path), handlers or Echo())
    before()
    thread = threading.Thread(target=served.serve, kwargs={"persistent": persistent})
    thread.start()
    try:
        yield served
    finally:
        served.wake()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path, because the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ks-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(server_module, "IDLE", 0.05)


def channel(path: Path) -> Channel:
    connection = connected(str(path))
    assert connection is not None
    return Channel(connection, 60)


# -- one service -----------------------------------------------------------------------------------


def test_it_answers_reports_its_status_and_stops(place: Path) -> None:
    path, handlers = place / "socket", Echo()
    with serving(path, handlers):
        asks = channel(path)
        assert asks.ask([b"one", bytes(1 << 20)], 60) == [DONE, b"one", bytes(1 << 20)]
        told = sockets.status(str(path))
        assert (told["process"], told["connections"], told["what"]) == (os.getpid(), 2, "echo")
        assert ask(str(path), STOP) == []
        with pytest.raises(WireError):
            asks.next()  # the stop has closed every connection
        until(lambda: handlers.ended == 3)
        until(lambda: not path.exists())
    assert sockets.status(str(path)) is None


def test_the_last_message_of_a_client_is_processed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LOOK_EVERY", 60.0)
    path, handlers = place / "socket", Echo()
    handlers.go_on.clear()
    with serving(path, handlers):
        says = channel(path)
        says.send([b"last words"])
        says.close()
        threading.Timer(0.1, handlers.go_on.set).start()
        told = sockets.status(str(path))
        assert told["answered"] == 1


def test_killed_clients_do_not_delay_others(place: Path) -> None:
    """Questions of killed clients are not answered, so other clients need not wait for them."""
    path, handlers = place / "socket", Echo()
    handlers.go_on.clear()
    with serving(path, handlers):
        for _ in range(8):
            says = channel(path)
            says.send([b"compile"])
            says.close()
        told = sockets.status(str(path))
        handlers.go_on.set()
        assert told["answered"] == 0


@pytest.mark.usefixtures("hasty")
def test_an_idle_daemon_exits_and_removes_its_socket(place: Path) -> None:
    handlers = Echo()
    handlers.pending = 1
    with serving(place / "socket", handlers, persistent=False):
        channel(place / "socket").close()
        until(lambda: handlers.ended)
        assert (place / "socket").exists()  # there is pending work
        handlers.pending = 0
        until(lambda: not (place / "socket").exists())
    assert os.listdir(place) == []


def test_programs_that_wait_while_another_one_removes_the_socket_are_answered(place: Path) -> None:
    """Programs that have connected are answered, even if the socket is removed meanwhile."""
    path, waiting = place / "socket", list[Channel]()

    def connect() -> None:
        waiting.extend(channel(path) for _ in range(3))
        path.unlink()

    with serving(path, before=connect):
        assert [each.ask([b"one"], 60) for each in waiting] == [[DONE, b"one"]] * 3


def test_a_daemon_that_exits_removes_stale_sockets(place: Path) -> None:
    """A sweep removes the sockets of killed daemons, and is no client of the running ones."""
    visited = Echo()
    os.close(bound(str(place / "killed")))
    with serving(place / "socket", visited):
        sockets.sweep(str(place))
        assert channel(place / "socket").ask([b"one"], 60) == [DONE, b"one"]
        assert os.listdir(place) == ["socket"]
        until(lambda: visited.ended)
    assert visited.ended == 1


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("replaced", [False, True])
def test_an_unreachable_persistent_daemon_exits(place: Path, replaced: bool) -> None:
    path = place / "folder/socket"
    path.parent.mkdir()
    with serving(path) as served:
        if replaced:
            other = bound(str(path))
        else:
            shutil.rmtree(path.parent)
        until(lambda: served._listener.fileno() < 0)
    assert path.exists() is replaced  # the socket of the other daemon is kept
    if replaced:
        os.close(other)


@pytest.mark.usefixtures("hasty")
def test_heartbeats(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEARTBEAT", 0.0)
    path, handlers = place / "socket", Echo()
    handlers.patient = True
    handlers.go_on.clear()
    deaf = socket.socket(socket.AF_UNIX)  # its buffer gets full, because it reads nothing
    with serving(path, handlers), deaf:
        deaf.connect(str(path))
        deaf.sendall(heading([b"x"]) + b"x")
        asks = channel(path)
        assert asks.ask([b"one"], 60) == [WAIT]
        handlers.go_on.set()
        while (answer := asks.next()) == [WAIT]:
            pass
        assert answer == [DONE, b"one"]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"KCW1" + b"\xff" * 100,
        b"KCW1\1\0\0\0" + b"\xff" * 8,
        (heading([b"half"]) + b"half")[:-1],
        heading([b"raise"]) + b"raise",
        heading([b"wire"]) + b"wire",
    ],
)
def test_malformed_questions_do_not_affect_other_clients(place: Path, said: bytes) -> None:
    path = place / "socket"
    with serving(path), socket.socket(socket.AF_UNIX) as bad:
        bad.connect(str(path))
        bad.sendall(said)
        bad.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert bad.recv(100) == b""
        assert channel(path).ask([b"one"], 60) == [DONE, b"one"]


# -- services that are gone, silent, malicious or another user's -----------------------------------


@contextmanager
def lying(path: Path, *said: bytes) -> Iterator[None]:
    """Run a server that answers the first question with `said`, and repeats the last piece."""
    over = threading.Event()

    def lie(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1000)
            for piece in said:
                connection.sendall(piece)
            while not over.wait(0.01):
                connection.sendall(said[-1])

    with socket.socket(fileno=bound(str(path))) as listener:
        thread = threading.Thread(target=lie, args=(listener,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(60)


ENDLESS = heading([DONE, bytes(1 << 20)])


@pytest.mark.parametrize(
    ("said", "silent"),
    [
        ([b""], True),
        ([ENDLESS, b"x"], True),
        ([b"HTTP/1.1 200 OK\r\n\r\n"], False),
        ([heading([])], False),
        ([heading([WAIT]) + WAIT, b""], False),
        ([heading([DONE, b"no JSON"]) + DONE + b"no JSON", b""], False),
        ([heading([DONE, b"{}"]) + DONE + b"{}", b""], False),
    ],
)
def test_an_unresponsive_daemon_is_abandoned(
    place: Path, monkeypatch: pytest.MonkeyPatch, said: list[bytes], silent: bool
) -> None:
    """A daemon without a valid answer is given up. If it is silent, its socket is removed, too."""
    monkeypatch.setattr(sockets, "ASK_TIMEOUT", 0.2 if silent else 60.0)
    path = place / "socket"
    with lying(path, *said):
        assert sockets.status(str(path)) is None
        assert path.exists() is not silent
    assert sockets.status(str(place / "nothing")) is None


@as_root
def test_another_users_daemon_is_neither_asked_nor_answered(place: Path) -> None:
    path = place / "socket"
    with serving(path) as served:
        path.chmod(0o666)
        place.chmod(0o755)

        def ask_as_other() -> None:
            os.setuid(65534)
            assert connected(str(path)) is None  # another user listens
            with socket.socket(socket.AF_UNIX) as anyway:
                anyway.connect(str(path))
                with suppress(BrokenPipeError):
                    anyway.sendall(heading([STATUS]) + STATUS)
                with suppress(ConnectionResetError):
                    assert anyway.recv(1) == b""

        in_child(ask_as_other)
        assert served.status()["connections"] == 0


# -- the socket's path, and the start of a daemon --------------------------------------------------


def test_a_folder_that_others_can_exchange_holds_no_socket(place: Path) -> None:
    shared, own = place / "shared", place / "own"
    own.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    folders = [str(shared), str(own)]
    assert sockets.folder_in(folders) == f"{own}/kcache-daemons-{os.geteuid()}"
    assert os.listdir(shared) == []
    with pytest.raises(OSError, match="shared"):
        sockets.folder_in(folders[:1])
    shared.chmod(0o1777)
    assert sockets.folder_in(folders) == f"{shared}/kcache-daemons-{os.geteuid()}"
    os.chmod(sockets.folder_in(folders), 0o755)
    assert sockets.folder_in(folders) == f"{own}/kcache-daemons-{os.geteuid()}"
    with pytest.raises(OSError, match="too long"):
        sockets.folder_in(["/" + "x" * 100])


def test_an_installation_at_a_path_that_is_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = spawn.name_of(DAEMON)
    monkeypatch.setattr(spawn, "_ROOT", os.fsdecode(b"/opt/\xff"))
    assert spawn.name_of(DAEMON) != usual


def test_a_umask_takes_no_right_from_the_user(place: Path) -> None:
    with umask(0o777):
        folder = Path(sockets.folder_in([str(place)]))
        os.close(bound(str(folder / "socket")))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "socket").stat().st_mode) == 0o600


def test_concurrent_programs_start_one_daemon(place: Path) -> None:
    """Programs that start at the same time start one daemon, and all connect to it."""
    service = Setup(addresses("http://127.0.0.1:9"), {}, {}).daemon()
    path = os.path.join(sockets.folder_in([str(place)]), spawn.name_of(service))
    with socket.socket(fileno=bound(path)):
        pass  # the socket of a killed daemon
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: spawn.connect_or_spawn(path, service, os.environ), range(4))
        )
    until(lambda: (sockets.status(path) or {}).get("connections") == 5)
    told = sockets.status(path)
    assert os.getsid(told["process"]) != os.getsid(0)
    for connection in found:
        connection.close()
    assert ask(path, STOP) == []
    assert has_ended(told["process"])
    assert os.listdir(place) == []


def test_a_stopped_starter(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "LOCK_TIMEOUT", 0.05)
    place.chmod(0o700)
    other = os.open(place, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(OSError, match="another process holds"):
        spawn.connect_or_spawn(str(place / "socket"), DAEMON, {})
    os.close(other)


@pytest.mark.parametrize("wrong", ["interpreter", "told"])
def test_a_failed_start(place: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    place.chmod(0o700)
    service = Daemon("echo", "daemons.echo", bytes(1 << 20) if wrong == "told" else b"")
    if wrong == "interpreter":
        monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(OSError, match="the settings of the daemon are too long|nonexistent"):
        spawn.spawn(str(place / "socket"), service, {})
    assert os.listdir(place) == []


def test_a_start_beside_the_exit_of_another_daemon(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon starts although another one removes the empty folder of the sockets meanwhile."""
    path = place / "folder/socket"
    exits = [path.parent.rmdir, int]
    monkeypatch.setattr(spawn, "bound", lambda path: (exits.pop(0)(), bound(path))[1])
    monkeypatch.setattr(spawn, "_run", lambda *_: None)
    spawn.spawn(str(path), DAEMON, {})
    assert path.is_socket()


# -- channels between programs and services --------------------------------------------------------

Pair = tuple[Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A channel, and the plain socket at its other end."""
    here, there = socket.socketpair()
    there.settimeout(60)
    channel = Channel(here, 60)
    yield channel, there
    channel.close()
    there.close()


def test_an_answer_that_does_not_come_is_not_waited_for(pair: Pair) -> None:
    channel, there = pair
    with pytest.raises(TimeoutError):
        channel.ask([b"get"], 0.01)
    there.sendall(heading([b"x" * 9000]))
    with pytest.raises(TimeoutError):
        channel.ask([b"get"], 0.01)


def test_a_number_that_the_program_has_taken_is_neither_written_to_nor_closed(pair: Pair) -> None:
    channel, _ = pair
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    number = channel._socket.fileno()
    os.dup2(ours.fileno(), number)
    with pytest.raises(WireError, match="this program has closed"):
        channel.ask([b"get"], 60)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    channel.close()
    assert os.path.samestat(os.fstat(number), os.fstat(ours.fileno()))
    os.close(number)
    ours.close()
    theirs.close()


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="this system has no SIGPIPE")
def test_a_service_that_has_ended_does_not_end_a_program_with_sigpipe(pair: Pair) -> None:
    channel, there = pair
    there.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        with pytest.raises(BrokenPipeError):
            channel.ask([b"x" * (8 << 20)], 60)
        assert signal.SIGPIPE not in signal.sigpending()  # the signal would have ended this process
    finally:
        if signal.SIGPIPE in signal.sigpending():
            signal.sigwait({signal.SIGPIPE})
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGPIPE, before)
