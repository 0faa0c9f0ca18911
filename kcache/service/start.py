"""Start: how a program finds a service of this user, or starts it, and asks about it.

All sockets of a user are in one folder that only this user can enter. The name of a service says
what it serves: programs with the same settings find the same one. Whether one is alive is asked by
a connection, which says the truth in each PID namespace, and for a process that is stopped.

The launcher of `kcache run` imports this module before the program starts, so it imports little.
"""

from __future__ import annotations

import _socket  # `socket` takes 3 ms more
import errno
import os
import signal
import stat
import sys
from contextlib import suppress

from kcache._version import __version__
from kcache.util.child_process import ISOLATED, children_are_elsewhere
from kcache.util.locks import locked_directory
from kcache.util.path_safety import make_directory, present_user, unsafe_part, why_no_user
from kcache.util.wire import WireError, heading

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

#: Questions that every service answers.
STATUS, STOP = b"status", b"stop"
#: The first fields of answers. Any number of `WAIT` may come before one that takes long.
DONE, NO, WAIT = b"done", b"no", b"wait"
#: How many programs may wait for a connection. The kernel has a limit of its own
#: (net.core.somaxconn).
BACKLOG = 4096
#: `sun_path` of unix(7) has 108 bytes, including the final NUL; and what the longest name takes.
_MOST_FOLDER = 107 - 32
_CREDENTIALS = 12  # the size of `struct ucred` of unix(7): process, user and group
_CODE = "import sys; sys.path[:] = sys.argv[1:]; from kcache.service.server import main; main()"
#: It forks at once, so that the program does not wait for imports, and gets no child process that
#: it does not know of.
_LEAVE = "import os; os.fork() and os._exit(0); os.setsid(); "
#: The folder that holds kcache. Another installation has services of its own.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: Seconds for a service's answer about itself.
ASK_TIMEOUT = 5.0
#: Seconds that the new interpreter may take until it has detached itself.
START_TIMEOUT = 20.0
#: Seconds to wait for another program that starts a service. It may be a stopped one.
TURN_TIMEOUT = 5.0
#: What a pipe takes before anybody reads from it.
_MOST_TOLD = 1 << 16


class Service:
    """What a service does. Immutable.

    Attributes:
        kind: what its socket's name begins with.
        serves: the module whose function `make` makes its handlers.
        told: what `make` gets, which may have credentials in it.
    """

    __slots__ = ("kind", "serves", "told")

    def __init__(self, kind: str, serves: str, told: bytes) -> None:
        self.kind = kind
        self.serves = serves
        self.told = told


# -- names and sockets -----------------------------------------------------------------------------


def name_of(service: Service) -> str:
    """Return the name of a service, by which all programs with the same settings find it."""
    import hashlib

    # One installation has several interpreters (`python`, `python3`), and all are in one folder.
    folder = os.path.realpath(os.path.dirname(sys.executable or "/"))
    parts = (__version__, folder, str(sys.implementation.cache_tag), _ROOT, service.serves)
    told = "\0".join(parts).encode() + b"\0" + service.told
    return f"{service.kind}-{hashlib.sha256(told, usedforsecurity=False).hexdigest()[:16]}"


def path_of(service: Service, environment: Mapping[str, str]) -> str:
    """Return the path of the socket of a service for all programs with its settings.

    Its folder is absolute, because programs change directory.

    Raises:
        OSError: there is no folder for it.
    """
    named = (environment.get(name, "") for name in ("XDG_RUNTIME_DIR", "TMPDIR"))
    folder = folder_in([*filter(os.path.isabs, named), "/tmp"])
    return os.path.join(folder, name_of(service))


def folder_in(folders: Iterable[str]) -> str:
    """Return the folder of this user's sockets, in the first folder where it can be.

    Raises:
        OSError: it can be in none of them.
    """
    if sys.platform != "linux":
        raise OSError("a service of kcache needs Linux; layers do without")
    if no_user := why_no_user():
        raise OSError(no_user)
    problem = OSError("no folder for a socket")
    for folder in folders:
        # The cache of a user without a home is beside it; see `config.temporary_cache_directory`.
        private = os.path.join(folder, f"kcache-services-{os.geteuid()}")
        try:
            if len(os.fsencode(private)) > _MOST_FOLDER:
                raise OSError(f"{private} is too long for a socket")
            unsafe = unsafe_part(private)  # nobody can replace it meanwhile
            if unsafe:
                raise OSError(unsafe)
            _require_private(private)
        except OSError as error:
            problem = error
        else:
            return private
    raise problem


