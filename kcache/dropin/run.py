"""Run: `kcache run`, which runs a program with the drop-in in place of NVRTC.

The launcher starts a daemon and becomes the program. Process, parent and terminal stay the same, so
that exit status, signals and job control are the program's own. With `--stats`, the launcher stays
as the program's parent, in the same process group, and does what a shell does.

The launcher also stays if it is the first process of a container and has started the daemon. When
the first process of a container ends, the kernel kills all others, so the launcher ends the daemon
first. The first process is also the parent of every process whose own parent has ended, such as the
daemon, and has to wait for these processes.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from contextlib import suppress

from kcache.daemons import sockets, spawn
from kcache.dropin import libraries
from kcache.dropin import run_environment as env
from kcache.dropin.libraries import CLIENT

TYPE_CHECKING = False  # `typing` takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

#: Exit codes, as shells and env(1) report them.
_FAILED = 125
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127
#: The signals that Python ignores from its start.
_PYTHON_IGNORES = ("SIGPIPE", "SIGXFSZ")
#: Programs whose child processes ignore the same signals as the program. Other programs, such as
#: sshd or Python with its `subprocess`, ignore SIGPIPE, but their child processes do not.
_HAND_ON = frozenset(("systemd", "sh", "ash", "bash", "dash", "ksh", "mksh", "zsh", "busybox"))
#: Higher than any descriptor.
_MOST_DESCRIPTORS = 1 << 20
_KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
#: The id of the first process of a container.
_FIRST = 1
#: The first process of a container waits up to this many seconds until its daemon has ended.
#: Before it ends, the daemon writes the cache's counts.
_END_TIMEOUT = 5.0


def run(
    command: Sequence[str],
    *,
    stats: bool = False,
    why: bool = False,
    record: str | None = None,
    directory: str | None = None,
) -> int:
    """Run a command with the drop-in; return an exit code only if the command can't run.

    This process becomes the command, or stays its parent and ends as the command does.

    If the cache can't be used, the command runs without it, and one line gives the reason. But if
    the setting `on_miss` is `error`, the command does not run, because the real NVRTC would compile
    for it.

    Args:
        command: the program and its arguments.
        stats: print one line about the cache at the end.
        why: print one line for each compile: a hit, or the reason for a miss.
        record: a file in which every requested kernel is recorded.
        directory: the cache's directory, instead of the one that the environment names.
    """
    _die_of_interrupts()
    environment = env.current()
    if directory is not None:
        environment["KCACHE_DIR"] = os.path.abspath(directory)
    if record is not None:
        environment["KCACHE_RECORD"] = os.path.abspath(record)
    elif environment.get("KCACHE_RECORD"):
        _check_recording(environment["KCACHE_RECORD"])
    shared = os.path.basename(command[0]) == CLIENT
    try:
        added, socket, before = _prepare(environment, why=why, shared=shared)
        command = _with_client(command, environment)
    except (libraries.MissingError, OSError) as error:
        if _allows_no_compile():
            what = "does not run without the cache, because KCACHE_ON_MISS=error allows no compile"
            _print(f"error: {command[0]} {what}: {error}")
            return _FAILED
        _print(f"warning: {command[0]} runs without the cache: {error}")
        added, socket, before = {}, None, None
    ends_server = socket is not None and before is None and os.getpid() == _FIRST
    if not stats and not ends_server:
        return _become(command, added, _inherited_signals())
    status = _watch(command, added)
    if stats and socket is not None:
        _print(_summary(socket, before))
    if ends_server and socket is not None:
        _end_server(socket)
    if os.WIFSIGNALED(status):
        _die_of(os.WTERMSIG(status))
    # After SystemExit, Python would read commands if the program's environment has PYTHONINSPECT.
    os._exit(os.WEXITSTATUS(status))


def _check_recording(path: str) -> None:
    """Print a warning if kernels can't be recorded at `path`; the daemon would only log this."""
    from kcache.errors import ConfigError  # noqa: PLC0415
    from kcache.warm.recording import refuse_other_file  # noqa: PLC0415

    try:
        refuse_other_file(os.path.abspath(path))
    except ConfigError as error:
        _print(f"warning: {error}")


def _allows_no_compile() -> bool:
    from kcache.config import Config  # noqa: PLC0415

    return Config.load(complain=lambda _: None).on_miss.value == "error"


