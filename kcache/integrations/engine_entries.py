"""EngineEntries: the entries of one framework in the user's cache and its other tiers."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from kcache.engine.engine import Damaged
from kcache.engine.opening import engine_of, open_configured
from kcache.engine.stats import DISK, MEMORY
from kcache.entry import JSON, Entry, encode
from kcache.errors import BackendError
from kcache.gpu_code import arch_of, kernels_of
from kcache.kernels.lookup import LocalTier, SharedTier
from kcache.kernels.remotes import open_remotes
from kcache.kernels.tiers import open_read_only_tiers
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.entries import KERNEL
from kcache.remote.daemon_protocol import Upload
from kcache.remote.storage import RemoteError
from kcache.util import log

T = TypeVar("T")

#: This many digits at the end of a key's 64 are the same for all entries of a framework, so that
#: its entries are found without reading them. They are at the end so that the keys of a framework
#: are as evenly distributed as others.
_MARK_DIGITS = 8
#: Maximum number of misses whose time is remembered.
_MOST_MISSED = 1024


class EngineEntries:
    """The entries of a framework, which has its own names for them, in the user's cache.

    The entries share the directory, the cap and the counts with the kernels of `KernelCache`. A
    failure of the cache is logged, not raised: a lookup then misses, and a put stores nothing.

    The time between a miss and the next put under the same key is stored as the time that a hit of
    the entry saves.

    Threads: may be called from several threads at the same time. Processes, crash and fork: the
    guarantees are those of `CacheEngine`.

    Args:
        framework: the name of the framework and the version of its entries' format, such as
            `"triton/1"`.
        directory: the cache's directory; by default that of the settings.
        max_size: the cap in bytes; by default that of the settings.

    Attributes:
        disabled: whether the setting `disable` is on.
        reads: whether entries are looked up; false if the setting `disable` or `recache` is on.

    Raises:
        ConfigError: an argument is not allowed.
    """

    def __init__(
        self,
        framework: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        max_size: int | None = None,
    ) -> None:
        opened = open_configured({"directory": directory, "max_size": max_size}, None)
        config = opened.config
        self._framework = framework.encode()
        self._mark = hashlib.sha256(self._framework).hexdigest()[:_MARK_DIGITS]
        self.disabled = config.disable.value
        self.reads = not (self.disabled or config.recache.value)
        self.engine = engine_of(opened, config.memory_size.value, producer=PRODUCER)
        local = LocalTier(self.engine)
        layers = None if self.disabled else open_read_only_tiers(config, self.engine.report)
        self._remotes = open_remotes(config)
        shared = {"layer": layers, "remote": self._remotes}
        self._shared = {
            f"{name}_hits": SharedTier(local, members, name)
            for name, members in shared.items()
            if members is not None
        }
        self._missed: dict[str, float] = {}

    def key_of(self, name: bytes) -> str:
        """Return the key of the entry that the framework calls `name`."""
        digest = hashlib.sha256(self._framework + b"\0" + name).hexdigest()
        return digest[:-_MARK_DIGITS] + self._mark

    def get(self, key: str) -> Entry | None:
        """Return the entry under `key`, or None if there is none or the cache fails.

        The lookup is counted as a hit or a miss. If `reads` is false, nothing is looked up or
        counted, and the result is None.
        """
        return self._surviving(lambda: self._get(key), None)

    def _get(self, key: str) -> Entry | None:
        if not self.reads:
            return None
        started = time.perf_counter()
        damaged: Damaged = []
        slot, tier = self.engine.fetch(key, damaged)
        entry = self._from_elsewhere(key, damaged) if slot is None else slot.value
        for problem in damaged:
            self.engine.refuse(*problem)
        if tier is MEMORY and not self.engine.read_only:
            with suppress(BackendError):  # the engine records a use only once a minute
                self.engine.backend.touch(key)
        if entry is not None:
            self.engine.counters.hit(key, entry.cost, time.perf_counter() - started, tier)
        else:
            self.engine.counters.add("misses")
            if len(self._missed) >= _MOST_MISSED:
                self._missed.clear()
            self._missed[key] = time.perf_counter()
        return entry

    def _from_elsewhere(self, key: str, damaged: Damaged) -> Entry | None:
        """Return the first valid entry under `key` in a read-only tier or a remote, or None.

        If the address of the tier or remote has the option `keep`, the entry is also stored in the
        user's own cache.
        """
        for count, tier in self._shared.items():
            with suppress(RemoteError, OSError):  # a warning was logged
                for entry, keep in tier.entries(key, damaged):
                    if keep:
                        self.engine.put(key, entry)
                    self.engine.counters.add(count)
                    return entry
        return None

    def put(self, key: str, payload: dict[str, bytes], source_name: str) -> Entry:
        """Return a new entry after storing it in the cache and uploading it to writable remotes.

        A failure to store or upload it is logged, not raised.
        """
        missed = self._missed.pop(key, None)
        seconds = 0.0 if missed is None else time.perf_counter() - missed
        about = _described(payload)
        entry = Entry(payload, {**about, "source_name": source_name, "compile_seconds": seconds})
        if missed is not None:
            self.engine.counters.add("compiles")
            self.engine.counters.add("compile_seconds", seconds)
            self.engine.counters.made(key)
        self._surviving(lambda: self._store(key, entry), None)
        return entry

    def _store(self, key: str, entry: Entry) -> None:
        self.engine.put(key, entry)
        if self._remotes is not None and self._remotes.writable and not self.engine.read_only:
            envelope = encode(key, entry, producer=PRODUCER.encode())
            if self._remotes.put(Upload((key, envelope), None)):
                self.engine.counters.add("remote_puts")

    def settle(
        self, key: str, payload: dict[str, bytes], source_name: str, *, replaces: bool = False
    ) -> Entry:
        """Store an entry unless there is one under `key`; return the entry that is there now.

        Because of this, processes that make the same entry at the same time use the same bytes.
        With `replaces`, an existing entry is replaced. A failure is logged, not raised.
        """
        there = self._surviving(lambda: self.engine.fetch(key, [])[0], None) if self.reads else None
        if there is not None and not replaces:
            return there.value
        return self.put(key, payload, source_name)

    def count_hit(self, key: str, seconds: float) -> None:
        """Count a hit that saved `seconds`, for an entry that did not have to be read."""
        self.engine.counters.hit(key, seconds, 0.0, DISK)

    def touch(self, key: str) -> None:
        """Record a use of the entry under `key`; a failure is logged, not raised."""
        if not self.engine.read_only:
            self._surviving(lambda: self.engine.backend.touch(key), None)

    def delete(self, key: str) -> bool:
        """Delete the entry under `key`; return whether it existed and was deleted."""
        return self._surviving(lambda: self.engine.delete(key), False)

    def all_keys(self) -> list[str]:
        """Return the keys of all entries belonging to this framework."""
        return self._surviving(
            lambda: [at.key for at in self.engine.backend.scan() if at.key.endswith(self._mark)], []
        )

    def close(self) -> None:
        """Close the cache. Idempotent."""
        if self._remotes is not None:
            self._remotes.close()
        self.engine.close()

    def _surviving(self, call: Callable[[], T], otherwise: T) -> T:
        """Return the result of `call`; if it raises an exception, log it and return `otherwise`."""
        try:
            return call()
        except Exception as error:  # no error of the cache may reach the framework
            log.warning_once(
                f"the cache of {self._framework.decode()} failed, continuing without it "
                f"({type(error).__name__}: {error})"
            )
            return otherwise


def _described(payload: Mapping[str, bytes]) -> dict[str, JSON]:
    """Return the metadata from which kcache's commands list an entry as a kernel with its names."""
    cubin = next((code for code in payload.values() if code.startswith(b"\x7fELF")), None)
    ptx = next((code for code in payload.values() if arch_of(code)), None)
    return {
        "kind": KERNEL,
        "functions": [*kernels_of(ptx, cubin)],
        "arch": arch_of(ptx, cubin),
        "created": time.time(),
    }
