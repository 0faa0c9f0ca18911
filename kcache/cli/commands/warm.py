"""`kcache warm`: compiles a list of kernels ahead of time."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

from kcache.cli.open_cache import (
    directory_option,
    json_option,
    load_settings,
    may_write,
    open_cache,
    open_existing,
)
from kcache.cli.terminal import Bar, columns, counted, fit, plain, say, show, working
from kcache.config import Config
from kcache.errors import CompileError
from kcache.kernels.kernel_list import read_list
from kcache.nvrtc.workers.cores import usable_cores
from kcache.util.units import format_size, format_time

if TYPE_CHECKING:
    from kcache import CompiledKernel, KernelCache
    from kcache.kernels.kernel_list import ListedKernel

__all__ = ["warm"]


@click.command(short_help="Compile a list of kernels ahead of time.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Run N compiles at a time.  [default: one per core]",
)
@click.option(
    "--arch",
    "archs",
    metavar="ARCH",
    multiple=True,
    help="Target, such as sm_90. Replaces the targets in FILE.  [repeatable]",
)
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be compiled; compile nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but warnings and errors.")
@json_option("object")
@directory_option
def warm(
    file: str,
    *,
    jobs: int | None,
    archs: tuple[str, ...],
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    directory: str | None,
) -> None:
    """Compile every kernel that FILE lists and that is not in the cache yet, in parallel.

    FILE is a list in TOML or JSON, or a recording of a program that ran with KCACHE_RECORD=FILE. No
    GPU is needed. If a kernel does not compile, the command compiles the others and exits with 1.
    """
    if quiet and as_json:
        raise click.UsageError("--quiet and --json exclude each other.")
    wanted = read_list(file, archs)
    if not wanted:
        say(f"warning: {plain(file)} lists no kernels")
    if dry_run:
        _show_plan(wanted, _there(wanted, directory), as_json=as_json, quiet=quiet)
        return
    may_write("warm", directory)
    config, _ = load_settings(directory, changes=True)
    with open_cache(
        config.directory.value, relocation=_relocation(config), workers=_workers(config, jobs)
    ) as cache:
        outcome = _compile(cache, wanted, jobs)
        _tell_failures(outcome)
        _tell_losses(cache)
    if as_json:
        show(json.dumps(_as_json(outcome), indent=2))
    elif not quiet:
        show(_table(outcome))
    if outcome.failed:
        raise click.exceptions.Exit(1)


# -- compiling -------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    """The outcome of each kernel, and how long all of it took, in seconds."""

    compiled: list[CompiledKernel]
    there: list[CompiledKernel]
    failed: list[tuple[ListedKernel, CompileError]]
    seconds: float


def _compile(cache: KernelCache, wanted: list[ListedKernel], jobs: int | None) -> _Outcome:
    started = time.perf_counter()
    bar = Bar("warming", len(wanted))
    results = working(
        "warming",
        lambda: _run(cache, wanted, jobs, bar),
        bar,
        farewell=lambda: _farewell(bar.done, len(wanted)),
    )
    outcome = _Outcome([], [], [], time.perf_counter() - started)
    for each, result in zip(wanted, results, strict=True):
        if isinstance(result, CompileError):
            outcome.failed.append((each, result))
        else:
            (outcome.there if result.cached else outcome.compiled).append(result)
    return outcome


def _farewell(done: int, total: int) -> str:
    """Return the last line after an interrupt."""
    of = counted(total, "kernel", "kernels")
    return f"interrupted: {done:,} of {of} done; run it again to go on"


def _relocation(config: Config) -> str | None:
    """Return `eager` unless a variable decides: kernels are often warmed for other machines."""
    return "eager" if config.relocation.source == "default" else None


def _workers(config: Config, jobs: int | None) -> int | None:
    """Return how many compilers may run at a time, those that make proofs included."""
    allowed = config.workers.value
    if jobs is None or allowed == 0:  # without workers there are no proofs
        return None
    return min(jobs, usable_cores() if allowed is None else allowed)


def _run(
    cache: KernelCache, wanted: list[ListedKernel], jobs: int | None, bar: Bar
) -> list[CompiledKernel | CompileError]:
    """Compile the kernels, one working directory after another; return the outcome of each.

    A process has one working directory. All threads search it for headers in quotes and for
    relative include directories.
    """
    results: dict[int, CompiledKernel | CompileError] = {}
    for directory, numbers in _by_directory(wanted):
        before = len(results)

        def advance(done: int, _: int, before: int = before) -> None:
            bar.show(before + done)

        with contextlib.chdir(directory):
            requests = [wanted[number].request for number in numbers]
            found = cache.compile_many(requests, jobs=jobs, progress=advance)
        results.update(zip(numbers, found, strict=True))
    return [results[number] for number in range(len(wanted))]


def _by_directory(wanted: list[ListedKernel]) -> Iterator[tuple[str, list[int]]]:
    """Yield each working directory with the positions of its kernels.

    Kernels that don't depend on it come with the first directory, so that the cores have more to
    choose from.
    """
    groups: dict[str, list[int]] = {}
    anywhere: list[int] = []
    for number, each in enumerate(wanted):
        group = anywhere if each.directory is None else groups.setdefault(each.directory, [])
        group.append(number)
    if anywhere:
        groups.setdefault(next(iter(groups), os.curdir), []).extend(anywhere)
    yield from groups.items()


# -- telling ---------------------------------------------------------------------------------------


def _tell_failures(outcome: _Outcome) -> None:
    """Say in one line what did not compile, for which targets, and its first error."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each, error in outcome.failed:
        lines.setdefault((each.title, _first_error(error)), []).append(each.arch)
    for (title, reason), archs in lines.items():
        say(f"error: {plain(title)} ({', '.join(archs)}): {plain(reason)}")


