"""Doctor: decides from facts alone what is right and wrong with a machine's set-up.

`diagnose` reads nothing but the `Facts` (`machine_facts`) that it is given. Every check is
a function that yields findings. A check whose facts are not known yields none.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from kcache import other_backends
from kcache.admin.machine_facts import Facts
from kcache.config import VARIABLES
from kcache.util.cuda_driver import Version
from kcache.util.distribution import how_to_install
from kcache.util.nearest import nearest
from kcache.util.units import counted, format_size

__all__ = ["LEAST_VERSIONS", "LEVELS", "OK", "PROBLEM", "WARNING", "Finding", "diagnose"]

OK, WARNING, PROBLEM = "ok", "warning", "problem"
LEVELS = (OK, WARNING, PROBLEM)

#: The oldest supported version of each library, the same as in pyproject.toml.
LEAST_VERSIONS: dict[str, tuple[int, ...]] = {
    "python": (3, 11),
    "lmdb": (3, 0),
    "platformdirs": (4,),
    "xxhash": (3, 4),
    "zstandard": (0, 23),
}
#: `doctor` reports a disk that has less room than this, in bytes: one large kernel with its
#: manifest.
_LITTLE_ROOM = 64 << 20
#: From this version on, NVRTC tells which headers it reads. With older ones, kcache reads the
#: headers itself.
_TRACING: Version = (13, 0)


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        level: `OK`, `WARNING` (it works, with a drawback) or `PROBLEM` (something does not work).
        topic: what was checked, in a word.
        what: the result, one line.
        do: what to do about it, one line; empty if there is nothing to do.
        about: the same for programs, for checks of several things (remotes, layers); otherwise
            None.
    """

    level: str
    topic: str
    what: str
    do: str = ""
    about: Mapping[str, object] | None = None

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON; without `about` if that is None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def diagnose(facts: Facts) -> list[Finding]:
    """Return every finding, in the order in which things depend on each other."""
    return [finding for check in _CHECKS for finding in check(facts)]


# -- Python and what kcache needs ------------------------------------------------------------------


