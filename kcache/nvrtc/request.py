"""Request: the checked arguments of one compile, and everything that is derived from them."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from kcache import environment
from kcache.errors import ArgumentTypeError, ConfigError
from kcache.gpu_code import kernels_in
from kcache.nvrtc.options import CompileOptions, are_harmless
from kcache.nvrtc.search import SOURCE, HeaderSearch, may_include
from kcache.util.hints import did_you_mean

if TYPE_CHECKING:
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.files import FileDigests
    from kcache.nvrtc.manifest import DependencySet

#: Part of every key. Increment its number when the meaning of a field changes.
KEY_SCHEMA = "kcache-key/3"
#: The name that the compiler gets for a source that the caller has not named.
DEFAULT_NAME = "kernel.cu"
#: Names of a source that the caller has not named: kcache's default, and NVRTC's defaults.
DEFAULT_NAMES = (DEFAULT_NAME, "default_program", "")
#: A path that does not exist. It represents a working directory that was removed.
NO_DIRECTORY = "/(removed working directory)"
#: Options with which the output is LTOIR, which is encoded and so can't be searched for a path.
_MAKE_LTOIR = frozenset(("--dlink-time-opt", "--gen-opt-lto"))
#: Options with which the outputs contain the directories of the compile.
_SHOW_PATHS = frozenset(("--device-debug", "--generate-line-info"))
#: If a source's name begins like this, NVRTC treats it as an option or as one of its own texts.
_MISTAKEN = ("-", "__nv_")


class Caller(NamedTuple):
    """What a compiler can see of the process that requests a kernel.

    The drop-in's server compiles for programs, each of which has its own working directory,
    environment and NVRTC.

    Attributes:
        library: the path of the NVRTC library that compiles.
        compiler: the identity of that library; see the module `library`.
        directory: the working directory.
        environment: pairs of name and value, in a fixed order, of variables in that process; the
            value is None if the variable is not set. All other variables have the values that they
            have in this process.
    """

    library: str
    compiler: str
    directory: str
    environment: tuple[tuple[str, str | None], ...]

    def variable(self, name: str) -> str | None:
        """Return the value of the variable `name` for the compiler, or None if it is not set."""
        for each, value in self.environment:
            if each == name:
                return value
        return environment.variable(name)


class Start(Protocol):
    """One start of nvcc."""

    def compile(self, digests: FileDigests) -> tuple[Compiled, DependencySet | None]:
        """Start nvcc; return its result and dependency set, as `compiler.compile_tracked` does."""
        ...

    def recorded(self) -> dict[str, Any]:
        """Return what `kcache warm` needs to start nvcc again, as a value for JSON."""
        ...


class Request(NamedTuple):
    """The checked arguments of one compile. Immutable.

    Attributes:
        source: the source text.
        names: the name expressions.
        options: the options, with an architecture.
        headers: the in-memory headers, include name -> text.
        extra_key: bytes that the caller adds to the key.
        source_name: the name of the source that the compiler gets.
        compiler: the identity of the compiler.
        key: the digest of everything that the result depends on, except for the answers of the
            operating system, such as the headers on disk.
        self_contained: whether the compile reads no file, as far as the source and the options
            show. Then `key` alone determines the result.
        anywhere: whether the request is self-contained and does not depend on the working
            directory.
        search: the directories in which the compiler looks for headers.
        location: the digest of these directories as they are spelled, of the working directory and
            of the source's name.
        spelled: the working directory as debug information spells it; empty if the directories are
            not part of `key`.
        bound: those directories and variables that are part of `key`, and the source's name if it
            is part of `key`.
        variables: the environment variables that are part of `key`, as `NAME=VALUE`; see
            `environment.IN_KEY`.
        caller: the process that requests the kernel; None if it is this process.
        relocatable: whether the result may be used at another location if it contains no path.
        start: the start of nvcc that compiles the request; None if NVRTC compiles it.
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
    spelled: str
    bound: tuple[str, ...]
    variables: tuple[str, ...]
    caller: Caller | None = None
    relocatable: bool = True
    start: Start | None = None

    def is_here(self) -> bool:
        """Return whether the working directory is still the one in which the request was made.

        If its spelling is part of the key, the spelling must be the same, too.
        """
        directory = self.search.directory
        if self.caller is None and directory != working_directory():
            return False
        return not self.spelled or self.spelled == self.search.spelled()

    def for_compiler(self, identity: str) -> Request:
        """Return the same request for the compiler with this `identity`."""
        return self.make(
            self.source,
            self.names,
            self.options,
            self.headers,
            self.extra_key,
            source_name=self.source_name,
            compiler=identity,
            caller=self.caller,
            relocatable=self.relocatable,
        )

    def kernels(self) -> tuple[str, ...]:
        """Return the name expressions or, if there are none, the kernels that the source defines.

        The latter are found by a simple search in the source text, which may be wrong.
        """
        return self.names or tuple(kernels_in(self.source))

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts from the caller that the compiler may parse as C++."""
        options = self.options.parsed.without_include_paths()
        return self.source, *self.headers.values(), *options, *self.names

    @property
    def shows_paths(self) -> bool:
        """Whether all directories are part of the key.

        They are if the outputs may contain them, if one is spelled in an unusual way, or if kernels
        may not be used at other locations.
        """
        return bool(self.bound) and self.bound[0].startswith("directory=")

    @property
    def makes_ltoir(self) -> bool:
        """Whether the output is LTOIR."""
        return not _MAKE_LTOIR.isdisjoint(each.name for each in self.options.parsed)

    @property
    def has_usable_name(self) -> bool:
        """Whether NVRTC treats the source's name as the name of a file; see `_MISTAKEN`."""
        return not os.path.basename(self.source_name).startswith(_MISTAKEN)

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
        caller: Caller | None = None,
        relocatable: bool = True,
    ) -> Request:
        """Return the request for these arguments, which are checked first.

        `options` must have an architecture.

        Raises:
            ConfigError: the value of an argument is not allowed.
            ArgumentTypeError: the type of an argument is not allowed.
        """
        _check_text("source", source)
        if not source.strip():
            raise ConfigError("source is empty; expected CUDA C++ source text")
        _check_text("source_name", source_name)
        if not source_name:
            raise ConfigError("source_name is empty; expected a file name")
        expressions = tuple(_names(names))
        in_memory = dict(_headers(headers))
        if not isinstance(extra_key, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"extra_key: expected bytes, got {type(extra_key).__name__}")
        parsed = options.parsed
        paths = parsed.include_paths
        directory = working_directory() if caller is None else caller.directory
        known = environment.variable if caller is None else caller.variable
        found = ((name, known(name)) for name in environment.IN_KEY)
        variables = tuple(f"{name}={value}" for name, value in found if value is not None)
        search = HeaderSearch(
            source_name, paths, directory=directory, headers=in_memory, variable=known
        )
        outputs = ("ltoir",) if options.lto else ("ptx", "cubin")
        texts = (source, *parsed.defines, *expressions)
        # An option that was not tested, see `are_harmless`, may name files.
        tried = are_harmless(parsed)
        named = {each.name for each in parsed}
        # If the source's name has a directory, the compiler looks for it, and `__FILE__` shows it.
        contained = tried and not search.prefixes[SOURCE] and not any(map(may_include, texts))
        odd = not (contained or search.is_plain())
        shows_paths = odd or not (relocatable and named.isdisjoint(_SHOW_PATHS | _MAKE_LTOIR))
        spelled = search.spelled() if shows_paths else ""
        bound = list(_places(search, options, odd=odd)) if shows_paths else []
        bound += [f"variable={each}" for each in variables]
        if shows_paths or not tried:
            bound.append(f"name={source_name}")
        fields = [
            ("source", hash_source(source).encode()),
            ("arch", (options.target or "").encode()),
            *_texts("called", (called_by(source_name),)),
            ("compiler", compiler.encode()),
            ("extra", extra_key),
            *_texts("option", parsed.without_include_paths()),
            *_texts("bound", bound),
            *_texts("name", expressions),
            *_texts("output", outputs),
        ]
        for name, text in sorted(in_memory.items()):
            fields += (("header", name.encode()), ("content", hash_source(text).encode()))
        place = (spelled or directory, *search.prefixes, source_name)
        location = digest_fields("location", ((part, b"") for part in place))
        given = (source, expressions, options, in_memory, extra_key, source_name, compiler)
        made = (digest_fields(KEY_SCHEMA, fields), contained, contained and not shows_paths)
        return cls(
            *given, *made, search, location, spelled, tuple(bound), variables, caller, relocatable
        )


