"""Units: sizes, spans of time, moments, switches and texts, as people write and read them."""

from __future__ import annotations

import re

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.util.forks import importing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, tzinfo

#: Seconds since the epoch in the year 9987: no later moment can be written as a date.
_LATEST = 253e9

_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
#: A number and a unit. Python refuses to convert thousands of digits.
_MEASURE = r"\s*(\d{1,100}(?:\.\d{1,100})?)\s*([A-Za-z]*)\s*"
#: A longer wait would overflow the operating system's type.
_MAX_SECONDS = 1e6 + 1
_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off", ""))
_AGE_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
#: The number of seconds from which a unit is easier to read than the smaller one.
_SHOWN = ((86400 * 2, 86400, "d"), (3600 * 2, 3600, "h"), (60 * 2, 60, "min"), (0, 1, "s"))


def counted(count: int, noun: str = "entry") -> str:
    """Return a number with its noun, such as `"1 entry"`, `"2 misses"` and `"3 kernels"`."""
    if count != 1:
        noun = (
            f"{noun[:-1]}ies" if noun.endswith("y") else noun + ("es" if noun[-1] == "s" else "s")
        )
    return f"{count:,} {noun}"


def parse_size(value: str | int, *, name: str = "size", least: int = 0) -> int:
    """Return a size in bytes from an integer or text such as `"512MB"` or `"1.5GiB"`.

    KB, MB, GB, TB (and K, M, G, T) are powers of 1000; KiB, MiB, GiB, TiB of 1024.

    Raises:
        ConfigError: the value is not such a size, or less than `least` bytes.
    """
    size = None if isinstance(value, float) else _measured(value, _SIZE_UNITS)
    if size is None or size < least:
        raise ConfigError(
            f"{name}: expected at least {counted(least, 'byte')}, as an integer or as text with a "
            f'unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), such as "512MB", got {value!r}'
        )
    return int(size)


def _measured(value: object, units: Mapping[str, int]) -> float | None:
    """Return a number, or a text of a number and a unit, in the smallest unit; else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    match = re.fullmatch(_MEASURE, value, re.ASCII) if isinstance(value, str) else None
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None:
        return None
    return (float(match[1]) if "." in match[1] else int(match[1])) * unit


def format_size(size: float) -> str:
    """Return bytes in the largest fitting unit of 1024, such as `"1.5 MiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} EiB"


def format_time(seconds: float) -> str:
    """Return a duration in its natural unit, such as `"1.2 ms"`."""
    if not seconds:
        return "0 s"
    for unit, scale in (("us", 1e-3), ("ms", 1.0)):
        if seconds < scale:
            return f"{seconds * 1e3 / scale:.1f} {unit}"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def parse_age(value: float | str, *, name: str = "age") -> float:
    """Return an age in seconds, from a number of them or text such as `"12h"`, `"30d"` or `"2w"`.

    Units: s, min (or m), h, d, w.

    Raises:
        ConfigError: the value is not such an age, or negative.
    """
    seconds = _measured(value, _AGE_UNITS)
    if seconds is None or not seconds >= 0:
        raise ConfigError(
            f"{name}: expected a number with a unit (s, min, h, d, w), "
            f'such as "12h" or "30d", got {value!r}'
        )
    return seconds


def parse_seconds(value: str | float, *, name: str, zero: bool = True) -> float:
    """Return a time limit in seconds, which must be above 0 if `zero` is false.

    Raises:
        ConfigError: the value is not such a limit.
    """
    try:
        seconds = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < _MAX_SECONDS:
        raise ConfigError(f"{name}: expected 0 to 1,000,000 seconds, got {value!r}")
    if seconds == 0 and not zero:
        raise ConfigError(f"{name}: expected seconds above 0, got {value!r}")
    return seconds


def check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Reject what is not an integer from `least` to `most`.

    Raises:
        ConfigError: it is too small or too large; ArgumentTypeError: it is something else.
    """
    kind: type[ConfigError] = ArgumentTypeError
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= least and (most is None or value <= most):
            return
        kind = ConfigError
    allowed = f"an integer >= {least}" if most is None else f"{least} to {most}"
    raise kind(f"{name}: expected {allowed}, got {value!r}")


def parse_flag(value: str | bool, *, name: str) -> bool:
    """Return whether a switch is on.

    Raises:
        ConfigError: the value is neither a bool nor text such as `"1"` or `"off"`.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        text = value.strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
    raise ConfigError(f"{name}: expected 1, true, yes, on, 0, false, no or off, got {value!r}")


def format_age(seconds: float) -> str:
    """Return an age in its natural unit, such as `"3 h"`; a moment in the future is `"0 s"`."""
    seconds = max(0.0, seconds)
    for least, unit, text in _SHOWN:
        if seconds >= least:
            return f"{int(seconds / unit)} {text}"
    return "0 s"


def local_time(seconds: float, zone: tzinfo | None = None) -> datetime:
    """Return a moment, seconds since the epoch, in a time zone; by default in this machine's.

    A moment that no date can express becomes the nearest one that a date can. If the machine has a
    time zone that Python refuses (24 hours or more from UTC), the result is in UTC.
    """
    with importing:
        from datetime import UTC, datetime  # noqa: PLC0415  2 ms

    moment = datetime.fromtimestamp(min(max(0.0, seconds), _LATEST), tz=UTC)
    try:
        return moment.astimezone(zone)
    except (ValueError, OverflowError, OSError):
        return moment


def plain(text: str, keep: str = "") -> str:
    """Return text that is safe for a terminal: unprintable characters but `keep` are escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )
