"""LocalChecks: check the set-up of this machine, by doing what a program would do.

The checks open the cache, compile a kernel, and report the errors that occur. They also report
problems that cause no error. They change nothing.

How a program uses NVRTC can be seen only when it runs. But its file shows whether kcache's
libraries can be loaded into it at all. They can't if the program is set-uid, is linked statically,
or is linked with another C library than kcache's libraries.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice

from kcache.backend import NoBackend, backend_names
from kcache.config import Config, unknown_variables
from kcache.directory import CacheDirectory
from kcache.doctor import OK, PROBLEM, WARNING, Finding
from kcache.dropin import libraries
from kcache.dropin import run_environment as env
from kcache.engine import opening
from kcache.environment import default_directories, variables
from kcache.errors import KcacheError
from kcache.nvrtc import compiler, library
from kcache.nvrtc.entries import DAMAGED, UNREADABLE, items
from kcache.nvrtc.options import CompileOptions
from kcache.nvrtc.request import DEFAULT_NAME, Request
from kcache.util.cuda_driver import Version, driver_version
from kcache.util.hints import how_to_install
from kcache.util.mounts import FileSystem, file_system
from kcache.util.units import format_size

#: A disk with less free space than this, in bytes, is reported. A large kernel with its manifest
#: takes as much.
_LITTLE_ROOM = 64 << 20
#: How many entries are read, at most.
_SAMPLE = 1000
_EFFECTS = {
    "disable": "nothing is cached: every kernel is compiled every time",
    "recache": "every kernel is compiled every time, and replaces the cached one",
    "read_only": "nothing new is cached",
}


def diagnose(
    directory: str | None = None,
    *,
    system: Callable[[str], FileSystem] = file_system,
    driver: Callable[[], Version | None] = driver_version,
) -> Iterator[Finding]:
    """Check the settings, the cache, the compiler and the driver, and yield the findings.

    Each check comes after those that it depends on.

    Args:
        directory: the directory of the cache; by default, the directory that the settings name.
        system: a function that returns the file system of a path.
        driver: a function that returns the newest CUDA version that the driver supports, or None
            if there is no driver.

    Raises:
        ConfigError: `directory` can't be the name of a directory.
    """
    config = Config.load({"directory": directory}, complain=lambda _: None)
    yield from _settings(config)
    yield from _cache(config, directory, system)
    yield from _compiler(driver())


def _settings(config: Config) -> Iterator[Finding]:
    for name, meant in unknown_variables(variables()).items():
        if meant is None:  # programs warn of a name that looks misspelt
            do = "Unset it. kcache config lists the settings."
            yield Finding(PROBLEM, "settings", f"kcache has no setting {name}", do)
    for name, effect in _EFFECTS.items():
        value, source = getattr(config, name)
        if value:
            do = f"Unset {source}, unless you want this."
            yield Finding(WARNING, "settings", f"{source} is set: {effect}", do)


# -- the cache -------------------------------------------------------------------------------------


def _cache(
    config: Config, directory: str | None, system: Callable[[str], FileSystem]
) -> Iterator[Finding]:
    arguments = {"directory": directory, "read_only": True, "disable": False}
    warnings: list[str] = []
    try:
        opened = opening.open_configured(arguments, None, warnings.append)
    except KcacheError as error:
        yield Finding(PROBLEM, "cache", str(error))
        return
    yield from (Finding(PROBLEM, "cache", sentence) for sentence in warnings)
    known = ", ".join(backend_names())
    yield Finding(OK, "backend", f"{opened.config.backend.value} (available: {known})")
    try:
        if opened.directory is not None or not warnings:
            path = opened.path or os.path.abspath(
                config.directory.value or opening.default_directory()
            )
            yield from _directory(config, path)
            yield from _disk(opened.config, path, opened.backend.usage().bytes, system)
        if opened.directory is not None and not isinstance(opened.backend, NoBackend):
            yield from _entries(opened, opened.directory)
    except KcacheError as error:
        do = "Run kcache verify --repair, or move the directory to another place."
        yield Finding(PROBLEM, "entries", f"the backend can't be used: {error}", do)
    finally:
        opened.backend.close()


def _entries(opened: opening.OpenedBackend, directory: CacheDirectory) -> Iterator[Finding]:
    kinds = [item.kind for item in islice(items(opened.backend), _SAMPLE)]
    damaged, unreadable = kinds.count(DAMAGED), kinds.count(UNREADABLE)
    if damaged or unreadable:
        what = f"{damaged} damaged and {unreadable} unreadable entries among the {len(kinds)} that"
        do = "Run kcache verify --repair. They are never used. If more entries are damaged later, "
        do += "check the disk."
        yield Finding(PROBLEM, "entries", f"{what} were read", do)
    else:
        yield Finding(OK, "entries", f"{len(kinds)} read, none is damaged")
    sentence = opening.other_backend_hint(directory, opened.config.backend, opened.backend)
    if sentence:
        yield Finding(WARNING, "backend", sentence)


# -- the directory -----------------------------------------------------------------------------


def _directory(config: Config, path: str) -> Iterator[Finding]:
    exists, effective = os.path.lexists(path), os.access in os.supports_effective_ids
    source = config.directory.source
    if not os.access(_nearest(path), os.W_OK | os.X_OK, effective_ids=effective):
        reads = exists and config.forbids_writing
        do = "Make it writable (chmod u+rwx), or name another one with KCACHE_DIR or --directory."
        do += " Until then, the temporary directory is used." if source == "default" else ""
        what = f"{path} can't be {'written to' if exists else 'made'}"
        yield Finding(WARNING if reads else PROBLEM, "directory", what, do)
    elif source == "default" and path != next(default_directories()):
        what = f"the cache is in {path}, and temporary files may be deleted"
        yield Finding(WARNING, "directory", what, "Set KCACHE_DIR to a permanent directory.")
    else:
        state = "" if exists else ", which the first kernel creates"
        yield Finding(OK, "directory", f"{path} ({source}){state}")


def _disk(
    config: Config, path: str, held: int, system: Callable[[str], FileSystem]
) -> Iterator[Finding]:
    """Yield findings about the file system and the free space where the cache is or will be.

    Args:
        config: the settings of the cache.
        path: the directory of the cache.
        held: the number of bytes in the cache.
        system: a function that returns the file system of a path.
    """
    found = system(_nearest(path))
    if found.shared:
        what = f"{path} is on a network file system ({found.kind} at {found.mount_point}), where "
        what += "reads are slower, and locks may not work between machines"
        do = "Set KCACHE_DIR to a local directory if the machines need not share their kernels."
        yield Finding(WARNING, "file system", what, do)
    elif found.kind:
        yield Finding(OK, "file system", f"{found.kind} at {found.mount_point}")
    (cap, source), free = config.max_size, shutil.disk_usage(_nearest(path)).free
    if free < _LITTLE_ROOM:
        what = f"the disk is almost full ({format_size(free)} free): kernels that do not fit are "
        do = "Free space (kcache trim --max-size SIZE), or set KCACHE_DIR to another disk."
        yield Finding(WARNING, "room", f"{what}compiled every time", do)
    elif cap > free + held:
        named = format_size(cap) if source == "default" else f"{format_size(cap)} ({source})"
        what = f"the cap, {named}, is more than the disk has room for ({format_size(free)} free)"
        do = "Set KCACHE_MAX_SIZE to less, or save a lower cap: kcache config --set max_size=SIZE"
        yield Finding(WARNING, "room", what, do)
    else:
        what = f"{format_size(held)} of {format_size(cap)}; {format_size(free)} free on the disk"
        yield Finding(OK, "room", what)


def _nearest(path: str) -> str:
    """Return `path` if it is a directory, or else the nearest directory above it that exists."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


