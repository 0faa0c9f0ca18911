"""Leases: one compile on all machines, and no endless wait."""

import json
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from core.helpers import started
from nvrtc.reference import ARCH
from remote import servers
from remote.machines import Machines, of_client, source

import kcache

pytestmark = pytest.mark.usefixtures("nvrtc")
PATIENT = "leases=1&slow=60&connect_timeout=10&timeout=30"

#: One process of a job. It gets every kernel in turn, and prints its counts.
PROGRAM = """
import json, sys, kcache
folder, remote, count, turn = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sources = ['extern "C" __global__ void k(int* out) { *out = %d; }' % n for n in range(count)]
with kcache.KernelCache(folder, remote=remote) as cache:
    sys.stdin.readline()  # all together
    for n in range(count):
        at = (n + turn) % count
        kernel = cache.get_or_compile(sources[at], options=kcache.CompileOptions(arch="sm_80"))
        assert (", %d;" % at).encode() in kernel.ptx
    stats = cache.stats()
print(json.dumps(stats.to_dict()))
"""


#: Compiles the first kernel under its lease, and then waits: it is killed before the upload.
HOLDER = """
import sys, kcache
from kcache.kernels.remotes import RemoteTier
def stay(self, *arguments):
    print("compiled", arguments[-1] is not None, flush=True)
    sys.stdin.read()
RemoteTier.upload = stay
with kcache.KernelCache(sys.argv[1], remote=sys.argv[2]) as cache:
    source = 'extern "C" __global__ void k(int* out) { *out = 0; }'
    cache.get_or_compile(source, options=kcache.CompileOptions(arch="sm_80"))
"""


def _job(
    tmp_path: Path, remote: str, processes: int, kernels: int, *, killed: bool = False
) -> list[dict[str, float]]:
    """Run `processes` processes on two hosts, and return the counts of each.

    Args:
        killed: whether another process, before them, acquires the lease of the first kernel,
            compiles it, and is killed before it uploads the kernel.
    """
    runtime = Path(tempfile.mkdtemp(prefix="kc-"))
    running: list[subprocess.Popen[str]] = []

    def run(host: str, code: str, *arguments: object) -> subprocess.Popen[str]:
        (runtime / host).mkdir(mode=0o700, exist_ok=True)
        environ = {"XDG_RUNTIME_DIR": str(runtime / host)}
        process = started(code, tmp_path / host, remote, *arguments, environ=environ)
        running.append(process)
        return process

    try:
        holder = run("host0", HOLDER) if killed else None
        if killed:
            assert holder.stdout.readline() == "compiled True\n"
        for number in range(processes):
            run(f"host{number % 2}", PROGRAM, kernels, number * 3 % kernels)
        jobs = running[-processes:]
        for process in jobs:
            process.stdin.write("\n")
            process.stdin.flush()
        if holder is not None:
            holder.send_signal(signal.SIGKILL)
        return [json.loads(process.communicate(timeout=280)[0]) for process in jobs]
    finally:
        for process in running:
            process.kill()
            process.communicate()
        shutil.rmtree(runtime, ignore_errors=True)  # the services end when their sockets are gone


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.long), True])
def test_every_kernel_is_compiled_once_on_all_hosts(
    killed: bool, redis_server: servers.Redis, tmp_path: Path, long: bool
) -> None:
    """Each kernel is compiled once. If a holder is killed, its compile has to be repeated."""
    processes, kernels = (64, 40) if long else (4, 3)
    remote = f"redis://127.0.0.1:{redis_server.port}/{10 + killed}/leases?{PATIENT}"
    counted = _job(tmp_path, remote, processes, kernels, killed=killed)
    assert sum(stats["compiles"] for stats in counted) == kernels
    assert sum(stats["hits"] for stats in counted) == (processes - 1) * kernels
    assert sum(stats["wait_timeouts"] for stats in counted) == 0
    assert killed or sum(stats["remote_errors"] for stats in counted) == 0


def test_the_wait_for_a_holder_ends(hosts: Machines, redis_server: servers.Redis) -> None:
    remote = f"redis://127.0.0.1:{redis_server.port}/13?{PATIENT}"
    holder = hosts.cache("a", remote)
    cache = hosts.cache("b", remote, wait=0.2)
    request = cache._requests.make(
        source(1), (), ARCH, None, extra_key=b"", source_name="kernel.cu", record=False
    )
    lease = of_client(holder).lease(request.key)
    assert lease not in (True, False)
    assert not cache.get_or_compile(source(1), options=ARCH).cached
    assert cache.stats().wait_timeouts == 1


def test_an_error_gives_the_lease_back(hosts: Machines, redis_server: servers.Redis) -> None:
    remote = f"redis://127.0.0.1:{redis_server.port}/14?{PATIENT}"
    for name in ("a", "b"):
        cache = hosts.cache(name, remote)
        with pytest.raises(kcache.CompileError):
            cache.get_or_compile("this is no CUDA", options=ARCH)
        kernel = cache.get_or_compile(  # not cacheable, so each machine compiles it without waiting
            'extern "C" __global__ void k(char* out) { *out = __TIME__[0]; }', options=ARCH
        )
        assert not kernel.cached


def test_a_redis_that_dies_under_a_lease(hosts: Machines, tmp_path: Path) -> None:
    with servers.redis(tmp_path / "redis") as server:
        remote = f"redis://127.0.0.1:{server.port}/0?leases=1&slow=60&timeout=0.5"
        cache = hosts.cache("a", remote)
        assert cache.lookup(source(1), options=ARCH) is None
        server.process.kill()
        assert not cache.get_or_compile(source(1), options=ARCH).cached
        assert not cache.get_or_compile(source(2), options=ARCH).cached
    assert cache.stats().compiles == 2
