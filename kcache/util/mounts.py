"""FileSystem: which file system a path is on, and whether other machines may use it, too."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

_MOUNTS = "/proc/self/mountinfo"
#: File systems that several machines can mount at the same time. On these, the machines share
#: neither mapped memory nor locks.
_NETWORK = frozenset(
    (
        *("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "gfs", "gfs2", "glusterfs"),
        "gpfs",
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3"),
        *("prl_fs", "smbfs", "vboxsf", "virtiofs", "wekafs"),
    )
)
#: FUSE file systems on a local disk. Any other FUSE file system may be on a network.
_LOCAL_FUSE = frozenset(
    (
        *("fuse.bindfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs"),
        "fuse.ntfs-3g",
    )
)


#: File systems that record the time of each file's last change, and let no program set this time.
_KEEPS_CHANGE_TIME = frozenset(("btrfs", "ext4", "f2fs", "tmpfs", "xfs", "zfs"))


class FileSystem(NamedTuple):
    """The file system that a path is on.

    Attributes:
        kind: its type in the table of mounts, such as `"ext4"` or `"nfs4"`; empty if unknown.
        mount_point: the directory where it is mounted; empty if unknown.
        source: what is mounted there, such as `"/dev/sda1"`; empty if unknown.
        read_only: whether the file system itself is read-only, not only at this mount point.
    """

    kind: str
    mount_point: str
    source: str = ""
    read_only: bool = False

    @property
    def shared(self) -> bool:
        """Whether other machines may use the file system at the same time.

        Unknown FUSE file systems are assumed to be shared.
        """
        fuse = self.kind == "fuse" or self.kind.startswith("fuse.")
        return self.kind in _NETWORK or (fuse and self.kind not in _LOCAL_FUSE)

    @property
    def keeps_change_time(self) -> bool:
        """Whether each change of a file, since the file system was made, has set its change time.

        This is false for a read-only file system and an image, because whoever made it could choose
        the times.
        """
        image = self.read_only or self.source.startswith("/dev/loop")
        return self.kind in _KEEPS_CHANGE_TIME and not image


def file_system(path: str | os.PathLike[str], *, mounts: str | None = None) -> FileSystem:
    """Return the file system that `path` is on, or would be on if it does not exist.

    `mounts` is the path of a table of mounts in the format of proc_pid_mountinfo(5), by default the
    table of this process. If the table can't be read, as on systems other than Linux, the result
    has an empty kind and mount point.
    """
    try:
        with open(mounts or _MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return FileSystem("", "")
    real = os.path.realpath(path)
    best = FileSystem("", "")
    for line in lines:
        # id, parent, major:minor, root, mount point, options, fields..., "-", kind, source, options
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 6:
            continue
        point = _unescaped(fields[4])
        # A later mount at the same directory hides the earlier one.
        if _is_below(real, point) and len(point) >= len(best.mount_point):
            kind, source, options, *_ = (*after.split(" "), "", "")
            read_only = "ro" in options.split(",")
            best = FileSystem(kind, point, _unescaped(source), read_only)
    return best


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescaped(text: str) -> str:
    r"""Replace octal escapes in a path, such as `\040` for a space, by their characters."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
