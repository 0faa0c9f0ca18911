"""`kcache compile`: one source file, from the cache or through NVRTC."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from kcache import CompileOptions
from kcache.cli.cache import directory_option, open_cache
from kcache.cli.output import OUTPUTS, named_by_suffix, refuse_terminal, write_output
from kcache.cli.terminal import STDOUT, read_stdin, say, working
from kcache.errors import CompileError, ConfigError
from kcache.info import format_size, format_time
from kcache.nvrtc.options import parse_arch

if TYPE_CHECKING:
    from kcache import CompiledKernel, KernelCache, Stats

__all__ = ["compile_file"]

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


@click.command("compile", short_help="Compile a CUDA source file, or get it from the cache.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--arch", help="Target, such as sm_90, sm_90a or compute_90.  [default: this GPU's]")
@click.option("--std", help="C++ standard, such as c++17.")
@click.option(
    "-I",
    "--include-path",
    "include_paths",
    metavar="DIR",
    multiple=True,
    help="Look for headers in DIR.  [repeatable]",
)
@click.option(
    "-D",
    "--define",
    "defines",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Define a macro.  [repeatable]",
)
@click.option(
    "--name",
    "names",
    metavar="EXPR",
    multiple=True,
    help="Instantiate a kernel, such as 'axpy<float>'.  [repeatable]",
)
@click.option(
    "--emit",
    type=click.Choice(OUTPUTS),
    help="What to write.  [default: as the suffix of OUT says, else cubin; ptx for compute_NN]",
)
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    type=click.Path(),
    help="Where to write it, - for standard output.  [default: FILE with the suffix "
    "of what is written; standard output if FILE is -]",
)
@click.option("--fast-math", is_flag=True, help="Fast, less exact arithmetic.")
@click.option("-O", "--optimization", type=click.IntRange(0, 3), help="Level of the assembler.")
@click.option("--max-registers", type=click.IntRange(1), metavar="N", help="Registers per thread.")
@click.option("-G", "--debug", is_flag=True, help="Debug information.")
@click.option("--lineinfo", is_flag=True, help="Line numbers for profilers.")
@click.option(
    "--option",
    "extra_options",
    metavar="OPT",
    multiple=True,
    help="Any other NVRTC option, as in --option=-ftz=true.  [repeatable]",
)
@click.option("--no-cache", is_flag=True, help="Compile; neither read nor write the cache.")
@click.option("--recache", is_flag=True, help="Compile, and replace what is in the cache.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but warnings and errors.")
@directory_option
def compile_file(
    file: str,
    *,
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
    quiet: bool,
    directory: str | None,
) -> None:
    """Compile FILE (- for standard input) with NVRTC, or get it from the cache.

    No GPU is needed. Headers in quotes are looked for beside FILE first. The next time, FILE and
    its headers may be in another folder: what counts is what is in them.
    """
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
    output = _output(source, emit, output)

    cache = open_cache(directory, disable=no_cache or None, recache=recache or None)
    with cache:
        started = time.perf_counter()
        # In the file's folder, so that headers are found and debug information leads where they
        # should, and the folder's path is no part of the request.
        with contextlib.chdir(source.folder or os.curdir):
            kernel = working(
                f"compiling {source.path} for {options.target}",
                lambda: _get(cache, source, names, options),
            )
        seconds = time.perf_counter() - started
        if kernel.log:
            click.echo(kernel.log, err=True)
        size = _write(kernel, emit, output)
        if not quiet:
            place = STDOUT if output == "-" else output
            say(f"{_outcome(kernel, seconds, cache.stats())} -> {place} ({format_size(size)})")
            for name, lowered in kernel.lowered_names.items():
                say(f"{name} is {lowered}")


# -- before the compile --------------------------------------------------------------------------


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
    """Return what to write where nobody says so: what the output's suffix names, else the best."""
    named = named_by_suffix(output)
    if named is not None:
        return named
    return "ptx" if parse_arch(options.target or "").kind == "compute" else "cubin"


def _output(source: Source, emit: str, output: str | None) -> str:
    """Return the path to write to, or `-`."""
    if output is None:
        output = "-" if source.path == "-" else f"{os.path.splitext(source.path)[0]}.{emit}"
    if output == "-":
        refuse_terminal(emit)
    elif source.path != "-" and os.path.exists(output) and os.path.samefile(source.path, output):
        raise click.UsageError(f"-o {output} would overwrite the source.")
    return output


def _get(
    cache: KernelCache, source: Source, names: Sequence[str], options: CompileOptions
) -> CompiledKernel:
    try:
        return cache.get_or_compile(source.text, names, options, source_name=source.name)
    except CompileError as error:
        error.source_name = source.path
        raise


# -- after it ------------------------------------------------------------------------------------


def _write(kernel: CompiledKernel, emit: str, output: str) -> int:
    """Write one output of the kernel; return its size in bytes."""
    data: bytes | None = getattr(kernel, emit)
    if data is None:
        there = [name for name in OUTPUTS if getattr(kernel, name) is not None]
        raise ConfigError(
            f"--emit {emit}: this target has none; allowed: {', '.join(there) or 'nothing'}"
        )
    write_output(data, output)
    return len(data)


def _outcome(kernel: CompiledKernel, seconds: float, stats: Stats) -> str:
    headers = len(kernel.dependencies)
    if kernel.cached:
        checked = f", {headers} headers verified" if headers else ""
        saved = format_time(kernel.compile_seconds)
        return f"hit in {format_time(seconds)}{checked} (compiled once in {saved})"
    text = f"compiled in {format_time(seconds)}"
    if headers:
        text += f", {headers} headers"
    if stats.uncacheable:
        text += ", not cached (KCACHE_LOG=debug says why)"
    return text
