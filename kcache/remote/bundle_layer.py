"""BundleLayer: a bundle as a layer, read without unpacking it."""

from __future__ import annotations

from kcache.bundle.reader import Bundle
from kcache.errors import BundleError

__all__ = ["BundleLayer"]


class BundleLayer:
    """The kernels of a bundle, which is not unpacked.

    Threads, fork: as `Bundle`. If the bundle is replaced, the next process reads the new one.

    Args:
        path: path of the bundle.
        keep: see `Layer`.
        key_file: file of keys; one of them must have signed each entry. None accepts all.

    Raises:
        BundleError: it is no bundle, or not signed although there are keys.
        ConfigError: the file of keys can't be used.
        OSError: it can't be read.
    """

    def __init__(self, path: str, *, keep: bool = False, key_file: str | None = None) -> None:
        self.path = path
        self.keep = keep
        self._bundle = bundle = Bundle(path)
        self._unseal = None
        if bundle.sealed:
            from kcache.remote.seal import make_sealer

            self._unseal = make_sealer(key_file).unseal
        elif key_file is not None:
            bundle.close()
            raise BundleError(f"{path}: it is not signed, and a signing key is set")

    def get(self, key: str) -> bytes | None:
        """Return the envelope stored under `key`, or None.

        Raises:
            BundleError: the entry is not signed with one of the keys, or the file is damaged.
            OSError: it can't be read.
        """
        value = self._bundle.get(key)
        if value is None or self._unseal is None:
            return value
        from kcache.remote.seal import SealError

        try:
            return self._unseal(key, value)
        except SealError as error:
            raise BundleError(f"{self.path}: entry {key}: {error}") from error

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._bundle.close()

    def __repr__(self) -> str:
        """Return the layer with its path."""
        return f"BundleLayer({self.path!r})"
