"""RequestRecorder: records all requests of a run, so that `kcache warm` can compile them elsewhere.

A recording is text, one JSON object per line:

    {"kcache_request": 1, "source": ..., "names": [...], "options": {...}, "headers": {...},
     "extra_key": "(hexadecimal)", "source_name": ..., "directory": ..., "roots": [...]}

`options` has the fields of `CompileOptions` that differ from their defaults, including `arch`.
`directory` is the working directory of the request, or null if the request does not depend on it.
`roots` are two directories: that of the recording, and that of the Python environment. If a path
below one of them does not exist when the recording is read, the reader replaces that part of the
path by the directory that the recording, or the environment, is in now. This is done for include
paths (also in `extra_options`), for `directory`, and for the folder of an absolute `source_name`.
A start of nvcc is recorded as `{"kcache_request": 1, "nvcc": {...}}`; see
`kcache.nvcc.request.Start`.

Every line is appended by one write. If a killed process left an incomplete line, the next write
begins with a line end, so only the incomplete line is lost. Readers skip empty lines, which
concurrent writers may leave.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.nvrtc.options import CompileOptions, parse_options
from kcache.nvrtc.request import CompileRequest, Request
from kcache.util import log
from kcache.util.locks import pread
from kcache.util.open_file import NotOursError, open_own

#: The first field of each line in a recording, and its value, the version of the format.
MARK = "kcache_request"
VERSION = 1
#: The field that contains a start of nvcc.
NVCC = "nvcc"
_BEGIN = f'{{"{MARK}"'.encode()


class RequestRecorder:
    """Appends requests to a file, each once per process.

    Threads: several may use one object. Processes: any number may append to one file, but only on a
    local disk, because network file systems don't append atomically. A request that several
    processes make is recorded several times. Crash: a killed process leaves at most one incomplete
    line. Fork: a forked child may use the object. A failure to write is logged once, not raised.

    Args:
        path: the path of the file. The file is created at the first request, with mode 0600,
            because sources may be secret. An existing file must be a recording that belongs to the
            current user.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path = os.path.abspath(os.fsdecode(path))
        except TypeError:
            name = type(path).__name__
            raise ArgumentTypeError(f"path: expected the path of a file, got {name}") from None
        self._roots = _roots(self.path)
        # There is no lock, because a fork could leave it locked: `setdefault` decides which thread
        # writes.
        self._seen: dict[str, object] = {}
        self.closed = False
        self._failed = False

    def note(self, request: Request) -> None:
        """Record the request, unless this object has already recorded it."""
        key = request.key + (request.source_name if request.anywhere else request.location)
        if key in self._seen or self.closed:
            return
        mine = object()
        if self._seen.setdefault(key, mine) is mine:
            self._write(request)

    def close(self) -> None:
        """Stop recording. Idempotent."""
        self.closed = True

    def _write(self, request: Request) -> None:
        try:
            line = _encode(request, self._roots) + b"\n"
            with open_own(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
                size = os.fstat(file.fd).st_size
                if not is_recording(pread(file.fd, len(_BEGIN), 0)):
                    raise NotOursError(_NO_RECORDING, self.path)
                if size and pread(file.fd, 1, size - 1) != b"\n":
                    line = b"\n" + line
                written = os.write(file.fd, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
        except (OSError, TypeError, ValueError) as error:
            if not self._failed:
                self._failed = True
                reason = getattr(error, "strerror", None) or error
                log.warning("kernels are not recorded in %s: %s", self.path, reason)


def is_recording(data: bytes) -> bool:
    """Return whether a file that begins with `data` is either a recording or empty."""
    return data.startswith(_BEGIN) or _BEGIN.startswith(data)


def refuse_other_file(path: str) -> None:
    """Raise ConfigError if there is a file at `path` that is not a recording of the current user.

    A recorder would not write to that file.
    """
    try:
        with open_own(path, os.O_RDONLY) as file:
            if not is_recording(pread(file.fd, len(_BEGIN), 0)):
                raise NotOursError(_NO_RECORDING, path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"kernels can't be recorded in {path}: {error.strerror}") from error


def read_starts(path: str) -> list[dict[str, Any]]:
    """Return the starts of nvcc in the recording at `path`; none if it is not a recording."""
    with open(path, "rb") as file:
        data = file.read()
    found: list[dict[str, Any]] = []
    for line in data.split(b"\n") if data and is_recording(data) else ():
        with suppress(ValueError, RecursionError):  # an incomplete line
            start = json.loads(line or b"{}").get(NVCC)
            if isinstance(start, dict) and start not in found:
                found.append(start)
    return found


def read_recording(path: str, data: bytes) -> Iterator[tuple[CompileRequest, str | None]]:
    """Yield (request, working directory) for each request in the recording at `path`.

    `data` is the content of the recording. The working directory is None if the request does not
    depend on it. Starts of nvcc are left out. An incomplete line is skipped with a warning. At the
    end, a warning for each recorded directory that does not exist here is logged.

    Raises:
        ConfigError: a complete line is not a recorded request.
    """
    now = _roots(os.path.abspath(path))
    missing: dict[str, None] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found: object = json.loads(line)
        except (ValueError, RecursionError):
            log.warning("%s, line %d is incomplete and was skipped", path, number)
            continue
        if isinstance(found, dict) and NVCC in found:
            continue
        try:
            yield _decode(found, now, missing)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    for folder in missing:
        log.warning("%s was recorded with the directory %s, which does not exist", path, folder)


_NO_RECORDING = "it is not a recording; expected a new file, or one that kcache recorded into"


# -- lines -----------------------------------------------------------------------------------------


def _encode(request: Request, roots: tuple[str, ...]) -> bytes:
    if request.start is not None:
        return json.dumps({MARK: VERSION, NVCC: request.start.recorded()}).encode()
    options, defaults = request.options, CompileOptions()
    line = {
        MARK: VERSION,
        "source": request.source,
        "names": request.names,
        "options": {
            name: value
            for name in options._fields
            if (value := getattr(options, name)) != getattr(defaults, name)
        },
        "headers": dict(request.headers),
        "extra_key": request.extra_key.hex(),
        "source_name": request.source_name,
        "directory": None if request.anywhere else request.search.directory,
        "roots": roots,
    }
    return json.dumps(line).encode()


def _decode(
    found: object, now: tuple[str, ...], missing: dict[str, None]
) -> tuple[CompileRequest, str | None]:
    if not isinstance(found, dict) or MARK not in found:
        raise ConfigError(f"expected a recorded request: a JSON object with the key {MARK!r}")
    line = cast("dict[str, Any]", found)
    if line[MARK] != VERSION:
        raise ConfigError(f"{MARK}: expected {VERSION}, got {line[MARK]!r}")
    try:
        roots = [(str(was), here) for was, here in zip(line["roots"], now, strict=False)]
        options = CompileOptions(**line["options"])
        extra = parse_options(options.extra_options)
        moved = _found(extra.include_paths, roots, missing)
        directory = None if line["directory"] is None else str(line["directory"])
        folder, name = os.path.split(line["source_name"])
        if os.path.isabs(folder):
            (folder,) = _found((folder,), roots, {})
        request = CompileRequest(
            line["source"],
            tuple(line["names"]),
            options.replace(
                include_paths=_found(options.include_paths, roots, missing),
                extra_options=extra.with_include_paths(moved),
            ),
            dict(line["headers"]),
            bytes.fromhex(line["extra_key"]),
            os.path.join(folder, name),
        )
    except KeyError as error:
        raise ConfigError(f"{error.args[0]!r} is missing") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"expected a recorded request: {error}") from error
    if directory is not None:
        (directory,) = _found((directory,), roots, missing)
        if not os.path.isdir(directory):
            directory = now[0]
    return request, directory


def _found(
    paths: Iterable[str | os.PathLike[str]], roots: list[tuple[str, str]], missing: dict[str, None]
) -> list[str]:
    """Return the present paths of recorded directories.

    A path that still exists is returned unchanged, because its text may be part of the key.
    Otherwise, each recorded root in `roots` is replaced by the present root after it. A path that
    is not found in this way is added to `missing`, and returned unchanged.
    """
    found: list[str] = []
    for each in paths:
        path = os.fspath(each)
        moved = [
            here + path[len(was) :]
            for was, here in roots
            if os.path.join(path, "").startswith(os.path.join(was, ""))
        ]
        there = next(filter(os.path.isdir, (path, *moved)), "") if os.path.isabs(path) else path
        if not there:
            missing[path] = None
        found.append(there or path)
    return found


def _roots(path: str) -> tuple[str, ...]:
    # In a virtual environment, `site` sets `sys.prefix`; a daemon runs without `site`.
    environment = os.path.dirname(os.path.dirname(sys.executable or ""))
    if not os.path.isfile(os.path.join(environment, "pyvenv.cfg")):
        environment = sys.prefix
    return os.path.dirname(path), environment
