"""`kcache compile`: gets one source file from the cache, or compiles it by NVRTC."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kcache.cli.compile_arguments import CompileArguments, Source, compile_options
from kcache.cli.open_cache import open_cache
from kcache.cli.options import directory_option, flag, json_option
from kcache.cli.terminal import (
    OUTPUTS,
    STDOUT,
    interruptible,
    progress,
    refuse_terminal,
    say,
    show,
    show_log,
    write_output,
)
from kcache.errors import CompileError, ConfigError
from kcache.util.gpu_code import kernels_in
from kcache.util.units import counted, format_size, format_time

if TYPE_CHECKING:
    from kcache import CompiledKernel, KernelCache


@click.command("compile", short_help="Compile CUDA source files, or get them from the cache.")
@compile_options(
    output_help="The file to write, - for standard output; for several results, a directory.  "
    "[default: the name of FILE with the suffix of what is written, in the working directory; "
    "standard output if FILE is -]",
)
@flag("-q", "--quiet", help="Say nothing but warnings and errors.")
@json_option("array")
@directory_option
def compile_file(
    *, asked: list[CompileArguments], quiet: bool, as_json: bool, directory: str | None
) -> None:
    """Compile each FILE (- for standard input) with NVRTC, or get it from the cache.

    Several files and several architectures may be named: each file is compiled for each. No GPU is
    needed. Headers in quotes are searched beside FILE first. FILE and its headers may later move to
    another folder: kcache compares their content, not their paths. Options of nvcc with the same
    meaning work, too, such as -arch=sm_90 and -std=c++17.
    """
    outputs = _outputs(asked)
    if as_json and "-" in outputs:
        raise click.UsageError("--json and an output on standard output exclude each other.")
    first = asked[0]
    told: list[dict[str, object]] = []
    cache = open_cache(directory, disable=first.no_cache or None, recache=first.recache or None)
    failed: CompileError | None = None
    with cache:
        for each, output in zip(asked, outputs, strict=True):
            about: dict[str, object] = {
                "source": each.source.path,
                "arch": each.options.target,
                "names": [*each.names],
            }
            try:
                told.append(about | _compile(cache, each, output, quiet=quiet or as_json))
            except CompileError as error:
                told.append(about | {"log": error.log, "error": str(error)})
                if len(asked) == 1 and not as_json:
                    raise
                failed = failed or error
                show_log(error.log or str(error))
                what = f"{each.source.path} does not compile for {each.options.target}"
                say(f"error: {what}" + (error.hint and f": {error.hint}"))
    if as_json:
        show(told)
    if failed is not None:
        raise click.exceptions.Exit(1)


def _compile(
    cache: KernelCache, asked: CompileArguments, output: str, *, quiet: bool
) -> dict[str, object]:
    """Compile one source for one target and write the output; return the outcome."""
    source = asked.source
    uncacheable = cache.stats().uncacheable
    started = time.perf_counter()
    # The compile runs in the file's folder. So the compiler finds the headers, debug information
    # has the right paths, and the folder's path is no part of the request.
    try:
        title = f"compiling {source.path} for {asked.options.target}"
        with contextlib.chdir(source.folder or os.curdir), interruptible(), progress(title):
            kernel = cache.get_or_compile(
                source.text, asked.names, asked.options, source_name=source.name
            )
    except CompileError as error:
        error.source_name, error.log = source.path, _as_typed(error.log, source)
        raise
    seconds = time.perf_counter() - started
    if kernel.log:
        show_log(_as_typed(kernel.log, source))
    templates = kernels_in(source.text)
    if templates and asked.emit != "ltoir" and not kernel.functions():
        instance = f"{templates[0]}<float>"
        say(f"warning: no kernel in it: name an instance of a template, as in --name '{instance}'")
    size = _write(kernel, asked.emit, output)
    stored = cache.stats().uncacheable == uncacheable
    if not quiet:
        shown = STDOUT if output == "-" else output
        say(f"{_outcome(kernel, seconds, stored=stored)} -> {shown} ({format_size(size)})")
        for name, lowered in kernel.lowered_names.items():
            say(f"{name} is {lowered}")
    return {
        "output": output,
        "emit": asked.emit,
        "size_bytes": size,
        "cached": kernel.cached,
        "stored": stored,
        "seconds": seconds,
        "compile_seconds": kernel.compile_seconds,
        "headers": len(kernel.dependencies),
        "lowered_names": dict(kernel.lowered_names),
        "log": _as_typed(kernel.log, source),
        "error": None,
    }


def _outputs(asked: Sequence[CompileArguments]) -> list[str]:
    """Return the path to write each result to, or `-`.

    Raises:
        UsageError: two results would be written to one file.
    """
    given = asked[0].output
    folder = ""
    if len(asked) > 1 and given is not None:
        if not os.path.isdir(given):
            raise click.UsageError(f"-o {given} is no directory, and there are several results.")
        folder, given = given, None
    targets = {each.options.target for each in asked}
    found: dict[str, str] = {}
    for each in asked:
        output = _output(each, folder, given, named=len(targets) > 1)
        if output in found:
            raise click.UsageError(f"{found[output]} and {each.source.path} both make {output}.")
        found[output] = each.source.path
    return list(found)


def _output(asked: CompileArguments, folder: str, output: str | None, *, named: bool) -> str:
    """Return the path to write one result to, where nvcc would put it, or `-`."""
    source, emit = asked.source, asked.emit
    if output is None:
        base = os.path.splitext(os.path.basename(source.path))[0]
        middle = f".{asked.options.target}" if named else ""
        output = "-" if source.path == "-" else os.path.join(folder, f"{base}{middle}.{emit}")
    if output == "-":
        refuse_terminal(emit)
    elif source.path != "-" and os.path.exists(output) and os.path.samefile(source.path, output):
        raise click.UsageError(f"-o {output} would overwrite the source.")
    return output


#: Matches a line of the compiler's log that begins with a position: a file and a line.
_POSITION = re.compile(r"^([^\s(][^(\n]*)(?=\(\d+\): )", re.MULTILINE)


def _as_typed(log: str, source: Source) -> str:
    """Return a log with paths from the working directory, so that editors jump there.

    The compiler ran in the source's folder.
    """
    if not source.folder:
        return log

    def path(found: re.Match[str]) -> str:
        if found[1] == source.name:
            return source.path
        there = os.path.join(source.folder, found[1])
        return os.path.relpath(there) if os.path.exists(there) else found[1]

    return _POSITION.sub(path, log)


# -- after the compile -----------------------------------------------------------------------------


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


def _outcome(kernel: CompiledKernel, seconds: float, *, stored: bool) -> str:
    count = len(kernel.dependencies)
    headers = counted(count, "header")
    if kernel.cached:
        checked = f", {headers} verified" if count else ""
        saved = format_time(kernel.compile_seconds)
        return f"hit in {format_time(seconds)}{checked} (compiled once in {saved})"
    text = f"compiled in {format_time(seconds)}"
    if count:
        text += f", {headers}"
    if not stored:
        text += ", not cached (KCACHE_LOG=debug says why)"
    return text
