"""Ages: spans of time from seconds to years, and moments, as people write and read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kcache.errors import ConfigError

if TYPE_CHECKING:
    from datetime import datetime, tzinfo

__all__ = ["format_age", "local_time", "parse_age"]

#: Seconds since the epoch in the year 9987: no later moment can be written as a date.
_LATEST = 253e9

_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
#: From which number of seconds on a unit is read more easily than the one before.
_SHOWN = ((86400 * 2, 86400, "d"), (3600 * 2, 3600, "h"), (60 * 2, 60, "min"), (0, 1, "s"))


def parse_age(value: float | str, *, name: str = "age") -> float:
    """Return an age in seconds, from a number of them or text such as `"12h"`, `"30d"` or `"2w"`.

    Units: s, min (or m), h, d, w.

    Raises:
        ConfigError: the value is no such age, or negative.
    """
    seconds: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    elif isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*([A-Za-z]+)\s*", value, re.ASCII)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match and unit is not None:
            seconds = float(match[1]) * unit
    if seconds is None or not seconds >= 0:
        raise ConfigError(
            f"{name}={value!r} is not allowed; allowed: a number with a unit "
            '(s, min, h, d, w), such as "12h" or "30d"'
        )
    return seconds


def format_age(seconds: float) -> str:
    """Return an age in its natural unit, such as `"3 h"`; what lies in the future is `"0 s"`."""
    seconds = max(0.0, seconds)
    for least, unit, text in _SHOWN:
        if seconds >= least:
            return f"{int(seconds / unit)} {text}"
    return "0 s"


def local_time(seconds: float, zone: tzinfo | None = None) -> datetime:
    """Return a moment, seconds since the epoch, in a time zone; by default in this machine's.

    What no date can be is the nearest that can. Where the machine has a time zone that Python
    refuses (24 hours or more from UTC), it is in UTC.
    """
    from datetime import UTC, datetime

    moment = datetime.fromtimestamp(min(max(0.0, seconds), _LATEST), tz=UTC)
    try:
        return moment.astimezone(zone)
    except (ValueError, OverflowError, OSError):
        return moment
