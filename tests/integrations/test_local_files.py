"""LocalFiles: the files stay below their cap, and files of other programs are not deleted."""

import json
import os
import shutil
import tracemalloc
from pathlib import Path

from kcache.integrations.local_files import GRACE, LocalFiles


def test_the_files_stay_below_their_cap(tmp_path: Path) -> None:
    """The files stay below their cap, even if the file with their sum or a folder is damaged."""
    now = 1e9

    def write(number: int, size: int = 1200) -> int:
        nonlocal now
        now += GRACE + 1
        files = LocalFiles(str(tmp_path), 10_000, clock=lambda: now)
        paths = files.write(f"K{number}", {"a": bytes(size - 300), "b": bytes([number]) * 300})
        assert all(map(os.path.exists, paths.values()))
        files.use("K1")
        return sum(path.stat().st_size for path in tmp_path.glob("K*/?"))

    (tmp_path / "K0").mkdir()
    (tmp_path / "K0" / "of another program").write_bytes(bytes(50_000))
    for number in range(40):
        if number == 20:
            shutil.rmtree(tmp_path / "K19")
            (tmp_path / "kcache.bytes").write_bytes(b"damage")
        assert write(number) <= 10_000
    assert (tmp_path / "K1").exists()
    assert not (tmp_path / "K2").exists()
    assert [path.name for path in (tmp_path / "K0").iterdir()] == ["of another program"]
    assert write(40, 6_000) <= 10_000
    now -= GRACE  # the last folder has just been used, so it is kept
    assert write(41, 6_000) == 13_200
    assert write(42) <= 10_000


def test_a_forged_record_deletes_nothing_outside(tmp_path: Path) -> None:
    """Forged records, which others may write into a framework's folder, delete no other files."""
    precious, cache = tmp_path / "precious", tmp_path / "cache"
    precious.write_text("data")
    (cache / "K").mkdir(parents=True)
    named = {"../../precious": 9_000, str(precious): 9_000, "a": 9_000}
    (cache / "K" / "kcache.files").write_text(json.dumps(named))
    os.utime(cache / "K", (0, 0))
    (cache / "L").mkdir()
    (cache / "L" / "kcache.files").symlink_to(precious)
    for number, odd in enumerate(('{"z": 1e400}', "[1]", '{"z": "large"}', "[" * 100_000)):
        (cache / f"M{number}").mkdir()
        (cache / f"M{number}" / "kcache.files").write_text(odd)
    for folder in ("L", "N"):
        LocalFiles(str(cache), 1_000).write(folder, {"a": bytes(900)})
    assert precious.read_text() == "data"


def test_a_large_record_and_a_large_file_are_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "K").mkdir()
    for name in ("kcache.files", "a"):
        (tmp_path / "K" / name).touch()
        os.truncate(tmp_path / "K" / name, 256 << 20)
    files = LocalFiles(str(tmp_path), 1_000)
    tracemalloc.start()
    try:
        for folder in ("K", "L"):
            files.write(folder, {"a": bytes(900)})
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_recently_used_directories_stay_and_drafts_are_deleted(tmp_path: Path) -> None:
    """A folder that is used during a deletion is kept; temporary files go with their folder."""
    now = 1e9
    files = LocalFiles(str(tmp_path), 10_000, clock=lambda: now)
    for folder in ("A", "B"):
        files.write(folder, {"a": bytes(4_000)})
        (tmp_path / folder / ".a.0123456789abcdef.tmp").write_bytes(bytes(3_000))
        files.use(folder)
        now += GRACE + 1
    delete = files._delete

    def use_and_delete(folder: str) -> None:
        files.use("B")  # as another process would
        delete(folder)

    files._delete = use_and_delete
    files.write("C", {"a": bytes(9_000)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["B", "C", "kcache.bytes"]
