"""CompileOptions: the options of a compile, checked, and as NVRTC's flags."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.nvrtc.parsed_options import ParsedOptions, parse_options
from kcache.util.record import Record

__all__ = ["Arch", "CompileOptions", "parse_arch"]

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


class CompileOptions(Record):
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

    arch: str | int | tuple[int, int] | None = None
    std: str | int | None = None
    fast_math: bool = False
    optimization: int | None = None
    lto: bool = False
    debug: bool = False
    lineinfo: bool = False
    max_registers: int | None = None
    defines: Mapping[str, str | int | None] | Sequence[str] = ()
    include_paths: Sequence[str | os.PathLike[str]] = ()
    extra_options: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check every value and convert it to its canonical form."""
        if self.arch is not None:
            self._put("arch", str(parse_arch(self.arch)))
        if self.std is not None:
            match = re.fullmatch(_STD, str(self.std).lower(), re.ASCII)
            if match is None:
                raise ConfigError(f"std={self.std!r} is not allowed; allowed: c++NN, such as c++17")
            self._put("std", f"c++{match[1]}")
        for name in ("fast_math", "lto", "debug", "lineinfo"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ArgumentTypeError(f"{name}={value!r} is not allowed; allowed: True, False")
        _check_int("optimization", self.optimization, 0, 3)
        _check_int("max_registers", self.max_registers, 1, 1024)
        self._put("defines", tuple(_defines(self.defines)))
        self._put("include_paths", tuple(_paths(self.include_paths)))
        self._put("extra_options", tuple(_texts("extra_options", self.extra_options)))
        self._put("_hash", hash(self._values()))

    def __hash__(self) -> int:
        return self.__dict__["_hash"]  # type: ignore[no-any-return]

    def replace(self, **changes: Any) -> CompileOptions:  # noqa: ANN401  any field's type
        """Return a copy with the given fields changed.

        Raises:
            ConfigError: there is no such field, or a value is not allowed.
        """
        for name in changes:
            if name not in self._names:
                from kcache.util.nearest import did_you_mean

                more = did_you_mean(name, self._names)
                raise ConfigError(f"no option {name!r}{more}; allowed: {', '.join(self._names)}")
        return super().replace(**changes)

    @property
    def parsed(self) -> ParsedOptions:
        """All flags as the compiler reads them."""
        known = self.__dict__.get("_parsed")
        if known is None:  # each request asks for it several times
            self._put("_parsed", known := parse_options(self.flags()))
        return cast("ParsedOptions", known)

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
