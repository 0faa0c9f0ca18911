"""Helpers of the tests of the command line: caches whose entries were not compiled."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from core.helpers import become_nobody, command

from kcache import Entry, KernelCache
from kcache.nvrtc.answers import Answers
from kcache.nvrtc.entries import coldest_first
from kcache.nvrtc.manifest import DependencySet, Manifest
from kcache.nvrtc.search import HeaderSearch
from kcache.nvrtc.workers.messages import FileAnswer, Trace

BACKENDS = ("file", "zstd", "lmdb", "zstd+lmdb")

CREATED = 1_700_000_000.0


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
    """Return an entry as kcache stores a kernel, by default with random, incompressible bytes."""
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


def dependency_set(name: str, digest: bytes) -> DependencySet:
    """Return a dependency set with one header that was read, and one that was absent."""
    read, nothing = FileAnswer("f", 0, (1,) * 5, digest), FileAnswer("-", 0, (0,) * 5, b"")
    trace = Trace({f"inc/{name}": read, f"src/{name}": nothing}, {}, "", False)
    search = HeaderSearch("src/k.cu", ["inc"], directory="/here")
    return DependencySet(Answers.of(trace, search).encode())


def manifest() -> Entry:
    """Return a manifest with one header that was read, and one that was absent."""
    return Manifest([dependency_set("lib/read.h", bytes(range(16)))]).to_entry()


def fill(
    directory: Path, entries: Mapping[str, Entry], backend: str = "file", max_size: str = "1GiB"
) -> None:
    """Put entries into a cache. The first entry becomes the least recently used one."""
    with KernelCache(directory, backend=backend, memory_size=0, max_size=max_size) as cache:
        for name, entry in entries.items():
            assert cache.engine.put(name, entry)


def damage(directory: Path, name: str, backend: str = "file") -> None:
    """Put bytes that are not an entry into a cache, under the key `name`."""
    with KernelCache(directory, backend=backend) as cache:
        cache.engine.backend.put(name, b"not an entry" * 10)


def age(directory: Path, name: str, seconds: float) -> None:
    """Set the last use of an entry of the `file` backend back by some seconds."""
    path = directory / "file" / name[:2] / name
    used = path.stat().st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(used, used))


def held(directory: Path, backend: str = "file") -> list[str]:
    """Return the keys in a cache, least recently used first."""
    with KernelCache(directory, backend=backend, read_only=True) as cache:
        return [info.key for info in coldest_first(cache.engine.backend)]


def contents(directory: Path, backend: str = "file") -> dict[str, Entry]:
    """Return the entries of a cache by key, except those that kcache refuses."""
    with KernelCache(directory, backend=backend, read_only=True, memory_size=0) as cache:
        keys = [info.key for info in cache.engine.backend.scan()]
        found = {name: cache.engine.get(name) for name in keys}
    return {name: entry for name, entry in found.items() if entry is not None}


def recency(directory: Path, backend: str = "file") -> dict[str, int]:
    """Return the last use of each entry by key, in nanoseconds since the epoch."""
    with KernelCache(directory, backend=backend, read_only=True) as cache:
        return {info.key: info.used_ns for info in cache.engine.backend.scan()}


def rows(text: str) -> list[dict[str, object]]:
    """Return the objects in a JSON array."""
    return list(json.loads(text))


def use(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set `KCACHE_BACKEND`, so that every command uses this backend; return its name."""
    monkeypatch.setenv("KCACHE_BACKEND", backend)
    return backend


def can_become_nobody() -> bool:
    """Return whether this process may change its user."""
    return os.name != "nt" and os.geteuid() == 0


def as_nobody(*arguments: str | Path) -> tuple[int, str, str]:
    """Run `kcache ARGUMENT...` as the user `NOBODY`; return its exit code, output and errors.

    The modules that the command needs are imported before, because the user may not be able to read
    them.
    """
    import kcache.nvrtc.workers.nvrtc  # noqa: F401
    import kcache_backends.file  # noqa: F401

    done = command(*arguments, before=become_nobody)
    return done.returncode, done.stdout, done.stderr
