"""Every backend keeps the contract."""

from backends.suites import FileSuite, LmdbSuite, MemorySuite, ZstdFileSuite, ZstdLmdbSuite


class TestFile(FileSuite):
    """One file per entry."""

    kills = 3


class TestLmdb(LmdbSuite):
    """One database, with a recency index."""

    kills = 3


class TestZstd(ZstdFileSuite):
    """Compressed, one file per entry."""

    kills = 3


class TestZstdLmdb(ZstdLmdbSuite):
    """Compressed, in a database."""

    kills = 3


class TestMemory(MemorySuite):
    """A dict, which only tests use as a backend."""


def test_every_first_party_backend_is_here() -> None:
    from kcache import backend

    suites = {"file": TestFile, "lmdb": TestLmdb, "zstd": TestZstd, "zstd+lmdb": TestZstdLmdb}
    assert set(backend._FIRST_PARTY) == set(suites)
