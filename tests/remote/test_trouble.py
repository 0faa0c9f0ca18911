"""Real remotes that fail: every kernel is returned and right, and the failures are counted."""

import itertools
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from core.helpers import output_of, run, run_all
from nvrtc.reference import ARCH
from remote import servers
from remote.fakes import until
from remote.machines import Machines, of_client, of_remote, service_of, source
from remote.proxy import Faults, Proxy

import kcache
from kcache.remote.guarded_storage import FAILURES

pytestmark = pytest.mark.usefixtures("nvrtc")
#: Long timeouts, so that a busy machine does not cause misses.
PATIENT = "slow=60&connect_timeout=10&timeout=30"
HASTY = "slow=60&connect_timeout=0.5&timeout=0.5"
COUNT = 6


def ask(cache: kcache.KernelCache, *values: int) -> list[bool]:
    """Get kernels, assert that each is right, and return whether each was cached."""
    found = []
    for value in values or range(COUNT):
        kernel = cache.get_or_compile(source(value), options=ARCH)
        assert kernel.ptx is not None
        assert f", {value};".encode() in kernel.ptx
        found.append(kernel.cached)
    return found


def test_uploads_of_an_ended_program(
    hosts: Machines, redis_server: servers.Redis, tmp_path: Path
) -> None:
    """The service completes the upload of a program that has already ended."""
    with Proxy(("127.0.0.1", redis_server.port)) as proxy:
        remote = f"redis://127.0.0.1:{proxy.port}/1?{PATIENT}"
        cache = hosts.cache("a", remote)  # a client, to read the status of the service
        service_of(of_client(cache))
        proxy.faults = Faults(delay=0.3)
        code = (
            "import kcache, sys\n"
            "cache = kcache.KernelCache(sys.argv[1], remote=sys.argv[2])\n"
            "cache.get_or_compile(sys.argv[3], options=kcache.CompileOptions(arch='sm_80'))\n"
        )
        output_of(code, tmp_path / "program", remote, source(1))
        until(lambda: of_remote(cache)["uploads"] == 1)


def test_killed_and_restarted(hosts: Machines, tmp_path: Path) -> None:
    port = servers.free_port()
    remote = f"redis://127.0.0.1:{port}/0?{HASTY}"
    with servers.redis(tmp_path / "redis", port=port):
        cache = hosts.cache("a", remote)
        ask(cache, 1, 2)
        assert of_client(cache).flush(60)
    ask(cache, *range(3, 3 + 2 * FAILURES))
    counts = of_remote(cache)
    assert counts["breaker"] == "open"
    assert counts["errors"] + counts["timeouts"] >= FAILURES
    with servers.redis(tmp_path / "redis", port=port):
        client = of_client(cache)

        def asked_again() -> bool:
            client.nothing_until = 0.0
            client.get("ab" * 32)
            return of_remote(cache)["breaker"] == "closed"

        until(asked_again)
        numbers, uploads = itertools.count(100), of_remote(cache)["uploads"]

        def stored() -> bool:  # a pause may not be over, and a busy machine may be late
            ask(cache, next(numbers))
            return client.flush(60) and of_remote(cache)["uploads"] > uploads

        until(stored)
        with hosts.cache("b", remote.replace(HASTY, PATIENT)) as second:
            assert ask(second, 1, next(numbers) - 1) == [False, True]
    assert cache.stats().errors == 0


def test_a_daemon_that_is_killed_or_stopped(hosts: Machines, redis_server: servers.Redis) -> None:
    remote = f"redis://127.0.0.1:{redis_server.port}/9?{PATIENT}"
    cache = hosts.cache("a", remote)
    ask(cache, 1)
    client = of_client(cache)
    process = service_of(client)["process"]
    os.kill(process, signal.SIGKILL)
    ask(cache, 2)  # starts another daemon
    second = service_of(client)["process"]
    assert second != process
    assert cache.stats().remote_errors == 0
    client.timeout = 0.5
    with servers.frozen(second):
        ask(cache, 3, 4, 5)
    assert (cache.stats().compiles, cache.stats().remote_errors) == (5, 3)
    client.timeout = 60


