"""ProgramCache: kcache as the cache of cuda.core's `Program`; and `compile`, which also caches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.integrations.engine_entries import EngineEntries
from kcache.kernel_cache import compile as compile_cached

try:
    from cuda.core import ObjectCode, ProgramOptions
    from cuda.core.utils import ProgramCacheResource
except ImportError as error:
    raise ImportError(
        f"this cuda.core has no interface for program caches ({error}); expected cuda-core 1.2 or "
        "later. cuda.core's own caches work as before, and so does `kcache run` with cuda.core"
    ) from error

_TARGETS = ("cubin", "ptx", "ltoir")


class ProgramCache(ProgramCacheResource):  # type: ignore[misc]
    """Cache for `Program.compile(cache=)`, checked, capped, shared and counted like `KernelCache`.

    If the cache fails, `get` and item assignment log the failure and raise no error, because the
    error would reach the caller of `Program.compile`. For wrong arguments, all methods raise the
    same errors as cuda.core's own caches.

    Threads: may be called from several threads at the same time. Processes: any number may share a
    directory. Crash: a process may be killed at any instant without damaging the cache.

    Args:
        path: the directory of the cache; by default that of the user's cache, which also contains
            the kernels of `KernelCache`.
        max_size_bytes: the cap in bytes; by default the setting `max_size`, which is 1 GiB unless
            it was changed.

    Raises:
        ConfigError: `max_size_bytes` is not positive, or `path` is unsafe.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, max_size_bytes: int | None = None
    ) -> None:
        if max_size_bytes is not None and max_size_bytes <= 0:
            raise ConfigError(f"max_size_bytes: expected more than 0, got {max_size_bytes}")
        self._entries = EngineEntries("cuda-core/1", directory=path, max_size=max_size_bytes)

    def __getitem__(self, key: bytes | str) -> bytes:
        found: bytes | None = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: bytes | str, default: Any = None) -> Any:  # noqa: ANN401  as the base
        """Return the code that is stored under `key`, or `default` if there is none."""
        entry = self._entries.get(self._key(key))
        return default if entry is None else next(iter(entry.payload.values()), default)

    def __setitem__(self, key: bytes | str, value: object) -> None:
        kind, name = "code", ""
        if isinstance(value, ObjectCode):
            kind, name = value.code_type, value.name
        self._entries.put(self._key(key), {kind: _code(value)}, name)

    def __delitem__(self, key: bytes | str) -> None:
        if not self._entries.delete(self._key(key)):
            raise KeyError(key)

    def __len__(self) -> int:
        return len(self._entries.all_keys())

    def clear(self) -> None:
        """Delete all programs of cuda.core; other entries in the same directory are kept."""
        for key in self._entries.all_keys():
            self._entries.delete(key)

    def close(self) -> None:
        """Close the cache. Idempotent."""
        self._entries.close()

    def _key(self, key: object) -> str:
        name = key.encode() if isinstance(key, str) else key
        if not isinstance(name, (bytes, bytearray)):
            raise ArgumentTypeError(f"cache keys must be bytes or str, not {type(key).__name__}")
        return self._entries.key_of(bytes(name))


def _code(value: object) -> bytes:
    """Return the code in `value`, which is bytes-like or an `ObjectCode`.

    If the code of an `ObjectCode` is a path, return the content of the file.
    """
    code = value.code if isinstance(value, ObjectCode) else value
    if isinstance(code, str) and isinstance(value, ObjectCode):
        try:
            with open(code, "rb") as file:
                return file.read()
        except FileNotFoundError:
            what = f"a path-backed ObjectCode can't be cached: {code} no longer exists"
            raise FileNotFoundError(what) from None
    if not isinstance(code, (bytes, bytearray, memoryview)):
        kind = type(value).__name__
        raise ArgumentTypeError(f"cache values must be bytes-like or ObjectCode, not {kind}")
    return bytes(code)


def compile(
    source: str,
    options: ProgramOptions | None = None,
    name_expressions: Sequence[str | bytes] = (),
    *,
    target_type: str = "cubin",
) -> ObjectCode:
    """Return what `Program(source, "c++", options).compile(target_type)` returns, from the cache.

    Unlike `Program.compile(cache=)`, this function accepts name expressions and include paths, and
    checks the headers at each call. It uses the same cache as `kcache.compile`.

    Args:
        source: CUDA C++ source text. It is passed as text because a `Program` does not expose its
            source.
        options: the options of cuda.core; None for its defaults.
        name_expressions: the name expressions of kernels that `ObjectCode.get_kernel` will be
            called with.
        target_type: `"cubin"`, `"ptx"` or `"ltoir"`.

    Raises:
        ConfigError: `target_type` is none of these, or the options produce no code of this type.
        CompileError: the compiler rejected the source.
    """
    if not isinstance(source, str):
        raise ArgumentTypeError(f"source: expected source text (str), got {type(source).__name__}")
    if target_type not in _TARGETS:
        allowed = ", ".join(_TARGETS)
        raise ConfigError(f"target_type: expected one of {allowed}, got {target_type!r}")
    options = ProgramOptions() if options is None else options
    flags = [flag.decode() for flag in options.as_bytes("nvrtc", target_type)]
    texts = [each.decode() if isinstance(each, bytes) else each for each in name_expressions]
    name = options.name or "default_program"
    kernel = compile_cached(source, texts, source_name=name, extra_options=tuple(flags))
    pairs = zip(name_expressions, texts, strict=True)
    mapping = {given: kernel.lowered_names[text].encode() for given, text in pairs}
    code: bytes | None = getattr(kernel, target_type)
    if code is None:
        raise ConfigError(f"target_type: the options produce no {target_type}")
    return getattr(ObjectCode, f"from_{target_type}")(code, name=name, symbol_mapping=mapping)
