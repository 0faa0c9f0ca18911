"""App: finds a command by its name, runs it, and turns exceptions into exit codes."""

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

#: Exit codes. The last two are 128 plus the number of a signal (SIGINT, SIGPIPE), which is what a
#: shell reports if the signal ended the process.
FAILED = 1
USAGE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

#: The commands, grouped by purpose, in the order in which a newcomer needs them.
_GROUPS = {
    "Compile": ("demo", "compile", "run", "warm", "why"),
    "Look": ("stats", "ls", "show", "extract", "report", "path"),
    "Free space, and repair": ("trim", "rm", "clear", "verify"),
    "Share": ("bundle", "push", "key", "server"),
    "Set up": ("doctor", "config", "integrations", "migrate"),
}
#: Maps another name of a command to the command. The help does not list these names.
_ALIASES = {"info": "stats"}
#: Maps each command that is in another command's module to that other command. The rest of the
#: commands are in modules of their own names. A module is imported only when one of its commands is
#: run, or when the help lists all commands.
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
    """The command `kcache`. For an expected error, it prints one line instead of a traceback."""

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
        """Write the list of commands into the help text, with one section for each group."""
        width = max(map(len, self.commands))
        for title, names in _GROUPS.items():
            with formatter.section(title):
                commands = [(name, self.get_command(ctx, name)) for name in names]
                formatter.write_dl(
                    [(f"{name:<{width}}", str(each and each.short_help)) for name, each in commands]
                )

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. If its output is a closed pipe, exit with `PIPE_CLOSED`, silently."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _settle_stdout()
            raise click.exceptions.Exit(PIPE_CLOSED) from None

    def run(self, args: Sequence[str] | None = None) -> int:
        """Run the command line `args`, by default `sys.argv[1:]`, and return its exit code."""
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
            if error.__cause__ is None:  # interrupted at a question, whose line click has not ended
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
    """Print one line that describes `error`. For an OSError, it names the file."""
    message = " ".join(str(error).split())
    if isinstance(error, OSError) and not isinstance(error, KcacheError):
        name = error.filename  # may be the number of a descriptor, which is not shown
        where = f"{os.fsdecode(name)}: " if isinstance(name, (str, bytes, os.PathLike)) else ""
        message = f"{where}{error.strerror or error}"
    notify(f"error: {message}")


def _settle_stdout() -> None:
    """Write the buffered output, or discard it if that fails.

    Otherwise, Python would try to write it again at exit, and print another error.
    """
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

    Exit codes: 0 success; 1 failure (the source does not compile, the output can't be written,
    ...); 2 wrong usage or configuration; 130 interrupted.
    """
