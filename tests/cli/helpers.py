"""Shared by the tests of the command line: caches with entries that no compiler had to make."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from core.helpers import fork, wait

from kcache import Entry, KernelCache
from kcache.nvrtc.headers import encode
from kcache.nvrtc.inventory import coldest_first
from kcache.nvrtc.manifest import Manifest, StoredHeaderSet
from kcache.nvrtc.search import HeaderSearch
from kcache.nvrtc.workers.messages import FileAnswer, Trace

BACKENDS = ("file", "zstd", "lmdb", "zstd+lmdb")

CREATED = 1_700_000_000.0


def key(number: int | str, head: str = "") -> str:
    """Returns a key, which begins with `head`."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return (head + digest)[:64]


def kernel(
    size: int = 1000,
    *,
    source: str = "axpy.cu",
    names: Iterable[str] = (),
    arch: str = "sm_90",
    created: float = CREATED,
    seconds: float = 0.25,
    log: str = "",
    flags: Iterable[str] = (),
    **sections: bytes,
) -> Entry:
    """Returns an entry as the frontend makes it, of random bytes, so that zstd can't shrink it."""
    names = list(names)
    return Entry(
        sections or {"ptx": b"// PTX\n", "cubin": os.urandom(size)},
        {
            "kind": "kernel",
            "compile_seconds": seconds,
            "lowered_names": {name: f"_Z_{name}" for name in names},
            "log": log,
            "source_name": source,
            "functions": names,
            "arch": arch,
            "flags": [f"--gpu-architecture={arch}", *flags],
            "compiler": "nvrtc 12ab",
            "created": created,
        },
    )


def header_set(name: str, digest: bytes) -> StoredHeaderSet:
    """Returns a set of one header that was read, and one that must be absent."""
    read, nothing = FileAnswer("f", 0, (1,) * 5, digest), FileAnswer("-", 0, (0,) * 5, b"")
    trace = Trace({f"inc/{name}": read, f"src/{name}": nothing}, {}, "", False)
    return StoredHeaderSet(encode(trace, HeaderSearch("src/k.cu", ["inc"], directory="/here")))


def manifest() -> Entry:
    """Returns a manifest of one header that was read, and one that must be absent."""
    return Manifest([header_set("lib/read.h", bytes(range(16)))]).to_entry()


def fill(
    directory: Path, entries: Mapping[str, Entry], backend: str = "file", max_size: str = "1GiB"
) -> None:
    """Puts entries into a cache, the first one least recently used."""
    with KernelCache(directory, backend=backend, memory_size=0, max_size=max_size) as cache:
        for name, entry in entries.items():
            assert cache.engine.put(name, entry)


def damage(directory: Path, name: str, backend: str = "file") -> None:
    """Puts bytes under a key that are no entry."""
    with KernelCache(directory, backend=backend) as cache:
        cache.engine.backend.put(name, b"not an entry" * 10)


def age(directory: Path, name: str, seconds: float) -> None:
    """Has an entry of a file backend last been used so long before now."""
    path = directory / "file" / name[:2] / name
    used = path.stat().st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(used, used))


def held(directory: Path, backend: str = "file") -> list[str]:
    """Returns the keys in a cache, least recently used first."""
    with KernelCache(directory, backend=backend, read_only=True) as cache:
        return [info.key for info in coldest_first(cache.engine.backend)]


def recency(directory: Path, backend: str = "file") -> dict[str, int]:
    """Returns when each entry was last used."""
    with KernelCache(directory, backend=backend, read_only=True) as cache:
        return {info.key: info.used_ns for info in cache.engine.backend.scan()}


def rows(text: str) -> list[dict[str, object]]:
    """Returns the objects of a JSON array."""
    found = json.loads(text)
    assert isinstance(found, list)
    return found


def use(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Has every command use a backend; returns its name."""
    monkeypatch.setenv("KCACHE_BACKEND", backend)
    return backend


NOBODY = 65534


def can_become_nobody() -> bool:
    """Tells whether this process may change its user."""
    return os.name != "nt" and os.geteuid() == 0


@contextmanager
def nobodys_directory() -> Iterator[Path]:
    """Makes a directory that user `NOBODY` owns, in a place that it can reach."""
    with tempfile.TemporaryDirectory(prefix="kcache-nobody-") as name:
        place = Path(name)
        place.chmod(0o755)
        cache = place / "cache"
        cache.mkdir(mode=0o700)
        if can_become_nobody():
            os.chown(cache, NOBODY, NOBODY)
        yield cache


def as_nobody(*arguments: str | Path) -> tuple[int, str, str]:
    """Runs `kcache ARGUMENT...` in a child that has no rights; returns exit code, output, errors.

    What the command imports must have been imported: a child may not be able to read it.
    """
    import kcache.nvrtc.workers.nvrtc  # noqa: F401
    import kcache_backends.file  # noqa: F401
    from kcache.cli.app import app

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:

        def child() -> None:
            sys.stdout, sys.stderr = out, err
            if can_become_nobody():
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            code = app.run(list(map(str, arguments)))
            print(code, file=err)
            sys.stdout.flush()

        assert wait(fork(child)) == 0
        out.seek(0)
        err.seek(0)
        *said, code = err.read().splitlines(keepends=True)
        return int(code), out.read(), "".join(said)
