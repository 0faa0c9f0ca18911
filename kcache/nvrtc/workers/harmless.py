"""Harmless: lists the options after which a compiler compiles as a new one does.

NVRTC keeps state between compiles. After one with `-G` (12.9 to 13.5), `-Ofc=max` or `--restrict`
(13.5), later compiles of other sources give other code until the process ends. Nothing in its
interface tells. So this list has only options that a test has shown to be harmless:
`tests/nvrtc/test_clean.py` compiles probe kernels before and after each option, in one process, and
compares them with those of new processes. A worker that gets any other option, or an unknown one,
is used once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcache.nvrtc.parsed_options import Option

__all__ = ["EXAMPLES", "are_harmless"]

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
