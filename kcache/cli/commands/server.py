"""`kcache server`: keeps one server for all programs of a user."""

from __future__ import annotations

import sys

import click

from kcache.cli.groups import Group
from kcache.cli.open_cache import load_settings
from kcache.cli.options import json_option
from kcache.cli.terminal import show
from kcache.dropin import endpoint as at
from kcache.dropin import environment as env
from kcache.dropin import protocol
from kcache.errors import DropinError

__all__ = ["server"]


def _path() -> str:
    if sys.platform != "linux":
        raise DropinError("the drop-in needs Linux")
    return at.user_socket(env.runtime_folders(env.current()))


@click.group(cls=Group, short_help="Keep one server for all programs under `kcache run`.")
def server() -> None:
    """Keep one server running, which every `kcache run` of yours uses.

    Without it, each `kcache run` starts its own server, which ends with the program. Programs that
    use one server share its memory and its compiles. Only programs with the same cache and settings
    (the variables `KCACHE_...`) use it.
    """


@server.command()
def start() -> None:
    """Start a server. It runs until `kcache server stop`."""
    from kcache.dropin.process import spawn_server

    path = _path()
    load_settings(None)  # this warns, which the server can't do
    try:
        spawn_server(at.listen_for_user(path), None)
    except OSError as error:
        raise DropinError(f"no server was started: {error}") from error
    if at.status(path) is None:
        raise DropinError("the server was started, and ended or does not answer")
    show(f"started: {path}")


@server.command()
def stop() -> None:
    """End the server. Programs that use it continue with the real NVRTC."""
    if at.ask(_path(), protocol.STOP) is None:
        raise DropinError("no server is running")
    show("stopped")


@server.command()
@json_option("object")
def status(*, as_json: bool) -> None:
    """Tell whether a server runs, and what it has done."""
    from kcache.dropin.counts import summary

    about = at.status(_path())
    if about is None:
        raise DropinError("no server is running")
    if as_json:
        show(about)
    else:
        show(f"process {about['process']}, kcache {about['version']}")
        show(summary(about["counts"]))
