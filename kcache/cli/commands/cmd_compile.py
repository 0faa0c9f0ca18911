"""`kcache compile`: gets kernels from the cache, or compiles them with NVRTC.

`kcache why` takes the same arguments.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from kcache import CompiledKernel, CompileOptions, KernelCache
from kcache.cli.options import cache_options, flag, open_cache, options, output_option, repeatable
from kcache.cli.terminal import (
    OUTPUTS,
    interruptible,
    named_by_suffix,
    notify,
    progress,
    read_stdin,
    refuse_terminal,
    show,
    show_log,
    wants_json,
    write_output,
)
from kcache.errors import CompileError, ConfigError
from kcache.kernels.resolver import warn_if_empty
from kcache.nvrtc import cuda_headers as installed_headers
from kcache.nvrtc.options import parse_arch
from kcache.nvrtc.request import as_text
from kcache.util.cuda_driver import current_arch
from kcache.util.units import counted, format_size, format_time
from kcache.warm.kernel_list import seen_from

#: The compiler's name for a source from standard input; other compilers use the same name.
_STDIN_NAME = "<stdin>"


class Job(NamedTuple):
    """A source that a command line asks to compile, for one target.

    Attributes:
        path: path of the file as the user wrote it, or `-` for standard input.
        folder: directory of the file; empty if it is the working directory.
        source_name: the source's name for the compiler, which is the last part of its path.
        source: the text of the source.
        names: the name expressions.
        options: the options of the compile, including the architecture.
        emit: the output to write, one of `OUTPUTS`.
        output: the value of the option `--output`, or None.
    """

    path: str
    folder: str
    source_name: str
    source: str
    names: tuple[str, ...]
    options: CompileOptions
    emit: str
    output: str | None


#: The argument FILE... and the options of a compile: the arguments of `jobs_of`.
compile_options = options(
    click.argument(
        "file",
        nargs=-1,
        required=True,
        type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    ),
    output_option(
        "; for several results, an existing directory.  [default: a file in the working directory "
        "with the name of FILE and the suffix of the output, such as axpy.cubin; standard output "
        "if FILE is -]  `kcache why` accepts this option and ignores it."
    ),
    click.option(
        *("--arch", "-arch", "--gpu-architecture"),
        metavar="ARCH",
        multiple=True,
        help="Target, such as sm_90 (machine code and PTX), compute_90 (PTX only), sm_90a (code "
        "that only this architecture can run) or native (this machine's GPU).  [default: native; "
        "repeatable]",
    ),
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
        "--name", "names", metavar="EXPR", help="Instantiate kernel EXPR, such as 'axpy<float>'."
    ),
    click.option(
        "--emit",
        type=click.Choice(OUTPUTS),
        help="The output to write.  [default: the one that the suffix of OUT names; else ptx for "
        "compute_NN and cubin for any other target]",
    ),
    click.option("-cubin", "--cubin", "emit", flag_value="cubin", help="Same as --emit cubin."),
    click.option("-ptx", "--ptx", "emit", flag_value="ptx", help="Same as --emit ptx."),
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
        *("--lineinfo", "-lineinfo", "--generate-line-info"), help="Add line numbers for profilers."
    ),
    repeatable(
        "--option",
        "extra_options",
        metavar="OPT",
        help="Pass another option to NVRTC, as in --option=-ftz=true.",
    ),
    flag("--no-cache", help="Compile without reading or writing the cache."),
    flag("--recache", help="Compile even if the cache has the kernel, and replace its entry."),
)


def jobs_of(
    *,
    file: tuple[str, ...],
    arch: tuple[str, ...],
    cuda_headers: bool,
    names: tuple[str, ...],
    emit: str | None,
    output: str | None,
    no_cache: bool,
    recache: bool,
    include_paths: tuple[str, ...],
    **given: Any,  # noqa: ANN401  the other fields of `CompileOptions`
) -> list[Job]:
    """Return one job for each file and each architecture that a command line names.

    Raises:
        UsageError: two options contradict each other, or `--arch` is missing and this machine has
            no GPU.
        ConfigError: `--cuda-headers` was given and no CUDA headers are installed.
        OSError: a file can't be read.
    """
    if no_cache and recache:
        raise click.UsageError("--no-cache and --recache can't be combined.")
    for path in include_paths:
        if not os.path.isdir(path):  # NVRTC would ignore it without a warning
            notify(f"warning: the include directory {path} does not exist")
    include_paths += _cuda_headers() if cuda_headers else ()
    found: list[Job] = []
    for path in file:
        folder, name = os.path.split(path)
        text = as_text(path, read_stdin() if path == "-" else Path(path).read_bytes())
        # Relative paths stay relative, so that they are the same in another checkout.
        paths = [seen_from(folder or os.curdir, os.curdir, each) for each in include_paths]
        general = CompileOptions(include_paths=paths, **given)
        for target in dict.fromkeys(arch) or (None,):
            options = _with_target(general, target)
            kind = emit or named_by_suffix(output) or _best_output(options)
            options = options.replace(lto=kind == "ltoir")
            name = _STDIN_NAME if path == "-" else name
            found.append(Job(path, folder, name, text, names, options, kind, output))
    return found


def _cuda_headers() -> tuple[str, ...]:
    found = installed_headers.include_paths()
    if not found:
        packages = "nvidia-cuda-runtime nvidia-cuda-cccl (for CUDA 12, append -cu12 to both names)"
        raise ConfigError(f"no CUDA headers are installed: pip install {packages}")
    return found


def _with_target(options: CompileOptions, arch: str | None) -> CompileOptions:
    if arch is not None and arch != "native":
        return options.replace(arch=arch)
    if options.target is not None and arch is None:
        return options
    try:
        return options.replace(arch=current_arch())
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        raise click.UsageError(f"{reason}. Pass --arch, such as --arch sm_90.") from None


def _best_output(options: CompileOptions) -> str:
    return "ptx" if parse_arch(options.target or "").startswith("compute") else "cubin"


# -- the command -----------------------------------------------------------------------------------


@click.command("compile", short_help="Compile CUDA source files, or get them from the cache.")
@compile_options
@flag("-q", "--quiet", help="Print only warnings and errors.")
@cache_options("array")
def compile_file(*, quiet: bool, directory: str | None, **given: Any) -> None:  # noqa: ANN401
    """Compile each FILE (- for standard input) with NVRTC, or get its output from the cache.

    If several files and several architectures are given, each file is compiled for each
    architecture. No GPU is needed. A header whose name is in quotes is first searched for in the
    directory of FILE. FILE and its headers may later be moved to another directory, because kcache
    compares their contents, not their paths. The nvcc spellings of these options work, too, such as
    -arch=sm_90 and -std=c++17.
    """
    jobs, as_json = jobs_of(**given), wants_json()
    outputs = _outputs(jobs)
    if as_json and "-" in outputs:
        raise click.UsageError("--json can't be combined with an output on standard output.")
    results: list[dict[str, object]] = []
    disable, recache = given["no_cache"] or None, given["recache"] or None
    code = 0
    with open_cache(directory, disable=disable, recache=recache) as cache:
        for job, output in zip(jobs, outputs, strict=True):
            about: dict[str, object] = {
                "source": job.path,
                "arch": job.options.target,
                "names": [*job.names],
            }
            try:
                results.append(about | _compile(cache, job, output, quiet=quiet or as_json))
            except CompileError as error:
                code = 2 if isinstance(error, ConfigError) else 1
                results.append(about | {"log": error.log, "error": str(error)})
                what = str(error).partition("\n")[0]
                if error.log:
                    show_log(error.log)
                    if code == 1:
                        what = f"{job.path} does not compile for {job.options.target}"
                        what += error.hint and f": {error.hint}"
                notify(f"error: {what}")
    show("", results)
    raise click.exceptions.Exit(code)


def _compile(cache: KernelCache, job: Job, output: str, *, quiet: bool) -> dict[str, object]:
    """Compile one job, or get it from the cache, and write its output; return the JSON record."""
    uncacheable = cache.stats().uncacheable
    started = time.perf_counter()
    # The compile runs in the file's folder, so that the compiler finds the headers, debug
    # information has the right paths, and the folder's path is not part of the request.
    try:
        title = f"compiling {job.path} for {job.options.target}"
        with contextlib.chdir(job.folder or os.curdir), interruptible(), progress(title):
            kernel = cache.get_or_compile(
                job.source, job.names, job.options, source_name=job.source_name
            )
    except CompileError as error:
        error.log = _as_typed(error.log, job)
        raise
    seconds = time.perf_counter() - started
    log = _as_typed(kernel.log, job)
    if log:
        show_log(log)
    warn_if_empty(kernel, job.source, job.source_name)
    data: bytes | None = getattr(kernel, job.emit)
    if data is None:
        there = ", ".join(name for name in OUTPUTS if getattr(kernel, name) is not None)
        expected = f"expected {there or 'nothing'} for {job.options.target}"
        raise ConfigError(f"--emit: {expected}, got {job.emit}")
    shown = write_output(data, output)
    stored = cache.stats().uncacheable == uncacheable
    if not quiet:
        notify(f"{_sentence(kernel, seconds, stored=stored)} -> {shown} ({format_size(len(data))})")
        for name, lowered in kernel.lowered_names.items():
            notify(f"{name} is {lowered}")
    return {
        "output": output,
        "emit": job.emit,
        "size_bytes": len(data),
        "cached": kernel.cached,
        "stored": stored,
        "seconds": seconds,
        "compile_seconds": kernel.compile_seconds,
        "headers": len(kernel.dependencies),
        "lowered_names": dict(kernel.lowered_names),
        "log": log,
        "error": None,
    }


def _outputs(jobs: Sequence[Job]) -> list[str]:
    """Return the path of the output file of each job, or `-` for standard output.

    Raises:
        UsageError: several results can't be written to one file, an output would overwrite its
            source, or binary output would be written to a terminal.
    """
    given, several = jobs[0].output, len(jobs) > 1
    if several and given is not None and not os.path.isdir(given):
        raise click.UsageError(f"-o: expected a directory for several results, got {given!r}.")
    targets = {job.options.target for job in jobs}
    found: dict[str, str] = {}
    for job in jobs:
        output = given
        if several or output is None:  # the name that nvcc would choose
            base = os.path.splitext(os.path.basename(job.path))[0]
            middle = f".{job.options.target}" if len(targets) > 1 else ""
            output = os.path.join(given or "", f"{base}{middle}.{job.emit}")
            output = "-" if job.path == "-" else output
        if output == "-":
            refuse_terminal(job.emit)
        elif job.path != "-" and os.path.exists(output) and os.path.samefile(job.path, output):
            raise click.UsageError(f"-o {output} would overwrite the source.")
        if output in found:
            both = f"{found[output]} and {job.path}"
            raise click.UsageError(f"The outputs of {both} would both be written to {output}.")
        found[output] = job.path
    return list(found)


#: Matches a file's name at the beginning of a line of the compiler's log, before a line number.
_POSITION = re.compile(r"^([^\s(][^(\n]*)(?=\(\d+\): )", re.MULTILINE)


def _as_typed(log: str, job: Job) -> str:
    """Return the compiler's log with paths relative to the working directory, for editors.

    In `log`, paths are relative to the folder of the source, in which the compiler ran.
    """
    if not job.folder:
        return log

    def path(found: re.Match[str]) -> str:
        if found[1] == job.source_name:
            return job.path
        there = os.path.join(job.folder, found[1])
        return os.path.relpath(there) if os.path.exists(there) else found[1]

    return _POSITION.sub(path, log)


def _sentence(kernel: CompiledKernel, seconds: float, *, stored: bool) -> str:
    count = len(kernel.dependencies)
    headers = counted(count, "header")
    if kernel.cached:
        checked = f", {headers} verified" if count else ""
        saved = format_time(kernel.compile_seconds)
        return f"hit in {format_time(seconds)}{checked} (the compile took {saved})"
    text = f"compiled in {format_time(seconds)}"
    if count:
        text += f", {headers}"
    if not stored:
        text += ", not cached (KCACHE_LOG=debug shows the reason)"
    return text