class CompileRequest(NamedTuple):
    """The arguments of one `KernelCache.get_or_compile`, for `KernelCache.compile_many`. Immutable.

    Attributes:
        source: CUDA C++ source text, or the path of a file that contains it.
        names: one or several name expressions whose lowered names are wanted.
        options: the options; None for the current GPU's architecture and no other options.
        headers: in-memory headers, include name -> text.
        extra_key: bytes that become part of the key.
        source_name: the name of the source in the compiler's messages.
    """

    source: str | os.PathLike[str]
    names: str | Sequence[str] = ()
    options: CompileOptions | None = None
    headers: Mapping[str, str] | None = None
    extra_key: bytes = b""
    source_name: str = "kernel.cu"


def compile_request(given: object) -> CompileRequest:
    """Return `given` as a `CompileRequest`.

    `given` may be a `CompileRequest`, a source text, the path of a source file, a tuple or list
    that contains the fields of `CompileRequest` in their order, or a mapping that contains them
    under their names.

    Raises:
        ArgumentTypeError: `given` has another type.
        ConfigError: `given` has an unknown field or too many fields, or has no source.
    """
    if isinstance(given, CompileRequest):
        return given
    if isinstance(given, (str, os.PathLike)):
        return CompileRequest(cast("str | os.PathLike[str]", given))
    fields = CompileRequest._fields
    if isinstance(given, Mapping):
        values = dict(cast("Mapping[str, Any]", given))
        for name in values:
            if name not in fields:
                more = did_you_mean(name, fields)
                raise ConfigError(f"no field {name!r}{more}; expected one of {', '.join(fields)}")
        if "source" not in values:
            raise ConfigError("the field 'source' is missing; expected CUDA C++ source text")
        return CompileRequest(**values)
    if isinstance(given, (tuple, list)):
        items = cast("Sequence[Any]", given)
        if not 1 <= len(items) <= len(fields):
            expected = f"1 to {len(fields)} fields ({', '.join(fields)})"
            raise ConfigError(f"expected {expected}, got {len(items)}")
        return CompileRequest(*items)
    raise ArgumentTypeError(
        "expected a kcache.CompileRequest, source text, a path, or a tuple or mapping with the "
        f"fields {', '.join(fields)}, got {type(given).__name__}"
    )


