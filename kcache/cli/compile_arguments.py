"""Compile arguments: the source and the options of `kcache compile` and `kcache why`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

from kcache import CompileOptions
from kcache.cli.options import flag, repeatable
from kcache.cli.terminal import OUTPUTS, OutputPath, named_by_suffix, read_stdin, say
from kcache.errors import ConfigError
from kcache.kernels.kernel_list import as_text, seen_from
from kcache.nvrtc.options import parse_arch

#: The name of a source that comes through a pipe, as in other compilers.
_STDIN_NAME = "<stdin>"


class Source(NamedTuple):
    """A source as it was named.

    Attributes:
        text: the text itself.
        name: its name for the compiler: the last part of its path.
        folder: directory of the file, empty for the working directory.
        path: as the user wrote it; `-` for standard input.
    """

    text: str
    name: str
    folder: str
    path: str


class CompileArguments(NamedTuple):
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
    """Give a command the argument FILE... and the options of a compile, as one parameter `asked`.

    `asked` is a list: each file for each architecture. `output_help` is the help of `-o`.
    """

    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        # The arguments as `asked` takes them, with the command's other options.
        @functools.wraps(function)
        def command(
            *,
            file: tuple[str, ...],
            arch: tuple[str, ...],
            cuda_headers: bool,
            names: tuple[str, ...],
            emit: str | None,
            cubin: bool,
            ptx: bool,
            output: str | None,
            no_cache: bool,
            recache: bool,
            **others: object,
        ) -> object:
            if no_cache and recache:
                raise click.UsageError("--no-cache and --recache exclude each other.")
            given: dict[str, Any] = {name: others.pop(name) for name in _OF_THE_COMPILER}
            include_paths = given.pop("include_paths")
            wanted = emit or ("cubin" if cubin else "ptx" if ptx else None)
            _warn_of_missing(include_paths)
            include_paths += _cuda_headers() if cuda_headers else ()
            found: list[CompileArguments] = []
            for path in file:
                source = _read(path)
                # Relative ones stay relative, so that they are the same in another checkout.
                here = source.folder or os.curdir
                paths = [seen_from(here, os.curdir, path) for path in include_paths]
                general = CompileOptions(include_paths=paths, **given)
                for target in dict.fromkeys(arch) or (None,):
                    options = _with_target(general, target)
                    kind = wanted or _emitted(options, output)
                    options = options.replace(lto=kind == "ltoir")
                    found.append(
                        CompileArguments(source, names, options, kind, output, no_cache, recache)
                    )
            return function(asked=found, **others)

        made: Callable[..., object] = command
        written = click.option("-o", "--output", metavar="OUT", type=OutputPath(), help=output_help)
        for option in reversed((*_POSITIONAL, written, *_OPTIONS)):
            made = option(made)
        return made

    return decorate


_POSITIONAL = (
    click.argument(
        "file",
        nargs=-1,
        required=True,
        type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    ),
    click.option(
        *("--arch", "-arch", "--gpu-architecture"),
        metavar="ARCH",
        multiple=True,
        help="Target: sm_90 for machine code and PTX, compute_90 for PTX alone, sm_90a for "
        "code that only this architecture runs, native for this GPU.  [default: native; "
        "repeatable]",
    ),
)
#: The parameters that are fields of `CompileOptions`.
_OF_THE_COMPILER = tuple(each for each in CompileOptions._fields if each not in ("arch", "lto"))
_OPTIONS = (
    click.option("--std", "-std", metavar="STD", help="C++ standard, such as c++17."),
    repeatable(
        "-I", "--include-path", "include_paths", metavar="DIR", help="Look for headers in DIR."
    ),
    flag(
        "--cuda-headers",
        help="Look for headers in the directories of the installed CUDA headers, too.",
    ),
    repeatable("-D", "--define", "defines", metavar="NAME[=VALUE]", help="Define a macro."),
    repeatable(
        "--name", "names", metavar="EXPR", help="Instantiate a kernel, such as 'axpy<float>'."
    ),
    click.option(
        "--emit",
        type=click.Choice(OUTPUTS),
        help="The output to write.  [default: by the suffix of OUT, else cubin; ptx for "
        "compute_NN]",
    ),
    flag("-cubin", "--cubin", help="The same as --emit cubin."),
    flag("-ptx", "--ptx", help="The same as --emit ptx."),
    flag(
        "--fast-math", "-use_fast_math", "--use_fast_math", help="Use fast, less exact arithmetic."
    ),
    click.option(
        "-O",
        "--optimization",
        metavar="LEVEL",
        type=click.IntRange(0, 3),
        help="Optimization level of the assembler.",
    ),
    click.option(
        *("--max-registers", "-maxrregcount", "--maxrregcount"),
        type=click.IntRange(1),
        metavar="N",
        help="Limit the registers per thread.",
    ),
    flag("-G", "--debug", "--device-debug", help="Add debug information."),
    flag(
        *("--lineinfo", "-lineinfo", "--generate-line-info"),
        help="Add line numbers for profilers.",
    ),
    repeatable(
        "--option",
        "extra_options",
        metavar="OPT",
        help="Pass another option to NVRTC, as in --option=-ftz=true.",
    ),
    flag("--no-cache", help="Compile without the cache: neither read nor write it."),
    flag("--recache", help="Compile, and replace the entry in the cache."),
)


def _warn_of_missing(include_paths: Sequence[str]) -> None:
    """Warn of include directories that are not there, because NVRTC doesn't."""
    for path in include_paths:
        if not os.path.isdir(path):
            say(f"warning: the include directory {path} does not exist")


def _cuda_headers() -> tuple[str, ...]:
    from kcache.nvrtc.cuda_headers import include_paths

    found = include_paths()
    if not found:
        packages = "nvidia-cuda-runtime nvidia-cuda-cccl (CUDA 12: each with -cu12)"
        raise ConfigError(f"no CUDA headers are installed: pip install {packages}")
    return found


def _read(file: str) -> Source:
    folder, name = os.path.split(file)
    if file == "-":
        return Source(as_text(file, read_stdin()), _STDIN_NAME, folder, file)
    with open(file, "rb") as stream:
        return Source(as_text(file, stream.read()), name, folder, file)


def _with_target(options: CompileOptions, arch: str | None) -> CompileOptions:
    if arch is not None and arch != "native":
        return options.replace(arch=arch)
    if options.target is not None and arch is None:
        return options
    from kcache.util.cuda_driver import current_arch

    try:
        return options.replace(arch=current_arch())
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        raise click.UsageError(f"{reason}. Pass --arch, such as --arch sm_90.") from None


def _emitted(options: CompileOptions, output: str | None) -> str:
    """Return the default output: the one that the file's suffix names, otherwise the best."""
    named = named_by_suffix(output)
    if named is not None:
        return named
    return "ptx" if parse_arch(options.target or "").kind == "compute" else "cubin"