# -- compiler and driver ---------------------------------------------------------------------------


def _compiler(driver: Version | None) -> Iterator[Finding]:
    try:
        path, hello = library.require().path, compiler.hello()
        options = CompileOptions(arch=f"compute_{hello.archs[-1]}")
        source = "__global__ void kernel() {}"
        request = Request.make(
            source, (), options, None, b"", source_name=DEFAULT_NAME, compiler=""
        )
        run = compiler.compile_request(request)
    except KcacheError as error:
        do = f"Install it again: {library.HOW_TO_INSTALL}."
        yield Finding(PROBLEM, "nvrtc", f"NVRTC, the compiler, can't be used: {error}", do)
        return
    yield Finding(OK, "nvrtc", f"NVRTC {hello.version[0]}.{hello.version[1]}, {path}")
    if run.trace is None:
        what = f"kernels that include headers are not cached: {run.problem}"
        do = "To record the headers that a compile reads, kcache needs Linux on x86-64 or AArch64, "
        do += "and a Python interpreter for its worker processes."
        yield Finding(WARNING, "recording", what, do)
    yield _driver(driver, hello.version)


def _driver(driver: Version | None, toolkit: Version) -> Finding:
    if driver is None:
        what = "there is no NVIDIA driver: compiling works with a given arch, loading does not work"
        do = "Install the driver if this machine has a GPU. Otherwise, there is nothing to do."
        return Finding(WARNING, "driver", what, do)
    known = f"the driver supports CUDA {driver[0]}.{driver[1]}"
    if driver >= toolkit:
        return Finding(OK, "driver", known)
    what = f"the driver is older than the toolkit: {known}, and NVRTC is of CUDA "
    what += f"{toolkit[0]}.{toolkit[1]}"
    if driver[0] == toolkit[0]:
        do = "Update the driver, or compile for sm_NN, because this driver can load machine code."
        return Finding(WARNING, "driver", f"{what}, so PTX may not load", do)
    do = f"Update the driver, or install its NVRTC: {how_to_install(f'cu{driver[0]}')}."
    return Finding(PROBLEM, "driver", f"{what}, so kernels may not load", do)


# -- programs under `kcache run` -------------------------------------------------------------------

