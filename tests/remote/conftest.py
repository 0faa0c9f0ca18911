"""Fixtures: servers, each of which is started once for all tests of a process."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from remote import servers
from remote.fakes import NO_HURRY, Open, RawServer, answering, opened
from remote.machines import Machines

from kcache.remote.storage import Storage


@pytest.fixture(autouse=True)
def _no_clients_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the user's proxies from the environment, and set credentials for the tests."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def hosts(
    nvrtc: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machines]:
    made = Machines(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def store() -> Iterator[Open]:
    """A function that opens the client of an address, which is closed after the test."""
    with ExitStack() as stack:

        def opens(url: str, more: str = NO_HURRY) -> Storage:
            separator = "&" if "?" in url else "?"
            return stack.enter_context(opened(f"{url}{separator}{more}"))

        yield opens


def _for_the_session(start: Callable[[Path], AbstractContextManager[object]]) -> object:
    """Return a fixture for a server that is started once, in a folder of its own."""

    @pytest.fixture(scope="session")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
        with start(tmp_path_factory.mktemp(start.__name__)) as made:
            yield made

    return server


nginx = _for_the_session(servers.nginx)
redis_server = _for_the_session(servers.redis)
redis_cluster = _for_the_session(servers.redis_cluster)
s3 = _for_the_session(servers.s3)


@pytest.fixture
def server() -> Iterator[RawServer]:
    """A server: its port, a list for the answer to send, and the requests that it has received."""
    answers: list[bytes] = []
    asked: list[bytes] = []

    def answer(client: socket.socket) -> None:
        asked.append(client.recv(1 << 16))
        client.sendall(answers[0])
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 16):  # unread bytes would cause a reset, which may lose the answer
            pass

    with answering(answer) as port:
        yield port, answers, asked
