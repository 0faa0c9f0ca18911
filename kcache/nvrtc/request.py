"""Request: one thing to compile, checked, with everything that the cache derives from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.nvrtc.key import CacheKey, digest_fields, hash_options, hash_source
from kcache.nvrtc.options import CompileOptions, ExtraOptions
from kcache.nvrtc.search import HeaderSearch, may_include
from kcache.util.record import Record

__all__ = [
    "DEFAULT_NAME",
    "TRIGRAPHS",
    "CompileRequest",
    "Request",
    "compile_request",
    "working_directory",
]

#: Trigraphs that can make a directive of what does not look like one: `#`, and a spliced line.
TRIGRAPHS = ("??=", "??/")
#: How the option of a standard that knows them ends.
_OLD_STANDARDS = ("c++03", "c++11", "c++14")
#: What the compiler calls a source that has no name.
DEFAULT_NAME = "kernel.cu"


class Request(NamedTuple):
    """One thing to compile.

    Attributes:
        source: the source text.
        names: name expressions.
        options: with an architecture.
        headers: in-memory headers, include name -> text.
        extra_key: the caller's own bytes.
        source_name: name of the source as the compiler sees it.
        compiler: identity of the compiler.
        key: digest of all of it, headers on disk excepted.
        self_contained: whether it can't read any file, so that `key` alone decides the outcome.
        anywhere: whether the working directory means nothing to it either.
        search: where its headers are looked for.
        location: short digest of where that is, for what is only true there.
        extra: what the cache has to know of the options that were written out.
        defines: macros of all options, `NAME` or `NAME=VALUE`.
        bound: what else `key` holds of the directories, beside how many there are.
    """

    source: str
    names: tuple[str, ...]
    options: CompileOptions
    headers: Mapping[str, str]
    extra_key: bytes
    source_name: str
    compiler: str
    key: str
    self_contained: bool
    anywhere: bool
    search: HeaderSearch
    location: str
    extra: ExtraOptions
    defines: tuple[str, ...]
    bound: tuple[str, ...]

    def is_here(self) -> bool:
        """Tell whether the working directory is still the one that the request was made in."""
        return self.search.directory == working_directory()

    def uncacheable(self) -> str | None:
        """Return why the outcome must not be cached, as far as the request itself tells."""
        if self.extra.untracked is not None:
            return f"option {self.extra.untracked} involves files that can't be followed"
        if any(map(_uses_time, (self.source, *self.defines))):
            return "the source uses the time of the compile"
        if self.reads_trigraphs() and any(
            mark in text
            for text in (self.source, *self.headers.values(), *self.defines)
            for mark in TRIGRAPHS
        ):
            return "the source has trigraphs, which can hide a directive"
        return None

    def reads_trigraphs(self) -> bool:
        """Tell whether the compiler replaces trigraphs, as it does up to C++14."""
        return any(flag.rstrip().endswith(_OLD_STANDARDS) for flag in self.options.flags())

    @classmethod
    def make(
        cls,
        source: str,
        names: str | Sequence[str],
        options: CompileOptions,
        headers: Mapping[str, str] | None,
        extra_key: bytes,
        *,
        source_name: str,
        compiler: str,
    ) -> Request:
        """Check the arguments and derive the rest; `options` names an architecture.

        Raises:
            ConfigError: a value is not allowed; ArgumentTypeError if its type is not.
        """
        _check_text("source", source)
        if not source.strip():
            raise ConfigError("source is empty; allowed: CUDA C++ source text")
        _check_text("source_name", source_name)
        if not source_name:
            raise ConfigError("source_name is empty; allowed: a file name")
        expressions = tuple(_names(names))
        in_memory = dict(_headers(headers))
        if not isinstance(extra_key, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"extra_key is {type(extra_key).__name__}; allowed: bytes")
        extra = options.extra
        defines = (*map(str, options.defines), *extra.defines)
        directory = working_directory()
        search = HeaderSearch(
            source_name,
            (*map(str, options.include_paths), *extra.include_paths),
            in_memory=in_memory,
            source_include=extra.source_include,
            directory=directory,
        )
        outputs = ["ltoir"] if options.lto else ["ptx", "cubin"]
        bound: list[str] = []
        shows_paths = options.debug or options.lineinfo or extra.paths_in_output
        if shows_paths:
            # Debug information names the working directory and every file, as opened.
            bound += [f"directory={directory}", *(f"prefix={p}" for p in search.prefixes)]
        contained = not extra.pre_includes and not any(map(may_include, (source, *defines)))
        if not contained:
            # A header is known by the innermost directory that it is in.
            bound += [f"nested={each}" for each in search.nesting()]
        key = CacheKey(
            source_hash=hash_source(source),
            arch=options.target or "",
            options_hash=hash_options((*options.key_flags(), *bound)),
            compiler=compiler,
            names=expressions,
            headers={name: hash_source(text) for name, text in in_memory.items()},
            outputs=tuple(outputs),
            extra_key=extra_key,
            source_name=source_name,
        )
        place = ((part, b"") for part in (directory, *search.prefixes))
        return cls(
            source,
            expressions,
            options,
            in_memory,
            extra_key,
            source_name,
            compiler,
            key.digest(),
            contained,
            contained and not shows_paths,
            search,
            digest_fields("location", place)[:16],
            extra,
            defines,
            tuple(bound),
        )


class CompileRequest(Record):
    """The arguments of one `KernelCache.get_or_compile`, for `KernelCache.compile_many`. Immutable.

    Attributes:
        source: CUDA C++ source text.
        names: name expressions whose lowered names are wanted, one or several.
        options: see `CompileOptions`; None for the current GPU's architecture and no options.
        headers: in-memory headers, include name -> text.
        extra_key: bytes that make the key differ.
        source_name: name of the source in the compiler's messages.
    """

    source: str
    names: str | Sequence[str] = ()
    options: CompileOptions | None = None
    headers: Mapping[str, str] | None = None
    extra_key: bytes = b""
    source_name: str = "kernel.cu"


def compile_request(given: object) -> CompileRequest:
    """Return the request that `given` is: a `CompileRequest`, source text, a tuple or a mapping.

    A tuple holds the fields of `CompileRequest` in their order, a mapping under their names.

    Raises:
        ArgumentTypeError: it is none of these; ConfigError: it has a field too many or too few.
    """
    if isinstance(given, CompileRequest):
        return given
    if isinstance(given, str):
        return CompileRequest(given)
    fields = CompileRequest._names
    values: dict[str, Any]
    if isinstance(given, Mapping):
        values = dict(cast("Mapping[str, Any]", given))
        for name in values:
            if name not in fields:
                raise ConfigError(f"no field {name!r}; allowed: {', '.join(fields)}")
        if "source" not in values:
            raise ConfigError("the field 'source' is missing; allowed: CUDA C++ source text")
        return CompileRequest(**values)
    if isinstance(given, (tuple, list)):
        items = cast("Sequence[Any]", given)
        if not 1 <= len(items) <= len(fields):
            raise ConfigError(f"{len(items)} fields are not allowed; allowed: {', '.join(fields)}")
        values = dict(zip(fields, items, strict=False))
        return CompileRequest(**values)
    raise ArgumentTypeError(
        f"{type(given).__name__} is not allowed; allowed: kcache.CompileRequest, source text, "
        f"or a tuple or mapping of {', '.join(fields)}"
    )


def _uses_time(text: str) -> bool:
    """Tell what `scan.uses_time` does, without it where a look at the text is enough.

    A process that waits for another one's compile comes by here, and the scan's expressions would
    take it 10 ms, of which the one that compiles gets less of the processor.
    """
    joined = text.replace("\\\r\n", "").replace("\\\n", "")
    if "__DATE__" not in joined and "__TIME" not in joined:
        return False
    from kcache.nvrtc.scan import uses_time

    return uses_time(text.encode())


def working_directory() -> str:
    """Return the working directory, or a path that leads nowhere if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return "/(removed working directory)"


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{what} is {type(text).__name__}; allowed: text (str)")
    at = text.find("\0")
    if at >= 0:
        raise ConfigError(f"{what} has a NUL character at position {at}; allowed: none")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} has a lone surrogate at position {error.start}; allowed: Unicode text"
        ) from error


def _names(names: object) -> Iterator[str]:
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Sequence) or isinstance(names, bytes):
        raise ArgumentTypeError(f"names is {type(names).__name__}; allowed: text, or several texts")
    for name in names:  # pyright: ignore[reportUnknownVariableType]
        _check_text("a name expression", name)  # pyright: ignore[reportUnknownArgumentType]
        if not name.strip():  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError("a name expression is empty; allowed: such as axpy<float>")
        yield name


def _headers(headers: object) -> Iterator[tuple[str, str]]:
    if headers is None:
        return
    if not isinstance(headers, Mapping):
        raise ArgumentTypeError(f"headers is {type(headers).__name__}; allowed: a mapping")
    for name, text in headers.items():  # pyright: ignore[reportUnknownVariableType]
        _check_text("an include name in headers", name)  # pyright: ignore[reportUnknownArgumentType]
        _check_text(f"headers[{name!r}]", text)  # pyright: ignore[reportUnknownArgumentType]
        yield name, text
