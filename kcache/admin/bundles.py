"""Bundles: makes a bundle from a cache, lists one, and verifies one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from kcache.admin.bundle_contents import pairs
from kcache.admin.filters import Filters, parse_filters
from kcache.backend import EntryInfo, NoBackend
from kcache.bundle.files import Source, opened, replacing
from kcache.bundle.format import PLAIN, SEALED
from kcache.bundle.reader import Bundle
from kcache.bundle.writer import BundleWriter
from kcache.config import Config
from kcache.errors import BackendError, BundleError, ConfigError
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.inventory import DAMAGED, MANIFEST, Item, Opened, look_at
from kcache.util import log

if TYPE_CHECKING:
    from kcache.engine.engine import CacheEngine
    from kcache.remote.seal import Sealer

__all__ = [
    "BundleContents",
    "Exported",
    "HasEngine",
    "contents",
    "export_bundle",
    "list_bundle",
    "sealer_of",
    "verified",
    "verify_bundle",
]


class HasEngine(Protocol):
    """A cache: `KernelCache` is one."""

    engine: CacheEngine
    config: Config


class Exported(NamedTuple):
    """The result of an export.

    Attributes:
        kernels, manifests: their numbers; kernels are all entries that are no manifests.
        size: bytes of the file.
        left_out: damaged, unreadable and too large entries, and those of other versions of kcache.
    """

    kernels: int
    manifests: int
    size: int
    left_out: tuple[Item, ...]


class BundleContents(NamedTuple):
    """The contents of a bundle, after a check of the whole file.

    Attributes:
        kernels, manifests: their numbers.
        other_version: number of entries that another version of kcache made, and reads.
        size: bytes of the file.
        sealed: whether every value is signed, or at least sealed.
    """

    kernels: int
    manifests: int
    other_version: int
    size: int
    sealed: bool


# -- export ----------------------------------------------------------------------------------------


def export_bundle(
    cache: HasEngine,
    target: Source,
    *,
    names: Iterable[str] = (),
    archs: Iterable[str] = (),
    used_within: float | str | None = None,
    older_than: float | str | None = None,
    reproducible: bool = False,
) -> Exported:
    """Write the kernels of a cache, and the manifests that lead to them, into one file.

    Equal entries make equal files, on every machine, with every backend and order of use. The file
    gets its name when it is complete. It replaces an existing bundle, but no other file. An export
    is not a use of an entry. With `KCACHE_SIGNING_KEY_FILE`, it signs each entry.

    Args:
        cache: a `KernelCache`.
        target: path of the bundle, or a binary file that is open for writing.
        names: only kernels whose source name or name expression contains one of these texts, or
            matches it as a pattern with `*` and `?`.
        archs: only kernels for one of these targets, such as `"sm_90"`.
        used_within: only kernels that were used in that many last seconds, or `"30d"`.
        older_than: only kernels that nobody has used for that long, likewise.
        reproducible: leave out when each kernel was compiled, and how long that took. Then equal
            kernels make equal files, even if they were compiled on different days. Hits on such
            kernels add nothing to the time saved.

    Raises:
        ConfigError: an age is none, or the key file can't be used to sign.
        BundleError: there is another file at the path, or there are too many entries.
        BackendError: the entries can't be listed.
        OSError: the file can't be written.
    """
    filters = parse_filters(names, archs, used_within, older_than)
    sealer = sealer_of(cache.config)
    if sealer is not None and not sealer.can_seal:
        raise ConfigError(f"{cache.config.signing_key_file.value} has no key that can sign")
    if isinstance(cache.engine.backend, NoBackend):
        raise BackendError(f"nothing can be exported: {cache.engine.backend.reason}")
    if not isinstance(target, (str, os.PathLike)):
        return _write(cache.engine, target, filters, reproducible=reproducible, sealer=sealer)
    with replacing(os.path.realpath(target)) as file:
        return _write(cache.engine, file, filters, reproducible=reproducible, sealer=sealer)


def _write(
    engine: CacheEngine,
    file: BinaryIO,
    filters: Filters,
    *,
    reproducible: bool,
    sealer: Sealer | None,
) -> Exported:
    writer = BundleWriter(file, PLAIN if sealer is None else SEALED)
    left_out: list[Item] = []
    manifests = 0
    for key, envelope, kind in pairs(
        engine.backend, PRODUCER, filters, reproducible=reproducible, problem=left_out.append
    ):
        writer.add(key, envelope if sealer is None else sealer.seal(key, envelope))
        manifests += kind == MANIFEST
    size = writer.finish()
    return Exported(writer.entries - manifests, manifests, size, tuple(left_out))


# -- list and verify ---------------------------------------------------------------------------


def list_bundle(source: Source) -> Iterator[Item]:
    """Yield a description of each entry of a bundle, by ascending key, checked when yielded.

    Signatures are checked if `KCACHE_SIGNING_KEY_FILE` names a file of keys. An entry of another
    version of kcache has the kind `"other"` and a `problem`.

    Raises:
        BundleError: it is no bundle, or a damaged one.
        OSError: it can't be read.
    """
    with opened(source) as bundle:
        bundle.check_index()
        for each in contents(bundle, sealer_of(Config.load(complain=log.warning_once))):
            yield each.item


def verify_bundle(source: Source) -> BundleContents:
    """Read and check all of a bundle, with the memory of its largest entry.

    Signatures are checked if `KCACHE_SIGNING_KEY_FILE` names a file of keys.

    Args:
        source: path, or an open binary file; one that can't seek is copied to a temporary file.

    Raises:
        BundleError: it is no bundle, a damaged one, or not signed with one of the keys.
        ConfigError: the file of keys can't be used.
        OSError: it can't be read.
    """
    with opened(source) as bundle:
        return verified(bundle, sealer_of(Config.load(complain=log.warning_once)), lambda _: None)


def sealer_of(config: Config) -> Sealer | None:
    """Return the sealer, or None if no key is configured.

    Raises:
        ConfigError: the file of keys can't be used.
    """
    path = config.signing_key_file.value
    if path is None:
        return None
    from kcache.remote.seal import make_sealer

    return make_sealer(path)


def verified(
    bundle: Bundle, sealer: Sealer | None, each: Callable[[Opened], object]
) -> BundleContents:
    """Check all of an open bundle, and hand each entry to `each`.

    Raises:
        BundleError, OSError: as `verify_bundle`.
    """
    bundle.check_index()
    kernels = manifests = other = 0
    for found in contents(bundle, sealer):
        each(found)
        kernels += found.entry is not None and found.item.kind != MANIFEST
        manifests += found.item.kind == MANIFEST
        other += found.entry is None
    return BundleContents(kernels, manifests, other, bundle.size, bundle.sealed)


def contents(bundle: Bundle, sealer: Sealer | None) -> Iterator[Opened]:
    """Yield a description of each entry, fully checked.

    Raises:
        BundleError: one is damaged, or not signed as required.
    """
    unseal = unsealing(bundle, sealer)
    for record in bundle.records():
        envelope = unseal(record.key, bundle.read(record))
        found = look_at(envelope, EntryInfo(record.key, record.size, 0), PRODUCER)
        if found.item.kind == DAMAGED:
            raise BundleError(f"{bundle.name}: entry {record.key}: {found.item.problem}")
        yield found


def unsealing(bundle: Bundle, sealer: Sealer | None) -> Callable[[str, bytes], bytes]:
    """Return the function that makes an envelope of a bundle's value.

    Raises:
        BundleError: the bundle is not signed, but must be.
    """
    if not bundle.sealed:
        if sealer is not None:
            raise BundleError(f"{bundle.name}: it is not signed, and a signing key is set")
        return lambda key, value: value
    from kcache.remote.seal import PlainSealer, SealError

    open_seal = (PlainSealer() if sealer is None else sealer).unseal

    def unseal(key: str, value: bytes) -> bytes:
        try:
            return open_seal(key, value)
        except SealError as error:
            raise BundleError(f"{bundle.name}: entry {key}: {error}") from error

    return unseal
