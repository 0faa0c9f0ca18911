"""What `kcache doctor` checks: this machine, programs, read-only tiers, remotes."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"
#: The packages that kcache needs.
_LIBRARIES = ("lmdb", "platformdirs", "xxhash", "zstandard")


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        level: `OK`, `WARNING` (it works, with a drawback) or `PROBLEM` (something does not work).
        topic: what was checked, in one or two words.
        what: the result, in one line.
        do: what the user can do about it, in one line. It is empty if there is nothing to do, or if
            `what` already says what to do.
    """

    level: str
    topic: str
    what: str
    do: str = ""


def diagnose_libraries() -> Iterator[Finding]:
    """Yield a finding for each package that can't be imported.

    If all can be imported, yield a single finding that lists their versions.
    """
    versions = [f"Python {platform.python_version()}"]
    for name in _LIBRARIES:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a broken installation may raise anything
            what = f"{name} can't be imported ({type(error).__name__}: {error})"
            do = f"Install it again: pip install --force-reinstall {name}"
            yield Finding(PROBLEM, "libraries", what, do)
        else:
            known = vars(module)
            versions.append(f"{name} {known.get('__version__') or known.get('VERSION')}")
    if len(versions) > len(_LIBRARIES):
        yield Finding(OK, "python", ", ".join(versions))
