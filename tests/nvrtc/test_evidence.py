"""Evidence: a stamp is stored only with the digest that the file had when it had this stamp."""

import os
import time
from contextlib import chdir
from pathlib import Path

import pytest
from core.helpers import output_of
from nvrtc.reference import KERNEL, PTX, agreed, next_tick, write

import kcache
from kcache.nvrtc.files import FRESH_NS, NO_STAMP, durable, is_fresh, stamp_of
from kcache.util import mounts

pytestmark = pytest.mark.usefixtures("nvrtc")

SOURCE = '#include "n.h"\n' + KERNEL
OLD = time.time_ns() - 10 * FRESH_NS
#: Requests a kernel in a new process, which has read no file yet, and prints whether it was cached.
ELSEWHERE = """
import os, sys
from nvrtc.reference import PTX, agreed
import kcache
os.chdir(sys.argv[1])
with kcache.KernelCache(sys.argv[2]) as cache:
    print(agreed(cache, sys.argv[3], PTX.replace(include_paths=sys.argv[4:])).cached)
"""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the stamp of every file at once, however new the file is."""
    monkeypatch.setattr("kcache.nvrtc.files.FRESH_NS", -(10**12))


def release(folder: Path, value: int, *, old: bool) -> None:
    """Write a header. If `old`, set its modification time back; the change time can't be set."""
    header = write(folder / "n.h", f"#define V {value}\n")
    if old:
        os.utime(header, ns=(OLD, OLD))


def test_a_release_is_switched_and_switched_back(tree, cache, at_once, monkeypatch):
    """The new release is too fresh to be trusted; the old one is not. Another process agrees."""
    release(tree / "v1", 1, old=True)
    next_tick()
    release(tree / "v2", 2, old=False)
    options = PTX.replace(include_paths=["inc"])

    for name, fresh in (("v1", False), ("v2", True), ("v1", False)):
        # The fresh header is read each time, and its stamp is not stored.
        monkeypatch.setattr("kcache.nvrtc.files.FRESH_NS", 10**15 if fresh else -(10**12))
        Path("inc").unlink(missing_ok=True)
        Path("inc").symlink_to(name)
        agreed(cache, SOURCE, options)
        assert agreed(cache, SOURCE, options).cached
        output_of(ELSEWHERE, tree, cache.directory, SOURCE, "inc")


@pytest.mark.parametrize(
    ("mount", "trusted"),
    [
        ("ext4 /dev/sda1 rw", True),
        ("xfs /dev/sda1 rw,attr2", True),
        ("tmpfs tmpfs rw", True),
        ("zfs pool/home rw", True),
        ("overlay overlay rw,lowerdir=/a", False),
        ("fuse.sshfs host:/ rw", False),
        ("nfs4 host:/home rw", False),
        ("squashfs /dev/loop3 ro", False),
        ("ext4 /dev/loop3 rw", False),
        ("ext4 /dev/sda1 ro", False),
        ("unheard-of /dev/sda1 rw", False),
    ],
)
def test_only_unforgeable_stamps_are_trusted(tmp_path, monkeypatch, mount, trusted):
    """Stamps are trusted only on file systems where no user can set a change time."""
    table = write(tmp_path / "mounts", f"1 0 8:1 / / rw shared:1 - {mount}\n")
    monkeypatch.setattr("kcache.util.mounts._MOUNTS", str(table))
    stamp = stamp_of(os.stat(table))
    of_another_device = (*stamp[:4], stamp[4] + 1)
    assert mounts.file_system(table).keeps_change_time is trusted
    assert durable((str(table),) * 3, (of_another_device, stamp, NO_STAMP)) == (
        NO_STAMP,
        stamp if trusted else NO_STAMP,
        NO_STAMP,
    )


@pytest.mark.parametrize("which", ["content", "status"])
def test_a_stamp_is_trusted_once_its_change_is_older_than_the_coarsest_clock(which):
    changed = 10**18
    stamp = (5, changed, 1, 2, 3) if which == "content" else (5, 1, changed, 2, 3)
    ages = (0, FRESH_NS, FRESH_NS + 1)
    assert [is_fresh(stamp, changed + age) for age in ages] == [True, True, False]
    assert is_fresh(NO_STAMP, changed)


def test_a_directory_whose_first_survey_was_fresh(tree, cache):
    """Another process notices a header that appeared just after its directory was surveyed."""
    (tree / "first").mkdir()
    write(tree / "inc/n.h", "#define V 1\n")
    options = PTX.replace(include_paths=["first", "inc"])
    for value in (2, 3):
        agreed(cache, SOURCE, options)
        shadow = write(tree / "first/n.h", f"#define V {value}\n")
        output_of(ELSEWHERE, tree, cache.directory, SOURCE, "first", "inc")
        shadow.unlink()
        with chdir(tree):
            agreed(cache, SOURCE, options)


def test_stamps_of_merged_sets_belong_to_one_digest(tree, tmp_path, at_once):
    """Dependency sets are merged from a layer while the header changes and changes back."""
    header = write(tree / "inc/n.h", "#define V 1\n")
    options = PTX.replace(include_paths=["inc"])
    with kcache.KernelCache(tmp_path / "layer") as layer:
        for value in (1, 2):
            next_tick()
            header.write_text(f"#define V {value}\n")
            agreed(layer, SOURCE, options)
    remote = f"file://{tmp_path / 'layer'}?keep=1"
    for value in (1, 2, 1):
        next_tick()
        header.write_text(f"#define V {value}\n")
        with kcache.KernelCache(tmp_path / "cache", remote=remote) as cache:
            agreed(cache, SOURCE, options)
            assert agreed(cache, SOURCE, options).cached
        output_of(ELSEWHERE, tree, tmp_path / "cache", SOURCE, "inc")
