"""SavedSettings: settings that stay with the directory of a cache, for every program that uses it.

``settings.json`` holds one JSON object, its format and the settings, as the user wrote them::

    {"format": "kcache-settings/1", "settings": {"backend": "zstd", "max_size": "5GiB"}}

Arguments and environment variables come before saved settings. Defaults come after them.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, cast

from kcache.config import VARIABLES, Config, Setting
from kcache.errors import BackendError, ConfigError
from kcache.util.locks import RangeLocks
from kcache.util.marker import set_aside
from kcache.util.nearest import did_you_mean
from kcache.util.open_file import NotOursError, open_own

if TYPE_CHECKING:
    from kcache.directory import CacheDirectory

__all__ = ["NAMES", "SOURCE", "SavedSettings", "change", "read"]

#: The source of a saved setting, as commands show it; the file's name.
SOURCE = "settings.json"
#: Settings that can be saved: those of the cache, and of the work for it. Settings for one run of a
#: program can't be saved (read_only, disable, recache, record, log). Settings that decide whose
#: kernels are trusted and who gets ours can't be saved either (remote, signing_key_file).
NAMES = (
    "backend",
    "max_size",
    "memory_size",
    "header_check",
    "relocation",
    "wait",
    "workers",
    "compile_timeout",
)
_FORMAT = "kcache-settings/1"
_KIND = _FORMAT.partition("/")[0] + "/"
#: The largest size of the file in bytes. Each of the eight settings has less than 100.
_MOST = 4096
#: The byte of the marker that a process locks while it changes the settings. The marker has 77
#: bytes.
_LOCKED = 1 << 20
#: How many seconds a process waits for another one that changes the settings. A change takes 10 ms.
_PATIENCE = 10.0
_PARSERS = {each.setting: each.parse for each in VARIABLES if each.setting in NAMES}


class SavedSettings(NamedTuple):
    """The settings in a directory's file. Immutable.

    Attributes:
        texts: name -> text, as it stands in the file; also names that this version does not know.
        values: name -> value of those that are known and allowed.
        problems: what is wrong with the file, a sentence each.
    """

    texts: Mapping[str, str]
    values: Mapping[str, object]
    problems: tuple[str, ...] = ()

    def below(self, config: Config) -> Config:
        """Return the settings of a program, with saved settings instead of defaults."""
        found = {
            name: Setting(value, SOURCE)
            for name, value in self.values.items()
            if getattr(config, name).source == "default"
        }
        return config.replace(**found) if found else config


class _DamagedError(ValueError):
    """The file is ours, but its content is not what kcache wrote."""


# -- reading ---------------------------------------------------------------------------------------


def read(files: CacheDirectory) -> SavedSettings:
    """Return the settings that are saved in a directory; `problems` lists what can't be used.

    It never raises, waits or follows a link. The caller must have checked that the directory is
    safe.
    """
    try:
        return _checked(files.settings, _texts(files.settings))
    except FileNotFoundError:
        return SavedSettings({}, {})
    except (OSError, ValueError) as error:
        problem = f"{files.settings} can't be used: {_reason(error)}. Until then it does not count"
        return SavedSettings({}, {}, (problem,))


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        link = error.errno in (errno.ELOOP, errno.EMLINK)
        return "it is a link" if link else error.strerror or str(error)
    return str(error)


def _texts(path: str) -> dict[str, str]:
    """Return name -> text.

    Raises:
        _DamagedError: it holds something else.
        NotOursError: it is no file of ours, or of another version of kcache.
        OSError: it is not there, or can't be read.
    """
    file = open_own(path, os.O_RDONLY)
    text = os.read(file.fd, _MOST + 1)
    if len(text) > _MOST:
        raise _DamagedError(f"it has more than {_MOST} bytes")
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _DamagedError("it is damaged (no JSON)") from error
    about = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    form, settings = about.get("format"), about.get("settings")
    if isinstance(form, str) and form.startswith(_KIND) and form != _FORMAT:
        raise NotOursError(f"another version of kcache wrote it ({form[:40]!r})", path)
    if form != _FORMAT or not isinstance(settings, dict):
        raise _DamagedError("it is damaged (no settings of kcache)")
    texts = cast("dict[str, object]", settings)
    if not all(isinstance(value, str) for value in texts.values()):
        raise _DamagedError("it is damaged (a setting that is no text)")
    return cast("dict[str, str]", texts)


def _checked(path: str, texts: Mapping[str, str]) -> SavedSettings:
    values: dict[str, object] = {}
    problems: list[str] = []
    for name, text in texts.items():
        if name not in _PARSERS:
            problems.append(f"{path}: {name!r} is no setting that this version of kcache reads")
            continue
        try:
            values[name] = _parse(name, text)
        except ConfigError as error:
            problems.append(f"{path}: {error}. Until then it does not count")
    return SavedSettings(texts, values, tuple(problems))


def _parse(name: str, text: str) -> object:
    return _PARSERS[name](text, name=name)


# -- writing ---------------------------------------------------------------------------------------


def change(
    files: CacheDirectory, given: Mapping[str, str], gone: Iterable[str] = ()
) -> SavedSettings:
    """Save settings, forget those in `gone`, and return all settings that are saved then.

    Processes: two changes at the same time are both kept. Crash: a process that is killed leaves
    either the old settings or the new ones. A damaged file gets another name (`.damaged` behind its
    own), and a new one is made.

    Args:
        files: a directory that is a cache and safe.
        given: name -> text.
        gone: names.

    Raises:
        ConfigError: there is no such setting, it can't be saved, or its value is not allowed.
        BackendError: the file can't be written, or is not ours.
    """
    forgotten = list(gone)
    for name, text in given.items():
        _require_known(name)
        _parse(name, text)
    try:
        with _alone(files):
            texts, damaged = _texts_to_change(files.settings)
            for name in forgotten:
                if name not in texts:  # a setting of another version can be forgotten, too
                    _require_known(name)
                texts.pop(name, None)
            texts.update(given)
            data = _encoded(texts)
            if damaged:
                set_aside(files.settings)
            _write(files, data)
            return _checked(files.settings, texts)
    except OSError as error:
        raise BackendError(f"{files.settings} can't be changed: {_reason(error)}") from error


def _require_known(name: str) -> None:
    if name not in _PARSERS:
        more = did_you_mean(name, NAMES)
        raise ConfigError(
            f"setting {name!r} can't be saved{more}; allowed: {', '.join(sorted(NAMES))}"
        )


@contextmanager
def _alone(files: CacheDirectory) -> Generator[None]:
    """Keep other processes from changing the settings during the block.

    The lock is on the marker, which nobody ever replaces.
    """
    locks = RangeLocks(open_own(files.marker, os.O_RDWR))
    with locks.held(_LOCKED, 1, timeout=_PATIENCE):
        yield


def _texts_to_change(path: str) -> tuple[dict[str, str], bool]:
    """Return name -> text, and whether the file is damaged."""
    try:
        return _texts(path), False
    except FileNotFoundError:
        return {}, False
    except _DamagedError:
        return {}, True


def _encoded(texts: Mapping[str, str]) -> bytes:
    """Return the new content of the file; nothing for no settings.

    Raises:
        ConfigError: it would be too long.
    """
    if not texts:
        return b""
    ordered = dict(sorted(texts.items()))
    written = json.dumps({"format": _FORMAT, "settings": ordered}) + "\n"
    data = written.encode()
    if len(data) > _MOST:
        raise ConfigError(f"these settings take {len(data)} bytes; allowed: {_MOST}")
    return data


def _write(files: CacheDirectory, data: bytes) -> None:
    """Replace the file with the settings at once; remove it if there are none."""
    if not data:
        with suppress(FileNotFoundError):
            os.unlink(files.settings)
        return
    # One name for all: only one process writes at a time, and it finds the file that a killed
    # process left.
    draft = open_own(files.settings_draft, os.O_WRONLY | os.O_CREAT)
    try:
        os.ftruncate(draft.fd, 0)
        if os.write(draft.fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), files.settings)
        os.fsync(draft.fd)
        del draft
        os.replace(files.settings_draft, files.settings)
    except BaseException:
        with suppress(OSError):
            os.unlink(files.settings_draft)
        raise
