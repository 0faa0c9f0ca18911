"""LocalChecks: find what is wrong with this machine's set-up, by doing what a program would do.

The checks open the cache, compile a kernel, and report the errors. They also report problems that
cause no error. They change nothing.

How a program uses NVRTC can only be seen when it runs. But its file shows whether it is set-uid,
linked statically, or linked with another C library than kcache's libraries.
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
#: How many entries are read.
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
    """Yield every finding; what others depend on is checked before them.

    Args:
        directory: of the cache; by default that of the environment or the defaults.
        system: returns the file system of a path.
        driver: returns the newest CUDA version that the driver supports, or None.

    Raises:
        ConfigError: `directory` is not allowed.
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
            do = f"Unset {source}, unless that is what you want."
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
    yield Finding(OK, "backend", f"{opened.config.backend.value} (there are: {known})")
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
        do = "Run: kcache verify --repair; or move the directory out of the way."
        yield Finding(PROBLEM, "entries", f"the backend can't be used: {error}", do)
    finally:
        opened.backend.close()


def _entries(opened: opening.OpenedBackend, directory: CacheDirectory) -> Iterator[Finding]:
    kinds = [item.kind for item in islice(items(opened.backend), _SAMPLE)]
    damaged, unreadable = kinds.count(DAMAGED), kinds.count(UNREADABLE)
    if damaged or unreadable:
        what = f"{damaged} damaged and {unreadable} unreadable entries among the {len(kinds)} that"
        do = "Run: kcache verify --repair. They are never used. If more appear, check the disk."
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
        do = "Make it writable (chmod u+rwx), or name another with KCACHE_DIR or --directory."
        do += " The temporary directory is used until then." if source == "default" else ""
        what = f"{path} can't be {'written to' if exists else 'made'}"
        yield Finding(WARNING if reads else PROBLEM, "directory", what, do)
    elif source == "default" and path != next(default_directories()):
        what = f"the cache is in {path}, which may be cleaned"
        yield Finding(WARNING, "directory", what, "Set KCACHE_DIR to a directory that stays.")
    else:
        state = "" if exists else ", which the first kernel creates"
        yield Finding(OK, "directory", f"{path} ({source}){state}")


def _disk(
    config: Config, path: str, held: int, system: Callable[[str], FileSystem]
) -> Iterator[Finding]:
    """Yield what is wrong with the disk that a directory is on, or will be."""
    found = system(_nearest(path))
    if found.shared:
        what = f"{path} is on a network file system ({found.kind} at {found.mount_point}): it is "
        what += "slower, and locks may not hold between machines"
        do = "Set KCACHE_DIR to a local directory if the machines need not share their kernels."
        yield Finding(WARNING, "file system", what, do)
    elif found.kind:
        yield Finding(OK, "file system", f"{found.kind} at {found.mount_point}")
    (cap, source), free = config.max_size, shutil.disk_usage(_nearest(path)).free
    if free < _LITTLE_ROOM:
        what = f"the disk is almost full: {format_size(free)} free; what does not fit is compiled"
        do = "Free space (kcache trim --max-size SIZE), or set KCACHE_DIR to another disk."
        yield Finding(WARNING, "room", f"{what} every time", do)
    elif cap > free + held:
        named = format_size(cap) if source == "default" else f"{format_size(cap)} ({source})"
        what = f"the cap, {named}, is more than the disk has room for ({format_size(free)} free)"
        do = "Set KCACHE_MAX_SIZE to less, or save a lower cap: kcache config --set max_size=SIZE"
        yield Finding(WARNING, "room", what, do)
    else:
        what = f"{format_size(held)} of {format_size(cap)}; {format_size(free)} free on the disk"
        yield Finding(OK, "room", what)


def _nearest(path: str) -> str:
    """Return the directory, or the nearest one above it that exists."""
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
        what = f"kernels that include headers are compiled and not cached: {run.problem}"
        do = "What a compile depends on is recorded on Linux, x86-64 and AArch64, by worker "
        do += "processes that run a Python interpreter."
        yield Finding(WARNING, "recording", what, do)
    yield _driver(driver, hello.version)