def _python(facts: Facts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    if facts.python < LEAST_VERSIONS["python"]:
        yield Finding(
            PROBLEM, "python", f"Python {version} is too old", "Use Python 3.11 or later."
        )
    else:
        yield Finding(OK, "python", f"Python {version}")


def _libraries(facts: Facts) -> Iterator[Finding]:
    again = "Install it again: pip install --force-reinstall {}"
    for name, reason in facts.broken.items():
        yield Finding(
            PROBLEM, "libraries", f"{name} can't be imported ({reason})", again.format(name)
        )
    good: list[str] = []
    for name, version in facts.libraries.items():
        least = LEAST_VERSIONS.get(name, ())
        found = _numbers(version)
        if found and found < least:
            wanted = ".".join(map(str, least))
            yield Finding(
                PROBLEM,
                "libraries",
                f"{name} {version} is too old",
                f"Update it: pip install '{name}>={wanted}'",
            )
        else:
            good.append(f"{name} {version}")
    if good:
        yield Finding(OK, "libraries", ", ".join(good))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, at least three; none if it has none."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(map(int, found[0].split("."))) if found else ()
    return numbers + (0,) * (3 - len(numbers)) if numbers else ()


# -- settings --------------------------------------------------------------------------------------


def _settings(facts: Facts) -> Iterator[Finding]:
    for sentence in facts.bad_settings:
        yield Finding(
            PROBLEM, "settings", sentence, "Correct the variable, or unset it for the default."
        )
    for sentence in facts.bad_saved:
        do = (
            "Save it anew: kcache config --set NAME=VALUE; or forget it: kcache config --unset NAME"
        )
        yield Finding(PROBLEM, "settings", sentence, do)
    known = [variable.name.removeprefix("KCACHE_") for variable in VARIABLES]
    for name in facts.unknown_variables:
        meant = nearest(name.removeprefix("KCACHE_"), known)
        do = f"Rename it to KCACHE_{meant}" if meant else "Unset it. kcache config lists them"
        yield Finding(PROBLEM, "settings", f"kcache reads no variable {name}", f"{do}.")
    effects = {
        "disable": "nothing is cached: every kernel is compiled every time",
        "recache": "every kernel is compiled every time, and replaces the cached one",
        "read_only": "nothing new is cached",
    }
    for name, effect in effects.items():
        setting = getattr(facts.config, name)
        if setting.value:
            yield Finding(
                WARNING,
                "settings",
                f"{setting.source} is set: {effect}",
                f"Unset {setting.source}, unless that is what you want.",
            )


def _backend_name(facts: Facts) -> Iterator[Finding]:
    name, source = facts.config.backend
    known = ", ".join(facts.backends)
    if name in facts.backends:
        yield Finding(OK, "backend", f"{name} (there are: {known})")
    else:
        do = f"Set {source} to one of these: {known}; or install the package that brings {name}."
        yield Finding(PROBLEM, "backend", f"there is no backend {name!r}", do)


# -- the directory ---------------------------------------------------------------------------------


def _directory(facts: Facts) -> Iterator[Finding]:
    location = facts.location
    if location is None:
        return
    elsewhere = "name another directory with KCACHE_DIR or --directory"
    problems = list(_permissions(facts, elsewhere)) or list(_refusal(facts, elsewhere))
    yield from problems
    if facts.homeless:
        yield Finding(
            WARNING,
            "directory",
            f"there is no home directory, so the cache is in {location.path}, which may be cleaned",
            "Set KCACHE_DIR to a directory that stays.",
        )
    elif not problems:
        state = "" if location.exists else ", which the first kernel will make"
        yield Finding(OK, "directory", f"{location.path} ({location.source}){state}")


def _permissions(facts: Facts, elsewhere: str) -> Iterator[Finding]:
    """Yield why the cache's directory is refused, or can't be written to."""
    location = facts.location
    assert location is not None
    path = location.path
    if not location.is_directory:
        what = f"{path} is a file" if location.exists else f"a part of {path} is a file"
        yield Finding(PROBLEM, "directory", what, f"Remove it, or {elsewhere}.")
        return
    if location.exists and facts.user is not None:
        if location.owner != facts.user:
            yield Finding(
                PROBLEM,
                "directory",
                f"{path} belongs to user {location.owner}, and you are user {facts.user}: its "
                "kernels can't be trusted",
                f"Use a directory of your own: {elsewhere}.",
            )
        elif location.mode & (stat.S_IWGRP | stat.S_IWOTH):
            yield Finding(
                PROBLEM,
                "directory",
                f"{path} can be written to by others (mode {location.mode:04o}): its kernels can't "
                "be trusted",
                f"Run: chmod go-w {path}",
            )
    if location.obstacle:
        reading = location.exists and (facts.config.read_only.value or facts.config.disable.value)
        do = f"Make it writable (chmod u+rwx), or {elsewhere}."
        if location.source == "default":
            do += " Until then the temporary directory is used."
        yield Finding(
            WARNING if reading else PROBLEM,
            "directory",
            f"{path} can't be {'written to' if location.exists else 'made'}: {location.obstacle}",
            do,
        )


def _refusal(facts: Facts, elsewhere: str) -> Iterator[Finding]:
    """Yield why a cache would not use the directory, for another reason than its rights."""
    if facts.location is not None and facts.location.refused:
        do = f"{elsewhere[0].upper()}{elsewhere[1:]}."
        yield Finding(PROBLEM, "directory", facts.location.refused, do)


def _file_system(facts: Facts) -> Iterator[Finding]:
    location = facts.location
    if location is None or not location.system.kind:
        return
    kind, point = location.system
    name = facts.config.backend.value
    if not location.system.shared:
        yield Finding(OK, "file system", f"{kind} at {point}")
    elif "lmdb" in name:
        other = "zstd" if "zstd" in name else "file"
        yield Finding(
            PROBLEM,
            "file system",
            f"{location.path} is on a network file system ({kind} at {point}), where LMDB does not "
            "work",
            f"Set KCACHE_BACKEND={other}, or KCACHE_DIR to a local directory.",
        )
    else:
        yield Finding(
            WARNING,
            "file system",
            f"{location.path} is on a network file system ({kind} at {point}): it is slower, and "
            "locks may not hold between machines",
            "Set KCACHE_DIR to a local directory if the machines need not share their kernels.",
        )


def _room(facts: Facts) -> Iterator[Finding]:
    location = facts.location
    if location is None or not location.total:
        return
    held = 0 if facts.contents is None else facts.contents.size
    cap, source = facts.config.max_size
    named = format_size(cap) if source == "default" else f"{format_size(cap)} ({source})"
    free = f"{format_size(location.free)} free"
    if location.free < _LITTLE_ROOM:
        yield Finding(
            WARNING,
            "room",
            f"the disk is almost full: {free}; what does not fit is compiled every time",
            "Free space (kcache trim --max-size SIZE), or set KCACHE_DIR to another disk.",
        )
    elif cap > location.free + held:
        yield Finding(
            WARNING,
            "room",
            f"the cap, {named}, is more than the disk has room for ({free})",
            "Set KCACHE_MAX_SIZE to less, or save a lower cap: kcache config --set max_size=SIZE",
        )
    else:
        yield Finding(OK, "room", f"{format_size(held)} of {format_size(cap)}; {free} on the disk")


# -- what is in it ---------------------------------------------------------------------------------


def _entries(facts: Facts) -> Iterator[Finding]:
    contents = facts.contents
    if contents is None:
        return
    network = facts.location is not None and facts.location.system.shared
    if contents.error:
        known = facts.config.backend.value in facts.backends
        if known and not facts.broken and not (network and "lmdb" in facts.config.backend.value):
            yield Finding(
                PROBLEM,
                "entries",
                f"the backend can't be used: {contents.error}",
                "Run: kcache verify --repair; or move the directory out of the way.",
            )
        return
    bad = contents.damaged + contents.unreadable
    if bad:
        yield Finding(
            PROBLEM,
            "entries",
            f"{contents.damaged} damaged and {contents.unreadable} unreadable entries among the "
            f"{contents.sampled} that were read",
            "Run: kcache verify --repair. They are never used. If more appear, check the disk.",
        )
    else:
        yield Finding(OK, "entries", f"{contents.sampled} read, none is damaged")


def _elsewhere(facts: Facts) -> Iterator[Finding]:
    contents, named = facts.contents, facts.config.backend
    if not facts.elsewhere or contents is None or named.value not in facts.backends:
        return
    if not contents.sampled:
        what = other_backends.sentence(named, facts.elsewhere)
        yield Finding(WARNING, "backend", what, f"{other_backends.advice(named, facts.elsewhere)}")
        return
    for other in facts.elsewhere:
        yield Finding(
            WARNING,
            "backend",
            f"{other_backends.amount(other)} more in the backend {other.name}, which is not in use",
            f"Move them: kcache migrate --from {other.name} --to {named.value}",
        )


def _statistics(facts: Facts) -> Iterator[Finding]:
    contents = facts.contents
    if contents is None:
        return
    if contents.stats_error:
        yield Finding(
            WARNING,
            "statistics",
            contents.stats_error,
            "Remove that file; counting starts again from zero.",
        )
    stats = contents.stats
    if stats is None:
        return
    if stats.corrupt:
        yield Finding(
            WARNING,
            "statistics",
            f"damaged entries that were found and compiled again: {stats.corrupt}",
            "Run: kcache verify. To reset the counts: kcache stats --zero.",
        )
    if stats.errors:
        yield Finding(
            WARNING,
            "statistics",
            f"failed operations of the backend, which the cache survived: {stats.errors}",
            "Run a program with KCACHE_LOG=info to see why. To reset the counts: kcache stats "
            "--zero.",
        )
    if not stats.corrupt and not stats.errors:
        yield Finding(
            OK,
            "statistics",
            f"{counted(stats.requests, 'request', 'requests')}, no damage and no errors",
        )


# -- compiler and driver ---------------------------------------------------------------------------


def _compiler(facts: Facts) -> Iterator[Finding]:
    nvrtc = facts.compiler
    install = f"Install one: {how_to_install('cu13')} (CUDA 12: cu12)."
    if not nvrtc.path and nvrtc.version is None:
        yield Finding(PROBLEM, "nvrtc", "NVRTC, the compiler, is not installed", install)
        return
    if nvrtc.error:
        yield Finding(PROBLEM, "nvrtc", nvrtc.error, install)
    elif nvrtc.version is not None:
        major, minor = nvrtc.version
        yield Finding(OK, "nvrtc", f"NVRTC {major}.{minor}, {nvrtc.path or 'path unknown'}")
    if nvrtc.path and not nvrtc.builtins:
        yield Finding(
            PROBLEM,
            "nvrtc",
            f"NVRTC's builtins library is missing beside {nvrtc.path}: nothing compiles without it",
            "Install NVRTC again: pip install --force-reinstall with the package that brought it.",
        )


def _driver(facts: Facts) -> Iterator[Finding]:
    driver, toolkit = facts.driver, facts.compiler.version
    if driver is None:
        yield Finding(
            WARNING,
            "driver",
            "there is no NVIDIA driver: compiling works (name an arch), loading kernels does not",
            "Install the driver if this machine has a GPU; else there is nothing to do.",
        )
        return
    known = f"the driver supports CUDA {driver[0]}.{driver[1]}"
    if toolkit is None or driver >= toolkit:
        yield Finding(OK, "driver", known)
        return
    needs = f"and NVRTC is of CUDA {toolkit[0]}.{toolkit[1]}"
    older = f"Update the driver, or take its NVRTC: {how_to_install(f'cu{driver[0]}')}"
    if driver[0] < toolkit[0]:
        what = f"the driver is older than the toolkit: {known}, {needs}, so kernels may not load"
        yield Finding(PROBLEM, "driver", what, f"{older}.")
    else:
        what = f"the driver is older than the toolkit: {known}, {needs}; PTX may not load"
        yield Finding(
            WARNING, "driver", what, "Update the driver, or compile for sm_NN: machine code loads."
        )


def _recording(facts: Facts) -> Iterator[Finding]:
    if facts.recording_problem:
        yield Finding(
            WARNING,
            "recording",
            f"kernels that include headers are compiled and not cached: {facts.recording_problem}",
            "What a compile depends on is recorded on Linux, x86-64 and AArch64, by worker "
            "processes that run a Python interpreter.",
        )


_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _python,
    _libraries,
    _settings,
    _backend_name,
    _directory,
    _file_system,
    _room,
    _entries,
    _elsewhere,
    _statistics,
    _compiler,
    _driver,
    _recording,
)
