"""Machine facts: gathers the facts for `doctor`, and changes nothing on the machine.

Gathering never fails. If something can't be found out, its fact is None, or the reason as text. A
module that may be broken is imported only when its fact is needed. So this works even if a
dependency is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kcache.config import (
    VARIABLES,
    Config,
    default_cache_directory,
    temporary_cache_directory,
)
from kcache.directory import CacheDirectory, is_cache, prepare
from kcache.environment import unknown_variables
from kcache.errors import ConfigError, CorruptEntryError, IncompatibleEntryError, KcacheError
from kcache.util.cuda_driver import Version, driver_version
from kcache.util.mounts import FileSystem, file_system
from kcache.util.safe_path import present_user

if TYPE_CHECKING:
    from kcache.engine.stats import Stats
    from kcache.other_backends import Holder

__all__ = ["Compiler", "Contents", "Facts", "CacheLocation", "gather"]

#: The libraries that kcache needs beside Python itself.
_LIBRARIES = ("lmdb", "platformdirs", "xxhash", "zstandard")
#: How many entries a diagnosis reads.
_SAMPLE = 1000


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """The directory of the cache.

    Attributes:
        path: where the cache is, or would be made.
        source: its origin: `argument`, a variable or `default`.
        exists: whether it is there. If not, the rest is about the nearest existing directory above
            it.
        is_directory: whether it is one.
        owner: its user's id.
        mode: its permission bits.
        obstacle: why nothing can be written to it, or empty.
        refused: why a cache refuses it (unsafe, or somebody else's), or empty.
        system: its file system.
        free: bytes that this user may still write there.
        total: bytes of the whole file system.
    """

    path: str
    source: str
    exists: bool
    is_directory: bool
    owner: int
    mode: int
    obstacle: str
    refused: str
    system: FileSystem
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in the cache.

    Attributes:
        error: why the backend can't be used, or empty.
        size: stored bytes.
        sampled: entries that were read.
        damaged: how many of them are damaged.
        unreadable: how many of them the backend does not return.
        stats: the counts of all processes, or None.
        stats_error: why they can't be read, or empty.
    """

    error: str = ""
    size: int = 0
    sampled: int = 0
    damaged: int = 0
    unreadable: int = 0
    stats: Stats | None = None
    stats_error: str = ""


@dataclass(frozen=True, slots=True)
class Compiler:
    """NVRTC.

    Attributes:
        bindings: whether cuda-python's bindings of it are installed.
        path: its file; empty if there is none.
        builtins: whether its builtins library lies beside it.
        version: major and minor, or None.
        error: why it can't be loaded, or empty.
    """

    bindings: bool
    path: str
    builtins: bool
    version: Version | None
    error: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of this machine's set-up.

    Attributes:
        python: Python's version.
        libraries: name -> version of each dependency.
        broken: name -> why it can't be imported.
        bad_settings: what is wrong with the environment, a sentence per variable.
        config: the settings, with defaults for those that are wrong.
        user: effective user id; None on systems without such ids.
        location: the directory; None if a wrong setting hides it.
        homeless: whether the cache is in the temporary directory, because the user has no home.
        backends: names of the installed backends.
        contents: what is in the cache; None if there is none.
        compiler: NVRTC.
        driver: the newest CUDA version that the driver supports; None without a driver.
        recording_problem: why compiles can't be recorded, or empty.
        unknown_variables: names that begin with `KCACHE_`, and that kcache does not read.
        bad_saved: what is wrong with the settings that are saved in the directory, a sentence each.
        elsewhere: other backends in the directory that have entries.
    """

    python: tuple[int, ...]
    libraries: dict[str, str]
    broken: dict[str, str]
    bad_settings: tuple[str, ...]
    config: Config
    user: int | None
    location: CacheLocation | None
    homeless: bool
    backends: tuple[str, ...]
    contents: Contents | None
    compiler: Compiler
    driver: Version | None
    recording_problem: str
    unknown_variables: tuple[str, ...] = ()
    bad_saved: tuple[str, ...] = ()
    elsewhere: tuple[Holder, ...] = ()


def gather(
    directory: str | None = None,
    *,
    system: Callable[[str], FileSystem] = file_system,
    driver: Callable[[], Version | None] | None = None,
) -> Facts:
    """Return what is known of this machine's set-up.

    Args:
        directory: of the cache; by default that of the environment or the defaults.
        system: tells the file system of a path.
        driver: tells the newest CUDA version that the driver supports, or None.

    Raises:
        ConfigError: `directory` is not allowed.
    """
    config, bad = _settings(directory)
    libraries, broken = _libraries()
    location = None if bad.keys() & {"directory"} else _location(config, system)
    there = location is not None and location.exists and not location.refused
    saved = _Saved(config, (), ())
    if location is not None and there:
        saved = _saved(config, location.path)
        config = saved.config
    return Facts(
        python=tuple(sys.version_info[:3]),
        libraries=libraries,
        broken=broken,
        bad_settings=tuple(bad.values()),
        config=config,
        user=None if sys.platform == "win32" else present_user(),
        location=location,
        homeless=location is not None and _is_homeless(location),
        backends=_backend_names(),
        contents=_contents(config, location.path) if location is not None and there else None,
        compiler=_compiler(),
        driver=(driver or driver_version)(),
        recording_problem=_recording_problem(),
        unknown_variables=tuple(unknown_variables()),
        bad_saved=saved.problems,
        elsewhere=saved.elsewhere,
    )


# -- settings and libraries ------------------------------------------------------------------------


def _settings(directory: str | None) -> tuple[Config, dict[str, str]]:
    """Return the settings, and setting -> what is wrong with the variable for it."""
    harmless = {variable.setting: variable.default for variable in VARIABLES}
    harmless |= {"directory": directory or os.curdir, "log": "error"}
    Config.load(harmless)
    given = {"directory": directory} if directory is not None else {}
    bad: dict[str, str] = {}
    for name in harmless:
        try:
            Config.load({n: value for n, value in harmless.items() if n != name} | given)
        except ConfigError as error:
            bad[name] = str(error)
    return Config.load({name: harmless[name] for name in bad} | given), bad


def _libraries() -> tuple[dict[str, str], dict[str, str]]:
    """Return name -> version of packages that can be imported, and name -> reason of others."""
    from importlib import metadata

    found: dict[str, str] = {}
    broken: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation may raise anything
            broken[name] = f"{type(error).__name__}: {error}"
            continue
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "of unknown version"
    return found, broken


def _backend_names() -> tuple[str, ...]:
    from kcache.registry import backend_names

    return tuple(backend_names())


# -- the directory ---------------------------------------------------------------------------------


def _location(config: Config, system: Callable[[str], FileSystem]) -> CacheLocation:
    named = config.directory.value
    path = os.path.abspath(default_cache_directory() if named is None else named)
    nearest = path
    while not os.path.lexists(nearest) and os.path.dirname(nearest) != nearest:
        nearest = os.path.dirname(nearest)
    owner = mode = free = total = 0
    is_directory = os.path.isdir(nearest)
    obstacle, refused = "", _refusal(path)
    try:
        status = os.stat(nearest)
        owner, mode = status.st_uid, status.st_mode & 0o7777
        if is_directory:
            obstacle = _obstacle(nearest, probe=nearest == path and not refused)
            total, _, free = shutil.disk_usage(nearest)
    except OSError as error:
        obstacle = error.strerror or str(error)
    return CacheLocation(
        path=path,
        source=config.directory.source,
        exists=nearest == path,
        is_directory=is_directory,
        owner=owner,
        mode=mode,
        obstacle=obstacle,
        refused=refused,
        system=system(nearest),
        free=free,
        total=total,
    )


def _refusal(path: str) -> str:
    """Return why a cache refuses a directory: it is unsafe, or somebody else's. Change nothing."""
    try:
        prepare(path, read_only=True)
    except ConfigError as error:
        return str(error)
    except KcacheError:  # it can't be looked at, or is not there
        return ""
    return ""


def _is_homeless(location: CacheLocation) -> bool:
    try:
        return location.source == "default" and location.path == temporary_cache_directory()
    except OSError:  # nor is there a temporary directory
        return False


def _obstacle(directory: str, *, probe: bool) -> str:
    """Return why nothing can be written to a directory, by a nameless file or by access(2)."""
    try:
        if probe:
            with tempfile.TemporaryFile(dir=directory):
                return ""
        effective = os.access in os.supports_effective_ids
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=effective):
            return f"Permission denied in {directory}"
    except OSError as error:
        return error.strerror or str(error)
    return ""


