"""The simulation of fleets says how often real nodes ask, which share one Redis."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fleet import Fleet, Simulation
from nvrtc.reference import ARCH, write
from remote.machines import machines, of_client
from remote.servers import redis

PATIENT = "leases=1&timeout=30&slow=30&connect_timeout=30"


def gets(port: int) -> int:
    """Returns how many values Redis was asked for."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"INFO commandstats\r\nQUIT\r\n")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    found = [line for line in text.splitlines() if line.startswith("cmdstat_getrange:")]
    return int(found[0].partition("calls=")[2].partition(",")[0]) if found else 0


@pytest.mark.usefixtures("nvrtc")
def test_a_real_node_asks_as_often_as_a_simulated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis")
    kernels = 3
    write(tmp_path / "inc/scale.h", "#define SCALE 2\n")
    options = ARCH.replace(include_paths=[tmp_path / "inc"])
    text = '#include "scale.h"\n__global__ void k%d(float* x) { *x *= SCALE; }'
    with redis(tmp_path / "redis") as server, machines(tmp_path, monkeypatch) as hosts:
        for node in ("cold", "warm"):
            before = gets(server.port)
            remote = f"redis://127.0.0.1:{server.port}?{PATIENT}"
            cache = hosts.cache(node, remote, relocation="lazy")  # no proofs meanwhile
            for number in range(kernels):
                cache.get_or_compile(text % number, options=options)
            assert of_client(cache).flush(60)
            assert cache.stats().compiles == (kernels if node == "cold" else 0)
        simulated = Simulation(Fleet(1, kernels, warm=True)).run()
        assert gets(server.port) - before == simulated.requests == 2 * kernels


def test_a_simulation_keeps_to_its_layer_bandwidth_and_rate() -> None:
    assert Simulation(Fleet(5, layer=1.0)).run().requests == 0
    assert Simulation(Fleet(5, layer=0.5, warm=True)).run().requests == 5 * 20 * 2
    slow = Simulation(Fleet(100, warm=True, bandwidth=1e6)).run()
    assert slow.seconds >= slow.sent / 1e6
    busy = Simulation(Fleet(100, warm=True, rate=100)).run()
    assert busy.seconds >= busy.requests / 100
    assert busy.peak_requests <= 101
    assert Simulation(Fleet(10)).run().compiles == 400
