"""Ages: what is read, what is refused, what is shown."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from core.helpers import key, look

from kcache import ConfigError, KernelCache
from kcache.directory import open_directory
from kcache.util.units import format_age, parse_age
from kcache_backends.file import FileBackend

HOUR, DAY = 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0s", 0),
        ("5m", 300),
        ("12h", 12 * HOUR),
        ("1.5h", 1.5 * HOUR),
        ("30d", 30 * DAY),
        (" 2 W ", 14 * DAY),
        (0.5, 0.5),
    ],
)
def test_an_age_is_read(text: str | float, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1y",
        "1,5h",
        "1" * 5000 + "d",
        -1,
        float("nan"),
        True,
    ],
)
def test_what_is_no_age_is_refused_by_name(text: str | float) -> None:
    with pytest.raises(ConfigError, match=r"^older_than=.*allowed: a number with a unit"):
        parse_age(text, name="older_than")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (119.9, "119 s"),
        (2 * HOUR - 1, "119 min"),
        (2 * HOUR, "2 h"),
        (2 * DAY, "2 d"),
    ],
)
def test_an_age_is_shown_in_its_natural_unit(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_a_cache_is_trimmed_by_an_age_in_words(tmp_path: Path) -> None:
    open_directory(str(tmp_path))
    for number, clock in ((1, lambda: 10**9), (2, None)):
        with closing(
            FileBackend(tmp_path / "file", **({"clock": clock} if clock else {}))
        ) as backend:
            backend.put(key(number), b"x" * 10)
    with KernelCache(tmp_path) as cache:
        with pytest.raises(ConfigError, match="older_than='soon'"):
            cache.trim(older_than="soon")
        assert cache.trim(older_than="30d") == 10
        assert set(look(tmp_path / "file").entries) == {key(2)}
        assert cache.trim("0B", older_than="30d") == 10
