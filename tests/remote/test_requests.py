"""What a node asks of a remote: two values for each kernel, as the page about clusters says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
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
def test_a_node_asks_twice_for_each_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert gets(server.port) - before == 2 * kernels
