"""Harmless options: those after which a compiler compiles everything else as a new one would.

NVRTC keeps state between compiles. After one with `-G` (12.9 to 13.5), `-Ofc=max` or `--restrict`
(13.5), later compiles of other sources give other code until the process ends. Nothing in its interface tells. So
this list holds options of which a test has shown otherwise (`tests/nvrtc/test_clean.py` compiles
probe kernels before and after each, in one process, and compares them with those of new processes);
a worker that was given any other option, one that is unknown here included, is used once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["HARMLESS", "are_harmless"]

#: Options with their values in any of the forms that NVRTC takes, each with an example that the
#: test compiles with.
HARMLESS: dict[str, tuple[str, ...]] = {
    r"(-arch|--gpu-architecture)=(sm|compute)_\d+[af]?": ("-arch=sm_80", "-arch=compute_90"),
    r"(-std|--std)=c\+\+\d\d": ("-std=c++14", "--std=c++20"),
    r"(-D|--define-macro=).+": ("-DX=1", "--define-macro=Y"),
    r"(-U|--undefine-macro=).+": ("-UX",),
    r"(-I|--include-path=).+": ("-I/usr/include",),
    r"--?use_fast_math": ("--use_fast_math", "-use_fast_math"),
    r"(-|--)(ftz|prec-sqrt|prec-div|fmad)=(true|false)": (
        "--ftz=true",
        "--prec-sqrt=false",
        "--prec-div=false",
        "--fmad=false",
    ),
    r"(-maxrregcount|--maxrregcount)=\d+": ("--maxrregcount=32",),
    r"--ptxas-options=-O[0-3]": ("--ptxas-options=-O0", "--ptxas-options=-O1"),
    r"-lineinfo|--generate-line-info": ("-lineinfo",),
    r"-dlto|--dlink-time-opt": ("-dlto",),
    r"(-rdc|--relocatable-device-code)=(true|false)": ("--relocatable-device-code=true",),
    r"(-default-device|--device-as-default-execution-space)": ("-default-device",),
    r"-w|--disable-warnings": ("-w",),
    r"(-device-int128|--device-int128)": ("--device-int128",),
    r"--(diag-suppress|diag-warn)=\d+": ("--diag-suppress=177",),
}
_PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in HARMLESS), re.DOTALL)


def are_harmless(flags: Sequence[str]) -> bool:
    """Tell whether a compiler that was given these options is as good as a new one afterwards."""
    return all(_PATTERN.fullmatch(flag) for flag in flags)
