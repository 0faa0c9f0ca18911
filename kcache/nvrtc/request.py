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

#: Part of every key. Increment it when the meaning of a field changes.
KEY_SCHEMA = "kcache-key/3"
#: The compiler's name for a source without a name.
DEFAULT_NAME = "kernel.cu"
#: The names of sources that the caller did not name: kcache's own, and NVRTC's.
DEFAULT_NAMES = (DEFAULT_NAME, "default_program", "")
#: A path that leads nowhere. It stands for a working directory that was removed.
NO_DIRECTORY = "/(removed working directory)"
#: Options whose output is LTOIR, which is encoded: it can't be searched for a path.
_MAKE_LTOIR = frozenset(("--dlink-time-opt", "--gen-opt-lto"))
#: Options whose output names the directories of the compile.
_SHOW_PATHS = frozenset(("--device-debug", "--generate-line-info"))
#: NVRTC treats a source name with these beginnings as an option or as one of its own texts.
_MISTAKEN = ("-", "__nv_")


class Caller(NamedTuple):
    """What a compiler can see of the process that requests a kernel.

    The drop-in's server compiles for programs, each of which has its own working directory,
    environment and NVRTC.

    Attributes:
        library: path of the NVRTC that compiles.
        compiler: identity of that NVRTC; see `library`.
        directory: the working directory.
        environment: (name, value) of variables of that process, in a fixed order; None for a
            variable that is not set. Other variables are as in this process.
    """

    library: str
    compiler: str
    directory: str
    environment: tuple[tuple[str, str | None], ...]

    def variable(self, name: str) -> str | None:
        """Return the value of a variable, or None."""
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
        """Return what `kcache warm` needs to start nvcc again, ready for JSON."""
        ...


class Request(NamedTuple):
    """The checked arguments of one compile. Immutable.

    Attributes:
        source: the source text.
        names: name expressions.
        options: the options, with an architecture.
        headers: in-memory headers, include name -> text.
        extra_key: the caller's own bytes.
        source_name: name of the source as the compiler sees it.
        compiler: identity of the compiler.
        key: digest of everything that the result depends on, except headers on disk.
        self_contained: whether, judging by its text and options, it reads no file, so that `key`
            alone decides the result.
        anywhere: whether it is self-contained and does not depend on the working directory.
        search: the directories in which its headers are searched.
        location: digest of these directories as they are spelled, the working directory and the
            source's name.
        spelled: the working directory as debug information spells it; empty if no output shows it.
        bound: the directories and variables in `key`.
        variables: the environment variables in the key, as `NAME=VALUE`; see `environment.IN_KEY`.
        caller: the process that requests the kernel; None for this process.
        relocatable: whether the result may be used elsewhere if it shows no path.
        start: the start of nvcc that compiles; None if NVRTC compiles.
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
        """Return whether the working directory is still the one that the request was made in."""
        directory = self.search.directory
        if self.caller is None and directory != working_directory():
            return False
        return not self.spelled or self.spelled == self.search.spelled()

    def for_compiler(self, identity: str) -> Request:
        """Return the same request for another compiler."""
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
        """Return the name expressions; without any, the kernels that the source seems to define."""
        return self.names or tuple(kernels_in(self.source))

    @property
    def texts(self) -> tuple[str, ...]:
        """The caller's texts that the compiler may parse as C++."""
        options = self.options.parsed.without_include_paths()
        return self.source, *self.headers.values(), *options, *self.names

    @property
    def shows_paths(self) -> bool:
        """Whether all directories are part of the key, because the outputs may show them."""
        return bool(self.bound) and self.bound[0].startswith("directory=")

    @property
    def makes_ltoir(self) -> bool:
        """Whether the output is LTOIR."""
        return not _MAKE_LTOIR.isdisjoint(each.name for each in self.options.parsed)

    @property
    def has_usable_name(self) -> bool:
        """Whether NVRTC treats the source's name as a name; see `_MISTAKEN`."""
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
        """Check the arguments, and derive the other fields; `options` must have an architecture.

        Raises:
            ConfigError: a value is not allowed; ArgumentTypeError: a type is not allowed.
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
        # An option that was not tested may name files.
        tried = are_harmless(parsed)
        named = {each.name for each in parsed}
        # The compiler looks up a directory in the source's name, and `__FILE__` shows it.
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
        source: CUDA C++ source text, or the path of a file that holds it.
        names: name expressions whose lowered names are wanted, one or several.
        options: see `CompileOptions`; None for the current GPU's architecture and no options.
        headers: in-memory headers, include name -> text.
        extra_key: bytes that become part of the key.
        source_name: name of the source in the compiler's messages.
    """

    source: str | os.PathLike[str]
    names: str | Sequence[str] = ()
    options: CompileOptions | None = None
    headers: Mapping[str, str] | None = None
    extra_key: bytes = b""
    source_name: str = "kernel.cu"


