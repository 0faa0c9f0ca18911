"""NVRTC: options, requests, keys, one compile, and the headers that its result depends on."""

from __future__ import annotations

from kcache.errors import CorruptEntryError

#: Identifies the layout of stored entries. Increment the number when the layout changes; entries
#: with an older number are then misses.
PRODUCER = "kcache-nvrtc/3"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kcache.entry import Entry

_NO_NAMES: dict[str, str] = {}


def names_and_log(entry: Entry) -> tuple[dict[str, str], bytes]:
    """Return the lowered names and the log in a kernel's entry, after checking their types.

    The log is returned as it is stored; see `places.log_at`.

    Raises:
        CorruptEntryError: the lowered names or the log have the wrong type.
    """
    metadata = entry.metadata
    names = metadata.get("lowered_names", _NO_NAMES)
    log = metadata.get("log", "")
    sound = type(names) is dict and type(log) is str
    if not sound or not all(type(lowered) is str for lowered in names.values()):  # type: ignore[union-attr]
        raise CorruptEntryError("the lowered names or the log have the wrong type")
    return names, log.encode("latin-1", "replace")  # type: ignore[return-value, union-attr]


def text_of_log(raw_log: bytes) -> str:
    """Return `raw_log` as text, without the NUL characters that NVRTC puts after each tool's part.

    Spaces and line breaks at both ends are removed, too.
    """
    return raw_log.decode(errors="replace").replace("\0", "").strip(" \n")