def _die_of_interrupts() -> None:
    """Let Ctrl-C end the launcher without a traceback, as it ends most programs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_fast(arguments: Sequence[str]) -> int | None:
    """Run `kcache run` with `arguments`, or return None if click has to parse the arguments.

    Without click, the program starts 60 ms sooner.
    """
    stats = list(arguments[:1]) == ["--stats"]
    rest = arguments[stats:]
    if list(rest[:1]) == ["--"]:
        rest = rest[1:]
    elif rest and rest[0].startswith("-"):
        return None
    return run(rest, stats=stats) if rest else None


def _with_client(command: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """Return a command that runs nvcc through kcache's client, or `command` if it is not nvcc."""
    if os.path.basename(command[0]) != "nvcc":
        return command
    import shutil  # noqa: PLC0415

    path = shutil.which(command[0], path=os.pathsep.join(os.get_exec_path(environment)))
    if path is None:
        return command
    return [libraries.for_nvcc(environment, CLIENT), "--program", path, *command]


def _prepare(
    environment: Mapping[str, str], *, why: bool = False, shared: bool = False
) -> tuple[dict[str, str], str, dict[str, Any] | None]:
    """Find or start a daemon; return variables, the path of the daemon's socket, and its status.

    The variables are those to add to the program's environment. The status is None if the daemon
    has just been started. A daemon that is started with `shared` also answers other programs, and
    does not end with this program.
    """
    preloaded = libraries.preloaded(libraries.find(environment))
    variables = env.of_service(environment)
    if why:
        variables[env.LOG] = "debug"
    service = env.service(variables)
    shared_path = spawn.path_of(service, variables)
    running = [environment.get(env.SOCKET, ""), shared_path]
    if variables.get(env.LOG):
        running = []  # a running daemon does not log to this standard error
    name = os.path.basename(shared_path)
    for path in running:
        about = sockets.status(path) if os.path.basename(path).startswith(name) else None
        if about is not None:
            if path != running[0] and variables.get(env.REMOTE):
                _report_remotes(variables)
            return env.of_dropin(environment, preloaded, path), path, about
    if shared:
        spawn.connect_or_spawn(shared_path, service, variables).close()
        return env.of_dropin(environment, preloaded, shared_path), shared_path, None
    logs = bool(env.settings(variables))
    path = spawn.spawn_own(service, variables, forks=True, logs=logs)
    return env.of_dropin(environment, preloaded, path), path, None


def _report_remotes(variables: Mapping[str, str]) -> None:
    """Start a process that warns of remotes that do not answer.

    The daemon that answers this program was started by another program, and can't write to this
    program's standard error.
    """
    service = spawn.Daemon("trouble", "kcache.dropin.compile_service", b"")
    with suppress(OSError):  # the program works without the warnings
        spawn.spawn_own(service, variables, forks=True, logs=True)


def _print(message: str) -> None:
    with suppress(AttributeError, OSError):  # the parent has closed standard error
        sys.stderr.write(f"kcache: {message}\n")
        sys.stderr.flush()


def _inherited_signals() -> dict[signal.Signals, signal.Handlers]:
    """Return what this process inherited for each signal in `_PYTHON_IGNORES`: SIG_IGN or SIG_DFL.

    Python ignores these signals from its start, so the process can't ask the system what it
    inherited. This function reads which signals the parent process ignores; see `_HAND_ON`.
    """
    ignored = 0
    with suppress(OSError, ValueError, IndexError):  # the parent may be in another namespace
        with open(f"/proc/{os.getppid()}/status", encoding="utf-8", errors="replace") as file:
            status = dict(line.split(":", 1) for line in file)
        if status["Name"].strip() in _HAND_ON:
            ignored = int(status["SigIgn"], 16)
    numbers = [signal.Signals[name] for name in _PYTHON_IGNORES]
    return {n: signal.SIG_IGN if ignored >> n - 1 & 1 else signal.SIG_DFL for n in numbers}


def _become(
    command: Sequence[str],
    added: Mapping[str, str],
    inherited: Mapping[signal.Signals, signal.Handlers],
) -> int:
    """Become the program, with the signals and variables that this process has inherited.

    Return an exit code if the program can't be run. The program gets the C library's environment,
    because Python's copy of it lacks entries without a `=`.

    Args:
        command: the program and its arguments.
        added: variables to set.
        inherited: the result of `_inherited_signals`.
    """
    for number, how in inherited.items():
        signal.signal(number, how)
    env.undo_locale()
    env.current().update(added)
    try:
        _execute(command)
    except OSError as error:
        reason = "command not found" if isinstance(error, FileNotFoundError) else error.strerror
        _print(f"error: {command[0]}: {reason}")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