def test_wrong_credentials_are_soon_given_up_and_never_shown(
    hosts: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with servers.redis(tmp_path / "redis", "--requirepass", "right") as server:
        address = f"127.0.0.1:{server.port}/0"
        cache = hosts.cache("a", f"redis://:hunter2@{address}?{PATIENT}")
        ask(cache)
        counts = of_remote(cache)
        assert FAILURES <= counts["errors"] <= 2 * FAILURES
        said = [record.getMessage() for record in caplog.records]
        why = "invalid username-password pair or user is disabled; kcache works without it"
        assert said == [f"redis://***@{address}: {why}"]
        assert "hunter2" not in str(counts)
        service = Path("/proc", str(service_of(of_client(cache))["process"]))
        for name in ("cmdline", "environ"):
            assert b"hunter2" not in (service / name).read_bytes()
        with hosts.cache("b", f"redis://:right@{address}?{PATIENT}") as second:
            ask(second, 1)
            assert of_remote(second)["errors"] == 0


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("refused", "Connection refused"),
        ("unknown", "Name or service not known|name resolution"),
        ("full", "maxmemory"),
    ],
)
def test_a_broken_remote_logs_the_reason(
    fault: str, why: str, hosts: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged, even if the program ends right after its first compile."""
    with servers.redis(tmp_path / "redis", "--maxmemory", "1") as server:
        host = "no-such-host.invalid" if fault == "unknown" else "127.0.0.1"
        port = servers.free_port() if fault == "refused" else server.port
        with hosts.cache("a", f"redis://{host}:{port}/0?{PATIENT}") as cache:
            ask(cache, 1)
        (record,) = caplog.records
        assert re.search(f"redis://{host}:{port}/0: .*({why}).*; kcache ", record.getMessage())
        assert cache.stats().remote_errors == (fault != "full")


#: Compiles a kernel with NVRTC's own interface.
NVRTC = """
from cuda.bindings import nvrtc
source = b'extern "C" __global__ void k(int* out) { *out = 77; }'
_, program = nvrtc.nvrtcCreateProgram(source, b"k.cu", 0, [], [])
nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_80"])
print(nvrtc.nvrtcGetCUBINSize(program)[1] > 0)
"""
API = """
import kcache
with kcache.KernelCache() as cache:
    source = 'extern "C" __global__ void k(int* out) { *out = 78; }'
    kernel = cache.get_or_compile(source, options=kcache.CompileOptions(arch="sm_80"))
    print(kernel.cubin is not None)
"""


KCACHE, PYTHON = (sys.executable, "-m", "kcache"), (sys.executable, "-c")
#: Commands that compile, and their output.
COMMANDS = {
    "compile": ((*KCACHE, "compile", "k.cu", "--arch", "sm_80", "-o", "k.cubin"), ""),
    "run": ((*KCACHE, "run", "--stats", "--", *PYTHON, API + NVRTC), "True\nTrue\n"),
    "install": ((*PYTHON, "import kcache; kcache.install()" + NVRTC), "True\n"),
}


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment in which the remote has a wrong password."""
    pytest.importorskip("click")
    with servers.redis(tmp_path / "redis", "--requirepass", "right") as server:
        address = f"redis://:hunter2@127.0.0.1:{server.port}/0?{PATIENT}"
        monkeypatch.setenv("KCACHE_REMOTE", address)
        monkeypatch.setenv("KCACHE_DIR", str(tmp_path / "cache"))
        yield


@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_wrong_password_is_one_line(kind: str, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(source(79))
    command, out = COMMANDS[kind]
    ended = run(*command, cwd=tmp_path)
    assert ended.returncode == 0
    said = ended.stderr.splitlines()
    assert ended.stdout == out
    (line,) = [line for line in said if "kcache works without it" in line]
    assert line.startswith("kcache: warning: redis://***@127.0.0.1:")
    assert len(said) == (2 if kind in ("compile", "run") else 1), said
    assert "hunter2" not in ended.stderr
    if kind == "run":
        assert said[-1].endswith("remotes: hits 0, misses 0, without an answer 1")


@pytest.mark.usefixtures("wrong")
def test_a_nested_run_warns_once() -> None:
    started = run(*KCACHE, "server", "start")
    ended = run(*KCACHE, "run", *KCACHE, "run", *PYTHON, NVRTC)
    stopped = run(*KCACHE, "server", "stop")
    assert (started.returncode, ended.returncode, stopped.returncode) == (0, 0, 0), started.stderr
    assert ended.stdout == "True\n"
    assert ended.stderr.count("kcache works without it") == 1


def test_commands_report_the_counts_of_a_remote(
    hosts: Machines, redis_server: servers.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    click_testing = pytest.importorskip("click.testing")
    from kcache.cli.app import app

    remote = f"redis://127.0.0.1:{redis_server.port}/10?{PATIENT}"
    with hosts.cache("a", remote) as first:
        ask(first)
        assert of_client(first).flush(60)
    with hosts.cache("b", remote) as second:
        ask(second, *range(COUNT + 1))
        assert of_client(second).flush(60)
    monkeypatch.setenv("KCACHE_REMOTE", remote)
    monkeypatch.setenv("KCACHE_DIR", str(second.directory))
    invoke = click_testing.CliRunner().invoke

    def said(*arguments: str) -> str:
        result = invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return str(result.output)

    for command in ("stats", "info"):
        text = said(command)
        assert f"{COUNT} hits, 1 miss, 0 without an answer" in text
        assert f"{COUNT} hits, 1 misses, 1 uploads" in text
    (told,) = json.loads(said("stats", "--json"))["remotes"]
    assert (told["hits"], told["misses"], told["breaker"]) == (COUNT, 1, "closed")
    text = said("stats", "--prometheus")
    assert f"kcache_remote_hits_total {COUNT}\n" in text
    assert 'kcache_tier_hits_total{tier="redis://127.0.0.1:' in text
    page = tmp_path / "page.html"
    said("report", "-o", str(page))
    assert f"{COUNT} from remotes" in page.read_text()


# -- random faults ---------------------------------------------------------------------------------

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
    kind: str, hosts: Machines, request: pytest.FixtureRequest, long: bool
) -> None:
    """While threads get kernels, the faults of the connection change; every kernel is right."""
    server = request.getfixturevalue("redis_server" if kind == "redis" else "nginx")
    end = threading.Event()

    def spoil(proxy: Proxy) -> None:
        chance = random.Random(5)
        while not end.wait(0.05):
            proxy.faults = some_faults(chance)
            if chance.random() < 0.2:
                proxy.drop()

    def ask_on(cache: kcache.KernelCache, seed: int) -> None:
        chance = random.Random(seed)
        until = time.monotonic() + (25 if long else 0.7)
        while time.monotonic() < until:
            ask(cache, chance.randrange(KERNELS))
            if chance.random() < 0.3:
                cache.clear()

    with Proxy(("127.0.0.1", server.port)) as proxy:
        place = f"127.0.0.1:{proxy.port}/{'11' if kind == 'redis' else 'cache'}"
        remote = f"{kind}://{place}?slow=60&timeout=0.3&connect_timeout=0.3"
        caches = [hosts.cache(name, remote, memory_size=0) for name in "ab"]
        spoiler = threading.Thread(target=spoil, args=(proxy,))
        spoiler.start()
        try:
            assert run_all(*(partial(ask_on, c, n) for n, c in enumerate(caches))) == [None] * 2
        finally:
            end.set()
            spoiler.join()
        _require_that_all_is_told(caches)


def _require_that_all_is_told(caches: list[kcache.KernelCache]) -> None:
    """Assert that the counts of a service match those of the programs that use it."""
    for cache in caches:
        stats, counts = cache.stats(), of_remote(cache)
        assert (stats.errors, stats.corrupt, stats.stale) == (0, 0, 0)
        assert counts["hits"] >= stats.remote_hits  # a program may have given up before an answer
        assert stats.compiles == stats.misses
