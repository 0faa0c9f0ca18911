"""CompileOptions: checks the options of a compile, and parses options in the same way as NVRTC.

Code that depends on an option uses `parse_options` and never examines the text itself. NVRTC 12.4
to 13.5 parse each text like this: White space around the text is dropped. `-D`, `-U` and `-I` may
have their value directly after them, after spaces or after an equals sign. The other options that
take a value have it after an equals sign, and some of them may also have it in the next text.

NVRTC keeps state between compiles. After a compile with `-G` (12.9 to 13.5), `-Ofc=max` or
`--restrict` (13.5), later compiles of other sources give different code until the process ends, and
NVRTC's interface does not show that. An option is *harmless* if later compiles in the same process
give the same code as in a new process. `are_harmless` accepts only options that were tested:
`tests/nvrtc/test_clean.py` compiles probe kernels before and after each option in one process, and
compares the code with that from new processes. A worker that has compiled with any other option is
ended after that compile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Never, Self, cast

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.util.hints import did_you_mean, unexpected_argument
from kcache.util.units import check_int

_ARCH = r"(?:(sm|compute)_)?(\d{2,3})([af]?)"
_STD = r"(?:c\+\+)?(\d{2})"
_DEFINE = r"[A-Za-z_]\w*(\([\w, .]*\))?"


def parse_arch(value: str | int | tuple[int, int]) -> str:
    """Return the architecture that `value` names, such as `"sm_90a"`, as NVRTC writes it.

    `value` may be `"sm_90a"`, `"compute_90"`, `"90"`, 90 or (9, 0).

    Raises:
        ConfigError: `value` does not name an architecture.
    """
    if isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value):
        major, minor = value  # in the form of torch.cuda.get_device_capability()
        value = 10 * major + minor if 0 <= minor < 10 else str(value)
    match = re.fullmatch(_ARCH, str(value), re.ASCII) if not isinstance(value, bool) else None
    if match is None:
        raise ConfigError(
            "arch: expected a text such as 'sm_90' or 'compute_90' (the suffixes 'a' and 'f' are "
            f"allowed), a number such as 90, or a tuple such as (9, 0), got {value!r}"
        )
    kind, number, suffix = match.groups()
    return f"{kind or 'sm'}_{int(number)}{suffix}"


class _Options(NamedTuple):
    """The fields of `CompileOptions`, in their canonical form."""

    arch: str | None
    std: str | None
    fast_math: bool
    optimization: int | None
    lto: bool
    debug: bool
    lineinfo: bool
    max_registers: int | None
    defines: tuple[str, ...]
    include_paths: tuple[str, ...]
    extra_options: tuple[str, ...]


class CompileOptions(_Options):
    """The options of a compile. Immutable; equal options give equal keys, in every process.

    Attributes:
        arch: the target architecture. `"sm_90"` gives machine code (CUBIN) and PTX, `"compute_90"`
            gives PTX alone. The suffixes `a` and `f` select architecture-specific and
            family-specific targets. 90 and (9, 0), which is PyTorch's form, mean `"sm_90"`. None
            means the architecture of the current GPU.
        std: the C++ standard: `"c++17"`, `"17"`, ...; None for the compiler's default.
        fast_math: whether to pass `--use_fast_math`.
        optimization: the optimization level of the assembler, 0 to 3 (`--ptxas-options=-O`); None
            for its default. NVRTC itself has no such option.
        lto: whether to make LTOIR for link-time optimization instead of PTX and CUBIN (`-dlto`).
        debug: whether to add device debug information (`-G`).
        lineinfo: whether to add line numbers for profilers (`-lineinfo`).
        max_registers: the maximum number of registers per thread, 1 to 1024 (`--maxrregcount`);
            None for no such limit.
        defines: macros, either as a mapping from names to values (None for a macro without a value)
            or as a sequence of `"NAME"` and `"NAME=VALUE"`.
        include_paths: directories in which the compiler looks for headers, in this order.
        extra_options: any other NVRTC options, which are passed on unchanged.

    Raises:
        ConfigError: a value is not allowed.
        ArgumentTypeError: a value has a type that is not allowed.
    """

    __slots__ = ()

    def __new__(  # noqa: PLR0917  as the fields of a dataclass
        cls,
        arch: str | int | tuple[int, int] | None = None,
        std: str | int | None = None,
        fast_math: bool = False,
        optimization: int | None = None,
        lto: bool = False,
        debug: bool = False,
        lineinfo: bool = False,
        max_registers: int | None = None,
        defines: Mapping[str, str | int | None] | Sequence[str] = (),
        include_paths: Sequence[str | os.PathLike[str]] = (),
        extra_options: Sequence[str] = (),
        **unknown: Never,
    ) -> Self:
        """Check every value and convert it to its canonical form."""
        if unknown:
            raise unexpected_argument(cls, unknown, cls)
        if optimization is not None:
            check_int("optimization", optimization, 0, 3)
        if max_registers is not None:
            check_int("max_registers", max_registers, 1, 1024)
        return super().__new__(
            cls,
            None if arch is None else parse_arch(arch),
            None if std is None else _standard(std),
            _flag("fast_math", fast_math),
            optimization,
            _flag("lto", lto),
            _flag("debug", debug),
            _flag("lineinfo", lineinfo),
            max_registers,
            tuple(_defines(defines)),
            tuple(_paths(include_paths)),
            tuple(_texts("extra_options", extra_options)),
        )

    def replace(self, **changes: Any) -> CompileOptions:  # noqa: ANN401  any field's type
        """Return a copy with the given fields changed.

        Raises:
            ConfigError: there is no such field, or a value is not allowed.
        """
        for name in changes:
            if name not in self._fields:
                more = did_you_mean(name, self._fields)
                raise ConfigError(
                    f"no option {name!r}{more}; expected one of {', '.join(self._fields)}"
                )
        return CompileOptions(**{**self._asdict(), **changes})

    @property
    def parsed(self) -> ParsedOptions:
        """All flags as the compiler parses them."""
        return _parsed(self)

    @property
    def target(self) -> str | None:
        """The architecture, from `arch` or from `extra_options`; None if neither has one."""
        return self.parsed.arch

    def flags(self) -> tuple[str, ...]:
        """Return the options as flags for NVRTC, in a fixed order, with `extra_options` last."""
        own = (
            (self.arch is not None, f"--gpu-architecture={self.arch}"),
            (self.std is not None, f"--std={self.std}"),
            (self.fast_math, "--use_fast_math"),
            (self.optimization is not None, f"--ptxas-options=-O{self.optimization}"),
            (self.lto, "-dlto"),
            (self.debug, "--device-debug"),
            (self.lineinfo, "--generate-line-info"),
            (self.max_registers is not None, f"--maxrregcount={self.max_registers}"),
        )
        return (
            *(flag for is_given, flag in own if is_given),
            *(f"-D{define}" for define in self.defines),
            *(f"-I{path}" for path in self.include_paths),
            *self.extra_options,
        )


@lru_cache(maxsize=256)  # each request asks for it several times
def _parsed(options: CompileOptions) -> ParsedOptions:
    return parse_options(options.flags())


def _standard(std: str | int) -> str:
    match = re.fullmatch(_STD, str(std).lower(), re.ASCII)
    if match is None:
        raise ConfigError(f"std: expected c++NN, such as c++17, got {std!r}")
    return f"c++{match[1]}"


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: expected True or False, got {value!r}")
    return value


def _texts(name: str, values: object) -> Iterator[str]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise ArgumentTypeError(f"{name}: expected a sequence of texts, got {values!r}")
    for value in values:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(value, str):
            raise ArgumentTypeError(f"{name}: expected texts as elements, got {value!r}")
        if "\0" in value:
            raise ConfigError(f"{name}: expected texts without NUL characters, got {value!r}")
        yield value


def _defines(defines: object) -> Iterator[str]:
    if isinstance(defines, Mapping):
        items = cast("Mapping[object, object]", defines)
        defines = [
            str(name) if value is None or value is True else f"{name}={_macro_value(name, value)}"
            for name, value in items.items()
        ]
    for text in _texts("defines", defines):
        if not re.fullmatch(_DEFINE, text.partition("=")[0]):
            raise ConfigError(f"defines: expected NAME or NAME=VALUE, got {text!r}")
        yield text


def _macro_value(name: object, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ArgumentTypeError(f"defines[{name!r}]: expected text or an integer, got {value!r}")
    return str(value)


def _paths(paths: object) -> Iterator[str]:
    if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Sequence):
        raise ArgumentTypeError(f"include_paths: expected a sequence of directories, got {paths!r}")
    for path in paths:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentTypeError(f"include_paths: expected paths as elements, got {path!r}")
        text = os.fspath(path)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if not isinstance(text, str) or not text or "\0" in text:
            raise ConfigError(
                f"include_paths: expected non-empty texts without NUL characters, got {text!r}"
            )
        yield text


# -- as the compiler reads them --------------------------------------------------------------------

#: The characters that the C library's `isspace` treats as white space.
_SPACE = " \t\n\v\f\r"
_LETTERS = ("-D", "-U", "-I")
#: Options that may also begin with one dash.
_DASHES = (
    *("--std", "--use_fast_math", "--extra-device-vectorization", "--device-int128", "--no-cache"),
    *("--ftz", "--prec-sqrt", "--prec-div", "--fmad", "--maxrregcount", "--frandom-seed"),
    *("--time", "--diag-suppress", "--diag-warn", "--diag-error"),
)
#: Other spelling of an option -> the name that this module uses for the option.
_NAMES = {
    "--include-path": "-I",
    "--define-macro": "-D",
    "--undefine-macro": "-U",
    "-arch": "--gpu-architecture",
    "-G": "--device-debug",
    "-lineinfo": "--generate-line-info",
    "-dlto": "--dlink-time-opt",
    "-default-device": "--device-as-default-execution-space",
    "-w": "--disable-warnings",
    "-rdc": "--relocatable-device-code",
    "-Xptxas": "--ptxas-options",
    "-include": "--pre-include",
    **{name[1:]: name for name in _DASHES},
}
#: Options whose value may be the next text.
_TAKES_NEXT = frozenset(
    (
        *("-I", "-D", "-U", "--gpu-architecture", "--relocatable-device-code", "--ptxas-options"),
        *("--maxrregcount", "--pre-include", "--ftz", "--prec-sqrt", "--prec-div", "--fmad"),
        *("--diag-suppress", "--diag-warn", "--diag-error", "-Xcudafe"),
    )
)
#: Options of automatic precompiled headers, in the forms that every release from 12.8 on accepts.
#: They do not change the code: 12.8, 12.9 and 13.5 gave the same bytes for the benchmark kernels
#: and 200 random ones (`tests/dropin/test_precompiled.py`). `--pch-verbose` writes more to the log.
_AUTOMATIC_PCH = r"--?(pch|pch-dir=.+|(pch-messages|instantiate-templates-in-pch)=(true|false))"
#: NVRTC 13.3 and later install CUDA's headers into the directory DIR that this option names, unless
#: they are there, and look for headers as with `-IDIR -IDIR/cccl`. If DIR does not match
#: `_BUNDLED_DIRECTORY`, kcache does not follow the option, and the result is not cached.
BUNDLED = "--use-bundled-headers"
_BUNDLED_DIRECTORY = r"(?a:[\w.+@~/-]*[\w.+@~-])"
_TRUTH = frozenset(("true", "false"))
_LEVELS = frozenset(("-O0", "-O1", "-O2", "-O3"))
#: Options without a value.
_PLAIN = frozenset(
    (
        *("--use_fast_math", "--extra-device-vectorization", "--generate-line-info"),
        *("--dlink-time-opt", "--device-as-default-execution-space", "--disable-warnings"),
        *("--device-int128", "--no-cache"),
    )
)
#: In `_VALUED`, this represents all values of letters, digits and `_MARKS`. A value with a space
#: might be parsed as several options.
_WORD: frozenset[str] = frozenset()
_MARKS = str.maketrans("", "", "_+,")
#: Option with a value -> the harmless values. With None, all values but the empty one are harmless.
_VALUED: dict[str, frozenset[str] | None] = {
    **dict.fromkeys(("--ftz", "--prec-sqrt", "--prec-div", "--fmad"), _TRUTH),
    "--relocatable-device-code": _TRUTH,
    "--ptxas-options": _LEVELS,
    **dict.fromkeys(("--gpu-architecture", "--std", "--maxrregcount", "--frandom-seed"), _WORD),
    **dict.fromkeys(("--diag-suppress", "--diag-warn"), _WORD),
    **dict.fromkeys(_LETTERS),
}


class Option(NamedTuple):
    """One option.

    Attributes:
        name: the option's name with its dashes; the same for all spellings of the option.
        value: the option's value; None if it has none.
    """

    name: str
    value: str | None = None

    def __str__(self) -> str:
        """Return the option as one text, which NVRTC parses as the same option."""
        return self.name if self.value is None else f"{self.name}={self.value}"

    @property
    def is_include_path(self) -> bool:
        """Whether the option is `-I` with a directory that all releases of NVRTC treat alike.

        Releases may treat a directory differently if it is empty or begins with white space or an
        equals sign. `-I-` names no directory.
        """
        value = self.value or "-"
        return self.name == "-I" and value != "-" and value[0] not in f"={_SPACE}"

    @property
    def bundled(self) -> str | None:
        """The directory into which the option installs the compiler's own headers.

        None if the option is not `--use-bundled-headers`, or if its directory has an unusual form.
        """
        is_one = self.name == BUNDLED and re.fullmatch(_BUNDLED_DIRECTORY, self.value or "")
        return self.value if is_one else None

    @property
    def include_paths(self) -> tuple[str, ...]:
        """The directories in which the compiler looks for headers because of the option."""
        if self.bundled is not None:
            return self.bundled, f"{self.bundled}/cccl"
        return (self.value or "",) if self.is_include_path else ()


class ParsedOptions(tuple[Option, ...]):
    """The options of a compile, in order."""

    __slots__ = ()

    @property
    def include_paths(self) -> tuple[str, ...]:
        """The directories in which the compiler looks for headers, in order."""
        return tuple(path for each in self for path in each.include_paths)

    def with_bundled_as_plain(self) -> tuple[str, ...]:
        """Return the options as texts, with `-I` options in place of `--use-bundled-headers`."""
        return tuple(
            text
            for each in self
            for text in ([f"-I{path}" for path in each.include_paths] or [str(each)])
        )

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros that the options define, as `NAME` or `NAME=VALUE`."""
        return tuple(each.value or "" for each in self if each.name == "-D")

    @property
    def arch(self) -> str | None:
        """The value of the last option `--gpu-architecture`; None if there is no such option."""
        found = [each.value for each in self if each.name == "--gpu-architecture"]
        return found[-1] if found else None

    def with_include_paths(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return the options as texts, with `paths` in place of the directories of headers.

        `paths` has a new directory for each of `include_paths`, in the same order.
        """
        others = iter(paths)
        texts: list[str] = []
        for each in self:
            moved = [next(others) for _ in each.include_paths]
            own = "-I" if each.bundled is None else f"{BUNDLED}="
            texts.append(f"{own}{moved[0]}" if moved else str(each))
        return tuple(texts)

    def without_include_paths(self) -> tuple[str, ...]:
        """Return the options as texts, with `#0`, `#1`, ... as the directories of headers."""
        return self.with_include_paths(f"#{n}" for n, _ in enumerate(self.include_paths))


def parse_options(texts: Sequence[str]) -> ParsedOptions:
    """Return the options that `texts` contain, as the compiler parses them."""
    found: list[Option] = []
    rest = iter(texts)
    for text in rest:
        text = text.strip(_SPACE)  # noqa: PLW2901  as the compiler does
        if text.startswith(_LETTERS) and len(text) > 2:
            joined = text[3:] if text[2] == "=" else text[2:].lstrip(" ")
            found.append(Option(text[:2], joined))
            continue
        name, equals, value = text.partition("=")
        name = _NAMES.get(name, name)
        if equals:
            found.append(Option(name, value))
        elif name in _TAKES_NEXT:
            found.append(Option(name, next(rest, "").strip(_SPACE)))
        else:
            found.append(Option(name))
    return ParsedOptions(found)


def without_automatic_pch(texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return `texts` without the options of automatic precompiled headers, and these options.

    If such an option occurs twice or in an unknown form, or if an option names a precompiled
    header, no option is taken out: the results are `texts` and an empty tuple.
    """
    taken = [text for text in texts if re.fullmatch(_AUTOMATIC_PCH, text.strip(_SPACE))]
    names = [each.name.lstrip("-") for each in parse_options(texts) if "pch" in each.name]
    if not len(set(names)) == len(names) == len(taken):
        return texts, ()
    return [text for text in texts if text not in taken], taken


def are_harmless(options: Iterable[Option]) -> bool:
    """Return whether compiles after one with these options give the same code as in a new process.

    The module's docstring explains this. The result is false for options that were not tested.
    """
    for name, value in options:
        if value is None:
            if name not in _PLAIN:
                return False
        elif not value or name not in _VALUED:
            return False
        elif (allowed := _VALUED[name]) is _WORD:
            if not value.translate(_MARKS).isalnum():
                return False
        elif allowed is not None and value not in allowed:
            return False
    return True
