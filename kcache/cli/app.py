"""App: finds each command by its name, and turns what it raises into an exit code."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from kcache._version import __version__
from kcache.cli.terminal import notify
from kcache.errors import CompilerNotFoundError, ConfigError, KcacheError, UnknownBackendError
from kcache.util.log import log_to_stderr

#: Exit codes. If a signal ended a process, a shell reports 128 plus the signal's number.
FAILED = 1
USAGE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

#: The commands by their purpose, in the order in which a newcomer needs them.
_GROUPS = {
    "Compile": ("demo", "compile", "run", "warm", "why"),
    "Look": ("stats", "ls", "show", "extract", "report", "path"),
    "Free space, and repair": ("trim", "rm", "clear", "verify"),
    "Share": ("bundle", "push", "key", "server"),
    "Set up": ("doctor", "config", "integrations", "migrate"),
}
#: Other names for a command, which the help does not list.
_ALIASES = {"info": "stats"}
#: The modules that several commands share. Other commands have a module of their name. A module is
#: imported only when its command is run, or listed in the help.
_SHARED = {
    **dict.fromkeys(("show", "extract"), "ls"),
    **dict.fromkeys(("trim", "clear", "verify"), "rm"),
    **dict.fromkeys(("path", "migrate"), "config"),
    **dict.fromkeys(("push", "key"), "bundle"),
    "stats": "report",
    "integrations": "doctor",
    "server": "run",
}


class App(click.Group):
    """The command `kcache`. An expected error prints one line, not a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of `_GROUPS`."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or None if no command has that name."""
        name = _ALIASES.get(cmd_name, cmd_name)
        if name not in self.commands:
            return None
        module = importlib.import_module(f"kcache.cli.commands.cmd_{_SHARED.get(name, name)}")
        commands = (each for each in vars(module).values() if isinstance(each, click.Command))
        return next((each for each in commands if each.name == name), None)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each group."""
        width = max(map(len, self.commands))
        for title, names in _GROUPS.items():
            with formatter.section(title):
                commands = [(name, self.get_command(ctx, name)) for name in names]
                formatter.write_dl(
                    [(f"{name:<{width}}", str(each and each.short_help)) for name, each in commands]
                )

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; it ends quietly if the reader of its output has gone."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _settle_stdout()
            raise click.exceptions.Exit(PIPE_CLOSED) from None

    def run(self, args: Sequence[str] | None = None) -> int:
        """Run a command line, by default the process's own; return its exit code."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a path may hold any bytes
        log_to_stderr("warning")
        try:
            code: object = self.main(args, "kcache", standalone_mode=False)
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except click.Abort as error:
            interrupted = isinstance(error.__cause__ or error.__context__, KeyboardInterrupt)
            if error.__cause__ is None:  # at a question; in other cases, click ends the line
                click.echo(err=True)
            return INTERRUPTED if interrupted else FAILED
        except (KcacheError, OSError) as error:
            with suppress(OSError):
                _explain(error)
            _settle_stdout()
            usage = (ConfigError, UnknownBackendError, CompilerNotFoundError)
            return USAGE if isinstance(error, usage) else FAILED
        return code if isinstance(code, int) else 0


def _explain(error: KcacheError | OSError) -> None:
    """Print what went wrong in one line."""
    message = " ".join(str(error).split())
    if isinstance(error, OSError) and not isinstance(error, KcacheError):
        name = error.filename  # a descriptor's number is not a name
        where = f"{os.fsdecode(name)}: " if isinstance(name, (str, bytes, os.PathLike)) else ""
        message = f"{where}{error.strerror or error}"
    notify(f"error: {message}")


def _settle_stdout() -> None:
    """Write what is buffered, or discard it: else Python tries again at exit, and complains."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        return
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


@click.group(
    cls=App,
    commands=dict.fromkeys(name for names in _GROUPS.values() for name in names),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(
    __version__, "-V", "--version", prog_name="kcache", message="%(prog)s %(version)s"
)
def app() -> None:
    """Compile CUDA kernels once: a cache for the outputs of NVRTC and nvcc.

    Exit codes: 0 done; 1 it failed (the source does not compile, the output can't be written, ...);
    2 wrong usage or configuration; 130 interrupted.
    """
