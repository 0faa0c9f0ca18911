"""Whatever happens to the server, every program gets the right kernel within a bounded time."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from core.helpers import as_root, has_ended
from dropin.conftest import CLIENTS, KCACHE, Dropin, Fake
from remote.fakes import until

from kcache.daemons.sockets import DONE, status
from kcache.daemons.spawn import path_of
from kcache.dropin import build
from kcache.dropin import libraries as lib
from kcache.dropin import run_environment as env
from kcache.dropin.protocol import Answer, pack_answer
from kcache.util.wire import heading

BODIES = [f"a[{n}] = {n};" for n in range(3)]


@pytest.fixture(scope="module")
def wanted(real: Path) -> list[str]:
    """The results of the real NVRTC for each body."""
    command = (sys.executable, CLIENTS / "repeated.py", real)
    said = subprocess.check_output(command, input="\n".join(BODIES), text=True)
    return said.splitlines()


class Program:
    """A process with `repeated.py`, which answers each line."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> int:
        self.process.stdin.close()
        code = self.process.wait(60)
        self.process.stdout.close()
        return code


@pytest.fixture(scope="session")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interface libraries that wait only two seconds for a server that sends nothing."""
    folder = tmp_path_factory.mktemp("hasty") / "libraries"
    build.build(str(folder), flags=("-DSILENCE_MS=2000", "-O0"))
    return str(folder)


@pytest.fixture
def start(dropin: Dropin, real: Path) -> Iterator[Callable[..., Program]]:
    """A function that starts the program under `kcache run`, or with the server at `path`."""
    programs: list[Program] = []

    def start(
        path: str | None = None, libraries: str = dropin.libraries, within: tuple[str, ...] = ()
    ) -> Program:
        command = [*within, sys.executable, str(CLIENTS / "repeated.py"), str(real)]
        environment = dropin.environment
        if path is None:
            command = [*KCACHE, "run", *command]
        else:
            preloaded = lib.preloaded(libraries)
            environment = environment | env.of_dropin(environment, preloaded, path)
        programs.append(Program(command, environment))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.wait()
        for pipe in (program.process.stdin, program.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


@pytest.fixture
def program(start: Callable[..., Program], wanted: list[str]) -> Iterator[Program]:
    """A program under `kcache run` that has used the server once."""
    program = start()
    assert program.ask(BODIES[0]) == wanted[0]
    yield program
    assert program.close() == 0


def _socket(dropin: Dropin) -> str:
    (path,) = dropin.runtime.glob("kcache-*/programs-*")
    return str(path)


def _server(dropin: Dropin) -> int:
    return int(status(_socket(dropin))["process"])


def _kill_server(dropin: Dropin) -> None:
    server = _server(dropin)
    os.kill(server, signal.SIGKILL)
    assert has_ended(server)


def _user_socket(dropin: Dropin) -> str:
    """Return the path of the socket of a server that the user starts."""
    return path_of(env.service(dropin.environment), dropin.environment)


def _message(*fields: bytes) -> bytes:
    return heading(fields) + b"".join(fields)


# -- dead, stopped and foreign servers -------------------------------------------------------------


def test_a_killed_server(program: Program, dropin: Dropin, wanted: list[str]) -> None:
    _kill_server(dropin)
    assert [program.ask(body) for body in BODIES] == wanted


def _says(*fields: bytes) -> Callable[[socket.socket], None]:
    """Return a function that sends a message on a connection, and then closes the sending side."""

    def send(connection: socket.socket) -> None:
        connection.sendall(_message(*fields))
        connection.shutdown(socket.SHUT_WR)

    return send


NONSENSE = {
    "silence": lambda connection: None,
    "garbage": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "no fields": _says(),
    "a huge answer": lambda connection: connection.sendall(b"KCW1\1\0\0\0" + b"\xff" * 8),
    "half an answer": lambda connection: connection.sendall(_message(DONE, bytes(99))[:50]),
    "an answer that lies": _says(DONE, *[b"\xff"] * 9),
    "another answer": _says(DONE),
    "an unknown answer": _says(b"perhaps"),
    "a hang-up": lambda connection: connection.shutdown(socket.SHUT_RDWR),
    "half a head": lambda connection: (connection.sendall(b"KCW1\2"), connection.close()),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_server_that_answers_nonsense(
    kind: str, start: Callable[..., Program], hasty: str, tmp_path: Path, wanted: list[str]
) -> None:
    with closing(Fake(tmp_path, NONSENSE[kind])) as fake:
        program = start(fake.path, hasty)
        assert [program.ask(body) for body in BODIES] == wanted
        assert program.close() == 0
        if kind == "silence":  # another program does not wait for the server, either
            assert not os.path.exists(fake.path)
            other = start(fake.path)
            assert [other.ask(body) for body in BODIES] == wanted
    if kind in ("silence", "garbage", "no fields", "a huge answer", "half an answer"):
        assert fake.connections == 1  # the program did not try again


@as_root
@pytest.mark.parametrize("within", [(), ("unshare", "--user")])
def test_a_server_of_another_user_is_not_asked(
    within: tuple[str, ...], start: Callable[..., Program], tmp_path: Path, wanted: list[str]
) -> None:
    """A server of another user is not used, even if a user namespace shows the same id for both."""
    if within and subprocess.call([*within, "true"]) != 0:
        pytest.skip("there are no user namespaces")
    with closing(Fake(tmp_path, NONSENSE["a hang-up"], user=12345)) as fake:
        program = start(fake.path, within=within)
        assert [program.ask(body) for body in BODIES[:2]] == wanted[:2]
        assert program.close() == 0
    assert fake.connections == 0


NAMED = """
import ctypes as c, sys
library = c.CDLL(sys.argv[1])
program, lowered = c.c_void_p(), c.c_char_p()
source = b"template <class T> __global__ void t(T* a) { *a = 1; }"
library.nvrtcCreateProgram(c.byref(program), source, None, 0, None, None)
library.nvrtcAddNameExpression(program, b"t<int>")
print(library.nvrtcCompileProgram(program, 0, None))
print(library.nvrtcGetLoweredName(program, b"t<int>", c.byref(lowered)), lowered.value)
"""


def test_an_answer_without_a_lowered_name(dropin: Dropin, real: Path, tmp_path: Path) -> None:
    answer = Answer(0, b"ptx\0", b"cubin", b"", b"\0", [(b"t<float>", b"t")], hit=True)
    command = (sys.executable, "-c", NAMED, real)
    with closing(Fake(tmp_path, _says(DONE, *pack_answer(answer)))) as fake:
        told = dropin.run("env", f"KCACHE_DROPIN_SOCKET={fake.path}", *command)
    assert fake.connections == 1
    assert (told.code, told.output) == (0, dropin.bare(*command).output)


@pytest.mark.parametrize("path", ["/nonexistent/socket", "", "x" * 300, "/dev/null"])
def test_there_is_no_server(path: str, start: Callable[..., Program], wanted: list[str]) -> None:
    program = start(path)
    assert [program.ask(body) for body in BODIES] == wanted
    assert program.close() == 0


def test_server_restart(start: Callable[..., Program], dropin: Dropin, wanted: list[str]) -> None:
    path = _user_socket(dropin)
    assert dropin.bare(*KCACHE, "server", "start").code == 0
    program = start()
    assert program.ask(BODIES[0]) == wanted[0]
    assert status(path)["connections"] == 2  # that of the program, and that of this call
    assert dropin.bare(*KCACHE, "server", "stop").code == 0
    assert program.ask(BODIES[1]) == wanted[1]
    assert dropin.bare(*KCACHE, "server", "start").code == 0
    assert program.ask(BODIES[2]) == wanted[2]
    counts = status(path)["counts"]
    assert (counts["hits"], counts["misses"]) == (0, 1)
    assert dropin.bare(*KCACHE, "server", "stop").code == 0


def test_one_descriptor(start: Callable[..., Program], dropin: Dropin, wanted: list[str]) -> None:
    program = start()
    assert program.ask("files 4") == "limited"
    assert program.ask(BODIES[0]) == wanted[0]
    _kill_server(dropin)
    assert [program.ask(body) for body in BODIES] == wanted  # only now NVRTC is loaded
    assert program.close() == 0


def test_a_forked_child_asks_by_itself(program: Program, wanted: list[str]) -> None:
    assert program.ask("fork") == wanted[0]
    assert [program.ask(body) for body in BODIES] == wanted


# -- the server and its clients ---------------------------------------------------------------------


def test_the_server_ends_with_the_program(program: Program, dropin: Dropin) -> None:
    server = _server(dropin)
    assert program.close() == 0
    assert has_ended(server)
    assert list(dropin.runtime.iterdir()) == []


@pytest.mark.parametrize("stats", [False, True])
def test_the_server_ends_when_the_launcher_is_killed(stats: bool, dropin: Dropin) -> None:
    flags = ["--stats"] if stats else []
    client = (sys.executable, "-c", "print('up', flush=True); input()")
    with dropin.starts(*KCACHE, "run", *flags, *client) as launcher:
        assert launcher.stdout.readline() == "up\n"
        server = _server(dropin)
        launcher.kill()
        assert launcher.stdout.read() == ""  # the program has ended, too
    assert has_ended(server)
    assert list(dropin.runtime.iterdir()) == []


@as_root
def test_a_server_in_another_pid_namespace_is_left_alone(program: Program, dropin: Dropin) -> None:
    """A server in another PID namespace continues to run. (Containers may share `/tmp`.)"""
    unshared = ("unshare", "--pid", "--fork", "--mount-proc")
    client = ("sh", "-c", "exit 3")
    told = dropin.bare(*unshared, *KCACHE, "run", "--stats", *client, KCACHE_READ_ONLY="1")
    if not told.line:
        pytest.skip(f"no PID namespace: {told.errors}")
    assert told.code == 3
    assert status(_socket(dropin))["connections"] == 2


def test_a_stopped_server_is_replaced_and_exits_once_it_continues(dropin: Dropin) -> None:
    command = (*KCACHE, "server")
    assert dropin.bare(*command, "start").code == 0
    path = _user_socket(dropin)
    server = int(status(path)["process"])
    code = (
        "import sys; from kcache.daemons import sockets; sockets.ASK_TIMEOUT = 1.0\n"
        "from kcache.__main__ import main; sys.argv[0] = 'kcache'; main()"
    )
    os.kill(server, signal.SIGSTOP)
    try:
        started = dropin.bare(sys.executable, "-c", code, "server", "start")
        assert started.code == 0, started.errors
        assert status(path)["process"] != server
    finally:
        os.kill(server, signal.SIGCONT)
    assert has_ended(server)
    assert dropin.bare(*command, "stop").code == 0


def test_a_server_that_is_stopped_for_a_while(
    program: Program, start: Callable[..., Program], dropin: Dropin, hasty: str, wanted: list[str]
) -> None:
    """Only one program waits for a stopped server, for a bounded time. It may continue later."""
    path, server = _socket(dropin), _server(dropin)
    connected = start(path, hasty)
    assert connected.ask(BODIES[0]) == wanted[0]
    os.kill(server, signal.SIGSTOP)
    try:
        assert [connected.ask(body) for body in BODIES] == wanted
        assert connected.close() == 0
        assert not os.path.exists(path)  # so no other program waits
        assert start(path).ask(BODIES[1]) == wanted[1]
    finally:
        os.kill(server, signal.SIGCONT)
    until(lambda: os.path.exists(path))
    assert status(path)["process"] == server
    assert program.close() == 0
    assert has_ended(server)


def test_many_programs_at_once(dropin: Dropin, real: Path, wanted: list[str]) -> None:
    lines = "\\n".join(BODIES)
    client = f"{sys.executable} {CLIENTS / 'repeated.py'} {real}"
    script = f"for n in $(seq 8); do printf '{lines}\\n' | {client} & done; wait"
    told = dropin.run("sh", "-c", script)
    assert sorted(told.output.split("\n")[:-1]) == sorted(wanted * 8), told.errors
    assert (told.misses, told.hits) == (3, 21)


def test_threads_that_build_the_libraries_at_once_get_them(tmp_path: Path) -> None:
    """Threads that build the libraries at the same time all get them, and leave nothing else."""
    folder = tmp_path / "libraries"
    with ThreadPoolExecutor() as pool:
        list(pool.map(build.build, [str(folder)] * 2))
    assert lib.find_usable({env.LIBRARIES: str(folder)}) == str(folder)
    assert os.listdir(tmp_path) == ["libraries"]


def test_a_damaged_recording_of_nvcc_is_one_line(dropin: Dropin) -> None:
    start = {"program": "/bin/true", "directory": "/", "arguments": ["nvcc"], "environment": {}}
    start |= {"mask": 18, "one_stream": True, "sources": {}}
    for changed, why in (
        ({"environment": {"A": "\0"}}, "nvcc can't be started: embedded null byte"),
        ({"mask": float("inf")}, "a recorded start of nvcc has a wrong field: OverflowError"),
    ):
        line = json.dumps({"kcache_request": 1, "nvcc": start | changed})
        (dropin.folder / "k.jsonl").write_text(line)
        told = dropin.bare(*KCACHE, "warm", "k.jsonl")
        assert told.code != 0
        assert told.errors.startswith("kcache: error: ")
        assert why in told.errors
        assert told.errors.count("\n") == 1
