"""KernelList: the kernels to compile ahead of time, read from a file.

The file is a list in TOML or JSON, or a recording that a `RequestRecorder` wrote.
docs/reference/kernel-list.md describes the format.
"""

from __future__ import annotations

import glob
import json
import os
import tomllib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from kcache.errors import ConfigError
from kcache.gpu_code import kernels_in
from kcache.nvrtc.options import CompileOptions, Option, parse_arch, parse_options
from kcache.nvrtc.request import (
    DEFAULT_NAME,
    DEFAULT_NAMES,
    CompileRequest,
    Request,
    as_text,
    read_source,
    title_of,
)
from kcache.util.cuda_driver import current_arch
from kcache.util.hints import did_you_mean
from kcache.warm.recording import is_recording, read_recording

_OPTIONS = tuple(name for name in CompileOptions._fields if name != "arch")
#: The keys that `defaults` and every kernel may have; the keys of a kernel; those of the file.
_SHARED = ("archs", "arch", *_OPTIONS, "headers", "extra_key", "source_name", "directory")
_KERNEL = ("source", "text", "names", *_SHARED)
_TOP = ("defaults", "kernels")

_Table = Mapping[str, object]


class ListedKernel(NamedTuple):
    """One kernel of a list, for one architecture.

    Attributes:
        request: the request that compiles the kernel.
        directory: the working directory for the request; None if the request does not depend on it.
        source: the path of the source as in the list, or the name of the source.
        identity: the same for two kernels only if one compile is enough for both.
    """

    request: CompileRequest
    directory: str | None
    source: str
    identity: tuple[str, str | None]

    @property
    def arch(self) -> str:
        """The architecture that the options name, or an empty text."""
        options = self.request.options
        return (options and options.target) or ""

    @property
    def title(self) -> str:
        """The source and the requested names, or the source's kernels if the list has neither."""
        request = self.request
        unnamed = not request.names and self.source in DEFAULT_NAMES
        return title_of(self.source, kernels_in(str(request.source)) if unnamed else request.names)


def read_list(path: str, archs: Sequence[str | int] = ()) -> list[ListedKernel]:
    """Return the kernels that the file at `path` lists, each once, in the order of the file.

    Each kernel is returned for every architecture in `archs`. If `archs` is empty, the
    architectures are those that the file names, or that of the current GPU if the file names none.
    Incomplete lines of a recording are skipped with a warning.

    Raises:
        ConfigError: the file has an error; the message says where, and what was expected.
        OSError: the file can't be read.
    """
    targets = tuple(dict.fromkeys(map(parse_arch, archs)))
    with open(path, "rb") as stream:
        data = stream.read()
    if path.endswith(".jsonl") or (data and is_recording(data)):
        found = _recorded(path, data, targets)
    else:
        found = _Written(path, targets).kernels(_parse(path, data))
    return list({wanted.identity: wanted for wanted in found}.values())


# -- recorded --------------------------------------------------------------------------------------


def _recorded(path: str, data: bytes, archs: Sequence[str]) -> Iterator[ListedKernel]:
    for request, directory in read_recording(path, data):
        options = request.options or CompileOptions()
        with _located(f"{path}: {request.source_name}"):
            for arch in archs or (None,):
                target = options if arch is None else _for_arch(options, arch)
                yield _wanted(request._replace(options=target), directory, request.source_name)


# -- written by hand -------------------------------------------------------------------------------


