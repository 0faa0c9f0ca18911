"""RunEnvironment: reads the launcher's variables, and makes those of program and daemon.

`kcache.config` and `kcache.environment` also read the environment, but importing them takes as long
as everything else that `kcache run` does before the program starts (16 ms).
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

#: Names the socket of the daemon that a program asks; read by the interface library.
SOCKET = "KCACHE_DROPIN_SOCKET"
#: Names a folder with the libraries, to be used instead of the package's own.
LIBRARIES = "KCACHE_DROPIN_LIBRARIES"
_PRELOAD = "LD_PRELOAD"
#: Names layers and remotes.
REMOTE = "KCACHE_REMOTE"
#: If it is set, the daemon logs to the program's standard error, from this level on.
LOG = "KCACHE_LOG"
_TOKEN = "KCACHE_REMOTE_TOKEN"
#: A relative path in one of these means another file in another directory.
_PATHS = (
    *("KCACHE_DIR", "KCACHE_RECORD", "KCACHE_SIGNING_KEY_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
)


def current() -> MutableMapping[str, str]:
    """Return this process's environment itself, not a copy."""
    return os.environ  # noqa: TID251  see above


def of_dropin(environment: Mapping[str, str], preloaded: list[str], socket: str) -> dict[str, str]:
    """Return the variables that a program with this environment needs to use the drop-in.

    Libraries that the program preloads already come first.
    """
    others = without_dropin(environment).get(_PRELOAD)
    first = [others] if others else []
    return {_PRELOAD: ":".join((*first, *preloaded)), SOCKET: socket}


def of_service(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the daemon's variables, with absolute paths: its working directory is another one."""
    variables = without_dropin(environment)
    paths = ((name, variables.get(name)) for name in _PATHS)
    return variables | {name: _absolute(path) for name, path in paths if path}


def undo_locale() -> None:
    """Give LC_CTYPE the value that this process has inherited.

    Python sets it where there is no locale (PEP 538).
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
    """Return the variables in an environment that are settings; credentials are hidden."""
    return {
        name: _shown(name, value)
        for name, value in environment.items()
        if value and name.startswith("KCACHE_") and not name.startswith("KCACHE_DROPIN_")
    }


def meaning(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings and, if they name no directory for the cache, the user's cache folder.

    Two processes with equal results use the same cache.
    """
    values = settings(environment)
    if "KCACHE_DIR" not in values:
        values["cache_home"] = cache_home(environment) or ""
    return values


def service(environment: Mapping[str, str]) -> Daemon:
    """Return the daemon for programs with these variables."""
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
    """Return a digest that distinguishes two secrets, but is too short to guess one from it."""
    digest = hashlib.sha256(secret.encode("utf-8", "replace"), usedforsecurity=False)
    return digest.hexdigest()[:8]


def cache_home(environment: Mapping[str, str]) -> str | None:
    """Return the user's cache directory, or None for a user without a home."""
    named = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return named
    home = os.path.expanduser("~")
    return os.path.join(home, ".cache") if os.path.isabs(home) else None
