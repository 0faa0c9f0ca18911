"""Diagnosis of tiers: checks each layer and each remote that the setting `remote` names.

Every remote is asked once for a key that nobody has, all at the same time, and nobody waits longer
than `LIMIT` for any of them. Nothing is stored there or here.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kcache.admin.doctor import OK, PROBLEM, WARNING, Finding
from kcache.errors import ConfigError, KcacheError
from kcache.kernels.tiers import agent_problem, open_layer, remote_status
from kcache.remote.seal import make_sealer
from kcache.remote.store import RemoteRefused, open_store
from kcache.util.units import format_time

if TYPE_CHECKING:
    from kcache.config import Config
    from kcache.remote.address import Address

__all__ = ["LIMIT", "diagnose"]

#: How many seconds all answers together may take. The time-outs of an address are shorter, unless
#: the address sets others. If an answer hangs in spite of them (a name server, a network file
#: system), it is left out.
LIMIT = 10.0
_KINDS = {"layer": "layer", "http": "HTTP", "redis": "Redis", "objects": "object store"}


class _Signing(NamedTuple):
    """Which kernels of other machines are accepted.

    Attributes:
        file: of the keys; None without signatures.
        problem: why the keys can't be used, or empty.
        can_sign: whether one of them signs.
    """

    file: str | None
    problem: str = ""
    can_sign: bool = True


class _Look(NamedTuple):
    """The result of checking one tier: what it is, or why it can't be used."""

    what: str
    error: Exception | None
    seconds: float


def diagnose(config: Config, *, limit: float = LIMIT) -> Iterator[Finding]:
    """Yield a finding for each layer and remote, in their order, and one for the signing keys."""
    addresses = config.remote.value
    signing = _signing(config.signing_key_file.value)
    if addresses or signing.file is not None:
        yield _keys(signing, writes=any(address.writable for address in addresses))
    if not addresses:
        return
    looks = _look_at(addresses, signing, limit)
    left_alone = {str(told["address"]): told for told in remote_status(config)}
    for address, look in zip(addresses, looks, strict=True):
        if address.kind == "layer":
            yield _layer(address, look)
        else:
            yield _remote(address, look, signing, left_alone.get(address.redacted(), {}))
    problem = agent_problem(config)
    if problem:
        do = "Set XDG_RUNTIME_DIR to a directory of your own, with a short path."
        yield Finding(PROBLEM, "remote", f"no remote can be asked: {problem}", do)


def _signing(path: str | None) -> _Signing:
    try:
        return _Signing(path, can_sign=make_sealer(path).can_seal)
    except ConfigError as error:
        return _Signing(path, str(error), False)


def _keys(signing: _Signing, *, writes: bool) -> Finding:
    signs = signing.file is not None and signing.can_sign
    about: dict[str, object] = {"file": signing.file, "signs": signs}
    if signing.file is None:
        what = "there are no keys: who can write to a remote or a layer is trusted"
        return Finding(OK, "signing", what, "", about)
    if signing.problem:
        do = "Correct the file, or KCACHE_SIGNING_KEY_FILE. Until then no remote is used."
        return Finding(PROBLEM, "signing", signing.problem, do, about)
    if writes and not signing.can_sign:
        what = f"{signing.file} has no key that signs: nothing is stored in a remote"
        do = "Add ?ro to the addresses if this machine only reads; else use the private key."
        return Finding(WARNING, "signing", what, do, about)
    does = "sign and verify" if signing.can_sign else "verify"
    return Finding(OK, "signing", f"the keys of {signing.file} {does}", "", about)


# -- looking, with a limit -------------------------------------------------------------------------


def _look_at(addresses: Sequence[Address], signing: _Signing, limit: float) -> list[_Look]:
    """Check all of them at the same time."""
    late = _Look("", TimeoutError(f"no answer within {limit:g} s"), limit)
    looks = [late] * len(addresses)

    def look(index: int) -> None:
        address = addresses[index]
        see = _see_layer if address.kind == "layer" else _see_remote
        looks[index] = _looked(lambda: see(address, signing.file))

    # Daemons: a call that hangs in the operating system must not keep the command from ending.
    threads = [
        threading.Thread(target=look, args=(index,), daemon=True) for index in range(len(addresses))
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(looks)


def _looked(see: Callable[[], str]) -> _Look:
    started = time.monotonic()
    try:
        what, error = see(), None
    except Exception as failure:  # another package's client may raise anything
        what, error = "", failure
    return _Look(what, error, time.monotonic() - started)


def _see_layer(address: Address, key_file: str | None) -> str:
    open_layer(address, key_file).close()
    return "a bundle" if os.path.isfile(address.path) else "the directory of a cache"


def _see_remote(address: Address, _: str | None) -> str:
    store = open_store(address)
    try:
        store.get(secrets.token_hex(32), address.max_entry)
    finally:
        store.close()
    return _KINDS[address.kind]


# -- telling ---------------------------------------------------------------------------------------


def _layer(address: Address, look: _Look) -> Finding:
    named = address.redacted()
    about: dict[str, object] = {
        "address": named,
        "kind": "layer",
        "accepted": look.error is None,
        "reason": _reason(look),
    }
    if look.error is None:
        kept = ", hits are kept here" if address.keep else ""
        return Finding(OK, "layer", f"{named}: accepted, {look.what}{kept}", "", about)
    what = f"{named}: refused: {_reason(look)}"
    do = "Correct that, or the address in KCACHE_REMOTE. Until then programs do without it."
    return Finding(PROBLEM, "layer", what, do, about)


def _remote(address: Address, look: _Look, signing: _Signing, told: dict[str, object]) -> Finding:
    named, kind = address.redacted(), _KINDS[address.kind]
    refused = isinstance(look.error, (RemoteRefused, ConfigError)) or bool(signing.problem)
    about: dict[str, object] = {
        "address": named,
        "kind": kind,
        "reachable": look.error is None,
        "refused": refused,
        "writable": address.writable,
        "signed": signing.file is not None,
        "reason": _reason(look) or signing.problem,
    }
    shown = f"{named} ({kind})"
    if isinstance(look.error, ConfigError):
        do = "Correct that. Programs use the remote a second later."
        return Finding(PROBLEM, "remote", f"{shown}: refused: {_reason(look)}", do, about)
    if isinstance(look.error, RemoteRefused):
        do = "Correct the credentials: in the address, their file, or the environment."
        return Finding(PROBLEM, "remote", f"{shown}: refused: {_reason(look)}", do, about)
    if look.error is not None:
        what = f"{shown}: not reachable: {_reason(look)}"
        do = "kcache works without it. See whether the server runs, and is reached from here."
        return Finding(WARNING, "remote", what, do, about)
    if signing.problem:
        what = f"{shown}: refused, since the signing keys can't be used"
        return Finding(PROBLEM, "remote", what, "Correct KCACHE_SIGNING_KEY_FILE.", about)
    if told.get("breaker") == "open":
        what = f"{shown}: answers now, and is left alone since: {told.get('reason')}"
        return Finding(WARNING, "remote", what, "The agent asks it again by itself.", about)
    does = "read and written" if address.writable and signing.can_sign else "only read"
    what = f"{shown}: answers in {format_time(look.seconds)}, {does}"
    what += ", not signed" if signing.file is None else ", signed"
    return Finding(OK, "remote", what, "", about)


def _reason(look: _Look) -> str:
    """Return why a tier can't be used, in one line; empty if it can."""
    error = look.error
    if error is None:
        return ""
    if isinstance(error, OSError) and not isinstance(error, KcacheError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
