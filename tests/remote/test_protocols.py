"""Every protocol, from a program on one machine to another's, which compiles nothing."""

import re
import socket
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from nvrtc.reference import ARCH, KERNEL, write
from remote import servers
from remote.machines import Machines, of_client, of_remote, source

import kcache
from kcache.entry import MAX_SETS, Entry, decode, encode, merged
from kcache.remote.signing import make_keys, write_keys

#: Long timeouts, so that a busy machine does not cause misses.
PATIENT = "slow=60&connect_timeout=30&timeout=30"
COUNT = 1


#: The beginnings of addresses. Each function gets the server from its fixture.
ADDRESSES: dict[str, Callable[[Callable[[str], Any]], str]] = {
    "redis": lambda get: f"redis://127.0.0.1:{get('redis_server').port}/5/protocols?",
    "http": lambda get: f"http://user:secret@127.0.0.1:{get('nginx').port}/private/p?",
    "https": lambda get: (
        f"https://127.0.0.1:{get('nginx').tls_port}/token/p?ca_file={get('nginx').certificate}&"
    ),
    "s3": lambda get: f"s3://kernels/protocols?endpoint={get('s3').endpoint}&",
}


@pytest.fixture(params=ADDRESSES)
def remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "https":
        monkeypatch.setenv("KCACHE_REMOTE_TOKEN", "t0ken")
    return ADDRESSES[request.param](request.getfixturevalue) + PATIENT


def test_the_second_machine_compiles_nothing(remote: str, hosts: Machines, tmp_path: Path) -> None:
    """Another machine, with its own directory, checkout and service, gets the same bytes."""
    text = "#include <x.h>\n" + KERNEL.replace("V", "VALUE")
    options = ARCH.replace(include_paths=["inc"])
    made: dict[str, list[kcache.CompiledKernel]] = {}
    for name in ("a", "b"):
        write(tmp_path / f"checkout-{name}" / "inc/x.h", "#define VALUE 7\n")
        with chdir(tmp_path / f"checkout-{name}"), hosts.cache(name, remote) as cache:
            made[name] = [cache.get_or_compile(source(n), options=ARCH) for n in range(COUNT)]
            made[name].append(cache.get_or_compile(text, options=options))
            assert of_client(cache).flush(120)
            counts, stats = of_remote(cache), cache.stats()
            assert (counts["errors"], counts["timeouts"]) == (0, 0)
            assert stats.compiles == (COUNT + 1 if name == "a" else 0)
    assert [k.cubin for k in made["a"]] == [k.cubin for k in made["b"]]
    assert [k.ptx for k in made["a"]] == [k.ptx for k in made["b"]]
    assert all(kernel.cached for kernel in made["b"])


