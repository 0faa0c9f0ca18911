"""Opaque: a compile in which a text can pass on a name or the time, but can't compute with it.

A proof of relocation must show that an outcome is the same wherever its headers lie. Other paths
show this for those paths alone. So for one compile, the compiler's macro `__FILE__` gets another
name. In headers, `__FILE__` is then a call of a function that nothing defines:

- A call is no constant and no literal. Letters, hashes and joined literals of a name are errors.
  It stands in braces, so that it has no type: `sizeof`, `decltype` and templates can't look at it.
  The array in them has no size, for the constructor that takes whatever is in the braces.
  Functions take it as `const char*`; `printf` has overloads that do.
- If code evaluates it, the call is in the output, which then differs. Most headers have an `assert`
  that is not compiled into the kernel. That does no harm.
- A text made of it by `#` is an error: the type in the call has a letter that is valid in a name,
  and that no literal of `char` can hold.
- In the source itself, at `__INCLUDE_LEVEL__` 0, the macro is the source's name as ever, unless its
  directory is to be any other as well. `assert` in a kernel needs it. So is `__BASE_FILE__`.
- Texts that define one of these macros are refused; so are those that change what is an error, and
  those that spell `__builtin_FILE` otherwise than as a call or as a question whether there is one.

The macros of the clock are made opaque in the same way for a compile at another time, everywhere.

Seen with NVRTC 12.4 to 13.5. If a macro can't be renamed, nothing is proven.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

#: The compiler's names, and others of the same length that are no identifiers, so that no text can
#: use them.
FILES = {b"__FILE__": b"__F!LE__", b"__BASE_FILE__": b"__BASE_F!LE__"}
CLOCK = {b"__DATE__": b"__D!TE__", b"__TIME__": b"__T!ME__", b"__TIMESTAMP__": b"__T!MESTAMP__"}
#: The error "Unicode character not Latin-1", in a literal.
_ERROR = 2282
#: Deepest nesting of includes that has a macro; the compiler's own limit is 200.
_LEVELS = 256
#: Options with a directory or a macro in them.
_PLACES = ("-I", "-D")
#: A name that looks the same between quotes, because it needs no escapes.
_PRINTED = re.compile(r"[\w.,:;/@%+=~^ -]+", re.ASCII)
#: `printf` with a name in braces, which `...` does not take, as one of the first arguments.
_PRINTF = [
    f"template <{types}class... T> __host__ __device__ int printf("
    f"const char*, {arguments}const char* const (&)[1], T...);"
    for types, arguments in (
        ("", ""),
        ("class A, ", "A, "),
        ("class A, class B, ", "A, B, "),
        ("class A, class B, class C, ", "A, B, C, "),
    )
]
_READ, _WRITE, _EXECUTE = 1, 2, 4
_JOINS = re.compile(rb"(?:\\|\?\?/)[ \t]*\r?\n")
_EVADES = re.compile(
    rb"\b(?:define|undef|push_macro|pop_macro)\b(?:[\s(\"\\]|/\*.*?\*/)*"
    rb"(?:__FILE__|__BASE_FILE__|__INCLUDE_LEVEL__|__builtin_FILE|__builtin_source_location)\b"
    # The error's number, also in other bases.
    rb"|\b2282\b|\b0[xX]0*8[eE][aA]\b|\b0+4352\b|\b0[bB]0*100011101010\b"
    # Prefixes that make a literal another kind of literal.
    rb"|\b(?:L|u8?|U)\s*##|\b[A-Z_][A-Z_0-9]*\s*\(\s*(?:L|u8?|U)\s*,",
    re.DOTALL,
)
_BUILTIN = re.compile(rb"builtin_FILE\b|\bbuiltin_\s*##|\w*builtin_\b|##\s*FILE\b")
_PLAIN = re.compile(rb"__builtin_FILE\(\)|(?:BUILTIN|has_builtin)\((?:__)?builtin_FILE\)")


def evades(text: bytes) -> bool:
    """Tell whether a text may use a header's name in a way that the compile does not reveal."""
    text = _JOINS.sub(b"", text)
    if _EVADES.search(text):
        return True
    return len(_BUILTIN.findall(text)) != len(_PLAIN.findall(text))