def _execute(command: Sequence[str]) -> NoReturn:
    """Replace this process with the program that `command` names.

    A script without `#!` is run by /bin/sh, as with `execvp` of POSIX.

    Raises:
        OSError: the program can't be run.
    """
    if not command[0]:  # for an empty name, Python would raise ValueError
        raise FileNotFoundError
    try:
        os.execvp(command[0], [*command])
    except OSError as error:
        import shutil  # noqa: PLC0415

        path = shutil.which(command[0], path=os.pathsep.join(os.get_exec_path()))
        if error.errno != errno.ENOEXEC or path is None:
            raise
        os.execv("/bin/sh", ["sh", path, *command[1:]])


# -- as the program's parent -----------------------------------------------------------------------


def _watch(command: Sequence[str], added: Mapping[str, str]) -> int:
    """Run a program as a child process, and return its wait(2) status.

    The program gets each signal that the launcher gets. When the program stops (SIGTSTP), the
    launcher stops, too.
    """
    launcher = os.getpid()
    inherited = _inherited_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # If SIGCHLD was ignored, the kernel would discard the status.
    of_children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, of_children)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _die_with(launcher)
        os._exit(_become(command, added, inherited))
    _release_files()
    has_reached_group = _witness()
    while True:
        number = signal.sigwait(signal.valid_signals())
        if number == signal.SIGCHLD:
            status = _end_of(child)
            if status is not None:
                return status
        elif not (has_reached_group(number) or _is_outdated(number)):
            os.kill(child, number)


def _is_outdated(number: int) -> bool:
    """Return whether `number` is a SIGCONT after which the process group was stopped again.

    The program must not get such a SIGCONT. `_witness` does not recognise it, because the later
    stop has discarded the SIGCONT that was pending in the second process.
    """
    stops = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    return number == signal.SIGCONT and not stops.isdisjoint(signal.sigpending())


def _release_files() -> None:
    """Close all files but standard error, and leave the working directory.

    Otherwise, a pipe would stay open after the program has closed it, and the program could not
    unmount the directory.
    """
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    os.closerange(3, _MOST_DESCRIPTORS)


def _witness() -> Callable[[int], bool]:
    """Return a function that decides whether a signal was sent to the whole process group.

    The program has already received such a signal, so the launcher must not send it again. To find
    out, this function starts a second process in the group. The second process blocks all signals,
    so a signal to the whole group stays pending in it.
    """
    asked, question = os.pipe()
    answered, answer = os.pipe()
    if os.fork() == 0:
        os.close(question)
        while number := os.read(asked, 1):
            os.write(answer, b"yes" if signal.sigtimedwait(number, 0) else b"no")
        os._exit(0)
    os.close(asked)
    os.close(answer)

    def has_reached_group(number: int) -> bool:
        try:
            os.write(question, bytes([number]))
        except BrokenPipeError:  # the second process was killed
            return False
        return os.read(answered, 9) == b"yes"

    return has_reached_group


def _end_of(child: int) -> int | None:
    """Return the program's wait(2) status, or None if the program has not ended.

    If the program has stopped, this process stops, too, as a shell expects.
    """
    whose = -1 if os.getpid() == _FIRST else child
    while True:
        found, status = os.waitpid(whose, os.WUNTRACED | os.WNOHANG)
        if found == 0:
            return None
        if found != child:  # a process whose own parent had ended
            continue
        if not os.WIFSTOPPED(status):
            return status
        os.kill(os.getpid(), signal.SIGSTOP)


def _summary(socket: str, before: dict[str, Any] | None) -> str:
    """Return one line about what the daemon has done since its status `before`."""
    from kcache.dropin.compile_service import since, summary  # noqa: PLC0415

    about = sockets.status(socket)
    if about is None:
        return "no counts: the server has ended before the program"
    if before is None or before["process"] != about["process"]:
        return summary(about["counts"])
    return summary(since(before["counts"], about["counts"]))


def _end_server(socket: str) -> None:
    """End this launcher's daemon, and wait until it has written its counts and ended.

    Otherwise, the kernel would kill the daemon at the end of the container.
    """
    about = sockets.status(socket)
    if about is None or sockets.ask(socket, sockets.STOP) is None:
        return
    end = time.monotonic() + _END_TIMEOUT
    with suppress(ChildProcessError):
        while not os.waitpid(about["process"], os.WNOHANG)[0] and time.monotonic() < end:
            time.sleep(0.01)


def _die_of(number: int) -> None:
    """End this process by the signal `number`, which ended the program, but without a core dump."""
    import resource  # noqa: PLC0415

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)


def _die_with(launcher: int) -> None:
    """Let the kernel kill this process when the launcher ends; exit if the launcher has ended."""
    import ctypes  # noqa: PLC0415

    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_KILLED_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)
