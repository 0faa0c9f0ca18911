"""Kernels through tiers: other machines get what one has compiled, and never a damaged kernel."""

import struct
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import xxhash
from nvrtc.reference import ARCH, KERNEL, write
from remote.fakes import MemoryClient, remote, service
from remote.machines import source

import kcache
from kcache.entry import Entry, encode
from kcache.remote.daemon_client import DaemonClient

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.fixture
def store() -> MemoryClient:
    return MemoryClient()


@pytest.fixture
def client(
    store: MemoryClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DaemonClient]:
    """A service that every cache in this process uses, whatever its remote is called."""
    with service(tmp_path, remote(store)) as made:
        monkeypatch.setattr("kcache.kernels.remotes.DaemonClient", lambda *_, **__: made)
        yield made


def machine(folder: Path, **settings: object) -> kcache.KernelCache:
    settings.setdefault("remote", "http://memory")
    return kcache.KernelCache(folder, **settings)  # type: ignore[arg-type]


def test_headers_are_compared_where_they_are_used(client: DaemonClient, tmp_path: Path) -> None:
    text = "#include <x.h>\n" + KERNEL
    for name, value in (("one", 1), ("two", 2), ("three", 1), ("four", 3)):
        write(tmp_path / name / "inc/x.h", f"#define V {value}\n")
    hits = {}
    cubins = {}
    for name in ("one", "two", "three", "four"):
        with chdir(tmp_path / name), machine(tmp_path / f"cache-{name}") as cache:
            options = ARCH.replace(include_paths=["inc"])
            kernel = cache.get_or_compile(text, options=options)
            assert client.flush(60)
            cubins[name] = kernel.cubin
            hits[name] = cache.stats().remote_hits
            assert kernel.dependencies == (str(tmp_path / name / "inc/x.h"),)
            assert cache.get_or_compile(text, options=options).cached
    assert hits == {"one": 0, "two": 0, "three": 1, "four": 0}
    assert cubins["one"] == cubins["three"] != cubins["two"]
    with chdir(tmp_path / "two"), machine(tmp_path / "late") as cache:
        cache.get_or_compile(text, options=ARCH.replace(include_paths=["inc"]))
        assert cache.stats().remote_hits == 1, "a dependency set has erased another"


def test_read_only_uploads_nothing(
    store: MemoryClient, client: DaemonClient, tmp_path: Path
) -> None:
    with machine(tmp_path / "a"):
        pass
    with machine(tmp_path / "a", read_only=True) as cache:
        cache.get_or_compile(source(), options=ARCH)
        assert cache.stats().remote_puts == 0
    assert client.flush(60)
    assert store.values == {}


def test_disable_and_recache(store: MemoryClient, client: DaemonClient, tmp_path: Path) -> None:
    with machine(tmp_path / "a", disable=True) as cache:
        cache.get_or_compile(source(), options=ARCH)
    assert store.operations == []
    with machine(tmp_path / "a", recache=True) as cache:
        cache.get_or_compile(source(), options=ARCH)
        assert client.flush(60)
    assert "get" not in store.operations
    assert store.values, "a new compile has to replace the old entry"


def test_a_damaged_remote_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a remote has damaged or foreign values, the next remote is used."""
    from kcache.entry import FORMAT_VERSION
    from kcache.nvrtc import PRODUCER

    damaged, good = MemoryClient(), MemoryClient()
    remotes = (remote(damaged, "http://a?ro&slow=60"), remote(good, "http://b?slow=60"))
    write(tmp_path / "inc/x.h", "#define V 7\n")
    options = ARCH.replace(include_paths=[tmp_path / "inc"])
    asked = [(source(1), ARCH), (source(2), ARCH), ("#include <x.h>\n" + KERNEL, options)]
    with service(tmp_path, *remotes) as client:
        monkeypatch.setattr("kcache.kernels.remotes.DaemonClient", lambda *_, **__: client)
        with machine(tmp_path / "maker") as cache:
            made = [cache.get_or_compile(text, options=o) for text, o in asked]
            assert client.flush(60)
        kept = dict(good.values)
        assert not damaged.values

        def later(key: str) -> bytes:
            blob = bytearray(kept[key])
            struct.pack_into("<H", blob, 6, FORMAT_VERSION + 1)
            return bytes(blob[:-16]) + xxhash.xxh3_128_digest(blob[:-16])

        other = encode("ab" * 32, Entry({"cubin": b"x"}), producer=PRODUCER.encode())
        spoilt: dict[str, Callable[[str], bytes]] = {
            "bits": lambda key: kept[key][:-20] + bytes(20),
            "cut": lambda key: kept[key][:-1],
            "version": later,
            "nonsense": lambda _: b"no envelope at all",
            "key": lambda _: other,
            "empty": lambda _: b"",
        }
        for name, spoil in spoilt.items():
            damaged.values = before = {key: spoil(key) for key in kept}
            with machine(tmp_path / name) as cache:
                found = [cache.get_or_compile(text, options=o) for text, o in asked]
                assert found == [kernel._replace(cached=True) for kernel in made], name
                stats = cache.stats()
                assert (stats.compiles, stats.remote_hits) == (0, len(asked)), name
                assert client.flush(60)
            assert damaged.values == before, name
            assert good.values == kept, name
    assert "put" not in damaged.operations
    assert "replace" not in damaged.operations
