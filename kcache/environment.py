"""Environment: reads environment variables that are not settings, such as those of NVRTC.

`kcache.config` reads the settings, and `kcache.dropin.run_environment` reads the variables of the
launcher. No other Python module reads the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kcache.util.forks import importing

#: The variables that NVRTC 12.4 to 13.5 reads and that may change its output. Their values are part
#: of the key. Any other variable that a compiler reads is recorded as a dependency of the compile.
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
#: The variable from which LLVM gets the path of the working directory as the shell writes it.
WORKING_DIRECTORY = "PWD"
#: The values that the compiler gets for these variables, whatever the environment contains. A
#: worker is not a job of the `make` that may have started the program. NVRTC's own cache is off,
#: because otherwise that cache would answer instead of the compiler.
FIXED: dict[str, str | None] = {"MAKEFLAGS": None, "CUDA_CACHE_DISABLE": "1"}
#: The variables that name directories for temporary files. The compiler's output does not depend on
#: them.
IGNORED = ("TMPDIR", "TMP", "TEMP")
#: The mapping inside `os.environ`. Each hit reads it, because a lookup in it takes a tenth of the
#: time of a lookup in `os.environ`.
_RAW: Any = getattr(os.environ, "_data", os.environ)
_none_is_set = partial(
    _RAW.keys().isdisjoint,
    frozenset(
        IN_KEY if _RAW is os.environ or sys.platform == "win32" else map(os.fsencode, IN_KEY)
    ),
)

#: The variable that has the token for HTTP remotes. No `Config` contains the token.
REMOTE_TOKEN = "KCACHE_REMOTE_TOKEN"

#: The variables that clients of remotes read: credentials, certificates, proxies. They decide which
#: server a client connects to, and as which user. Programs with different values of these variables
#: use different daemons.
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
#: How the names of those variables of obstore end that weaken the protection of credentials: they
#: allow plain HTTP or any certificate, name another proxy or server, or set a key that is also sent
#: to the host of a redirect.
_UNSAFE = (
    "_ALLOW_HTTP",
    "_ALLOW_INVALID_CERTIFICATES",
    "_PROXY_URL",
    "_SERVER_SIDE_ENCRYPTION",
    "_ENCRYPTION_KEY",
    "_KEY_BASE64",
    "_EMULATOR",
)
#: How the names of those variables end that name a server of credentials; and the hosts of such
#: servers that may be used without TLS: this machine, and the addresses at which clouds answer
#: their own machines.
_CREDENTIAL_SERVERS = ("_AUTHORITY_HOST", "_CREDENTIALS_FULL_URI", "_IDENTITY_ENDPOINT")
_PLAIN = frozenset(
    (
        *("localhost", "127.0.0.1", "::1", "fd00:ec2::23"),
        *("169.254.169.254", "169.254.170.2", "169.254.170.23"),
    )
)


def variable(name: str) -> str | None:
    """Return the value of the environment variable called `name`, or None if it is not set."""
    return os.environ.get(name)


def values(*names: str) -> list[str]:
    """Return the values of those variables in `names` that are set and not empty."""
    return [value for name in names if (value := os.environ.get(name))]


def variables() -> dict[str, str]:
    """Return a copy of all environment variables of this process.

    The copy is atomic: it is consistent even if another thread changes variables at the same time.
    """
    return {os.fsdecode(name): os.fsdecode(value) for name, value in dict(_RAW).items()}


def changed_variables(since: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables whose present values differ from those in `since`.

    A variable that is in `since` but no longer set has the value None.
    """
    now = variables()
    changed: dict[str, str | None] = {n: v for n, v in now.items() if since.get(n) != v}
    return changed | dict.fromkeys(since.keys() - now.keys())


def in_key() -> tuple[str, ...]:
    """Return `NAME=VALUE` for each variable in `IN_KEY` that is set. Usually, none is set."""
    if _none_is_set():
        return ()
    now = variables()
    return tuple(f"{name}={now[name]}" for name in IN_KEY if name in now)


def worker_variables() -> dict[bytes, bytes]:
    """Return the variables with which this worker was started, and switch off NVRTC's own cache.

    NVRTC's own cache would answer instead of the compiler. It is part of libcuda, and is switched
    off by a variable in the environment of the process.
    """
    found: dict[bytes, bytes] = {}
    if sys.platform != "win32":
        found = dict(os.environb)
    os.environ.update((name, value) for name, value in FIXED.items() if value is not None)
    return found


def remote_variables() -> dict[str, str]:
    """Return all environment variables of this process that clients of remotes read."""
    return {
        name: value
        for name, value in variables().items()
        if name in _OF_REMOTES or name.startswith(_OF_OBJECT_STORES)
    }


def drop_unsafe_variables() -> None:
    """Remove the variables that would make clients of object stores send credentials unprotected.

    The variables are removed from the environment of this process. Only the daemon and
    `kcache doctor` call this function.
    """
    for name, value in list(os.environ.items()):
        if not name.startswith((*_OF_OBJECT_STORES, "GOOGLE_")):
            continue
        # obstore ignores the case of the names; kcache's checks of the names do not.
        is_unsafe = name != name.upper() or name.endswith(_UNSAFE)
        if is_unsafe or (name.endswith(_CREDENTIAL_SERVERS) and _is_public(value)):
            del os.environ[name]


def _is_public(url: str) -> bool:
    """Return whether others in the network may read what is sent to `url`."""
    from urllib.parse import urlsplit  # noqa: PLC0415  3 ms

    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    return parts.scheme != "https" and parts.hostname not in _PLAIN


def remote_token() -> str | None:
    """Return the token for HTTP remotes, or None.

    The token is not in `Config`, so that it can't be shown together with the settings.
    """
    return os.environ.get(REMOTE_TOKEN) or None


def proxy_for(scheme: str, host: str) -> str | None:
    """Return the URL of the proxy that the environment names for `host`; None if it names none."""
    from urllib import request  # noqa: PLC0415  28 ms

    proxies = request.getproxies_environment()
    # The type information of `urllib.request` lacks this function.
    bypassed: Callable[[str, dict[str, str]], bool] = vars(request)["proxy_bypass_environment"]
    if bypassed(host, proxies):
        return None
    return proxies.get(scheme) or proxies.get("all")


def default_directories() -> Iterator[str]:
    """Yield the directories that a cache uses by default, the preferred one first.

    The first is in the user's cache directory, the second in the directory for temporary files. The
    second is determined only if the caller needs it, because determining both takes longer than a
    cache hit.
    """
    with importing:
        import platformdirs  # noqa: PLC0415  9 ms

    # If the user has no home directory (in a container with an arbitrary user id, for example),
    # platformdirs raises RuntimeError or returns the relative path `~/.cache/kcache`, depending on
    # its version.
    with suppress(RuntimeError):
        found = platformdirs.user_cache_dir("kcache", appauthor=False)
        if os.path.isabs(found):
            yield found
    with importing:
        import tempfile  # noqa: PLC0415  4 ms

    windows = sys.platform == "win32"
    owner = os.environ.get("USERNAME", "user") if windows else str(os.getuid())
    yield os.path.join(tempfile.gettempdir(), f"kcache-{owner}")
