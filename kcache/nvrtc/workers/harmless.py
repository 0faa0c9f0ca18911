"""Harmless: lists the options after which a compiler compiles as a new one does.

NVRTC keeps state between compiles. After one with `-G` (12.9 to 13.5), `-Ofc=max` or `--restrict`
(13.5), later compiles of other sources give other code until the process ends. Nothing in its
interface tells. So this list has only options that a test has shown to be harmless:
`tests/nvrtc/test_clean.py` compiles probe kernels before and after each option, in one process, and
compares them with those of new processes. A worker that gets any other option, or an unknown one,
is used once.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["EXAMPLES", "are_harmless"]

_TRUTH = frozenset(("true", "false"))
_LEVELS = frozenset(("-O0", "-O1", "-O2", "-O3"))
#: Options without a value.
_PLAIN = frozenset(
    (
        "--use_fast_math",
        "-use_fast_math",
        "--extra-device-vectorization",
        "-extra-device-vectorization",
        "--generate-line-info",
        "-lineinfo",
        "--dlink-time-opt",
        "-dlto",
        "--device-as-default-execution-space",
        "-default-device",
        "--disable-warnings",
        "-w",
        "--device-int128",
        "-device-int128",
        "--no-cache",
        "-no-cache",
    )
)
#: Stands for letters, digits and marks. The compiler might read more into a value with a space.
_WORD: frozenset[str] = frozenset()
_MARKS = str.maketrans("", "", "_+,")
#: Options whose value, behind an equals sign, is one of these. None allows any value.
_VALUED: dict[str, frozenset[str] | None] = {
    "--ftz": _TRUTH,
    "-ftz": _TRUTH,
    "--prec-sqrt": _TRUTH,
    "-prec-sqrt": _TRUTH,
    "--prec-div": _TRUTH,
    "-prec-div": _TRUTH,
    "--fmad": _TRUTH,
    "-fmad": _TRUTH,
    "--relocatable-device-code": _TRUTH,
    "-rdc": _TRUTH,
    "--ptxas-options": _LEVELS,
    "--gpu-architecture": _WORD,
    "-arch": _WORD,
    "--std": _WORD,
    "-std": _WORD,
    "--maxrregcount": _WORD,
    "-maxrregcount": _WORD,
    "--define-macro": None,
    "--undefine-macro": None,
    "--include-path": None,
    "--diag-suppress": _WORD,
    "--diag-warn": _WORD,
    "--frandom-seed": _WORD,
    "-frandom-seed": _WORD,
}
#: Options whose value follows without a separator: macros and include directories.
_LETTERS = ("-D", "-U", "-I")

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


def are_harmless(flags: Sequence[str]) -> bool:
    """Tell whether a compiler is as good as a new one after a compile with these options."""
    for flag in flags:
        name, equals, value = flag.partition("=")
        if equals and name in _VALUED:
            allowed = _VALUED[name]
            if allowed is _WORD:
                if not value.translate(_MARKS).isalnum():
                    return False
            elif allowed is not None and value not in allowed:
                return False
        elif flag not in _PLAIN and (flag[:2] not in _LETTERS or len(flag) == 2):
            return False
    return True
