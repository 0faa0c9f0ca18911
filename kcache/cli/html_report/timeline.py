"""Timeline: adds the hours of a history up to the days and hours that a chart shows."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, tzinfo
from typing import NamedTuple

from kcache.engine.history import HOUR_SECONDS, Hour
from kcache.util.units import local_time

__all__ = ["Span", "days", "last_hours"]

#: The fewest and the most days that a chart shows.
_LEAST, _MOST = 14, 90


class Span(NamedTuple):
    """A day or an hour.

    Attributes:
        label: short, for an axis.
        title: in full.
    """

    label: str
    title: str
    hits: float = 0.0
    misses: float = 0.0
    evictions: float = 0.0
    saved_seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def requests(self) -> float:
        """Hits and misses together."""
        return self.hits + self.misses

    def plus(self, hour: Hour) -> Span:
        """Return the span with the counts of one of its hours added."""
        return self._replace(
            hits=self.hits + hour.hits,
            misses=self.misses + hour.misses,
            evictions=self.evictions + hour.evictions,
            saved_seconds=self.saved_seconds + hour.saved_seconds,
            compile_seconds=self.compile_seconds + hour.compile_seconds,
        )


def days(hours: Iterable[Hour], now: float, zone: tzinfo | None = None) -> list[Span]:
    """Return the days since the first hour, at least two weeks, today last; none without hours.

    Args:
        hours: oldest first.
        now: seconds since the epoch.
        zone: the time zone of the days, by default this machine's.
    """
    counted = [(_moment(hour.start, zone).date(), hour) for hour in hours]
    if not counted:
        return []
    today = _moment(now, zone).date()
    count = min(_MOST, max(_LEAST, (today - counted[0][0]).days + 1))
    dates = [today - timedelta(count - 1 - n) for n in range(count)]
    spans = {day: Span(f"{day.day} {day:%b}", f"{day:%A}, {day.day} {day:%B %Y}") for day in dates}
    for day, hour in counted:
        if day in spans:
            spans[day] = spans[day].plus(hour)
    return list(spans.values())


def last_hours(
    hours: Iterable[Hour], now: float, zone: tzinfo | None = None, *, count: int = 48
) -> list[Span]:
    """Return the last hours, the present one last; none if nothing was counted in any."""
    present = int(now // HOUR_SECONDS)
    spans: dict[int, Span] = {}
    for number in range(present - count + 1, present + 1):
        moment = _moment(number * HOUR_SECONDS, zone)
        spans[number] = Span(f"{moment:%a %H:%M}", f"{moment:%A}, {moment.day} {moment:%B, %H:%M}")
    for hour in hours:
        number = hour.start // HOUR_SECONDS
        if number in spans:
            spans[number] = spans[number].plus(hour)
    found = list(spans.values())
    return found if any(span.requests for span in found) else []


def _moment(seconds: float, zone: tzinfo | None) -> datetime:
    return local_time(seconds, zone)
