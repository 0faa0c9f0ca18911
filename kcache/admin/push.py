"""Push: sends the kernels of a cache to its remotes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kcache.admin.bundles import chosen
from kcache.backend import NoBackend
from kcache.entry import encode
from kcache.errors import BackendError, ConfigError
from kcache.nvrtc import PRODUCER
from kcache.nvrtc.entries import MANIFEST, Item
from kcache.remote.daemon_protocol import Counts
from kcache.remote.guarded_storage import GuardedStorage
from kcache.remote.signing import make_sealer

if TYPE_CHECKING:
    from kcache.admin.bundles import HasEngine
    from kcache.admin.filters import Filters
    from kcache.remote.address import Address


class Pushed(NamedTuple):
    """The result of a push to one remote.

    Attributes:
        address: of the remote, without credentials.
        kernels, manifests: how many are stored there now.
        failed: how many are not.
        reason: why, if anything failed.
        left_out: how many are damaged, unreadable or of another version, and were not sent.
    """

    address: str
    kernels: int
    manifests: int
    failed: int
    reason: str
    left_out: int


def push(cache: HasEngine, filters: Filters) -> list[Pushed]:
    """Store the kernels of a cache, and the manifests that lead to them, in each writable remote.

    It does not count as a use of an entry. What a remote has under the same key is replaced by
    equal kernels; its manifests keep their dependency sets. A failure is counted, and the rest is
    still tried.

    Args:
        cache: a `KernelCache`.
        filters: which kernels.

    Raises:
        ConfigError: no remote can be written to, or the key file can't be used to sign.
        BackendError: the entries can't be listed.
    """
    addresses, key_file = cache.config.remote.value, cache.config.signing_key_file.value
    writable = [each for each in addresses if each.kind != "layer" and each.writable]
    if not writable:
        raise ConfigError("KCACHE_REMOTE has no address that can be written to")
    if not make_sealer(key_file).can_seal:
        raise ConfigError(f"{key_file} has no key that can sign")
    if isinstance(cache.engine.backend, NoBackend):
        raise BackendError(f"nothing can be pushed: {cache.engine.backend.reason}")
    return [_push_to(address, key_file, cache, filters) for address in writable]


def _push_to(address: Address, key_file: str | None, cache: HasEngine, filters: Filters) -> Pushed:
    remote = GuardedStorage(address, lambda: make_sealer(key_file), Counts())
    left_out: list[Item] = []
    kernels = sent_manifests = failed = 0
    try:
        # The kernels come first: a manifest must not promise a kernel that is not there.
        for manifests in (False, True):
            for item, entry in chosen(cache.engine.backend, filters, left_out):
                if (item.kind == MANIFEST) is manifests:
                    envelope = encode(item.key, entry, producer=PRODUCER.encode())
                    stored = (remote.merge if manifests else remote.put)(item.key, envelope)
                    failed += not stored
                    kernels += stored and not manifests
                    sent_manifests += stored and manifests
    finally:
        remote.close()
    reason = remote.trouble if failed else ""
    return Pushed(address.redacted(), kernels, sent_manifests, failed, reason, len(set(left_out)))