def _require_private(folder: str) -> None:
    """Make a folder unless it is there, and check that it is the user's own; raise OSError."""
    with suppress(FileExistsError):
        make_directory(folder)
    status = os.lstat(folder)
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == present_user()
    if not is_own or status.st_mode & 0o077:
        raise OSError(f"{folder} is not private")


def bound(path: str) -> int:
    """Return the descriptor of a new socket that listens at a path, in place of what is there.

    Who finds a socket there finds one that listens, unless its process has ended.

    Raises:
        OSError: it can't be made there.
    """
    made = os.path.join(os.path.dirname(path), f".{os.urandom(6).hex()}")
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        listener.bind(made)
        os.chmod(made, 0o600)  # the umask decided until now
        listener.listen(BACKLOG)
        os.rename(made, path)
    except OSError:
        listener.close()
        with suppress(OSError):
            os.unlink(made)
        raise
    return _above_standard(listener.detach())


def _above_standard(descriptor: int) -> int:
    """Return a descriptor above those of the standard streams, which a launcher may have closed."""
    if descriptor > 2:
        return descriptor
    import fcntl

    moved: int = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def socket_identity(path: str) -> tuple[int, int] | None:
    """Return what tells the socket at a path from another there; None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def connected(path: str) -> _socket.socket | None:
    """Return a connection to the service at a path, or None if there is none of this user."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.setblocking(False)  # so that a full backlog does not block, either
    with suppress(OSError):
        connection.connect(path)
        found = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS)
        if int.from_bytes(found[4:8], sys.byteorder) == present_user():
            return connection
    connection.close()
    return None


def remove_socket(path: str, identity: tuple[int, int] | None) -> None:
    """Remove the socket of a service that did not answer in time, so that nobody waits for it.

    A service that goes on makes a new socket, or ends if another one has its place.
    """
    if identity is not None and socket_identity(path) == identity:
        with suppress(OSError):
            os.unlink(path)


