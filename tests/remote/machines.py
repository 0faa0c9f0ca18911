"""Machines: caches with directories and agents of their own, and real remotes between them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from nvrtc.reference import ARCH, KERNEL

import kcache
from kcache.kernels.remotes import RemoteKernels
from kcache.remote.client import Client

__all__ = ["ARCH", "Machines", "machines", "of_agent", "of_client", "source"]


def source(value: int) -> str:
    return KERNEL.replace("V", str(value))


def of_client(cache: kcache.KernelCache) -> Client:
    remotes = cache._on_miss().remotes
    assert isinstance(remotes, RemoteKernels)
    return remotes._client


def of_agent(cache: kcache.KernelCache, remote: int = 0) -> dict[str, Any]:
    """What the cache's agent has counted of a remote."""
    client = of_client(cache)
    client._silent_until = 0.0
    status = client.status()
    assert status is not None
    remotes: Any = status["remotes"]
    return dict(remotes[remote])


class Machines:
    """Makes caches, each on a machine of its own: another directory, another agent."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._runtime = Path(tempfile.mkdtemp(prefix="kc-"))  # paths of sockets must be short
        self._clients: list[Client] = []
        self._stack = ExitStack()

    def cache(self, name: str, remote: str, **settings: Any) -> kcache.KernelCache:
        """Open the cache of a machine; the same name has the same directory and agent."""
        folder = self._runtime / name
        folder.mkdir(mode=0o700, exist_ok=True)
        self._monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        cache = kcache.KernelCache(self._folder / f"cache-{name}", remote=remote, **settings)
        client = of_client(cache)  # as long as the variable keeps its value
        assert not client._kept
        self._clients.append(client)
        return self._stack.enter_context(cache)

    def close(self) -> None:
        self._stack.close()
        for client in self._clients:
            client._silent_until = 0.0
            client.stop()
        shutil.rmtree(self._runtime, ignore_errors=True)


@contextmanager
def machines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    made = Machines(folder, monkeypatch)
    try:
        yield made
    finally:
        made.close()
