"""What is stored, and how the commands know it; no compiler runs here."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import kcache
from kcache.nvcc.recording import Recording, RefusedError
from kcache.nvcc.request import Request, Roots
from kcache.nvcc.store import Store


def request(*arguments: str, directory: str = "/a/work", **variables: str) -> Request:
    texts = b"".join(f"{name}={value}".encode() + b"\0" for name, value in variables.items())
    told = b"".join(os.fsencode(text) + b"\0" for text in ("nvcc", *arguments))
    fields = ("/opt/cuda/bin/nvcc", directory, "18", "0", "0")
    return Request.of([*map(os.fsencode, fields), told, texts])


def records(*rows: Sequence[str]) -> bytes:
    return b"".join(text.encode() + b"\0" for row in rows for text in row)


# -- roots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "/a/work/k.cu",
        "-I/a/work/include",
        "-Xcompiler=-I/a/work,-DX=/a/work",
        "k.o: /a/work/k.cu /a/work/include/x.h \\\n /tmp/t/y.h\n",
        "/a/work",
        "a \x01 mark",
        "\x010/k.cu",
    ],
)
def test_a_text_comes_back(text: str) -> None:
    roots = Roots(["/a/work", "/tmp/t"])
    assert roots.named(roots.numbered(text)) == text


@pytest.mark.parametrize(
    "text", ["/a/workshop/k.cu", "x/a/work/k.cu", "/b/a/work", "-Dx/a/work", "/a/work.cu"]
)
def test_what_only_looks_like_a_root_stays(text: str) -> None:
    roots = Roots(["/a/work"])
    assert roots.numbered(text) == text
    assert roots.rooted(text) == text


def test_a_key_does_not_depend_on_the_place() -> None:
    one = request("-c", "/x/1/k.cu", "-o", "/x/1/k.o")
    assert one.key == request("-c", "/y/2/k.cu", "-o", "/y/2/k.o", directory="/b").key
    assert one.key != request("-c", "/x/1/k.cu", "-o", "/x/2/k.o").key
    assert one.key != request("-c", "/x/1/k.cu", "-o", "/x/1/k.o", "-DX").key
    assert one.key != request("-c", "/x/1/k.cu", "-o", "/x/1/k.o", LC_ALL="C").key
    assert one.key == request("-c", "/x/1/k.cu", "-o", "/x/1/k.o", KCACHE_LOG="debug").key


def test_sources_have_keys_of_their_own(tmp_path: Path) -> None:
    """A key has few sets of evidence, and programs have many sources for one command."""

    def key(source: str, *arguments: str) -> str:
        (tmp_path / "k.cu").write_text(source)
        return request("-ptx", "k.cu", "-o", "k.ptx", *arguments, directory=str(tmp_path)).key

    first = key("one")
    assert key("another") != first
    (tmp_path / "k.ptx").write_text("an output")
    assert key("one") == first
    assert key("one", "missing.cu") != first


# -- recordings ------------------------------------------------------------------------------------

BEGIN = ("B", "1", "/opt/cuda/bin/nvcc", "f 1 2 3 4 5")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("X", "1", "/bin/static", "static\x1f"), "could not be recorded"),
        (("!", "1", "/somewhere", "opendir"), "opendir of /somewhere"),
        (("!", "1", "", "connect"), "connect of a descriptor"),
        (("O", "1", "/proc/1/maps", "f 1 2 3 4 5"), "/proc/1/maps is read"),
        (("O", "1", "k.cu", "!"), "changed a moment before"),
        (("O", "1", "k.cu", "-13"), "can't be read"),
        (("O", "1", "/pipe", "o 1 2 3 4 5"), "is no file"),
        (("W", "1", "/dev/sda", "+"), "is written"),
        (("W", "1", "k.o", "="), "is read and written"),
        (("T", "2", "time", ""), "asks for the time"),
        (("OO", "1", "k.cu", "f 1 2 3 4 5"), "damaged"),
    ],
)
def test_what_was_not_followed_is_refused(row: Sequence[str], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        Recording(request("-c", "k.cu"), records(BEGIN, row))


def test_a_cut_recording_is_refused() -> None:
    whole = records(BEGIN, ("O", "1", "k.cu", "f 1 2 3 4 5"))
    with pytest.raises(RefusedError, match="damaged"):
        Recording(request("-c", "k.cu"), whole[:-1])


def test_two_states_of_one_file_are_refused() -> None:
    rows = [("O", "1", "k.cu", "f 1 2 3 4 5"), ("O", "2", "k.cu", "f 1 2 3 9 9")]
    with pytest.raises(RefusedError, match="changed during the compile"):
        Recording(request("-c", "k.cu"), records(BEGIN, *rows))


# -- the store -------------------------------------------------------------------------------------


def test_large_files_are_read_once_for_all_processes(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_bytes(b"x" * (2 << 20))
    os.utime(tool, (1, 1))
    with kcache.KernelCache(tmp_path / "cache") as cache:
        first = Store(cache, clock=lambda: 2**62)
        digest = first.digests.digest(str(tool), tool.stat())
        first.remember_tools()
        again = Store(cache, clock=lambda: 2**62)
        assert again.digests.digest(str(tool), tool.stat()) == digest
        assert (first.digests.reads, again.digests.reads) == (1, 0)
        tool.write_bytes(b"y" * (2 << 20))
        assert again.digests.digest(str(tool), tool.stat()) != digest
