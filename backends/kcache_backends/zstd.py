"""ZstdBackend: a wrapper that keeps values compressed in any other backend.

A stored value is four bytes, ``KCZ`` and a letter, and then

``r``  the value as it is, if compression would not make it smaller, or if the value is larger than
       `MAX_SIZE` or the cap, or would exceed `MAX_RATIO`;
``z``  one Zstandard frame (RFC 8878) that states the size of its content.
"""

from __future__ import annotations

import os
import threading

import zstandard

from kcache.backend import Backend, WrappingBackend
from kcache.errors import BackendError, ConfigError, CorruptEntryError
from kcache.util.forks import importing

#: The levels of the Zstandard library, from the fastest to the one with the smallest results.
LEVELS = range(-7, 23)
DEFAULT_LEVEL = 3
#: A value with more bytes than this is neither compressed nor decompressed, because a damaged frame
#: may claim any size, which is then allocated. The largest known CUBINs have some hundred MB.
MAX_SIZE = 1 << 30
#: The content of a frame has at most this many times the frame's length, or at most `SMALL` bytes.
#: A value that compresses better is stored uncompressed. Without this limit, a malicious frame of
#: 32 KB could become 1 GiB. CUBINs are compressed to between 1/4 and 1/30 of their size.
MAX_RATIO = 256
SMALL = 1 << 20

_RAW, _FRAME = b"KCZr", b"KCZz"
_PREFIX = len(_RAW)


class ZstdBackend(WrappingBackend):
    """Compresses values, and stores them in another backend.

    Sizes, recency and eviction are those of the inner backend, so the cap limits the compressed
    bytes. The guarantees for threads, processes, crashes and forks are those of the inner backend.

    Args:
        inner: the other backend; closed with this one.
        level: the level of compression, -7 (fast) to 22 (small). Entries of every level can be
            read.
        max_size: the cap in bytes, which the engine enforces. A frame that claims a larger content
            is treated as damaged.

    Raises:
        ConfigError: the level is out of range.
    """

    def __init__(
        self, inner: Backend, *, level: int = DEFAULT_LEVEL, max_size: int | None = None
    ) -> None:
        if not isinstance(level, int) or isinstance(level, bool) or level not in LEVELS:  # pyright: ignore
            raise ConfigError(f"level: expected {LEVELS[0]} to {LEVELS[-1]}, got {level!r}")
        self._largest = MAX_SIZE if max_size is None else min(max_size, MAX_SIZE)
        super().__init__(inner)
        self.level = level
        self.overhead += _PREFIX
        #: Each thread has its own contexts of the Zstandard library, which it must not share.
        self._local = threading.local()

    def get(self, key: str) -> bytes | None:
        """Return the value under `key`, or None.

        Raises:
            CorruptEntryError: the stored bytes are not what `put` writes.
        """
        stored = self.inner.get(key)
        return None if stored is None else self._decompress(stored)

    def use(self, key: str) -> bytes | None:
        """Return what `get` returns, and record the use."""
        stored = self.inner.use(key)
        return None if stored is None else self._decompress(stored)

    def put(self, key: str, value: bytes) -> int:
        """Compress `value` and store it under `key`; return its stored size."""
        return self.inner.put(key, self._compress(value))

    # -- inside --------------------------------------------------------------------------------

    def _compress(self, value: bytes) -> bytes:
        if len(value) <= self._largest:
            compressor = getattr(self._local, "compressor", None)
            if compressor is None:
                # The engine's envelope has a checksum of its own.
                compressor = zstandard.ZstdCompressor(level=self.level, write_checksum=False)
                self._local.compressor = compressor
            try:
                frame: bytes = compressor.compress(value)
            except zstandard.ZstdError as error:
                raise BackendError(f"can't compress {len(value)} bytes: {error}") from error
            if len(frame) < len(value) <= max(SMALL, MAX_RATIO * len(frame)):
                return _FRAME + frame
        return _RAW + value

    def _decompress(self, stored: bytes) -> bytes:
        kind = stored[:_PREFIX]
        if kind == _RAW:
            return stored[_PREFIX:]
        if kind != _FRAME:
            raise CorruptEntryError("the stored value does not begin with KCZr or KCZz")
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        try:
            frame = memoryview(stored)[_PREFIX:]
            size = zstandard.frame_content_size(frame)
            most = min(self._largest, max(SMALL, MAX_RATIO * len(frame)))
            if not 0 < size <= most:
                raise CorruptEntryError(f"frame: expected 1 to {most} bytes of content, got {size}")
            value: bytes = decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptEntryError(f"the compressed frame is damaged: {error}") from error
        return value


def zstd_file(
    directory: str | os.PathLike[str],
    *,
    max_size: int | None = None,
    read_only: bool = False,
    level: int = DEFAULT_LEVEL,
) -> ZstdBackend:
    """Return the backend called `zstd`: compressed values in files."""
    with importing:
        from kcache_backends.file import FileBackend  # noqa: PLC0415  only this backend

    inner = FileBackend(directory, max_size=max_size, read_only=read_only)
    return ZstdBackend(inner, level=level, max_size=max_size)


def zstd_lmdb(
    directory: str | os.PathLike[str],
    *,
    max_size: int = 1 << 30,
    read_only: bool = False,
    level: int = DEFAULT_LEVEL,
) -> ZstdBackend:
    """Return the backend called `zstd+lmdb`: compressed values in an LMDB database.

    Raises:
        ConfigError, BackendError: in the same cases as for `LmdbBackend` and `ZstdBackend`.
    """
    with importing:
        from kcache_backends.lmdb import LmdbBackend  # noqa: PLC0415  only this backend

    inner = LmdbBackend(directory, max_size=max_size, read_only=read_only)
    return ZstdBackend(inner, level=level, max_size=max_size)
