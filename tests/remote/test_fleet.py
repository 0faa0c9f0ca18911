"""The simulation of fleets says what real processes do, which share one Redis."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fleet import Fleet, Simulation
from remote.servers import redis

pytestmark = pytest.mark.usefixtures("nvrtc")
#: One node: a cache of its own, and an agent of its own.
NODE = """
import json, sys
import kcache
directory, remote, kernels, include = sys.argv[1:]
options = kcache.CompileOptions(arch="sm_90", include_paths=[include])
with kcache.KernelCache(directory, remote=remote) as cache:
    client = cache._on_miss().remotes._client
    while client.status() is None:  # the agent starts
        client._silent_until = client.nothing_until = 0.0
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(kernels)):
        text = '#include "scale.h"\\n__global__ void k%d(float* x) { *x *= SCALE; }' % number
        cache.get_or_compile(text, options=options)
    print(json.dumps({"compiles": cache.stats().compiles}))
    client.stop()  # ends the uploads first
"""


def start(place: Path, remote: str, nodes: int, kernels: int) -> int:
    """Starts a fleet at once; returns how many kernels all of it compiled."""
    (place / "include").mkdir(parents=True)
    (place / "include" / "scale.h").write_text("#define SCALE 2\n")
    children = []
    with tempfile.TemporaryDirectory(prefix="kc-") as runtime:
        for number in range(nodes):
            folder = Path(runtime) / str(number)
            folder.mkdir(mode=0o700)
            children.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        NODE,
                        place / str(number),
                        remote,
                        str(kernels),
                        place / "include",
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
                )
            )
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        said = [child.communicate(timeout=240)[0] for child in children]
    return sum(json.loads(text)["compiles"] for text in said)


def gets(port: int) -> int:
    """Returns how many values Redis was asked for."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"INFO commandstats\r\nQUIT\r\n")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    found = [line for line in text.splitlines() if line.startswith("cmdstat_getrange:")]
    return int(found[0].partition("calls=")[2].partition(",")[0]) if found else 0


def test_real_nodes_ask_as_often_as_simulated_ones(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    long = pytestconfig.getoption("--long", default=False)
    nodes, kernels = (36, 12) if long else (4, 3)
    with redis(tmp_path / "redis") as server:
        remote = f"redis://127.0.0.1:{server.port}?leases=1&timeout=30&slow=30&connect_timeout=30"
        # The leases of a cold start: one compile for each kernel.
        simulated = Simulation(Fleet(nodes, kernels, leases=True, compile_seconds=0.3)).run()
        assert simulated.compiles == kernels
        assert start(tmp_path / "cold", remote, nodes, kernels) == kernels
        # A warm start: two questions for each kernel of each node.
        before = gets(server.port)
        simulated = Simulation(Fleet(nodes, kernels, warm=True)).run()
        assert start(tmp_path / "warm", remote, nodes, kernels) == simulated.compiles == 0
        assert gets(server.port) - before == simulated.requests == 2 * nodes * kernels


def test_a_layer_is_asked_first() -> None:
    assert Simulation(Fleet(5, layer=1.0)).run().requests == 0
    assert Simulation(Fleet(5, layer=0.5, warm=True)).run().requests == 5 * 20 * 2


def test_bandwidth_and_rate_bound_a_start() -> None:
    slow = Simulation(Fleet(100, warm=True, bandwidth=1e6)).run()
    assert slow.seconds >= slow.sent / 1e6
    busy = Simulation(Fleet(100, warm=True, rate=100)).run()
    assert busy.seconds >= busy.requests / 100
    assert busy.peak_requests <= 101
    assert Simulation(Fleet(10)).run().compiles == 400
