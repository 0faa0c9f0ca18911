"""RemoteChecks: check each layer and each remote that the setting `remote` names.

All remotes are asked at the same time. A small entry is stored in each remote that can be written
to.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat

from kcache.config import Config
from kcache.doctor import OK, PROBLEM, WARNING, Finding
from kcache.entry import Entry, encode
from kcache.errors import ConfigError, KcacheError
from kcache.kernels.remotes import remotes_socket
from kcache.kernels.tiers import open_layer
from kcache.remote.address import Address
from kcache.remote.guarded_storage import GuardedStorage, TimeLimit
from kcache.remote.signing import make_sealer
from kcache.remote.storage import RemoteError
from kcache.util.units import format_time

#: The key of a small entry that is stored in each writable remote. It is always the same key,
#: because kcache can't delete an entry of a remote.
_PROBE = hashlib.sha256(b"kcache doctor").hexdigest()
#: How many seconds to wait for a layer, which may be on a network file system.
_LIMIT = 10.0
_KINDS = {"http": "HTTP", "redis": "Redis", "objects": "object store"}


def diagnose(config: Config) -> Iterator[Finding]:
    """Yield a finding for the signing keys, for each layer and for each remote."""
    key_file = config.signing_key_file.value
    if config.remote.value or key_file is not None:
        yield _keys(key_file, writes=any(address.writable for address in config.remotes))
    for address in config.layers:
        yield _layer(address, key_file)
    yield from diagnose_remotes(config)


def diagnose_remotes(config: Config) -> Iterator[Finding]:
    """Yield a finding for each remote, in order. A remote that does not answer is a problem.

    It is also a problem if there is no folder for the socket of the daemon that asks the remotes.
    """
    key_file = config.signing_key_file.value
    if config.remotes:
        with ThreadPoolExecutor(len(config.remotes)) as pool:
            yield from pool.map(_remote, config.remotes, repeat(key_file))
    try:
        remotes_socket(config)
    except OSError as error:
        do = "Set XDG_RUNTIME_DIR to a directory that belongs to you and has a short path."
        yield Finding(PROBLEM, "remote", f"no remote can be asked: {error}", do)


def _keys(file: str | None, *, writes: bool) -> Finding:
    if file is None:
        what = "no signing keys configured: anyone who can write to a remote or layer is trusted"
        return Finding(OK, "signing", what)
    try:
        can_sign = make_sealer(file).can_seal
    except ConfigError as error:
        do = "Correct the file, or KCACHE_SIGNING_KEY_FILE. Until then, no remote is used."
        return Finding(PROBLEM, "signing", str(error), do)
    if writes and not can_sign:
        what = f"{file} has no private key to sign with, so nothing is stored in a remote"
        do = "If this machine is only to read, add ?ro to the addresses. Else use the private key."
        return Finding(WARNING, "signing", what, do)
    does = "sign and verify" if can_sign else "verify"
    return Finding(OK, "signing", f"the keys in {file} {does}")


def _layer(address: Address, key_file: str | None) -> Finding:
    named = address.redacted()
    try:
        TimeLimit().call(_LIMIT, lambda: open_layer(address, key_file).close())
    except (KcacheError, OSError) as error:
        reason = str(error) if isinstance(error, KcacheError) else error.strerror or str(error)
        do = "Correct this, or the address in KCACHE_REMOTE. Programs work without the layer."
        return Finding(PROBLEM, "layer", f"{named}: the layer is not used: {reason}", do)
    kind = "a bundle" if os.path.isfile(address.path) else "the directory of a cache"
    kept = ", hits are also stored in the cache" if address.keep else ""
    return Finding(OK, "layer", f"{named}: accepted, {kind}{kept}")


def _remote(address: Address, key_file: str | None) -> Finding:
    named = f"{address.redacted()} ({_KINDS[address.kind]})"
    remote = GuardedStorage(address, partial(make_sealer, key_file))
    started = time.monotonic()
    try:
        remote.get(_PROBE)
        seconds = format_time(time.monotonic() - started)
        writes = address.writable and make_sealer(key_file).can_seal
        if writes:
            remote.put(_PROBE, encode(_PROBE, Entry({}, {"kind": "probe"})))
    except RemoteError as error:
        do = "Programs work without the remote."
        if not isinstance(error.__cause__, ConfigError):  # else a package or a setting is missing
            do += " Correct the address, its credentials or the server."
        return Finding(PROBLEM, "remote", f"{named}: can't be used: {error}", do)
    finally:
        remote.close()
    if remote.writing.reason:
        what = f"{named}: answers, but stores nothing: {remote.writing.reason}"
        do = "Programs only read from it. Correct the server or the user's rights, or write ?ro in"
        return Finding(PROBLEM, "remote", what, f"{do} the address.")
    does = "read and written" if writes else "only read"
    signed = "not signed" if key_file is None else "signed"
    return Finding(OK, "remote", f"{named}: answers in {seconds}, {does}, {signed}")
