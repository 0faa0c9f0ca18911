"""Remotes: a hit from a local server, compared with a bare client; `kcache warm` with a remote."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import pytest
from contenders import needs
from keep import Keep
from remote import servers

import kcache

CASE = corpus.generated(128 << 10)
SERVERS = ("HTTP", "Redis")


Get = Callable[[], bytes]


def _server(keep: Keep, kind: str) -> tuple[str, Callable[[], list[Get]]]:
    """Start a server; return its address, and a function that lists the stored values.

    The function returns, for each value, a function that gets it with a bare client.
    """
    place = keep.folder() / "server"
    if kind == "Redis":
        (module,) = needs("redis")
        redis = keep.enter_context(servers.redis(place))
        client = module.Redis(port=redis.port)
        keep.callback(client.close)
        address = f"redis://127.0.0.1:{redis.port}"
        return address, lambda: [partial(client.get, name) for name in client.scan_iter()]
    nginx = keep.enter_context(servers.nginx(place))
    connection = http.client.HTTPConnection("127.0.0.1", nginx.port)
    keep.callback(connection.close)

    def get(path: str) -> bytes:
        connection.request("GET", path)
        return connection.getresponse().read()

    def stored() -> list[Get]:
        files = filter(Path.is_file, nginx.files.rglob("*"))
        return [partial(get, f"/{path.relative_to(nginx.files)}") for path in files]

    return f"http://127.0.0.1:{nginx.port}/cache", stored


def _shared(keep: Keep, kind: str) -> tuple[kcache.KernelCache, Get]:
    """Return a cache whose remote holds the kernel, and a function that gets its bytes directly."""
    address, stored = keep(_server, kind)
    address += "?timeout=60&connect_timeout=60"
    with kcache.KernelCache(keep.folder(), remote=address) as first:
        first.get_or_compile(CASE.source, (), CASE.options)
        end = time.monotonic() + 60
        while not any(len(get()) > 10_000 for get in stored()):
            if time.monotonic() > end:
                raise RuntimeError("nothing was uploaded")
            time.sleep(0.05)
    cache = keep.enter_context(kcache.KernelCache(keep.folder(), remote=address))
    return cache, max(stored(), key=lambda get: len(get()))


@pytest.mark.beside("a kernel from a server: {kind}", "{contender}")
@pytest.mark.parametrize("contender", ["kcache, a hit from the remote", "bare client"])
@pytest.mark.parametrize("kind", SERVERS)
def test_remote(benchmark: Any, keep: Keep, kind: str, contender: str) -> None:
    """Get a kernel from a remote. kcache's time includes daemon, checks and the local put."""
    cache, bare = keep(_shared, kind)
    if contender == "bare client":
        value = benchmark(bare)
        benchmark.extra_info["bytes"] = len(value)
        return
    kernel = benchmark.pedantic(
        lambda: cache.get_or_compile(CASE.source, (), CASE.options),
        setup=lambda: cache.clear() and None,
        rounds=10,
    )
    if not kernel.cached:
        raise RuntimeError("not a hit")


# -- kcache warm -----------------------------------------------------------------------------------

WARMED = 4


def _listed(keep: Keep, lap: int) -> Path:
    """Write a list of kernels. Each lap has its own, as the remote holds those of earlier laps."""
    case, path = corpus.load("cub_reduce"), keep.folder() / "kernels.json"
    source = str(corpus.KERNELS / "cub_reduce.cu")
    names = [f"block_sum<float, {32 * (1 + number)}, {1 + lap}>" for number in range(WARMED)]
    common = {"source": source, "include_paths": case.include_paths, "arch": corpus.ARCH}
    kernels = [{**common, "names": [name]} for name in names]
    path.write_text(json.dumps({"kernels": kernels}), encoding="utf-8")
    return path


@pytest.mark.laps(2)
@pytest.mark.beside(f"kcache warm of {WARMED} kernels", "{contender}")
@pytest.mark.parametrize("contender", ["kcache", "kcache, with a remote"])
def test_warm(benchmark: Any, keep: Keep, contender: str, lap: int) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(keep.place)}
    if "remote" in contender:
        environment["KCACHE_REMOTE"] = keep(_server, "HTTP")[0]
    environment["KCACHE_DIR"] = str(keep.folder())

    def kcache_(*words: str) -> str:
        command = [sys.executable, "-m", "kcache", *words]
        return subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    benchmark.pedantic(kcache_, ("warm", "--quiet", str(keep(_listed, lap))))
    counted = json.loads(kcache_("stats", "--json"))
    found = f"{counted['compiles']} compiles"
    benchmark.extra_info |= {"found": found, "right": counted["compiles"] == WARMED}
