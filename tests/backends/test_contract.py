"""Every backend keeps the contract."""

from __future__ import annotations

from backends.suites import FileSuite, LmdbSuite, MemorySuite


class TestFile(FileSuite):
    """One file per entry."""


class TestLmdb(LmdbSuite):
    """One database, with an index by recency."""


class TestMemory(MemorySuite):
    """A dict; the only backend that is no backend of ours."""