def read_source(path: str | os.PathLike[str], source_name: str) -> tuple[str, str]:
    """Return the text in the file at `path`, and the name of the source.

    The name is `source_name`, or `path` if `source_name` is the default name.

    Raises:
        OSError: the file can't be read.
        ConfigError: the content of the file is not UTF-8.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        text = as_text(name, file.read())
    return text, name if source_name == DEFAULT_NAME else source_name


def as_text(path: str, data: bytes) -> str:
    """Return `data`, the content of the file at `path`, as text.

    Raises:
        ConfigError: `data` is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not text: byte {error.start} is 0x{data[error.start]:02x}; expected UTF-8"
        ) from error


def title_of(source_name: str, names: Sequence[str]) -> str:
    """Return a title, for output, that has the source's name and the names of its kernels.

    If the source has a default name and there are names of kernels, the source's name is left out.
    """
    listed = ", ".join(names)
    if not listed or source_name not in DEFAULT_NAMES:
        return ": ".join(filter(None, (source_name, listed)))
    return listed if len(names) == 1 else f"{len(names)} kernels: {listed}"


def called_by(source_name: str) -> str:
    """Return the part of a source's name that belongs to the key.

    It is the base name, after `*/` if the source's name has a folder. Without a folder, `__FILE__`
    is only a name, so no text can use it to find a file beside the source.
    """
    folder, name = os.path.split(source_name)
    return f"*/{name}" if folder else name


