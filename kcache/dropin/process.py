"""Process: forks a server from the launcher, into a process of its own.

The launcher becomes the program. The server is forked twice, so that the program has no child that
it does not know. The server has a session of its own, so that Ctrl-C and Ctrl-Z do not reach it.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

from kcache.dropin import endpoint as at
from kcache.dropin import environment as env
from kcache.util.child_process import children_are_elsewhere, detach

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    from kcache.dropin.answering import Answering
    from kcache.dropin.endpoint import Endpoint

__all__ = ["fork_server", "main", "serve", "spawn_server"]


def fork_server(endpoint: Endpoint, watched: int | None, *, why: bool = False) -> None:
    """Start a server that ends with the process `watched`, or with `kcache server stop`.

    The caller's process goes on at once, with its copy of the listening socket closed. With `why`,
    the server logs each compile to the caller's standard error.

    Raises:
        OSError: no process can be made.
    """
    _refuse_elsewhere()
    until = None if watched is None else at.above_standard(os.pidfd_open(watched))
    child = os.fork()
    if child == 0:
        if why:
            env.log_everything(env.current())
        _begin(endpoint, until)
    with suppress(ChildProcessError):  # whoever started this one ignores SIGCHLD
        os.waitpid(child, 0)
    endpoint.close()
    if until is not None:
        os.close(until)


def _begin(endpoint: Endpoint, until: int | None) -> None:
    """Detach, serve and exit: a forked process never returns from here."""
    try:
        group = os.getpgrp()
        os.setsid()
        if os.fork() == 0:
            _complain()
            logs, remotes = env.logs(env.current()), env.names_remotes(env.current())
            stream = _standard_error() if logs or remotes else None
            others = [number for number in (until, stream) if number is not None]
            detach([*endpoint.descriptors, *others])
            if stream is not None and logs:
                os.dup2(stream, 2)
            if stream is not None and remotes:
                _tell_of_remotes(stream, group)
            serve(endpoint, until)
            atexit._run_exitfuncs()  # removes temporary directories
    except BaseException:  # nobody is there to read a message
        os._exit(1)
    os._exit(0)


def _complain() -> None:
    """Say what is wrong with the variables while there is a terminal, without delaying the program.

    It checks only if there are such variables, because its imports delay the first answer.
    """
    if not env.settings(env.current()):
        return
    with suppress(Exception):  # the server works without
        from kcache.admin.environment_check import complaints

        for complaint in complaints():
            os.write(2, f"kcache: warning: {complaint}\n".encode("utf-8", "backslashreplace"))


def _standard_error() -> int | None:
    """Return a descriptor of the program's standard error; None if it has none, or no free one."""
    try:
        return at.above_standard(os.dup(2))
    except OSError:
        return None


def _tell_of_remotes(stream: int, group: int) -> None:
    """Write which remotes do not answer to the program's standard error, without delaying it.

    Args:
        stream: a descriptor of it, which is closed as soon as all remotes were asked.
        group: the process group of the program, which is told once.
    """
    import threading

    def tell(line: str) -> None:
        os.write(stream, f"kcache: warning: {line}\n".encode("utf-8", "backslashreplace"))

    def ask() -> None:
        with suppress(Exception):  # the program works without
            from kcache.config import Config
            from kcache.kernels.tiers import tell_of_remotes

            tell_of_remotes(Config.load(complain=lambda _: None), group, tell)
        os.close(stream)

    threading.Thread(target=ask, daemon=True).start()


def serve(endpoint: Endpoint, until: int | None) -> None:
    """Serve at the endpoint until the descriptor `until` is readable; then remove the endpoint.

    If `until` is None, the server also ends once its socket is gone, or is another server's: then
    nobody can reach it, not even to stop it.
    """
    import socket

    from kcache.dropin.server import Server

    environment = env.current()
    env.leave(environment)
    _raise_descriptor_limit()
    listener = socket.socket(fileno=endpoint.descriptors[0])
    socket_here = at.identity(endpoint.path)

    def is_reachable() -> bool:
        return socket_here is not None and at.identity(endpoint.path) == socket_here

    server = Server(listener, _answering, _about())
    with suppress(Exception):  # whatever there is must not end a server
        at.sweep(env.runtime_folders(environment))
    try:
        server.serve(until, None if until is not None else is_reachable)
    finally:
        if until is not None or is_reachable():
            endpoint.remove()
        server.close()


def _answering() -> Answering:
    from kcache.dropin.answering import Answering
    from kcache.kernel_cache import KernelCache

    home = env.cache_home(env.current())
    folder = None if home is None else os.path.join(home, "kcache-dropin")
    return Answering(KernelCache(), folder)


def _about() -> dict[str, object]:
    from kcache._version import __version__

    settings = env.meaning(env.current())
    return {"version": __version__, "process": os.getpid(), "settings": settings}


def _raise_descriptor_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _refuse_elsewhere() -> None:
    if children_are_elsewhere():
        raise OSError("child processes would be in another PID namespace")


def spawn_server(endpoint: Endpoint, watched: int | None) -> None:
    """Start a server by a new interpreter, for a caller with threads, which must not fork.

    Otherwise, it does the same as `fork_server`. It removes the endpoint of a server that can't be
    started.
    """
    until = None
    try:
        _refuse_elsewhere()
        until = None if watched is None else os.pidfd_open(watched)
        _spawn(endpoint, until)
    except BaseException:
        endpoint.remove()
        raise
    finally:
        endpoint.close()
        if until is not None:
            os.close(until)


def _spawn(endpoint: Endpoint, until: int | None) -> None:
    """Start the interpreter that becomes a server.

    Raises:
        OSError, ValueError: it can't be started.
    """
    import subprocess
    import sys

    if not sys.executable:  # a program that embeds Python
        raise OSError("no Python interpreter is known that could be the server")
    passed = [*endpoint.descriptors, *([] if until is None else [until])]
    code = "import sys; sys.path[:] = sys.argv[5:]; from kcache.dropin.process import main; main()"
    environment = dict(env.current())
    env.leave(environment)
    done = subprocess.run(
        [
            sys.executable,
            *("-I", "-B", "-c", code, endpoint.path),
            *map(str, endpoint.descriptors),
            str(-1 if until is None else until),
            *sys.path,
        ],
        check=False,
        pass_fds=passed,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if env.logs(environment) else subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise OSError(f"{sys.executable} ended with {done.returncode} instead of starting a server")


def main() -> None:
    """Be the server of `spawn_server` in a forked process; the started process ends at once."""
    import sys

    from kcache.dropin.endpoint import Endpoint

    path, (listener, lock, until) = sys.argv[1], map(int, sys.argv[2:5])
    for descriptor in (listener, lock):
        os.set_inheritable(descriptor, False)
    endpoint = Endpoint(path, (listener, lock))
    if os.fork() == 0:
        _begin(endpoint, None if until < 0 else until)
    os._exit(0)
