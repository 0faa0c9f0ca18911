"""Hosts with networks of their own: what one compiles, the other gets; a pulled cable stops nobody."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from nvrtc.reference import KERNEL
from remote import servers
from remote.namespaces import Host, network

pytestmark = pytest.mark.usefixtures("nvrtc")

PROGRAM = """
import hashlib, json, sys
import kcache
from kcache.kernels.remotes import RemoteKernels

first, last = {first}, {last}
with kcache.KernelCache() as cache:
    options = kcache.CompileOptions(arch="sm_80")
    kernels = [cache.get_or_compile({source}.replace("V", str(n)), options=options)
               for n in range(first, last)]
    remotes = cache._on_miss().remotes
    if isinstance(remotes, RemoteKernels):
        remotes._client.flush(60)
    print(json.dumps([cache.stats().compiles, [hashlib.sha256(k.cubin or k.ptx).hexdigest() for k in kernels]]))
"""


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="kc-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def run(
    host: Host, folder: Path, runtime: Path, remote: str, first: int, last: int
) -> list[object]:
    """Ask for kernels on a host; return how many it compiled, and the digests of all."""
    private = runtime / host.name
    with suppress(FileExistsError):
        private.mkdir(mode=0o700)
    environ = {
        "KCACHE_DIR": str(folder / host.name),
        "KCACHE_REMOTE": remote,
        "XDG_RUNTIME_DIR": str(private),
    }
    code = PROGRAM.format(first=first, last=last, source=repr(KERNEL))
    done = host.python(code, environ)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_what_one_host_compiles_the_other_gets(tmp_path: Path, runtime: Path) -> None:
    pytest.importorskip("redis", reason="the package redis is missing")
    with network(2) as (server, (one, two)):
        port = 6379
        settings = ["--bind", "0.0.0.0", "--protected-mode", "no"]
        with servers.redis(tmp_path / "redis", *settings, port=port, within=server.command):
            options = "slow=60&connect_timeout=10&timeout=30"
            made = run(one, tmp_path, runtime, f"redis://{one.server}:{port}?{options}", 0, 3)
            got = run(two, tmp_path, runtime, f"redis://{two.server}:{port}?{options}", 0, 3)
            assert made[0] == 3
            assert got == [0, made[1]]
            two.cable("down")  # nothing comes back, not even a refusal
            hasty = f"redis://{two.server}:{port}?slow=60&connect_timeout=0.3&timeout=0.3"
            alone = run(two, tmp_path, runtime, hasty, 3, 6)
            assert alone[0] == 3
            two.cable("up")
            again = run(one, tmp_path, runtime, f"redis://{one.server}:{port}?{options}", 3, 6)
            assert again == [3, alone[1]]