def _parse(path: str, data: bytes) -> object:
    """Return the document in the TOML or JSON file at `path`, whose bytes are `data`."""
    kind = os.path.splitext(path)[1].lower()
    if kind not in (".toml", ".json"):
        expected = "a list of kernels (.toml, .json) or a recording (.jsonl)"
        raise ConfigError(f"{path}: expected {expected}, got the suffix {kind!r}")
    text = as_text(path, data.removeprefix(b"\xef\xbb\xbf"))
    try:
        return (json.loads if kind == ".json" else tomllib.loads)(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {kind[1:].upper()}: {error}") from error


class _Written:
    """Reads the kernels of a list in TOML or JSON.

    Args:
        path: the path of the file, as the user has written it.
        archs: the architectures to use instead of those that the file names; if empty, those that
            the file names are used.
    """

    def __init__(self, path: str, archs: Sequence[str]) -> None:
        self._path = path
        self._folder = os.path.dirname(os.path.abspath(path))
        self._archs = archs

    def kernels(self, document: object) -> Iterator[ListedKernel]:
        """Yield every kernel in `document` for every architecture."""
        with _located(self._path):
            top = _table(document, "the file")
            _check_keys(top, _TOP)
            tables = top.get("kernels")
            if not isinstance(tables, list) or not tables:
                raise ConfigError("kernels: expected [[kernels]] with source or text, got none")
        with _located(f"{self._path}, defaults"):
            defaults = _table(top.get("defaults", {}), "defaults")
            _check_keys(defaults, _SHARED)
            self._options(defaults)
            list(self._targets(defaults))
        for number, each in enumerate(cast("list[object]", tables), 1):
            with _located(f"{self._path}, kernel {number}"):
                table = _table(each, "the kernel")
                _check_keys(table, _KERNEL)
                yield from self._kernel(_merged(defaults, table))

    def _kernel(self, table: _Table) -> Iterator[ListedKernel]:
        """Yield a kernel for each source in a kernel's table and each architecture."""
        given, extra_key = self._options(table), _extra_key(table)
        archs = self._archs or tuple(self._targets(table)) or _own_arch(given)
        names, headers = tuple(_texts(table, "names")), cast("Any", table.get("headers"))
        extra = [self._filled(each) for each in given.extra_options]
        for path, text in self._sources(table):
            directory, name = self._directory(table, path), self._source_name(table, path)
            includes = [
                seen_from(directory, self._folder, self._filled(str(each)))
                for each in given.include_paths
            ]
            options = given.replace(include_paths=includes, extra_options=extra)
            for arch in archs:
                target = _for_arch(options, arch)
                request = CompileRequest(text, names, target, headers, extra_key, name)
                yield _wanted(request, directory, path or name)

    def _options(self, table: _Table) -> CompileOptions:
        given = {name: table[name] for name in _OPTIONS if name in table}
        return CompileOptions(**cast("dict[str, Any]", given))

    def _targets(self, table: _Table) -> Iterator[str]:
        if "arch" in table and "archs" in table:
            raise ConfigError("expected one of arch and archs, got both")
        given = table.get("arch", table.get("archs", ()))
        several = given if isinstance(given, (list, tuple)) else (given,)  # pyright: ignore[reportUnknownVariableType]
        yield from map(parse_arch, cast("Sequence[str | int]", several))

    def _sources(self, table: _Table) -> Iterator[tuple[str, str]]:
        """Yield (path, text) of each source in `table`.

        The path is relative to the folder of the list. It is empty if the table contains the text.
        """
        if ("source" in table) == ("text" in table):
            raise ConfigError("expected one of source and text, got both or neither")
        text = _text(table, "text", "CUDA C++ source text")
        if text is not None:
            yield "", text
            return
        patterns = tuple(_texts(table, "source"))
        if not patterns:
            raise ConfigError("source: expected a path or glob, or several, got none")
        for pattern in patterns:
            for path in self._matches(pattern):
                yield path, read_source(os.path.join(self._folder, path), path)[0]

    def _matches(self, pattern: str) -> list[str]:
        if os.path.isfile(os.path.join(self._folder, pattern)):
            return [pattern]
        found = glob.glob(pattern, root_dir=self._folder, recursive=True)
        files = sorted(path for path in found if os.path.isfile(os.path.join(self._folder, path)))
        if not files:
            raise ConfigError(f"source={pattern!r}: no such file in {self._folder}")
        return files

    def _directory(self, table: _Table, path: str) -> str:
        """Return the working directory that the list names; by default, that of `kcache compile`.

        `kcache compile` uses the folder of the source's file. If there is no file, or the list
        contains `source_name`, the folder of the list is used.
        """
        given = _text(table, "directory", "a path")
        if given is None:
            beside = bool(path) and "source_name" not in table
            folder = os.path.join(self._folder, os.path.dirname(path)) if beside else self._folder
            return folder.rstrip(os.sep) or os.sep
        folder = os.path.normpath(os.path.join(self._folder, given))
        if not os.path.isdir(folder):
            raise ConfigError(f"directory={given!r}: no such directory in {self._folder}")
        return folder

    def _source_name(self, table: _Table, path: str) -> str:
        given = _text(table, "source_name", "text")
        if given is None:
            return os.path.basename(path) or DEFAULT_NAME
        return self._filled(given).replace("{path}", path).replace("{name}", os.path.basename(path))

    def _filled(self, text: str) -> str:
        return text.replace("{folder}", self._folder)


def seen_from(directory: str, base: str, path: str) -> str:
    """Return a path relative to `base` as a path relative to `directory`.

    An absolute path is returned unchanged.
    """
    here = os.path.realpath(directory)
    if os.path.isabs(path) or here == os.path.realpath(base):
        return path
    return os.path.relpath(os.path.realpath(os.path.join(base, path)), here)


# -- values ----------------------------------------------------------------------------------------


@contextmanager
def _located(where: str) -> Generator[None]:
    """Prefix the message of every ConfigError from the block with `where`, a place in the file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _table(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{what}: expected a table, got {type(value).__name__}")
    return cast("dict[str, object]", value)


def _check_keys(table: _Table, allowed: Sequence[str]) -> None:
    for name in table:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            raise ConfigError(f"no key {name!r}{hint}; expected one of {', '.join(allowed)}")


def _merged(defaults: _Table, table: _Table) -> _Table:
    """Return a kernel's table with the defaults for the keys that it lacks."""
    replaced = ("arch", "archs") if "arch" in table or "archs" in table else ()
    return {name: defaults[name] for name in defaults if name not in replaced} | dict(table)


def _text(table: _Table, name: str, expected: str) -> str | None:
    given = table.get(name)
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"{name}: expected {expected}, got {type(given).__name__}")
    return given


