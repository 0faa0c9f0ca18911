"""FakeClock: a clock that stands still until a test moves it."""

from __future__ import annotations

__all__ = ["FakeClock"]

#: 2026-01-01, so that a backend which mixes this clock with the system's is soon found.
START = 1_767_225_600_000_000_000


class FakeClock:
    """A clock for backends and engines: call it for nanoseconds, call `seconds` for seconds.

    Threads: safe to read from any; move it from one.

    Args:
        now_ns: nanoseconds since the epoch at which it starts.
    """

    def __init__(self, now_ns: int = START) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Return nanoseconds since the epoch, as `time.time_ns` does."""
        return self.now_ns

    def seconds(self) -> float:
        """Return seconds, as `time.time` and `time.monotonic` do."""
        return self.now_ns / 1e9

    def advance(self, seconds: float = 1.0) -> None:
        """Let `seconds` pass."""
        self.now_ns += round(seconds * 1e9)

    def set_back(self, seconds: float = 3600.0) -> None:
        """Set the clock back, as an administrator or a time server does."""
        self.now_ns -= round(seconds * 1e9)