def told(
    source: str, name: str | None, given: Sequence[str], environment: Mapping[bytes, bytes]
) -> tuple[str, Sequence[str]]:
    """Return the source and the options with which the name of a header is opaque.

    The helpers have random names, which no text can know. An option that includes a header before
    the source may do so at the source's own level. The name is opaque there, too.

    Args:
        source: the request's source.
        name: the source's name; None if it must be opaque, too.
        given: its options.
        environment: variables of the compile; the compiler takes options from some.
    """
    sure = not any("include" in each or "optf" in each for each in given if each[:2] not in _PLACES)
    sure = sure and not any(name.startswith(b"NVRTC") for name in environment)
    sure = sure and name is not None and _PRINTED.fullmatch(name) is not None
    own = _random_name()
    main = f'"{name}"' if sure else f"{own}v"
    lines = (
        *_helpers(own),
        f"#define {own}a(n) {own}b(n)",
        f"#define {own}b(n) {own}_##n",
        f"#define {own}_0 {main}",
        *(f"#define {own}_{level} {own}v" for level in range(1, _LEVELS)),
        "#line 1",
        source,
    )
    flags = (
        *given,
        f"-D__FILE__={own}a(__INCLUDE_LEVEL__)",
        f"-D__BASE_FILE__={own}_0",
        f"-D__builtin_FILE()={own}v",
        "-D__builtin_source_location()=__has_include@",
        f"--diag-error={_ERROR}",
    )
    return "\n".join(lines), flags


def timeless(source: str, given: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the source and the options with which the macros of the clock are opaque."""
    own = _random_name()
    macros = (f"-D{macro.decode()}={own}v" for macro in CLOCK)
    return "\n".join((*_helpers(own), "#line 1", source)), (*given, *macros)


def _random_name() -> str:
    return f"__kc{os.urandom(8).hex()}"


def _helpers(own: str) -> Iterator[str]:
    """Yield the lines that define the macro with the call."""
    # Long, so that a literal of another kind is longer than those of paths.
    yield f"typedef int {own}{'z' * 300}\\u0429;"
    yield f"__host__ __device__ const char (&{own}f(int))[];"
    yield from _PRINTF
    yield f"#define {own}v {{{own}f(({own}{'z' * 300}\\u0429)0)}}"


@contextmanager
def renamed(library: str, names: Mapping[bytes, bytes]) -> Generator[None]:
    """Take the names of macros away from the compiler during the block.

    It changes the constant in this process's memory of the library, and restores it. Do not use it
    in a process in which another thread compiles.

    Args:
        library: path of the loaded library, as `/proc/self/maps` has it.
        names: the macros, and the names that they get; `FILES` or `CLOCK`.

    Raises:
        OSError: there is no such constant, or it can't be written.
    """
    found = {name: _constants(library, name) for name in names}
    if not all(found.values()):
        raise OSError("the compiler's constants are not known")
    try:
        for name, places in found.items():
            for address, rights in places:
                _write(address, names[name], rights)
        yield
    finally:
        for name, places in found.items():
            for address, rights in places:
                _write(address, name, rights)


@functools.cache
def _constants(library: str, name: bytes) -> tuple[tuple[int, int], ...]:
    """Return the addresses of a name in the library's constants, and the rights of that memory."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        lines = maps.read().splitlines()
    found: list[tuple[int, int]] = []
    for line in lines:
        span, rights, _, _, _, *path = line.split(maxsplit=5)
        if not path or path[0] != library or rights[:2] != "r-":
            continue
        start, end = (int(each, 16) for each in span.split("-"))
        memory = memoryview((ctypes.c_char * (end - start)).from_address(start)).cast("B")
        executable = _EXECUTE if rights[2] == "x" else 0
        # A pattern that begins with the name is found ten times as fast.
        found += (
            (start + match.start(), _READ | executable)
            for match in re.finditer(rb"%s(?<![A-Za-z0-9_ ]%s)\0" % (name, name), memory)
        )
    return tuple(found)


def _write(address: int, name: bytes, rights: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    start = address & ~(page - 1)
    length = -(-(address + len(name) - start) // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    protect = libc.mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(start, length, _READ | _WRITE | (rights & _EXECUTE)):
        raise OSError(ctypes.get_errno(), "the compiler's constants can't be written")
    ctypes.memmove(address, name, len(name))
    if protect(start, length, rights):
        raise OSError(ctypes.get_errno(), "the compiler's constants can't be protected")