def _first_error(error: CompileError) -> str:
    lines = [line.strip() for line in (error.log or str(error)).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "failed")


def _tell_losses(cache: KernelCache) -> None:
    """Say which kernels were compiled and are nevertheless not in the cache."""
    stats = cache.stats()
    if stats.uncacheable:
        say(f"warning: {stats.uncacheable} can't be cached (KCACHE_LOG=debug says why)")
    if stats.rejected or stats.evictions:
        lost = f"{counted(stats.evictions)} evicted, {stats.rejected} not kept"
        say(f"warning: {lost}: the cap is {format_size(cache.engine.max_size)}")
    if stats.errors:
        say(f"warning: {counted(stats.errors, 'failure', 'failures')} to use the cache")


def _table(outcome: _Outcome) -> str:
    total = len(outcome.compiled) + len(outcome.there) + len(outcome.failed)
    rows = [
        ("compiled", len(outcome.compiled), f"{_compile_time(outcome.compiled)} of compiling"),
        ("already there", len(outcome.there), f"{_compile_time(outcome.there)} saved"),
        ("failed", len(outcome.failed), ""),
        ("total", total, f"in {format_time(outcome.seconds)}"),
    ]
    digits = len(str(total))
    return columns(
        (name, f"{count:>{digits}}", note if count else "") for name, count, note in rows
    )


def _compile_time(kernels: list[CompiledKernel]) -> str:
    return format_time(sum(kernel.compile_seconds for kernel in kernels))


def _as_json(outcome: _Outcome) -> dict[str, object]:
    return {
        "compiled": len(outcome.compiled),
        "already_there": len(outcome.there),
        "failed": len(outcome.failed),
        "seconds": outcome.seconds,
        "compile_seconds": sum(kernel.compile_seconds for kernel in outcome.compiled),
        "saved_seconds": sum(kernel.compile_seconds for kernel in outcome.there),
        "failures": [
            {**_named(each), "log": error.log or str(error)} for each, error in outcome.failed
        ],
    }


def _named(wanted: ListedKernel) -> dict[str, object]:
    return {"source": wanted.source, "names": list(wanted.request.names), "arch": wanted.arch}


# -- a dry run -------------------------------------------------------------------------------------


def _there(wanted: list[ListedKernel], directory: str | None) -> list[bool]:
    """Tell for each kernel whether it is in the cache; change nothing."""
    there = [False] * len(wanted)
    cache = open_existing(directory, changes=True)
    if cache is None:
        return there
    with cache:
        for folder, numbers in _by_directory(wanted):
            with contextlib.chdir(folder):
                for number in numbers:
                    there[number] = _lookup(cache, wanted[number])
    return there


def _lookup(cache: KernelCache, wanted: ListedKernel) -> bool:
    request = wanted.request
    found = cache.lookup(
        request.source,
        request.names,
        request.options,
        headers=request.headers,
        extra_key=request.extra_key,
        source_name=request.source_name,
    )
    return found is not None


def _show_plan(
    wanted: list[ListedKernel], there: list[bool], *, as_json: bool, quiet: bool
) -> None:
    if as_json:
        kernels = [
            {**_named(each), "there": found} for each, found in zip(wanted, there, strict=True)
        ]
        counts = {"already_there": sum(there), "missing": len(there) - sum(there)}
        show(json.dumps({**counts, "kernels": kernels}, indent=2))
        return
    if quiet:
        return
    if wanted:
        rows = [("STATE", "ARCH", "KERNEL")]
        for each, found in zip(wanted, there, strict=True):
            rows.append(("there" if found else "missing", each.arch, plain(each.title)))
        show(fit(columns(rows)))
    show(f"{len(there) - sum(there)} would be compiled, {sum(there)} already there")