def compile_request(given: object) -> CompileRequest:
    """Return the request that `given` describes: `CompileRequest`, text, path, tuple or mapping.

    A tuple holds the fields of `CompileRequest` in their order, a mapping under their names.

    Raises:
        ArgumentTypeError: it has another type; ConfigError: it has a field too many or too few.
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
            raise ConfigError(f"expected the fields {', '.join(fields)}, got {len(items)} of them")
        return CompileRequest(*items)
    raise ArgumentTypeError(
        "expected kcache.CompileRequest, source text, a path, or a tuple or mapping of "
        f"{', '.join(fields)}, got {type(given).__name__}"
    )


def read_source(path: str | os.PathLike[str], source_name: str) -> tuple[str, str]:
    """Return the text in a file, and the name of the source: the path, unless another is given.

    Raises:
        OSError: the file can't be read; ConfigError: it holds no text.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        text = as_text(name, file.read())
    return text, name if source_name == DEFAULT_NAME else source_name


def as_text(path: str, data: bytes) -> str:
    """Return the text in a file; raise ConfigError if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not text: byte {error.start} is 0x{data[error.start]:02x}; expected UTF-8"
        ) from error


def title_of(source_name: str, names: Sequence[str]) -> str:
    """Return a title with the source's name and its kernels, or the kernels for a default name."""
    listed = ", ".join(names)
    if not listed or source_name not in DEFAULT_NAMES:
        return ": ".join(filter(None, (source_name, listed)))
    return listed if len(names) == 1 else f"{len(names)} kernels: {listed}"


def called_by(source_name: str) -> str:
    """Return what the key has of a source's name: the base name, and whether it has a folder.

    Without a folder, no text shows where a file beside the source lies: `__FILE__` is only a name.
    """
    folder, name = os.path.split(source_name)
    return f"*/{name}" if folder else name


def working_directory() -> str:
    """Return the working directory, or a path that leads nowhere if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return NO_DIRECTORY


def _places(search: HeaderSearch, options: CompileOptions, *, odd: bool) -> Iterator[str]:
    """Yield the parts of the key that name the directories of a request.

    Debug information names the working directory, and every file as it was opened. How the compiler
    treats an `odd` directory depends on the exact spelling of the options.
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
            f"names: expected text or several texts, got {type(names).__name__}"
        )
    for name in names:  # pyright: ignore[reportUnknownVariableType]
        _check_text("a name expression", name)  # pyright: ignore[reportUnknownArgumentType]
        if not name.strip():  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError("a name expression is empty; expected one such as axpy<float>")
        if name.startswith("-"):  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError(
                f"the name expression {name!r} looks like an option; expected one such as "
                "axpy<float>; pass an option as options=..."
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
    """Return SHA-256 without loading OpenSSL: importing `hashlib` takes a fresh process 5 ms.

    It is Python's own implementation, to which hashlib falls back and which is not subject to FIPS
    policy; `random` in the standard library uses it, too. Its module is `_sha2` since Python 3.12.
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

    Each field enters as `u32 len(name), u64 len(value), name, value` (little-endian), so that no
    two different lists of fields give the same bytes. SHA-256 is used as a checksum that does not
    collide, not for secrecy.
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

    `options` is a sequence of flags, or a `CompileOptions`. Order-sensitive, and each flag is
    length-prefixed: `["ab", "c"]` differs from `["a", "bc"]`.
    """
    flags = options.flags() if isinstance(options, CompileOptions) else options
    return digest_fields("options", _texts("flag", flags))


def _texts(label: str, texts: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    return ((label, text.encode("utf-8", "surrogateescape")) for text in texts)
