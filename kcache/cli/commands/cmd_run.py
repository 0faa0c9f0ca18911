"""`kcache run` runs a program, and answers its NVRTC and nvcc compiles from the cache.

`kcache server` keeps one server for all programs under `kcache run`.
"""

from __future__ import annotations

import os
from contextlib import suppress

import click

from kcache.admin.info import remote_lines
from kcache.cli.options import directory_option, flag, json_option, load_settings, named_directory
from kcache.cli.terminal import show
from kcache.daemons import sockets, spawn
from kcache.directory import open_directory
from kcache.dropin import libraries
from kcache.dropin import run_environment as env
from kcache.dropin.compile_service import summary
from kcache.dropin.run import run as run_command
from kcache.errors import BackendError, DropinError
from kcache.kernels.remotes import remote_status, remotes_socket
from kcache.warm.recording import refuse_other_file


def _recording(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Refuse a file that can't be recorded into. The daemon would only log that."""
    if path is not None:
        folder = os.path.dirname(os.path.abspath(path))
        if not (os.path.lexists(path) or os.access(folder, os.W_OK | os.X_OK)):
            raise click.BadParameter(f"{path!r} can't be written; expected a writable file.")
        refuse_other_file(os.path.abspath(path))
    return path


@click.command(
    short_help="Run a program; answer NVRTC and nvcc from the cache.",
    context_settings={"allow_interspersed_args": False},
)
@flag("--stats", help="At the end, print one line: hits, misses and which programs compiled.")
@flag("--why", help="For each compile, print one line: a hit, or the reason for a miss.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, writable=True),
    callback=_recording,
    metavar="LIST",
    help="Record every requested kernel in the file LIST, for kcache warm.",
)
@directory_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    *, stats: bool, why: bool, record: str | None, directory: str | None, command: tuple[str, ...]
) -> None:
    """Run COMMAND, and answer its NVRTC and nvcc compiles from the cache.

    When the program or one of its child processes looks for NVRTC, it finds kcache's library. This
    library behaves like NVRTC, and calls the real NVRTC for everything that the cache can't answer.
    The program keeps its exit status, its signals and its terminal.
    """
    if directory is not None:  # a wrong value of an option is an error
        with suppress(BackendError):
            open_directory(named_directory(directory), read_only=True)
    code = run_command(command, stats=stats, why=why, record=record, directory=directory)
    raise click.exceptions.Exit(code)


# -- server ----------------------------------------------------------------------------------------


def _path() -> str:
    """Return the socket of the daemon for programs with the present settings."""
    variables = env.current()
    try:
        return spawn.path_of(env.service(variables), variables)
    except OSError as error:
        raise DropinError(f"there can be no server: {error}") from error


@click.group(short_help="Keep one server for all programs under `kcache run`.")
def server() -> None:
    """Keep one server running, which every `kcache run` of yours uses.

    Without it, each `kcache run` starts its own server, which ends with the program. Programs that
    use the same server share its memory and its compiles. A server is for one cache and one set of
    settings (the variables `KCACHE_...`). To show or stop a server, set the same variables.
    """


@server.command()
def start() -> None:
    """Start a server. It runs until `kcache server stop`."""
    path = _path()
    problem = libraries.problem(env.current())
    if problem:
        raise DropinError(problem)
    load_settings(None)  # this warns of wrong settings, which the daemon can't do
    if sockets.status(path) is not None:
        raise DropinError("a server is running")
    variables = env.of_service(env.current())
    try:
        logs = bool(variables.get(env.LOG))
        spawn.spawn(path, env.service(variables), variables, persistent=True, logs=logs)
    except OSError as error:
        raise DropinError(f"no server was started: {error}") from error
    if sockets.status(path) is None:
        raise DropinError("the server was started, but it exited or does not answer")
    show(f"started: {path}")


@server.command()
def stop() -> None:
    """End the server, and the process that connects to remotes.

    Programs that use the server continue with the real NVRTC. The process that connects to remotes
    is started again when a program asks a remote.
    """
    remotes = remotes_socket(load_settings(None)[0])
    ended = [sockets.ask(path, sockets.STOP) for path in (_path(), remotes) if path is not None]
    if all(answer is None for answer in ended):
        raise DropinError("no server is running")
    show("stopped")


@server.command()
@json_option("object")
def status() -> None:
    """Show whether a server runs, what it has done, and how the remotes have answered."""
    about = sockets.status(_path())
    remotes = remote_status(load_settings(None)[0])
    if about is None and all(remote["breaker"] == "unknown" for remote in remotes):
        raise DropinError("no server is running")
    lines = [f"{address}: {counts}" for address, counts in remote_lines(remotes)]
    if about is not None:
        process = f"process {about['process']}, kcache {about['version']}"
        lines = [process, summary(about["counts"]), *lines]
    show("\n".join(lines), {**(about or {}), "remotes": remotes})
