"""Address: where a read-only tier or a remote is, and how it is used (`KCACHE_REMOTE`, `remote=`).

The query of an address holds options. Every address may have some of them (see `Address`); others
belong to one protocol. A user's name and password may stand before the host, and are never shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from kcache.errors import ConfigError
from kcache.util.units import parse_flag, parse_seconds, parse_size

#: Scheme -> kind: a layer (a read-only tier in a file or directory), or a protocol of remotes.
KINDS: Mapping[str, str] = {
    "file": "layer",
    **dict.fromkeys(("http", "https"), "http"),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), "redis"),
    **dict.fromkeys(("redis+cluster", "rediss+cluster"), "redis"),
    **dict.fromkeys(("s3", "gs", "az"), "objects"),
}
#: Kind -> its options beyond the common ones. None contains a secret, because addresses are shown
#: with them. Paths of files are absolute, so that no credentials come from the working directory.
OPTIONS: Mapping[str, frozenset[str]] = {
    "layer": frozenset(("backend",)),
    "http": frozenset(("token_file", "ca_file", "cert_file", "key_file", "layout")),
    "redis": frozenset(
        ("ca_file", "cert_file", "key_file", "password_file", "expire", "leases", "lease_seconds")
    ),
    "objects": frozenset(("endpoint", "region", "anonymous", "virtual_hosted", "ca_file")),
}
#: Options that every address may have.
COMMON = frozenset(("ro", "rw", "keep", "connect_timeout", "timeout", "slow", "max_entry"))
#: Default seconds to connect to a remote, and to wait for an answer. A hit that takes longer than a
#: second saves little time against most compiles.
CONNECT_TIMEOUT = 0.5
TIMEOUT = 2.0
#: A miss that took more seconds than this counts as a failure, because each kernel that is compiled
#: would wait as long for nothing. Small kernels compile in less time.
SLOW = 0.25
#: Bytes per second: an upload may take its size divided by this, in addition to the time-outs. No
#: program waits for an upload.
_UPLOAD_SPEED = 1e6
#: The longest wait for a remote, or for the lease of a machine that is gone.
_MOST_SECONDS = 3600.0
#: A lease ends this many seconds after its last renewal. This happens only if a machine or a
#: daemon is gone, because a daemon releases the leases of a program that ends. A loaded machine
#: may pause for a while.
LEASE_SECONDS = 30.0
#: Larger than nearly every kernel (bench: CUTLASS's largest have 10 MB).
MAX_ENTRY = 64 << 20
_MOST_TEXT = 4096
#: Separates two addresses. A comma inside an address (the nodes of a cluster) does not match.
_BETWEEN = re.compile(r"\s*,\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)|\s+")
#: A host, with or without a port.
_HOST = re.compile(r"(?:[^:\[\]]+|\[[0-9A-Fa-f:.]+\])(?::([1-9][0-9]{0,4}))?")
_ALLOWED = (
    "file:///path, http(s)://host/path, redis(s)://host, redis+cluster://host, valkey://host, "
    "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, with options such as ?ro"
)


class Address(NamedTuple):
    """One layer or remote.

    Attributes:
        kind: `"layer"`, `"http"`, `"redis"` or `"objects"`.
        scheme: in lower case.
        location: the part between `://` and the query, without credentials, as it was given.
        user, password: None if the address has none.
        writable: whether kernels that are compiled here are stored there.
        keep: whether a hit there is stored in the local cache.
        connect_timeout, timeout: seconds, to connect and for one answer.
        slow: seconds; a remote whose misses take longer is not asked for a while.
        max_entry: the largest value in bytes that is read or written.
        options: the options of the protocol, sorted.
    """

    kind: str
    scheme: str
    location: str
    user: str | None
    password: str | None
    writable: bool
    keep: bool
    connect_timeout: float
    timeout: float
    slow: float
    max_entry: int
    options: tuple[tuple[str, str], ...]

    @property
    def hosts(self) -> str:
        """Host and port, or a bucket; a cluster has several hosts with commas between them."""
        return self.location.partition("/")[0]

    @property
    def path(self) -> str:
        """The decoded path after the host, without slashes at its ends; for a layer, absolute."""
        path = unquote(self.location.partition("/")[2])
        return "/" + path if self.kind == "layer" else path.strip("/")

    def option(self, name: str, default: str = "") -> str:
        """Return an option of the protocol."""
        return dict(self.options).get(name, default)

    def flag(self, name: str) -> bool:
        """Return whether an option of the protocol is switched on."""
        return _flag(dict(self.options), name, "0", self.redacted())

    def seconds(self, size: int = 0) -> float:
        """Return the seconds in which an operation has to connect, send `size` bytes and end."""
        return self.connect_timeout + self.timeout + size / _UPLOAD_SPEED

    @property
    def leases(self) -> bool:
        """Whether programs compile under leases of this remote (see `remote.storage.Leases`)."""
        return self.kind == "redis" and self.flag("leases")

    @property
    def lease_seconds(self) -> float:
        """The seconds after which a lease that is not renewed ends by itself."""
        return float(self.option("lease_seconds") or LEASE_SECONDS)

    def redacted(self) -> str:
        """Return the address without credentials, for messages; options only name their files."""
        userinfo = "***@" if self.user or self.password else ""
        shown = [] if self.writable or self.kind == "layer" else ["ro"]
        shown += [f"{name}={quote(value, safe='/:,')}" for name, value in self.options]
        query = f"?{'&'.join(shown)}" if shown else ""
        return f"{self.scheme}://{userinfo}{self.location}{query}"

    def __repr__(self) -> str:
        """Return the address without credentials."""
        return f"Address({self.redacted()!r})"

    def __str__(self) -> str:
        """Return the address without credentials."""
        return self.redacted()


def parse_addresses(value: object, *, name: str) -> tuple[Address, ...]:
    """Return the addresses in text (commas or white space between them) or in a sequence, in order.

    Raises:
        ConfigError: an address is not allowed. The message names the setting and shows no
            credentials.
    """
    if isinstance(value, Address):
        return (value,)
    if isinstance(value, str):
        texts: list[object] = [text for text in _BETWEEN.split(value.strip(" \t\r\n,")) if text]
    elif isinstance(value, Iterable):
        texts = list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    else:
        raise ConfigError(f"{name}: expected {_ALLOWED}; got {value!r}")
    found = (each if isinstance(each, Address) else _parse(each, name) for each in texts)
    return tuple(dict.fromkeys(found))


def _parse(text: object, name: str) -> Address:
    """Return one address.

    Raises:
        ConfigError: it is not allowed.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{name}: expected {_ALLOWED}; got {type(text).__name__}")
    scheme, separator, rest = text.strip().partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in KINDS:
        shown = f"{scheme}://" if scheme.replace("+", "").isalnum() else "an address"
        what = shown if separator else "an address without '://'"
        raise ConfigError(f"{name}: {what} is not known; expected {_ALLOWED}")
    where = f"{name}={_shown(scheme, rest)!r}"
    bare, _, query = rest.partition("?")
    userinfo, at, location = bare.rpartition("@")
    user, _, password = userinfo.partition(":")
    kind, hosts, path = KINDS[scheme], location.partition("/")[0], unquote(location)
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    is_layer = kind == "layer"
    allowed = COMMON | OPTIONS[kind]
    unknown = sorted(given.keys() - allowed)
    relative = [n for n in given if n.endswith("_file") and not os.path.isabs(given[n])]
    problems = {
        "it is too long, or has white space in it": len(text) > _MOST_TEXT
        or any(c.isspace() or ord(c) < 32 for c in text.strip()),
        "it has a fragment (#...); write %23 for the character": "#" in bare,
        "expected file:///path, absolute and on this machine": is_layer
        and not (path.startswith("/") and "\0" not in path and not at),
        f"it names no {'bucket' if kind == 'objects' else 'host'}": not (is_layer or hosts),
        "only a cluster has several hosts (elsewhere, write %2C)": "," in location
        and not (is_layer or scheme.endswith("+cluster")),
        "credentials of object stores come from the environment": at and kind == "objects",
        "the host or its port is wrong": not (is_layer or _are_hosts(hosts)),
        "an @ follows a ?; write %3F for a ? in a password": _is_password(pairs),
        f"no option {' '.join(unknown)[:40]!r}; expected {', '.join(sorted(allowed))}": unknown,
        f"{' '.join(relative)}: expected a path that begins with /": relative,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ConfigError(f"{where} is not allowed: {problem}")
    only_read = _flag(given, "ro", "0", where) or is_layer
    writes = _flag(given, "rw", "1", where)
    if "rw" in given and writes and ("ro" in given or is_layer):
        raise ConfigError(f"{where} is not allowed: it is read-only, and has the option rw")

    def seconds(option: str, default: float) -> float:
        value, name = given.get(option, default), f"{where}: {option}"
        found = parse_seconds(value, name=name, zero=False)
        if found > _MOST_SECONDS:
            raise ConfigError(f"{name}: expected at most 3600 seconds, got {value!r}")
        return found

    seconds("lease_seconds", LEASE_SECONDS)
    for switch in ("leases", "anonymous", "virtual_hosted"):
        _flag(given, switch, "0", where)
    return Address(
        kind,
        scheme,
        location,
        unquote(user) or None,
        unquote(password) or None,
        writes and not only_read,
        _flag(given, "keep", "0" if kind == "layer" else "1", where),
        seconds("connect_timeout", CONNECT_TIMEOUT),
        seconds("timeout", TIMEOUT),
        seconds("slow", SLOW),
        parse_size(given.get("max_entry", MAX_ENTRY), name=f"{where}: max_entry", least=1),
        tuple(sorted((option, given[option]) for option in given.keys() & OPTIONS[kind])),
    )


def _shown(scheme: str, rest: str) -> str:
    """Return the part of an address that an error may show: no credentials, no options.

    An unquoted password may contain any character, so a part of it may be in the place of a host or
    an option. No part that may belong to a password is shown.
    """
    bare, _, query = rest.partition("?")
    location = bare.rpartition("@")[2][:200]
    hosts = location.partition("/")[0]
    if _is_password(parse_qsl(query, keep_blank_values=True)) or (hosts and not _are_hosts(hosts)):
        location = "***"
    return f"{scheme}://{location}"


def _are_hosts(hosts: str) -> bool:
    found = map(_HOST.fullmatch, hosts.split(","))
    return all(host is not None and int(host[1] or 1) < 1 << 16 for host in found)


def _is_password(pairs: Iterable[tuple[str, str]]) -> bool:
    """Return whether a query may be the second part of a password that holds a question mark."""
    return any(
        "@" in option or ("@" in value and not option.endswith("_file")) for option, value in pairs
    )


def _flag(given: Mapping[str, str], option: str, default: str, where: str) -> bool:
    """Return whether a switch is on; a switch without a value is on."""
    return parse_flag(given.get(option, default).strip() or "1", name=f"{where}: {option}")
