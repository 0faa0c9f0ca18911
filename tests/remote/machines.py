"""Machines: caches with their own directories and daemons, as if on different machines."""

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
    """Return the status of a client's daemon, or None if it does not run."""
    return status(client.path())


def of_remote(cache: kcache.KernelCache, remote: int = 0) -> dict[str, Any]:
    """Return the counts of a remote in the daemon of a cache."""
    return dict(service_of(of_client(cache))["remotes"][remote])


def end_services(folder: Path) -> None:
    """End the daemons whose sockets are in a folder, and wait until their uploads are done."""
    for path in list(map(str, folder.rglob("remotes-*"))):  # daemons remove their folders
        told = status(path)
        if told is not None:
            ask(path, STOP)
            assert has_ended(told["process"])


class Machines:
    """Opens caches as if each were on a machine of its own, with its own directory and daemon."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._runtime = Path(tempfile.mkdtemp(prefix="kc-"))  # paths of sockets must be short
        self._stack = ExitStack()

    def cache(self, name: str, remote: str, **settings: Any) -> kcache.KernelCache:
        """Open the cache of the machine `name`, with the directory and the daemon of this name."""
        folder = self._runtime / name
        folder.mkdir(mode=0o700, exist_ok=True)
        self._monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        cache = kcache.KernelCache(self._folder / f"cache-{name}", remote=remote, **settings)
        of_client(cache)  # the client has to be created before the variable changes
        return self._stack.enter_context(cache)

    def close(self) -> None:
        self._stack.close()
        end_services(self._runtime)
        shutil.rmtree(self._runtime, ignore_errors=True)
