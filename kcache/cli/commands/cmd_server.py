"""`kcache server`: keeps one server for all programs under `kcache run`."""

from __future__ import annotations

import click

from kcache.admin.info import remote_lines
from kcache.cli.app import Group
from kcache.cli.open_cache import load_settings
from kcache.cli.parameters import json_option
from kcache.cli.terminal import show
from kcache.daemons import sockets, spawn
from kcache.doctor.program_checks import missing
from kcache.dropin import run_environment as env
from kcache.dropin.compile_service import summary
from kcache.errors import DropinError
from kcache.kernels.tiers import remote_status, remotes_socket


def _path() -> str:
    """Return the socket of the service for programs with the present settings."""
    variables = env.current()
    try:
        return spawn.path_of(env.service(variables), variables)
    except OSError as error:
        raise DropinError(f"there can be no server: {error}") from error


@click.group(cls=Group, short_help="Keep one server for all programs under `kcache run`.")
def server() -> None:
    """Keep one server running, which every `kcache run` of yours uses.

    Without it, each `kcache run` starts its own server, which ends with the program. Programs that
    use one server share its memory and its compiles. Only programs with the same cache and settings
    (the variables `KCACHE_...`) use it, and only for them can it be shown and ended.
    """


@server.command()
def start() -> None:
    """Start a server. It runs until `kcache server stop`."""
    path = _path()
    problem = missing()
    if problem:
        raise DropinError(problem)
    load_settings(None)  # this warns, which the server can't do
    if sockets.status(path) is not None:
        raise DropinError("a server is running")
    variables = env.of_service(env.current())
    try:
        speaks = bool(variables.get(env.LOG))
        spawn.spawn(path, env.service(variables), variables, persistent=True, logs=speaks)
    except OSError as error:
        raise DropinError(f"no server was started: {error}") from error
    if sockets.status(path) is None:
        raise DropinError("the server was started, but it exited or does not answer")
    show(f"started: {path}")


@server.command()
def stop() -> None:
    """End the server, and the process that connects to remotes.

    Programs that use the server continue with the real NVRTC. That process is started again
    when a program asks a remote.
    """
    remotes = remotes_socket(load_settings(None)[0])
    ended = [sockets.ask(path, sockets.STOP) for path in (_path(), remotes) if path is not None]
    if all(answer is None for answer in ended):
        raise DropinError("no server is running")
    show("stopped")


@server.command()
@json_option("object")
def status(*, as_json: bool) -> None:
    """Show whether a server runs, what it has done, and how the remotes have answered."""
    about = sockets.status(_path())
    remotes = remote_status(load_settings(None)[0])
    if about is None and all(remote["breaker"] == "unknown" for remote in remotes):
        raise DropinError("no server is running")
    if as_json:
        show({**(about or {}), "remotes": remotes})
        return
    if about is not None:
        show(f"process {about['process']}, kcache {about['version']}")
        show(summary(about["counts"]))
    for address, counts in remote_lines(remotes):
        show(f"{address}: {counts}")
