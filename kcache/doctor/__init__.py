"""What `kcache doctor` checks: this machine, programs, read-only tiers, remotes."""

from __future__ import annotations

from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        level: `OK`, `WARNING` (it works, with a drawback) or `PROBLEM` (something does not work).
        topic: what was checked, in a word.
        what: the result, one line.
        do: what to do about it, one line; empty if there is nothing to do, or `what` includes it.
    """

    level: str
    topic: str
    what: str
    do: str = ""