def working_directory() -> str:
    """Return the working directory, or `NO_DIRECTORY` if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return NO_DIRECTORY


def _places(search: HeaderSearch, options: CompileOptions, *, odd: bool) -> Iterator[str]:
    """Yield the parts of the key that contain the directories of a request.

    Debug information contains the working directory, and the path of every file as it was opened.
    If a directory is spelled in an `odd` way, the compiler's treatment of it depends on the exact
    text of the options, so they are part of the key, too.
    """
    yield f"directory={search.spelled()}"
    yield from (f"prefix={prefix}" for prefix in search.prefixes)
    if odd:
        yield f"in={search.directory}"
        yield from (f"flag={flag}" for flag in options.flags())


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{what}: expected text (str), got {type(text).__name__}")
    at = text.find("\0")
    if at >= 0:
        raise ConfigError(f"{what} has a NUL character at position {at}; expected none")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} has a lone surrogate at position {error.start}; expected Unicode text"
        ) from error


def _names(names: object) -> Iterator[str]:
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Sequence) or isinstance(names, bytes):
        raise ArgumentTypeError(
            f"names: expected a text or a sequence of texts, got {type(names).__name__}"
        )
    for name in names:  # pyright: ignore[reportUnknownVariableType]
        _check_text("a name expression", name)  # pyright: ignore[reportUnknownArgumentType]
        if not name.strip():  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError(f"names: expected name expressions such as axpy<float>, got {name!r}")
        if name.startswith("-"):  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError(
                f"names: expected name expressions such as axpy<float>, got {name!r}, which looks "
                "like an option; pass options as options=..."
            )
        yield name


def _headers(headers: object) -> Iterator[tuple[str, str]]:
    if headers is None:
        return
    if not isinstance(headers, Mapping):
        raise ArgumentTypeError(f"headers: expected a mapping, got {type(headers).__name__}")
    for name, text in headers.items():  # pyright: ignore[reportUnknownVariableType]
        _check_text("an include name in headers", name)  # pyright: ignore[reportUnknownArgumentType]
        _check_text(f"headers[{name!r}]", text)  # pyright: ignore[reportUnknownArgumentType]
        yield name, text


# -- digests ---------------------------------------------------------------------------------------


class _Digest(Protocol):
    def hexdigest(self) -> str: ...


def _find_sha256() -> Callable[..., _Digest]:
    """Return a function for SHA-256 that does not need OpenSSL, if Python has one.

    Importing `hashlib` loads OpenSSL, which takes 5 ms in a new process. Python's own
    implementation is the one to which `hashlib` falls back, and it is not subject to FIPS policy;
    `random` in the standard library uses it, too. Its module is `_sha2` since Python 3.12.
    """
    with suppress(ImportError):
        module = import_module("_sha2" if sys.version_info >= (3, 12) else "_sha256")
        found: Callable[..., _Digest] = module.sha256
        return found
    import hashlib  # noqa: PLC0415  it loads OpenSSL

    return partial(hashlib.sha256, usedforsecurity=False)


_sha256 = _find_sha256()
_LENGTHS = struct.Struct("<IQ")


def digest_fields(label: str, fields: Iterable[tuple[str, bytes]]) -> str:
    """Return SHA-256 over labelled, length-prefixed fields, as 64 hexadecimal digits.

    The digest covers each field as `u32 len(name), u64 len(value), name, value` (little-endian), so
    that no two different lists of fields give the same bytes. SHA-256 is used as a checksum that
    does not collide, not for secrecy.
    """
    parts: list[bytes] = []
    for name, value in ((label, b""), *fields):
        encoded = name.encode("utf-8", "surrogateescape")
        parts += (_LENGTHS.pack(len(encoded), len(value)), encoded, value)
    return _sha256(b"".join(parts)).hexdigest()


def hash_source(text: str) -> str:
    """Return the digest of a source text: 64 hexadecimal digits, stable across processes."""
    return _sha256(text.encode()).hexdigest()


def hash_options(options: Sequence[str] | CompileOptions) -> str:
    """Return the digest of compiler options: 64 hexadecimal digits, stable across processes.

    `options` is a sequence of flags, or a `CompileOptions`. The order of the flags matters, and so
    does where each flag ends: `["ab", "c"]` and `["a", "bc"]` have different digests.
    """
    flags = options.flags() if isinstance(options, CompileOptions) else options
    return digest_fields("options", _texts("flag", flags))


def _texts(label: str, texts: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    return ((label, text.encode("utf-8", "surrogateescape")) for text in texts)