class _Saved(NamedTuple):
    """The settings that a directory adds, their errors, and its other backends."""

    config: Config
    problems: tuple[str, ...]
    elsewhere: tuple[Holder, ...]


def _saved(config: Config, path: str) -> _Saved:
    from kcache.registry import backend_names, holders, settled
    from kcache.saved_settings import read

    files = CacheDirectory(path)
    try:
        if not is_cache(path):
            return _Saved(config, (), ())
    except KcacheError:  # it is unsafe or no cache; another finding says so
        return _Saved(config, (), ())
    saved = read(files)
    problems = list(saved.problems)
    backend = saved.values.get("backend")
    if backend is not None and backend not in backend_names():
        problems.append(f"{files.settings}: there is no backend {backend!r}; it does not count")
    config = settled(config, files)
    return _Saved(config, tuple(problems), tuple(holders(files, besides=config.backend.value)))


def _contents(config: Config, path: str) -> Contents:
    """Examine the cache, with a sample of its entries only."""
    try:
        stats, stats_error = _stats(path)
        try:
            size, sampled, damaged, unreadable = _sample(config, path)
        except KcacheError as error:
            return Contents(error=str(error), stats=stats, stats_error=stats_error)
    except ImportError as error:  # of xxhash, say
        return Contents(error=f"{error.name or 'a module'} can't be imported")
    return Contents("", size, sampled, damaged, unreadable, stats, stats_error)