_TOPIC = "kcache run"
#: A program that opens the library at `sys.argv[1]`, and prints whether it gets kcache's library.
_PROBE = """
import ctypes, sys
handle = ctypes.CDLL(sys.argv[1])
print(hasattr(handle, "kcache_dropin_load"))
"""
_TIMEOUT = 30
_INSTALL = "Install a C compiler (Debian: apt-get install gcc libc6-dev), or kcache's Linux wheel."
#: How many `#!` lines Linux follows, and how many bytes of each it reads (fs/exec.c).
_MOST_SCRIPTS, _MOST_LINE = 5, 256


def diagnose_run() -> Iterator[Finding]:
    """Yield a finding: whether programs under `kcache run` get kcache's library, not NVRTC."""
    found = library.find()
    try:
        folder = libraries.find_usable(env.current())
        problem = _probe(folder, found.path) if folder and found else ""
    except (libraries.MissingError, OSError, subprocess.TimeoutExpired) as error:
        yield Finding(WARNING, _TOPIC, str(error), _INSTALL)
        return
    if problem:
        do = "These programs run as they do without kcache. A newer kcache may reach them."
        yield Finding(WARNING, _TOPIC, f"programs that load NVRTC are not reached: {problem}", do)
    elif folder is None:
        yield Finding(OK, _TOPIC, "the first kcache run will compile kcache's libraries")
    else:
        yield Finding(OK, _TOPIC, "programs that load NVRTC are reached")


def _probe(folder: str, path: str) -> str:
    """Return why a program that opens the library at `path` does not get kcache's library instead.

    The result is empty if the program gets kcache's library.

    Args:
        folder: the directory with kcache's libraries.
        path: the path of the installed NVRTC.

    Raises:
        MissingError, OSError, TimeoutExpired: the program can't be started, or takes too long.
    """
    variables = {**env.current()}
    variables |= env.of_dropin(variables, libraries.preloaded(folder), "/nonexistent")
    command = [sys.executable, "-I", "-c", _PROBE, path]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
    if done.stdout.strip() == "True":
        return ""
    errors = done.stderr.strip().splitlines()
    return errors[-1] if errors else "NVRTC has functions that this version of kcache lacks"


def diagnose_program(name: str) -> Iterator[Finding]:
    """Yield a finding: whether `kcache run` would reach a program, as far as its file shows."""
    path = shutil.which(name)
    if path is None or not os.path.isfile(path):
        what = f"there is no program {name}"
        yield Finding(PROBLEM, _TOPIC, what, "Name a program or its path.")
        return
    path = os.path.realpath(path)
    try:
        runs = _what_runs(path)
        what = path if runs in (path, None) else f"{path} (run by {runs})"
        reached, clause = _reach(runs) if runs else (False, "its first line names no program")
    except OSError as error:
        what, reached, clause = path, False, f"it can't be read: {error.strerror}"
    problem = libraries.problem(env.current())
    if reached and problem:
        yield Finding(WARNING, _TOPIC, f"{what} is not reached: {problem}", _INSTALL)
    elif reached:
        yield Finding(OK, _TOPIC, f"{what} is reached{clause}")
    else:
        do = "Under `kcache run`, it runs as it does without kcache."
        yield Finding(WARNING, _TOPIC, f"{what} is not reached: {clause}", do)


def _what_runs(path: str) -> str | None:
    """Return the program that runs if `path` is executed.

    This is `path` itself or, if `path` is a script, the interpreter that its first line names. The
    result is None if there is no such interpreter.

    Raises:
        OSError: a file can't be read.
    """
    for _ in range(_MOST_SCRIPTS):
        with open(path, "rb") as file:
            first = file.read(_MOST_LINE)
        if not first.startswith(b"#!"):
            break
        words = os.fsdecode(first[2:].partition(b"\n")[0]).split()
        if words and os.path.basename(words[0]) == "env":
            words = [word for word in words[1:] if word[0] != "-" and "=" not in word]
        found = shutil.which(words[0]) if words else None
        if found is None or not os.path.isfile(found):
            return None
        path = os.path.realpath(found)
    return path


def _reach(path: str) -> tuple[bool, str]:
    """Return whether `kcache run` reaches the program at `path`, and a text about how or why not.

    The loader of this process (`ld.so --list`) determines this without running the program.
    """
    if os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID):
        return False, "it is set-uid or set-gid, so the loader does not add kcache's libraries"
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loader = re.search(r"/\S*/ld-linux\S*", maps.read())
    if loader is None:
        return False, "this Python does not use the loader of glibc"
    command = [loader[0], "--list", path]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
    )
    if done.returncode != 0 or "statically linked" in done.stdout:
        reason = done.stderr.strip().rpartition("shared libraries: ")[2]
        return False, f"glibc does not load it: {reason}" if reason else "it is linked statically"
    linked = re.search(r"libnvrtc\.so\S*", done.stdout)
    return True, f"; it is linked with {linked[0]}" if linked else ", if it loads NVRTC"
