"""Units: parses and formats sizes, durations, dates, switches and other texts for users."""

from __future__ import annotations

import re

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.util.forks import importing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, tzinfo

#: A time in the year 9987, in seconds since the epoch. Later times are replaced by it, because
#: Python's dates end with the year 9999.
_LATEST = 253e9

_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
#: The pattern of a number with a unit. The number of digits is limited, because Python refuses to
#: convert thousands of digits.
_MEASURE = r"\s*(\d{1,100}(?:\.\d{1,100})?)\s*([A-Za-z]*)\s*"
#: Time limits are below this, because a longer wait could overflow the operating system's type.
_MAX_SECONDS = 1e6 + 1
_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off", ""))
_AGE_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
#: Units of ages: the number of seconds from which the unit is used, its length, and its name.
_SHOWN = ((86400 * 2, 86400, "d"), (3600 * 2, 3600, "h"), (60 * 2, 60, "min"), (0, 1, "s"))


def counted(count: int, noun: str = "entry") -> str:
    """Return a number with its noun, such as `"1 entry"`, `"2 misses"` and `"3 kernels"`."""
    if count != 1:
        noun = (
            f"{noun[:-1]}ies" if noun.endswith("y") else noun + ("es" if noun[-1] == "s" else "s")
        )
    return f"{count:,} {noun}"


def parse_size(value: str | int, *, name: str = "size", least: int = 0) -> int:
    """Return the size in bytes that `value` states: an integer, or text such as `"1.5GiB"`.

    KB, MB, GB, TB (and K, M, G, T) are powers of 1000; KiB, MiB, GiB, TiB are powers of 1024.

    Raises:
        ConfigError: `value` is not a size, or is less than `least` bytes. The message begins with
            `name`.
    """
    size = None if isinstance(value, float) else _measured(value, _SIZE_UNITS)
    if size is None or size < least:
        raise ConfigError(
            f"{name}: expected at least {counted(least, 'byte')}, as an integer or as text with a "
            f'unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), such as "512MB", got {value!r}'
        )
    return int(size)


def _measured(value: object, units: Mapping[str, int]) -> float | None:
    """Return `value` in the smallest unit, or None if it is not a number with or without a unit."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    match = re.fullmatch(_MEASURE, value, re.ASCII) if isinstance(value, str) else None
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None:
        return None
    return (float(match[1]) if "." in match[1] else int(match[1])) * unit


def format_size(size: float) -> str:
    """Return a size in bytes as text with a suitable unit, such as `"1.5 MiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} EiB"


def format_time(seconds: float) -> str:
    """Return a duration in seconds as text with a suitable unit, such as `"1.2 ms"`."""
    if not seconds:
        return "0 s"
    for unit, scale in (("us", 1e-3), ("ms", 1.0)):
        if seconds < scale:
            return f"{seconds * 1e3 / scale:.1f} {unit}"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def parse_age(value: float | str, *, name: str = "age") -> float:
    """Return the age in seconds that `value` states: a number, or text such as `"30d"` or `"2w"`.

    The units are s, min (or m), h, d and w. A number without a unit is in seconds.

    Raises:
        ConfigError: `value` is not an age, or is negative. The message begins with `name`.
    """
    seconds = _measured(value, _AGE_UNITS)
    if seconds is None or not seconds >= 0:
        raise ConfigError(
            f"{name}: expected a number with a unit (s, min, h, d, w), "
            f'such as "12h" or "30d", got {value!r}'
        )
    return seconds


def parse_seconds(value: str | float, *, name: str, zero: bool = True) -> float:
    """Return the time limit in seconds that `value` states: a number, or text with a number.

    Raises:
        ConfigError: `value` is not a number from 0 to 1,000,000, or is 0 although `zero` is false.
            The message begins with `name`.
    """
    try:
        seconds = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < _MAX_SECONDS:
        raise ConfigError(f"{name}: expected 0 to 1,000,000 seconds, got {value!r}")
    if seconds == 0 and not zero:
        raise ConfigError(f"{name}: expected more than 0 seconds, got {value!r}")
    return seconds


def check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise an error if `value` is not an integer from `least` to `most`.

    Raises:
        ConfigError: `value` is too small or too large.
        ArgumentTypeError: `value` is not an integer.
    """
    kind: type[ConfigError] = ArgumentTypeError
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= least and (most is None or value <= most):
            return
        kind = ConfigError
    allowed = f"an integer >= {least}" if most is None else f"{least} to {most}"
    raise kind(f"{name}: expected {allowed}, got {value!r}")


def parse_flag(value: str | bool, *, name: str) -> bool:
    """Return whether `value` switches a setting on: True, or text such as `"1"` or `"yes"`.

    Raises:
        ConfigError: `value` is neither a bool nor text such as `"1"` or `"off"`. The message begins
            with `name`.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        text = value.strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
    raise ConfigError(f"{name}: expected 1, true, yes, on, 0, false, no or off, got {value!r}")


def format_age(seconds: float) -> str:
    """Return an age in seconds as text with a suitable unit, such as `"3 h"`.

    A negative age, which belongs to a time in the future, is shown as `"0 s"`.
    """
    seconds = max(0.0, seconds)
    for least, unit, text in _SHOWN:
        if seconds >= least:
            return f"{int(seconds / unit)} {text}"
    return "0 s"


def local_time(seconds: float, zone: tzinfo | None = None) -> datetime:
    """Return the time `seconds` after the epoch as a date in `zone`, else in this machine's zone.

    A time that is out of the range of dates is replaced by the nearest one in this range. If Python
    does not support the time zone (24 hours or more from UTC), the result is in UTC.
    """
    with importing:
        from datetime import UTC, datetime  # noqa: PLC0415  2 ms

    moment = datetime.fromtimestamp(min(max(0.0, seconds), _LATEST), tz=UTC)
    try:
        return moment.astimezone(zone)
    except (ValueError, OverflowError, OSError):
        return moment


def plain(text: str, keep: str = "") -> str:
    """Return `text` with unprintable characters escaped, so that it is safe to print on a terminal.

    The characters in `keep` are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )
