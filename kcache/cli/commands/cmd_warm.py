"""`kcache warm`: compiles a list of kernels ahead of time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from kcache import CompiledKernel, KernelCache
from kcache.cli.options import cache_options, flag, load_settings, may_write, open_cache, repeatable
from kcache.cli.terminal import columns, interruptible, notify, progress, show, wants_json
from kcache.config import Config
from kcache.dropin.recorded_starts import compile_all, start_of
from kcache.errors import CompileError
from kcache.nvcc.request import Start
from kcache.nvrtc.request import CompileRequest
from kcache.util.cpus import usable_cores
from kcache.util.units import counted, format_size, format_time
from kcache.warm.kernel_list import ListedKernel, read_list
from kcache.warm.recording import read_starts


@click.command(short_help="Compile a list of kernels ahead of time.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Run up to N compiles at a time.  [default: one per core]",
)
@repeatable(
    "--arch", "archs", metavar="ARCH", help="Target, such as sm_90. Replaces the targets in FILE."
)
@flag("-n", "--dry-run", help="Show what would be compiled; compile nothing.")
@flag("--check", help="Same as --dry-run, but exit with 1 if anything would be compiled.")
@flag("-q", "--quiet", help="Print only warnings and errors.")
@cache_options("object")
def warm(
    file: str,
    *,
    jobs: int | None,
    archs: tuple[str, ...],
    dry_run: bool,
    check: bool,
    quiet: bool,
    directory: str | None,
) -> None:
    """Compile every kernel that FILE lists and that is not in the cache yet, in parallel.

    FILE is a list in TOML or JSON, or a recording, which a program writes with KCACHE_RECORD=FILE
    or under kcache run --record FILE. A recorded nvcc command is run again in its directory, and
    writes its files again; --arch does not change its target. No GPU is needed. If a kernel does
    not compile, the command still compiles the others, and exits with 1.
    """
    if quiet and wants_json():
        raise click.UsageError("--quiet and --json can't be combined.")
    config, _ = load_settings(directory, complain=None)
    if not (dry_run or check):
        may_write("warm", directory)
    started = time.perf_counter()
    path = config.directory.value
    with contextlib.ExitStack() as stack:
        kernels, starts = read_wanted(file, archs, stack)
        wanted = [*kernels, *map(listed, starts)]
        if not wanted:
            notify(f"warning: {file} lists no kernels")
        if dry_run or check:
            cache = stack.enter_context(open_cache(path, read_only=True))
            cached = cached_ones(kernels, starts, cache)
            _show_plan(wanted, cached, quiet=quiet)
            raise click.exceptions.Exit(int(check and not all(cached)))
        workers = _workers(config, jobs)
        cache = stack.enter_context(open_cache(path, workers=workers, on_miss="compile"))
        results = [*_compile(cache, kernels, jobs), *_compile_starts(cache, starts, jobs)]
        seconds = time.perf_counter() - started
        pairs = zip(wanted, results, strict=True)
        failed = [(each, error) for each, error in pairs if isinstance(error, CompileError)]
        _print_failures(failed)
        _print_losses(cache)
    made = [each for each in results if not isinstance(each, CompileError)]
    summary = _summary(made, failed, seconds)
    show("" if quiet else lambda: _table(summary), summary)
    raise click.exceptions.Exit(int(bool(failed)))


def read_wanted(
    file: str, archs: tuple[str, ...], stack: contextlib.ExitStack
) -> tuple[list[ListedKernel], list[Start]]:
    """Return the kernels and the recorded nvcc commands that `file` lists.

    The commands run in directories that are removed when `stack` is closed.
    """
    return read_list(file, archs), [start_of(each, stack) for each in read_starts(file)]


# -- compiling -------------------------------------------------------------------------------------


def _workers(config: Config, jobs: int | None) -> int | None:
    """Return how many worker processes may run at a time, or None for the settings' own limit."""
    allowed = config.workers.value
    if jobs is None or allowed == 0:
        return None
    return min(jobs, usable_cores() if allowed is None else allowed)


def _compile(
    cache: KernelCache, wanted: list[ListedKernel], jobs: int | None
) -> list[CompiledKernel | CompileError]:
    """Compile the kernels, and return the result of each.

    One working directory is handled after another. A process has only one working directory, in
    which all its threads look for headers in quotes and for relative include directories.
    """
    results: dict[int, CompiledKernel | CompileError] = {}
    done = 0

    def farewell() -> str:
        of = counted(len(wanted), "kernel")
        return f"interrupted: {done:,} of {of} done; run the command again to continue"

    with interruptible(farewell), progress("warming", len(wanted)) as advance:

        def step(finished: int, _: int) -> None:
            nonlocal done
            advance(len(results) + finished - done)
            done = len(results) + finished

        for numbers in _by_directory(wanted):
            requests = [wanted[number].request for number in numbers]
            found = cache.compile_many(requests, jobs=jobs, progress=step)
            results.update(zip(numbers, found, strict=True))
    return [results[number] for number in range(len(wanted))]


def listed(start: Start) -> ListedKernel:
    """Return an nvcc command in the form of a listed kernel, for messages and JSON."""
    request = start.request
    about = CompileRequest("", (), request.options, source_name=request.source_name)
    return ListedKernel(about, None, request.source_name, (request.key, None))


def _compile_starts(
    cache: KernelCache, starts: list[Start], jobs: int | None
) -> list[CompiledKernel | CompileError]:
    """Run the nvcc commands whose results are not in the cache; return the results of all."""
    if not starts:
        return []
    with progress("nvcc", len(starts)) as advance:
        return compile_all(cache, starts, jobs or usable_cores(), partial(advance, 1))


def _by_directory(wanted: list[ListedKernel]) -> Iterator[list[int]]:
    """Change to each working directory in turn, and yield the positions of its kernels in `wanted`.

    Kernels that don't depend on a working directory are added to the first directory, so that more
    kernels can be compiled in parallel.
    """
    first = next((each.directory for each in wanted if each.directory is not None), os.curdir)
    groups: dict[str, list[int]] = {}
    for number, each in enumerate(wanted):
        groups.setdefault(first if each.directory is None else each.directory, []).append(number)
    for directory, numbers in groups.items():
        with contextlib.chdir(directory):
            yield numbers


# -- printing --------------------------------------------------------------------------------------


def _print_failures(failed: list[tuple[ListedKernel, CompileError]]) -> None:
    """Print one line for each kernel that did not compile, with its targets and its first error."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each, error in failed:
        reason = _first_error(error.log or str(error))
        lines.setdefault((each.title, reason), []).append(each.arch)
    for (title, reason), archs in lines.items():
        notify(f"error: {title} ({', '.join(archs)}): {reason}")


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "failed")


def _print_losses(cache: KernelCache) -> None:
    """Print how many entries are not in the cache, and why."""
    stats = cache.stats()
    if stats.uncacheable:
        what = counted(stats.uncacheable, "kernel")
        notify(f"warning: {what} can't be cached (KCACHE_LOG=debug shows the reasons)")
    if stats.rejected or stats.evictions:
        lost = f"{counted(stats.evictions)} evicted, {stats.rejected} not stored"
        notify(f"warning: {lost}: the cap is {format_size(cache.engine.max_size)}")
    if stats.errors:
        notify(f"warning: the cache could not be used {counted(stats.errors, 'time')}")


def _table(summary: dict[str, Any]) -> str:
    notes = {
        "compiled": f"{format_time(summary['compile_seconds'])} of compiling",
        "cached": f"{format_time(summary['saved_seconds'])} saved",
        "failed": "",
        "total": f"in {format_time(summary['seconds'])}",
    }
    counts = {**summary, "total": summary["compiled"] + summary["cached"] + summary["failed"]}
    digits = len(str(counts["total"]))
    return columns(
        (name, f"{counts[name]:>{digits}}", note if counts[name] else "")
        for name, note in notes.items()
    )


def _summary(
    made: list[CompiledKernel], failed: list[tuple[ListedKernel, CompileError]], seconds: float
) -> dict[str, Any]:
    """Return the numbers of kernels, the times and the failures, for JSON."""
    cached = sum(kernel.cached for kernel in made)
    return {
        "compiled": len(made) - cached,
        "cached": cached,
        "failed": len(failed),
        "seconds": seconds,
        "compile_seconds": sum(each.compile_seconds for each in made if not each.cached),
        "saved_seconds": sum(each.compile_seconds for each in made if each.cached),
        "failures": [{**_named(each), "log": error.log or str(error)} for each, error in failed],
    }


def _named(wanted: ListedKernel) -> dict[str, object]:
    return {"source": wanted.source, "names": list(wanted.request.names), "arch": wanted.arch}


# -- a dry run -------------------------------------------------------------------------------------


def cached_ones(wanted: list[ListedKernel], starts: list[Start], cache: KernelCache) -> list[bool]:
    """Return for each kernel, then for each nvcc command, whether `cache` or its tiers have it."""
    found = [False] * len(wanted)
    for numbers in _by_directory(wanted):
        for number in numbers:
            found[number] = cache.lookup(**wanted[number].request._asdict()) is not None
    return found + [cache._tiers.hit(each.request) is not None for each in starts]


def _show_plan(wanted: list[ListedKernel], cached: list[bool], *, quiet: bool) -> None:
    missing = cached.count(False)
    pairs = list(zip(wanted, cached, strict=True))
    states = [("cached" if found else "missing", each.arch, each.title) for each, found in pairs]
    rows = [("STATE", "ARCH", "KERNEL"), *states]
    table = "" if quiet or not wanted else columns(rows, fit=True)
    kernels = [{**_named(each), "cached": found} for each, found in pairs]
    show(table, {"cached": len(cached) - missing, "missing": missing, "kernels": kernels})
    show("" if quiet else f"{missing} would be compiled, {len(cached) - missing} cached already")
