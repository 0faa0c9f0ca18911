"""`kcache run` runs a program, and answers its NVRTC and nvcc compiles from the cache.

`kcache server` starts, stops and shows a server that all programs under `kcache run` share.
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
    """Return `path`, or raise an error if no recording can be written to it.

    This is checked here because the daemon, which writes the recording, would only log the error.
    """
    if path is not None:
        folder = os.path.dirname(os.path.abspath(path))
        if not (os.path.lexists(path) or os.access(folder, os.W_OK | os.X_OK)):
            raise click.BadParameter(f"expected a file in a writable folder, got {path!r}.")
        refuse_other_file(os.path.abspath(path))
    return path


@click.command(
    short_help="Run a program; answer NVRTC and nvcc from the cache.",
    context_settings={"allow_interspersed_args": False},
)
@flag("--stats", help="At the end, print one line with hits, misses and which programs compiled.")
@flag("--why", help="Print one line for each compile: a hit, or a miss and the reason for it.")
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

    When the program or one of its child processes loads NVRTC, it gets kcache's library instead.
    This library behaves like NVRTC, and calls the real NVRTC for everything that the cache can't
    answer. The program's exit status, signals and terminal are the same as without kcache.
    """
    if directory is not None:  # an unsafe directory is an error if the option names it
        with suppress(BackendError):
            open_directory(named_directory(directory), read_only=True)
    code = run_command(command, stats=stats, why=why, record=record, directory=directory)
    raise click.exceptions.Exit(code)


# -- server ----------------------------------------------------------------------------------------


def _path() -> str:
    """Return the path of the socket of the server for the current settings.

    Raises:
        DropinError: no server can run on this machine.
    """
    variables = env.current()
    try:
        return spawn.path_of(env.service(variables), variables)
    except OSError as error:
        raise DropinError(f"a server can't run here: {error}") from error


@click.group(short_help="Manage a server that all `kcache run` commands share.")
def server() -> None:
    """Start, stop or show one server that all your `kcache run` commands share.

    Without it, each `kcache run` starts its own server, which exits when the program ends. Programs
    that use the same server share the kernels in its memory and its compiles. A server belongs to
    one cache and one set of settings (the variables `KCACHE_...`). To stop or show a server, set
    the same variables as when you started it.
    """


@server.command()
def start() -> None:
    """Start a server, which runs until `kcache server stop`."""
    path = _path()
    problem = libraries.problem(env.current())
    if problem:
        raise DropinError(problem)
    load_settings(None)  # for its warnings about wrong settings: the server can't print any
    if sockets.status(path) is not None:
        raise DropinError("a server is already running")
    variables = env.of_service(env.current())
    try:
        logs = bool(variables.get(env.LOG))
        spawn.spawn(path, env.service(variables), variables, persistent=True, logs=logs)
    except OSError as error:
        raise DropinError(f"the server can't be started: {error}") from error
    if sockets.status(path) is None:
        raise DropinError("the server was started, but it has exited or does not answer")
    show(f"started: {path}")


@server.command()
def stop() -> None:
    """Stop the server, and the process that connects to remotes.

    Programs that use the server continue with the real NVRTC. The process that connects to remotes
    is started again when a program needs a remote.
    """
    remotes = remotes_socket(load_settings(None)[0])
    ended = [sockets.ask(path, sockets.STOP) for path in (_path(), remotes) if path is not None]
    if all(answer is None for answer in ended):
        raise DropinError("no server is running")
    show("stopped")


@server.command()
@json_option("object")
def status() -> None:
    """Show whether a server is running, what it has done, and how the remotes have answered."""
    about = sockets.status(_path())
    remotes = remote_status(load_settings(None)[0])
    if about is None and all(remote["breaker"] == "unknown" for remote in remotes):
        raise DropinError("no server is running")
    lines = [f"{address}: {counts}" for address, counts in remote_lines(remotes)]
    if about is not None:
        process = f"process {about['process']}, kcache {about['version']}"
        lines = [process, summary(about["counts"]), *lines]
    show("\n".join(lines), {**(about or {}), "remotes": remotes})
