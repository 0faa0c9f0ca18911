"""Faults that change all the time, beneath threads that ask for kernels: every kernel is right."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
from remote import servers
from remote.machines import ARCH, Machines, machines, of_remote, source
from remote.proxy import Faults, Proxy

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")
KERNELS = 60


def some_faults(chance: random.Random) -> Faults:
    return chance.choice(
        [
            *(Faults(), Faults(), Faults(swap=True), Faults(refuse=True), Faults(delay=0.1)),
            *(Faults(damage=0.5), Faults(damage=1.0, keep=8), Faults(drip=0.001)),
            Faults(truncate=chance.randrange(1, 4000)),
        ]
    )


@pytest.mark.parametrize("kind", ["redis", "http"])
@pytest.mark.timeout(300)
def test_every_kernel_is_right(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    long: bool,
) -> None:
    server = request.getfixturevalue("redis_server" if kind == "redis" else "nginx")
    assert isinstance(server, (servers.Redis, servers.Nginx))
    with (
        machines(tmp_path, monkeypatch) as hosts,
        Proxy(("127.0.0.1", server.port)) as proxy,
    ):
        caches = _caches(hosts, kind, proxy.port)
        end = threading.Event()
        wrong: list[object] = []

        def spoil() -> None:
            chance = random.Random(5)
            while not end.wait(0.05):
                proxy.faults = some_faults(chance)
                if chance.random() < 0.2:
                    proxy.drop()

        def ask(cache: kcache.KernelCache, seed: int) -> None:
            chance = random.Random(seed)
            until = time.monotonic() + (25 if long else 1)
            while time.monotonic() < until and not wrong:
                value = chance.randrange(KERNELS)
                try:
                    kernel = cache.get_or_compile(source(value), options=ARCH)
                    if f", {value};".encode() not in (kernel.ptx or b""):
                        wrong.append(value)
                    if chance.random() < 0.3:
                        cache.clear()
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=ask, args=(c, n)) for n, c in enumerate(caches)]
        spoiler = threading.Thread(target=spoil)
        for thread in (*threads, spoiler):
            thread.start()
        for thread in threads:
            thread.join()
        end.set()
        spoiler.join()
        assert not wrong
        _require_that_all_is_told(caches)


def _caches(hosts: Machines, kind: str, port: int) -> list[kcache.KernelCache]:
    place = f"redis://127.0.0.1:{port}/11" if kind == "redis" else f"http://127.0.0.1:{port}/cache"
    remote = f"{place}?slow=60&timeout=0.3&connect_timeout=0.3"
    return [hosts.cache(name, remote, memory_size=0) for name in "abcd"]


def _require_that_all_is_told(caches: list[kcache.KernelCache]) -> None:
    """What a service says it found is what the programs have had from it."""
    for cache in caches:
        stats, counts = cache.stats(), of_remote(cache)
        assert (stats.errors, stats.corrupt, stats.stale) == (0, 0, 0)
        assert counts["hits"] >= stats.remote_hits  # a program may have given up meanwhile
        assert stats.compiles == stats.misses
