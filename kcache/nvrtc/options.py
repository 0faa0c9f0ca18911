"""CompileOptions: the options of a compile, checked, and as NVRTC's flags."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Never, Self, cast

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.nvrtc.parsed_options import ParsedOptions, parse_options

_ARCH = r"(?:(sm|compute)_)?(\d{2,3})([af]?)"
_STD = r"(?:c\+\+)?(\d{2})"
_DEFINE = r"[A-Za-z_]\w*(\([\w, .]*\))?"


class Arch(NamedTuple):
    """A target architecture.

    Attributes:
        kind: `sm` (machine code and PTX) or `compute` (PTX alone).
        number: such as 90.
        suffix: `a` (architecture-specific), `f` (family-specific) or nothing.
    """

    kind: str
    number: int
    suffix: str

    def __str__(self) -> str:
        return f"{self.kind}_{self.number}{self.suffix}"


def parse_arch(value: str | int | tuple[int, int]) -> Arch:
    """Return the architecture that `value` names: `"sm_90a"`, `"compute_90"`, `"90"`, 90 or (9, 0).

    Raises:
        ConfigError: it names none.
    """
    if isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value):
        major, minor = value  # in the form of torch.cuda.get_device_capability()
        value = 10 * major + minor if 0 <= minor < 10 else str(value)
    match = re.fullmatch(_ARCH, str(value), re.ASCII) if not isinstance(value, bool) else None
    if match is None:
        raise ConfigError(
            f"arch={value!r} is not allowed; allowed: sm_NN, compute_NN with an optional a or f "
            "(such as sm_90a), the number alone, or major and minor such as (9, 0)"
        )
    kind, number, suffix = match.groups()
    return Arch(kind or "sm", int(number), suffix)


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
        arch: target: `"sm_90"` gives machine code (CUBIN) and PTX, `"compute_90"` PTX alone;
            suffixes `a` and `f` select architecture- and family-specific targets; 90 and (9, 0), as
            PyTorch reports it, are `sm_90`. None takes the current GPU's.
        std: C++ standard: `"c++17"`, `"17"`, ...; None leaves the compiler's default.
        fast_math: `--use_fast_math`.
        optimization: 0 to 3, of the assembler (`--ptxas-options=-O`); NVRTC has no `-O`.
        lto: make LTOIR for link-time optimisation instead of PTX and CUBIN (`-dlto`).
        debug: device debug information (`-G`).
        lineinfo: line numbers for profilers (`-lineinfo`).
        max_registers: registers per thread, at least 1 (`--maxrregcount`).
        defines: macros, a mapping of name to value (None for none) or a sequence of `"NAME"` and
            `"NAME=VALUE"`.
        include_paths: directories searched for headers, in order.
        extra_options: any other NVRTC options, passed on as they are.

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
            from kcache.util.hints import unexpected_argument

            raise unexpected_argument(cls, unknown, cls)
        _check_int("optimization", optimization, 0, 3)
        _check_int("max_registers", max_registers, 1, 1024)
        return super().__new__(
            cls,
            None if arch is None else str(parse_arch(arch)),
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
                from kcache.util.hints import did_you_mean

                more = did_you_mean(name, self._fields)
                raise ConfigError(f"no option {name!r}{more}; allowed: {', '.join(self._fields)}")
        return CompileOptions(**{**self._asdict(), **changes})

    @property
    def parsed(self) -> ParsedOptions:
        """All flags as the compiler reads them."""
        return _parsed(self)

    @property
    def target(self) -> str | None:
        """The architecture, from `arch` or from `extra_options`; None if neither has one."""
        return self.parsed.arch

    def flags(self) -> tuple[str, ...]:
        """Return NVRTC's flags, in a fixed order, `extra_options` last."""
        return (
            *self._own_flags(),
            *(f"-I{path}" for path in self.include_paths),
            *self.extra_options,
        )

    def _own_flags(self) -> Iterator[str]:
        if self.arch is not None:
            yield f"--gpu-architecture={self.arch}"
        if self.std is not None:
            yield f"--std={self.std}"
        if self.fast_math:
            yield "--use_fast_math"
        if self.optimization is not None:
            yield f"--ptxas-options=-O{self.optimization}"
        if self.lto:
            yield "-dlto"
        if self.debug:
            yield "--device-debug"
        if self.lineinfo:
            yield "--generate-line-info"
        if self.max_registers is not None:
            yield f"--maxrregcount={self.max_registers}"
        for define in self.defines:
            yield f"-D{define}"


@lru_cache(maxsize=256)  # each request asks for it several times
def _parsed(options: CompileOptions) -> ParsedOptions:
    return parse_options(options.flags())


def _standard(std: str | int) -> str:
    match = re.fullmatch(_STD, str(std).lower(), re.ASCII)
    if match is None:
        raise ConfigError(f"std={std!r} is not allowed; allowed: c++NN, such as c++17")
    return f"c++{match[1]}"


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}={value!r} is not allowed; allowed: True, False")
    return value


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name}={value!r} is not allowed; allowed: {least} to {most}")
    if not least <= value <= most:
        raise ConfigError(f"{name}={value!r} is not allowed; allowed: {least} to {most}")


def _texts(name: str, values: object) -> Iterator[str]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise ArgumentTypeError(f"{name}={values!r} is not allowed; allowed: a sequence of text")
    for value in values:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(value, str):
            raise ArgumentTypeError(f"{name} holds {value!r}; allowed: text")
        if "\0" in value:
            raise ConfigError(f"{name} holds {value!r}; a NUL character is not allowed")
        yield value


def _defines(defines: object) -> Iterator[str]:
    if isinstance(defines, Mapping):
        items = cast("Mapping[object, object]", defines)
        texts = [
            str(name) if value is None or value is True else f"{name}={_macro_value(name, value)}"
            for name, value in items.items()
        ]
    else:
        texts = list(_texts("defines", defines))
    for text in texts:
        if not re.fullmatch(_DEFINE, text.partition("=")[0]):
            raise ConfigError(f"defines: {text!r} is not allowed; allowed: NAME or NAME=VALUE")
        if "\0" in text:
            raise ConfigError(f"defines: {text!r}: a NUL character is not allowed")
        yield text


def _macro_value(name: object, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ArgumentTypeError(
            f"defines[{name!r}]={value!r} is not allowed; allowed: text, integer"
        )
    return str(value)


def _paths(paths: object) -> Iterator[str]:
    if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Sequence):
        raise ArgumentTypeError(
            f"include_paths={paths!r} is not allowed; allowed: a sequence of directories"
        )
    for path in paths:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentTypeError(f"include_paths holds {path!r}; allowed: paths")
        text = os.fspath(path)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if not isinstance(text, str) or not text or "\0" in text:
            raise ConfigError(f"include_paths holds {text!r}; allowed: non-empty text paths")
        yield text
