"""FileSystem: the kind of file system that a path is on, and whether other machines share it."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

_MOUNTS = "/proc/self/mountinfo"
#: File systems that several machines can mount at the same time. There, mapped memory and
#: locks are not shared between machines.
_NETWORK = frozenset(
    (
        *("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "gfs", "gfs2", "glusterfs"),
        "gpfs",
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3"),
        *("prl_fs", "smbfs", "vboxsf", "virtiofs", "wekafs"),
    )
)
#: FUSE file systems on a local disk. Any other FUSE file system may lead to a network.
_LOCAL_FUSE = frozenset(
    (
        *("fuse.bindfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs"),
        "fuse.ntfs-3g",
    )
)


#: File systems that record when a file was last changed, as a time that no program can set.
_KEEPS_CHANGE_TIME = frozenset(("btrfs", "ext4", "f2fs", "tmpfs", "xfs", "zfs"))


class FileSystem(NamedTuple):
    """The file system that a path is on.

    Attributes:
        kind: as in the table of mounts, such as `"ext4"` or `"nfs4"`; empty if unknown.
        mount_point: where it is mounted; empty if unknown.
        source: what is mounted, such as `"/dev/sda1"`.
        read_only: whether it is read-only at every mount point.
    """

    kind: str
    mount_point: str
    source: str = ""
    read_only: bool = False

    @property
    def shared(self) -> bool:
        """Whether other machines may use it at the same time (NFS, SMB, an unknown FUSE, ...)."""
        fuse = self.kind == "fuse" or self.kind.startswith("fuse.")
        return self.kind in _NETWORK or (fuse and self.kind not in _LOCAL_FUSE)

    @property
    def keeps_change_time(self) -> bool:
        """Whether a file's change time shows each change since the file system was made.

        The times on an image were chosen by its maker.
        """
        image = self.read_only or self.source.startswith("/dev/loop")
        return self.kind in _KEEPS_CHANGE_TIME and not image


def file_system(path: str | os.PathLike[str], *, mounts: str | None = None) -> FileSystem:
    """Return the file system of `path`, or of its nearest existing parent.

    It reads the table that `mounts` names, in the format of proc_pid_mountinfo(5). Without such a
    table (not Linux), kind and mount point are empty.
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
        # A later mount at the same place covers the earlier one.
        if _is_below(real, point) and len(point) >= len(best.mount_point):
            kind, source, options, *_ = (*after.split(" "), "", "")
            read_only = "ro" in options.split(",")
            best = FileSystem(kind, point, _unescaped(source), read_only)
    return best


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescaped(text: str) -> str:
    r"""Return a path as it is; the table writes blanks as `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
