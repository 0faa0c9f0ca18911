"""Namespaces: hosts with networks of their own, joined by virtual cables, on one machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import pytest

__all__ = ["Host", "network"]


class Host(NamedTuple):
    """One host, whose cable leads to the server's.

    Attributes:
        name: of its network namespace.
        server: the server's address, as seen from here.
    """

    name: str
    server: str

    def command(self, *words: str) -> list[str]:
        """The command that runs another one here."""
        return ["ip", "netns", "exec", self.name, *words]

    def python(self, code: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run Python here."""
        kept = {n: os.environ[n] for n in ("PATH", "HOME") if n in os.environ}
        return subprocess.run(
            self.command(sys.executable, "-c", code),
            env={**kept, **environ},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    def cable(self, state: str) -> None:
        """Pull the cable (`down`), or put it in again (`up`)."""
        _ip("-n", self.name, "link", "set", "cable", state)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@contextmanager
def _namespace(name: str) -> Iterator[None]:
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        pids = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False, timeout=60
        ).stdout.split()
        for pid in pids:  # agents, which stay a while
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name)


@contextmanager
def network(count: int) -> Iterator[tuple[Host, list[Host]]]:
    """Make a server's host and some others, each with a cable to it; skips where that can't be."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    base = f"kc{os.getpid()}"
    with ExitStack() as stack:
        try:
            stack.enter_context(_namespace(f"{base}s"))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        hosts = []
        for number in range(count):
            name = f"{base}h{number}"
            stack.enter_context(_namespace(name))
            ends = ["link", "add", "cable", "netns", name, "type", "veth", "peer", "name"]
            _ip(*ends, f"cable{number}", "netns", f"{base}s")
            server, client = f"10.77.{number}.1", f"10.77.{number}.2"
            for namespace, device, address in (
                (f"{base}s", f"cable{number}", server),
                (name, "cable", client),
            ):
                _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
                _ip("-n", namespace, "link", "set", device, "up")
            hosts.append(Host(name, server))
        yield Host(f"{base}s", "127.0.0.1"), hosts