def test_signatures(
    hosts: Machines, nginx: servers.Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only entries that an own key has signed are used; unsigned and foreign ones are not."""
    pytest.importorskip("cryptography", reason="cryptography is missing")
    remote = f"http://127.0.0.1:{nginx.port}/cache/signed?{PATIENT}"
    for name in ("mine", "theirs"):
        write_keys(str(tmp_path / name), make_keys()[0])

    def compiles(host: str, keys: str | None) -> tuple[int, int]:
        """Return how many kernels a machine compiles, and how many answers it refuses."""
        monkeypatch.delenv("KCACHE_SIGNING_KEY_FILE", raising=False)
        if keys is not None:
            monkeypatch.setenv("KCACHE_SIGNING_KEY_FILE", str(tmp_path / keys))
        with hosts.cache(host, remote) as cache:
            for number in range(COUNT):
                cache.get_or_compile(source(number), options=ARCH)
            assert of_client(cache).flush(120)
            return cache.stats().compiles, of_remote(cache)["unsigned"]

    assert compiles("no key", None) == (COUNT, 0)
    assert compiles("mine", "mine") == (COUNT, COUNT)  # replaces them by its own entries
    assert compiles("mine, again", "mine") == (0, 0)
    assert compiles("theirs", "theirs") == (COUNT, COUNT)
    assert compiles("no key, again", None) == (0, 0)


# -- requests to a remote --------------------------------------------------------------------------


def gets(port: int) -> int:
    """Return how many values Redis was requested to return."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"INFO commandstats\r\nQUIT\r\n")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    found = [line for line in text.splitlines() if line.startswith("cmdstat_getrange:")]
    return int(found[0].partition("calls=")[2].partition(",")[0]) if found else 0


def test_a_node_asks_twice_for_each_kernel(hosts: Machines, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    kernels = 3
    write(tmp_path / "inc/scale.h", "#define SCALE 2\n")
    options = ARCH.replace(include_paths=[tmp_path / "inc"])
    text = '#include "scale.h"\n__global__ void k%d(float* x) { *x *= SCALE; }'
    with servers.redis(tmp_path / "redis") as server:
        for node in ("cold", "warm"):
            before = gets(server.port)
            remote = f"redis://127.0.0.1:{server.port}?leases=1&{PATIENT}"
            cache = hosts.cache(node, remote)
            for number in range(kernels):
                cache.get_or_compile(text % number, options=options)
            assert of_client(cache).flush(60)
            assert cache.stats().compiles == (kernels if node == "cold" else 0)
        assert gets(server.port) - before == 2 * kernels


# -- configurations of servers that the documentation recommends -----------------------------------

PAGE = Path(__file__).parents[2] / "docs/how-to/share-with-your-team.md"


def test_nginx(hosts: Machines, tmp_path: Path) -> None:
    """With the documented nginx configuration, everybody may read; writing needs a password."""
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    place = tmp_path / "nginx"
    block = block.replace("/srv", f"{place}/srv").replace(
        "/etc/nginx/kcache.users", f"{place}/users"
    )
    (place / "srv").mkdir(parents=True)
    with servers.nginx(place, block) as server:
        at = f"127.0.0.1:{server.port}/kcache"
        with hosts.cache("writes", f"http://user:secret@{at}?{PATIENT}") as cache:
            cache.get_or_compile(source(1), options=ARCH)
            assert of_client(cache).flush(60)
            assert of_remote(cache)["uploads"] == 1
        with hosts.cache("reads", f"http://{at}?{PATIENT}") as cache:
            assert cache.get_or_compile(source(1), options=ARCH).cached
            assert not cache.get_or_compile(source(2), options=ARCH).cached
            assert of_client(cache).flush(60)
            counts = of_remote(cache)
            assert (counts["uploads"], counts["errors"], counts["dropped"]) == (0, 1, 1)
    assert len([path for path in (place / "srv/kcache").rglob("*") if path.is_file()]) == 1


def test_a_remote_manifest_keeps_its_bound() -> None:
    """A manifest that many machines merge keeps at most `MAX_SETS` sets, the newest ones."""
    key = "ab" * 32
    manifest = Entry({"set0": b"0"})
    for number in range(1, 3 * MAX_SETS):
        both = merged(manifest, Entry({"set0": b"%d" % number}), 1 << 20)
        assert both is not None
        manifest = decode(encode(key, both), key)
    newest = [b"%d" % n for n in reversed(range(2 * MAX_SETS, 3 * MAX_SETS))]
    assert list(manifest.payload.values()) == newest
    assert merged(manifest, Entry({"set0": newest[-1]}), 1 << 20) is None


def test_a_remote_manifest_keeps_to_max_entry() -> None:
    manifest = Entry({"set0": b"0" * 10_000, "set1": b"1" * 10_000})
    both = merged(manifest, Entry({"set0": b"2" * 10_000}), 25_000)
    assert [raw[:1] for raw in both.payload.values()] == [b"2", b"0"]
    alone = merged(manifest, Entry({"set0": b"2" * 10_000}), 10_000)
    assert list(alone.payload) == ["set0"]
