"""The source of a compile and the options beside it, for `kcache compile` and `kcache why`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import click

from kcache import CompileOptions
from kcache.cli.output import OUTPUTS, OutputPath, named_by_suffix
from kcache.cli.terminal import read_stdin
from kcache.errors import ConfigError
from kcache.nvrtc.options import parse_arch

__all__ = ["Asked", "Source", "compile_options"]

#: What the compiler calls a source that comes through a pipe, as other compilers do.
_STDIN_NAME = "<stdin>"


class Source(NamedTuple):
    """A source as it was named.

    Attributes:
        text: the text itself.
        name: what the compiler calls it: the last part of its path.
        folder: directory of the file, empty for the working directory.
        path: as the user wrote it; `-` for standard input.
    """

    text: str
    name: str
    folder: str
    path: str


class Asked(NamedTuple):
    """What a command line asks to compile.

    Attributes:
        source: the source.
        names: name expressions.
        options: with an architecture.
        emit: which output is meant.
        output: where it is wanted, as the user wrote it.
        no_cache: whether the cache is to be neither read nor written; likewise `recache`.
    """

    source: Source
    names: tuple[str, ...]
    options: CompileOptions
    emit: str
    output: str | None
    no_cache: bool
    recache: bool


def compile_options(
    *, output_help: str
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Give a command the argument FILE and the options of a compile, as one parameter `asked`.

    `output_help` is the help of `-o`.
    """

    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        # As `asked` takes them; the other options of the command come with it.
        @functools.wraps(function)
        def command(
            *,
            file: str,
            arch: str | None,
            std: str | None,
            include_paths: tuple[str, ...],
            defines: tuple[str, ...],
            names: tuple[str, ...],
            emit: str | None,
            output: str | None,
            fast_math: bool,
            optimization: int | None,
            max_registers: int | None,
            debug: bool,
            lineinfo: bool,
            extra_options: tuple[str, ...],
            no_cache: bool,
            recache: bool,
            **others: object,
        ) -> object:
            if no_cache and recache:
                raise click.UsageError("--no-cache and --recache exclude each other.")
            source = _read(file)
            options = CompileOptions(
                std=std,
                fast_math=fast_math,
                optimization=optimization,
                debug=debug,
                lineinfo=lineinfo,
                max_registers=max_registers,
                defines=defines,
                include_paths=_from_folder(source.folder, include_paths),
                extra_options=extra_options,
            )
            options = _with_target(options, arch)
            emit = emit or _emitted(options, output)
            options = options.replace(lto=emit == "ltoir")
            asked = Asked(source, names, options, emit, output, no_cache, recache)
            return function(asked=asked, **others)

        made: Callable[..., object] = command
        for option in _options(output_help):
            made = option(made)
        return made

    return decorate


def _options(output_help: str) -> list[Callable[[Callable[..., object]], Callable[..., object]]]:
    """Return the argument and the options, last one first, as decorators come."""
    option = click.option
    return [
        option("--recache", is_flag=True, help="Compile, and replace the entry in the cache."),
        option(
            "--no-cache", is_flag=True, help="Compile without the cache: neither read nor write it."
        ),
        option(
            "--option",
            "extra_options",
            metavar="OPT",
            multiple=True,
            help="Pass another option to NVRTC, as in --option=-ftz=true.  [repeatable]",
        ),
        option("--lineinfo", is_flag=True, help="Add line numbers for profilers."),
        option("-G", "--debug", is_flag=True, help="Add debug information."),
        option(
            "--max-registers",
            type=click.IntRange(1),
            metavar="N",
            help="Limit the registers per thread.",
        ),
        option(
            "-O",
            "--optimization",
            metavar="LEVEL",
            type=click.IntRange(0, 3),
            help="Optimization level of the assembler.",
        ),
        option("--fast-math", is_flag=True, help="Use fast, less exact arithmetic."),
        option("-o", "--output", metavar="OUT", type=OutputPath(), help=output_help),
        option(
            "--emit",
            type=click.Choice(OUTPUTS),
            help="The output to write.  [default: by the suffix of OUT, else cubin; ptx for "
            "compute_NN]",
        ),
        option(
            "--name",
            "names",
            metavar="EXPR",
            multiple=True,
            help="Instantiate a kernel, such as 'axpy<float>'.  [repeatable]",
        ),
        option(
            "-D",
            "--define",
            "defines",
            metavar="NAME[=VALUE]",
            multiple=True,
            help="Define a macro.  [repeatable]",
        ),
        option(
            "-I",
            "--include-path",
            "include_paths",
            metavar="DIR",
            multiple=True,
            help="Look for headers in DIR.  [repeatable]",
        ),
        option("--std", metavar="STD", help="C++ standard, such as c++17."),
        option(
            "--arch",
            metavar="ARCH",
            help="Target: sm_90 for machine code and PTX, compute_90 for PTX alone, sm_90a for "
            "code that only this architecture runs.  [default: this GPU's]",
        ),
        click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True)),
    ]


def _read(file: str) -> Source:
    if file == "-":
        raw, name, folder = read_stdin(), _STDIN_NAME, ""
    else:
        folder, name = os.path.split(file)
        with open(file, "rb") as stream:
            raw = stream.read()
    try:
        return Source(raw.decode(), name, folder, file)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not text: byte {error.start} is 0x{raw[error.start]:02x}; allowed: UTF-8"
        ) from error


def _from_folder(folder: str, paths: Sequence[str]) -> list[str]:
    """Return include directories as they are called from `folder`.

    Relative ones stay relative, so that they are the same in another checkout.
    """
    here = os.path.realpath(folder or os.curdir)
    if here == os.path.realpath(os.curdir):
        return list(paths)
    return [p if os.path.isabs(p) else os.path.relpath(os.path.realpath(p), here) for p in paths]


def _with_target(options: CompileOptions, arch: str | None) -> CompileOptions:
    if arch is not None:
        return options.replace(arch=arch)
    if options.target is not None:
        return options
    from kcache.nvrtc.device import current_arch

    try:
        return options.replace(arch=current_arch())
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        raise click.UsageError(f"{reason}. Pass --arch, such as --arch sm_90.") from None


def _emitted(options: CompileOptions, output: str | None) -> str:
    """Return the default output: what the suffix of the file names, else the best one."""
    named = named_by_suffix(output)
    if named is not None:
        return named
    return "ptx" if parse_arch(options.target or "").kind == "compute" else "cubin"
