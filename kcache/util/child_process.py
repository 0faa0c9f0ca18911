"""Child process: what kcache's own processes inherit from the program that starts them."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Options for an interpreter that imports only what kcache imports: isolated (-I), without `site`
#: (-S). It writes no compiled modules (-B), because a full disk would truncate them, and Python
#: can't import a truncated module.
ISOLATED = ("-I", "-S", "-B")
#: A number higher than any descriptor. One call of close_range(2) closes all up to this number.
_MAX_DESCRIPTORS = 1 << 20


def children_are_elsewhere() -> bool:
    """Return whether a child of this process would be in another PID namespace; see unshare(2).

    When the first process in a PID namespace exits, no more processes can be started in it. So in
    this case kcache must not start a process: it could be the first one, and exit before the
    program does.
    """
    try:
        own = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux, or no /proc
        return False
    try:
        return os.readlink("/proc/self/ns/pid_for_children") != own
    except FileNotFoundError:  # the namespace has no process yet
        return True
    except OSError:
        return False


def without_dropin(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that would load the drop-in.

    Under `kcache run`, the drop-in answers the program's calls of NVRTC. A process of kcache that
    compiles must call NVRTC itself, so it is started with the variables that this function returns.
    Variables with an empty name are left out, too, because Python refuses to start a process with
    such a variable.
    """
    found = {n: v for n, v in environment.items() if n and not n.startswith("KCACHE_DROPIN_")}
    preloaded = found.pop("LD_PRELOAD", "").replace(" ", ":").split(":")
    others = [p for p in preloaded if p and not os.path.basename(p).startswith("libkcache_")]
    return {**found, "LD_PRELOAD": ":".join(others)} if others else found


def detach(kept: list[int]) -> None:
    """Detach this process from the program that started it.

    Signals get their default handlers, the standard streams are replaced by /dev/null, and all
    other descriptors except those in `kept` are closed.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    start = 3
    for descriptor in (*sorted(kept), _MAX_DESCRIPTORS):
        os.closerange(start, descriptor)
        start = descriptor + 1