def _texts(table: _Table, name: str) -> Iterable[str]:
    """Return the value of the key `name`, one text or an array of texts, as several texts."""
    given = table.get(name, ())
    several = (given,) if isinstance(given, str) else given
    if not isinstance(several, (list, tuple)) or not all(isinstance(each, str) for each in several):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"{name}: expected text or an array of texts, got {given!r}")
    return cast("Iterable[str]", several)


def _extra_key(table: _Table) -> bytes:
    given = table.get("extra_key", "")
    try:
        return bytes.fromhex(cast("str", given))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"extra_key: expected hexadecimal digits, got {given!r}") from error


def _own_arch(options: CompileOptions) -> tuple[str, ...]:
    """Return the architecture that `extra_options` name, or that of the current GPU."""
    if options.target is not None:
        return (options.target,)
    try:
        return (current_arch(),)
    except ConfigError as error:
        raise ConfigError(
            "archs: none is given, and there is no GPU to take it from; expected "
            'archs = ["sm_90"] here or in defaults, or --arch sm_90 on the command line'
        ) from error


def _for_arch(options: CompileOptions, arch: str) -> CompileOptions:
    """Return `options` with the architecture `arch` instead of their own.

    If `extra_options` name the architecture, it is replaced there. Otherwise, the field `arch` is
    set.
    """
    extra = parse_options(options.extra_options)
    if options.arch is not None or extra.arch is None:
        return options.replace(arch=arch)
    named = "--gpu-architecture"
    texts = (str(Option(named, arch) if each.name == named else each) for each in extra)
    return options.replace(extra_options=tuple(texts))


def _wanted(request: CompileRequest, directory: str | None, source: str) -> ListedKernel:
    """Check `request`, and return the listed kernel for it."""
    made = Request.make(
        cast("str", request.source),
        request.names,
        request.options or CompileOptions(),
        request.headers,
        request.extra_key,
        source_name=request.source_name,
        compiler="",
    )
    where = None if made.anywhere else directory
    # The location is included because the key does not contain the include directories' paths.
    return ListedKernel(request, where, source, (f"{made.key} {made.location}", where))
