"""ParsedOptions: the options of a compile as NVRTC reads them.

Whoever decides something by an option asks here, and never looks into its text. NVRTC 12.4 to 13.5
read each text like this: white space around it is dropped; `-D`, `-U` and `-I` may have their value
right behind them, behind spaces or behind an equals sign; the other options that take a value have
it behind an equals sign, and some of them also in the next text.

Some options are *harmless*: a compiler compiles after them as a new one does. NVRTC keeps state
between compiles. After one with `-G` (12.9 to 13.5), `-Ofc=max` or `--restrict` (13.5), later
compiles of other sources give other code until the process ends. Nothing in its interface tells. So
this list has only options that a test has shown to be harmless: `tests/nvrtc/test_clean.py`
compiles probe kernels before and after each option, in one process, and compares them with those of
new processes. A worker that gets any other option, or an unknown one, is used once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: What `isspace` of the C library takes for white space.
_SPACE = " \t\n\v\f\r"
_LETTERS = ("-D", "-U", "-I")
#: Other spellings of an option; here it has the first of its names.
_NAMES = {
    other: names[0]
    for names in (
        ("-I", "--include-path"),
        ("-D", "--define-macro"),
        ("-U", "--undefine-macro"),
        ("--gpu-architecture", "-arch"),
        ("--std", "-std"),
        ("--device-debug", "-G"),
        ("--generate-line-info", "-lineinfo"),
        ("--dlink-time-opt", "-dlto"),
        ("--use_fast_math", "-use_fast_math"),
        ("--extra-device-vectorization", "-extra-device-vectorization"),
        ("--device-as-default-execution-space", "-default-device"),
        ("--disable-warnings", "-w"),
        ("--device-int128", "-device-int128"),
        ("--no-cache", "-no-cache"),
        ("--ftz", "-ftz"),
        ("--prec-sqrt", "-prec-sqrt"),
        ("--prec-div", "-prec-div"),
        ("--fmad", "-fmad"),
        ("--relocatable-device-code", "-rdc"),
        ("--ptxas-options", "-Xptxas"),
        ("--maxrregcount", "-maxrregcount"),
        ("--frandom-seed", "-frandom-seed"),
        ("--time", "-time"),
        ("--pre-include", "-include"),
        ("--diag-suppress", "-diag-suppress"),
        ("--diag-warn", "-diag-warn"),
        ("--diag-error", "-diag-error"),
    )
    for other in names
}
#: Options whose value may be the next text.
_TAKES_NEXT = frozenset(
    (
        *("-I", "-D", "-U", "--gpu-architecture", "--relocatable-device-code", "--ptxas-options"),
        *("--maxrregcount", "--pre-include", "--ftz", "--prec-sqrt", "--prec-div", "--fmad"),
        *("--diag-suppress", "--diag-warn", "--diag-error", "-Xcudafe"),
    )
)
#: Options of automatic precompiled headers, in the forms that every release from 12.8 on takes.
#: They change no code: 12.8, 12.9 and 13.5 gave the same bytes for the benchmark kernels and 200
#: random ones (`tests/dropin/test_precompiled.py`). `--pch-verbose` says more in the log.
_AUTOMATIC_PCH = re.compile(
    r"--?(pch|pch-dir=.+|(pch-messages|instantiate-templates-in-pch)=(true|false))"
)
_TRUTH = frozenset(("true", "false"))
_LEVELS = frozenset(("-O0", "-O1", "-O2", "-O3"))
#: Options without a value.
_PLAIN = frozenset(
    (
        "--use_fast_math",
        "--extra-device-vectorization",
        "--generate-line-info",
        "--dlink-time-opt",
        "--device-as-default-execution-space",
        "--disable-warnings",
        "--device-int128",
        "--no-cache",
    )
)
#: Stands for letters, digits and marks. The compiler might read more into a value with a space.
_WORD: frozenset[str] = frozenset()
_MARKS = str.maketrans("", "", "_+,")
#: Options with a value, and which values. None allows any but the empty one.
_VALUED: dict[str, frozenset[str] | None] = {
    "--ftz": _TRUTH,
    "--prec-sqrt": _TRUTH,
    "--prec-div": _TRUTH,
    "--fmad": _TRUTH,
    "--relocatable-device-code": _TRUTH,
    "--ptxas-options": _LEVELS,
    "--gpu-architecture": _WORD,
    "--std": _WORD,
    "--maxrregcount": _WORD,
    "--diag-suppress": _WORD,
    "--diag-warn": _WORD,
    "--frandom-seed": _WORD,
    "-D": None,
    "-U": None,
    "-I": None,
}

#: An example of each option, for the test.
EXAMPLES = (
    *sorted(_PLAIN),
    *(f"{name}={value}" for name, values in _VALUED.items() for value in sorted(values or ())),
    *("--gpu-architecture=sm_80", "-arch=compute_90", "--std=c++14", "-std=c++20"),
    *("--maxrregcount=32", "-maxrregcount=64", "--define-macro=X=1", "--undefine-macro=X"),
    *("--include-path=/usr/include", "--diag-suppress=177,550", "--diag-warn=177"),
    *("--frandom-seed=1", "-frandom-seed=seed"),
    *("-DX=1", "-UX", "-I/usr/include"),
)


class Option(NamedTuple):
    """One option.

    Attributes:
        name: with its dashes; one of several spellings.
        value: or None.
    """

    name: str
    value: str | None = None

    def __str__(self) -> str:
        """Return the option as one text that NVRTC reads in the same way."""
        return self.name if self.value is None else f"{self.name}={self.value}"

    @property
    def is_include_path(self) -> bool:
        """Whether it names a directory of headers in the usual form.

        Releases may write a directory otherwise that begins like this, or that is empty; and `-I-`
        names none.
        """
        value = self.value or "-"
        return self.name == "-I" and value != "-" and value[0] not in f"={_SPACE}"


class ParsedOptions(tuple[Option, ...]):
    """The options of a compile, in order."""

    __slots__ = ()

    @property
    def include_paths(self) -> tuple[str, ...]:
        """Directories of headers, in order."""
        return tuple(each.value or "" for each in self if each.is_include_path)

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros, `NAME` or `NAME=VALUE`."""
        return tuple(each.value or "" for each in self if each.name == "-D")

    @property
    def arch(self) -> str | None:
        """The architecture; the last one counts."""
        found = [each.value for each in self if each.name == "--gpu-architecture"]
        return found[-1] if found else None

    def with_include_paths(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return the options as texts, with other directories of headers in the same order."""
        others = iter(paths)
        return tuple(f"-I{next(others)}" if o.is_include_path else str(o) for o in self)

    def without_include_paths(self) -> tuple[str, ...]:
        """Return the options as texts, with the directories of headers by position only."""
        return self.with_include_paths(f"#{n}" for n, _ in enumerate(self.include_paths))


def parse_options(texts: Sequence[str]) -> ParsedOptions:
    """Return what the compiler reads in the texts of options."""
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
    """Return the options without those of automatic precompiled headers, and those.

    If one of them is there twice or in another form, or one names a precompiled header, all stay.
    """
    taken = [text for text in texts if _AUTOMATIC_PCH.fullmatch(text.strip(_SPACE))]
    names = [each.name.lstrip("-") for each in parse_options(texts) if "pch" in each.name]
    if not len(set(names)) == len(names) == len(taken):
        return texts, ()
    return [text for text in texts if text not in taken], taken


def are_harmless(options: Iterable[Option]) -> bool:
    """Tell whether a compiler is as good as a new one after a compile with these options."""
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