def _stats(path: str) -> tuple[Stats | None, str]:
    from kcache.engine.stats import StatsFile

    try:
        return StatsFile(CacheDirectory(path).stats).total(), ""
    except KcacheError as error:
        return None, str(error)


def _sample(config: Config, path: str) -> tuple[int, int, int, int]:
    """Return stored bytes, and the numbers of entries that were read, damaged and unreadable.

    Raises:
        KcacheError: the backend can't be used.
    """
    from kcache.entry import decode
    from kcache.registry import open_backend

    name, cap = config.backend.value, config.max_size.value
    backend = open_backend(name, path, max_size=cap, read_only=True)
    sampled = damaged = unreadable = 0
    try:
        size = backend.usage().bytes
        for info in islice(backend.scan(), _SAMPLE):
            sampled += 1
            try:
                blob = backend.get(info.key)
                if blob is not None:
                    decode(blob, info.key)
            except IncompatibleEntryError:  # the maker does not matter: it is intact
                pass
            except CorruptEntryError:
                damaged += 1
            except KcacheError:
                unreadable += 1
    finally:
        backend.close()
    return size, sampled, damaged, unreadable


# -- compiler and driver ---------------------------------------------------------------------------


def _compiler() -> Compiler:
    from kcache.nvrtc import library

    bindings = False
    with suppress(ImportError, ValueError):
        bindings = importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    found = library.find()
    version: Version | None = None
    error = ""
    if found is not None:
        from kcache.nvrtc import compiler

        try:
            version = compiler.version()
        except KcacheError as failure:
            error = str(failure)
    path = "" if found is None else found.path
    builtins = False
    with suppress(OSError):
        names = os.listdir(os.path.dirname(path)) if path else ()
        builtins = any(name.startswith(library._BUILTINS) for name in names)
    return Compiler(bindings, path, builtins, version, error)


def _recording_problem() -> str:
    """Return why compiles can't be recorded, so that nothing with headers is cached, or empty."""
    from kcache.nvrtc import compiler

    try:
        return compiler.recording_problem()
    except KcacheError:  # there is no compiler; another finding says so
        return ""
