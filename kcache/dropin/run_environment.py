"""RunEnvironment: reads the launcher's environment, and makes the program's and the daemon's.

`kcache.config` and `kcache.environment` also read the environment. They are not imported here,
because that would take as long as everything else that `kcache run` does before the program starts
(16 ms).
"""

from __future__ import annotations

import hashlib
import os

from kcache.daemons.spawn import Daemon
from kcache.util.child_process import without_dropin
from kcache.util.wire import join_texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

#: Names the socket of the daemon that answers a program. The interface library reads this variable.
SOCKET = "KCACHE_DROPIN_SOCKET"
#: Names a folder with the libraries, to be used instead of the package's own.
LIBRARIES = "KCACHE_DROPIN_LIBRARIES"
_PRELOAD = "LD_PRELOAD"
#: Names read-only tiers and remotes.
REMOTE = "KCACHE_REMOTE"
#: If this is set, the daemon logs messages of at least this level to the program's standard error.
LOG = "KCACHE_LOG"
_TOKEN = "KCACHE_REMOTE_TOKEN"
#: Variables that contain a path. A relative path would name another file for the daemon, whose
#: working directory is another one.
_PATHS = (
    *("KCACHE_DIR", "KCACHE_RECORD", "KCACHE_SIGNING_KEY_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
)


def current() -> MutableMapping[str, str]:
    """Return this process's environment itself, not a copy."""
    return os.environ  # noqa: TID251  see above


def of_dropin(environment: Mapping[str, str], preloaded: list[str], socket: str) -> dict[str, str]:
    """Return the variables to add to a program's `environment`, so that it uses the drop-in.

    Libraries that the environment already has in LD_PRELOAD come first.
    """
    others = without_dropin(environment).get(_PRELOAD)
    first = [others] if others else []
    return {_PRELOAD: ":".join((*first, *preloaded)), SOCKET: socket}


def of_service(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the daemon's variables for a program that has the variables `environment`.

    Paths in them are absolute, because the daemon has another working directory.
    """
    variables = without_dropin(environment)
    paths = ((name, variables.get(name)) for name in _PATHS)
    return variables | {name: _absolute(path) for name, path in paths if path}


def undo_locale() -> None:
    """Set LC_CTYPE to the value that this process inherited, or remove it if it inherited none.

    Python changes LC_CTYPE at its start if no locale is set (PEP 538).
    """
    try:
        with open("/proc/self/environ", "rb") as file:
            inherited = [e for e in file.read().split(b"\0") if e.startswith(b"LC_CTYPE=")]
    except OSError:  # there is no /proc
        return
    if inherited:
        os.environb[b"LC_CTYPE"] = inherited[0].partition(b"=")[2]  # noqa: TID251  see above
    else:
        os.environ.pop("LC_CTYPE", None)  # noqa: TID251  see above


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return kcache's settings in `environment`; credentials are replaced by a short digest."""
    return {
        name: _shown(name, value)
        for name, value in environment.items()
        if value and name.startswith("KCACHE_") and not name.startswith("KCACHE_DROPIN_")
    }


def meaning(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values that decide which cache a program with the variables `environment` uses.

    These are kcache's settings and, if the settings name no directory for the cache, the user's
    cache folder. Programs with equal values use the same cache.
    """
    values = settings(environment)
    if "KCACHE_DIR" not in values:
        values["cache_home"] = cache_home(environment) or ""
    return values


def service(environment: Mapping[str, str]) -> Daemon:
    """Return the daemon that answers programs with the variables `environment`."""
    values = sorted(meaning(environment).items())
    texts = (text for setting in values for text in setting)
    return Daemon("programs", "kcache.dropin.compile_service", join_texts(texts))


def _shown(name: str, value: str) -> str:
    if name in _PATHS:
        return _absolute(value)
    return f"*** ({_digest(value)})" if name in (REMOTE, _TOKEN) else value


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _digest(secret: str) -> str:
    """Return a short digest of a secret, from which nobody can guess the secret.

    Different secrets very probably have different digests.
    """
    digest = hashlib.sha256(secret.encode("utf-8", "replace"), usedforsecurity=False)
    return digest.hexdigest()[:8]


def cache_home(environment: Mapping[str, str]) -> str | None:
    """Return the user's cache directory, or None for a user without a home."""
    named = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return named
    home = os.path.expanduser("~")
    return os.path.join(home, ".cache") if os.path.isabs(home) else None
