"""`kcache compile`: one source file, from the cache or through NVRTC."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kcache.cli.compile_arguments import Asked, Source, compile_options
from kcache.cli.open_cache import directory_option, open_cache
from kcache.cli.output import OUTPUTS, refuse_terminal, write_output
from kcache.cli.terminal import STDOUT, counted, say, working
from kcache.errors import CompileError, ConfigError
from kcache.util.units import format_size, format_time

if TYPE_CHECKING:
    from kcache import CompiledKernel, CompileOptions, KernelCache, Stats

__all__ = ["compile_file"]


@click.command("compile", short_help="Compile a CUDA source file, or get it from the cache.")
@compile_options(
    output_help="The file to write, - for standard output.  [default: FILE with the suffix "
    "of what is written; standard output if FILE is -]"
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but warnings and errors.")
@directory_option
def compile_file(*, asked: Asked, quiet: bool, directory: str | None) -> None:
    """Compile FILE (- for standard input) with NVRTC, or get it from the cache.

    No GPU is needed. Headers in quotes are searched beside FILE first. FILE and its headers may
    later move to another folder: kcache compares their content, not their paths.
    """
    source = asked.source
    output = _output(source, asked.emit, asked.output)

    cache = open_cache(directory, disable=asked.no_cache or None, recache=asked.recache or None)
    with cache:
        started = time.perf_counter()
        # In the file's folder, so that headers are found and debug information leads where they
        # should, and the folder's path is no part of the request.
        with contextlib.chdir(source.folder or os.curdir):
            kernel = working(
                f"compiling {source.path} for {asked.options.target}",
                lambda: _get(cache, source, asked.names, asked.options),
            )
        seconds = time.perf_counter() - started
        if kernel.log:
            click.echo(kernel.log, err=True)
        size = _write(kernel, asked.emit, output)
        if not quiet:
            place = STDOUT if output == "-" else output
            say(f"{_outcome(kernel, seconds, cache.stats())} -> {place} ({format_size(size)})")
            for name, lowered in kernel.lowered_names.items():
                say(f"{name} is {lowered}")


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
    count = len(kernel.dependencies)
    headers = counted(count, "header", "headers")
    if kernel.cached:
        checked = f", {headers} verified" if count else ""
        saved = format_time(kernel.compile_seconds)
        return f"hit in {format_time(seconds)}{checked} (compiled once in {saved})"
    text = f"compiled in {format_time(seconds)}"
    if count:
        text += f", {headers}"
    if stats.uncacheable:
        text += ", not cached (KCACHE_LOG=debug says why)"
    return text
