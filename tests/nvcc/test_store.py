"""Starts, recordings and answers of nvcc: how they are parsed, compared and stored."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kcache.errors import CorruptEntryError
from kcache.nvcc.recording import Recording, RefusedError
from kcache.nvcc.request import Roots, Start
from kcache.nvrtc.answers import Answers
from kcache.nvrtc.files import FileDigests
from kcache.nvrtc.manifest import DependencySet
from kcache.nvrtc.search import RootedPath


def start(*arguments: str, directory: str = "/a/work", **variables: str) -> Start:
    texts = b"".join(f"{name}={value}".encode() + b"\0" for name, value in variables.items())
    told = b"".join(os.fsencode(text) + b"\0" for text in ("nvcc", *arguments))
    fields = ("/opt/cuda/bin/nvcc", directory, "18", "0", "0")
    return Start.of([*map(os.fsencode, fields), told, texts])


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
    roots = Roots(["/a/work", "/tmp/t"], "/a/work", {})
    assert roots.named(roots.numbered(text)) == text


@pytest.mark.parametrize(
    "text", ["/a/workshop/k.cu", "x/a/work/k.cu", "/b/a/work", "-Dx/a/work", "/a/work.cu"]
)
def test_similar_paths_are_not_roots(text: str) -> None:
    roots = Roots(["/a/work"], "/a/work", {})
    assert roots.numbered(text) == text


# -- recordings ------------------------------------------------------------------------------------

BEGIN = ("B", "1", "/opt/cuda/bin/nvcc", "f 1 2 3 4 5")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("X", "1", "/bin/static", "static\x1f"), "could not be recorded"),
        (("!", "1", "/somewhere", "opendir"), "a tool called opendir for /somewhere"),
        (("!", "1", "", "connect"), "a tool called connect for a descriptor"),
        (("O", "1", "/proc/1/maps", "f 1 2 3 4 5"), "/proc/1/maps is read"),
        (("O", "1", "k.cu", "!"), "changed a moment before"),
        (("O", "1", "k.cu", "-13"), "can't be read"),
        (("O", "1", "/pipe", "o 1 2 3 4 5"), "is not a regular file"),
        (("W", "1", "/dev/sda", "+"), "is written"),
        (("W", "1", "k.o", "="), "is read and written"),
        (("T", "2", "time", ""), "reads the system clock"),
        (("OO", "1", "k.cu", "f 1 2 3 4 5"), "damaged"),
    ],
)
def test_incomplete_recordings_are_refused(row: Sequence[str], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        Recording(start("-c", "k.cu"), records(BEGIN, row))


def test_a_cut_recording_is_refused() -> None:
    whole = records(BEGIN, ("O", "1", "k.cu", "f 1 2 3 4 5"))
    with pytest.raises(RefusedError, match="damaged"):
        Recording(start("-c", "k.cu"), whole[:-1])


def test_two_states_of_one_file_are_refused() -> None:
    rows = [("O", "1", "k.cu", "f 1 2 3 4 5"), ("O", "2", "k.cu", "f 1 2 3 9 9")]
    with pytest.raises(RefusedError, match="changed during the compile"):
        Recording(start("-c", "k.cu"), records(BEGIN, *rows))


# -- what is stored --------------------------------------------------------------------------------


def of_folder(folder: Path) -> tuple[Start, DependencySet]:
    """Make a start in `folder`, and its dependencies: a link, an access right, two equal files."""
    (folder / "equal").mkdir(parents=True)
    for name in ("k.cu", "equal/k.cu"):
        (folder / name).write_text("text")
        os.utime(folder / name, (1, 1))
    (folder / "link").symlink_to("equal")
    made = start("-c", "k.cu", directory=str(folder))
    os.utime(folder / "k.cu", (2, 2))  # now the two files have different times
    rooted, digests = made.roots.rooted, FileDigests()
    names = sorted(("k.cu", "equal/k.cu"))
    statuses = [(folder / name).stat() for name in names]
    answers = Answers(
        [(1, names)],
        b"".join(map(digests.digest, (str(folder / name) for name in names), statuses)),
        [(1, ["absent.h"])],
        *([], [], []),
        [(number, rooted(name)) for number, name in enumerate(names)],
        [],
        [("PATH", None)],
        plain=[(1, ["equal"])],
        links=[(RootedPath(-1, "equal"), rooted("link"))],
        access=[(os.X_OK, os.access(folder / "k.cu", os.X_OK), rooted("k.cu"))],
        times=[(0, number, rooted(name)) for number, name in enumerate(names)],
    )
    return made, DependencySet(answers.encode())


def relink(folder: Path) -> None:
    (folder / "link").unlink()
    (folder / "link").symlink_to("elsewhere")


def unlink(folder: Path) -> None:
    (folder / "link").unlink()
    (folder / "link").mkdir()


def add(folder: Path) -> None:
    (folder / "absent.h").symlink_to("nowhere")


def make_link(folder: Path) -> None:
    (folder / "equal").rename(folder / "moved")
    (folder / "equal").symlink_to("moved")


def make_executable(folder: Path) -> None:
    (folder / "k.cu").chmod(0o755)


def set_equal_times(folder: Path) -> None:
    os.utime(folder / "k.cu", (1, 1))


def make_one(folder: Path) -> None:
    (folder / "equal/k.cu").unlink()
    (folder / "equal/k.cu").hardlink_to(folder / "k.cu")


@pytest.mark.parametrize(
    "change", [relink, unlink, add, make_link, make_executable, set_equal_times, make_one]
)
def test_an_answer_that_changed_does_not_hold(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    made, answers = of_folder(tmp_path / "one")
    assert answers.holds(made.request, FileDigests())
    assert answers.holds(made.request, FileDigests(lambda: 2**62))
    change(tmp_path / "one")
    assert not answers.holds(made.request, FileDigests())


def test_a_long_text_is_compressed_and_checked() -> None:
    paths = [(1, [f"{number:064}" for number in range(4000)])]
    answers = Answers([], b"", paths, [], [], [], [], [], [])
    raw = answers.encode()
    assert len(raw) < 1 << 16
    assert Answers.decode(raw).absent == answers.absent
    for damaged in (raw[:4] + raw[4:6] + raw[5:], raw[:200]):
        with pytest.raises(CorruptEntryError):
            Answers.decode(damaged)


def test_verified_stamps_are_shared_between_locations(tmp_path: Path) -> None:
    made, answers = of_folder(tmp_path / "one")
    assert answers.holds(made.request, FileDigests(lambda: 2**62))
    answers.remember(made.request)
    later = DependencySet(answers.raw)
    later.stamps = {"another location": next(iter(answers.stamps.values()))}
    digests = FileDigests(lambda: 2**62)
    assert later.holds(made.request, digests)
    assert digests.reads == 1  # the directory in which the absent names are looked up