def sweep(folder: str) -> None:
    """Remove the sockets that killed services of this user have left, and the empty folder."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if not name.startswith(".") and _is_dead(os.path.join(folder, name)):
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _is_dead(path: str) -> bool:
    # A socket of another type is refused, and so is no program that the service would stay for.
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    found = connection.connect_ex(path)
    connection.close()
    return found == errno.ECONNREFUSED and stat.S_ISSOCK(os.lstat(path).st_mode)


# -- questions -------------------------------------------------------------------------------------


def ask(path: str, question: bytes) -> list[bytes] | None:
    """Return the answer of the service at `path`, or None if it is gone, silent or lies."""
    from kcache.service.channel import Channel

    connection, identity = connected(path), socket_identity(path)
    if connection is None:
        return None
    channel = Channel(connection, ASK_TIMEOUT)
    try:
        kind, *answer = channel.ask([question], ASK_TIMEOUT)
    except TimeoutError:
        remove_socket(path, identity)
        return None
    except (OSError, WireError, ValueError):
        return None
    finally:
        channel.close()
    return answer if kind == DONE else None


def status(path: str) -> dict[str, Any] | None:
    """Return the status of the service at `path`, or None if it is gone or answers nonsense."""
    import json

    try:
        (answer,) = ask(path, STATUS) or (b"",)
        told: dict[str, Any] = {**json.loads(answer)}
    except (ValueError, TypeError, RecursionError):
        return None
    return told if told.keys() >= {"version", "process", "started"} else None


# -- starting --------------------------------------------------------------------------------------


def joined(path: str, service: Service, environment: Mapping[str, str]) -> _socket.socket:
    """Return a connection to the service at a path, and start it if there is none.

    Raises:
        OSError: there is none, and none can be started.
    """
    connection = connected(path)
    if connection is not None:
        return connection
    _require_private(os.path.dirname(path))  # a service that ended may have removed it
    # The holder starts one, or was stopped.
    with locked_directory(os.path.dirname(path), TURN_TIMEOUT):
        connection = connected(path)  # another program may have been faster
        if connection is None:
            begin(path, service, environment)
            connection = connected(path)
    if connection is None:
        raise OSError("no service can be started")
    return connection


def begin_own(
    service: Service, environment: Mapping[str, str], *, forks: bool = False, speaks: bool
) -> str:
    """Start a service for this process alone, which no other one finds; return its path.

    It ends with this process. The other arguments and what is raised are those of `begin`.
    """
    path = f"{path_of(service, environment)}-{os.urandom(4).hex()}"
    begin(path, service, environment, watched=os.getpid(), forks=forks, speaks=speaks)
    return path


def begin(
    path: str,
    service: Service,
    environment: Mapping[str, str],
    *,
    watched: int | None = None,
    lasting: bool = False,
    forks: bool = False,
    speaks: bool = False,
) -> None:
    """Start a service with a new socket at `path`.

    Args:
        path: path of the socket.
        service: what it does.
        environment: its variables.
        watched: the process that it serves alone, and ends with.
        lasting: whether it serves until it is told to end.
        forks: whether this process has one thread and shall not wait for an interpreter.
        speaks: whether the service may write to this process's standard error.

    Raises:
        OSError: it can't be started.
    """
    if children_are_elsewhere():
        raise OSError("this program's children are in another PID namespace")
    if not sys.executable:  # a program that embeds Python
        raise OSError("no Python interpreter is known that could be the service")
    _require_private(os.path.dirname(path))
    passed = [bound(path)]
    try:
        if watched is not None:
            passed.append(_above_standard(os.pidfd_open(watched)))
        until = 0 if watched is None else passed[-1]
        speaks = speaks and _is_open(2)
        group = os.getpgrp() if speaks else 0
        numbers = [b"%d" % number for number in (passed[0], until, lasting, group)]
        fields = [*numbers, os.fsencode(path), service.serves.encode(), service.told]
        told = heading(fields) + b"".join(fields)
        if len(told) > _MOST_TOLD:
            raise OSError("the settings of the service are too long")
        start, leave = (_fork, "") if forks else (_run, _LEAVE)
        command = [sys.executable, *ISOLATED, "-c", leave + _CODE, *_search_path()]
        start(command, told, passed, environment, speaks)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        for number in passed:
            os.close(number)


def _run(
    command: list[str], told: bytes, passed: list[int], environment: Mapping[str, str], speaks: bool
) -> None:
    """Start the process of a service from a program, which may have threads; raise OSError."""
    import subprocess

    try:
        subprocess.run(
            command,
            input=told,
            check=True,
            pass_fds=passed,
            env=dict(environment),
            stdout=subprocess.DEVNULL,
            stderr=None if speaks else subprocess.DEVNULL,
            timeout=START_TIMEOUT,
        )
    except (subprocess.SubprocessError, RuntimeError) as error:  # an interpreter may end
        raise OSError(f"no service can be started: {error}") from error


def _fork(
    command: list[str], told: bytes, passed: list[int], environment: Mapping[str, str], speaks: bool
) -> None:
    """Start the process of a service from a launcher, whose child it is not; raise OSError."""
    child = os.fork()
    if child:
        with suppress(ChildProcessError):  # whoever started this one ignores SIGCHLD
            os.waitpid(child, 0)
        signal.sigtimedwait({signal.SIGCHLD}, 0)  # pending if it is blocked; not the program's
        return
    try:
        if os.fork() == 0:
            read, write = os.pipe()
            os.write(write, told)
            os.close(write)
            os.dup2(_above_standard(read), 0)
            nowhere = _above_standard(os.open(os.devnull, os.O_WRONLY))
            for stream in (1,) if speaks else (1, 2):
                os.dup2(nowhere, stream)
            for number in passed:
                os.set_inheritable(number, True)
            os.setsid()
            os.execve(command[0], command, environment)
    finally:  # a forked process never returns from here
        os._exit(0)


def _search_path() -> list[str]:
    """Return the paths of the service's modules, without the working directory."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        here = ""
    found = [path for path in sys.path if os.path.isabs(path) and path != here]
    return found if _ROOT in found else [*found, _ROOT]
