"""Child process: what a program passes on to the processes of kcache that it starts."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Options for an interpreter that imports only what kcache imports: isolated, without `site`. It
#: writes no compiled modules: a full disk would truncate them, and Python can't import those.
ISOLATED = ("-I", "-S", "-B")
#: Higher than any descriptor; close_range(2) closes them all at once.
_MAX_DESCRIPTORS = 1 << 20


def children_are_elsewhere() -> bool:
    """Return whether a child of this process would be in another PID namespace; see unshare(2).

    The namespace ends with its first process. So this must be a process of the program, not one of
    kcache, which exits sooner: after that, the program could start no process.
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
    """Return variables for a process that compiles, which must have the real compiler.

    Under `kcache run`, kcache answers NVRTC's interface in the program and, without this function,
    in kcache's workers, too. Variables without a name are left out: Python refuses to start a
    process with one.
    """
    found = {n: v for n, v in environment.items() if n and not n.startswith("KCACHE_DROPIN_")}
    preloaded = found.pop("LD_PRELOAD", "").replace(" ", ":").split(":")
    others = [p for p in preloaded if p and not os.path.basename(p).startswith("libkcache_")]
    return {**found, "LD_PRELOAD": ":".join(others)} if others else found


def detach(kept: list[int]) -> None:
    """Detach this process from the program: its signals, streams, and descriptors but `kept`."""
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
