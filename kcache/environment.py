"""Environment: reads the variables that are not settings: of NVRTC, of remotes, of directories.

The settings are in `kcache.config`, and the variables of the launcher in
`kcache.dropin.run_environment`. No other Python module reads the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kcache.util.forks import importing

#: Variables that NVRTC 12.4 to 13.5 asks for and that may change its output. They are part of the
#: key. Any other variable that a compiler asks for is in its trace.
IN_KEY = (
    "CAN_FINALIZE_DEBUG",
    "DUMP_KNOBS_TO_FILE",
    "EDG_BASE",
    "EDG_MODULES_PATH",
    "FINALIZER_CUBIE",
    "FINALIZER_USE_LEGACY_ELF_BUILDER",
    "NVRTCWIZ",
    "NVRTC_APPEND_FLAGS",
    "NVRTC_DISABLE_CONCURRENT_NVVM",
    "NVVM_IR_VER_CHK",
)
#: LLVM asks for this variable to find out how the user writes the working directory.
WORKING_DIRECTORY = "PWD"
#: The compiler gets these values whatever the environment contains: a worker is not a job of the
#: program's `make`, and NVRTC's own cache would answer instead of the compiler.
FIXED: dict[str, str | None] = {"MAKEFLAGS": None, "CUDA_CACHE_DISABLE": "1"}
#: Variables that name directories for temporary files. A result does not depend on them.
IGNORED = ("TMPDIR", "TMP", "TEMP")
#: The mapping inside `os.environ`, which answers in a tenth of the time. Each hit asks it.
_RAW: Any = getattr(os.environ, "_data", os.environ)
_none_is_set = partial(
    _RAW.keys().isdisjoint,
    frozenset(
        IN_KEY if _RAW is os.environ or sys.platform == "win32" else map(os.fsencode, IN_KEY)
    ),
)

#: The credential of HTTP remotes, which is in no `Config`.
REMOTE_TOKEN = "KCACHE_REMOTE_TOKEN"

#: The variables that clients of remotes read: credentials, certificates, proxies. They decide which
#: server a client talks to, and as which user. Programs with other values have another daemon.
_OF_REMOTES = frozenset(
    (
        REMOTE_TOKEN,
        *("ALL_PROXY", "HTTPS_PROXY", "NO_PROXY", "all_proxy", "https_proxy", "no_proxy"),
        "http_proxy",  # not in upper case: a web server sets that from a header of the request
        *("HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "GOOGLE_APPLICATION_CREDENTIALS"),
        *("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    )
)
_OF_OBJECT_STORES = ("AWS_", "AZURE_")
#: Endings of variables of obstore that would weaken the protection of credentials: plain HTTP, any
#: certificate, another proxy or server, a key that is also sent to the host of a redirect.
_UNSAFE = (
    "_ALLOW_HTTP",
    "_ALLOW_INVALID_CERTIFICATES",
    "_PROXY_URL",
    "_SERVER_SIDE_ENCRYPTION",
    "_ENCRYPTION_KEY",
    "_KEY_BASE64",
    "_EMULATOR",
)
#: Endings of variables that name servers which hand out credentials, and the hosts that are asked
#: for credentials without TLS: this machine, and the addresses at which clouds answer their own
#: machines.
_CREDENTIAL_SERVERS = ("_AUTHORITY_HOST", "_CREDENTIALS_FULL_URI", "_IDENTITY_ENDPOINT")
_PLAIN = frozenset(
    (
        *("localhost", "127.0.0.1", "::1", "fd00:ec2::23"),
        *("169.254.169.254", "169.254.170.2", "169.254.170.23"),
    )
)


def variable(name: str) -> str | None:
    """Return the value of a variable, or None."""
    return os.environ.get(name)


def values(*names: str) -> list[str]:
    """Return the values of those variables that are set and not empty."""
    return [value for name in names if (value := os.environ.get(name))]


def variables() -> dict[str, str]:
    """Return the environment variables of this process as they are now.

    Other threads may change variables meanwhile: only the copy of a dictionary is atomic.
    """
    return {os.fsdecode(name): os.fsdecode(value) for name, value in dict(_RAW).items()}


def changed_variables(since: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that differ from `since`; None for a variable that is gone."""
    now = variables()
    changed: dict[str, str | None] = {n: v for n, v in now.items() if since.get(n) != v}
    return changed | dict.fromkeys(since.keys() - now.keys())


def in_key() -> tuple[str, ...]:
    """Return those of `IN_KEY` that are set, as `NAME=VALUE`; nearly always none."""
    if _none_is_set():
        return ()
    now = variables()
    return tuple(f"{name}={now[name]}" for name in IN_KEY if name in now)


def worker_variables() -> dict[bytes, bytes]:
    """Return the variables of this worker's start, and switch NVRTC's own cache off in it.

    NVRTC's own cache would answer instead of the compiler. libcuda keeps this cache, and reads the
    variable that switches it off from the environment of the process.
    """
    found: dict[bytes, bytes] = {}
    if sys.platform != "win32":
        found = dict(os.environb)
    os.environ.update((name, value) for name, value in FIXED.items() if value is not None)
    return found


def remote_variables() -> dict[str, str]:
    """Return those environment variables that clients of remotes read and that are set."""
    return {
        name: value
        for name, value in variables().items()
        if name in _OF_REMOTES or name.startswith(_OF_OBJECT_STORES)
    }


def drop_unsafe_variables() -> None:
    """Remove variables of object stores by which credentials would be sent without protection.

    Only the daemon and `kcache doctor` call this, in their own process.
    """
    for name, value in list(os.environ.items()):
        if not name.startswith((*_OF_OBJECT_STORES, "GOOGLE_")):
            continue
        # obstore reads a name in any case; kcache's checks of names do not.
        is_unsafe = name != name.upper() or name.endswith(_UNSAFE)
        if is_unsafe or (name.endswith(_CREDENTIAL_SERVERS) and _is_public(value)):
            del os.environ[name]


def _is_public(url: str) -> bool:
    """Return whether what is sent to a URL may be read on the way."""
    from urllib.parse import urlsplit  # noqa: PLC0415  3 ms

    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    return parts.scheme != "https" and parts.hostname not in _PLAIN


def remote_token() -> str | None:
    """Return the token for HTTP remotes, which is not in `Config`, so that nothing shows it."""
    return os.environ.get(REMOTE_TOKEN) or None


def proxy_for(scheme: str, host: str) -> str | None:
    """Return the URL of the proxy that the environment names for a host, or None."""
    from urllib import request  # noqa: PLC0415  28 ms

    proxies = request.getproxies_environment()
    bypassed: Callable[[str, dict[str, str]], bool] = vars(request)["proxy_bypass_environment"]
    if bypassed(host, proxies):  # the type information lacks it
        return None
    return proxies.get(scheme) or proxies.get("all")


def default_directories() -> Iterator[str]:
    """Yield the default directories of the cache: the user's, then one in the temporary directory.

    Each is determined when it is needed: to determine both takes longer than a hit.
    """
    with importing:
        import platformdirs  # noqa: PLC0415  9 ms

    # If the user has no home (containers with arbitrary user ids), platformdirs either raises or
    # returns `~/.cache/kcache` unchanged, depending on its version.
    with suppress(RuntimeError):
        found = platformdirs.user_cache_dir("kcache", appauthor=False)
        if os.path.isabs(found):
            yield found
    with importing:
        import tempfile  # noqa: PLC0415  4 ms

    windows = sys.platform == "win32"
    owner = os.environ.get("USERNAME", "user") if windows else str(os.getuid())
    yield os.path.join(tempfile.gettempdir(), f"kcache-{owner}")
