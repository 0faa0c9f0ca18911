"""Every protocol, from one machine's program to another's: the second compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nvrtc.reference import KERNEL, working_directory, write
from remote import servers
from remote.machines import ARCH, Machines, of_client, of_remote, source

import kcache
from kcache.remote.signing import make_keys, write_keys

#: No miss on a loaded machine is a failure here.
PATIENT = "slow=60&connect_timeout=30&timeout=30"
COUNT = 2


def of_redis(request: pytest.FixtureRequest) -> str:
    return f"redis://127.0.0.1:{request.getfixturevalue('redis_server').port}/5/protocols?"


def of_cluster(request: pytest.FixtureRequest) -> str:
    nodes = request.getfixturevalue("redis_cluster")
    return f"redis+cluster://{','.join(f'127.0.0.1:{n.port}' for n in nodes)}/protocols?"


def of_http(request: pytest.FixtureRequest) -> str:
    return f"http://user:secret@127.0.0.1:{request.getfixturevalue('nginx').port}/private/p?"


def of_https(request: pytest.FixtureRequest) -> str:
    nginx: servers.Nginx = request.getfixturevalue("nginx")
    request.getfixturevalue("monkeypatch").setenv("KCACHE_REMOTE_TOKEN", "t0ken")
    return f"https://127.0.0.1:{nginx.tls_port}/token/p?ca_file={nginx.certificate}"


def of_s3(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("obstore", reason="the package obstore is missing")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return (
        f"s3://kernels/protocols?region=us-east-1&endpoint={request.getfixturevalue('s3').endpoint}"
    )


@pytest.fixture(params=[of_redis, of_cluster, of_http, of_https, of_s3])
def remote(request: pytest.FixtureRequest) -> str:
    address: Callable[[pytest.FixtureRequest], str] = request.param
    return f"{address(request)}&{PATIENT}".replace("?&", "?")


def test_the_second_machine_compiles_nothing(remote: str, hosts: Machines, tmp_path: Path) -> None:
    """Another directory, checkout and service; kernels with and without headers; equal bytes."""
    text = "#include <x.h>\n" + KERNEL.replace("V", "VALUE")
    options = ARCH.replace(include_paths=["inc"])
    made: dict[str, list[kcache.CompiledKernel]] = {}
    for name in ("a", "b"):
        write(tmp_path / f"checkout-{name}" / "inc/x.h", "#define VALUE 7\n")
        with working_directory(tmp_path / f"checkout-{name}"), hosts.cache(name, remote) as cache:
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
    """What nobody, or somebody else, has signed is never used; the own is."""
    pytest.importorskip("cryptography", reason="cryptography is missing")
    remote = f"http://127.0.0.1:{nginx.port}/cache/signed?{PATIENT}"
    for name in ("mine", "theirs"):
        write_keys(str(tmp_path / name), make_keys()[0])

    def compiles(host: str, keys: str | None) -> tuple[int, int]:
        """How many kernels a machine compiles, and how many answers it refuses."""
        monkeypatch.delenv("KCACHE_SIGNING_KEY_FILE", raising=False)
        if keys is not None:
            monkeypatch.setenv("KCACHE_SIGNING_KEY_FILE", str(tmp_path / keys))
        with hosts.cache(host, remote) as cache:
            for number in range(COUNT):
                cache.get_or_compile(source(number), options=ARCH)
            assert of_client(cache).flush(120)
            return cache.stats().compiles, of_remote(cache)["unsigned"]

    assert compiles("no key", None) == (COUNT, 0)
    assert compiles("mine", "mine") == (COUNT, COUNT)  # and it stores its own in their place
    assert compiles("mine, again", "mine") == (0, 0)
    assert compiles("theirs", "theirs") == (COUNT, COUNT)
    assert compiles("no key, again", None) == (0, 0)


def test_a_key_file_that_cannot_be_used_lets_nothing_in(
    hosts: Machines, nginx: servers.Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = f"http://127.0.0.1:{nginx.port}/cache/unusable?{PATIENT}"
    with hosts.cache("a", remote) as cache:
        cache.get_or_compile(source(1), options=ARCH)
        assert of_client(cache).flush(120)
    (tmp_path / "key").write_text("no key")
    for number, file in enumerate((tmp_path / "nowhere", tmp_path / "key")):
        monkeypatch.setenv("KCACHE_SIGNING_KEY_FILE", str(file))
        with hosts.cache(f"b{number}", remote) as cache:
            assert not cache.get_or_compile(source(1), options=ARCH).cached
            assert cache.stats().remote_hits == 0
