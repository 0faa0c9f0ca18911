"""Address: where a read-only tier or a remote is, and how it is used (`KCACHE_REMOTE`, `remote=`).

The query of an address holds options: those in `COMMON`, which every address may have, and those
in `OPTIONS`, which belong to one kind of address. A user name and a password may stand before the
host; they are never shown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from kcache.errors import ConfigError
from kcache.util.units import parse_flag, parse_seconds, parse_size

#: Maps each scheme to a kind of address: `layer` (a read-only tier in a file or a directory), or
#: one of three kinds of remotes.
KINDS: Mapping[str, str] = {
    "file": "layer",
    **dict.fromkeys(("http", "https"), "http"),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), "redis"),
    **dict.fromkeys(("redis+cluster", "rediss+cluster"), "redis"),
    **dict.fromkeys(("s3", "gs", "az"), "objects"),
}
#: Maps each kind of address to its options, in addition to `COMMON`. No option contains a secret,
#: because an address is shown with its options. An option that names a file needs an absolute path,
#: so that no credentials come from the working directory.
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
#: The default time-outs in seconds: to connect to a remote, and to wait for its answer. A hit that
#: takes longer than a second saves little time, because most compiles do not take much longer.
CONNECT_TIMEOUT = 0.5
TIMEOUT = 2.0
#: The default of `slow`. A miss that takes more seconds than this counts as a failure of the
#: remote, because every compile would first wait that long for nothing. Small kernels compile in
#: less time.
SLOW = 0.25
#: Bytes per second. An upload may take its size divided by this speed, in addition to the
#: time-outs. The speed can be low because no program waits for an upload.
_UPLOAD_SPEED = 1e6
#: The largest number of seconds that `connect_timeout`, `timeout`, `slow` and `lease_seconds` may
#: be set to.
_MOST_SECONDS = 3600.0
#: The default of `lease_seconds`. A lease expires this many seconds after its last renewal. This
#: happens only if a machine or a daemon has failed, because a daemon releases the leases of a
#: program that exits. The time is long because a loaded machine may renew its leases late.
LEASE_SECONDS = 30.0
#: The default of `max_entry`, in bytes. Nearly every kernel is smaller: in the benchmarks, the
#: largest kernels of CUTLASS have 10 MB.
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
    """The address of one layer or remote.

    Attributes:
        kind: `"layer"`, `"http"`, `"redis"` or `"objects"`.
        scheme: the part before `://`, in lower case.
        location: the part between `://` and the query, without credentials and not decoded.
        user, password: the decoded credentials in the address, or None.
        writable: whether kernels that this machine compiles are stored in the remote.
        keep: whether an entry that is found at this address is also stored in the local cache.
        connect_timeout, timeout: the time-outs in seconds, to connect and to wait for an answer.
        slow: the time in seconds after which a miss counts as a failure of the remote.
        max_entry: the size in bytes of the largest entry that is read or written.
        options: the options that only this kind of address has, sorted by name.
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
        """The bucket, or the host with its port. A comma separates the hosts of a cluster."""
        return self.location.partition("/")[0]

    @property
    def path(self) -> str:
        """The decoded path after the host or the bucket.

        The path of a layer is absolute. Other paths have no slash at the beginning or the end.
        """
        path = unquote(self.location.partition("/")[2])
        return "/" + path if self.kind == "layer" else path.strip("/")

    def option(self, name: str, default: str = "") -> str:
        """Return the value of the option `name`, or `default` if the address does not have it.

        `name` must be one of `OPTIONS`. The options in `COMMON` are attributes of the address.
        """
        return dict(self.options).get(name, default)

    def flag(self, name: str) -> bool:
        """Return whether the option `name` is on; it is off if the address does not have it."""
        return _flag(dict(self.options), name, "0", self.redacted())

    def seconds(self, size: int = 0) -> float:
        """Return the time limit in seconds of an operation that connects and sends `size` bytes."""
        return self.connect_timeout + self.timeout + size / _UPLOAD_SPEED

    @property
    def leases(self) -> bool:
        """Whether programs acquire leases of this remote before they compile (`storage.Leases`)."""
        return self.kind == "redis" and self.flag("leases")

    @property
    def lease_seconds(self) -> float:
        """The number of seconds after which a lease expires if it is not renewed."""
        return float(self.option("lease_seconds") or LEASE_SECONDS)

    def redacted(self) -> str:
        """Return the address for messages, with `***` in place of the user name and password."""
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
    """Return the addresses in `value`, in order and without duplicates.

    Args:
        value: a text with commas or white space between the addresses, an `Address`, or an iterable
            of texts and `Address` objects.
        name: the name of the setting, for the messages of errors.

    Raises:
        ConfigError: an address is malformed. The message shows no credentials.
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
    """Return the address in `text`, the value of the setting `name`.

    Raises:
        ConfigError: the address is malformed. The message shows no credentials.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{name}: expected {_ALLOWED}; got {type(text).__name__}")
    scheme, separator, rest = text.strip().partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in KINDS:
        shown = f"{scheme}://" if scheme.replace("+", "").isalnum() else "another scheme"
        what = shown if separator else "an address without '://'"
        raise ConfigError(f"{name}: expected {_ALLOWED}; got {what}")
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
        f"expected at most {_MOST_TEXT} characters and no white space in it": len(text) > _MOST_TEXT
        or any(c.isspace() or ord(c) < 32 for c in text.strip()),
        "an address can't have a fragment (#...); write %23 for the character #": "#" in bare,
        "expected file:///path, an absolute path without a host; write %40 for an @": is_layer
        and not (path.startswith("/") and "\0" not in path and not at),
        f"it names no {'bucket' if kind == 'objects' else 'host'}": not (is_layer or hosts),
        "only a cluster can have several hosts; write %2C for a comma elsewhere": "," in location
        and not (is_layer or scheme.endswith("+cluster")),
        "credentials for object stores come from the environment only": at and kind == "objects",
        "expected HOST or HOST:PORT, a port up to 65535": not (is_layer or _are_hosts(hosts)),
        "an @ follows a ?; write %3F for a ? in a password": _is_password(pairs),
        f"expected options {', '.join(sorted(allowed))}; got {' '.join(unknown)[:40]!r}": unknown,
        f"{' '.join(relative)}: expected an absolute path": relative,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ConfigError(f"{where} is not allowed: {problem}")
    only_read = _flag(given, "ro", "0", where) or is_layer
    writes = _flag(given, "rw", "1", where)
    if "rw" in given and writes and ("ro" in given or is_layer):
        what = "a layer" if is_layer else "an address with the option ro"
        raise ConfigError(f"{where} is not allowed: {what} can't have the option rw")

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
    """Return the part of an address that an error message may show: no credentials, no options.

    If a password is not percent-encoded and contains a character such as `/` or `?`, a part of the
    password is where the host or an option should be. So `***` replaces a malformed location.
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
    """Return whether a query with these pairs may be the rest of a password with a `?` in it."""
    return any(
        "@" in option or ("@" in value and not option.endswith("_file")) for option, value in pairs
    )


def _flag(given: Mapping[str, str], option: str, default: str, where: str) -> bool:
    """Return whether `option` is on. Without a value, it is on; if absent, `default` decides."""
    return parse_flag(given.get(option, default).strip() or "1", name=f"{where}: {option}")