def _driver(driver: Version | None, toolkit: Version) -> Finding:
    if driver is None:
        what = "there is no NVIDIA driver: compiling works (name an arch), loading kernels does not"
        do = "Install the driver if this machine has a GPU; else there is nothing to do."
        return Finding(WARNING, "driver", what, do)
    known = f"the driver supports CUDA {driver[0]}.{driver[1]}"
    if driver >= toolkit:
        return Finding(OK, "driver", known)
    what = f"the driver is older than the toolkit: {known}, and NVRTC is of CUDA "
    what += f"{toolkit[0]}.{toolkit[1]}"
    if driver[0] == toolkit[0]:
        do = "Update the driver, or compile for sm_NN: machine code loads."
        return Finding(WARNING, "driver", f"{what}; PTX may not load", do)
    do = f"Update the driver, or take its NVRTC: {how_to_install(f'cu{driver[0]}')}."
    return Finding(PROBLEM, "driver", f"{what}, so kernels may not load", do)


# -- programs under `kcache run` -------------------------------------------------------------------

_TOPIC = "kcache run"
#: Prints whether a program that opens the library at `sys.argv[1]` gets kcache's library.
_PROBE = """
import ctypes, sys
handle = ctypes.CDLL(sys.argv[1])
print(hasattr(handle, "kcache_dropin_load"))
"""
_TIMEOUT = 30
_INSTALL = "Install a C compiler (Debian: apt-get install gcc libc6-dev), or a wheel for Linux."
#: How many `#!` lines Linux follows, and how many bytes of each it reads (fs/exec.c).
_MOST_SCRIPTS, _MOST_LINE = 5, 256


def diagnose_run() -> Iterator[Finding]:
    """Yield whether kcache's libraries exist, and whether a program gets them instead of NVRTC."""
    found = library.find()
    try:
        folder = libraries.find_usable(env.current())
        problem = _probe(folder, found.path) if folder and found else ""
    except (libraries.MissingError, OSError, subprocess.TimeoutExpired) as error:
        yield Finding(WARNING, _TOPIC, str(error), _INSTALL)
        return
    if problem:
        do = "Programs that load it run as they do without kcache. A newer kcache may reach them."
        yield Finding(WARNING, _TOPIC, f"NVRTC is not reached: {problem}", do)
    elif folder is None:
        yield Finding(OK, _TOPIC, "the first use will compile kcache's libraries")
    else:
        yield Finding(OK, _TOPIC, "programs that load NVRTC are reached")


def _probe(folder: str, path: str) -> str:
    """Return why a program that opens the library at `path` gets the real one, or empty.

    Raises:
        MissingError, OSError, TimeoutExpired: no program could be started.
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
    return errors[-1] if errors else "it has functions that this version of kcache does not know"


def diagnose_program(name: str) -> Iterator[Finding]:
    """Yield whether `kcache run` would reach a program, as far as its file alone can show."""
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
        do = "It runs under `kcache run` as it does without."
        yield Finding(WARNING, _TOPIC, f"{what} is not reached: {clause}", do)


def _what_runs(path: str) -> str | None:
    """Return the program that runs if `path` is executed: for a script, its interpreter, or None.

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
    """Return whether `kcache run` reaches an executable file, and how or why not.

    The loader of this process is asked (`ld.so --list`), which does not run the program.
    """
    if os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID):
        return False, "it is set-uid or set-gid, so the loader takes nothing into it"
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        loader = re.search(r"/\S*/ld-linux\S*", maps.read())
    if loader is None:
        return False, "this Python has another loader than glibc's"
    command = [loader[0], "--list", path]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
    )
    if done.returncode != 0 or "statically linked" in done.stdout:
        reason = done.stderr.strip().rpartition("shared libraries: ")[2]
        return False, f"glibc does not load it: {reason}" if reason else "it is linked statically"
    linked = re.search(r"libnvrtc\.so\S*", done.stdout)
    return True, f"; it is linked with {linked[0]}" if linked else ", if it loads NVRTC"
