"""Fixtures: the servers, each started once for the tests of a process."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from remote import servers
from remote.fakes import NO_HURRY, Open, RawServer, answering, opened
from remote.machines import Machines

from kcache.remote.storage import Storage


@pytest.fixture(autouse=True)
def _no_clients_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proxies of whoever runs the tests, and with credentials of the tests' own."""
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
    """Opens clients of addresses, and closes them after the test."""
    with ExitStack() as stack:

        def opens(url: str, more: str = NO_HURRY) -> Storage:
            separator = "&" if "?" in url else "?"
            return stack.enter_context(opened(f"{url}{separator}{more}"))

        yield opens


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Nginx]:
    with servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Redis]:
    with servers.redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[servers.Redis]]:
    with servers.redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3]:
    with servers.s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def server() -> Iterator[RawServer]:
    """A server; yields its port, what it sends, and what it was asked."""
    answers: list[bytes] = []
    asked: list[bytes] = []

    def answer(client: socket.socket) -> None:
        asked.append(client.recv(1 << 16))
        client.sendall(answers[0])
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 16):  # or the answer may be lost with a reset
            pass

    with answering(answer) as port:
        yield port, answers, asked
