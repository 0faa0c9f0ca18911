"""Machines: caches with directories and services of their own, and real remotes between them."""

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from core.helpers import has_ended
from nvrtc.reference import KERNEL

import kcache
from kcache.daemons.sockets import STOP, ask, status
from kcache.remote.daemon_client import DaemonClient


def source(value: int = 1) -> str:
    return KERNEL.replace("V", str(value))


def of_client(cache: kcache.KernelCache) -> DaemonClient:
    return cache._on_miss().remotes.client


def service_of(client: DaemonClient) -> dict[str, Any] | None:
    """Return the status of the service of a client, if there is one."""
    return status(client.path())


def of_remote(cache: kcache.KernelCache, remote: int = 0) -> dict[str, Any]:
    """What the service of a cache has counted of a remote."""
    return dict(service_of(of_client(cache))["remotes"][remote])


def end_services(folder: Path) -> None:
    """End the services with sockets in a folder, after their uploads."""
    for path in list(map(str, folder.rglob("remotes-*"))):  # the services remove their folders
        told = status(path)
        if told is not None:
            ask(path, STOP)
            assert has_ended(told["process"])


class Machines:
    """Makes caches, each on a machine of its own: another directory, another service."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._runtime = Path(tempfile.mkdtemp(prefix="kc-"))  # paths of sockets must be short
        self._stack = ExitStack()

    def cache(self, name: str, remote: str, **settings: Any) -> kcache.KernelCache:
        """Open the cache of a machine; the same name has the same directory and service."""
        folder = self._runtime / name
        folder.mkdir(mode=0o700, exist_ok=True)
        self._monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        cache = kcache.KernelCache(self._folder / f"cache-{name}", remote=remote, **settings)
        of_client(cache)  # is made as long as the variable keeps its value
        return self._stack.enter_context(cache)

    def close(self) -> None:
        self._stack.close()
        end_services(self._runtime)
        shutil.rmtree(self._runtime, ignore_errors=True)
